"""One push, from its start to its result: batches by the best path, what broke again by the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from shared.messages import Endpoint, Grant
from shared.transfer.addresses import host_clock_s
from shared.transfer.lane import Trouble
from shared.transfer.link import Link, Sending
from shared.transfer.plan import Batch, Choice, Routes
from shared.transfer.router import Router
from shared.transfer.types import PathFailed, PeerGone, PushResult, Slice, SliceStatus, TransferCancelled, TransferError

_NOTHING = Batch((), 0)


class Push:
    """A push on its way; ``await`` gives its :class:`PushResult`, and every push ends by its deadline.

    Do not change the source bytes before it has ended. Cancelling whoever awaits it cancels it.
    """

    def __init__(self, router: Router, peer: Endpoint, slices: Sequence[Slice], grant: Grant, *, deadline_s: float,
                 note: bytes | None) -> None:
        self._router, self._peer, self._slices, self._grant = router, peer, slices, grant
        self._deadline_s, self._note = deadline_s, note
        self._loop = asyncio.get_running_loop()
        self._started_s = host_clock_s()
        self._todo = {i: item for i, item in enumerate(slices) if item.remote.length}
        self._troubles: dict[int, Trouble] = {}
        self._path = [""] * len(slices)
        self._ended_s = [self._started_s] * len(slices)
        self._paths: list[str] = []
        self._note_trouble: Trouble | None = None
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
        if not self._todo and self._note is None:
            self._finish()
            return
        self._routes = self._router.routes(self._peer)
        if not self._routes.choices:
            self._fail_all(self._routes.excluded)
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

    # -- steps --------------------------------------------------------------------------------------------------

    def _next(self, choice: Choice) -> Sending:
        """What is still to be done, for the path of ``choice``."""
        batches = self._router.plan(self._peer, choice, self._todo) or [_NOTHING]
        self._sending = Sending(batches, self._grant, self._deadline_s, self._note if len(batches) == 1 else None,
                                self._router.corrupt, cancelled=self._cancelled)
        return self._sending

    def _all_told(self) -> None:
        """Everything that :meth:`start` sent has its outcome."""
        if self._timer is not None:
            self._timer.cancel()
        sending = self._sending
        assert sending is not None
        choice = self._routes.choices[0]
        link = self._router.link(self._peer, choice)
        if sending.left == 0 and self._is_settled(sending):
            self._collect(choice, link, sending)
            self._finish()
        else:
            self._task = self._loop.create_task(self._run(sending))

    def _is_settled(self, sending: Sending) -> bool:
        """Can nothing more be done for it?"""
        if sending.note is not self._note:
            return False
        return sending.is_whole or not any(trouble is not None and trouble.kind is PeerGone
                       for outcome in sending.outcomes for trouble in outcome or ())

    async def _run(self, sent: Sending | None) -> None:
        """What needs more than one step; ``sent`` is the first step's, if it is over."""
        try:
            await self._try_paths(sent)
            if self._note is not None and not self._troubles and self._note_trouble is None and not self._cancelled:
                await self._try_paths(None)  # every batch is committed: now the note may go
        except BaseException:
            self._troubles |= dict.fromkeys(self._todo, Trouble(PeerGone, "the push itself failed"))
            raise
        finally:
            self._finish()

    async def _try_paths(self, sent: Sending | None) -> None:
        """Path after path, twice where the connection was an old one, until nothing is left that broke."""
        choices = self._routes.choices
        for i, choice in enumerate(choices):
            if i:
                self._router.counts.failed_over(choices[i - 1].path, choice.path)
            for _ in range(2):
                link = self._router.link(self._peer, choice)
                pooled = link.connected or sent is not None
                sending, sent = sent or self._next(choice), None
                if sending.left:
                    await link.send(sending)
                broke = self._collect(choice, link, sending)
                if not broke or self._cancelled or self._router.closed:
                    return
                if not pooled:
                    break  # a pooled connection may just have gone stale; a fresh one that fails is a verdict

    def _collect(self, choice: Choice, link: Link, sending: Sending) -> bool:
        """Books the outcomes; true if a connection broke: what may be tried again is left in ``_todo``."""
        if sending.is_whole:  # nearly always
            self._book_whole(choice, link, sending)
            return False
        new: dict[int, Trouble] = {}
        acknowledged = 0
        for batch, outcome, ended_s in zip(sending.batches, sending.outcomes, sending.ended_s, strict=True):
            assert outcome is not None
            for piece, trouble in zip(batch.pieces, outcome, strict=False):
                if trouble is None:
                    acknowledged += piece.remote.length
                for index in range(piece.first, piece.last + 1):
                    self._path[index], self._ended_s[index] = choice.path, ended_s
                    if trouble is not None and index in self._todo:
                        new.setdefault(index, trouble)
        for index in self._todo:
            self._troubles.pop(index, None)
        self._troubles |= new
        self._todo = {i: self._todo[i] for i, trouble in new.items() if trouble.kind is PeerGone}
        if sending.note is not None:
            trouble = next((trouble for trouble in sending.outcomes[-1] or () if trouble is not None), None)
            if trouble is None:
                self._note = None
            if sending.batches[-1] is _NOTHING:
                self._note_trouble = trouble
        if acknowledged and choice.path not in self._paths:
            self._paths.append(choice.path)
        gone = next((trouble for outcome in sending.outcomes for trouble in outcome or ()
                     if trouble is not None and trouble.kind is PeerGone), None)
        self._router.counts.pushed(choice.path, acknowledged, seconds=host_clock_s() - self._started_s)
        self._router.judge(self._peer, choice, link, gone)
        return gone is not None

    def _book_whole(self, choice: Choice, link: Link, sending: Sending) -> None:
        """Everything that was to be done arrived."""
        for batch, ended_s in zip(sending.batches, sending.ended_s, strict=True):
            for piece in batch.pieces:
                for index in range(piece.first, piece.last + 1):
                    self._path[index], self._ended_s[index] = choice.path, ended_s
        for index in self._todo if self._troubles else ():
            self._troubles.pop(index, None)
        self._todo = {}
        if sending.note is not None:
            self._note = self._note_trouble = None
        nbytes = sum(batch.nbytes for batch in sending.batches)
        if nbytes and choice.path not in self._paths:
            self._paths.append(choice.path)
        self._router.counts.pushed(choice.path, nbytes, seconds=host_clock_s() - self._started_s)
        self._router.judge(self._peer, choice, link, None)

    def _fail_all(self, excluded: Mapping[str, str]) -> None:
        why = "; ".join(f"{path}: {reason}" for path, reason in excluded.items()) or "no path is allowed"
        self._troubles = dict.fromkeys(self._todo, Trouble(PathFailed, why))
        if not self._todo:
            self._note_trouble = Trouble(PathFailed, why)
        self._finish()

    def _finish(self) -> None:
        if self.done:
            return
        if self._note is not None and not self._troubles and self._note_trouble is None:
            self._note_trouble = Trouble(TransferCancelled, "cancelled before the receiver was notified")
        path = self._path[-1] if self._path else ""
        self._router.counts.failed(path or "none", [trouble.kind.code for trouble in self._troubles.values()])
        statuses = []
        for i, item in enumerate(self._slices):
            trouble = self._troubles.get(i)
            error = None if trouble is None else self._error(trouble, item.remote.length, item.remote.segment)
            statuses.append(SliceStatus(item, error, self._path[i], self._ended_s[i] - self._started_s))
        note = self._note_trouble
        self._result = PushResult(
            statuses, None if note is None else self._error(note, 0, ""), sum(status.nbytes for status in statuses),
            host_clock_s() - self._started_s, "+".join(self._paths))
        self._router.ended(self)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _error(self, trouble: Trouble, nbytes: int, segment: str) -> TransferError:
        return trouble.kind(self._peer.worker, trouble.why, nbytes=nbytes, segment=segment)

    def uses(self, segment: str) -> bool:
        """Does it read bytes of our ``segment``?"""
        return any(item.segment == segment for item in self._slices)


def start_push(router: Router, peer: Endpoint, slices: Sequence[Slice], grant: Grant, *, deadline_s: float,
               note: bytes | None) -> Push:
    """A push that has taken its first step. ``deadline_s`` is on the host's clock."""
    push = Push(router, peer, slices, grant, deadline_s=deadline_s, note=note)
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
