"""One push, from its start to its result: batches by the best path, what broke again by the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from shared.messages import Endpoint, Grant
from shared.transfer.addresses import host_clock_s
from shared.transfer.link import Link, Sending
from shared.transfer.plan import Choice, Routes
from shared.transfer.router import Router
from shared.transfer.tally import NOTHING, Tally
from shared.transfer.types import PeerGone, PushResult, Slice, Trouble


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
                self._timer = self._loop.call_later(self._deadline_s - host_clock_s(), link.expire, sending)
        else:
            self._task = self._loop.create_task(self._run(None))

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

    def _all_told(self) -> None:
        """Everything that :meth:`start` sent has its outcome."""
        if self._timer is not None:
            self._timer.cancel()
        choice, sending = self._routes.choices[0], self._sending
        assert sending is not None
        link = self._router.link(self._peer, choice)
        broke = self._take(choice, link, sending)
        if broke or self._tally.owes_note:
            self._task = self._loop.create_task(self._run(broke))
        else:
            self._finish()

    async def _run(self, broke: bool | None) -> None:
        """What needs more than one step; ``broke``: what the first step was broken by, ``None`` if none was taken."""
        try:
            if broke is not False:
                await self._try_paths(again=broke is True)
            if self._tally.owes_note and not self._cancelled:
                await self._try_paths(again=False)  # every batch is committed: now the note may go
        except BaseException:
            self._tally.troubles |= dict.fromkeys(self._tally.todo, Trouble(PeerGone, "the push itself failed"))
            raise
        finally:
            self._finish()

    async def _try_paths(self, *, again: bool) -> None:
        """Path after path, twice where the connection was an old one, until nothing is left that broke.

        ``again``: the first path's old connection was tried already.
        """
        choices = self._routes.choices
        for i, choice in enumerate(choices):
            if i:
                self._router.counts.failed_over(choices[i - 1].path, choice.path)
            pooled = True
            while pooled and not (self._cancelled or self._router.closed):
                link = self._router.link(self._peer, choice)
                pooled, again = link.connected and not again, False
                sending = self._next(choice)
                await link.send(sending)
                if not self._take(choice, link, sending):
                    return

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
    """Pushes that belong together, such as the layers of a block: each starts at once, one completion for all.

    Made by :meth:`TransferEngine.stream`. Do not change the source bytes before :meth:`close` has returned.
    """

    def __init__(self, router: Router, peer: Endpoint, grant: Grant, *, deadline_s: float,
                 check: Callable[[Sequence[Slice]], int]) -> None:
        self._router, self._peer, self._grant, self._deadline_s = router, peer, grant, deadline_s
        self._check = check
        self._pushes: list[Push] = []
        self._started_s = host_clock_s()

    def push(self, slices: Sequence[Slice]) -> Push:
        """Starts to push ``slices``; need not be awaited. Raises :class:`Bug` for a slice that is not of our memory."""
        self._check(slices)
        push = start_push(self._router, self._peer, slices, self._grant, deadline_s=self._deadline_s, note=None)
        self._pushes.append(push)
        return push

    def cancel(self) -> None:
        """Cancels every push."""
        for push in self._pushes:
            push.cancel()

    async def close(self, *, notify: bytes | None = None) -> PushResult:
        """The result of all pushes, in order. Then, if all arrived, tells the receiver ``notify``."""
        results = await _all(self._pushes)
        statuses = [status for result in results for status in result.slices]
        paths = dict.fromkeys(path for result in results for path in result.path.split("+") if path)
        note_error = None
        if notify is not None and all(result.ok for result in results):
            told = await start_push(self._router, self._peer, (), self._grant, deadline_s=self._deadline_s, note=notify)
            note_error = told.note_error
        return PushResult(statuses, note_error, sum(result.nbytes for result in results),
                          host_clock_s() - self._started_s, "+".join(paths))


async def _all(pushes: Iterable[Push]) -> list[PushResult]:
    try:
        return [await push for push in pushes]
    except asyncio.CancelledError:
        for push in pushes:
            push.cancel()
        for push in pushes:
            await push
        raise
