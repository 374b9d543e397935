"""Block keys: chained, stable on every machine, never shared across models or tenants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv import (
    CacheSpec,
    block_keys,
    pack_keys,
    pack_tokens,
    root_key,
    spec_difference,
    unpack_keys,
    unpack_tokens,
)
from shared.kv.hashing import KEY_BYTES

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "block_keys.json").read_text())

SPEC = CacheSpec(model="m", weights_digest="w", tokenizer_digest="t", dtype="float32", layers=2, kv_heads=2, head_dim=8,
                 block_tokens=4, max_context=128)

token_lists = st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=70)


@pytest.mark.parametrize("vector", GOLDEN["vectors"], ids=lambda vector: vector["name"])
def test_golden_vectors(vector: dict[str, Any]) -> None:
    spec = msgspec.convert(vector["spec"], CacheSpec)
    root = root_key(spec, vector["salt"])
    assert spec.digest == vector["digest"]
    assert root.hex() == vector["root"]
    keys = block_keys(root, vector["tokens"], spec.block_tokens)
    assert [key.hex() for key in keys] == vector["keys"]


@given(token_lists, st.integers(min_value=1, max_value=16))
def test_only_full_blocks_have_keys(tokens: list[int], block_tokens: int) -> None:
    keys = block_keys(root_key(SPEC, ""), tokens, block_tokens)
    assert len(keys) == len(tokens) // block_tokens
    assert all(len(key) == KEY_BYTES for key in keys)


@given(token_lists, token_lists)
def test_keys_agree_exactly_as_far_as_the_tokens_do(left: list[int], right: list[int]) -> None:
    root = root_key(SPEC, "")
    ours, theirs = block_keys(root, left, 4), block_keys(root, right, 4)
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    agree = sum(1 for a, b in zip(ours, theirs, strict=False) if a == b)
    assert agree == common // 4


@given(token_lists)
def test_a_key_depends_on_its_chain_and_can_be_continued(tokens: list[int]) -> None:
    root = root_key(SPEC, "")
    keys = block_keys(root, tokens, 4)
    if len(keys) >= 2:
        assert block_keys(keys[0], tokens[4:], 4) == keys[1:]


@pytest.mark.parametrize("change", [
    {"model": "n"}, {"weights_digest": "x"}, {"tokenizer_digest": "x"}, {"dtype": "bfloat16"}, {"layers": 3},
    {"kv_heads": 1}, {"head_dim": 16}, {"block_tokens": 8}, {"layout_version": 2}, {"adapter_digest": "a"},
])
def test_any_difference_in_the_spec_separates(change: dict[str, Any]) -> None:
    other = msgspec.structs.replace(SPEC, **change)
    assert root_key(other, "t") != root_key(SPEC, "t")
    assert other.digest != SPEC.digest
    name = next(iter(change))
    assert spec_difference(SPEC, other) == f"{name}: {getattr(SPEC, name)} here, {getattr(other, name)} there"


def test_salts_separate() -> None:
    assert len({root_key(SPEC, salt) for salt in ("", "a", "b", "a\n", "ä")}) == 5


@given(token_lists)
def test_tokens_travel_unchanged(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)).tolist() == tokens
    assert pack_tokens(np.asarray(tokens, dtype=np.uint32)) == pack_tokens(tokens)


@given(token_lists)
def test_keys_travel_unchanged(tokens: list[int]) -> None:
    keys = block_keys(root_key(SPEC, ""), tokens, 4)
    assert unpack_keys(pack_keys(keys)) == keys


def test_a_torn_packet_of_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes are no whole number"):
        unpack_keys(b"x" * 33)


def test_geometry() -> None:
    assert SPEC.layer_bytes == 2 * 2 * 4 * 8 * 4
    assert SPEC.block_bytes == 2 * SPEC.layer_bytes
    assert msgspec.structs.replace(SPEC, dtype="bfloat16").block_bytes == SPEC.block_bytes // 2
