"""The engine for programs without an event loop: the same surface, blocking, from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

import uvloop

from shared.errors import Bug
from shared.ids import HostId, Incarnation, OperationId, WorkerId
from shared.messages import Endpoint, Grant, Range
from shared.transfer import shm, tcp
from shared.transfer.addresses import host_clock_s
from shared.transfer.direct import DONE, Lines
from shared.transfer.engine import LANES, TransferEngine
from shared.transfer.ledger import ANYBODY
from shared.transfer.plan import BATCH_BYTES, MIN_SPREAD_BYTES, Choice
from shared.transfer.push import resume_push
from shared.transfer.segment import Segment
from shared.transfer.settings import TransferSettings
from shared.transfer.statistics import Statistics
from shared.transfer.tally import NOTHING, Tally
from shared.transfer.types import Notification, Outcome, PushResult, Slice, SliceStatus

ONE_PIECE_BYTES = {shm.PATH: MIN_SPREAD_BYTES, tcp.PATH: BATCH_BYTES}
"""{path on which the calling thread speaks to the peer itself: a slice up to this is one piece, whatever was set}"""

T = TypeVar("T")


class SyncTransferEngine:
    """A :class:`TransferEngine` on a loop of its own, which serves peers in the background.

    Pushes by shared memory and TCP do not go through that loop but straight from the calling thread; what breaks
    there is tried once more by the loop's engine, with its other paths.
    """

    def __init__(self, engine: TransferEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self._lines = Lines(LANES, engine.sender)
        self._notifications = engine.notifications()
        self._reading: list[Sequence[Slice]] = []
        """Slices of the pushes that go on."""
        self._ended = threading.Condition()
        self._awaiting = 0
        """Threads that wait for pushes to end."""
        self._closed = False

    @classmethod
    @contextmanager
    def open(cls, *, worker: WorkerId, incarnation: Incarnation, host: HostId | None = None,
             settings: TransferSettings | None = None) -> Iterator[SyncTransferEngine]:
        """See :meth:`TransferEngine.open`; leaving waits for the pushes that go on."""
        loop = uvloop.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name=f"transfer-{worker}-loop", daemon=True)
        thread.start()
        stack = AsyncExitStack()
        try:
            engine = _call(loop, stack.enter_async_context(TransferEngine.open(
                worker=worker, incarnation=incarnation, host=host, settings=settings)))
            sync = cls(engine, loop)
            try:
                yield sync
            finally:
                sync._closed = True
                sync._wait_for(lambda slices: True)
                sync._lines.drop()
        finally:
            _call(loop, stack.aclose())
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    @property
    def endpoint(self) -> Endpoint:
        """How peers reach this engine."""
        return self._engine.endpoint

    def register(self, name: str, nbytes: int = 0, *, memory: Any = None) -> Segment:
        """See :meth:`TransferEngine.register`."""
        return self._engine.register(name, nbytes, memory=memory)

    def unregister(self, name: str) -> None:
        """See :meth:`TransferEngine.unregister`; pushes from it are waited for."""
        segment = self._engine.begin_unregister(name)
        self._wait_for(lambda slices: any(item.segment == name for item in slices))
        _call(self._loop, self._engine.finish_unregister(segment))
        self._lines.drop()

    def grant(self, operation: OperationId, ranges: Sequence[Range], *, ttl_s: float,
              peer: WorkerId = ANYBODY) -> Grant:
        """See :meth:`TransferEngine.grant`."""
        return self._engine.grant(operation, ranges, ttl_s=ttl_s, peer=peer)

    def covered(self, operation: OperationId, range: Range) -> bool:
        """See :meth:`TransferEngine.covered`."""
        return self._engine.covered(operation, range)

    def shut(self, operation: OperationId) -> None:
        """See :meth:`TransferEngine.shut`."""
        self._engine.shut(operation)

    def received_bytes(self, operation: OperationId) -> int:
        """See :meth:`TransferEngine.received_bytes`."""
        return self._engine.received_bytes(operation)

    def release(self, operation: OperationId) -> None:
        """See :meth:`TransferEngine.release`."""
        _call(self._loop, self._engine.release(operation))

    def next_notification(self, timeout_s: float) -> Notification | None:
        """The next one of :meth:`TransferEngine.notifications`; ``None`` when none came in time."""
        return _call(self._loop, self._next_notification(timeout_s))

    def statistics(self) -> Statistics:
        """See :meth:`TransferEngine.statistics`."""
        return self._engine.statistics()

    def push(self, peer: Endpoint, slices: Sequence[Slice], grant: Grant, *, timeout_s: float | None = None,
             notify: bytes | None = None) -> PushResult:
        """See :meth:`TransferEngine.push`; returns when it has ended."""
        engine, started_s = self._engine, host_clock_s()
        self._reading.append(slices)  # before we look whether it may be read: whoever forbids it looks here after that
        try:
            if self._closed:
                raise Bug("this engine was closed")
            deadline_s = started_s + engine.settings.timeout_s(engine.check(slices, notify), timeout_s)
            choice = self._direct_choice(peer, slices)
            first = None if choice is None else self._send_one(peer, choice, slices, notify, grant, deadline_s)
            if choice is not None and first is DONE:
                now_s, nbytes = host_clock_s(), slices[0].remote.length
                status = SliceStatus(slices[0], None, choice.path, now_s - started_s)
                result = PushResult([status], None, nbytes, status.seconds, choice.path)
            else:
                tally = Tally(peer.worker, slices, notify, started_s)
                if choice is None or not self._push_directly(peer, choice, tally, first, grant, deadline_s):
                    return _call(self._loop, _resume(engine, peer, tally, grant, deadline_s))
                result = tally.result(host_clock_s())
            engine.router.counts.ended(result)
            return result
        finally:
            self._forget(slices)

    def _forget(self, slices: Sequence[Slice]) -> None:
        self._reading.remove(slices)
        if self._awaiting:
            with self._ended:
                self._ended.notify_all()

    def _wait_for(self, concerned: Callable[[Sequence[Slice]], bool]) -> None:
        """Returns once no push of such slices goes on."""
        with self._ended:
            self._awaiting += 1
            self._ended.wait_for(lambda: not any(concerned(slices) for slices in list(self._reading)))
            self._awaiting -= 1

    def _direct_choice(self, peer: Endpoint, slices: Sequence[Slice]) -> Choice | None:
        """The best path, if it is one on which the calling thread speaks for itself."""
        choices = self._engine.router.routes(peer, slices).choices
        if not choices or choices[0].path not in ONE_PIECE_BYTES or self._engine.settings.corrupt_every:
            return None
        return choices[0]

    def _send_one(self, peer: Endpoint, choice: Choice, slices: Sequence[Slice], note: bytes | None, grant: Grant,
                  deadline_s: float) -> Outcome | None:
        """What became of a push that is one plain piece; ``None``, with nothing sent, if it is more than that."""
        if len(slices) != 1 or note is not None:
            return None
        item = slices[0]
        if item.count != 1 or not 0 < item.remote.length <= ONE_PIECE_BYTES[choice.path]:
            return None
        return self._lines.send_one(peer, choice, item, grant, deadline_s)

    def _push_directly(self, peer: Endpoint, choice: Choice, tally: Tally, first: Outcome | None, grant: Grant,
                       deadline_s: float) -> bool:
        """Does what can be done from this thread; false when something is left that another path may do.

        ``first``: what :meth:`_send_one` has achieved.
        """
        engine = self._engine
        while tally.todo or tally.note is not None:
            batches = engine.router.plan(peer, choice, tally.todo) or [NOTHING]
            note = tally.note_for(batches)
            lanes = engine.settings.lanes if choice.path == shm.PATH else 1
            outcomes = [first] if first is not None else self._lines.send(
                peer, choice, batches, grant, deadline_s=deadline_s, note=note, lanes=lanes)
            first, now_s = None, host_clock_s()
            if tally.take(choice.path, batches, outcomes, [now_s] * len(batches), note) is not None:
                return False
            if not tally.owes_note:
                break
        return True

    async def _next_notification(self, timeout_s: float) -> Notification | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self._notifications)
        except TimeoutError:
            self._notifications = self._engine.notifications()
            return None


async def _resume(engine: TransferEngine, peer: Endpoint, tally: Tally, grant: Grant, deadline_s: float) -> PushResult:
    return await resume_push(engine.router, peer, tally, grant, deadline_s=deadline_s)


def _call(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    if loop.is_closed():
        work.close()
        raise Bug("this engine was closed")
    return asyncio.run_coroutine_threadsafe(work, loop).result()
