"""Who holds which block: {block key: {worker: tier}}, asked for the longest prefix of a prompt per worker.

Theory of operation
-------------------

Every worker has a *slot*, a place of four bits in an integer: three say in which tiers the worker holds a block,
the fourth that it is promised to hold it soon (see ``promises``). So {worker: tier} of a block is one integer, and
"all workers that have blocks 0 to i" is the AND over i + 1 integers: one pass over a prompt's keys gives the prefix
length of every worker, whatever their number.

A promise counts for the worker itself only: a prompt placed there is computed after the one that brings the blocks.
Others can pull only what is held.

The index is bounded by the number of (worker, block) pairs. When it is full, new pairs are dropped and counted:
a missing entry costs a recomputation, never a wrong answer. Removing a worker walks its own keys only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shared.errors import Bug
from shared.ids import BlockKey, WorkerId
from shared.kv import Tier

_SLOT_BITS = 4
_TIER_BIT = {Tier.DEVICE: 0, Tier.DRAM: 1, Tier.SSD: 2}
_PROMISED_BIT = 3
_HELD = 0b0111
_ALL = 0b1111


@dataclass(frozen=True)
class Match:
    """What the index knows of one prompt; a snapshot, valid for ever but soon out of date."""

    own: dict[WorkerId, int]
    """Leading blocks each worker holds or is promised; workers with none are left out."""
    held: Sequence[int]
    """Per leading block, until the first one no sender holds: the first bit of the slot of each sender that does."""
    _workers: Sequence[WorkerId | None]
    _runs: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def covered(self) -> int:
        """Leading blocks each of which some sender holds."""
        return len(self.held)

    def run(self, start: int) -> tuple[int, list[WorkerId]]:
        """The longest run of blocks from ``start`` that single workers hold: its end and those workers."""
        if start not in self._runs:
            end, holders = start, 0
            while end < len(self.held) and (rest := (holders & self.held[end]) if end > start else self.held[end]):
                end, holders = end + 1, rest
            self._runs[start] = (end, holders)
        end, holders = self._runs[start]
        return end, [worker for bit in _bits(holders) if (worker := self._workers[bit // _SLOT_BITS]) is not None]


class PrefixIndex:
    """The copy of every worker's set of blocks. All operations are idempotent."""

    def __init__(self, *, max_blocks: int = 20_000_000) -> None:
        self._max_blocks = max_blocks
        #: {block key: bits of all workers}; never 0
        self._blocks: dict[BlockKey, int] = {}
        #: {worker: slot}, and the reverse with None for free slots
        self._slots: dict[WorkerId, int] = {}
        self._workers: list[WorkerId | None] = []
        #: the first bit of every slot
        self._ones = 0
        #: {worker: {block key}}: all and only keys in whose integer the worker has a held bit, or a promised one
        self._held: dict[WorkerId, set[BlockKey]] = {}
        self._promised: dict[WorkerId, set[BlockKey]] = {}
        #: sum of the sizes of ``_held``
        self._pairs = 0
        self.dropped_blocks = 0
        """Pairs not taken because the index was full."""

    def __len__(self) -> int:
        """(worker, block) pairs held."""
        return self._pairs

    def blocks_of(self, worker: WorkerId) -> int:
        """Blocks ``worker`` is known to hold."""
        return len(self._held.get(worker, ()))

    def tiers(self, key: BlockKey) -> dict[WorkerId, Tier]:
        """Who holds ``key``, each in its fastest tier."""
        bits = self._blocks.get(key, 0)
        found = {}
        for worker, slot in self._slots.items():
            mine = bits >> (slot * _SLOT_BITS)
            for tier, bit in _TIER_BIT.items():
                if mine >> bit & 1:
                    found[worker] = tier
                    break
        return found

    def store(self, worker: WorkerId, blocks: Iterable[tuple[BlockKey, Tier]]) -> None:
        """``worker`` holds these blocks from now on."""
        shift, held = self._slot(worker) * _SLOT_BITS, self._held[worker]
        for key, tier in blocks:
            if key not in held:
                if self._pairs >= self._max_blocks:
                    self.dropped_blocks += 1
                    continue
                held.add(key)
                self._pairs += 1
            self._blocks[key] = self._blocks.get(key, 0) | 1 << (shift + _TIER_BIT[tier])

    def evict(self, worker: WorkerId, keys: Iterable[BlockKey], tier: Tier) -> None:
        """``worker`` no longer holds these blocks in ``tier``; it may in another."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        shift, held = slot * _SLOT_BITS, self._held[worker]
        gone = ~(1 << (shift + _TIER_BIT[tier]))
        for key in keys:
            if key in held:
                bits = self._blocks[key] & gone
                self._put(key, bits)
                if not bits >> shift & _HELD:
                    held.remove(key)
                    self._pairs -= 1

    def replace(self, worker: WorkerId, blocks: Iterable[tuple[BlockKey, Tier]]) -> None:
        """``worker`` holds exactly these blocks."""
        self._slot(worker)
        self._clear(worker, self._held[worker], _HELD)
        self._pairs -= len(self._held[worker])
        self._held[worker] = set()
        self.store(worker, blocks)

    def remove(self, worker: WorkerId) -> None:
        """``worker`` is gone, with all it held and was promised."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        self._clear(worker, self._held[worker] | self._promised[worker], _ALL)
        self._pairs -= len(self._held.pop(worker))
        del self._promised[worker], self._slots[worker]
        self._workers[slot] = None

    def promise(self, worker: WorkerId, keys: Iterable[BlockKey]) -> None:
        """``worker`` will hold these blocks soon."""
        shift, promised = self._slot(worker) * _SLOT_BITS, self._promised[worker]
        for key in keys:
            promised.add(key)
            self._blocks[key] = self._blocks.get(key, 0) | 1 << (shift + _PROMISED_BIT)

    def unpromise(self, worker: WorkerId, keys: Iterable[BlockKey]) -> None:
        """These promises were kept, or will not be."""
        promised = self._promised.get(worker)
        if promised:
            gone = promised.intersection(keys)
            self._clear(worker, gone, 1 << _PROMISED_BIT)
            promised -= gone

    def match(self, keys: Sequence[BlockKey], senders: Iterable[WorkerId]) -> Match:
        """Longest prefixes of ``keys`` in one pass; only from ``senders`` blocks may be pulled."""
        ones = self._ones
        may_send = sum(1 << (self._slots[sender] * _SLOT_BITS) for sender in senders if sender in self._slots)
        own: dict[WorkerId, int] = {}
        held: list[int] = []
        alive, holes = ones, False
        for i, key in enumerate(keys):
            bits = self._blocks.get(key, 0)
            holders = (bits | bits >> 1 | bits >> 2) & ones
            going_on = alive & (holders | bits >> _PROMISED_BIT)
            if ended := alive ^ going_on:
                self._ended(own, ended, i)
            alive = going_on
            sending = holders & may_send
            holes = holes or not sending
            if not holes:
                held.append(sending)
            elif not alive:
                break
        else:
            self._ended(own, alive, len(keys))
        return Match(own, held, tuple(self._workers))

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when the two directions of the index disagree."""
        for kind, sets in ((_HELD, self._held), (1 << _PROMISED_BIT, self._promised)):
            pairs = {(worker, key) for key, bits in self._blocks.items() for worker, slot in self._slots.items()
                     if bits >> (slot * _SLOT_BITS) & kind}
            if pairs != {(worker, key) for worker, keys in sets.items() for key in keys}:
                raise Bug(f"prefix index: bits {kind:04b} disagree with the workers' own sets")
        if self._pairs != sum(map(len, self._held.values())) or not all(self._blocks.values()):
            raise Bug(f"prefix index: counts {self._pairs} pairs or keeps a block nobody has")

    def _ended(self, own: dict[WorkerId, int], bits: int, length: int) -> None:
        if length:
            for bit in _bits(bits):
                worker = self._workers[bit // _SLOT_BITS]
                if worker is not None:
                    own[worker] = length

    def _slot(self, worker: WorkerId) -> int:
        slot = self._slots.get(worker)
        if slot is None:
            try:
                slot = self._workers.index(None)
                self._workers[slot] = worker
            except ValueError:
                slot = len(self._workers)
                self._workers.append(worker)
                self._ones |= 1 << (slot * _SLOT_BITS)
            self._slots[worker] = slot
            self._held[worker], self._promised[worker] = set(), set()
        return slot

    def _clear(self, worker: WorkerId, keys: Iterable[BlockKey], kind: int) -> None:
        slot = self._slots.get(worker)
        if slot is not None:
            gone = ~(kind << (slot * _SLOT_BITS))
            for key in keys:
                self._put(key, self._blocks[key] & gone)

    def _put(self, key: BlockKey, bits: int) -> None:
        if bits:
            self._blocks[key] = bits
        else:
            del self._blocks[key]


def _bits(mask: int) -> Iterator[int]:
    """Positions of the ones in ``mask``, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
