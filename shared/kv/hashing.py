"""Chained block keys: ``key[i] = sha256(key[i-1] ‖ tokens of block i as little-endian u32)``.

The parent of block 0 is :func:`root_key`, a digest of the cache spec and the salt; so equal keys mean equal
tokens at equal positions under the same model, for the same tenant. Golden vectors lie in ``tests/golden``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.ids import BlockKey
from shared.kv.spec import CacheSpec

KEY_BYTES = 32

Tokens = npt.NDArray[np.uint32]


def root_key(spec: CacheSpec, salt: str) -> BlockKey:
    """The parent of every first block of ``salt`` under ``spec``."""
    encoded = salt.encode()
    return BlockKey(hashlib.sha256(b"moonbus/1\n" + spec.canonical() + b"salt\n" + encoded).digest())


def block_keys(root: BlockKey, tokens: Sequence[int] | Tokens, block_tokens: int) -> list[BlockKey]:
    """Keys of the *full* blocks of ``tokens``; the partial tail has none."""
    raw = memoryview(pack_tokens(tokens))
    stride = 4 * block_tokens
    keys: list[BlockKey] = []
    parent: bytes = root
    for start in range(0, len(raw) - stride + 1, stride):
        digest = hashlib.sha256(parent)
        digest.update(raw[start:start + stride])
        parent = digest.digest()
        keys.append(BlockKey(parent))
    return keys


def pack_tokens(tokens: Sequence[int] | Tokens) -> bytes:
    """Token ids as they travel: little-endian u32, back to back."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def unpack_tokens(packed: bytes) -> Tokens:
    """Read-only uint32 array over ``packed``."""
    return np.frombuffer(packed, dtype="<u4")


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    """Block keys as they travel: 32 bytes each, back to back."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """The keys in ``packed``; raises ``ValueError`` when its length is no multiple of 32."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of {KEY_BYTES}-byte block keys")
    return [BlockKey(packed[i:i + KEY_BYTES]) for i in range(0, len(packed), KEY_BYTES)]
