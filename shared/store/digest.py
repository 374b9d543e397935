"""A digest of an inventory: two sides that hold the same copies have equal ones, and unequal ones say where to look.

Pure, and used by both sides: a worker keeps one up to date with each event it numbers, the catalog computes one from
its rows. It is a tree of height three: per tier a total, and below it ``BUCKETS`` buckets by the first bits of the
keys, each with a count and an exclusive or of 64 bits of each key's SHA-256. Adding or removing a copy is O(1) and
undoes itself. Two inventories that differ have equal digests with a chance of about 2 ** -64.

A bucket with a difference is then compared copy by copy; the others are not shipped. With a million copies a bucket
holds about 250.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping

from shared.ids import BlockKey
from shared.kv import Tier
from shared.messages import StoredBlock, TierDigest

BUCKET_BITS = 12
BUCKETS = 1 << BUCKET_BITS

_PACKED = struct.Struct(f"<{BUCKETS}I{BUCKETS}Q")
"""All counts, then all exclusive ors: 12 bytes a bucket."""

Buckets = Mapping[int, tuple[int, int]]
"""{bucket: (count, exclusive or)}; empty buckets are left out."""


def bucket_of(key: bytes) -> int:
    """The first ``BUCKET_BITS`` bits of the key."""
    return (key[0] << 8 | key[1]) >> (16 - BUCKET_BITS)


def mix(key: bytes) -> int:
    """64 bits that a set of any keys, however regular, scatters over: the first of the key's SHA-256."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")


class Digest:
    """The digest of one inventory. Copies must be added when they come and removed when they go, each once."""

    def __init__(self) -> None:
        #: {tier: (counts, exclusive ors)}, one number a bucket
        self._tiers: dict[Tier, tuple[array[int], array[int]]] = {}

    def add(self, key: BlockKey, tier: Tier) -> None:
        """A copy came."""
        self._change(key, tier, 1)

    def remove(self, key: BlockKey, tier: Tier) -> None:
        """A copy went."""
        self._change(key, tier, -1)

    def pack(self) -> list[TierDigest]:
        """As it travels."""
        return [TierDigest(tier=tier, count=total, buckets=_PACKED.pack(*counts, *xors))
                for tier, (counts, xors) in sorted(self._tiers.items()) if (total := sum(counts))]

    def _change(self, key: BlockKey, tier: Tier, by: int) -> None:
        if tier not in self._tiers:
            self._tiers[tier] = (array("I", bytes(4 * BUCKETS)), array("Q", bytes(8 * BUCKETS)))
        counts, xors = self._tiers[tier]
        bucket = bucket_of(key)
        counts[bucket] += by
        xors[bucket] ^= mix(key)


def unpack(tier: TierDigest) -> Buckets:
    """The buckets of one tier; raises ``ValueError`` when they are of another form."""
    if len(tier.buckets) != _PACKED.size:
        raise ValueError(f"{len(tier.buckets)} bytes are no {BUCKETS} packed buckets of {_PACKED.size} bytes")
    numbers = _PACKED.unpack(tier.buckets)
    return {bucket: (numbers[bucket], numbers[BUCKETS + bucket]) for bucket in range(BUCKETS) if numbers[bucket]}


def differing(ours: Mapping[Tier, Buckets], theirs: Mapping[Tier, Buckets]) -> list[int]:
    """The buckets that differ in some tier, in order."""
    found: set[int] = set()
    for tier in ours.keys() | theirs.keys():
        mine, other = ours.get(tier, {}), theirs.get(tier, {})
        found.update(bucket for bucket in mine.keys() | other.keys() if mine.get(bucket) != other.get(bucket))
    return sorted(found)


class Inventory:
    """Every copy held, by bucket and tier, with its digest."""

    def __init__(self) -> None:
        #: {(bucket, tier): {key: copy}}; no empty ones
        self._buckets: dict[tuple[int, Tier], dict[BlockKey, StoredBlock]] = {}
        self.digest = Digest()

    def store(self, blocks: Iterable[StoredBlock]) -> None:
        """These are held from now on; one that was held already changes nothing but what is said of it."""
        for block in blocks:
            held = self._buckets.setdefault((bucket_of(block.key), block.tier), {})
            if block.key not in held:
                self.digest.add(block.key, block.tier)
            held[block.key] = block

    def evict(self, keys: Iterable[BlockKey], tier: Tier) -> None:
        """These are gone from ``tier``; one that was not held changes nothing."""
        for key in keys:
            place = (bucket_of(key), tier)
            held = self._buckets.get(place, {})
            if held.pop(key, None) is not None:
                self.digest.remove(key, tier)
                if not held:
                    del self._buckets[place]

    def blocks(self, buckets: Iterable[int]) -> Iterator[StoredBlock]:
        """The copies in ``buckets``."""
        for bucket in buckets:
            for tier in Tier:
                yield from self._buckets.get((bucket, tier), {}).values()
