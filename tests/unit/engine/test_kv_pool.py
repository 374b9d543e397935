"""The pool is the memory it was given, laid out as the cache spec says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shared.engine import kv_pool
from shared.engine.kv_pool import KVPool
from shared.kv import CacheSpec

SPEC = CacheSpec(model="m", weights_digest="", tokenizer_digest="", dtype="float32", layers=3, kv_heads=2, head_dim=4,
                 block_tokens=8, max_context=64)


def test_slots_lie_where_transfers_expect_them() -> None:
    memory = bytearray(5 * SPEC.block_bytes)
    pool = KVPool(SPEC, 5, memoryview(memory))
    pool.blocks[3, 1] = 1.5

    assert pool.nbytes == len(memory)
    slot = np.frombuffer(memory, np.float32, SPEC.block_bytes // 4, offset=3 * SPEC.block_bytes)
    layer = slot.reshape(SPEC.layers, -1)
    assert (layer[1] == 1.5).all()
    assert layer[1].nbytes == SPEC.layer_bytes
    assert np.frombuffer(memory, np.float32).sum() == pytest.approx(layer[1].sum())


def test_what_arrives_in_the_memory_is_attended_to() -> None:
    memory = bytearray(2 * SPEC.block_bytes)
    pool = KVPool(SPEC, 2, memoryview(memory))
    memory[SPEC.block_bytes:] = np.arange(SPEC.block_bytes // 4, dtype=np.float32).tobytes()
    pool.to_device([1])
    assert torch.equal(pool.blocks[1].flatten(), torch.arange(SPEC.block_bytes // 4, dtype=torch.float32))
    assert pool.pages[SPEC.layers * pool.layer_pages, 0, 0] == 0
    assert pool.pages[SPEC.layers * pool.layer_pages, 0, 1] == 1
    pool.to_host([0, 1], layer=2)


def test_memory_is_released_with_the_pool() -> None:
    memory = bytearray(SPEC.block_bytes)
    view = memoryview(memory)
    pool = KVPool(SPEC, 1, view)
    del pool
    view.release()
    memory.clear()  # raises BufferError while anything still looks at it


@pytest.mark.parametrize("memory", [memoryview(bytearray(SPEC.block_bytes - 1)), memoryview(bytes(SPEC.block_bytes))])
def test_memory_that_does_not_fit_is_refused(memory: memoryview) -> None:
    with pytest.raises(ValueError, match=f"needs {SPEC.block_bytes} writable bytes"):
        KVPool(SPEC, 1, memory)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_half_precision(dtype: str, expected: torch.dtype) -> None:
    pool = KVPool(CacheSpec(**{**{name: getattr(SPEC, name) for name in SPEC.__struct_fields__}, "dtype": dtype}), 1)
    assert pool.blocks.dtype == expected
    assert pool.nbytes == pool.spec.block_bytes == SPEC.block_bytes // 2


@pytest.mark.parametrize("code", [0, 1])
def test_a_callers_memory_is_pinned_for_a_gpu_if_it_may_be(code: int, monkeypatch: pytest.MonkeyPatch,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    """CUDA's runtime is stood in for: this says what it is asked, not what it does."""
    asked: list[tuple[Any, ...]] = []

    class Runtime:
        def cudaHostRegister(self, *arguments: Any) -> int:
            asked.append(arguments)
            return code

    monkeypatch.setattr(kv_pool, "_cudart", Runtime)
    memory = torch.zeros(3, dtype=torch.float32)
    assert kv_pool._pin(memory) == (code == 0)
    assert asked == [(memory.data_ptr(), 12, 0)]
    assert ("action=pool_not_pinned bytes=12 cuda_error=1" in caplog.text) == (code == 1)
