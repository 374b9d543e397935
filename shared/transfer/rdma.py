"""RDMA: the sender's network card writes straight into the receiver's memory.

A TCP connection carries what is agreed on, queue pairs (reliable, connected) the bytes::

    sender                                   receiver
    HELLO                              →
                                       ←     WELCOME, NICS: its cards
    CONNECT, one a rail                →
                                       ←     CONNECTED, or why not
    BEGIN: a claim, and the rail       →     admits it in the ledger
                                       ←     KEYS of segments that this rail has not had, then GO, once there
                                             is room where bytes land that no card can put where they belong
    RDMA WRITEs, the last of which brings the claim's number to the receiver as an event
                                       ←     ACK, once it is verified and committed; GO again, if a writer into
                                             the same bytes failed meanwhile
    ABORT: nothing was written, nor will be
    DOWN: a rail failed                ↔     and its queue pair is destroyed; then its claims begin again elsewhere

Memory of a device that the cards do not reach (see ``device``) is staged at either end: the sender fills slots of host
memory and writes from there; the receiver has the bytes written into landing memory and copies them to where they
belong before it commits.

A rail joins one card here and one there (see ``rails``). Its queue pairs are made when a lane opens, and again after
each cool-down of a rail that failed. A peer that does not answer is given up by the card after about half a second
(``TIMING``), and when the control connection ends: at once with its process, in ``GONE_S`` with its host.

What a peer could do beyond its grants: a key opens the whole segment it was made for, to whoever holds it and
has a queue pair to us. So a peer that was once admitted to a segment *could* write anywhere in it for as long as its
connection lives; what it writes by claim is checked and verified all the same, and nothing is handed out to who
was not admitted. When the connection or the rail ends, its queue pairs are destroyed before any writer is failed:
from then on nothing can be written. Leave ``rdma`` out of ``paths`` where peers must not be trusted that far.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import select
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import msgspec

from shared.messages import Endpoint
from shared.transfer import frames
from shared.transfer.addresses import split_address
from shared.transfer.device import DeviceMemory, Way
from shared.transfer.fabric import Fabric
from shared.transfer.lane import INLINE_BYTES, LATE, Sender, StreamLane, Transfer, call_on
from shared.transfer.ledger import Writer
from shared.transfer.plan import BATCH_BYTES
from shared.transfer.rails import Load, Rail, Rails, pair_nics
from shared.transfer.receiver import Receiver, Session
from shared.transfer.segment import DeviceSegment, Segment
from shared.transfer.stage import Landing, Stage, Staged
from shared.transfer.types import PeerGone, Trouble
from shared.transfer.verbs import RECEIVE_DEPTH, SEND_DEPTH, QueuePair, Remote, Status, Timing, VerbsError
from shared.transfer.wire import Connection, keep_alive

_log = logging.getLogger(__name__)

PATH = "rdma"
TIMING = Timing(exponent=14, retries=5)
"""No answer for 0.4 s, and the rail has failed. Even the slowest device knows within two seconds."""
GONE_S = 1.8
"""A control connection that carries nothing for so long is dead: its network is as close as the cards'."""
WRITE_BYTES = 1 << 20
"""Most bytes of one work request, so that a rail that fails has little to send again."""
SIGNAL_EVERY = SEND_DEPTH // 4
"""Every so many work requests one reports that it, and all before it, are done."""
LANDING_BYTES = 2 * BATCH_BYTES
"""Of host memory a connection, where its claims ask for it: while one lands, another one is copied out."""
MAX_NUMBER = 2**32
"""Numbers of claims: they travel as immediate data, which has 32 bits."""


# -- sending ----------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Flight:
    """One attempt at a transfer: a claim on its way by one rail."""

    number: int
    transfer: Transfer
    end: _End | None
    """``None`` for a claim without bytes, which needs no rail."""
    checksums: list[int]
    sources: list[tuple[Segment, int]]
    """Memory and offset for each piece."""
    targets: list[tuple[int, int]] = field(default_factory=list)
    """Address and key for each piece, once the receiver says GO."""
    writes: Iterator[_Write] | None = None
    begun: bool = False
    """Its bytes are being read, or were; set before the transfer's ``ended`` is looked at."""
    started_s: float = 0.0
    written: bool = False
    """The receiver's card has confirmed the last byte."""


@dataclass(frozen=True, slots=True)
class _Write:
    """One work request."""

    source: tuple[int, int, int]
    target: tuple[int, int]
    last: bool


@dataclass(eq=False, slots=True)
class _End:
    """Our end of a rail."""

    rail: int
    pair: QueuePair
    psn: int
    number: int = 0
    """The receiver's queue pair; 0 until it is known."""
    keys: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """{segment of the receiver's: (address, bytes, key)}"""
    queue: deque[_Flight] = field(default_factory=deque)
    """Cleared for take-off, not posted completely. The loop appends, whoever posts takes away."""
    tails: deque[tuple[int, _Flight]] = field(default_factory=deque)
    """Last work request of flights that are posted completely."""
    posted: int = 0
    """Work requests; counted by whoever posts."""
    completed: int = 0
    posting: bool = False
    """Somebody posts; it is one at a time, in the loop or in the thread."""
    down: bool = False


class RdmaLane(StreamLane):
    """Agrees on claims over TCP and writes by rails, each batch by the one that is predicted to finish it first.

    The event loop decides and hears both the connection and the completions; the thread makes queue pairs,
    registers memory, and posts where that takes long.
    """

    path = PATH

    def __init__(self, fabric: Fabric, sender: Sender, peer: Endpoint, address: str) -> None:
        super().__init__(sender, peer, address)
        self._fabric = fabric
        self._rails = Rails([], fabric.topology)
        self._nics: list[frames.Card] = []
        """The peer's."""
        self._fresh: list[_End] = []
        """The thread's: ends of rails that were connected when the lane was."""
        self._ends: dict[int, _End] = {}
        """{rail: our end}, those that are up or are being connected again"""
        self._flights: dict[int, _Flight] = {}
        """{number: flight}, those without an answer"""
        self._current: dict[int, _Flight] = {}
        """{id of a transfer: its latest flight}"""
        self._issued = 0
        self._unsaid = 0
        """Frames that wait for the thread to send them; no other frame may overtake them."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._stage = Stage(self._allocate_stage)
        self._staging_of: DeviceMemory | None = None
        """What the stage is to be quick with."""
        self._unstaged: deque[Transfer] = deque()
        """Those that wait for a slot."""
        self._slots: dict[int, tuple[int, Staged]] = {}
        """{id of a transfer: its slot, and what is in it}"""

    # -- opening, in the thread ---------------------------------------------------------------------------------

    def connect(self, address: str, timeout_s: float) -> Connection:
        sock = socket.create_connection(split_address(address), timeout=timeout_s)
        keep_alive(sock, gone_s=GONE_S)
        return Connection(sock)

    def dial(self) -> Connection:
        connection = super().dial()
        try:
            connection.set_timeout(self._sender.connect_timeout_s)
            self._open_rails(connection)
            connection.set_timeout(None)
        except BaseException:
            connection.close()
            self.release()
            raise
        return connection

    def _open_rails(self, connection: Connection) -> None:
        cards = connection.receive()
        if not isinstance(cards, frames.Cards):
            raise frames.FrameError(f"second frame is {type(cards).__name__}, not Cards")
        self._nics = cards.cards
        for own, theirs in pair_nics(len(self._fabric.nics), len(cards.cards)):
            nic = self._fabric.nics[own]
            self._rails.rails.append(Rail(own, theirs, nic.nic, nic.load))
        for rail in range(len(self._rails.rails)):
            try:
                end = self._make_end(rail)
            except VerbsError as error:
                self._rails.failed(rail, str(error))
                continue
            self._fresh.append(end)
            connection.send(self._offer(end))
        for end in list(self._fresh):
            answer = connection.receive()
            if not isinstance(answer, frames.Connected) or answer.rail != end.rail:
                raise frames.FrameError(f"answer to CONNECT of rail {end.rail} is {answer}")
            try:
                self._join(end, answer)
                self._rails.opened(end.rail)
            except VerbsError as error:
                self._rails.failed(end.rail, str(error))
                self._fresh.remove(end)
                _close(end.pair)
                connection.send(frames.Down(end.rail, end.number))
        if not self._fresh:
            raise VerbsError(0, f"no rail could be connected ({self._rails.why_down or 'the peer has no card'})")

    def _make_end(self, rail: int) -> _End:
        return _End(rail, self._fabric.nics[self._rails.rails[rail].own].device.queue_pair(), secrets.randbits(24))

    def _offer(self, end: _End) -> frames.Connect:
        rail = self._rails.rails[end.rail]
        nic = self._fabric.nics[rail.own]
        return frames.Connect(end.rail, rail.theirs, end.pair.number, end.psn,
                              frames.Card(nic.gid.raw, nic.device.lid, nic.device.mtu))

    def _join(self, end: _End, answer: frames.Connected) -> None:
        """Connects our end to the peer's; raises :class:`VerbsError`."""
        if answer.refused:
            raise VerbsError(0, f"the peer could not connect: {answer.refused}")
        end.number = answer.number
        rail = self._rails.rails[end.rail]
        card, gid = self._nics[rail.theirs], self._fabric.nics[rail.own].gid
        end.pair.connect(Remote(answer.number, answer.psn, card.gid, card.lid, card.mtu), psn=end.psn,
                         gid_index=gid.index, timing=TIMING)

    # -- claims, in the loop ------------------------------------------------------------------------------------

    def send_now(self, connection: Connection, transfer: Transfer) -> bool:
        segments = [self._sender.segments[piece.segment] for piece in transfer.batch.pieces]
        if transfer.corrupt or any(segment.way is Way.STAGED for segment in segments):
            self._unstaged.append(transfer)
            self._fill_slots()
            return True
        if any(segment.staged for segment in segments) or (self.checksums and transfer.batch.nbytes > INLINE_BYTES):
            return False
        self._begin(transfer, self.proofs(transfer))
        return True

    def send(self, connection: Connection, transfer: Transfer) -> None:
        for name in {piece.segment for piece in transfer.batch.pieces}:
            self._sender.segments[name].settle()
        call_on(self._loop, self._begin, transfer, self.proofs(transfer))

    def give_up(self, transfer: Transfer) -> None:
        transfer.ended = True
        flight = self._current.get(transfer.id)
        self._pending.end(transfer, [LATE] * transfer.count)
        if flight is not None and flight.begun and not flight.written and flight.end is not None:
            # The card is reading its bytes: only the end of the queue pair makes sure that it stops.
            self._rail_failed(flight.end, "a transfer ran out of time while it was written")
        elif flight is not None:
            self._forget(flight)
            if not flight.begun:
                self._say(frames.Abort(flight.number))
        self.ended(transfer)

    def ended(self, transfer: Transfer) -> None:
        if transfer.id in self._slots:
            self._stage.give_back(self._slots.pop(transfer.id)[0])
            self._fill_slots()

    def fail(self, trouble: Trouble) -> None:
        if self._pending.trouble is not None:
            return
        for timer in self._timers:
            timer.cancel()
        # Nothing may be read any more once the transfers are told.
        for end in list(self._ends.values()):
            self._cut(end)
        for flight in list(self._flights.values()):
            self._forget(flight)
        super().fail(trouble)

    def hear(self, body: frames.Body) -> None:
        match body:
            case frames.Keys():
                end = self._ends.get(body.rail)
                if end is not None:
                    end.keys[body.segment] = body.address, body.nbytes, body.key
            case frames.Go():
                flight = self._flight(body.id)
                if flight is not None:
                    self._cleared(flight, body.landing)
            case frames.Ack():
                flight = self._flight(body.id)
                if flight is not None:
                    self._forget(flight)
                    self.acknowledge(msgspec.structs.replace(body, id=flight.transfer.id))
            case frames.Connected():
                self._connected(body)
            case frames.Down():
                end = self._ends.get(body.rail)
                if end is not None and end.number == body.number:
                    self._rail_failed(end, "the peer's end of it failed")
            case _:
                raise frames.FrameError(f"a receiver does not say {type(body).__name__} over RDMA")

    def _flight(self, number: int) -> _Flight | None:
        """``None`` for one that is over; raises :class:`frames.FrameError` for one that never was."""
        if number >= self._issued:
            raise frames.FrameError(f"answer to claim {number}, which was never made")
        return self._flights.get(number)

    def _begin(self, transfer: Transfer, checksums: list[int], *, again: int = -1) -> None:
        """Claims by the best rail; ``again``: number of the attempt that a failed rail ended."""
        if transfer.ended:
            return
        batch, end = transfer.batch, None
        sources = self._sources(transfer)
        if batch.pieces:
            choice = self._rails.choose(batch.nbytes, buffer_node=self._fabric.node(sources[0][0]),
                                        now_s=self._sender.clock.monotonic())
            if choice is None:
                self.fail(Trouble(PeerGone, f"no rail is up: {self._rails.why_down}"))
                return
            end = self._ends[choice.rail]
        if self._issued >= MAX_NUMBER:
            self.fail(Trouble(PeerGone, "its claims' numbers are used up; another connection has new ones"))
            return
        flight = _Flight(self._issued, transfer, end, checksums, sources)
        self._issued += 1
        if end is not None:
            self._load(end).started(batch.nbytes)
        self._flights[flight.number] = self._current[transfer.id] = flight
        grant = transfer.grant
        self._say(frames.Begin(
            flight.number, grant.operation, grant.incarnation, grant.token, self._sender.timeout_ms(transfer),
            [piece.remote for piece in batch.pieces], transfer.note, checksums, -1 if end is None else end.rail, again))

    def _forget(self, flight: _Flight) -> None:
        """It has its answer, or will not be waited for."""
        self._flights.pop(flight.number, None)
        if self._current.get(flight.transfer.id) is flight:
            del self._current[flight.transfer.id]
        if flight.end is not None and not flight.written:
            self._load(flight.end).dropped(flight.transfer.batch.nbytes)
            flight.written = True

    def _load(self, end: _End) -> Load:
        return self._rails.rails[end.rail].load

    def _say(self, body: frames.Body) -> None:
        """Sends a frame, in order, without waiting."""
        if self._pending.trouble is not None:
            return
        assert self._connection is not None, "a lane takes transfers once it is open"
        taken: bool | None = False
        if not self._unsaid:
            try:
                taken = self._connection.send_now(body)
            except OSError as error:
                self.fail(self._broken(error))
                return
        if not taken:
            self._unsaid += 1
            self._jobs.put(partial(self._say_rest, body if taken is False else None))

    def _say_rest(self, body: frames.Body | None, connection: Connection) -> None:
        """In the thread: sends a frame, or the rest of one."""
        if body is None:
            connection.flush()
        else:
            connection.send(body)
        call_on(self._loop, self._said)

    def _said(self) -> None:
        self._unsaid -= 1

    # -- bytes that no card reaches -----------------------------------------------------------------------------

    def _fill_slots(self) -> None:
        """Has the thread fill what slots there are for those that wait."""
        while self._unstaged:
            if not self._unstaged[0].ended:
                slot = self._stage.take_now()
                if slot is None:
                    return
                segments = {piece.segment: self._sender.segments[piece.segment]
                            for piece in self._unstaged[0].batch.pieces}
                self._jobs.put(partial(self._fill, self._unstaged[0], slot, segments))
            self._unstaged.popleft()

    def _fill(self, transfer: Transfer, slot: int, segments: Mapping[str, Segment], connection: Connection) -> None:
        """In the thread."""
        if self._staging_of is None:
            self._staging_of = next((segment.memory for segment in segments.values()
                                     if isinstance(segment, DeviceSegment)), None)
        staged = None if transfer.ended else self._stage.fill(slot, transfer, segments, proven=self.checksums)
        call_on(self._loop, self._filled, transfer, slot, staged)

    def _allocate_stage(self, nbytes: int) -> Segment:
        if self._staging_of is None:
            return Segment.allocate("stage", nbytes)
        return Segment.adopt("stage", self._staging_of.staging(nbytes))

    def _filled(self, transfer: Transfer, slot: int, staged: Staged | None) -> None:
        if transfer.ended or staged is None:
            self._stage.give_back(slot)
            self._fill_slots()
        else:
            self._slots[transfer.id] = slot, staged
            self._begin(transfer, staged.checksums)

    def _sources(self, transfer: Transfer) -> list[tuple[Segment, int]]:
        """Memory that the cards read, and offset, for each piece."""
        if transfer.id in self._slots:
            _, staged = self._slots[transfer.id]
            return [(staged.memory, offset) for offset in staged.offsets]
        return [(self._sender.segments[piece.segment], piece.offset) for piece in transfer.batch.pieces]

    # -- writing ------------------------------------------------------------------------------------------------

    def _cleared(self, flight: _Flight, landing: list[int]) -> None:
        end, pieces = flight.end, flight.transfer.batch.pieces
        if end is None:
            raise frames.FrameError(f"GO for claim {flight.number}, which has no bytes")
        if flight.targets:  # the receiver has all of it, but another writer's failure may have spoilt it
            if flight in end.queue:
                raise frames.FrameError(f"GO for claim {flight.number} again, while it is written")
            former, flight = flight, _Flight(flight.number, flight.transfer, end, flight.checksums, flight.sources,
                                             begun=True)
            self._forget(former)
            self._load(end).started(flight.transfer.batch.nbytes)
            self._flights[flight.number] = self._current[flight.transfer.id] = flight
        if landing and len(landing) != len(pieces):
            raise frames.FrameError(f"GO for claim {flight.number} lets {len(landing)} of {len(pieces)} pieces land")
        for i, piece in enumerate(pieces):
            remote = piece.remote
            name, offset = (frames.LANDING, landing[i]) if landing else (remote.segment, remote.offset)
            address, nbytes, key = end.keys.get(name, (0, 0, 0))
            if offset + remote.length > nbytes:
                raise frames.FrameError(f"GO for bytes of segment {name!r} whose key was not handed out")
            flight.targets.append((address + offset, key))
        flight.writes = self._writes(flight, end)
        end.queue.append(flight)
        self._pump(end)

    def _writes(self, flight: _Flight, end: _End) -> Iterator[_Write]:
        """The work requests of a flight. Registers memory as it goes; raises :class:`VerbsError`."""
        nic = self._rails.rails[end.rail].own
        pieces = flight.transfer.batch.pieces
        for i, (piece, (segment, offset), (remote, key)) in enumerate(
                zip(pieces, flight.sources, flight.targets, strict=True)):
            length, region = piece.remote.length, self._fabric.region(nic, segment)
            address = region.address + offset
            for start in range(0, length, WRITE_BYTES):
                part = min(WRITE_BYTES, length - start)
                yield _Write((address + start, part, region.lkey), (remote + start, key),
                             last=i == len(pieces) - 1 and start + part == length)

    def _pump(self, end: _End) -> None:
        """Posts what waits and fits, here when that takes no time."""
        room = SEND_DEPTH - (end.posted - end.completed)
        if end.posting or end.down or not end.queue or room <= 0:
            return
        end.posting = True
        if all(self._is_quick(flight, end) for flight in end.queue):
            self._posted(end, self._post(end, room))
        else:
            self._jobs.put(partial(self._post_there, end, room))

    def _is_quick(self, flight: _Flight, end: _End) -> bool:
        rail, batch = self._rails.rails[end.rail], flight.transfer.batch
        return ((not rail.nic.virtual or batch.nbytes <= INLINE_BYTES)
                and all(self._fabric.knows(rail.own, segment) for segment, _ in flight.sources))

    def _post_there(self, end: _End, room: int, connection: Connection) -> None:
        """In the thread."""
        call_on(self._loop, self._posted, end, self._post(end, room))

    def _post(self, end: _End, room: int) -> str:
        """Posts up to ``room`` work requests; returns what went wrong."""
        try:
            while room and end.queue and not end.down:
                flight = end.queue[0]
                flight.begun = True
                if flight.transfer.ended:
                    end.queue.popleft()
                    continue
                assert flight.writes is not None
                write = next(flight.writes)
                if not flight.started_s:
                    flight.started_s = self._sender.clock.monotonic()
                request = end.posted
                if write.last:
                    end.tails.append((request, flight))
                    end.queue.popleft()
                end.posted += 1
                room -= 1
                end.pair.write(request, write.source, write.target,
                               signaled=write.last or request % SIGNAL_EVERY == SIGNAL_EVERY - 1,
                               immediate=flight.number if write.last else None)
        except VerbsError as error:
            return str(error)
        return ""

    def _posted(self, end: _End, trouble: str) -> None:
        end.posting = False
        if trouble:
            self._rail_failed(end, trouble)
        else:
            self._pump(end)

    def _complete(self, end: _End) -> None:
        """Reads what the card has done; called when its descriptor is readable."""
        try:
            completions = end.pair.completions()
        except VerbsError as error:
            self._rail_failed(end, str(error))
            return
        now_s = self._sender.clock.monotonic()
        for completion in completions:
            if completion.status is not Status.SUCCESS:
                self._rail_failed(end, f"{completion.status.name} from the card")
                return
            end.completed = completion.request + 1
            while end.tails and end.tails[0][0] <= completion.request:
                _, flight = end.tails.popleft()
                if not flight.written:
                    flight.written = True
                    self._load(end).finished(flight.transfer.batch.nbytes, started_s=flight.started_s, now_s=now_s)
            self._rails.worked(end.rail)
        self._pump(end)

    # -- rails that fail and come back --------------------------------------------------------------------------

    def _cut(self, end: _End) -> None:
        """Ends our end of a rail: when this returns its card reads nothing more for it."""
        end.down = True
        self._loop.remove_reader(end.pair.fd)
        try:
            end.pair.fail()
        except VerbsError as error:  # a device that is gone reads nothing either
            _log.info("action=rdma_queue_pair_lost rail=%s why=%r", end.rail, str(error))
        del self._ends[end.rail]
        self._jobs.put(partial(self._close_there, end.pair))

    def _rail_failed(self, end: _End, why: str) -> None:
        """Pauses the rail and begins its flights again on others."""
        if end.down:
            return
        self._cut(end)
        self._say(frames.Down(end.rail, end.number))
        self._pause(end.rail, why)
        flights = [flight for flight in self._flights.values() if flight.end is end]
        for flight in flights:
            self._forget(flight)
            if self._pending.trouble is None:
                self._begin(flight.transfer, flight.checksums, again=flight.number)

    def _pause(self, rail: int, why: str) -> None:
        cool_down_s = self._rails.failed(rail, why)
        item = self._rails.rails[rail]
        _log.warning("action=rdma_rail_failed peer=%s device=%s cool_down_s=%.0f why=%r", self._peer.worker,
                     item.nic.name, cool_down_s, why)
        self._wait(rail, cool_down_s)

    def _wait(self, rail: int, delay_s: float) -> None:
        if self._pending.trouble is not None:
            return

        def due() -> None:
            self._timers.discard(timer)
            self._jobs.put(partial(self._remake, rail))

        timer = self._loop.call_later(delay_s, due)
        self._timers.add(timer)

    def _close_there(self, part: QueuePair, connection: Connection) -> None:
        """In the thread, after all that was to be done with it."""
        _close(part)

    def _remake(self, rail: int, connection: Connection) -> None:
        """In the thread: a new queue pair for a rail whose cool-down is over."""
        try:
            end = self._make_end(rail)
        except VerbsError as error:
            call_on(self._loop, self._pause, rail, str(error))
        else:
            call_on(self._loop, self._remade, end)

    def _remade(self, end: _End) -> None:
        if self._pending.trouble is not None:
            self._jobs.put(partial(self._close_there, end.pair))
            return
        self._ends[end.rail] = end
        self._say(self._offer(end))

    def _connected(self, answer: frames.Connected) -> None:
        end = self._ends.get(answer.rail)
        if end is None or end.number:
            raise frames.FrameError(f"answer to CONNECT of rail {answer.rail}, which was not made")
        end.number = answer.number
        self._jobs.put(partial(self._rejoin, end, answer))

    def _rejoin(self, end: _End, answer: frames.Connected, connection: Connection) -> None:
        """In the thread: connects the new queue pair."""
        trouble = ""
        try:
            self._join(end, answer)
        except VerbsError as error:
            trouble = str(error)
        call_on(self._loop, self._rejoined, end, trouble)

    def _rejoined(self, end: _End, trouble: str) -> None:
        if end.down:
            return
        if trouble:
            self._rail_failed(end, trouble)
        else:
            self._use(end)
            self._rails.opened(end.rail)

    def _use(self, end: _End) -> None:
        self._loop.add_reader(end.pair.fd, self._complete, end)

    # -- life ---------------------------------------------------------------------------------------------------

    def _on_open(self, connection: Connection) -> None:
        if self._pending.trouble is None:
            for end in self._fresh:
                self._ends[end.rail] = end
                self._use(end)
            self._fresh = []
            for rail in self._rails.down:
                self._wait(rail, self._rails.rails[rail].cool_down_s)
        super()._on_open(connection)

    def release(self) -> None:
        for end in self._fresh:
            _close(end.pair)
        if self._stage.memory is not None:
            self._fabric.forget(self._stage.memory.serial)
            self._stage.memory.close()


def _close(part: QueuePair) -> None:
    try:
        part.close()
    except VerbsError as error:
        _log.warning("action=rdma_close_failed why=%r", str(error))


# -- receiving --------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Arrival:
    """Our end of a rail by which we are written to."""

    nic: int
    pair: QueuePair
    told: dict[str, int] = field(default_factory=dict)
    """{segment: serial of the one whose key was handed out}"""
    claims: dict[int, frames.Begin] = field(default_factory=dict)
    """{number: claim in progress}"""


class _Attentive(Connection):
    """Has something else attended to while it waits for the next frame."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.attend: Callable[[], None] = lambda: None

    def receive(self, begun: Callable[[], None] = lambda: None) -> frames.Body:
        if self._high == self._low:
            self.attend()
        return super().receive(begun)


class RdmaSession(Session):
    """Admits claims, hands out keys, and commits what the cards report as written."""

    path = PATH

    def __init__(self, fabric: Fabric, receiver: Receiver, connection: _Attentive, name: str) -> None:
        super().__init__(receiver, connection, name)
        self._fabric = fabric
        self._rails: dict[int, _Arrival] = {}
        self._recent: OrderedDict[int, list[int]] = OrderedDict()
        """{number of a committed claim: what was bad}, for a sender that did not hear so."""
        self._landing: Landing | None = None
        self._waiting: dict[int, frames.Begin] = {}
        """{number: claim}, in the order of their coming, of those that wait for room to land."""
        connection.attend = self._attend

    def _greet(self) -> None:
        super()._greet()
        self._connection.send(frames.Cards(
            [frames.Card(nic.gid.raw, nic.device.lid, nic.device.mtu) for nic in self._fabric.nics[:frames.MAX_RAILS]]))

    def handle(self, body: frames.Body) -> None:
        match body:
            case frames.Begin():
                self._admit(body)
            case frames.Abort():
                for rail in self._rails.values():
                    if rail.claims.pop(body.id, None) is not None:
                        self._end_badly(body.id)
            case frames.Connect():
                self._connect(body)
            case frames.Down():
                arrival = self._rails.get(body.rail)
                if arrival is not None and arrival.pair.number == body.number:
                    self._collect(body.rail, arrival)  # what has arrived has arrived
                    self._drop(body.rail)
            case _:
                raise frames.FrameError(f"a sender does not say {type(body).__name__} over RDMA")

    def ended(self) -> None:
        for arrival in self._rails.values():
            _close(arrival.pair)
        if self._landing is not None:
            self._fabric.forget(self._landing.memory.serial)
            self._landing.memory.close()

    def _connect(self, body: frames.Connect) -> None:
        if body.rail in self._rails:
            raise frames.FrameError(f"CONNECT of rail {body.rail}, which is connected")
        if body.card >= len(self._fabric.nics):
            raise frames.FrameError(f"CONNECT to card {body.card} of {len(self._fabric.nics)}")
        nic, psn = self._fabric.nics[body.card], secrets.randbits(24)
        pair = None
        try:
            pair = nic.device.queue_pair()
            pair.connect(Remote(body.number, body.psn, body.sender.gid, body.sender.lid, body.sender.mtu), psn=psn,
                         gid_index=nic.gid.index, timing=TIMING)
        except VerbsError as error:
            if pair is not None:
                _close(pair)
            self._connection.send(frames.Connected(body.rail, 0, 0, str(error)[:1024]))
            return
        self._rails[body.rail] = _Arrival(body.card, pair)
        self._connection.send(frames.Connected(body.rail, pair.number, psn))

    def _admit(self, claim: frames.Begin) -> None:
        if claim.again in self._recent:
            self._connection.send(frames.Ack(claim.id, bad=self._recent[claim.again]))
            return
        arrival = self._rails.get(claim.rail)
        if claim.spans and arrival is None:
            return  # it failed here, and the sender was told so: the claim will come again
        if any(span.count != 1 for span in claim.spans):
            raise frames.FrameError(f"claim {claim.id} is of parts, which no card puts in their places")
        if self._begin(claim) is None:
            return
        if arrival is None or not claim.spans:
            self._commit(claim, claim.checksums)
            return
        segments = {span.segment: self._ledger.segment_of(span) for span in claim.spans}
        arrival.claims[claim.id] = claim
        device = next((item for item in segments.values()
                       if isinstance(item, DeviceSegment) and item.way is Way.STAGED), None)
        if device is None:
            self._clear(claim, arrival, segments, [])
            return
        if self._landing is None:
            self._landing = Landing(Segment.adopt("landing", device.memory.staging(LANDING_BYTES)))
        if sum(span.length for span in claim.spans) > LANDING_BYTES:
            del arrival.claims[claim.id]
            self._refuse(claim, f"more than {LANDING_BYTES} bytes at a time cannot land here")
            return
        self._waiting[claim.id] = claim

    def _let_in(self) -> None:
        """Clears those that wait, in order, as far as there is room where they land."""
        landing = self._landing
        while self._waiting and landing is not None:
            claim = next(iter(self._waiting.values()))
            at = landing.take(claim.id, sum(span.length for span in claim.spans))
            if at is None:
                return
            del self._waiting[claim.id]
            offsets = list(accumulate((span.length for span in claim.spans[:-1]), initial=at))
            self._clear(claim, self._rails[claim.rail], {frames.LANDING: landing.memory}, offsets)

    def _clear(self, claim: frames.Begin, arrival: _Arrival, segments: Mapping[str, Segment],
               landing: list[int]) -> None:
        """Hands out the keys of ``segments`` that the rail has not had, and GO."""
        for name, segment in segments.items():
            try:
                region = self._fabric.region(arrival.nic, segment)
            except VerbsError as error:
                self._give_up(claim.rail, arrival, str(error))
                return
            if arrival.told.get(name) != segment.serial:
                arrival.told[name] = segment.serial
                self._connection.send(frames.Keys(claim.rail, name, region.address, segment.nbytes, region.rkey))
        self._connection.send(frames.Go(claim.id, landing))

    def _attend(self) -> None:
        """Serves the cards until the connection has something to read."""
        readable = self._connection.readiness()
        while True:
            self._let_in()  # here, where it does not matter if that costs a rail
            poller = select.poll()
            poller.register(readable, select.POLLIN)
            ends = {arrival.pair.fd: (rail, arrival) for rail, arrival in self._rails.items()}
            for fd in ends:
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll()}
            for fd in ready & ends.keys():
                rail, arrival = ends[fd]
                if not self._collect(rail, arrival):
                    self._give_up(rail, arrival, "its queue pair failed")
            if readable in ready:
                return

    def _collect(self, rail: int, arrival: _Arrival) -> bool:
        """Commits what has arrived; false when the queue pair has failed."""
        try:
            completions = arrival.pair.completions()
            for completion in completions:
                if completion.status is not Status.SUCCESS:
                    return False
                claim = arrival.claims.pop(completion.immediate if completion.immediate is not None else -1, None)
                if claim is None or claim.id in self._waiting:
                    raise frames.FrameError(f"rail {rail} reports claim {completion.immediate}, "
                                            f"which is not in progress")
                arrival.pair.receive()
                writer = self._writers[claim.id]
                if self._landing is not None and self._landing.holds(claim.id):
                    self._land(claim, writer)
                elif writer.disturbed and not claim.checksums:
                    # Where a writer failed that wrote into the same bytes: written once more, they are right.
                    writer.disturbed = False
                    arrival.claims[claim.id] = claim
                    self._connection.send(frames.Go(claim.id))
                else:
                    self._arrived(claim)
        except VerbsError as error:
            _log.info("action=rdma_rail_lost rail=%s why=%r", rail, str(error))
            return False
        return True

    def _land(self, claim: frames.Begin, writer: Writer) -> None:
        """Copies what has landed to where it belongs, and commits it."""
        assert self._landing is not None
        while True:
            self._landing.empty(claim.id, claim.spans, self._ledger.segment_of)
            if not writer.disturbed:
                break
            writer.disturbed = False  # by a former attempt at the same bytes, whose rail failed
        self._landing.give_back(claim.id)
        self._arrived(claim)

    def _arrived(self, claim: frames.Begin) -> None:
        """Its bytes are in their places."""
        if not self._condemned:
            self._recent[claim.id] = self._commit(claim, claim.checksums)
            if len(self._recent) > 2 * RECEIVE_DEPTH:
                self._recent.popitem(last=False)

    def _end_badly(self, number: int) -> None:
        """Fails the writer of a claim; nothing writes for it any more."""
        self._waiting.pop(number, None)
        if self._landing is not None:
            self._landing.give_back(number)
        self._ledger.fail(self._writers.pop(number))

    def _give_up(self, rail: int, arrival: _Arrival, why: str) -> None:
        _log.warning("action=rdma_rail_failed peer=%s rail=%s why=%r", self.sender, rail, why)
        self._drop(rail)
        self._connection.send(frames.Down(rail, arrival.pair.number))

    def _drop(self, rail: int) -> None:
        """Destroys the queue pair, and only then fails who wrote through it."""
        arrival = self._rails.pop(rail)
        _close(arrival.pair)
        for number in arrival.claims:
            self._end_badly(number)


def open_session(fabric: Fabric, receiver: Receiver, sock: socket.socket, name: str) -> Session:
    """For :meth:`Receiver.listen`, with the fabric given."""
    keep_alive(sock, gone_s=GONE_S)
    return RdmaSession(fabric, receiver, _Attentive(sock), name)
