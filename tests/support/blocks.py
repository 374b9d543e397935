"""Chains of blocks whose bytes follow from their keys."""

from __future__ import annotations

import hashlib

from shared.ids import BlockKey
from shared.kv import CacheSpec
from shared.messages import StoredBlock

SPEC = CacheSpec(model="tiny", weights_digest="00" * 32, tokenizer_digest="11" * 32, dtype="float32", layers=2,
                 kv_heads=1, head_dim=8, block_tokens=4, max_context=4096)
"""Blocks of 512 bytes."""
ROOT = BlockKey(bytes(32))


def make_chain(name: str, length: int, *, tenant: str = "", spec: CacheSpec = SPEC) -> list[StoredBlock]:
    """``length`` blocks, each the next one's parent; equal names give equal keys."""
    blocks: list[StoredBlock] = []
    parent = ROOT
    for depth in range(length):
        key = BlockKey(hashlib.sha256(f"{name}/{depth}".encode()).digest())
        blocks.append(StoredBlock(key=key, parent=parent, depth=depth, nbytes=spec.block_bytes, tenant=tenant,
                                  tokens=spec.block_tokens))
        parent = key
    return blocks


def payload(key: BlockKey, spec: CacheSpec = SPEC) -> bytes:
    """The bytes of that block."""
    return hashlib.shake_128(key).digest(spec.block_bytes)
