"""Host memory through which bytes pass that a path cannot take from where they lie, or put where they belong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from shared.transfer.frames import Span
from shared.transfer.lane import Transfer
from shared.transfer.ledger import checksum
from shared.transfer.plan import STAGE_BYTES
from shared.transfer.segment import Segment

SLOTS = 4
"""While one is on its way and one is being acknowledged, the next ones are filled."""
_NONE = -1


class Staged(NamedTuple):
    """Where the pieces of a transfer lie in ``memory``, and a checksum for each, of the bytes that were meant."""

    memory: Segment
    offsets: list[int]
    checksums: list[int]


class Stage:
    """Slots of :data:`STAGE_BYTES`, each for one transfer from :meth:`take` to :meth:`give_back`. Thread-safe.

    ``allocate`` makes the memory when it is first filled.
    """

    def __init__(self, allocate: Callable[[int], Segment]) -> None:
        self._allocate = allocate
        self.memory: Segment | None = None
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(SLOTS):
            self._free.put(slot)

    def take(self) -> int | None:
        """A slot, once there is one; ``None`` when it was :meth:`end`-ed meanwhile. For one thread."""
        slot = self._free.get()
        return None if slot == _NONE else slot

    def take_now(self) -> int | None:
        """A slot, if there is one. For one thread."""
        return None if self._free.empty() else self.take()

    def give_back(self, slot: int) -> None:
        """Nobody reads its bytes any more."""
        self._free.put(slot)

    def end(self) -> None:
        """Wakes whoever waits in :meth:`take`."""
        self._free.put(_NONE)

    def fill(self, slot: int, transfer: Transfer, segments: Mapping[str, Segment], *, proven: bool) -> Staged:
        """Copies the bytes of ``transfer`` into the slot, and spoils those that a test wants spoilt. Blocks."""
        if self.memory is None:
            self.memory = self._allocate(SLOTS * STAGE_BYTES)
        offset = slot * STAGE_BYTES
        offsets, checksums = [], []
        for i, piece in enumerate(transfer.batch.pieces):
            part = self.memory.array[offset:offset + piece.remote.length]
            segments[piece.segment].read_into(part, piece.offset)
            if proven:
                checksums.append(checksum(part))
            if i in transfer.corrupt:
                part[0] ^= 0xFF
            offsets.append(offset)
            offset += piece.remote.length
        return Staged(self.memory, offsets, checksums)


class Landing:
    """Host memory where bytes arrive that no card can put where they belong. Each claim has a run of it to itself.

    For one thread.
    """

    def __init__(self, memory: Segment) -> None:
        self.memory = memory
        self._runs: dict[int, tuple[int, int]] = {}
        """{claim: its first byte, and the one behind its last}"""

    def take(self, claim: int, nbytes: int) -> int | None:
        """The first byte of a run, if there is room for one."""
        start = 0
        for other, stop in sorted(self._runs.values()):
            if other - start >= nbytes:
                break
            start = stop
        if start + nbytes > self.memory.nbytes:
            return None
        self._runs[claim] = start, start + nbytes
        return start

    def empty(self, claim: int, spans: Sequence[Span], segment_of: Callable[[Span], Segment]) -> None:
        """Copies what landed for ``claim`` to where it belongs. Blocks."""
        start, _ = self._runs[claim]
        for span in spans:
            segment_of(span).write(span.offset, self.memory.array[start:start + span.length])
            start += span.length

    def holds(self, claim: int) -> bool:
        """Has it a run?"""
        return claim in self._runs

    def give_back(self, claim: int) -> None:
        """Nothing writes there for it any more. Idempotent."""
        self._runs.pop(claim, None)
