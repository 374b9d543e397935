"""The vocabulary of KV cache: what a block is called, what it looks like, where it may lie.

Pure and tiny on purpose: every service imports it. ``spec`` says when KV may be shared and how large it is,
``hashing`` gives block keys, ``tiers`` names the memories.
"""

from shared.kv.hashing import (
    KEY_BYTES,
    block_keys,
    pack_keys,
    pack_tokens,
    root_key,
    unpack_keys,
    unpack_tokens,
)
from shared.kv.spec import CacheSpec, spec_difference
from shared.kv.tiers import Tier

__all__ = [
    "KEY_BYTES", "CacheSpec", "Tier", "block_keys", "pack_keys", "pack_tokens", "root_key", "spec_difference",
    "unpack_keys", "unpack_tokens",
]
