"""How values come in: private slots for them, the copy, and the moment at which they become visible.

A value is copied or received into a slot that nobody sees, and is committed on the worker's event loop before it is
answered for: nothing that is incomplete can be seen, and of two who put the same key the first wins. Slots are
allocated in advance (a *stock* of some for each visit that puts), so that a thread needs the loop only to commit.
"""

from __future__ import annotations

from asyncio import timeout
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shared.ids import BlockKey, WorkerId
from shared.messages import StoredBlock
from shared.store import door_frames as frames
from shared.store.door_keep import Keep, deny
from shared.store.door_line import Line
from shared.store.door_visit import Visit
from shared.telemetry import metrics
from shared.transfer.addresses import host_clock_s
from shared.transfer.channel import Closed
from shared.transfer.ledger import checksum
from shared.transfer.segment import MappedSegment

MAX_STOCK = 64
RESTOCK = 8
"""Slots at least of a new stock: to make room for one at a time takes longer than to take a short value."""
STOCK_IDLE_S = 0.5
"""A stock that nobody used for so long goes back to the pool."""
MAX_SOURCES = 64
"""Memories of one connection's client."""
_DRAIN_BYTES = 256 << 10
_APART_S = 1e-9
"""Between the uses of values that were stored together: so they go in the order in which they lie, and what comes in
their place lies together too, which makes it one copy."""
_NO, _YES, _ORPHAN = int(frames.Mark.NO), int(frames.Mark.YES), int(frames.Mark.ORPHAN)
_PUTS = metrics.STORE_DOOR_VALUES.labels(kind="put")


@dataclass(frozen=True, slots=True)
class Filled:
    """A PUT whose values were copied into private slots."""

    ask: frames.Put
    slots: list[int]
    doubts: tuple[str, str] | None
    """Code and reason why they cannot be believed."""


class Intake:
    """Of all visits of one door. On the loop, but for what says that it is the thread's.

    ``answer`` sends a reply, and ends the visit when it cannot.
    """

    def __init__(self, keep: Keep, visits: set[Visit], answer: Callable[[Visit, frames.Reply], None]) -> None:
        self._keep, self._agent, self._segment = keep, keep.agent, keep.segment
        self._nbytes = keep.block_bytes
        self._visits, self._answer = visits, answer

    # -- room ---------------------------------------------------------------------------------------------------

    def slots_now(self, visit: Visit, ask: frames.Put) -> list[int] | None:
        """Private slots, in order, for a short PUT that is copied here and now; ``None`` when there is no room now."""
        count = len(ask.blocks)
        if visit.enter is None or not ask.sources or count * self._nbytes > self._keep.inline_bytes:
            raise frames.FrameError(f"{count} values of {self._nbytes} bytes have no business on this connection")
        self.attach(visit, ask.attached)
        slots = take(visit.stock, count)
        if len(slots) < count:
            more = self._try_allocate(visit, count - len(slots))
            if more is None:
                self.give_back(visit, slots)
                return None
            slots += more
        return sorted(slots)  # what lies together here and there is one copy

    async def wait_slots(self, visit: Visit, count: int, wait_s: float) -> list[int] | None:
        """Private slots; ``None`` when there is no room within ``wait_s``."""
        slots = self._try_allocate(visit, count)
        if slots is None and wait_s > 0 and count <= self._keep.num_blocks and not self._agent.is_retired:
            with suppress(TimeoutError):
                async with timeout(wait_s):
                    return await self._agent.wait_allocate(visit.stock_operation, count, tenant=visit.tenant)
        return slots

    def give_back(self, visit: Visit, slots: Sequence[int]) -> None:
        """Private slots of its own that it does not need."""
        if slots and not visit.ended:
            self._agent.give_back(visit.stock_operation, slots)

    def end_idle_stock(self, visit: Visit, now_s: float) -> None:
        """What it has not used for a while goes back."""
        if visit.stock and visit.stocked_s + STOCK_IDLE_S <= now_s:
            self.give_back(visit, take(visit.stock, len(visit.stock)))

    def no_room(self, ask: frames.Put) -> frames.Denied:
        """Why it is not taken."""
        if self._agent.is_retired:
            return deny("put", "draining", "it is being drained and takes no values any more")
        return deny("put", "full", f"no room for {len(ask.blocks)} values of {self._nbytes} bytes within "
                                   f"{ask.wait_ms} ms: all it has is in use")

    def _try_allocate(self, visit: Visit, count: int) -> list[int] | None:
        if count > self._keep.num_blocks or self._agent.is_retired:
            return None
        return self._agent.allocate(visit.stock_operation, count, tenant=visit.tenant)

    def _restock(self, visit: Visit, count: int) -> None:
        """For what was just used once more, and for the next question, which is being served already; as long as that
        is a small part of what there is."""
        visit.stocked_s = host_clock_s()
        count = min(2 * count, MAX_STOCK)
        if len(visit.stock) >= count or visit.ended or self._agent.is_retired:
            return
        stocks = sum(len(other.stock) for other in self._visits)
        count = min(max(count, RESTOCK) - len(visit.stock), self._agent.pool.available // 8 - stocks)
        if count > 0:
            visit.stock.extend(sorted(
                self._agent.allocate(visit.stock_operation, count, tenant=visit.tenant) or ()))

    # -- copies -------------------------------------------------------------------------------------------------

    def attach(self, visit: Visit, serials: Sequence[int]) -> None:
        """Maps the memories whose descriptors came along. Loop, or the thread that reads the visit."""
        for serial in serials:
            if not visit.line.descriptors or len(visit.sources) >= MAX_SOURCES:
                raise frames.FrameError(f"memory {serial} came without a descriptor, or is one of too many")
            try:
                visit.sources[serial] = MappedSegment(visit.line.descriptors.pop(0))
            except (OSError, ValueError, OverflowError) as error:
                raise frames.FrameError(f"memory {serial} cannot be mapped: {error}") from error

    def fill_beside(self, visit: Visit, ask: frames.Put, slots: list[int], before: Filled | None) -> Filled:
        """Copies into private ``slots``; while the helper does so, the values ``before`` become visible."""
        self._begin(visit, ask, slots)
        try:
            if not visit.inbox and (before is not None or len(slots) > 1):  # one value alone is no batch's beginning
                visit.inbox.extend(visit.line.receive_now())  # then these, too, have something to be done beside them
        except (Closed, OSError):
            pass  # the loop will meet it as well
        finally:
            self.conclude(visit, before)
            self.finish()
        return Filled(ask, slots, self._doubts(visit, ask, slots))

    def fill(self, visit: Visit, ask: frames.Put, slots: list[int]) -> Filled:
        """Copies into private ``slots`` that were waited for."""
        if visit.ended:
            raise frames.FrameError("it left meanwhile")
        self._begin(visit, ask, slots)
        self.finish()
        return Filled(ask, slots, self._doubts(visit, ask, slots))

    def finish(self) -> None:
        """Whatever was begun is copied. Idempotent."""
        if self._segment.native is not None:
            self._segment.native.finish()

    def receive(self, visit: Visit, ask: frames.Put, slots: list[int]) -> Filled:
        """Thread: copies, or receives, into private ``slots``."""
        if ask.sources:
            for first, count in _runs(slots, ask.sources, self._nbytes):
                self._segment.write(slots[first] * self._nbytes, self._source(visit, ask.sources[first], count))
        else:
            for slot in slots:
                visit.line.receive_into(self._keep.bytes_of(slot).data)
        return Filled(ask, slots, self._doubts(visit, ask, slots))

    def drain(self, line: Line, ask: frames.Put) -> None:
        """Thread: receives the values of a PUT that has no slots, and drops them."""
        nbytes = 0 if ask.sources else len(ask.blocks) * self._nbytes
        scratch = memoryview(bytearray(min(nbytes, _DRAIN_BYTES)))
        while nbytes:
            part = scratch[:min(nbytes, len(scratch))]
            line.receive_into(part)
            nbytes -= len(part)

    def _begin(self, visit: Visit, ask: frames.Put, slots: list[int]) -> None:
        """Begins to copy into private ``slots``, which go back when that cannot be. To be finished in the same turn."""
        native, nbytes = self._segment.native, self._nbytes
        try:
            runs = [(slots[first], ask.sources[first], self._source(visit, ask.sources[first], count))
                    for first, count in _runs(slots, ask.sources, nbytes)]
        except frames.FrameError:
            self.give_back(visit, slots)
            raise
        if native is not None and all(source.serial == runs[0][1].serial for _, source, _ in runs):
            native.begin(self._segment.array, visit.sources[runs[0][1].serial].array,
                         [(slot * nbytes, source.offset, len(data)) for slot, source, data in runs])
            return
        for slot, _, data in runs:
            self._segment.write(slot * nbytes, data)

    def _source(self, visit: Visit, source: frames.Source, count: int) -> Any:
        """So many values, one behind the other."""
        mapped, nbytes = visit.sources.get(source.serial), count * self._nbytes
        if mapped is None or source.offset + nbytes > len(mapped.array):
            raise frames.FrameError(f"{nbytes} bytes at {source.offset} of memory {source.serial} were not handed over")
        return mapped.array[source.offset:source.offset + nbytes]

    def _doubts(self, visit: Visit, ask: frames.Put, slots: Sequence[int]) -> tuple[str, str] | None:
        """Code and reason when what ``slots`` were filled with cannot be believed. Loop or thread."""
        wrong = [i for i, sum in enumerate(ask.checksums) if checksum(self._keep.bytes_of(slots[i])) != sum]
        if wrong:
            return "checksum", f"value {wrong[0]} came with other bytes than were sent"
        if visit.proofs and not ask.checksums:
            return "checksum", "checksums are demanded here"
        if ask.sources and not (host_clock_s() <= ask.deadline_s and not visit.line.hung_up()):
            # Its memory may have changed under us: the client has given up, or is no more.
            return "late", "copied after the client's deadline"
        return None

    # -- commits ------------------------------------------------------------------------------------------------

    def conclude(self, visit: Visit, filled: Filled | None) -> bool:
        """Values that were copied become visible, and are answered for. Is the visitor still there?"""
        if filled is None or visit.ended:
            return not visit.ended  # whose slots went back with it
        if filled.doubts:
            self.give_back(visit, filled.slots)
            self._answer(visit, deny("put", *filled.doubts))
        elif self._agent.is_retired:  # meanwhile: what it stored now, it would drop at once
            self.give_back(visit, filled.slots)
            self._answer(visit, self.no_room(filled.ask))
        else:
            self._answer(visit, self._seal(visit, filled.ask, filled.slots))
            self.follow_up(visit)
        return not visit.ended

    def _seal(self, visit: Visit, ask: frames.Put, slots: list[int]) -> frames.Marks:
        """Values that are complete become visible, unless they, or others under their keys, are so already.

        Once that is answered, in the same turn, :meth:`follow_up` does the rest.
        """
        pool, enter, nbytes = self._agent.pool, visit.enter, self._nbytes
        assert enter is not None
        now, client, operation = self._keep.clock.monotonic(), WorkerId(enter.client), visit.stock_operation
        marks: list[int] = []
        for i, (block, slot) in enumerate(zip(ask.blocks, slots, strict=True)):
            key, parent = BlockKey(block.key), BlockKey(block.parent)
            if pool.block(key) is not None:
                marks.append(_NO)
                visit.unused.append(slot)
            elif block.depth > 0 and ((above := pool.block(parent)) is None or above.depth != block.depth - 1
                                      or not (self._keep.all_tenants or above.tenant == enter.tenant)):
                marks.append(_ORPHAN)
                visit.unused.append(slot)
            else:
                stored = StoredBlock(key=key, parent=parent, depth=block.depth, nbytes=nbytes, origin="received",
                                     source=client, tenant=enter.tenant, tokens=block.tokens)
                # Nobody evicts anything before the last of them is sealed, so none needs a pin.
                pool.seal(operation, slot, stored, now=now + i * _APART_S, pin=False)
                visit.news.append(stored)
                marks.append(_YES)
        visit.used += len(slots)
        return frames.Marks(marks)

    def follow_up(self, visit: Visit) -> None:
        """What nobody waits for: news of what was stored, slots for the next."""
        if visit.news:
            _PUTS.inc(len(visit.news))
            self._agent.announce_stored(visit.news)
            visit.news = []
        if visit.used:
            used, unused, visit.used, visit.unused = visit.used, visit.unused, 0, []
            if unused:
                self.give_back(visit, unused)
            else:
                self._agent.settle()
            self._restock(visit, used)


def take(stock: deque[int], most: int) -> list[int]:
    """Up to so many of them; others may take some meanwhile."""
    slots: list[int] = []
    with suppress(IndexError):
        while len(slots) < most:
            slots.append(stock.popleft())
    return slots


def _runs(slots: Sequence[int], sources: Sequence[frames.Source], nbytes: int) -> Iterator[tuple[int, int]]:
    """First index and length of each stretch of values that follow each other both here and there."""
    first = 0
    for i in range(1, len(slots) + 1):
        if i < len(slots) and slots[i] == slots[i - 1] + 1 and sources[i].serial == sources[i - 1].serial and (
                sources[i].offset == sources[i - 1].offset + nbytes):
            continue
        yield first, i - first
        first = i
