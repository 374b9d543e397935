"""Connections to the doors of workers: made when needed, kept for the next call, used by one call at a time."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.ids import HostId, Incarnation, SpecDigest, WorkerId
from shared.messages import DoorOpened
from shared.store import door_frames as frames
from shared.store.client_errors import EntryRefused
from shared.store.client_map import Seat
from shared.store.client_memory import Part
from shared.store.door_line import Late, Line
from shared.transfer.addresses import host_clock_s, split_address
from shared.transfer.channel import Closed
from shared.transfer.native import Native
from shared.transfer.segment import MappedSegment, Segment
from shared.transfer.shm import connect_unix
from shared.transfer.tcp import LOCAL_QUEUE_BYTES
from shared.transfer.wire import keep_alive

QUESTIONS, BYTES = 0, 1
"""What a connection serves; over TCP one serves both."""
CONNECT_S = 2.0
MAX_IDLE = 8
"""Connections kept for one worker and purpose."""
BROKEN = (Closed, OSError, ValueError, frames.FrameError)
"""What a connection raises that is of no use any more, beyond :class:`Late`."""


class Gone(Exception):
    """The worker cannot be reached, or its connection broke: what was asked may have been done or not."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of the client: by when it must be over, and what it is using, so that it can be cut."""

    deadline_s: float
    """On the host's clock."""
    lines: set[Line] = field(default_factory=set)
    cancelled: bool = False

    def left_s(self) -> float:
        """Seconds left; never less than none."""
        return max(0.0, self.deadline_s - host_clock_s())

    def cancel(self) -> None:
        """From any thread: its thread ends at once, and no memory of the caller's is touched after it has."""
        self.cancelled = True
        for line in list(self.lines):
            line.shutdown()


@dataclass(eq=False, slots=True)
class Visit:
    """One connection that was let in."""

    line: Line
    seat: Seat
    door: DoorOpened
    local: bool
    proofs: bool
    memory: MappedSegment | None
    """Of the worker, over a unix socket that serves questions."""
    serves: int
    inline_bytes: int = 0
    """Values of a PUT that a connection for questions takes."""
    attached: set[int] = field(default_factory=set)
    """Serials of our memory that the worker has the descriptors of."""
    done: int = 0
    """Loans that are over and of which the worker does not know."""

    def ask(self, call: Call, body: frames.Request, payload: Sequence[memoryview] = (),
            descriptors: Sequence[int] = ()) -> None:
        """Sends a question."""
        self.line.set_deadline(call.deadline_s)
        self.line.send(body, payload, descriptors)

    def exchange(self, call: Call, body: frames.Request) -> object:
        """Sends a question and hears its answer, when no other is under way."""
        self.line.set_deadline(call.deadline_s)
        return self.line.ask(body)

    def tell_done(self) -> int:
        """What the next question says of loans that are over."""
        done, self.done = self.done, 0
        return done

    def tell_now(self) -> None:
        """Says it without a question; never blocks."""
        if not self.line.send_now(frames.Done(self.tell_done())):
            self.line.shutdown()  # whoever takes it next sees that

    def put(self, call: Call, blocks: list[frames.Block], parts: Sequence[Part], checksums: list[int], *,
            wait_s: float) -> None:
        """Sends a PUT: where the values lie if the worker can see them, else the values."""
        body, fresh = self._describe(call, blocks, parts, checksums, wait_s)
        self._send(call, body, parts, fresh)

    def put_alone(self, call: Call, blocks: list[frames.Block], parts: Sequence[Part], checksums: list[int], *,
                  wait_s: float) -> object:
        """Sends a PUT and hears its answer, when no other is under way."""
        body, fresh = self._describe(call, blocks, parts, checksums, wait_s)
        if body.sources and not fresh:
            return self.exchange(call, body)
        self._send(call, body, parts, fresh)
        return self.line.receive()

    def _send(self, call: Call, body: frames.Put, parts: Sequence[Part], fresh: list[Segment]) -> None:
        self.ask(call, body, [] if body.sources else [part.array.data for part in parts],
                 [segment.fd for segment in fresh])
        self.attached.update(segment.serial for segment in fresh)

    def _describe(self, call: Call, blocks: list[frames.Block], parts: Sequence[Part], checksums: list[int],
                  wait_s: float) -> tuple[frames.Put, list[Segment]]:
        """A PUT, and the memory whose descriptors the worker does not have yet."""
        millis, wait_ms = max(1, int(call.left_s() * 1e3)), int(wait_s * 1e3)
        segments = [part.segment for part in parts if part.segment is not None]
        if not self.local or len(segments) < len(parts):
            return frames.Put(blocks, [], [], checksums, wait_ms, millis, 0.0), []
        fresh = {segment.serial: segment for segment in segments if segment.serial not in self.attached}
        sources = [frames.Source(segment.serial, part.offset) for segment, part in zip(segments, parts, strict=True)]
        return frames.Put(blocks, sources, list(fresh), checksums, wait_ms, millis, call.deadline_s,
                          self.tell_done()), list(fresh.values())


FindDoor = Callable[[Seat, float, bool], DoorOpened]
"""Worker, seconds to wait, whether what is known of it does not hold any more → how to come to its door."""


class Doors:
    """The pool. Thread-safe."""

    def __init__(self, find: FindDoor, *, client: str, incarnation: Incarnation, host: HostId, spec: SpecDigest,
                 tenant: str, paths: Sequence[str], native: Native | None) -> None:
        self._native = native
        self._find = find
        self._client, self._incarnation, self._host = client, incarnation, host
        self._spec, self._tenant, self._paths = spec, tenant, paths
        self._lock = threading.Lock()
        self._idle: dict[tuple[WorkerId, Incarnation, int], deque[Visit]] = {}
        self._memory: dict[tuple[WorkerId, Incarnation], MappedSegment] = {}
        self._taken = 0
        self._closed = False

    @property
    def are_many(self) -> bool:
        """Are several connections in use? What each leaves unsaid may then be what another's question waits for."""
        return self._taken > 1

    def take(self, call: Call, seat: Seat, serves: int) -> Visit:
        """A connection for this call alone; :meth:`give_back` or :meth:`drop` it.

        Raises :class:`Gone`, :class:`Late` or a :class:`StoreError`.
        """
        with self._lock:
            self._taken += 1
            idle = self._idle.get((seat.worker, seat.incarnation, serves))
            visit = idle.pop() if idle else None
        if visit is not None and visit.line.hung_up():
            visit.line.close()
            visit = None
        if visit is None:
            try:
                visit = self._open(call, seat, serves)
            except BaseException:
                with self._lock:
                    self._taken -= 1
                raise
        call.lines.add(visit.line)
        if call.cancelled:
            self.drop(call, visit)
            raise Gone("the call was cancelled")
        return visit

    def give_back(self, call: Call, visit: Visit) -> None:
        """It owes no answer."""
        call.lines.discard(visit.line)
        with self._lock:
            self._taken -= 1
            idle = self._idle.setdefault((visit.seat.worker, visit.seat.incarnation, visit.serves), deque())
            if visit.done and self._taken:
                visit.tell_now()
            if not self._closed and not call.cancelled and len(idle) < MAX_IDLE:
                idle.append(visit)
                return
        visit.line.close()

    def tidy(self) -> None:
        """Tells workers of loans that are over where no question will soon do so; never blocks."""
        with self._lock:
            for idle in self._idle.values():
                for visit in idle:
                    if visit.done:
                        visit.tell_now()

    def drop(self, call: Call, visit: Visit) -> None:
        """It broke, or an answer to it is still under way."""
        self.let_go(call, visit)
        visit.line.close()

    def let_go(self, call: Call, visit: Visit) -> None:
        """It is the caller's own from now on."""
        call.lines.discard(visit.line)
        with self._lock:
            self._taken -= 1

    def forget(self, serial: int | None = None) -> None:
        """Closes idle connections: those that know our memory ``serial``, or all."""
        with self._lock:
            gone = [visit for idle in self._idle.values() for visit in idle
                    if serial is None or serial in visit.attached]
            for idle in self._idle.values():
                for visit in [visit for visit in idle if visit in gone]:
                    idle.remove(visit)
        for visit in gone:
            visit.line.close()

    def close(self) -> None:
        """Closes all that are idle; those in use when they are given back."""
        self._closed = True
        self.forget()
        for memory in self._memory.values():
            memory.close()

    def _open(self, call: Call, seat: Seat, serves: int) -> Visit:
        """Connects by the first path that does, with a new token if the one at hand is refused."""
        why = "no path leads there"
        for anew in (False, True):
            door = self._find(seat, min(CONNECT_S, call.left_s()), anew)
            if door.incarnation != seat.incarnation:
                raise Gone(f"worker {seat.worker} was started anew")
            refused = False
            for path, address in (("shm", door.shm if door.host == self._host else ""), ("tcp", door.tcp)):
                if path not in self._paths or not address:
                    continue
                try:
                    return self._enter(call, seat, door, path, address, serves)
                except EntryRefused:
                    if anew:
                        raise
                    refused = True
                    break
                except BROKEN as error:
                    why = f"{address}: {error or type(error).__name__}"
            if not refused:
                break
        raise Gone(f"worker {seat.worker} cannot be reached ({why})")

    def _enter(self, call: Call, seat: Seat, door: DoorOpened, path: str, address: str, serves: int) -> Visit:
        timeout_s = min(CONNECT_S, call.left_s())
        if timeout_s <= 0:
            raise Late
        local = path == "shm"
        if local:
            sock = connect_unix(address, timeout_s)
        else:
            sock = socket.create_connection(split_address(address), timeout=timeout_s)
            keep_alive(sock)
        sock.settimeout(None)
        line = Line(sock, frames.decode_reply)
        try:
            if not local and door.host == self._host:
                line.shorten_queues(LOCAL_QUEUE_BYTES)
            line.set_deadline(min(call.deadline_s, host_clock_s() + CONNECT_S))
            line.send(frames.Enter(frames.VERSION, self._client, self._incarnation, self._spec, self._tenant,
                                   door.expires_at_s, door.token, serves, self._host, host_clock_s()))
            reply = line.receive()
            if isinstance(reply, frames.Denied):
                raise EntryRefused(f"worker {seat.worker} does not let us in: {reply.why}")
            if not isinstance(reply, frames.Entered):
                raise frames.FrameError(f"{type(reply).__name__} is no answer to ENTER")
            if (reply.worker, reply.incarnation) != (seat.worker, seat.incarnation):
                raise Closed
            memory = self._map(seat, line) if local else None
        except BaseException:
            line.close()
            raise
        line.hasten(self._native, takes_descriptors=False)
        return Visit(line, seat, door, local, reply.proofs, memory, serves, reply.inline_bytes)

    def _map(self, seat: Seat, line: Line) -> MappedSegment:
        """The worker's memory, mapped once."""
        if not line.descriptors:
            raise frames.FrameError("its memory did not come along")
        key = (seat.worker, seat.incarnation)
        with self._lock:
            if key not in self._memory:
                for former in [former for former in self._memory if former[0] == seat.worker]:
                    del self._memory[former]  # calls that still copy out of it hold it themselves
                self._memory[key] = MappedSegment(line.descriptors.pop(0))
            return self._memory[key]
