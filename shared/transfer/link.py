"""One peer by one path: a few lanes, and the bounds on what is on its way to it. Lives on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.messages import Grant
from shared.transfer.addresses import host_clock_s
from shared.transfer.lane import LATE, Lane, Transfer
from shared.transfer.plan import Batch
from shared.transfer.types import GrantRefused, Outcome, PeerGone, TransferCancelled, Trouble

WINDOW = 128
"""Batches on their way to one peer. Also bounds the answers that can wait unread in a socket, so that the two
sides never block on each other."""

EARLY_S = 1e-3
"""How much too early a loop's timer may be. Up to its very deadline a receiver may copy the bytes of a transfer."""

_CANCELLED = Trouble(TransferCancelled, "cancelled before it was sent")


@dataclass(eq=False, slots=True)
class _Load:
    """An open lane and the bytes on their way on it."""

    lane: Lane
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class Sending:
    """Some batches on their way to one peer, or about to be."""

    batches: Sequence[Batch]
    grant: Grant
    deadline_s: float
    """On the host's clock."""
    note: bytes | None
    """Goes with the last batch."""
    corrupt: Callable[[Batch], frozenset[int]]
    outcomes: list[Outcome] = field(init=False)
    """One a batch, empty until it is known."""
    ended_s: list[float] = field(init=False)
    """When each became known, on the host's clock."""
    left: int = field(init=False, default=0)
    """Outcomes not known yet."""
    told: Callable[[], None] = lambda: None
    """Called when no outcome is left to wait for."""
    cancelled: bool = False
    refused: Trouble | None = None
    """Why the receiver would not have a batch."""
    transfers: list[tuple[_Load, Transfer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = len(self.batches)
        self.outcomes, self.ended_s = [()] * self.left, [0.0] * self.left

    def tell(self, index: int, outcome: Outcome) -> None:
        """What became of the batch ``index``."""
        self.outcomes[index], self.ended_s[index] = outcome, host_clock_s()
        self.refused = self.refused or next((t for t in outcome if t is not None and t.kind is GrantRefused), None)
        self.left -= 1
        if not self.left:
            self.told()


class Link:
    """Opens lanes when they are needed; ``make_lane`` makes one that is not started.

    At most ``max_lanes`` lanes, another one only when each has ``lane_bytes`` on its way; at most ``max_inflight``
    bytes on their way (or one batch).
    """

    def __init__(self, make_lane: Callable[[], Lane], *, max_lanes: int, lane_bytes: int, max_inflight: int,
                 silence_s: float) -> None:
        self._make_lane = make_lane
        self._max_lanes, self._lane_bytes, self._max_inflight = max_lanes, lane_bytes, max_inflight
        self._silence_s = silence_s
        self._open: list[_Load] = []
        self._opening: asyncio.Future[_Load | Trouble] | None = None
        self._ended: Trouble | None = None
        self._started: list[Lane] = []
        self._senders = 0
        self._batches = 0
        self._nbytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def connected(self) -> bool:
        """Is a lane open?"""
        return any(load.lane.failed is None for load in self._open)

    @property
    def idle(self) -> bool:
        """Is nobody sending, or about to?"""
        return not self._senders and not self._batches

    @property
    def inflight_bytes(self) -> int:
        """On their way, or about to be."""
        return self._nbytes

    def send_now(self, sending: Sending) -> bool:
        """Submits everything if that needs no waiting; false, with nothing done, if it does."""
        nbytes = sum(batch.nbytes for batch in sending.batches)
        if self._waiting or not self._fits(nbytes, len(sending.batches)):
            return False
        loads = []
        planned: dict[int, int] = {}
        for batch in sending.batches:
            load = self._usable(planned)
            if load is None:
                return False
            planned[id(load)] = planned.get(id(load), 0) + batch.nbytes
            loads.append(load)
        for i, load in enumerate(loads):
            self._take(sending.batches[i].nbytes)
            self._submit(load, sending, i)
        return True

    async def send(self, sending: Sending) -> None:
        """Submits every batch as lanes and room allow; returns once each has its outcome, at the deadline at last.

        Cancelling it with ``sending.cancelled`` set holds back what was not submitted; the rest is waited for, since
        its bytes may be on their way.
        """
        self._senders += 1
        try:
            await self._send(sending)
        finally:
            self._senders -= 1

    async def _send(self, sending: Sending) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + sending.deadline_s - host_clock_s() + EARLY_S
        done = asyncio.Event()
        sending.told = done.set
        unsent = LATE
        try:
            async with asyncio.timeout_at(deadline_s):
                for i, batch in enumerate(sending.batches):
                    if sending.refused is not None:  # the grant does not stand: the rest would only be thrown away
                        unsent = sending.refused
                        break
                    load = await self._lane()
                    if isinstance(load, Trouble):
                        unsent = load
                        break
                    await self._room(batch.nbytes)
                    self._submit(load, sending, i)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if not sending.cancelled:
                raise
            unsent = _CANCELLED
        for i in range(len(sending.transfers), len(sending.batches)):
            sending.tell(i, [unsent] * max(1, len(sending.batches[i].pieces)))
        while sending.left:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await done.wait()
            except TimeoutError:
                if host_clock_s() >= sending.deadline_s:
                    self.expire(sending)
                else:
                    deadline_s = loop.time() + EARLY_S
            except asyncio.CancelledError:
                if not sending.cancelled:
                    raise

    def expire(self, sending: Sending) -> None:
        """The time of ``sending`` is over: nothing of it is on its way when this returns.

        Lanes whose peer has been silent are dead, not slow.
        """
        late = [(load.lane, transfer) for load, transfer in sending.transfers if not transfer.ended]
        silent = {lane: silence_s for lane, _ in late if (silence_s := lane.silence_s()) >= self._silence_s}
        for lane, transfer in late:
            lane.give_up(transfer)
        for lane, silence_s in silent.items():
            lane.fail(Trouble(PeerGone, f"the peer has been silent for {silence_s:.1f} s"))

    def forget(self, serial: int) -> None:
        """The segment ``serial`` goes away; no transfer of it is on its way."""
        for load in self._open:
            load.lane.forget(serial)

    def fail(self, trouble: Trouble) -> list[Lane]:
        """Ends everything on its way, and itself: no lane is opened any more. Returns lanes whose threads still run."""
        self._ended = trouble
        for lane in self._started:
            lane.fail(trouble)
        return [lane for lane in self._started if lane.alive]

    def _usable(self, planned: dict[int, int]) -> _Load | None:
        """The least loaded lane, unless another one should be opened first. ``planned``: {id of a load: bytes}."""
        self._open = [load for load in self._open if load.lane.failed is None]
        best = min(self._open, key=lambda load: load.nbytes + planned.get(id(load), 0), default=None)
        if best is None or (best.nbytes + planned.get(id(best), 0) >= self._lane_bytes
                            and len(self._open) < self._max_lanes):
            return None
        return best

    async def _lane(self) -> _Load | Trouble:
        """The least loaded lane; another one when that is busy and there may be more.

        It may have failed by the time it is used: then it reports so for what it is given.
        """
        if self._ended is not None:
            return self._ended
        load = self._usable({})
        if load is not None:
            return load
        # Others may wait for it too: our deadline must not end their wait.
        opened = await asyncio.shield(self._opening or self._start())
        best = min(self._open, key=lambda load: load.nbytes, default=None)
        return best if best is not None else opened

    def _start(self) -> asyncio.Future[_Load | Trouble]:
        opening: asyncio.Future[_Load | Trouble] = asyncio.get_running_loop().create_future()
        self._opening = opening
        lane = self._make_lane()
        self._started = [other for other in self._started if other.alive]
        self._started.append(lane)

        def opened(trouble: Trouble | None) -> None:
            self._opening = None
            if trouble is not None:
                opening.set_result(trouble)
                return
            load = _Load(lane)
            self._open.append(load)
            opening.set_result(load)

        try:
            lane.start(opened)
        except RuntimeError as error:
            opened(Trouble(PeerGone, f"no thread for a connection: {error}"))
        return opening

    def _submit(self, load: _Load, sending: Sending, index: int) -> None:
        batch = sending.batches[index]

        def finish(outcome: Outcome) -> None:
            load.nbytes -= batch.nbytes
            self._give_back(batch.nbytes)
            sending.tell(index, outcome)

        note = sending.note if index == len(sending.batches) - 1 else None
        transfer = Transfer(batch, sending.grant, sending.deadline_s, note, finish, sending.corrupt(batch))
        load.nbytes += batch.nbytes
        sending.transfers.append((load, transfer))
        load.lane.submit(transfer)

    async def _room(self, nbytes: int) -> None:
        """Waits, in order of arrival, until ``nbytes`` more may be on their way."""
        if not self._waiting and self._fits(nbytes, 1):
            self._take(nbytes)
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, ticket)
        self._waiting.append(entry)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self._give_back(nbytes)
            elif entry in self._waiting:  # whoever made room meanwhile passed over it
                self._waiting.remove(entry)
                self._admit()
            raise

    def _fits(self, nbytes: int, batches: int) -> bool:
        return (self._batches == 0 and batches == 1) or (
            self._batches + batches <= WINDOW and self._nbytes + nbytes <= self._max_inflight)

    def _take(self, nbytes: int) -> None:
        self._batches += 1
        self._nbytes += nbytes

    def _give_back(self, nbytes: int) -> None:
        self._batches -= 1
        self._nbytes -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0], 1):
            nbytes, ticket = self._waiting.popleft()
            if not ticket.cancelled():
                self._take(nbytes)
                ticket.set_result(None)
