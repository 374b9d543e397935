"""The door of a worker's store: where programs that are no workers put and get values.

A client asks for it over the bus (:class:`shared.messages.OpenDoor`), whose permissions so say who may come, and gets
addresses and a token. At the door it is served over a unix socket on the same host, over TCP otherwise; what is said
there stands in :mod:`shared.store.door_frames`.

Who does what: the pool belongs to the worker's event loop, so everything that looks at it happens there, and is short.
A connection for questions is read by the loop itself. A connection for bytes has a thread, which copies or receives
values into private slots that were allocated in advance (a *stock* of a few), so that only the commit needs the loop:
commit comes before the answer, and nothing that is incomplete can be seen. Of two who put the same key the first wins.

What a visit holds (loans, pins, stock, slots that are being filled) ends with it, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hmac import compare_digest
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from shared.bus.bus import Bus, Delivery
from shared.bus.subjects import DOOR
from shared.clock import Clock
from shared.errors import SettingError
from shared.ids import BlockKey, HostId, Incarnation, OperationId, WorkerId, fresh
from shared.kv import CacheSpec, unpack_keys
from shared.messages import DoorOpened, DoorRefused, OpenDoor, StoredBlock
from shared.store import door_frames as frames
from shared.store.agent import StoreAgent
from shared.store.door_line import Closed, Late, Line
from shared.telemetry import metrics
from shared.transfer import Segment, TransferSettings, host_id
from shared.transfer.addresses import advertised_host, host_clock_s, join_address
from shared.transfer.ledger import checksum
from shared.transfer.plan import needs_checksums
from shared.transfer.segment import MappedSegment
from shared.transfer.shm import MAX_SOCKET_PATH_BYTES, check_clock, listen_shm
from shared.transfer.tcp import LOCAL_QUEUE_BYTES, listen_tcp
from shared.transfer.wire import keep_alive

log = logging.getLogger(__name__)

TOKEN_S = 60.0
"""How long a token opens the door; connections that are open stay."""
HANDSHAKE_S = 5.0
LOAN_S = 2.0
"""Longest time a client copies what it was shown; then its loan is over, whatever it does."""
INLINE_BYTES = 512 << 10
"""Values that the event loop copies itself, since handing them to a thread would take longer than that."""
WATCH_S = 0.1
MAX_VISITS = 512
MAX_STOCK = 64
RESTOCK = 8
"""Slots at least of a new stock: to make room for one at a time takes longer than to take a short value."""
STOCK_IDLE_S = 0.5
"""A stock that nobody used for so long goes back to the pool."""
MAX_LOANS = 64
"""Of one connection, those included that are over and of which it has not said so."""
MAX_PINS = 1024
"""Pin operations of one connection."""
_DRAIN_BYTES = 256 << 10
_APART_S = 1e-9
"""Between the uses of values that were stored together: so they go in the order in which they lie, and what comes in
their place lies together too, which makes it one copy."""
_T = TypeVar("_T")
_NO, _YES, _ORPHAN = int(frames.Mark.NO), int(frames.Mark.YES), int(frames.Mark.ORPHAN)
_HITS, _MISSES, _PUTS = (metrics.STORE_DOOR_VALUES.labels(kind=kind) for kind in ("hit", "miss", "put"))


@dataclass(slots=True)
class _Hold:
    """Blocks that are pinned for a client until ``until_s``: it copies them (a loan), or asked for it (a pin)."""

    operation: OperationId
    count: int
    """Blocks that count against what clients may pin."""
    until_s: float
    is_over: bool = False


@dataclass(eq=False, slots=True)
class _Visit:
    """One connection. All of it belongs to the loop but ``line``, whose reading half belongs to the thread if any."""

    line: Line
    local: bool
    """Over a unix socket: it sees our memory, and we see its."""
    id: str
    deadline_s: float | None
    """By when it must have entered; ``None`` once it has."""
    enter: frames.Enter | None = None
    loans: deque[_Hold] = field(default_factory=deque)
    """Oldest first; one that is over stays until the client says that it knows."""
    pins: dict[str, _Hold] = field(default_factory=dict)
    """{the client's name of the pin: what we hold for it}"""
    thread: threading.Thread | None = None
    stock: deque[int] = field(default_factory=deque)
    """Private slots of :attr:`stock_operation`, for the thread to fill."""
    stocked_s: float = 0.0
    news: list[StoredBlock] = field(default_factory=list)
    """Stored, and not announced yet."""
    used: int = 0
    """Slots of puts that were answered, or will be in this turn of the loop."""
    unused: list[int] = field(default_factory=list)
    """Those of them whose values were not stored."""
    proofs: bool = False
    ended: bool = False
    inbox: deque[object] = field(default_factory=deque)
    """Questions that were read and are not answered yet; without a thread."""
    sources: dict[int, MappedSegment] = field(default_factory=dict)
    """{serial: memory of the client}; the thread's if there is one."""

    @property
    def stock_operation(self) -> OperationId:
        return OperationId(f"{self.id}.stock")


@dataclass(frozen=True, slots=True)
class _Filled:
    """A PUT whose values were copied into private slots."""

    ask: frames.Put
    slots: list[int]
    doubts: tuple[str, str] | None
    """Code and reason why they cannot be believed."""


class Door:
    """Made by :meth:`open`; everything runs on the agent's event loop unless it is said to be the thread's."""

    def __init__(self, *, agent: StoreAgent, spec: CacheSpec, segment: Segment, num_blocks: int, bus: Bus,
                 worker: WorkerId, incarnation: Incarnation, clock: Clock, settings: TransferSettings,
                 inline_bytes: int) -> None:
        self._inline_bytes = inline_bytes
        self._agent, self._spec, self._segment, self._num_blocks = agent, spec, segment, num_blocks
        self._digest = spec.digest
        self._block_bytes = spec.block_bytes
        self._bus, self._worker, self._incarnation, self._clock = bus, worker, incarnation, clock
        self._settings = settings
        self._host = HostId(settings.host_id) if settings.host_id else host_id()
        self._loop = asyncio.get_running_loop()
        self._secret = secrets.token_bytes(32)
        self._listeners: list[socket.socket] = []
        self._visits: set[_Visit] = set()
        self._waiting: set[asyncio.Task[Any]] = set()
        """What takes time: threads or visits wait for it."""
        self._pinned = 0
        """Blocks that clients have pinned, counted once for each pin."""
        self._closing = False
        self._shm = self._tcp = self._directory = ""
        self._counted = 0
        self._read_only = -1
        """Descriptor of our memory that cannot be mapped for writing."""

    @classmethod
    @asynccontextmanager
    async def open(cls, *, agent: StoreAgent, spec: CacheSpec, segment: Segment, num_blocks: int, bus: Bus,
                   worker: WorkerId, incarnation: Incarnation, clock: Clock,
                   settings: TransferSettings | None = None, inline_bytes: int = INLINE_BYTES) -> AsyncIterator[Door]:
        """Lets clients in while the context is open; ``segment`` holds block i at ``i * spec.block_bytes``.

        It listens where the transfer ``settings`` say (host, advertise, socket_dir, paths shm and tcp). Puts of up to
        ``inline_bytes`` are copied by the event loop: a worker whose loop has nothing else to do takes more of them.
        Leaving ends every visit and returns when their threads have. Raises :class:`SettingError`.
        """
        door = cls(agent=agent, spec=spec, segment=segment, num_blocks=num_blocks, bus=bus, worker=worker,
                   incarnation=incarnation, clock=clock, settings=settings or TransferSettings(),
                   inline_bytes=inline_bytes)
        watch: asyncio.Task[None] | None = None
        try:
            door._listen()
            serving = await bus.serve(DOOR.at(worker=worker), door._on_open)
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

    # -- at the door --------------------------------------------------------------------------------------------

    async def _on_open(self, delivery: Delivery) -> DoorOpened | DoorRefused:
        ask: OpenDoor = delivery.message
        if ask.spec != self._digest:
            _count("open", "spec")
            return DoorRefused(code="spec", message=f"worker {self._worker} keeps values of another cache spec: "
                                                    f"{self._spec.model}, {self._block_bytes} bytes each")
        _count("open", "ok")
        expires_at_s = self._clock.wall() + TOKEN_S
        token = frames.sign(self._secret, client=ask.client, incarnation=ask.incarnation, spec=ask.spec,
                            tenant=ask.tenant, expires_at_s=expires_at_s)
        return DoorOpened(worker=self._worker, incarnation=self._incarnation, host=self._host, shm=self._shm,
                          tcp=self._tcp, token=token, expires_at_s=expires_at_s, block_bytes=self._block_bytes,
                          num_blocks=self._num_blocks)

    def _listen(self) -> None:
        settings = self._settings
        if "tcp" in settings.paths:
            try:
                sock, port = listen_tcp(settings.host)
            except OSError as error:
                raise SettingError("transfer_host", settings.host, f"an address of this host ({error})") from error
            self._tcp = join_address(advertised_host(settings.host, settings.advertise), port)
            self._accept_on(sock)
        if "shm" in settings.paths and self._segment.mappable:
            directory = settings.socket_dir
            if not directory:
                directory = self._directory = tempfile.mkdtemp(prefix="moonbus-")
            path = os.path.abspath(os.path.join(directory, f"{fresh('d', 6)}.sock"))
            if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
                raise SettingError("transfer_socket_dir", directory, f"a path so short that {path} has at most "
                                                                     f"{MAX_SOCKET_PATH_BYTES} bytes; /tmp is one")
            try:
                sock = listen_shm(path)
            except OSError as error:
                raise SettingError("transfer_socket_dir", directory, f"a writable directory ({error})") from error
            self._shm = path
            # What a client maps it must not be able to write by mistake.
            self._read_only = os.open(f"/proc/self/fd/{self._segment.fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._accept_on(sock)

    def _accept_on(self, sock: socket.socket) -> None:
        sock.listen(128)
        sock.setblocking(False)
        self._listeners.append(sock)
        self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return  # a client that left while queued
        except OSError as error:  # out of descriptors: who waits goes on waiting, and the loop must not wait on them
            log.warning("action=door_accept_failed error=%s", error)
            self._loop.remove_reader(listener.fileno())
            self._loop.call_later(WATCH_S, self._accept_again, listener)
            return
        if len(self._visits) >= MAX_VISITS:
            _count("enter", "full")
            sock.close()
            return
        local = sock.family == socket.AF_UNIX
        if not local:
            keep_alive(sock)
        self._counted += 1
        visit = _Visit(Line(sock, frames.decode_request), local, f"door-{self._counted}", host_clock_s() + HANDSHAKE_S)
        self._visits.add(visit)
        self._loop.add_reader(sock.fileno(), self._hear, visit)

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._closing:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _hear(self, visit: _Visit) -> None:
        """Something can be read of a visit that has no thread."""
        try:
            visit.inbox.extend(visit.line.receive_now())
        except (Closed, OSError):
            self._end(visit)
        except frames.FrameError as error:
            self._throw_out(visit, error)
        else:
            self._work(visit)

    def _work(self, visit: _Visit) -> None:
        """Answers in order what was read, as far as that takes no time."""
        before: _Filled | None = None
        try:
            while visit.inbox and not visit.ended and visit.thread is None:
                body = visit.inbox.popleft()
                if isinstance(body, frames.Put) and (slots := self._slots_now(visit, body)) is not None:
                    before = self._fill_beside(visit, body, slots, before)
                    continue
                there, before = self._conclude(visit, before), None
                if not there:
                    break
                if visit.enter is None:
                    self._let_in(visit, body)
                elif isinstance(body, frames.Done):
                    self._end_loans(visit, body.done)
                elif (reply := self._try_serve(visit, body)) is not None:
                    self._answer(visit, reply)
                else:
                    self._loop.remove_reader(visit.line.fileno())
                    self._own(self._work_slowly(visit, body))
                    return
        except frames.FrameError as error:
            self._conclude(visit, before)
            self._throw_out(visit, error)
        else:
            self._conclude(visit, before)

    async def _work_slowly(self, visit: _Visit, body: object) -> None:
        """Answers what has to wait, and goes on with what was asked meanwhile."""
        try:
            reply = await self._serve_slowly(visit, body)
        except frames.FrameError as error:
            self._throw_out(visit, error)
            return
        if reply is not None:
            self._answer(visit, reply)
        if not visit.ended:
            self._loop.add_reader(visit.line.fileno(), self._hear, visit)
            self._work(visit)

    def _throw_out(self, visit: _Visit, error: frames.FrameError) -> None:
        log.info("action=door_visit_dropped why=%r", str(error))
        _count("frame", "protocol")
        self._cut(visit)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name=f"store-door-{self._worker}")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def _let_in(self, visit: _Visit, body: object) -> None:
        if not isinstance(body, frames.Enter):
            raise frames.FrameError(f"first frame is {type(body).__name__}, not Enter")
        why = self._objection(visit, body)
        if why:
            _count("enter", why[0])
            self._answer(visit, frames.Denied(*why))
            self._cut(visit)
            return
        _count("enter", "ok")
        visit.enter, visit.deadline_s = body, None
        visit.proofs = needs_checksums(self._settings.proofs, "shm" if visit.local else "tcp", self._host, body.host)
        entered = frames.Entered(self._worker, self._incarnation, visit.proofs, self._inline_bytes)
        descriptors = [self._read_only] if visit.local else []
        if not visit.line.send_now(entered, descriptors):
            self._end(visit)
        elif body.serves or not visit.local:
            self._loop.remove_reader(visit.line.fileno())
            visit.line.set_blocking()
            visit.line.hasten(self._segment.native, takes_descriptors=True)
            if not visit.local and body.host == self._host:
                visit.line.shorten_queues(LOCAL_QUEUE_BYTES)
            thread = threading.Thread(target=self._move, args=(visit,), name=f"{self._worker}-{visit.id}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had
                log.warning("action=door_visit_dropped why=%r", str(error))
                self._end(visit)
            else:
                visit.thread = thread

    def _objection(self, visit: _Visit, enter: frames.Enter) -> tuple[str, str] | None:
        """Code and reason why it is not let in."""
        if enter.version != frames.VERSION:
            return "version", f"this door speaks version {frames.VERSION}, not {enter.version}"
        token = frames.sign(self._secret, client=enter.client, incarnation=enter.incarnation, spec=enter.spec,
                            tenant=enter.tenant, expires_at_s=enter.expires_at_s)
        if not compare_digest(token, enter.token):
            return "token", "the token is not of this door, or not for this client"
        if enter.expires_at_s <= self._clock.wall():
            return "token", f"the token expired {self._clock.wall() - enter.expires_at_s:.1f} s ago"
        if visit.local:
            try:
                check_clock(enter.clock_s)
            except Exception as error:
                return "clock", str(error)
        return None

    # -- questions ----------------------------------------------------------------------------------------------

    def _try_serve(self, visit: _Visit, body: object) -> frames.Reply | None:
        """The answer, unless it has to wait for the disk or for room: see :meth:`_serve_slowly`."""
        if isinstance(body, frames.Put):
            return None if body.wait_ms else self._no_room(body)
        if isinstance(body, frames.Get | frames.Pin) and self._needs_disk(body):
            return None
        return self._serve(visit, body)

    async def _serve_slowly(self, visit: _Visit, body: object) -> frames.Reply | None:
        """The answer; ``None`` when it was given."""
        if isinstance(body, frames.Put):
            slots = await self._allocate(visit, len(body.blocks), body.wait_ms / 1e3)
            if slots is None:
                return self._no_room(body)
            self._conclude(visit, self._fill(visit, body, sorted(slots)))
            return None
        assert isinstance(body, frames.Get | frames.Pin)
        return await self._serve_from_disk(visit, body)

    def _serve(self, visit: _Visit, body: object) -> frames.Reply:
        """Does what takes no time; also for threads, which ask the loop to."""
        match body:
            case frames.Get():
                self._end_loans(visit, body.done)
                return self._lend(visit, body)
            case frames.Look():
                self._end_loans(visit, body.done)
                return frames.Marks([int(self._agent.holds(key)) for key in unpack_keys(body.keys)])
            case frames.Drop():
                self._end_loans(visit, body.done)
                return self._drop(body)
            case frames.Pin():
                self._end_loans(visit, body.done)
                return self._pin(visit, body)
            case frames.Unpin():
                self._end_loans(visit, body.done)
                pin = visit.pins.pop(body.operation, None)
                if pin is not None:
                    self._end_hold(pin)
                return frames.Marks([int(pin is not None)])
        raise frames.FrameError(f"{type(body).__name__} has no business on this connection")

    def _needs_disk(self, body: frames.Get | frames.Pin) -> bool:
        """Is something of it on the disk alone?"""
        agent = self._agent
        return agent.ssd is not None and any(
            agent.pool.block(key) is None and agent.ssd.holds(key) for key in unpack_keys(body.keys))

    async def _serve_from_disk(self, visit: _Visit, body: frames.Get | frames.Pin) -> frames.Reply:
        """Like :meth:`_serve`, with what is on the disk read back first; what cannot be read in time is not here."""
        reading = self._operation(visit)
        timeout_s = (body.timeout_ms / 1e3 if isinstance(body, frames.Get) else LOAN_S) / 2
        try:
            for key in unpack_keys(body.keys):
                if self._agent.pool.block(key) is None:
                    await self._agent.pin_in_dram(reading, key, timeout_s=timeout_s)
            if visit.ended:
                raise frames.FrameError("it left meanwhile")
            return self._serve(visit, body)
        finally:
            self._agent.release(reading)

    def _lend(self, visit: _Visit, ask: frames.Get) -> frames.Found:
        keys = unpack_keys(ask.keys)
        if len(visit.loans) >= MAX_LOANS:
            raise frames.FrameError(f"{MAX_LOANS} loans are open, and it says of none that it is done")
        operation = self._operation(visit)
        slots = [self._pin_one(operation, key) for key in keys]
        until_s = host_clock_s() + min(LOAN_S, ask.timeout_ms / 1e3)
        visit.loans.append(_Hold(operation, 0, until_s))
        found = [slot for slot in slots if slot != frames.MISSING]
        _HITS.inc(len(found))
        _MISSES.inc(len(slots) - len(found))
        sums = [checksum(self._bytes(slot)) for slot in found] if visit.proofs and visit.local else []
        return frames.Found(slots, until_s, sums)

    def _end_hold(self, hold: _Hold) -> None:
        hold.is_over = True
        self._pinned -= hold.count
        self._agent.release(hold.operation)

    def _denied(self, kind: str, code: str, why: str) -> frames.Denied:
        _count(kind, code)
        return frames.Denied(code, why)

    def _pin_one(self, operation: OperationId, key: BlockKey) -> int:
        slots = self._agent.pin(operation, [key])
        return slots[0] if slots else frames.MISSING

    def _drop(self, ask: frames.Drop) -> frames.Marks:
        _count("drop", "ok")
        return frames.Marks([self._agent.trim([key], "removed") for key in unpack_keys(ask.keys)])

    def _pin(self, visit: _Visit, ask: frames.Pin) -> frames.Reply:
        keys, pin = unpack_keys(ask.keys), visit.pins.get(ask.operation)
        most = max(4, self._num_blocks // 2)  # a worker needs room for its own work
        if pin is None:
            if len(visit.pins) >= MAX_PINS or self._pinned + len(keys) > most:
                return self._pins_full(visit)
            pin = visit.pins[ask.operation] = _Hold(self._operation(visit), 0, 0.0)
        marks = [int(self._pin_one(pin.operation, key) != frames.MISSING) for key in keys]
        before, pin.count = pin.count, max(len(keys), self._agent.pool.pinned_by(pin.operation))
        self._pinned += pin.count - before
        if self._pinned > most and pin.count > before:  # with what these blocks continue, which is pinned as well
            self._end_hold(visit.pins.pop(ask.operation))
            return self._pins_full(visit)
        pin.until_s = host_clock_s() + ask.ttl_ms / 1e3
        return frames.Marks(marks)

    def _pins_full(self, visit: _Visit) -> frames.Denied:
        return self._denied("pin", "full", f"clients have pinned {self._pinned} of {self._num_blocks} blocks, this one "
                                           f"by {len(visit.pins)} pins; half of them may be, with what they continue")

    def _slots_now(self, visit: _Visit, ask: frames.Put) -> list[int] | None:
        """Private slots, in order, for a short PUT that is copied here and now; ``None`` when there is no room now."""
        count = len(ask.blocks)
        if visit.enter is None or not ask.sources or count * self._block_bytes > self._inline_bytes:
            raise frames.FrameError(f"{count} values of {self._block_bytes} bytes have no business on this connection")
        self._end_loans(visit, ask.done)
        self._attach(visit, ask.attached)
        slots = _pop(visit.stock, count)
        if len(slots) < count:
            more = self._try_allocate(visit, count - len(slots))
            if more is None:
                self._give_back(visit, slots)
                return None
            slots += more
        return sorted(slots)

    def _fill_beside(self, visit: _Visit, ask: frames.Put, slots: list[int], before: _Filled | None) -> _Filled:
        """Copies into private ``slots``; while the helper does so, the values ``before`` become visible."""
        self._begin_copy(visit, ask, slots)
        try:
            if not visit.inbox:
                visit.inbox.extend(visit.line.receive_now())  # then these, too, have something to be done beside them
        except (Closed, OSError):
            pass  # the loop will meet it as well
        finally:
            self._conclude(visit, before)
            self._finish_copy()
        return _Filled(ask, slots, self._doubts(visit, ask, slots))

    def _conclude(self, visit: _Visit, filled: _Filled | None) -> bool:
        """Values that were copied become visible, and are answered for. Is the visitor still there?"""
        if filled is not None and not visit.ended:
            if filled.doubts:
                self._give_back(visit, filled.slots)
                self._refuse(visit, *filled.doubts)
            else:
                self._commit(visit, filled.ask, filled.slots)
        return not visit.ended

    def _fill(self, visit: _Visit, ask: frames.Put, slots: list[int]) -> _Filled:
        """Copies into private ``slots`` that were waited for."""
        if visit.ended:
            raise frames.FrameError("it left meanwhile")
        self._begin_copy(visit, ask, slots)
        self._finish_copy()
        return _Filled(ask, slots, self._doubts(visit, ask, slots))

    def _begin_copy(self, visit: _Visit, ask: frames.Put, slots: list[int]) -> None:
        """Loop: begins to copy into private ``slots``, which go back when that cannot be. To be finished in the same
        turn."""
        native, nbytes = self._segment.native, self._block_bytes
        try:
            runs = [(slots[first], ask.sources[first], self._source(visit, ask.sources[first], count))
                    for first, count in _runs(slots, ask.sources, nbytes)]
        except frames.FrameError:
            self._give_back(visit, slots)
            raise
        if native is not None and all(source.serial == runs[0][1].serial for _, source, _ in runs):
            native.begin(self._segment.array, visit.sources[runs[0][1].serial].array,
                         [(slot * nbytes, source.offset, len(data)) for slot, source, data in runs])
            return
        for slot, _, data in runs:
            self._segment.write(slot * nbytes, data)

    def _finish_copy(self) -> None:
        """Whatever was begun is copied. Idempotent."""
        if self._segment.native is not None:
            self._segment.native.finish()

    def _no_room(self, ask: frames.Put) -> frames.Denied:
        if self._agent.is_retired:
            return self._denied("put", "draining", "it is being drained and takes no values any more")
        return self._denied("put", "full", f"no room for {len(ask.blocks)} values of {self._block_bytes} bytes within "
                                           f"{ask.wait_ms} ms: all it has is in use")

    def _answer(self, visit: _Visit, body: frames.Reply) -> None:
        """From the loop, whoever reads the connection; whoever does not read its answers loses it."""
        if not visit.ended and not visit.line.send_now(body):
            self._cut(visit)

    # -- bytes: the thread's ------------------------------------------------------------------------------------

    def _move(self, visit: _Visit) -> None:
        """Thread: serves one connection until it ends."""
        line = visit.line
        try:
            while True:
                line.set_idle()
                body = line.receive()
                if isinstance(body, frames.Put):
                    self._take(visit, body)
                elif isinstance(body, frames.Get) and not visit.local:
                    self._give(visit, body)
                else:
                    self._call(self._answer_from, visit, body)
        except (Closed, OSError, Late, _Stopped):
            pass  # the normal end
        except frames.FrameError as error:
            log.info("action=door_visit_dropped why=%r", str(error))
            _count("frame", "protocol")
        except Exception:
            log.exception("action=door_visit_failed")
        finally:
            line.shutdown()
            self._tell(self._end, visit)

    async def _answer_from(self, visit: _Visit, body: object) -> None:
        reply = self._try_serve(visit, body) or await self._serve_slowly(visit, body)
        if reply is not None:
            self._answer(visit, reply)

    def _take(self, visit: _Visit, ask: frames.Put) -> None:
        """Thread: the bytes of a PUT into private slots; the loop commits them, and answers."""
        line, count = visit.line, len(ask.blocks)
        self._attach(visit, ask.attached)
        line.set_deadline(host_clock_s() + max(0.001, ask.timeout_ms / 1e3))
        slots = self._slots_for(visit, count, ask.wait_ms / 1e3)
        if slots is None:
            if not ask.sources:
                self._drain(line, count * self._block_bytes)
            self._tell(self._refuse_room, visit, ask)
            return
        try:
            why = self._copy(visit, ask, slots)
        except BaseException:
            self._tell(self._give_back, visit, slots)
            raise
        if why:
            self._tell(self._give_back, visit, slots)
            self._tell(self._refuse, visit, *why)
        else:
            self._tell(self._commit, visit, ask, slots)

    def _copy(self, visit: _Visit, ask: frames.Put, slots: Sequence[int]) -> tuple[str, str] | None:
        """Thread: fills private ``slots``, in order; see :meth:`_doubts`."""
        if ask.sources:
            for first, count in _runs(slots, ask.sources, self._block_bytes):
                self._segment.write(slots[first] * self._block_bytes, self._source(visit, ask.sources[first], count))
        else:
            for slot in slots:
                visit.line.receive_into(self._bytes(slot).data)
        return self._doubts(visit, ask, slots)

    def _doubts(self, visit: _Visit, ask: frames.Put, slots: Sequence[int]) -> tuple[str, str] | None:
        """Code and reason when what ``slots`` were filled with cannot be believed. Thread or loop."""
        wrong = [i for i, sum in enumerate(ask.checksums) if checksum(self._bytes(slots[i])) != sum]
        if wrong:
            return "checksum", f"value {wrong[0]} came with other bytes than were sent"
        if visit.proofs and not ask.checksums:
            return "checksum", "checksums are demanded here"
        if ask.sources and not (host_clock_s() <= ask.deadline_s and not visit.line.hung_up()):
            # Its memory may have changed under us: the client has given up, or is no more.
            return "late", "copied after the client's deadline"
        return None

    def _give(self, visit: _Visit, ask: frames.Get) -> None:
        """Thread: the bytes that a GET over TCP wants."""
        found = self._call(self._lend_to_thread, visit, ask)
        landings = [self._bytes(slot) for slot in found.slots if slot != frames.MISSING]
        sums = [checksum(landing) for landing in landings] if visit.proofs else []
        visit.line.set_deadline(host_clock_s() + max(0.001, ask.timeout_ms / 1e3))
        visit.line.send(frames.Found(found.slots, found.until_s, sums), [landing.data for landing in landings])
        self._tell(self._end_loans, visit, 1)

    async def _lend_to_thread(self, visit: _Visit, ask: frames.Get) -> frames.Found:
        found = await self._serve_from_disk(visit, ask) if self._needs_disk(ask) else self._lend(visit, ask)
        assert isinstance(found, frames.Found)
        visit.loans[-1].until_s = inf  # it is our thread that reads, by a deadline, or the visit ends
        return found

    def _slots_for(self, visit: _Visit, count: int, wait_s: float) -> list[int] | None:
        """Thread: out of the stock, and what is missing from the pool; ``None`` when there is no room in time."""
        slots = _pop(visit.stock, count)
        if len(slots) < count:
            more = self._call(self._allocate, visit, count - len(slots), wait_s)
            if more is None:
                self._tell(self._give_back, visit, slots)
                return None
            slots += more
        return sorted(slots)  # what lies together here and there is one copy

    def _attach(self, visit: _Visit, serials: Sequence[int]) -> None:
        for serial in serials:
            if not visit.line.descriptors or len(visit.sources) >= 64:
                raise frames.FrameError(f"memory {serial} came without a descriptor, or is one of too many")
            try:
                visit.sources[serial] = MappedSegment(visit.line.descriptors.pop(0))
            except (OSError, ValueError, OverflowError) as error:
                raise frames.FrameError(f"memory {serial} cannot be mapped: {error}") from error

    def _source(self, visit: _Visit, source: frames.Source, count: int) -> Any:
        """So many values, one behind the other."""
        mapped, nbytes = visit.sources.get(source.serial), count * self._block_bytes
        if mapped is None or source.offset + nbytes > len(mapped.array):
            raise frames.FrameError(f"{nbytes} bytes at {source.offset} of memory {source.serial} were not handed over")
        return mapped.array[source.offset:source.offset + nbytes]

    def _drain(self, line: Line, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, _DRAIN_BYTES)))
        while nbytes:
            part = scratch[:min(nbytes, len(scratch))]
            line.receive_into(part)
            nbytes -= len(part)

    def _bytes(self, slot: int) -> Any:
        """uint8[block_bytes] of our memory."""
        return self._segment.array[slot * self._block_bytes:(slot + 1) * self._block_bytes]

    # -- between the two ----------------------------------------------------------------------------------------

    def _tell(self, function: Callable[..., object], *arguments: Any) -> None:
        """Thread: lets the loop call it; in the order told."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _call(self, function: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> _T:
        """Thread: lets the loop run it, and waits; raises :class:`_Stopped` once the door closes."""
        if self._closing:
            raise _Stopped
        return asyncio.run_coroutine_threadsafe(self._owned(function(*arguments)), self._loop).result()

    async def _owned(self, work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            if self._closing:
                work.close()
                raise _Stopped
            return await work
        except asyncio.CancelledError:
            raise _Stopped from None
        finally:
            self._waiting.discard(task)

    def _try_allocate(self, visit: _Visit, count: int) -> list[int] | None:
        assert visit.enter is not None
        if count > self._num_blocks or self._agent.is_retired:
            return None
        return self._agent.allocate(visit.stock_operation, count, tenant=visit.enter.tenant)

    async def _allocate(self, visit: _Visit, count: int, wait_s: float) -> list[int] | None:
        slots = self._try_allocate(visit, count)
        if slots is None and wait_s > 0 and count <= self._num_blocks and not self._agent.is_retired:
            assert visit.enter is not None
            try:
                async with asyncio.timeout(wait_s):
                    return await self._agent.wait_allocate(visit.stock_operation, count, tenant=visit.enter.tenant)
            except TimeoutError:
                return None
        return slots

    def _commit(self, visit: _Visit, ask: frames.Put, slots: list[int]) -> None:
        """What was filled becomes visible; then the answer, and a new stock."""
        if visit.ended:
            return  # its slots went back with it
        self._answer(visit, self._seal(visit, ask, slots))
        self._follow_up(visit)

    def _seal(self, visit: _Visit, ask: frames.Put, slots: list[int]) -> frames.Marks | frames.Denied:
        """Values that are complete become visible, unless they, or others under their keys, are so already.

        Once that is answered, :meth:`_follow_up` does the rest.
        """
        if self._agent.is_retired:  # meanwhile: what it stored now, it would drop at once
            self._give_back(visit, slots)
            return self._no_room(ask)
        pool, enter = self._agent.pool, visit.enter
        assert enter is not None
        now, client, nbytes = self._clock.monotonic(), WorkerId(enter.client), self._block_bytes
        marks: list[int] = []
        for i, (block, slot) in enumerate(zip(ask.blocks, slots, strict=True)):
            key, parent = BlockKey(block.key), BlockKey(block.parent)
            if pool.block(key) is not None:
                marks.append(_NO)
                visit.unused.append(slot)
            elif block.depth > 0 and ((above := pool.block(parent)) is None or above.depth != block.depth - 1):
                marks.append(_ORPHAN)
                visit.unused.append(slot)
            else:
                stored = StoredBlock(key=key, parent=parent, depth=block.depth, nbytes=nbytes, origin="received",
                                     source=client, tenant=enter.tenant, tokens=block.tokens)
                # Nobody evicts anything before the last of them is sealed, so none needs a pin.
                pool.seal(visit.stock_operation, slot, stored, now=now + i * _APART_S, pin=False)
                visit.news.append(stored)
                marks.append(_YES)
        visit.used += len(slots)
        return frames.Marks(marks)

    def _follow_up(self, visit: _Visit) -> None:
        """What nobody waits for: news of what was stored, slots for the next."""
        if visit.news:
            _PUTS.inc(len(visit.news))
            self._agent.announce_stored(visit.news)
            visit.news = []
        if visit.used:
            used, unused, visit.used, visit.unused = visit.used, visit.unused, 0, []
            if unused:
                self._give_back(visit, unused)
            else:
                self._agent.settle()
            self._restock(visit, used)

    def _restock(self, visit: _Visit, count: int) -> None:
        """For what was just used once more, and for the next question, which is being served already; as long as that
        is a small part of what there is."""
        visit.stocked_s = host_clock_s()
        count = min(2 * count, MAX_STOCK)
        if len(visit.stock) >= count or visit.ended or self._agent.is_retired:
            return
        count = max(count, RESTOCK) - len(visit.stock)
        count = min(count, self._agent.pool.available // 8 - self._stocks())
        if count > 0:
            assert visit.enter is not None
            visit.stock.extend(sorted(
                self._agent.allocate(visit.stock_operation, count, tenant=visit.enter.tenant) or ()))

    def _stocks(self) -> int:
        """Slots of all stocks."""
        return sum(len(visit.stock) for visit in self._visits)

    def _give_back(self, visit: _Visit, slots: Sequence[int]) -> None:
        if slots and not visit.ended:
            self._agent.give_back(visit.stock_operation, slots)

    def _refuse_room(self, visit: _Visit, ask: frames.Put) -> None:
        self._answer(visit, self._no_room(ask))

    def _refuse(self, visit: _Visit, code: str, why: str) -> None:
        self._answer(visit, self._denied("put", code, why))

    # -- life ---------------------------------------------------------------------------------------------------

    def _operation(self, visit: _Visit) -> OperationId:
        self._counted += 1
        return OperationId(f"{visit.id}.{self._counted}")

    def _end_loans(self, visit: _Visit, count: int) -> None:
        for _ in range(min(count, len(visit.loans))):
            loan = visit.loans.popleft()
            if not loan.is_over:
                self._end_hold(loan)

    async def _watch(self) -> None:
        """Ends what is overdue."""
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = host_clock_s()
            for visit in list(self._visits):
                if visit.deadline_s is not None and visit.deadline_s <= now_s:
                    _count("enter", "late")
                    self._cut(visit)
                for loan in visit.loans:
                    if loan.until_s <= now_s and not loan.is_over:
                        self._end_hold(loan)
                for name in [name for name, pin in visit.pins.items() if pin.until_s <= now_s]:
                    self._end_hold(visit.pins.pop(name))
                if visit.stock and visit.stocked_s + STOCK_IDLE_S <= now_s:
                    self._give_back(visit, _pop(visit.stock, len(visit.stock)))

    def _cut(self, visit: _Visit) -> None:
        """Ends a connection; a thread that serves it ends it itself."""
        if visit.thread is None:
            self._end(visit)
        else:
            visit.line.shutdown()

    def _end(self, visit: _Visit) -> None:
        """Takes back what a visit held: nobody fills its slots any more. Idempotent."""
        if visit.ended:
            return
        visit.ended = True
        self._finish_copy()  # it may go into slots that go back now
        self._visits.discard(visit)
        if visit.thread is None:
            self._loop.remove_reader(visit.line.fileno())
        visit.inbox.clear()
        self._follow_up(visit)
        visit.line.shutdown()  # before anything is taken back: a client that copies looks at the line afterwards
        for hold in (*visit.loans, *visit.pins.values()):
            if not hold.is_over:
                self._end_hold(hold)
        self._agent.release(visit.stock_operation)
        for source in visit.sources.values():
            source.close()
        visit.line.close()

    async def _close(self) -> None:
        self._closing = True
        for sock in self._listeners:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        visits = list(self._visits)
        for visit in visits:
            self._cut(visit)
        for task in list(self._waiting):
            task.cancel()
        threads = [visit.thread for visit in visits if visit.thread is not None]
        await asyncio.to_thread(_join, threads)
        for visit in visits:
            self._end(visit)
        await asyncio.gather(*self._waiting, return_exceptions=True)
        await asyncio.to_thread(self._forget_address)

    def _forget_address(self) -> None:
        if self._read_only >= 0:
            os.close(self._read_only)
        if self._shm:
            Path(self._shm).unlink(missing_ok=True)
        if self._directory:
            os.rmdir(self._directory)


class _Stopped(Exception):
    """The door closes."""


def _pop(stock: deque[int], most: int) -> list[int]:
    """Up to so many of them; others may take some meanwhile."""
    slots: list[int] = []
    try:
        while len(slots) < most:
            slots.append(stock.popleft())
    except IndexError:
        pass
    return slots


def _runs(slots: Sequence[int], sources: Sequence[frames.Source], nbytes: int) -> Iterator[tuple[int, int]]:
    """First index and length of each stretch of values that follow each other both here and there."""
    first = 0
    for i in range(1, len(slots) + 1):
        if i < len(slots) and slots[i] == slots[i - 1] + 1 and sources[i].serial == sources[i - 1].serial and (
                sources[i].offset == sources[i - 1].offset + nbytes):
            continue
        yield first, i - first
        first = i


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def _count(kind: str, outcome: str) -> None:
    metrics.STORE_DOOR_REQUESTS.labels(kind=kind, outcome=outcome).inc()
