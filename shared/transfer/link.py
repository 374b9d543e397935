"""One peer by one path: a few lanes, and the bounds on what is on its way to it. Lives on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shared.messages import Grant
from shared.telemetry import metrics
from shared.transfer.lane import Lane, Outcome, Transfer, Trouble
from shared.transfer.plan import Batch
from shared.transfer.types import TransferTimeout

WINDOW = 128
"""Batches on their way to one peer. Also bounds the answers that can wait unread in a socket, so that the two
sides never block on each other."""
LANE_BYTES = 4 << 20
"""Bytes on their way on a lane before another one is opened beside it."""

_LATE = Trouble(TransferTimeout, "not acknowledged before the deadline")


@dataclass(eq=False, slots=True)
class _Load:
    """An open lane and the bytes on their way on it."""

    lane: Lane
    nbytes: int = 0


class Link:
    """Opens lanes when they are needed; ``make_lane`` makes one that is not started.

    ``settings`` bounds: at most ``max_lanes`` lanes and ``max_inflight`` bytes on their way (or one batch).
    """

    def __init__(self, make_lane: Callable[[], Lane], *, max_lanes: int, max_inflight: int, silence_s: float) -> None:
        self._make_lane = make_lane
        self._max_lanes, self._max_inflight, self._silence_s = max_lanes, max_inflight, silence_s
        self._open: list[_Load] = []
        self._opening: asyncio.Future[_Load | Trouble] | None = None
        self._started: list[Lane] = []
        self._batches = 0
        self._nbytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def connected(self) -> bool:
        """Is a lane open?"""
        return any(load.lane.failed is None for load in self._open)

    async def send(self, batches: Sequence[Batch], grant: Grant, *, deadline_s: float,
                   corrupt: Callable[[Batch], frozenset[int]]) -> list[Outcome]:
        """What became of each batch by ``deadline_s`` (loop time). Raises nothing but cancellation."""
        sent: list[tuple[Transfer, asyncio.Future[Outcome]]] = []
        unsent = _LATE
        try:
            async with asyncio.timeout_at(deadline_s):
                for batch in batches:
                    load = await self._lane()
                    if isinstance(load, Trouble):
                        unsent = load
                        break
                    await self._room(batch.nbytes)
                    sent.append(self._submit(load, batch, grant, deadline_s, corrupt(batch)))
                for _, future in sent:
                    await future
        except TimeoutError:
            self._drop_silent()
        finally:
            for transfer, future in sent:
                if not _is_told(future):
                    transfer.abandoned = True
        told = [future.result() if _is_told(future) else [_LATE] * len(transfer.batch.pieces)
                for transfer, future in sent]
        return told + [[unsent] * len(batch.pieces) for batch in batches[len(sent):]]

    def fail(self, trouble: Trouble) -> list[Lane]:
        """Ends everything on its way; returns the lanes whose threads still run."""
        for lane in self._started:
            lane.fail(trouble)
        return [lane for lane in self._started if lane.alive]

    async def _lane(self) -> _Load | Trouble:
        """The least loaded lane; another one when that is busy and there may be more.

        It may have failed by the time it is used: then it reports so for what it is given.
        """
        self._open = [load for load in self._open if load.lane.failed is None]
        best = min(self._open, key=lambda load: load.nbytes, default=None)
        if best is not None and (best.nbytes < LANE_BYTES or len(self._open) >= self._max_lanes):
            return best
        if self._opening is None:
            self._opening = self._start()
        # Others may wait for it too: our deadline must not end their wait.
        opened = await asyncio.shield(self._opening)
        if isinstance(opened, Trouble):
            return best if best is not None else opened
        return min(self._open, key=lambda load: load.nbytes, default=opened)

    def _start(self) -> asyncio.Future[_Load | Trouble]:
        loop = asyncio.get_running_loop()
        opening: asyncio.Future[_Load | Trouble] = loop.create_future()
        lane = self._make_lane()
        self._started = [other for other in self._started if other.alive]
        self._started.append(lane)
        lane.start(partial(call_on, loop, self._opened, lane, opening))
        return opening

    def _opened(self, lane: Lane, opening: asyncio.Future[_Load | Trouble], trouble: Trouble | None) -> None:
        self._opening = None
        if trouble is not None:
            opening.set_result(trouble)
            return
        load = _Load(lane)
        self._open.append(load)
        opening.set_result(load)

    def _submit(self, load: _Load, batch: Batch, grant: Grant, deadline_s: float,
                corrupt: frozenset[int]) -> tuple[Transfer, asyncio.Future[Outcome]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        transfer = Transfer(batch, grant, max(1e-3, deadline_s - loop.time()),
                            partial(call_on, loop, self._finished, load, batch.nbytes, future), corrupt)
        load.nbytes += batch.nbytes
        load.lane.submit(transfer)
        return transfer, future

    def _finished(self, load: _Load, nbytes: int, future: asyncio.Future[Outcome], outcome: Outcome) -> None:
        load.nbytes -= nbytes
        self._give_back(nbytes)
        if not future.done():
            future.set_result(outcome)

    def _drop_silent(self) -> None:
        """A push ran out of time: lanes whose peer has been silent are dead, not slow."""
        for load in self._open:
            silence_s = load.lane.silence_s()
            if silence_s >= self._silence_s:
                load.lane.fail(Trouble(TransferTimeout, f"the peer has been silent for {silence_s:.1f} s"))

    async def _room(self, nbytes: int) -> None:
        """Waits, in order of arrival, until ``nbytes`` more may be on their way."""
        if not self._waiting and self._fits(nbytes):
            self._take(nbytes)
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, ticket)
        self._waiting.append(entry)
        try:
            await ticket
        except asyncio.CancelledError:
            if _is_told(ticket):
                self._give_back(nbytes)
            else:
                self._waiting.remove(entry)
                self._admit()
            raise

    def _fits(self, nbytes: int) -> bool:
        return self._batches == 0 or (self._batches < WINDOW and self._nbytes + nbytes <= self._max_inflight)

    def _take(self, nbytes: int) -> None:
        self._batches += 1
        self._nbytes += nbytes
        metrics.TRANSFER_IN_FLIGHT_BYTES.inc(nbytes)

    def _give_back(self, nbytes: int) -> None:
        self._batches -= 1
        self._nbytes -= nbytes
        metrics.TRANSFER_IN_FLIGHT_BYTES.dec(nbytes)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, ticket = self._waiting.popleft()
            if not ticket.cancelled():
                self._take(nbytes)
                ticket.set_result(None)


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Calls ``function`` on ``loop``, from any thread; does nothing once the loop is closed: nobody waits there."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _is_told(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled()
