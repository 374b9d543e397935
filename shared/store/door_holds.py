"""What clients keep from being evicted: loans, which they copy, and pins. On the worker's event loop."""

from __future__ import annotations

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
_HITS, _MISSES = (metrics.STORE_DOOR_VALUES.labels(kind=kind) for kind in ("hit", "miss"))


class Holds:
    """Of all visits of one door."""

    def __init__(self, keep: Keep) -> None:
        self._keep, self._agent = keep, keep.agent
        self._pinned = 0
        """Blocks that clients have pinned, counted once for each pin."""

    # -- loans --------------------------------------------------------------------------------------------------

    def lend(self, visit: Visit, ask: frames.Get) -> frames.Found:
        """What of it is in memory, until the client has copied it, or its time is over."""
        keys = unpack_keys(ask.keys)
        if len(visit.loans) >= MAX_LOANS:
            raise frames.FrameError(f"{MAX_LOANS} loans are open, and it says of none that it is done")
        operation = self._keep.new_operation(visit)
        slots = [self._pin_one(operation, key) for key in keys]
        until_s = host_clock_s() + min(LOAN_S, ask.timeout_ms / 1e3)
        visit.loans.append(Hold(operation, 0, until_s))
        found = [slot for slot in slots if slot != frames.MISSING]
        _HITS.inc(len(found))
        _MISSES.inc(len(slots) - len(found))
        sums = [checksum(self._keep.bytes_of(slot)) for slot in found] if visit.proofs and visit.local else []
        return frames.Found(slots, until_s, sums)

    def lend_to_thread(self, visit: Visit, ask: frames.Get) -> frames.Found:
        """For our own thread, which reads by a deadline, or the visit ends: the loan has no other end."""
        found = self.lend(visit, ask)
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
        most = max(4, self._keep.num_blocks // 2)  # a worker needs room for its own work
        if pin is None:
            if len(visit.pins) >= MAX_PINS or self._pinned + len(keys) > most:
                return self._pins_full(visit)
            pin = visit.pins[ask.operation] = Hold(self._keep.new_operation(visit), 0, 0.0)
        marks = [int(self._pin_one(pin.operation, key) != frames.MISSING) for key in keys]
        before, pin.count = pin.count, max(len(keys), self._agent.pool.pinned_by(pin.operation))
        self._pinned += pin.count - before
        if self._pinned > most and pin.count > before:  # with what these blocks continue, which is pinned as well
            self._end(visit.pins.pop(ask.operation))
            return self._pins_full(visit)
        pin.until_s = host_clock_s() + ask.ttl_ms / 1e3
        return frames.Marks(marks)

    def unpin(self, visit: Visit, ask: frames.Unpin) -> frames.Marks:
        """Ends a pin, if there is one of that name."""
        pin = visit.pins.pop(ask.operation, None)
        if pin is not None:
            self._end(pin)
        return frames.Marks([int(pin is not None)])

    def _pins_full(self, visit: Visit) -> frames.Denied:
        return deny("pin", "full", f"clients have pinned {self._pinned} of {self._keep.num_blocks} blocks, this one "
                                   f"by {len(visit.pins)} pins; half of them may be, with what they continue")

    # -- the rest -----------------------------------------------------------------------------------------------

    def look(self, ask: frames.Look) -> frames.Marks:
        """Which are in some tier?"""
        return frames.Marks([int(self._agent.holds(key)) for key in unpack_keys(ask.keys)])

    def drop(self, ask: frames.Drop) -> frames.Marks:
        """Forgets those that nobody uses or continues."""
        tally("drop", "ok")
        return frames.Marks([self._agent.trim([key], "removed") for key in unpack_keys(ask.keys)])

    def needs_disk(self, ask: frames.Get | frames.Pin) -> bool:
        """Is something of it on the disk alone?"""
        agent = self._agent
        return agent.ssd is not None and any(
            agent.pool.block(key) is None and agent.ssd.holds(key) for key in unpack_keys(ask.keys))

    async def fetch_from_disk(self, visit: Visit, ask: frames.Get | frames.Pin) -> OperationId:
        """Reads back what is on the disk alone, under the operation that is returned and is to be released; what cannot
        be read in time is not here."""
        reading = self._keep.new_operation(visit)
        timeout_s = (ask.timeout_ms / 1e3 if isinstance(ask, frames.Get) else LOAN_S) / 2
        try:
            for key in unpack_keys(ask.keys):
                if self._agent.pool.block(key) is None:
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

    def _pin_one(self, operation: OperationId, key: BlockKey) -> int:
        slots = self._agent.pin(operation, [key])
        return slots[0] if slots else frames.MISSING

    def _end(self, hold: Hold) -> None:
        hold.is_over = True
        self._pinned -= hold.count
        self._agent.release(hold.operation)
