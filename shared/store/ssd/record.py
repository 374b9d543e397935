"""One slot's record in the index file: which block lies in the slot, and how to tell that it still does.

Pure. A record has a fixed size and a checksum over all of it, so that the index can be read in one go and every record
judged by itself. Numbers are little-endian. The layout never changes within a version; a golden vector is in the tests.

======  =====  ==============================================================================
offset  bytes  what
======  =====  ==============================================================================
0       4      ``MBSR``
4       2      version, 1
6       2      flags: bit 0 the block was received from another worker
8       8      generation: which write of this directory filled the slot, counted from 1
16      32     block key
48      32     key of its parent
80      4      depth in its chain
84      4      tokens
88      8      nbytes of the block
96      8      xxh3-64 of those bytes
104     2      length of the tenant's name
106     128    tenant, UTF-8, the rest zero
234     14     zero
248     8      xxh3-64 of the 248 bytes before
======  =====  ==============================================================================

A record of nothing but zeros is an empty slot.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from shared.ids import MAX_TENANT_BYTES, BlockKey
from shared.kv import Tier
from shared.messages import StoredBlock

RECORD_BYTES = 256
EMPTY = bytes(RECORD_BYTES)

_MAGIC = b"MBSR"
_VERSION = 1
_RECEIVED = 1
_BODY = struct.Struct("<4sHHQ32s32sIIQQH128s14x")
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Record:
    """What a slot holds; ``payload_xxh3`` proves its bytes."""

    block: StoredBlock
    generation: int
    payload_xxh3: int


class Damaged(ValueError):
    """Bytes that are neither an empty record nor one of ours."""


def fits(block: StoredBlock) -> bool:
    """Can a record name this block? (A tenant's name may be too long.)"""
    return len(block.tenant.encode()) <= MAX_TENANT_BYTES


def encode(record: Record) -> bytes:
    """``RECORD_BYTES`` bytes."""
    block, tenant = record.block, record.block.tenant.encode()
    body = _BODY.pack(_MAGIC, _VERSION, _RECEIVED if block.origin == "received" else 0, record.generation, block.key,
                      block.parent, block.depth, block.tokens, block.nbytes, record.payload_xxh3, len(tenant), tenant)
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def decode(raw: bytes | memoryview) -> Record | None:
    """The record in ``raw``; ``None`` for an empty slot. Raises :class:`Damaged`."""
    if raw == EMPTY:
        return None
    if len(raw) != RECORD_BYTES:
        raise Damaged(f"{len(raw)} bytes of {RECORD_BYTES}")
    body = raw[:_BODY.size]
    if xxhash.xxh3_64_intdigest(body) != _SUM.unpack_from(raw, _BODY.size)[0]:
        raise Damaged("checksum")
    magic, version, flags, generation, key, parent, depth, tokens, nbytes, payload, length, tenant = _BODY.unpack(body)
    if magic != _MAGIC or version != _VERSION:
        raise Damaged(f"version {version} of {magic!r}")
    try:
        name = tenant[:length].decode()
    except UnicodeDecodeError as error:
        raise Damaged("tenant") from error
    block = StoredBlock(key=BlockKey(key), parent=BlockKey(parent), depth=depth, nbytes=nbytes, tier=Tier.SSD,
                        origin="received" if flags & _RECEIVED else "computed", tenant=name, tokens=tokens)
    return Record(block, generation, payload)
