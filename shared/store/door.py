"""The door of a worker's store: where programs that are no workers put and get values.

A client asks for it over the bus (:class:`shared.messages.OpenDoor`), whose permissions so say who may come, and gets
addresses and a token (:mod:`shared.store.door_entry`). At the door it is served over a unix socket on the same host,
over TCP otherwise; what is said there stands in :mod:`shared.store.door_frames`.

Who does what: the pool belongs to the worker's event loop, so everything that looks at it happens there, and is short.
A connection for questions is read by the loop itself. A connection for bytes has a thread (:mod:`.door_mover`). Either
kind of connection is a *visit* (:mod:`.door_visit`); what it keeps from being evicted is the business of
:mod:`.door_holds`, what it puts that of :mod:`.door_intake`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from msgspec import structs

from shared.bus.bus import Bus
from shared.bus.subjects import DOOR
from shared.clock import Clock
from shared.ids import HostId, Incarnation, OperationId, WorkerId
from shared.kv import CacheSpec
from shared.store import door_frames as frames
from shared.store.agent import StoreAgent
from shared.store.door_crowd import admit
from shared.store.door_entry import Entry, peer_of
from shared.store.door_holds import Holds
from shared.store.door_intake import Filled, Intake
from shared.store.door_keep import Keep, tally
from shared.store.door_line import Line
from shared.store.door_mover import Mover
from shared.store.door_visit import Visit
from shared.transfer import Segment, TransferSettings, host_id
from shared.transfer.addresses import host_clock_s
from shared.transfer.channel import Closed
from shared.transfer.plan import needs_checksums
from shared.transfer.wire import keep_alive

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
INLINE_BYTES = 512 << 10
"""Values that the event loop copies itself, since handing them to a thread would take longer than that."""
WATCH_S = 0.1
MAX_AHEAD = 64
"""Questions that a client may have asked beyond one that waits for loans to end."""


class Door:
    """Made by :meth:`open`; everything here runs on the agent's event loop."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._visits: set[Visit] = set()
        self._numbers = count(1)
        self._waiting: set[asyncio.Task[Any]] = set()
        """Questions that take time."""
        self._entry = Entry(keep, self._meet)
        self._holds = Holds(keep)
        self._intake = Intake(keep, self._visits, self._answer)
        self._mover = Mover(keep, self._intake, self._holds, answer=self._answer, serve=self._serve_thread,
                            lend=self._lend_to_thread, end=self._end)

    @classmethod
    @asynccontextmanager
    async def open(cls, *, agent: StoreAgent, spec: CacheSpec, segment: Segment, num_blocks: int, bus: Bus,
                   worker: WorkerId, incarnation: Incarnation, clock: Clock,
                   settings: TransferSettings | None = None, inline_bytes: int = INLINE_BYTES,
                   all_tenants: bool = False) -> AsyncIterator[Door]:
        """Lets clients in while the context is open; ``segment`` holds block i at ``i * spec.block_bytes``.

        It listens where the transfer ``settings`` say (host, advertise, socket_dir, paths shm and tcp). Puts of up to
        ``inline_bytes`` are copied by the event loop: a worker whose loop has nothing else to do takes more of them.
        Clients see the values of the tenant that they act for, or with ``all_tenants`` those of everybody.
        Leaving ends every visit and returns when their threads have. Raises :class:`SettingError`.
        """
        settings = settings or TransferSettings()
        door = cls(Keep(
            agent=agent, spec=spec, segment=segment, num_blocks=num_blocks, worker=worker, incarnation=incarnation,
            host=HostId(settings.host_id) if settings.host_id else host_id(), clock=clock, settings=settings,
            inline_bytes=inline_bytes, all_tenants=all_tenants))
        watch: asyncio.Task[None] | None = None
        try:
            door._entry.listen()
            serving = await bus.serve(DOOR.any(worker=worker), door._entry.on_open)
            try:
                watch = asyncio.create_task(door._watch(), name="store-door-watch")
                yield door
            finally:
                await serving.close()
        finally:
            if watch is not None:
                watch.cancel()
                await asyncio.wait([watch])
            await door._close()

    @property
    def visits(self) -> int:
        """Connections that are open."""
        return len(self._visits)

    # -- coming in ----------------------------------------------------------------------------------------------

    def _meet(self, sock: socket.socket) -> None:
        """Somebody connected."""
        peer, now_s = peer_of(sock), host_clock_s()
        admission = admit(peer, [visit for visit in self._visits if not visit.is_leaving], now_s=now_s)
        if admission.leaves is not None:
            tally("enter", "displaced")
            self._cut(admission.leaves)
        if not admission.is_admitted:
            tally("enter", "full")
            sock.close()
            return
        local = sock.family == socket.AF_UNIX
        if not local:
            keep_alive(sock)
        name = f"door-{next(self._numbers)}"
        visit = Visit(Line(sock, frames.decode_request), local, name, peer, now_s, now_s + HANDSHAKE_S,
                      OperationId(f"{name}.stock"))
        self._visits.add(visit)
        self._loop.add_reader(sock.fileno(), self._hear, visit)

    def _let_in(self, visit: Visit, body: object) -> None:
        if not isinstance(body, frames.Enter):
            raise frames.FrameError(f"first frame is {type(body).__name__}, not Enter")
        why = self._entry.objection(body, local=visit.local)
        if why:
            tally("enter", why[0])
            self._answer(visit, frames.Denied(*why))
            self._cut(visit)
            return
        tally("enter", "ok")
        keep = self._keep
        visit.enter, visit.deadline_s = body, None
        visit.proofs = needs_checksums(keep.settings.proofs, "shm" if visit.local else "tcp", keep.host, body.host)
        entered = frames.Entered(keep.worker, keep.incarnation, visit.proofs, keep.inline_bytes)
        if not visit.line.send_now(entered, [self._entry.read_only] if visit.local else []):
            self._end(visit)
        elif body.serves or not visit.local:
            self._loop.remove_reader(visit.line.fileno())
            if not self._mover.start(visit):
                self._end(visit)

    # -- questions ----------------------------------------------------------------------------------------------

    def _hear(self, visit: Visit) -> None:
        """Something can be read of a visit that has no thread."""
        if self._try_read(visit):
            self._work(visit)

    def _hear_ahead(self, visit: Visit) -> None:
        """The same while a question of it waits for loans to end."""
        if self._try_read(visit):
            self._look_ahead(visit)

    def _look_ahead(self, visit: Visit) -> None:
        """What it says of loans of its own must not wait behind a question that waits for their end."""
        for i, body in enumerate(visit.inbox):
            if isinstance(body, frames.Request) and not isinstance(body, frames.Enter) and body.done:
                self._holds.end_loans(visit, body.done)
                visit.inbox[i] = structs.replace(body, done=0)
        if len(visit.inbox) > MAX_AHEAD:
            self._throw_out(visit, frames.FrameError(f"{len(visit.inbox)} questions wait; at most {MAX_AHEAD} may"))

    def _try_read(self, visit: Visit) -> bool:
        """Reads what is there; false when that was the end."""
        visit.heard_s = host_clock_s()
        try:
            visit.inbox.extend(visit.line.receive_now())
        except (Closed, OSError):
            self._end(visit)
        except frames.FrameError as error:
            self._throw_out(visit, error)
        return not visit.ended

    def _work(self, visit: Visit) -> None:
        """Answers in order what was read, as far as that takes no time."""
        before: Filled | None = None
        try:
            while visit.inbox and not visit.ended and visit.thread is None:
                body = visit.inbox.popleft()
                if isinstance(body, frames.Put):
                    self._holds.end_loans(visit, body.done)
                    if (slots := self._intake.slots_now(visit, body)) is not None:
                        before = self._intake.fill_beside(visit, body, slots, before)
                        continue
                there, before = self._intake.conclude(visit, before), None
                if not there:
                    break
                if visit.enter is None:
                    self._let_in(visit, body)
                elif isinstance(body, frames.Done):
                    self._holds.end_loans(visit, body.done)
                elif (reply := self._try_serve(visit, body)) is not None:
                    self._answer(visit, reply)
                else:
                    self._loop.remove_reader(visit.line.fileno())
                    if isinstance(body, frames.Get):
                        self._loop.add_reader(visit.line.fileno(), self._hear_ahead, visit)
                        self._look_ahead(visit)
                    self._own(self._work_slowly(visit, body))
                    return
        except frames.FrameError as error:
            self._intake.conclude(visit, before)
            self._throw_out(visit, error)
        else:
            self._intake.conclude(visit, before)

    async def _work_slowly(self, visit: Visit, body: object) -> None:
        """Answers what has to wait, and goes on with what was asked meanwhile."""
        visit.is_served = True
        try:
            reply = await self._serve_slowly(visit, body)
        except frames.FrameError as error:
            if not visit.ended:
                self._throw_out(visit, error)
            return
        finally:
            visit.is_served = False
        if reply is not None:
            self._answer(visit, reply)
        if not visit.ended:
            self._loop.add_reader(visit.line.fileno(), self._hear, visit)
            self._work(visit)

    def _try_serve(self, visit: Visit, body: object) -> frames.Reply | None:
        """The answer, unless it has to wait, for the disk, room or the end of loans: see :meth:`_serve_slowly`."""
        if isinstance(body, frames.Put):
            return None if body.wait_ms else self._intake.no_room(body)
        if isinstance(body, frames.Get | frames.Pin) and self._holds.needs_disk(visit, body):
            return None
        return self._serve(visit, body)

    async def _serve_slowly(self, visit: Visit, body: object) -> frames.Reply | None:
        """The answer; ``None`` when it was given."""
        if isinstance(body, frames.Put):
            slots = await self._intake.wait_slots(visit, len(body.blocks), body.wait_ms / 1e3)
            if slots is None:
                return self._intake.no_room(body)
            self._intake.conclude(visit, self._intake.fill(visit, body, sorted(slots)))
            return None
        assert isinstance(body, frames.Get | frames.Pin)
        async with self._from_disk(visit, body):
            reply = self._serve(visit, body)
            if reply is None and isinstance(body, frames.Get):
                reply = await self._holds.wait_to_lend(visit, body)
            return reply

    def _serve(self, visit: Visit, body: object) -> frames.Reply | None:
        """Does what takes no time; ``None`` when it would."""
        if isinstance(body, frames.Get | frames.Look | frames.Drop | frames.Pin | frames.Unpin):
            self._holds.end_loans(visit, body.done)
        match body:
            case frames.Get():
                return self._holds.lend(visit, body)
            case frames.Look():
                return self._holds.look(visit, body)
            case frames.Drop():
                return self._holds.drop(visit, body)
            case frames.Pin():
                return self._holds.pin(visit, body)
            case frames.Unpin():
                return self._holds.unpin(visit, body)
        raise frames.FrameError(f"{type(body).__name__} has no business on this connection")

    async def _serve_thread(self, visit: Visit, body: object) -> None:
        """Answers what a thread was asked and is no matter of bytes."""
        reply = self._try_serve(visit, body) or await self._serve_slowly(visit, body)
        if reply is not None:
            self._answer(visit, reply)

    async def _lend_to_thread(self, visit: Visit, ask: frames.Get) -> frames.Reply:
        async with self._from_disk(visit, ask):
            return await self._holds.lend_to_thread(visit, ask)

    @asynccontextmanager
    async def _from_disk(self, visit: Visit, ask: frames.Get | frames.Pin) -> AsyncIterator[None]:
        """What of it was on the disk alone is in memory within the context, as far as it could be read in time."""
        if not self._holds.needs_disk(visit, ask):
            yield
            return
        reading = await self._holds.fetch_from_disk(visit, ask)
        try:
            if visit.ended:
                raise frames.FrameError("it left meanwhile")
            yield
        finally:
            self._keep.agent.release(reading)

    def _answer(self, visit: Visit, body: frames.Reply) -> None:
        """Whoever reads the connection; whoever does not read its answers loses it."""
        if not visit.ended and not visit.line.send_now(body):
            self._cut(visit)

    # -- life ---------------------------------------------------------------------------------------------------

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name=f"store-door-{self._keep.worker}")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _watch(self) -> None:
        """Ends what is overdue."""
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = host_clock_s()
            for visit in list(self._visits):
                if visit.deadline_s is not None and visit.deadline_s <= now_s:
                    tally("enter", "late")
                    self._cut(visit)
                self._holds.end_overdue(visit, now_s)
                self._intake.end_idle_stock(visit, now_s)

    def _throw_out(self, visit: Visit, error: frames.FrameError) -> None:
        log.info("action=door_visit_dropped why=%r", str(error))
        tally("frame", "protocol")
        self._cut(visit)

    def _cut(self, visit: Visit) -> None:
        """Ends a connection; a thread that serves it ends it itself."""
        if visit.thread is None:
            self._end(visit)
        else:
            visit.is_leaving = True
            visit.line.shutdown()

    def _end(self, visit: Visit) -> None:
        """Takes back what a visit held: nobody fills its slots any more. Idempotent."""
        if visit.ended:
            return
        visit.ended = True
        self._intake.finish()  # a copy may go into slots that go back now
        self._visits.discard(visit)
        if visit.thread is None:
            self._loop.remove_reader(visit.line.fileno())
        visit.inbox.clear()
        self._intake.follow_up(visit)
        visit.line.shutdown()  # before anything is taken back: a client that copies looks at the line afterwards
        self._holds.end_all(visit)
        self._keep.agent.release(visit.stock_operation)
        for source in visit.sources.values():
            source.close()
        visit.line.close()

    async def _close(self) -> None:
        self._entry.stop()
        visits = list(self._visits)
        for visit in visits:
            self._cut(visit)
        for task in list(self._waiting):
            task.cancel()
        await self._mover.close(visits)
        for visit in visits:
            self._end(visit)
        await asyncio.gather(*self._waiting, return_exceptions=True)
        await asyncio.to_thread(self._entry.close)
