"""Who holds which block, cluster-wide, with its place in its chain: what the planner plans on.

Theory of operation
-------------------

Every worker has a *slot* of three bits in an integer, one a tier in which it holds a block. So the holders of a
block are one integer, and "who holds all of this path" is the AND over its blocks. Copies made at our own request are
known by the request that their news names, so that a new leader knows them too.

**Bounds.** Blocks, copies and the memory they take are bounded. When the map is full, blocks that came first go for new
ones, but for those that ``is_kept`` (warm ones); what goes, or is not taken since nothing may go, is *unseen*: counted
at each of its holders, not replicated, protected, trimmed or counted for quotas, and serving does not notice. A worker
with unseen blocks is told by :meth:`ReplicaMap.incomplete` once there is room again: ask it anew.

**A worker leaves** at once for whoever asks: its slot is masked out. Its keys are taken apart later, ``sweep`` by
``sweep``, so that a death of a worker with millions of blocks never holds up the loop; the slot is used again when
that is done. Nothing ever walks other workers' blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from shared.errors import Bug
from shared.ids import BlockKey, WorkerId
from shared.kv import Tier
from shared.messages import StoredBlock

_SLOT_BITS = 3
_TIER_BIT = {Tier.DEVICE: 1, Tier.DRAM: 2, Tier.SSD: 4}
_HELD = 0b111
_LOOKED_AT = 1_024
"""Blocks looked at, at a time, for some that may go."""
_MOST_TENANTS = 65_536
"""Names of tenants kept once each; with more, the table of names begins anew."""

BLOCK_BYTES = 360
"""About what a block takes here: key, place in its chain, holders, its entry in the table."""
COPY_BYTES = 110
"""About what a copy takes here: its entry among its worker's keys."""


class Place:
    """A block's place in its chain; the same for all its copies."""

    __slots__ = ("depth", "holders", "nbytes", "parent", "tenant", "tokens")

    def __init__(self, block: StoredBlock, tenant: str) -> None:
        self.parent, self.depth, self.nbytes, self.tokens = block.parent, block.depth, block.nbytes, block.tokens
        self.tenant = tenant
        #: bits of all workers, also of those that left and are not swept yet
        self.holders = 0

    def block(self, key: BlockKey) -> StoredBlock:
        """As a message names it."""
        return StoredBlock(key=key, parent=self.parent, depth=self.depth, nbytes=self.nbytes, tenant=self.tenant,
                           tokens=self.tokens)


@dataclass
class _Held:
    """What one worker holds."""

    slot: int
    #: keys in the order they came: all and only those in whose holders the slot has a held bit
    keys: dict[BlockKey, None] = field(default_factory=dict)
    nbytes: int = 0
    """Over all tiers."""
    #: keys of copies made at our request
    ours: set[BlockKey] = field(default_factory=set)
    #: {tenant: bytes over all tiers}; no zeros
    tenants: dict[str, int] = field(default_factory=dict)
    unseen: int = 0
    """Blocks, each once a tier, that it holds and that the map had no room for."""


class ReplicaMap:
    """See the module. All operations are idempotent."""

    def __init__(self, *, max_blocks: int, max_copies: int, max_bytes: int, ours: str,
                 is_kept: Callable[[BlockKey], bool] = lambda key: False) -> None:
        self._max_blocks, self._max_copies, self._max_bytes, self._ours = max_blocks, max_copies, max_bytes, ours
        self._is_kept = is_kept
        self._futile = 0
        """So many blocks are not taken before it is looked again for some that may go."""
        #: {key: its place}; never one without holders; in the order in which they came, or were kept
        self._places: dict[BlockKey, Place] = {}
        self._held: dict[WorkerId, _Held] = {}
        #: {slot: whose it is}; None when free
        self._slots: list[WorkerId | None] = []
        #: what workers that left still have in ``_places``
        self._leaving: list[_Held] = []
        self._copies = 0
        """Pairs of worker and block, leaving ones included."""
        self._live = 0
        """Every bit of the slots of workers that are here."""
        self._ones = 0
        """The first bit of every slot."""
        self._tenants: dict[str, str] = {}
        """One string object a tenant, not one a block."""
        self.unseen_blocks = 0
        """Blocks not taken, or gone for others, ever."""

    # Reading.

    def __len__(self) -> int:
        """Blocks known."""
        return len(self._places)

    @property
    def copies(self) -> int:
        """Pairs of worker and block."""
        return self._copies

    @property
    def nbytes(self) -> int:
        """About how much memory the map takes."""
        return len(self._places) * BLOCK_BYTES + self._copies * COPY_BYTES

    @property
    def is_full(self) -> bool:
        """A new block is taken only for another one."""
        return (len(self._places) >= self._max_blocks or self._copies >= self._max_copies
                or self.nbytes + BLOCK_BYTES + COPY_BYTES > self._max_bytes)

    def _has_room(self, place: Place | None) -> bool:
        """For one more copy: of the block at ``place``, or of a new one."""
        if place is None:
            return not self.is_full
        return self._copies < self._max_copies and self.nbytes + COPY_BYTES <= self._max_bytes

    def get(self, key: BlockKey) -> Place | None:
        """The block's place; ``None`` when no live worker holds it."""
        place = self._places.get(key)
        return place if place is not None and place.holders & self._live else None

    def parent(self, key: BlockKey) -> BlockKey | None:
        """What the block continues; ``None`` when nobody holds it."""
        place = self.get(key)
        return None if place is None else place.parent

    def held(self, keys: Iterable[BlockKey]) -> list[Place]:
        """The places of the leading ``keys`` that somebody holds, not all of them the same worker."""
        found = []
        for key in keys:
            place = self.get(key)
            if place is None:
                break
            found.append(place)
        return found

    def holders(self, key: BlockKey) -> list[WorkerId]:
        """Who holds it, in order of name."""
        place = self._places.get(key)
        return [] if place is None else self.named(place.holders)

    def mask(self, key: BlockKey) -> int:
        """The first bit of each live holder's slot; 0 for a block nobody holds."""
        place = self._places.get(key)
        if place is None:
            return 0
        bits = place.holders & self._live
        return (bits | bits >> 1 | bits >> 2) & self._ones

    def masks(self, keys: Iterable[BlockKey]) -> list[int]:
        """:meth:`mask` of each of ``keys``."""
        live, ones, places = self._live, self._ones, self._places
        found = []
        for key in keys:
            place = places.get(key)
            bits = place.holders & live if place is not None else 0
            found.append((bits | bits >> 1 | bits >> 2) & ones)
        return found

    def tiers(self, key: BlockKey) -> dict[WorkerId, list[Tier]]:
        """{holder: tiers, fastest first}."""
        place = self._places.get(key)
        if place is None:
            return {}
        return {worker: [tier for tier, bit in _TIER_BIT.items() if mine & bit]
                for worker, held in sorted(self._held.items())
                if (mine := place.holders >> (held.slot * _SLOT_BITS) & _HELD)}

    def holds(self, worker: WorkerId, key: BlockKey) -> bool:
        """Whether ``worker`` holds it in some tier."""
        held = self._held.get(worker)
        return held is not None and key in held.keys

    def bit(self, worker: WorkerId) -> int:
        """What stands for the worker in a :meth:`mask`; 0 for one that is not here."""
        held = self._held.get(worker)
        return 1 << held.slot * _SLOT_BITS if held else 0

    def named(self, mask: int) -> list[WorkerId]:
        """Whose slots ``mask`` has bits of, live ones in order of name."""
        found, bits = [], mask & self._live
        while bits:
            slot = ((bits & -bits).bit_length() - 1) // _SLOT_BITS
            worker = self._slots[slot]
            assert worker is not None, "only slots of workers that are here are live"
            found.append(worker)
            bits &= ~(_HELD << slot * _SLOT_BITS)
        return sorted(found)

    def path(self, key: BlockKey, *, limit: int) -> list[BlockKey]:
        """The chain from its root to ``key``; empty when a block of it is unknown, or it is longer than ``limit``."""
        chain: list[BlockKey] = []
        places, live = self._places, self._live
        while len(chain) < limit:
            place = places.get(key)
            if place is None or not place.holders & live:
                return []
            chain.append(key)
            if place.depth == 0:
                return chain[::-1]
            key = place.parent
        return []

    def keys_of(self, worker: WorkerId) -> Iterator[BlockKey]:
        """What the worker holds, oldest first; good until the next change."""
        held = self._held.get(worker)
        return iter(held.keys if held else ())

    def blocks_of(self, worker: WorkerId) -> int:
        """How many blocks the worker holds."""
        return len(self._held[worker].keys) if worker in self._held else 0

    def bytes_of(self, worker: WorkerId) -> int:
        """Bytes the worker holds, over all tiers."""
        return self._held[worker].nbytes if worker in self._held else 0

    def ours_of(self, worker: WorkerId) -> Collection[BlockKey]:
        """The worker's copies that were made at our request; good until the next change."""
        return self._held[worker].ours if worker in self._held else ()

    def unseen_of(self, worker: WorkerId) -> int:
        """How many blocks the worker holds, each once a tier, of which nothing is known here."""
        return self._held[worker].unseen if worker in self._held else 0

    def usage(self, worker: WorkerId, tenant: str) -> int:
        """Bytes of a tenant's blocks on the worker, over all tiers."""
        return self._held[worker].tenants.get(tenant, 0) if worker in self._held else 0

    def incomplete(self) -> list[WorkerId]:
        """Workers with unseen blocks, if a tenth of the map is free again."""
        room = (len(self._places) < 0.9 * self._max_blocks and self._copies < 0.9 * self._max_copies
                and self.nbytes < 0.9 * self._max_bytes)
        return sorted(worker for worker, held in self._held.items() if held.unseen) if room else []

    # Changing.

    def store(self, worker: WorkerId, blocks: Iterable[StoredBlock]) -> None:
        """``worker`` holds these from now on."""
        held = self._held.get(worker) or self._come(worker)
        shift = held.slot * _SLOT_BITS
        for block in blocks:
            key = block.key
            place = self._places.get(key)
            if key not in held.keys:
                if not self._has_room(place) and not self._make_room():
                    held.unseen += 1
                    self.unseen_blocks += 1
                    continue
                place = self._places.get(key)  # it may have gone for itself
                if place is None:
                    place = self._places[key] = Place(block, self._tenant(block.tenant))
                held.keys[key] = None
                self._copies += 1
            assert place is not None, "a held key has a place"
            before = place.holders
            place.holders |= _TIER_BIT[block.tier] << shift
            if place.holders != before:
                self._count(held, place, place.nbytes)
            if block.request == self._ours:
                held.ours.add(key)

    def evict(self, worker: WorkerId, keys: Iterable[BlockKey], tier: Tier) -> None:
        """``worker`` no longer holds these in ``tier``; it may in another."""
        held = self._held.get(worker)
        if held is None:
            return
        shift, bit = held.slot * _SLOT_BITS, _TIER_BIT[tier]
        for key in keys:
            if key not in held.keys:
                held.unseen = max(0, held.unseen - 1)
                continue
            place = self._places[key]
            if place.holders >> shift & bit:
                place.holders &= ~(bit << shift)
                self._count(held, place, -place.nbytes)
            if not place.holders >> shift & _HELD:
                self._drop(held, key, place)

    def replace(self, worker: WorkerId, blocks: Iterable[StoredBlock]) -> None:
        """``worker`` holds exactly these."""
        self.remove(worker)
        self.store(worker, blocks)
        self._held.get(worker) or self._come(worker)

    def remove(self, worker: WorkerId) -> None:
        """``worker`` is gone; call :meth:`sweep` until it has nothing left to do."""
        held = self._held.pop(worker, None)
        if held is not None:
            self._live &= ~(_HELD << held.slot * _SLOT_BITS)
            self._leaving.append(held)

    def sweep(self, limit: int) -> bool:
        """Takes apart up to ``limit`` copies of workers that left; whether more is to do."""
        while self._leaving and limit > 0:
            held = self._leaving[0]
            for key in [key for key, _ in zip(held.keys, range(limit), strict=False)]:
                self._drop(held, key, self._places[key])
                limit -= 1
            if not held.keys:
                self._slots[held.slot] = None
                self._leaving.pop(0)
        return bool(self._leaving)

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when the two directions of the map, or its counts, disagree."""
        copies = 0
        for held, worker in [*((h, w) for w, h in self._held.items()), *((h, None) for h in self._leaving)]:
            shift = held.slot * _SLOT_BITS
            keys = {key for key, place in self._places.items() if place.holders >> shift & _HELD}
            if keys != set(held.keys):
                raise Bug(f"replica map: slot {held.slot} of {worker or 'one that left'} disagrees with its keys")
            copies += len(keys)
            if worker is None:
                continue
            nbytes: dict[str, int] = {}
            for key in keys:
                place = self._places[key]
                tiers = (place.holders >> shift & _HELD).bit_count()
                nbytes[place.tenant] = nbytes.get(place.tenant, 0) + tiers * place.nbytes
            if {t: n for t, n in nbytes.items() if n} != held.tenants or sum(nbytes.values()) != held.nbytes:
                raise Bug(f"replica map: bytes of {worker} are miscounted")
            if not held.ours <= keys:
                raise Bug(f"replica map: {worker} is said to have copies of ours that it does not hold")
        if copies != self._copies or not all(place.holders for place in self._places.values()):
            raise Bug(f"replica map: counts {self._copies} copies of {copies}, or keeps a block nobody has")
        if len(self._places) > self._max_blocks or self._copies > self._max_copies:
            raise Bug("replica map: over its bounds")

    # Inside.

    def _come(self, worker: WorkerId) -> _Held:
        try:
            slot = self._slots.index(None)
            self._slots[slot] = worker
        except ValueError:
            slot = len(self._slots)
            self._slots.append(worker)
            self._ones |= 1 << slot * _SLOT_BITS
        self._live |= _HELD << slot * _SLOT_BITS
        held = self._held[worker] = _Held(slot)
        return held

    def _tenant(self, name: str) -> str:
        if len(self._tenants) >= _MOST_TENANTS:
            self._tenants.clear()
        return self._tenants.setdefault(name, name)

    def _make_room(self) -> bool:
        """Looks at the next blocks in order of coming for such that may go; whether there is room now."""
        if self._futile:
            self._futile -= 1
            return False
        most = max(1, len(self._places) // 64)
        for key in list(islice(self._places, _LOOKED_AT)):
            place = self._places[key]
            if place.holders & ~self._live or self._is_kept(key):
                self._places[key] = self._places.pop(key)  # to the end: others are looked at next
            else:
                self._forget(key, place)
                most -= 1
                if not most:
                    break
        if self.is_full:
            self._futile = _LOOKED_AT
        return not self.is_full

    def _forget(self, key: BlockKey, place: Place) -> None:
        """The block is unseen from now on, at all that hold it."""
        for worker in self.named(place.holders):
            held = self._held[worker]
            tiers = (place.holders >> held.slot * _SLOT_BITS & _HELD).bit_count()
            held.unseen += tiers
            self.unseen_blocks += tiers
            self._count(held, place, -tiers * place.nbytes)
            self._drop(held, key, place)

    def _drop(self, held: _Held, key: BlockKey, place: Place) -> None:
        shift = held.slot * _SLOT_BITS
        held.ours.discard(key)
        place.holders &= ~(_HELD << shift)
        del held.keys[key]
        self._copies -= 1
        if not place.holders:
            del self._places[key]

    def _count(self, held: _Held, place: Place, nbytes: int) -> None:
        held.nbytes += nbytes
        left = held.tenants.get(place.tenant, 0) + nbytes
        if left:
            held.tenants[place.tenant] = left
        else:
            held.tenants.pop(place.tenant, None)


def leading(masks: Sequence[int], wanted: int) -> int:
    """How many leading ``masks`` have all bits of ``wanted``."""
    for i, mask in enumerate(masks):
        if mask & wanted != wanted:
            return i
    return len(masks)
