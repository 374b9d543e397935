"""The cache spec: two workers may share KV only if every field of it is equal."""

from __future__ import annotations

import hashlib

import msgspec

from shared.errors import Bug
from shared.ids import SpecDigest

LAYOUT_VERSION = 1
"""Version of the block layout below; part of the spec, so old and new bytes never mix."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OPAQUE_DTYPE = "bytes"
"""Of a spec whose blocks are values of a store's clients, which nobody here looks into."""


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and geometry of a model's KV cache.

    A block of ``block_tokens`` tokens is one contiguous array of shape
    ``[layers, 2, kv_heads, block_tokens, head_dim]`` (2: keys, then values) and dtype ``dtype``; so one layer of
    one block is contiguous too, which is what layer-wise transfer sends.
    """

    model: str
    """What clients name."""
    weights_digest: str
    """Hex sha256 over the weights' files."""
    tokenizer_digest: str
    """Hex sha256 over tokenizer and chat template: ids mean the same text."""
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``; or ``bytes``, see :meth:`opaque`."""
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    max_context: int
    """Longest prompt plus answer in tokens that the model takes."""
    layout_version: int = LAYOUT_VERSION
    adapter_digest: str = ""
    """Hex digest of an adapter's weights; empty for none."""

    @classmethod
    def opaque(cls, name: str, nbytes: int) -> CacheSpec:
        """Identity of values of ``nbytes`` bytes that are no KV: one "layer" of as many, one value a block.

        Workers and clients share values only under equal names and sizes, as KV under equal specs.
        """
        if nbytes <= 0:
            raise Bug(f"values of {nbytes} bytes")
        return cls(model=name, weights_digest="", tokenizer_digest="", dtype=OPAQUE_DTYPE, layers=1, kv_heads=1,
                   head_dim=nbytes, block_tokens=1, max_context=1)

    @property
    def is_opaque(self) -> bool:
        """Made by :meth:`opaque`."""
        return self.dtype == OPAQUE_DTYPE

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        if self.is_opaque:
            return self.head_dim
        return 2 * self.kv_heads * self.block_tokens * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layers * self.layer_bytes

    def blocks_of(self, tokens: int) -> int:
        """How many blocks ``tokens`` tokens take, the last one perhaps partial."""
        return -(-tokens // self.block_tokens)

    @property
    def digest(self) -> SpecDigest:
        """Hex sha256 of the canonical encoding; equal digests mean KV may be shared."""
        return SpecDigest(hashlib.sha256(self.canonical()).hexdigest())

    def canonical(self) -> bytes:
        """One line a field, ``name=value``, names sorted, UTF-8: the same on every machine and version."""
        fields = msgspec.structs.asdict(self)
        return "".join(f"{name}={fields[name]}\n" for name in sorted(fields)).encode()


def spec_difference(ours: CacheSpec, theirs: CacheSpec) -> str:
    """The differing fields with both values, as ``dtype: float32 here, bfloat16 there``; empty when equal."""
    if ours == theirs:  # each worker that registers is compared with all others
        return ""
    left, right = msgspec.structs.asdict(ours), msgspec.structs.asdict(theirs)
    return "; ".join(f"{name}: {left[name]} here, {right[name]} there" for name in left if left[name] != right[name])
