"""The paged pool: KV blocks of fixed size in slots, read and written by the attention, sent by the transfer engine.

Slot ``i`` lies at offset ``i * spec.block_bytes`` of the pool's memory. On a CPU that memory *is* the pool. On an
accelerator the pool is device memory with the same slot numbers, and the memory is its mirror in the host:
:meth:`KVPool.to_host` before sending, :meth:`KVPool.to_device` after receiving.

Who owns which slot is the store agent's business; the pool only holds bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from shared.kv import CacheSpec

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVPool:
    """``num_blocks`` slots for blocks of ``spec``.

    ``memory`` is the host's side, at least ``num_blocks * spec.block_bytes`` writable bytes, which must outlive the
    pool; ``None`` lets the pool allocate its own, zeroed.
    """

    def __init__(self, spec: CacheSpec, num_blocks: int, memory: memoryview | None = None, device: str = "cpu") -> None:
        self.spec, self.num_blocks, self.device = spec, num_blocks, torch.device(device)
        self.nbytes = num_blocks * spec.block_bytes
        shape = (num_blocks, spec.layers, 2, spec.kv_heads, spec.block_tokens, spec.head_dim)
        dtype = DTYPES[spec.dtype]
        if memory is None:
            self.host = torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        else:
            flat = memory.cast("B")
            if flat.readonly or flat.nbytes < self.nbytes:
                raise ValueError(f"the pool needs {self.nbytes} writable bytes, got {flat.nbytes}"
                                 f"{' read-only' if flat.readonly else ''}")
            self.host = torch.frombuffer(flat, dtype=dtype, count=self.nbytes // dtype.itemsize).view(shape)
        self._pinned = memory is not None and self.device.type == "cuda" and _pin(self.host)
        self.blocks = self.host if self.device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=self.device)
        """[slots, layers, 2 (keys, values), kv_heads, block_tokens, head_dim], on ``device``."""
        self.pages = self.blocks.view(-1, spec.block_tokens, spec.head_dim)
        """The same memory, a page a (slot, layer, keys or values, head): [pages, block_tokens, head_dim]."""
        self.vectors = self.blocks.view(-1, spec.head_dim)
        """The same memory, a vector a (page, token): [pages * block_tokens, head_dim]."""

    def close(self) -> None:
        """Before the memory goes away. Idempotent."""
        if self._pinned:
            self._pinned = False
            _cudart().cudaHostUnregister(self.host.data_ptr())

    @property
    def layer_pages(self) -> int:
        """Pages of one layer of one block: those of layer ``l``, slot ``s`` are
        ``[(s * layers + l) * layer_pages, (s * layers + l + 1) * layer_pages)``."""
        return 2 * self.spec.kv_heads

    def to_host(self, blocks: Sequence[int], layer: int | None = None) -> None:
        """Copies slots (one layer of them, or all) into the memory; returns when the bytes are there. No-op on CPU."""
        if self.blocks is not self.host:
            self._copy(self.host, self.blocks, blocks, layer)

    def to_device(self, blocks: Sequence[int], layer: int | None = None) -> None:
        """Copies slots from the memory to the device; returns when they can be attended to. No-op on CPU."""
        if self.blocks is not self.host:
            self._copy(self.blocks, self.host, blocks, layer)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, blocks: Sequence[int], layer: int | None) -> None:
        # One copy a slot: each is one contiguous run of megabytes, or of one layer's kilobytes.
        for block in blocks:
            if layer is None:
                target[block].copy_(source[block], non_blocking=True)
            else:
                target[block, layer].copy_(source[block, layer], non_blocking=True)
        torch.cuda.synchronize(self.device)


def _pin(host: torch.Tensor) -> bool:
    """Keeps the caller's memory in place, so that the device copies from and to it by itself; false if it may not."""
    code = int(_cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if code:
        _log.warning("action=pool_not_pinned bytes=%d cuda_error=%d", host.nbytes, code)
    return not code


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
