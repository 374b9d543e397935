"""The sending side: a lane is one pipelined way to one peer, with its own threads.

Claims go out in the order they were submitted without waiting for the answers to earlier ones, so many pushes
share a lane. Every submitted transfer ends by exactly one call of its ``finish``, from one of the lane's threads.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.clock import Clock
from shared.ids import WorkerId
from shared.messages import Endpoint, Grant
from shared.transfer import frames
from shared.transfer.ledger import checksum
from shared.transfer.plan import Batch, Piece
from shared.transfer.segment import Segment
from shared.transfer.types import ChecksumMismatch, GrantRefused, PeerGone, TransferError
from shared.transfer.wire import Closed, Connection, close_all

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why bytes did not arrive, before it is known which slice they were of."""

    kind: type[TransferError]
    why: str


Outcome = Sequence[Trouble | None]
"""One a piece of the batch."""


@dataclass(eq=False, slots=True)
class Transfer:
    """One batch on its way. ``abandoned`` once nobody waits for it; the lane then stops when it next can."""

    batch: Batch
    grant: Grant
    timeout_s: float
    finish: Callable[[Outcome], None]
    corrupt: frozenset[int] = frozenset()
    """For tests: indexes of pieces in which a byte is flipped after the checksum was taken."""
    abandoned: bool = False
    id: int = 0

    def finish_all(self, trouble: Trouble | None) -> None:
        """The same outcome for all pieces."""
        self.finish([trouble] * len(self.batch.pieces))


@dataclass(frozen=True, slots=True)
class Sender:
    """What lanes share with their engine."""

    worker: WorkerId
    segments: Mapping[str, Segment]
    clock: Clock
    checksums: bool
    connect_timeout_s: float
    name: str

    def source(self, piece: Piece) -> npt.NDArray[np.uint8]:
        """The bytes of a piece, where they lie."""
        return self.segments[piece.segment].array[piece.offset:piece.offset + piece.remote.length]

    def checksum(self, piece: Piece) -> list[int]:
        """One checksum, or none when they are switched off."""
        return [checksum(self.source(piece))] if self.checksums else []


class Lane(Protocol):
    """What the engine needs of a way to a peer."""

    @property
    def failed(self) -> Trouble | None:
        """Why it takes no more transfers; ``None`` while it does."""
        ...

    def start(self, opened: Callable[[Trouble | None], None]) -> None:
        """Connects in its own thread, then calls ``opened`` once, from there."""
        ...

    def submit(self, transfer: Transfer) -> None:
        """Takes a transfer; never blocks."""
        ...

    def silence_s(self) -> float:
        """Seconds for which the peer has owed an answer and not said anything."""
        ...

    def fail(self, trouble: Trouble) -> None:
        """Ends every transfer with ``trouble`` and lets the threads stop. Any thread; idempotent."""
        ...

    def join(self) -> None:
        """Waits for the threads of a failed lane."""
        ...

    @property
    def alive(self) -> bool:
        """Do its threads run?"""
        ...


@dataclass(eq=False)
class Pending:
    """Transfers without an outcome, by id; closes with the lane's trouble. Thread-safe."""

    clock: Clock
    trouble: Trouble | None = None
    _transfers: dict[int, Transfer] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting_since_s: float = 0.0

    def add(self, transfer: Transfer) -> bool:
        """Numbers and keeps it; false, with its trouble reported, when the lane has failed."""
        with self._lock:
            if self.trouble is None:
                if not self._transfers:
                    self._waiting_since_s = self.clock.monotonic()
                transfer.id = next(self._ids)
                self._transfers[transfer.id] = transfer
                return True
        transfer.finish_all(self.trouble)
        return False

    def heard(self) -> None:
        """The peer said something."""
        self._waiting_since_s = self.clock.monotonic()

    def silence_s(self) -> float:
        """See :meth:`Lane.silence_s`."""
        with self._lock:
            return self.clock.monotonic() - self._waiting_since_s if self._transfers else 0.0

    def get(self, transfer_id: int) -> Transfer:
        """Raises :class:`frames.FrameError` for a number that is not on its way."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise frames.FrameError(f"answer to transfer {transfer_id}, which is not on its way")
        return transfer

    def holds(self, transfer: Transfer) -> bool:
        """Is it still without an outcome?"""
        with self._lock:
            return transfer.id in self._transfers

    def pop(self, transfer: Transfer) -> bool:
        """True for whoever may report its outcome: it happens once."""
        with self._lock:
            return self._transfers.pop(transfer.id, None) is not None

    def close(self, trouble: Trouble) -> bool:
        """Reports ``trouble`` for everything that waits; true the first time."""
        with self._lock:
            if self.trouble is not None:
                return False
            self.trouble = trouble
            transfers, self._transfers = list(self._transfers.values()), {}
        for transfer in transfers:
            transfer.finish_all(trouble)
        return True


class StreamLane(ABC):
    """A lane over a connection: one thread sends claims, one hears answers.

    The hearing thread alone closes the socket, after the sending one has ended: the receiver takes the end of
    the stream as our word that nothing writes any more.
    """

    def __init__(self, sender: Sender, peer: Endpoint, address: str) -> None:
        self._sender = sender
        self._peer = peer
        self._address = address
        self._pending = Pending(sender.clock)
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._connection: Connection | None = None
        self._threads: list[threading.Thread] = []
        self._opened: Callable[[Trouble | None], None] = lambda trouble: None

    @abstractmethod
    def connect(self, address: str, timeout_s: float) -> Connection:
        """A connection that is not greeted yet; raises ``OSError`` or ``ValueError``."""

    @abstractmethod
    def send(self, connection: Connection, transfer: Transfer) -> None:
        """Sends a transfer's claim."""

    @abstractmethod
    def hear(self, connection: Connection, body: frames.Body, descriptors: list[int]) -> None:
        """Handles an answer; owns ``descriptors``."""

    def stop_writing(self, connection: Connection) -> None:
        """Ends the stream once no thread writes into the receiver's memory any more."""
        connection.shutdown()

    def release(self) -> None:  # noqa: B027  a lane that holds nothing has nothing to give back
        """Gives back what the lane held, after both threads' last use."""

    @property
    def failed(self) -> Trouble | None:
        return self._pending.trouble

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def start(self, opened: Callable[[Trouble | None], None]) -> None:
        self._opened = opened
        self._spawn("send", self._run_sending)

    def submit(self, transfer: Transfer) -> None:
        if self._pending.add(transfer):
            self._queue.put(transfer)

    def silence_s(self) -> float:
        return self._pending.silence_s()

    def fail(self, trouble: Trouble) -> None:
        if self._pending.close(trouble):
            _log.info("action=lane_failed peer=%s address=%s why=%r", self._peer.worker, self._address, trouble.why)
            if self._connection is not None:
                self.stop_writing(self._connection)
            self._queue.put(None)

    def join(self) -> None:
        if self._threads:
            self._threads[0].join()  # the sending thread: it may still start the hearing one
            for thread in self._threads[1:]:
                thread.join()

    def acknowledge(self, body: frames.Ack) -> None:
        """Ends the transfer that ``body`` answers."""
        transfer = self._pending.get(body.id)
        pieces = transfer.batch.pieces
        if any(not 0 <= i < len(pieces) for i in body.bad):
            raise frames.FrameError(f"acknowledgement of pieces {body.bad} of {len(pieces)}")
        outcome: list[Trouble | None] = [None] * len(pieces)
        if body.refused:
            outcome = [Trouble(GrantRefused, body.refused)] * len(pieces)
        for i in body.bad:
            outcome[i] = Trouble(ChecksumMismatch, "the receiver read other bytes than were sent")
        if self._pending.pop(transfer):
            transfer.finish(outcome)

    def _spawn(self, role: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"{self._sender.name}-{role}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run_sending(self) -> None:
        try:
            connection = self._open()
        except (OSError, ValueError, Closed, frames.FrameError) as error:
            trouble = Trouble(PeerGone, f"no connection to {self._address}: {_text(error)}")
            self.fail(trouble)
            self._opened(trouble)
            return
        self._connection = connection
        if self._pending.trouble is not None:  # failed while connecting, when there was nothing to shut down
            connection.shutdown()
        self._spawn("hear", lambda: self._run_hearing(connection))
        self._opened(None)
        try:
            while (transfer := self._queue.get()) is not None:
                if transfer.abandoned:
                    if self._pending.pop(transfer):
                        transfer.finish_all(Trouble(PeerGone, "given up before it was sent"))
                elif self._pending.holds(transfer):
                    self.send(connection, transfer)
        except OSError as error:
            self.fail(Trouble(PeerGone, f"connection to {self._address} broke: {_text(error)}"))

    def _run_hearing(self, connection: Connection) -> None:
        try:
            while True:
                kind, length, descriptors = connection.receive_header()
                try:
                    body = connection.receive_body(kind, length)
                except BaseException:
                    close_all(descriptors)
                    raise
                self._pending.heard()
                self.hear(connection, body, descriptors)
        except (OSError, Closed, frames.FrameError) as error:
            self.fail(Trouble(PeerGone, f"connection to {self._address} broke: {_text(error)}"))
        except Exception as error:
            _log.exception("action=lane_failed peer=%s", self._peer.worker)
            self.fail(Trouble(PeerGone, f"connection to {self._address} was given up: {error!r}"))
        finally:
            self._threads[0].join()  # the sending thread: failing the lane has woken it
            connection.close()
            self.release()

    def _open(self) -> Connection:
        connection = self.connect(self._address, self._sender.connect_timeout_s)
        try:
            connection.set_timeout(self._sender.connect_timeout_s)
            connection.send(frames.Hello(self._sender.worker, self._peer.worker, self._peer.incarnation))
            kind, length, descriptors = connection.receive_header()
            close_all(descriptors)
            if kind is not frames.Kind.WELCOME:
                raise frames.FrameError(f"first frame is {kind.name}, not WELCOME")
            body = connection.receive_body(kind, length)
            assert isinstance(body, frames.Welcome)
            if (body.worker, body.incarnation) != (self._peer.worker, self._peer.incarnation):
                raise ConnectionRefusedError(f"{body.worker} (incarnation {body.incarnation}) answers there, "
                                             f"not {self._peer.worker} (incarnation {self._peer.incarnation})")
            connection.set_timeout(None)
        except BaseException:
            connection.close()
            raise
        return connection


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
