"""The sending side: a lane is one pipelined way to one peer.

Claims go out in the order they were submitted without waiting for the answers to earlier ones, so many pushes
share a lane. Every submitted transfer ends by exactly one call of its ``finish``.

A lane belongs to its engine's event loop: everything but the methods of its one worker thread runs there. The
thread does what may block: it connects, and sends what the kernel does not take at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shared.clock import Clock
from shared.ids import HostId, Incarnation, WorkerId
from shared.messages import Endpoint, Grant
from shared.transfer import frames
from shared.transfer.addresses import host_clock_s
from shared.transfer.channel import Closed
from shared.transfer.ledger import checksum
from shared.transfer.native import Native
from shared.transfer.plan import Batch, Piece, needs_checksums
from shared.transfer.segment import Segment
from shared.transfer.types import ChecksumMismatch, GrantRefused, Outcome, PeerGone, TransferTimeout, Trouble
from shared.transfer.wire import Connection

_log = logging.getLogger(__name__)

INLINE_BYTES = 256 << 10
"""A payload up to this goes out from the event loop: handing it to a thread would take longer."""


DIAL_ERRORS = (OSError, ValueError, Closed, frames.FrameError)
"""What connecting and greeting raise."""
LATE = Trouble(TransferTimeout, "not acknowledged before the deadline")


@dataclass(eq=False, slots=True)
class Transfer:
    """One batch on its way."""

    batch: Batch
    grant: Grant
    deadline_s: float
    """On the host's clock; the source bytes may change after it."""
    note: bytes | None
    finish: Callable[[Outcome], None]
    corrupt: frozenset[int] = frozenset()
    """For tests: indexes of pieces in which a byte is flipped after the checksum was taken."""
    id: int = 0
    begun: bool = False
    """Its bytes are being read; set before ``ended`` is looked at."""
    sent: bool = False
    """Its bytes are read no more."""
    ended: bool = False
    """Nobody waits for it; set before ``begun`` is looked at."""

    def finish_all(self, trouble: Trouble | None) -> None:
        """The same outcome for all pieces."""
        self.finish([trouble] * self.count)

    @property
    def count(self) -> int:
        """Outcomes it has: one a piece, and one if there is none."""
        return max(1, len(self.batch.pieces))


@dataclass(frozen=True, slots=True)
class Sender:
    """What lanes share with their engine."""

    worker: WorkerId
    incarnation: Incarnation
    host: HostId
    segments: Mapping[str, Segment]
    clock: Clock
    checksums: str
    """The setting: auto, on, off."""
    connect_timeout_s: float
    name: str
    native: Native | None

    def source(self, piece: Piece) -> npt.NDArray[np.uint8]:
        """The bytes of a piece, where they lie if the host has them and they are in one place."""
        return self.segments[piece.segment].read_parts(piece.offset, piece.remote)

    def is_staged(self, batch: Batch) -> bool:
        """Does it take time to get at its bytes?"""
        return any(self.segments[piece.segment].staged for piece in batch.pieces)

    def timeout_ms(self, transfer: Transfer) -> int:
        """What is left of a transfer's time, as it travels: at least 1 ms, at most what a receiver accepts."""
        left_s = transfer.deadline_s - host_clock_s()
        return max(1, min(frames.MAX_TIMEOUT_MS, int(left_s * 1e3)))


class Lane(Protocol):
    """What the engine needs of a way to a peer."""

    @property
    def failed(self) -> Trouble | None:
        """Why it takes no more transfers; ``None`` while it does."""
        ...

    def start(self, opened: Callable[[Trouble | None], None]) -> None:
        """Connects in its own thread, then calls ``opened`` once, on the loop."""
        ...

    def submit(self, transfer: Transfer) -> None:
        """Takes a transfer; never blocks."""
        ...

    def give_up(self, transfer: Transfer) -> None:
        """Ends a transfer whose time is over: from here on its bytes are read no more, or not believed."""
        ...

    def silence_s(self) -> float:
        """Seconds for which the peer has owed an answer and not said anything."""
        ...

    def fail(self, trouble: Trouble) -> None:
        """Ends every transfer with ``trouble`` and lets the thread stop. Idempotent."""
        ...

    def forget(self, serial: int) -> None:
        """The segment ``serial`` goes away; no transfer of it is on its way."""
        ...

    def join(self) -> None:
        """Waits, in any thread, for the thread of a failed lane."""
        ...

    @property
    def alive(self) -> bool:
        """Does its thread run?"""
        ...


@dataclass(eq=False, slots=True)
class Pending:
    """Transfers without an outcome, by id; closes with the lane's trouble."""

    clock: Clock
    trouble: Trouble | None = None
    _transfers: dict[int, Transfer] = field(default_factory=dict)
    _issued: int = 0
    _waiting_since_s: float = 0.0

    def add(self, transfer: Transfer) -> bool:
        """Numbers and keeps it; false, with its trouble reported, when the lane has failed."""
        if self.trouble is not None:
            transfer.ended = True
            transfer.finish_all(self.trouble)
            return False
        if not self._transfers:
            self._waiting_since_s = self.clock.monotonic()
        transfer.id = self._issued
        self._issued += 1
        self._transfers[transfer.id] = transfer
        return True

    def heard(self) -> None:
        """The peer said something."""
        self._waiting_since_s = self.clock.monotonic()

    def silence_s(self) -> float:
        """See :meth:`Lane.silence_s`."""
        return self.clock.monotonic() - self._waiting_since_s if self._transfers else 0.0

    def get(self, transfer_id: int) -> Transfer | None:
        """``None`` for one that ended before its answer came; raises :class:`frames.FrameError` for an unknown one."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None and transfer_id >= self._issued:
            raise frames.FrameError(f"answer to transfer {transfer_id}, which was never sent")
        return transfer

    def end(self, transfer: Transfer, outcome: Outcome) -> None:
        """Reports its outcome, unless that happened already."""
        if self._transfers.pop(transfer.id, None) is not None:
            transfer.ended = True
            transfer.finish(outcome)

    def close(self, trouble: Trouble) -> bool:
        """Reports ``trouble`` for everything that waits; true the first time."""
        if self.trouble is not None:
            return False
        self.trouble = trouble
        transfers, self._transfers = list(self._transfers.values()), {}
        for transfer in transfers:
            transfer.ended = True
            transfer.finish_all(trouble)
        return True


class StreamLane(ABC):
    """A lane over a connection: the event loop hears the answers."""

    path: str

    def __init__(self, sender: Sender, peer: Endpoint, address: str) -> None:
        self._sender = sender
        self._peer = peer
        self._address = address
        self._pending = Pending(sender.clock)
        self._jobs: SimpleQueue[Callable[[Connection], None] | None] = SimpleQueue()
        """What the thread does next; ``None``: it stops."""
        self._dialled: Connection | None = None
        self._connection: Connection | None = None
        """The same, once the peer has answered."""
        self._thread: threading.Thread | None = None
        """Once it is started; a blocking push uses a lane without."""
        self._opened: Callable[[Trouble | None], None] = lambda trouble: None
        self.checksums = False
        """Does the receiver get one for each piece? Known once connected."""

    @abstractmethod
    def connect(self, address: str, timeout_s: float) -> Connection:
        """A connection that is not greeted yet; in the thread. Raises ``OSError`` or ``ValueError``."""

    @abstractmethod
    def send_now(self, connection: Connection, transfer: Transfer) -> bool | None:
        """Sends from the event loop what takes no time; answers like :meth:`Connection.send_now`."""

    @abstractmethod
    def send(self, connection: Connection, transfer: Transfer) -> None:
        """Sends a transfer; in the thread, may block. Raises ``OSError``."""

    def form(self, grant: Grant, remote: str, segment: Segment) -> frames.Form | None:
        """For plain slices of ``segment`` that go to the peer's segment ``remote``; ``None`` if nothing is plain there.
        """
        return None

    def hear(self, body: frames.Body) -> None:
        """Handles an answer; raises :class:`frames.FrameError` for one that has no business here."""
        if not isinstance(body, frames.Ack):
            raise frames.FrameError(f"a receiver does not say {type(body).__name__} over {self.path}")
        self.acknowledge(body)

    def ended(self, transfer: Transfer) -> None:  # noqa: B027  most lanes hold nothing for a transfer
        """A transfer has its outcome: gives back what the lane held for it."""

    def release(self) -> None:  # noqa: B027  a lane that holds nothing has nothing to give back
        """Gives back what the lane held; in the thread, as its last act."""

    @property
    def failed(self) -> Trouble | None:
        return self._pending.trouble

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, opened: Callable[[Trouble | None], None]) -> None:
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._work, name=f"{self._sender.name}-lane", daemon=True)
        thread.start()
        self._thread = thread

    def submit(self, transfer: Transfer) -> None:
        if not self._pending.add(transfer):
            return
        assert self._connection is not None, "a lane takes transfers once it is open"
        try:
            taken = self.send_now(self._connection, transfer)
        except OSError as error:
            self.fail(self._broken(error))
            return
        except Exception as error:  # nothing of it was sent, and the others on this lane are well
            _log.exception("action=transfer_failed peer=%s", self._peer.worker)
            self._pending.end(transfer, [Trouble(PeerGone, f"it could not be sent: {error!r}")] * transfer.count)
            return
        transfer.begun, transfer.sent = taken is not False, taken is True
        if not transfer.sent:
            self._jobs.put(partial(self._finish_sending, transfer))

    def give_up(self, transfer: Transfer) -> None:
        transfer.ended = True
        self.ended(transfer)
        self._pending.end(transfer, [LATE] * transfer.count)
        if transfer.begun and not transfer.sent:
            # The thread is reading its bytes: only a cut makes sure that the rest is never taken for them.
            self.fail(Trouble(PeerGone, "cut, since a transfer ran out of time while it was sent"))

    def silence_s(self) -> float:
        return self._pending.silence_s()

    def fail(self, trouble: Trouble) -> None:
        if self.failed is not None:
            return
        _log.info("action=lane_failed peer=%s address=%s why=%r", self._peer.worker, self._address, trouble.why)
        if self._connection is not None:
            self._loop.remove_reader(self._connection.readiness())
        if self._dialled is not None:
            # Before anybody is told: whoever is may change the bytes that a receiver who hears us still would take.
            self._dialled.shutdown()
        self._pending.close(trouble)
        self._jobs.put(None)

    def forget(self, serial: int) -> None:  # noqa: B027  most lanes show nobody any memory
        """The segment ``serial`` goes away; no transfer of it is on its way."""

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def acknowledge(self, body: frames.Ack) -> None:
        """Ends the transfer that ``body`` answers."""
        transfer = self._pending.get(body.id)
        if transfer is None:
            return
        outcome = outcome_of(body, count=transfer.count, deadline_s=transfer.deadline_s, proven=self.checksums)
        self.ended(transfer)
        self._pending.end(transfer, outcome)

    def proofs(self, transfer: Transfer) -> list[int]:
        """A checksum for each piece, or nothing when they are switched off."""
        if not self.checksums:
            return []
        return [checksum(self._sender.source(piece)) for piece in transfer.batch.pieces]

    # -- the loop's side of the thread --------------------------------------------------------------------------

    def _on_open(self, connection: Connection) -> None:
        self._connection = connection
        trouble = self._pending.trouble
        if trouble is not None:  # failed while connecting, when there was nothing to shut down
            connection.shutdown()
        else:
            self._loop.add_reader(connection.readiness(), self._hear_all)
        self._opened(trouble)

    def _on_refused(self, trouble: Trouble) -> None:
        self.fail(trouble)
        self._opened(trouble)

    def _hear_all(self) -> None:
        assert self._connection is not None
        try:
            bodies = self._connection.receive_now()
            self._pending.heard()
            for body in bodies:
                self.hear(body)
        except (OSError, Closed, frames.FrameError) as error:
            self.fail(self._broken(error))
        except Exception as error:
            _log.exception("action=lane_failed peer=%s", self._peer.worker)
            self.fail(Trouble(PeerGone, f"connection to {self._address} was given up: {error!r}"))

    def _broken(self, error: BaseException) -> Trouble:
        return Trouble(PeerGone, f"connection to {self._address} broke: {_text(error)}")

    # -- the thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            connection = self.dial()
        except Exception as error:
            if not isinstance(error, DIAL_ERRORS):
                _log.exception("action=lane_failed peer=%s", self._peer.worker)
            trouble = Trouble(PeerGone, f"no connection to {self._address}: {_text(error)}")
            call_on(self._loop, self._on_refused, trouble)
            return
        call_on(self._loop, self._on_open, connection)
        try:
            while (job := self._jobs.get()) is not None:
                job(connection)
        except Exception as error:
            if not isinstance(error, OSError):
                _log.exception("action=lane_failed peer=%s", self._peer.worker)
            call_on(self._loop, self.fail, self._broken(error))
            while self._jobs.get() is not None:
                pass
        finally:
            connection.close()
            self.release()

    def _finish_sending(self, transfer: Transfer, connection: Connection) -> None:
        if transfer.begun:  # from the event loop, which the rest would have kept waiting
            connection.flush()
        else:
            transfer.begun = True
            if not transfer.ended:
                self.send(connection, transfer)
        transfer.sent = True

    def dial(self) -> Connection:
        """A connection to the wanted peer and no other; blocks. Raises :data:`DIAL_ERRORS`."""
        sender, peer = self._sender, self._peer
        connection = self._dialled = self.connect(self._address, sender.connect_timeout_s)
        try:
            if self.failed is not None:
                raise Closed
            connection.set_timeout(sender.connect_timeout_s)
            connection.send(frames.Hello(sender.worker, peer.worker, peer.incarnation, sender.host,
                                         host_clock_s()))
            body = connection.receive()
            if not isinstance(body, frames.Welcome):
                raise frames.FrameError(f"first frame is {type(body).__name__}, not Welcome")
            if (body.worker, body.incarnation) != (peer.worker, peer.incarnation):
                raise ConnectionRefusedError(f"{body.worker} (incarnation {body.incarnation}) answers there, "
                                             f"not {peer.worker} (incarnation {peer.incarnation})")
            connection.set_timeout(None)
        except BaseException:
            connection.close()
            raise
        self.checksums = body.checksums or needs_checksums(sender.checksums, self.path, sender.host, peer.host)
        return connection


def outcome_of(body: frames.Ack, *, count: int, deadline_s: float, proven: bool) -> Outcome:
    """What the receiver says of a batch of ``count`` pieces; raises :class:`frames.FrameError` when it makes no sense.

    Bytes that were not ``proven`` by checksums are bad when another writer failed on the same ones meanwhile: they
    go again, as after a connection that broke.
    """
    outcome: list[Trouble | None] = [None] * count
    if body.refused:
        late = host_clock_s() >= deadline_s  # whatever it was refused for, that is what it comes to
        outcome = [LATE if late else Trouble(GrantRefused, body.refused)] * count
    for i in body.bad:
        if not 0 <= i < count:
            raise frames.FrameError(f"acknowledgement of piece {i} of {count}")
        outcome[i] = Trouble(ChecksumMismatch, "the receiver read other bytes than were sent") if proven else (
            Trouble(PeerGone, "another writer failed on the same bytes, and nothing proves which are there"))
    return outcome


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Calls ``function`` on ``loop``, from any thread; does nothing once the loop is closed: nobody waits there."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _text(error: BaseException) -> str:
    if isinstance(error, Closed):
        return "the peer closed it"
    return str(error) or type(error).__name__


def connected(sock: socket.socket, address: tuple[str, int] | str, timeout_s: float) -> socket.socket:
    """Connects ``sock``, or closes it and raises ``OSError``."""
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock
