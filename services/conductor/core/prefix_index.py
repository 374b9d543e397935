"""Who holds which block: {block key: {worker: tier}}, asked for the longest prefix of a prompt per worker and tier.

Theory of operation
-------------------

A real cluster has millions of blocks and few distinct answers to "who holds it": blocks of one prompt move together.
So every distinct answer is kept once, as a *row*, and a block is no more than {fingerprint: number of its row}.

* A row is three integers with a bit for each worker: who holds it in device memory, in DRAM, on SSD. Every worker has
  a *slot*, the position of its bit.
* "All workers that have blocks 0 to i" is the AND over the rows of those blocks. Neighbours mostly share a row, and
  then there is nothing to do: one pass over a prompt gives the prefix of every worker in every tier.
* Events are applied in batches: the blocks of a batch mostly share their old row, thus their new one, and one call
  moves them all.
* A *fingerprint* is the key, a SHA-256, folded to 60 bits. With ten million blocks a key that is not there is taken
  for another one once in 10^11 questions. It costs what any outdated entry costs: the owner, who compares whole keys,
  has nothing to send, and the block is computed.

Removing a worker is clearing the bit of its slot in ``_live``. What that leaves behind (bits of slots that are
nobody's, blocks that nobody holds) is cleaned up by :meth:`PrefixIndex.tidy`, a slice at a time.
A snapshot that comes in pages is gathered in a slot that is not live yet; the last page makes it the worker's slot,
and until then the old one answers.

Bounds: (worker, block) pairs and bytes. When one is reached new pairs are dropped and counted: a missing entry costs
a recomputation, never a wrong answer. What is known already is still updated and removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from services.conductor.core.table import make_table
from shared.errors import Bug
from shared.ids import WorkerId
from shared.kv import KEY_BYTES, Tier

Fingerprint = int
"""A block key folded to 60 bits."""

BLOCK_BYTES: Final = 100
"""Memory an indexed block takes in a dictionary: its fingerprint (32), and an entry at the worst fill (24 + 4 a place).
The compiled part's table takes less than half; what is believed does not depend on whether it is there."""
ROW_BYTES: Final = 700
"""Memory a distinct set of holders takes: five integers of a bit a worker, and two dictionary entries."""

_FOLD_BITS: Final = np.uint64(60)
_FOLD_MASK: Final = np.uint64((1 << 60) - 1)
_TIERS: Final = (Tier.DEVICE, Tier.DRAM, Tier.SSD)
_PLACE: Final = {tier: place for place, tier in enumerate(_TIERS)}
_MOST_STEPS: Final = 65_536
"""Remembered transitions from row to row; all are forgotten at once when there are more."""
_FEWEST_ROWS: Final = 1024
"""Rows that no block has are not looked for below this number of rows."""
_MANY_BITS: Final = 24
"""From so many on an array finds the ones of an integer sooner than a loop."""
_FEWEST_DEAD: Final = 4096
"""Blocks that nobody holds are not looked for below this number of them."""


def fingerprints(packed: bytes) -> list[Fingerprint]:
    """Those of packed keys; what is left of a torn last key has none."""
    return prints_of(packed).tolist()  # type: ignore[no-any-return]


def prints_of(packed: bytes) -> npt.NDArray[np.uint64]:
    """The same as an array."""
    words = np.frombuffer(packed, dtype="<u8", count=len(packed) // KEY_BYTES * 4)
    halves = words[::2] ^ words[1::2]
    folded = halves[::2] ^ halves[1::2]
    prints: npt.NDArray[np.uint64] = (folded >> _FOLD_BITS) ^ (folded & _FOLD_MASK)
    return prints


@dataclass(frozen=True)
class Match:
    """What is known of one prompt; a snapshot, valid for ever but soon out of date."""

    within: Mapping[Tier, dict[WorkerId, int]]
    """{tier: {worker: leading blocks it holds in that tier or a faster one}}; workers with none are left out."""
    runs: Sequence[tuple[int, int]]
    """(end, slots of the senders that hold its blocks), of stretches of leading blocks that the same ones hold, until
    the first block that no sender does."""
    _names: _Names
    own: dict[WorkerId, int] = field(default_factory=dict)
    """Leading blocks each worker holds in any tier, or is promised; workers with none are left out."""
    unmade: dict[WorkerId, int] = field(default_factory=dict)
    """{worker that is promised more than it holds: leading blocks it holds}."""
    on_ssd: dict[WorkerId, int] = field(default_factory=dict)
    """{worker some of whose leading blocks are on SSD: leading blocks it has in memory}."""
    _found: dict[int, tuple[int, list[WorkerId]]] = field(default_factory=dict)

    @property
    def covered(self) -> int:
        """Leading blocks each of which some sender holds."""
        return self.runs[-1][0] if self.runs else 0

    def run(self, start: int) -> tuple[int, list[WorkerId]]:
        """The longest run of blocks from ``start`` that single senders hold: its end and those senders."""
        found = self._found.get(start)
        if found is None:
            end, holders = start, -1
            for until, senders in self.runs:
                if until > start:
                    if not (both := holders & senders):
                        break
                    end, holders = until, both
            found = self._found[start] = end, self._names.of(holders) if end > start else []
        return found


class PrefixIndex:
    """The copy of every worker's set of blocks. All operations are idempotent."""

    def __init__(self, *, max_blocks: int = 20_000_000, max_bytes: int = 4 << 30) -> None:
        self._max_blocks, self._max_bytes = max_blocks, max_bytes
        #: {fingerprint: row}
        self._row_of = make_table()
        #: of each row: slots that hold its blocks in device memory, DRAM, SSD; in the two first; in any; its blocks
        self._masks: list[tuple[int, int, int]] = [(0, 0, 0)]
        self._fast: list[int] = [0]
        self._any: list[int] = [0]
        self._sizes: list[int] = [0]
        #: {masks: row}; rows that came to have the masks of another one, by the end of a worker, are left out
        self._rows: dict[tuple[int, int, int], int] = {(0, 0, 0): 0}
        self._free_rows: list[int] = []
        self._collect_rows_at = _FEWEST_ROWS
        #: {(row, slot, place of tier, is stored): row}
        self._steps: dict[tuple[int, int, int, bool], int] = {}
        #: {worker: slot}; {worker: slot in which its snapshot is gathered}
        self._slots: dict[WorkerId, int] = {}
        self._gathering: dict[WorkerId, int] = {}
        #: the reverse of ``_slots``, ``None`` for slots that are not live
        self._workers: list[WorkerId | None] = []
        #: the same for matches to keep; ``None`` after a change
        self._known_names: _Names | None = None
        #: blocks of each slot
        self._held: list[int] = []
        self._live = self._retired = 0
        self._free_slots: list[int] = []
        self._pairs = 0
        self._tidying = _Tidying()
        #: the senders of the last question, and their slots
        self._senders: tuple[object, int] = ((), 0)
        self.dropped_blocks = 0
        """Pairs not taken because the index was full."""

    def __len__(self) -> int:
        """(worker, block) pairs held, those of snapshots under way counted in."""
        return self._pairs

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes, estimated by what it counts."""
        return len(self._row_of) * BLOCK_BYTES + len(self._masks) * ROW_BYTES

    @property
    def rows(self) -> int:
        """Distinct sets of holders in memory."""
        return len(self._masks) - len(self._free_rows)

    @property
    def is_tidy(self) -> bool:
        """Whether :meth:`tidy` has nothing to do."""
        return not self._retired and self._tidying.sweep is None

    def blocks_of(self, worker: WorkerId) -> int:
        """Blocks ``worker`` is known to hold."""
        slot = self._slots.get(worker)
        return self._held[slot] if slot is not None else 0

    def tiers(self, block: Fingerprint) -> dict[WorkerId, Tier]:
        """Who holds ``block``, each in its fastest tier."""
        found: dict[WorkerId, Tier] = {}
        (row,) = self._row_of.rows((block,))
        for tier, mask in zip(_TIERS, self._masks[row or 0], strict=True):
            for slot in _bits(mask & self._live):
                worker = self._workers[slot]
                if worker is not None:
                    found.setdefault(worker, tier)
        return found

    def store(self, worker: WorkerId, blocks: Sequence[Fingerprint], tier: Tier) -> None:
        """``worker`` holds these blocks in ``tier`` from now on."""
        slot = self._slots.get(worker)
        self._store(self._join(worker) if slot is None else slot, blocks, tier)

    def evict(self, worker: WorkerId, blocks: Sequence[Fingerprint], tier: Tier) -> None:
        """``worker`` no longer holds these blocks in ``tier``; it may in another."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        for old, group in self._by_row(blocks):
            if old is not None:
                new = self._step(old, slot, tier, stored=False)
                if new != old:
                    self._evict(group, old, new, slot)

    def gather(self, worker: WorkerId, blocks: Sequence[Fingerprint], tier: Tier) -> None:
        """Part of a snapshot: nothing of it shows before :meth:`swap`."""
        slot = self._gathering.get(worker)
        if slot is None:
            slot = self._gathering[worker] = self._slot()
        self._store(slot, blocks, tier)

    def drop_gathered(self, worker: WorkerId) -> None:
        """The snapshot is given up, or begins again."""
        slot = self._gathering.pop(worker, None)
        if slot is not None:
            self._retire(slot)

    def swap(self, worker: WorkerId) -> None:
        """``worker`` holds exactly what was gathered."""
        old, new = self._slots.get(worker), self._gathering.pop(worker, None)
        if old is not None:
            self._retire(old)
        self._join(worker, new)

    def remove(self, worker: WorkerId) -> None:
        """``worker`` is gone, with all it held."""
        self.drop_gathered(worker)
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self._retire(slot)

    def match(self, blocks: Sequence[Fingerprint] | npt.NDArray[np.uint64], senders: Iterable[WorkerId]) -> Match:
        """Longest prefixes of ``blocks`` in one pass; only from ``senders`` blocks may be pulled.

        The slots of the senders are remembered for as long as the very same object is given.
        """
        if senders is not self._senders[0]:
            self._senders = (senders, sum(1 << self._slots[sender] for sender in senders if sender in self._slots))
        may_send = self._senders[1]
        fasts, anys, masks = self._fast, self._any, self._masks
        #: of each tier: (leading blocks, slots of which that many are held)
        ends: tuple[list[tuple[int, int]], ...] = ([], [], [])
        device = fast = held = self._live
        runs: list[tuple[int, int]] = []
        sending, is_covered = 0, True
        for i, row in self._row_of.stretches(np.asarray(blocks, dtype=np.uint64)):
            if is_covered and i:
                runs.append((i, sending))
            if ended := device & ~masks[row][0]:
                ends[0].append((i, ended))
                device ^= ended
            if ended := fast & ~fasts[row]:
                ends[1].append((i, ended))
                fast ^= ended
            if ended := held & ~anys[row]:
                ends[2].append((i, ended))
                held ^= ended
            sending = anys[row] & may_send
            is_covered = is_covered and bool(sending)
            if not held and not is_covered:
                break
        else:
            if count := len(blocks):
                if is_covered:
                    runs.append((count, sending))
                for end, slots in zip(ends, (device, fast, held), strict=True):
                    end.append((count, slots))
        anywhere = self._lengths(ends[2])
        in_memory, on_ssd = anywhere, {}
        if ends[1] != ends[2]:
            in_memory = self._lengths(ends[1])
            on_ssd = {worker: fast for worker, every in anywhere.items() if (fast := in_memory.get(worker, 0)) < every}
        within = dict(zip(_TIERS, (self._lengths(ends[0]), in_memory, anywhere), strict=True))
        return Match(within, runs, self._names, anywhere.copy(), on_ssd=on_ssd)

    def tidy(self, budget: int) -> bool:
        """Cleans up after workers that are gone, about ``budget`` rows or blocks of it; whether nothing is left to do.

        Changes no answer.
        """
        work = self._tidying
        if work.sweep is not None:
            some = next(work.sweep, None)
            if some is None:
                work.sweep = None
            else:
                self._tidy_blocks(some)
        elif self._retired:
            work.slots = work.slots or self._retired
            until = min(work.row + budget, len(self._masks))
            self._tidy_rows(work.slots, work.row, until)
            work.row = until
            if until == len(self._masks):
                self._reuse(work.slots)
                work.slots = work.row = 0
                dead = sum(size for size, mask in zip(self._sizes, self._any, strict=True) if not mask)
                if dead > _FEWEST_DEAD and 4 * dead > len(self._row_of):
                    work.sweep = self._row_of.sweep(budget)
        return self.is_tidy

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when what is counted is not what is there."""
        sizes, held = [0] * len(self._masks), [0] * len(self._held)
        for some in self._row_of.sweep(4096):
            for row in self._row_of.rows(some):
                sizes[row or 0] += 1
        if sizes != self._sizes:
            raise Bug("prefix index: sizes of rows are not the numbers of their blocks")
        shown = self._live | sum(1 << slot for slot in self._gathering.values())
        for row, masks in enumerate(self._masks):
            if (self._fast[row], self._any[row]) != (masks[0] | masks[1], masks[0] | masks[1] | masks[2]):
                raise Bug(f"prefix index: row {row} contradicts itself")
            if self._any[row] & ~(shown | self._retired):
                raise Bug(f"prefix index: row {row} has bits of slots that nobody has")
            for slot in _bits(self._any[row] & shown):
                held[slot] += sizes[row]
        if held != self._held or self._pairs != sum(held):
            raise Bug(f"prefix index: counts {self._pairs} pairs, has {sum(held)}")
        if {slot: worker for worker, slot in self._slots.items()} != {
                slot: worker for slot, worker in enumerate(self._workers) if worker is not None}:
            raise Bug("prefix index: slots and workers disagree")

    # Blocks

    def _by_row(self, blocks: Sequence[Fingerprint]) -> Iterable[tuple[int | None, dict[Fingerprint, int]]]:
        """``blocks`` by the row they have, ``None`` for those that are not known, each once."""
        rows = self._row_of.rows(blocks)
        kinds = set(rows)
        if len(kinds) == 1:
            return ((rows[0], dict.fromkeys(blocks, 0)),)
        groups: dict[int | None, dict[Fingerprint, int]] = {row: {} for row in kinds}
        for block, row in zip(blocks, rows, strict=True):
            groups[row][block] = 0
        return groups.items()

    def _store(self, slot: int, blocks: Sequence[Fingerprint], tier: Tier) -> None:
        for old, group in self._by_row(blocks):
            new = self._step(old or 0, slot, tier, stored=True)
            if new == old:
                continue
            is_new_pair = not self._any[old or 0] >> slot & 1
            if is_new_pair:
                room = self._room(is_new_block=old is None)
                if len(group) > room:
                    self.dropped_blocks += len(group) - room
                    group = dict(islice(group.items(), room))
                self._pairs += len(group)
                self._held[slot] += len(group)
            self._row_of.put(group, new)
            self._sizes[new] += len(group)
            if old is not None:
                self._sizes[old] -= len(group)

    def _room(self, *, is_new_block: bool) -> int:
        """Pairs that may be added."""
        room = self._max_blocks - self._pairs
        if is_new_block:
            room = min(room, (self._max_bytes - self.nbytes) // BLOCK_BYTES)
        return max(room, 0)

    def _evict(self, group: dict[Fingerprint, int], old: int, new: int, slot: int) -> None:
        self._sizes[old] -= len(group)
        if self._any[new]:
            self._row_of.put(group, new)
            self._sizes[new] += len(group)
        else:
            self._row_of.drop(group)
        if self._any[old] >> slot & 1 and not self._any[new] >> slot & 1:
            self._pairs -= len(group)
            self._held[slot] -= len(group)

    # Rows

    def _step(self, row: int, slot: int, tier: Tier, *, stored: bool) -> int:
        """The row of a block of ``row`` once ``slot`` holds it in ``tier``, or no longer does."""
        step = (row, slot, _PLACE[tier], stored)
        after = self._steps.get(step)
        if after is None:
            masks = list(self._masks[row])
            masks[step[2]] = masks[step[2]] | 1 << slot if stored else masks[step[2]] & ~(1 << slot)
            after = self._row((masks[0] & ~self._retired, masks[1] & ~self._retired, masks[2] & ~self._retired))
            if len(self._steps) >= _MOST_STEPS:
                self._steps.clear()
            self._steps[step] = after
        return after

    def _row(self, masks: tuple[int, int, int]) -> int:
        row = self._rows.get(masks)
        if row is None:
            if self.rows >= self._collect_rows_at:
                self._collect_rows()
            if self._free_rows:
                row = self._free_rows.pop()
            else:
                row = len(self._masks)
                self._masks.append(masks)
                for column in (self._fast, self._any, self._sizes):
                    column.append(0)
            self._put(row, masks)
            self._rows[masks] = row
        return row

    def _put(self, row: int, masks: tuple[int, int, int]) -> None:
        self._masks[row] = masks
        self._fast[row] = masks[0] | masks[1]
        self._any[row] = self._fast[row] | masks[2]

    def _collect_rows(self) -> None:
        """Frees the rows that no block has."""
        free = set(self._free_rows)
        for row in range(1, len(self._masks)):
            if not self._sizes[row] and row not in free:
                self._forget(row)
                self._put(row, (0, 0, 0))
                self._free_rows.append(row)
        self._steps.clear()
        self._collect_rows_at = max(_FEWEST_ROWS, 2 * self.rows)

    def _forget(self, row: int) -> None:
        """The row is not found by its masks any more."""
        if self._rows.get(self._masks[row]) == row:
            del self._rows[self._masks[row]]

    # Slots

    def _join(self, worker: WorkerId, slot: int | None = None) -> int:
        slot = self._slot() if slot is None else slot
        self._slots[worker], self._workers[slot] = slot, worker
        self._live |= 1 << slot
        self._senders, self._known_names = ((), 0), None
        return slot

    def _slot(self) -> int:
        """One that is nobody's."""
        if self._free_slots:
            return self._free_slots.pop()
        self._workers.append(None)
        self._known_names = None
        self._held.append(0)
        return len(self._workers) - 1

    def _retire(self, slot: int) -> None:
        self._live &= ~(1 << slot)
        self._retired |= 1 << slot
        self._pairs -= self._held[slot]
        self._held[slot], self._workers[slot] = 0, None
        self._senders, self._known_names = ((), 0), None

    def _tidy_rows(self, slots: int, start: int, end: int) -> None:
        for row in range(start, end):
            if self._any[row] & slots:
                device, dram, ssd = self._masks[row]
                self._forget(row)
                self._put(row, (device & ~slots, dram & ~slots, ssd & ~slots))
                self._rows.setdefault(self._masks[row], row)

    def _reuse(self, slots: int) -> None:
        self._steps.clear()  # they lead to where the slots' former owners were
        self._retired &= ~slots
        self._free_slots += _bits(slots)

    def _tidy_blocks(self, some: list[Fingerprint]) -> None:
        """Drops those that nobody holds."""
        dead = []
        for block, row in zip(some, self._row_of.rows(some), strict=True):
            if row is not None and not self._any[row]:
                dead.append(block)
                self._sizes[row] -= 1
        self._row_of.drop(dead)

    def _lengths(self, ends: Sequence[tuple[int, int]]) -> dict[WorkerId, int]:
        """{worker: leading blocks}, of live slots; workers with none are left out."""
        lengths: dict[WorkerId, int] = {}
        for length, slots in ends:
            if length and slots:
                lengths.update(dict.fromkeys(self._names.of(slots), length))
        return lengths

    @property
    def _names(self) -> _Names:
        """``_workers``, as it is now and stays."""
        if self._known_names is None:
            self._known_names = _Names(self._workers)
        return self._known_names


@dataclass
class _Tidying:
    """What is being cleaned up: the slots whose bits are cleared, how far, and blocks some of which nobody holds."""

    slots: int = 0
    row: int = 0
    sweep: Iterator[list[Fingerprint]] | None = None


class _Names:
    """Who has which slot, at one moment."""

    __slots__ = ("_many", "_workers")

    def __init__(self, workers: Sequence[WorkerId | None]) -> None:
        self._workers = tuple(workers)
        self._many = np.array(workers, dtype=object)

    def of(self, slots: int) -> list[WorkerId]:
        """Whose these slots are, all of them somebody's."""
        if slots.bit_count() < _MANY_BITS:
            workers = self._workers
            return [worker for slot in _bits(slots) if (worker := workers[slot]) is not None]
        found: list[WorkerId] = self._many[_many_bits(slots)].tolist()
        return found


def _many_bits(mask: int) -> npt.NDArray[np.intp]:
    packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little").nonzero()[0]


def _bits(mask: int) -> list[int]:
    """Positions of the ones in ``mask``, lowest first."""
    if mask.bit_count() >= _MANY_BITS:
        many: list[int] = _many_bits(mask).tolist()
        return many
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits
