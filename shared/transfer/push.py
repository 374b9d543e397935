"""One push, from its start to its result: batches by the best path, what broke again by the next."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

from shared.errors import Bug
from shared.ids import WorkerId
from shared.messages import Endpoint, Grant
from shared.transfer.addresses import host_clock_s
from shared.transfer.link import EARLY_S, Link, Sending
from shared.transfer.plan import Choice, Routes
from shared.transfer.router import Router
from shared.transfer.tally import NOTHING, Tally
from shared.transfer.types import (
    ChecksumMismatch,
    PeerGone,
    PushResult,
    Slice,
    SliceStatus,
    TransferCancelled,
    TransferError,
    Trouble,
)

_log = logging.getLogger(__name__)

STREAM_PUSHES = 2
"""Pushes of a stream on their way at the same time: the path never waits, and what waits grows into larger pushes."""
MAX_SENDS = 3
"""Times a slice of a stream is sent before damage is taken for more than bad luck."""


class Push:
    """A push on its way; ``await`` gives its :class:`PushResult`, and every push ends by its deadline.

    Do not change the source bytes before it has ended. Cancelling whoever awaits it cancels it.
    """

    def __init__(self, router: Router, peer: Endpoint, tally: Tally, grant: Grant, *, deadline_s: float) -> None:
        self._router, self._peer, self._tally, self._grant = router, peer, tally, grant
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._routes = Routes((), {})
        self._task: asyncio.Task[None] | None = None
        self._sending: Sending | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancelled = False
        self._result: PushResult | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._callbacks: list[Callable[[Push], object]] = []

    @property
    def done(self) -> bool:
        """Has it ended?"""
        return self._result is not None

    @property
    def result(self) -> PushResult | None:
        """How it ended; ``None`` while it has not."""
        return self._result

    def cancel(self) -> None:
        """Holds back what is not on its way yet. It ends once the rest has arrived or failed. Idempotent."""
        if self.done or self._cancelled:
            return
        self._cancelled = True
        if self._sending is not None:
            self._sending.cancelled = True
        if self._task is not None:
            self._task.cancel()

    def call_when_done(self, callback: Callable[[Push], object]) -> None:
        """Calls ``callback`` with this push soon after it has ended, from the loop."""
        if self.done:
            self._loop.call_soon(callback, self)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, PushResult]:
        cancelled: asyncio.CancelledError | None = None
        while self._result is None:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                yield from waiter
            except asyncio.CancelledError as error:  # the source is the caller's again only once nothing reads it
                cancelled = error
                self.cancel()
        if cancelled is not None:
            raise cancelled
        return self._result

    def start(self) -> None:
        """Takes the first step: everything goes out at once where nothing has to be waited for."""
        tally = self._tally
        if not tally.todo and tally.note is None:
            self._finish()
            return
        self._routes = self._router.routes(self._peer, tally.slices)
        if not self._routes.choices:
            tally.fail_all(self._routes.excluded)
            self._finish()
            return
        choice = self._routes.choices[0]
        link = self._router.link(self._peer, choice)
        sending = self._next(choice)
        sending.told = self._all_told
        if link.send_now(sending):
            if not self.done:
                self._expire_in_time(link, sending)
        else:
            self._go_on(None)

    def uses(self, segment: str) -> bool:
        """Does it read bytes of our ``segment``?"""
        return any(item.segment == segment for item in self._tally.todo.values())

    # -- steps --------------------------------------------------------------------------------------------------

    def _next(self, choice: Choice) -> Sending:
        """What is still to be done, for the path of ``choice``."""
        batches = self._router.plan(self._peer, choice, self._tally.todo) or [NOTHING]
        self._sending = Sending(batches, self._grant, self._deadline_s, self._tally.note_for(batches),
                                self._router.corrupt, cancelled=self._cancelled)
        return self._sending

    def _expire_in_time(self, link: Link, sending: Sending) -> None:
        """Not a moment before the deadline."""
        left_s = self._deadline_s - host_clock_s()
        if left_s <= 0:
            link.expire(sending)
        else:
            self._timer = self._loop.call_later(left_s + EARLY_S, self._expire_in_time, link, sending)

    def _all_told(self) -> None:
        """Everything that :meth:`start` sent has its outcome."""
        if self._timer is not None:
            self._timer.cancel()
        choice, sending = self._routes.choices[0], self._sending
        assert sending is not None
        link = self._router.link(self._peer, choice)
        broke = self._take(choice, link, sending)
        if broke or self._tally.owes_note:
            self._go_on(broke)
        else:
            self._finish()

    def _go_on(self, broke: bool | None) -> None:
        """Does in a task what needs more than one step."""
        self._task = self._loop.create_task(self._run(broke))
        self._task.add_done_callback(self._ran)  # even a task that is cancelled before it began tells of its end

    def _ran(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("action=push_failed peer=%s", self._peer.worker, exc_info=error)
            self._tally.troubles |= dict.fromkeys(self._tally.todo, Trouble(PeerGone, f"the push failed: {error!r}"))
        self._finish()

    async def _run(self, broke: bool | None) -> None:
        """``broke``: did a connection break in the first step? ``None`` if none was taken."""
        if broke is not False:
            await self._try_paths(again=broke is True)
        if self._tally.owes_note and not (self._cancelled or self._router.closed):
            await self._try_paths(again=False)  # every batch is committed: now the note may go

    async def _try_paths(self, *, again: bool) -> None:
        """Path after path, twice where there was a connection that broke, until nothing is left that broke.

        ``again``: the first path was tried once already.
        """
        choices = self._routes.choices
        for i, choice in enumerate(choices):
            if i:
                self._router.counts.failed_over(choices[i - 1].path, choice.path)
            for _ in range(1 if again else 2):
                link = self._router.link(self._peer, choice)
                sending = self._next(choice)
                await link.send(sending)
                if not self._take(choice, link, sending):
                    return
                if not sending.transfers:
                    break  # it did not even connect
            again = False

    def _take(self, choice: Choice, link: Link, sending: Sending) -> bool:
        """Books the outcomes; true if a connection broke and something may be tried again."""
        broke = self._tally.take(choice.path, sending.batches, sending.outcomes, sending.ended_s, sending.note)
        self._router.judge(self._peer, choice, link, broke)
        return broke is not None and not (self._cancelled or self._router.closed)

    def _finish(self) -> None:
        if self.done:
            return
        self._result = result = self._tally.result(host_clock_s())
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._router.ended(self, result)
        for callback in self._callbacks:
            self._loop.call_soon(callback, self)


def start_push(router: Router, peer: Endpoint, slices: Sequence[Slice], grant: Grant, *, deadline_s: float,
               note: bytes | None) -> Push:
    """A push that has taken its first step. ``deadline_s`` is on the host's clock."""
    return resume_push(router, peer, Tally(peer.worker, slices, note, host_clock_s()), grant, deadline_s=deadline_s)


def resume_push(router: Router, peer: Endpoint, tally: Tally, grant: Grant, *, deadline_s: float) -> Push:
    """A push of what ``tally`` has left to be done, started."""
    push = Push(router, peer, tally, grant, deadline_s=deadline_s)
    router.pushes.add(push)
    push.start()
    return push


class PushStream:
    """Slices that become ready one after the other, such as layers that are computed; one completion for all.

    Made by :meth:`TransferEngine.stream`. What becomes ready while earlier slices are on their way leaves with the
    next ones, so the pace of the path sets the size of its pushes. A slice that arrives damaged is sent again.
    Do not change the source bytes before :meth:`close` or :meth:`stop` has returned.
    """

    def __init__(self, peer: WorkerId, check: Callable[[Sequence[Slice]], object],
                 start: Callable[[Sequence[Slice], bytes | None], Push]) -> None:
        self._peer, self._check, self._start = peer, check, start
        self._slices: list[Slice] = []
        self._statuses: dict[int, SliceStatus] = {}
        self._ready: list[int] = []
        """Indexes of slices that wait to be sent."""
        self._attempts: Counter[int] = Counter()
        self._flying: dict[Push, list[int]] = {}
        self._idle = asyncio.Event()
        """Is nothing on its way?"""
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._pumping = False
        """Will what is ready be started soon?"""
        self._began_s = 0.0
        self.pushes = 0
        """Started so far."""
        self.broken: asyncio.Future[TransferError] = self._loop.create_future()
        """Resolves as soon as a slice cannot be delivered; what was not sent by then is not sent any more."""

    def push(self, slices: Sequence[Slice]) -> None:
        """These slices hold their final bytes now. Raises :class:`Bug` for one that is not of our memory."""
        self._check(slices)
        self._ready += range(len(self._slices), len(self._slices) + len(slices))
        self._slices += slices
        if not self._pumping:  # what becomes ready in the same turn of the loop leaves together
            self._pumping = True
            self._loop.call_soon(self._pump)

    async def close(self, *, notify: bytes | None = None) -> PushResult:
        """The result of everything, in order, once all has ended; then, if all arrived, tells the receiver ``notify``.

        A slice that was not sent, since an earlier one broke the stream, has that one's error.
        """
        self._pump()
        while self._flying:
            await self._idle.wait()
        if notify is None or self.broken.done():
            return self._result(None)
        return self._result(await self._start((), notify))

    async def stop(self) -> None:
        """Sends nothing more and returns once nothing is on its way, even if it is cancelled meanwhile. Idempotent."""
        self.broken.cancel()  # from here on nothing starts, whatever becomes ready
        for push in list(self._flying):
            push.cancel()
        cancelled: asyncio.CancelledError | None = None
        while self._flying:
            try:
                await self._idle.wait()
            except asyncio.CancelledError as error:  # the source is the caller's again only once nothing reads it
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _pump(self) -> None:
        self._pumping = False
        while self._ready and len(self._flying) < STREAM_PUSHES and not self.broken.done():
            indexes, self._ready = self._ready, []
            self._began_s = self._began_s or host_clock_s()
            try:
                push = self._start([self._slices[i] for i in indexes], None)
            except Bug as bug:  # they were good when they became ready: their memory has been unregistered since
                self.broken.set_result(TransferCancelled(self._peer, str(bug)))
                break
            self.pushes += 1
            self._idle.clear()
            self._flying[push] = indexes
            push.call_when_done(self._ended)
        if not self._flying:
            self._idle.set()

    def _ended(self, push: Push) -> None:
        result, indexes = push.result, self._flying.pop(push)
        assert result is not None
        for index, status in zip(indexes, result.slices, strict=True):
            self._statuses[index] = status
            if status.error is None:
                continue
            self._attempts[index] += 1
            if isinstance(status.error, ChecksumMismatch) and self._attempts[index] < MAX_SENDS:
                self._ready.append(index)  # the source is intact, so sending it again is right
            elif not self.broken.done():
                self.broken.set_result(status.error)
        self._pump()

    def _result(self, note: PushResult | None) -> PushResult:
        broke = self.broken.done() and not self.broken.cancelled()
        error = self.broken.result() if broke else TransferCancelled(self._peer, "stopped before it was sent")
        statuses = [self._statuses.get(i) or SliceStatus(item, error) for i, item in enumerate(self._slices)]
        paths = dict.fromkeys(status.path for status in statuses if status.error is None and status.path)
        return PushResult(
            statuses, None if note is None else note.note_error, sum(status.nbytes for status in statuses),
            host_clock_s() - self._began_s if self._began_s else 0.0, "+".join(paths))
