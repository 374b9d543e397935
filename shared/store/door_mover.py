"""The threads of a door: each serves one connection for bytes, and asks the worker's event loop for the rest."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from shared.store import door_frames as frames
from shared.store.door_holds import Holds
from shared.store.door_intake import Intake, take
from shared.store.door_keep import Keep, tally
from shared.store.door_line import Late, Line
from shared.store.door_visit import Visit
from shared.transfer.addresses import host_clock_s
from shared.transfer.channel import Closed
from shared.transfer.ledger import checksum
from shared.transfer.tcp import LOCAL_QUEUE_BYTES

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Mover:
    """Made on the loop. What its methods say is the thread's, a thread does; all else is the loop's.

    ``serve`` answers on the loop what is no matter of bytes; ``lend`` answers a GET for a thread; ``end`` takes back
    what a visit holds.
    """

    def __init__(self, keep: Keep, intake: Intake, holds: Holds, *, answer: Callable[[Visit, frames.Reply], None],
                 serve: Callable[[Visit, object], Awaitable[None]],
                 lend: Callable[[Visit, frames.Get], Awaitable[frames.Reply]], end: Callable[[Visit], None]) -> None:
        self._keep, self._intake, self._holds = keep, intake, holds
        self._answer, self._serve, self._lend, self._end = answer, serve, lend, end
        self._loop = asyncio.get_running_loop()
        self._asked: set[asyncio.Task[Any]] = set()
        """What threads wait for."""
        self._closing = False

    def start(self, visit: Visit) -> bool:
        """Gives a visit that has entered a thread of its own; false when there is none to be had."""
        enter, line = visit.enter, visit.line
        assert enter is not None
        line.set_blocking()
        line.hasten(self._keep.segment.native, takes_descriptors=True)
        if not visit.local and enter.host == self._keep.host:
            line.shorten_queues(LOCAL_QUEUE_BYTES)
        thread = threading.Thread(target=self._move, args=(visit,), name=f"{self._keep.worker}-{visit.id}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("action=door_visit_dropped why=%r", str(error))
            return False
        visit.thread = thread
        return True

    async def close(self, visits: list[Visit]) -> None:
        """Returns once no thread serves one of ``visits``, whose lines were shut down."""
        self._closing = True
        for task in list(self._asked):
            task.cancel()
        threads = [visit.thread for visit in visits if visit.thread is not None]
        await asyncio.to_thread(_join, threads)
        await asyncio.gather(*self._asked, return_exceptions=True)

    # -- the thread's -------------------------------------------------------------------------------------------

    def _move(self, visit: Visit) -> None:
        """Serves one connection until it ends."""
        line = visit.line
        try:
            while True:
                line.set_idle()
                visit.is_served = False
                body = line.receive()
                visit.is_served, visit.heard_s = True, host_clock_s()
                if isinstance(body, frames.Put):
                    self._take(visit, body)
                elif isinstance(body, frames.Get) and not visit.local:
                    self._give(visit, body)
                else:
                    self._call(self._serve, visit, body)
        except (Closed, OSError, Late, _Stopped):
            pass  # the normal end
        except frames.FrameError as error:
            log.info("action=door_visit_dropped why=%r", str(error))
            tally("frame", "protocol")
        except Exception:
            log.exception("action=door_visit_failed")
        finally:
            line.shutdown()
            self._tell(self._end, visit)

    def _take(self, visit: Visit, ask: frames.Put) -> None:
        """The bytes of a PUT into private slots; the loop commits them, and answers."""
        line, intake = visit.line, self._intake
        intake.attach(visit, ask.attached)
        _limit(line, ask)
        slots = self._slots_for(visit, len(ask.blocks), ask.wait_ms / 1e3)
        if slots is None:
            intake.drain(line, ask)
            self._tell(self._refuse_room, visit, ask)
            return
        try:
            filled = intake.receive(visit, ask, slots)
        except BaseException:
            self._tell(intake.give_back, visit, slots)
            raise
        self._tell(intake.conclude, visit, filled)

    def _give(self, visit: Visit, ask: frames.Get) -> None:
        """The bytes that a GET over TCP wants."""
        found = self._call(self._lend, visit, ask)
        _limit(visit.line, ask)
        if not isinstance(found, frames.Found):
            visit.line.send(found)
            return
        landings = [self._keep.bytes_of(slot) for slot in found.slots if slot != frames.MISSING]
        sums = [checksum(landing) for landing in landings] if visit.proofs else []
        visit.line.send(frames.Found(found.slots, found.until_s, sums), [landing.data for landing in landings])
        self._tell(self._holds.end_loans, visit, 1)

    def _slots_for(self, visit: Visit, count: int, wait_s: float) -> list[int] | None:
        """Out of the stock, and what is missing from the pool; ``None`` when there is no room in time."""
        slots = take(visit.stock, count)
        if len(slots) < count:
            more = self._call(self._intake.wait_slots, visit, count - len(slots), wait_s)
            if more is None:
                self._tell(self._intake.give_back, visit, slots)
                return None
            slots += more
        return sorted(slots)  # what lies together here and there is one copy

    # -- between the two ----------------------------------------------------------------------------------------

    def _tell(self, function: Callable[..., object], *arguments: Any) -> None:
        """Thread: lets the loop call it; in the order told."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _call(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Thread: lets the loop run it, and waits; raises :class:`_Stopped` once the door closes."""
        if self._closing:
            raise _Stopped
        return asyncio.run_coroutine_threadsafe(self._owned(function, *arguments), self._loop).result()

    async def _owned(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        task = asyncio.current_task()
        assert task is not None
        self._asked.add(task)
        try:
            if self._closing:
                raise _Stopped
            return await function(*arguments)
        except asyncio.CancelledError:
            raise _Stopped from None
        finally:
            self._asked.discard(task)

    def _refuse_room(self, visit: Visit, ask: frames.Put) -> None:
        self._answer(visit, self._intake.no_room(ask))


class _Stopped(Exception):
    """The door closes."""


def _limit(line: Line, ask: frames.Put | frames.Get) -> None:
    """What is asked has so much time."""
    line.set_deadline(host_clock_s() + max(0.001, ask.timeout_ms / 1e3))


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
