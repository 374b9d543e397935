"""What clients keep from being evicted: loans, which they copy, and pins. On the worker's event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from math import inf

from shared.ids import BlockKey, OperationId
from shared.kv import unpack_keys
from shared.store import door_frames as frames
from shared.store.door_keep import Keep, deny, tally
from shared.store.door_visit import Hold, Visit
from shared.telemetry import metrics
from shared.transfer.addresses import host_clock_s
from shared.transfer.ledger import checksum

LOAN_S = 2.0
"""Longest time a client copies what it was shown; then its loan is over, whatever it does."""
MAX_LOANS = 64
"""Of one connection, those included that are over and of which it has not said so."""
MAX_PINS = 1024
"""Pin operations of one connection."""
LEAST_LENT = 8
"""Blocks that one client may borrow however small the pool is: as many as its questions under way may ask for."""
WAIT_SHARE = 0.8
"""Of a question's time, that it waits for room: then its client must hear that there is none."""
_HITS, _MISSES, _FOREIGN = (metrics.STORE_DOOR_VALUES.labels(kind=kind) for kind in ("hit", "miss", "foreign"))


class Holds:
    """Of all visits of one door. A client sees what is of its tenant, or all where the operator says so; to it anything
    else is not here."""

    def __init__(self, keep: Keep) -> None:
        self._keep, self._agent = keep, keep.agent
        self._pinned = 0
        """Blocks that clients have pinned, counted once for each pin."""
        self._lent = 0
        """Blocks of loans, counted once for each loan."""
        #: {client and incarnation: blocks of its loans}; never 0
        self._lent_to: Counter[tuple[str, str]] = Counter()
        # All that clients hold leaves a quarter of the memory to the worker, and one of them part of it to the others.
        self._most_pinned = max(4, keep.num_blocks // 2)
        self._most_lent = max(2 * LEAST_LENT, keep.num_blocks // 4)
        self._most_lent_to_one = max(LEAST_LENT, keep.num_blocks // 8)
        self._waiting = 0
        """Questions that wait for a loan to end."""
        self._ended = asyncio.Event()
        """Is set, and replaced, when one does."""

    # -- loans --------------------------------------------------------------------------------------------------

    def lend(self, visit: Visit, ask: frames.Get) -> frames.Found | None:
        """What of it is in memory, until the client has copied it, or its time is over. ``None``: not now, since too
        much is lent; a client without a loan gets one whatever it takes, if nobody else has any."""
        keys, borrower = unpack_keys(ask.keys), _borrower(visit)
        if len(visit.loans) >= MAX_LOANS:
            raise frames.FrameError(f"{MAX_LOANS} loans are open, and it says of none that it is done")
        here = [self._is_here(visit, key) for key in keys]
        if not self._has_room(borrower, sum(here)):
            return None
        operation = self._keep.new_operation(visit)
        slots = self._pin_all(operation, keys, here)
        found = [slot for slot in slots if slot != frames.MISSING]
        count = max(len(found), self._agent.pool.pinned_by(operation))  # with what these blocks continue
        if not self._has_room(borrower, count):
            self._agent.release(operation)
            return None
        until_s = host_clock_s() + min(LOAN_S, ask.timeout_ms / 1e3)
        visit.loans.append(Hold(operation, count, until_s, borrower))
        self._lent += count
        self._lent_to[borrower] += count
        _HITS.inc(len(found))
        if len(found) < len(slots):
            _MISSES.inc(len(slots) - len(found))
            self._count_foreign(keys, here)
        sums = [checksum(self._keep.bytes_of(slot)) for slot in found] if visit.proofs and visit.local else []
        return frames.Found(slots, until_s, sums)

    async def wait_to_lend(self, visit: Visit, ask: frames.Get) -> frames.Found | frames.Denied:
        """:meth:`lend` once enough loans have ended; or why not, before the client stops waiting."""
        until_s = host_clock_s() + WAIT_SHARE * ask.timeout_ms / 1e3
        while (found := self.lend(visit, ask)) is None:
            self._waiting += 1
            try:
                async with asyncio.timeout(max(0.0, until_s - host_clock_s())):
                    await self._ended.wait()
            except TimeoutError:
                return deny("get", "full",
                            f"clients have borrowed {self._lent} of {self._keep.num_blocks} blocks, this one "
                            f"{self._lent_to[_borrower(visit)]}; {self._most_lent} may be lent in all, "
                            f"{self._most_lent_to_one} to one client, with what they continue")
            finally:
                self._waiting -= 1
            if visit.ended:
                raise frames.FrameError("it left meanwhile")
        return found

    def _has_room(self, borrower: tuple[str, str], count: int) -> bool:
        theirs = self._lent_to[borrower]
        return not ((theirs and theirs + count > self._most_lent_to_one)
                    or (self._lent and self._lent + count > self._most_lent))

    async def lend_to_thread(self, visit: Visit, ask: frames.Get) -> frames.Found | frames.Denied:
        """For our own thread, which reads by a deadline, or the visit ends: the loan has no other end."""
        found = await self.wait_to_lend(visit, ask)
        if isinstance(found, frames.Found):
            visit.loans[-1].until_s = inf
        return found

    def end_loans(self, visit: Visit, count: int) -> None:
        """Its ``count`` oldest are over, and it knows."""
        for _ in range(min(count, len(visit.loans))):
            loan = visit.loans.popleft()
            if not loan.is_over:
                self._end(loan)

    # -- pins ---------------------------------------------------------------------------------------------------

    def pin(self, visit: Visit, ask: frames.Pin) -> frames.Reply:
        """Keeps what of it is in memory; said again, for longer."""
        keys, pin = unpack_keys(ask.keys), visit.pins.get(ask.operation)
        if pin is None:
            if len(visit.pins) >= MAX_PINS or self._pinned + len(keys) > self._most_pinned:
                return self._pins_full(len(keys))
            pin = visit.pins[ask.operation] = Hold(self._keep.new_operation(visit), 0, 0.0)
        here = [self._is_here(visit, key) for key in keys]
        marks = [int(slot != frames.MISSING) for slot in self._pin_all(pin.operation, keys, here)]
        self._count_foreign(keys, here)
        before, pin.count = pin.count, max(len(keys), self._agent.pool.pinned_by(pin.operation))
        self._pinned += pin.count - before
        if self._pinned > self._most_pinned and pin.count > before:  # what these blocks continue is pinned as well
            self._end(visit.pins.pop(ask.operation))
            return self._pins_full(len(keys))
        pin.until_s = host_clock_s() + ask.ttl_ms / 1e3
        return frames.Marks(marks)

    def unpin(self, visit: Visit, ask: frames.Unpin) -> frames.Marks:
        """Ends a pin, if there is one of that name."""
        pin = visit.pins.pop(ask.operation, None)
        if pin is not None:
            self._end(pin)
        return frames.Marks([int(pin is not None)])

    def _pins_full(self, asked: int) -> frames.Denied:
        return deny("pin", "full", f"a pin of {asked} more: clients have pinned {self._pinned} of "
                                   f"{self._keep.num_blocks} blocks; half of them may be, with what they continue: "
                                   "end a pin, or pin fewer")

    # -- the rest -----------------------------------------------------------------------------------------------

    def look(self, visit: Visit, ask: frames.Look) -> frames.Marks:
        """Which are in some tier?"""
        keys = unpack_keys(ask.keys)
        seen = [self._sees(visit, key) for key in keys]
        self._count_foreign(keys, seen)
        return frames.Marks([int(sees) for sees in seen])

    def drop(self, visit: Visit, ask: frames.Drop) -> frames.Marks:
        """Forgets those that nobody uses or continues."""
        tally("drop", "ok")
        keys = unpack_keys(ask.keys)
        seen = [self._sees(visit, key) for key in keys]
        self._count_foreign(keys, seen)
        return frames.Marks([self._agent.trim([key], "removed") if sees else 0
                             for key, sees in zip(keys, seen, strict=True)])

    def needs_disk(self, visit: Visit, ask: frames.Get | frames.Pin) -> bool:
        """Is something of it on the disk alone?"""
        return self._agent.ssd is not None and any(
            self._agent.pool.block(key) is None and self._sees(visit, key) for key in unpack_keys(ask.keys))

    async def fetch_from_disk(self, visit: Visit, ask: frames.Get | frames.Pin) -> OperationId:
        """Reads back what is on the disk alone, under the operation that is returned and is to be released; what cannot
        be read in time is not here."""
        reading = self._keep.new_operation(visit)
        timeout_s = (ask.timeout_ms / 1e3 if isinstance(ask, frames.Get) else LOAN_S) / 2
        try:
            for key in unpack_keys(ask.keys):
                if self._agent.pool.block(key) is None and self._sees(visit, key):
                    await self._agent.pin_in_dram(reading, key, timeout_s=timeout_s)
        except BaseException:
            self._agent.release(reading)
            raise
        return reading

    def end_overdue(self, visit: Visit, now_s: float) -> None:
        """Loans and pins whose time is over."""
        for loan in visit.loans:
            if loan.until_s <= now_s and not loan.is_over:
                self._end(loan)
        for name in [name for name, pin in visit.pins.items() if pin.until_s <= now_s]:
            self._end(visit.pins.pop(name))

    def end_all(self, visit: Visit) -> None:
        """The visit ends."""
        for hold in (*visit.loans, *visit.pins.values()):
            if not hold.is_over:
                self._end(hold)
        self._tell_waiting()  # it may be waiting itself

    def _sees(self, visit: Visit, key: BlockKey) -> bool:
        return self._keep.seen(key, visit.tenant) is not None

    def _is_here(self, visit: Visit, key: BlockKey) -> bool:
        """Is it in memory, for this client?"""
        block = self._agent.pool.block(key)
        return block is not None and (self._keep.all_tenants or block.tenant == visit.tenant)

    def _count_foreign(self, keys: Sequence[BlockKey], seen: Sequence[bool]) -> None:
        """Of ``keys``, those that another tenant has here."""
        if not all(seen):
            _FOREIGN.inc(sum(not sees and self._agent.holds(key) for key, sees in zip(keys, seen, strict=True)))

    def _pin_all(self, operation: OperationId, keys: Sequence[BlockKey], here: Sequence[bool]) -> list[int]:
        """The slot of each that is here."""
        return [self._agent.pin(operation, [key])[0] if is_here else frames.MISSING
                for key, is_here in zip(keys, here, strict=True)]

    def _end(self, hold: Hold) -> None:
        hold.is_over = True
        if hold.borrower is None:
            self._pinned -= hold.count
        else:
            self._lent -= hold.count
            self._lent_to[hold.borrower] -= hold.count
            if not self._lent_to[hold.borrower]:
                del self._lent_to[hold.borrower]
        self._agent.release(hold.operation)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        if self._waiting:
            self._ended.set()
            self._ended = asyncio.Event()


def _borrower(visit: Visit) -> tuple[str, str]:
    assert visit.enter is not None
    return visit.enter.client, visit.enter.incarnation
