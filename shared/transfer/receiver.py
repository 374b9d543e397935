"""The receiving side of stream transports: listeners, and one thread a connection.

A session owns its socket; it ends by the stream's end, by bytes that are not the protocol, or by being
condemned (a deadline passed). Whatever ends it, its writers are failed only once nothing can write for them.
"""

from __future__ import annotations

import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from shared.clock import Clock
from shared.ids import HostId, OperationId, WorkerId
from shared.transfer import frames
from shared.transfer.addresses import host_clock_s
from shared.transfer.channel import Closed
from shared.transfer.ledger import Ledger, Refused, Writer
from shared.transfer.native import Native
from shared.transfer.plan import needs_checksums
from shared.transfer.types import Notification
from shared.transfer.wire import Connection

_log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Time to say HELLO, and to complete a frame once begun."""
MAX_WRITERS = 1024
"""Claims of one connection in progress at the same time."""


class Session(ABC):
    """One inbound connection; a transport adds what its frames do."""

    path: ClassVar[str]

    def __init__(self, receiver: Receiver, connection: Connection, name: str) -> None:
        self._receiver = receiver
        self._connection = connection
        self._ledger = receiver.ledger
        self._writers: dict[int, Writer] = {}
        self._condemned = ""
        self._demands_checksums = False
        self.sender, self.sender_host, self.sender_clock_s = "", "", 0.0
        """As the HELLO said."""
        self.is_greeted = False
        """Has it said who it is?"""
        self.deadline_s: float | None = receiver.clock.monotonic() + HANDSHAKE_S
        """Monotonic seconds by which what is being received must be complete; ``None`` while idle."""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def handle(self, body: frames.Body) -> None:
        """Does what ``body`` asks for; raises :class:`frames.FrameError` when it has no business here."""

    def greeted(self) -> None:  # noqa: B027  most transports need not know
        """The sender has said who it is. Raises :class:`frames.FrameError` to send it away."""

    def ended(self) -> None:  # noqa: B027  most transports hold nothing
        """Makes sure that nothing writes for this session any more and gives back what it held."""

    def condemn(self, why: str) -> None:
        """Ends the session, from any thread; its writers are failed by its own thread. Idempotent."""
        if not self._condemned:
            self._condemned = why
            self._receiver.count_dropped("deadline", why)
            self.end()

    def end(self) -> None:
        """Makes the thread end; from any thread."""
        self._connection.shutdown()

    def _run(self) -> None:
        try:
            self._greet()
            while True:
                self.deadline_s = None
                body = self._connection.receive(self._begun)
                if not self._condemned:
                    self.handle(body)
        except (Closed, OSError):
            pass  # the normal end; the sender knows what it did not get acknowledged
        except frames.FrameError as error:
            self._receiver.count_dropped("protocol", str(error))
        except Exception:
            _log.exception("action=session_failed path=%s", self.path)
            self._receiver.count_dropped("internal", "see the stack trace")
        finally:
            self._connection.close()
            self.ended()
            for writer in self._writers.values():
                self._ledger.fail(writer)

    def _greet(self) -> None:
        hello = self._connection.receive()
        if not isinstance(hello, frames.Hello):
            raise frames.FrameError(f"first frame is {type(hello).__name__}, not Hello")
        self.sender, self.sender_host, self.sender_clock_s = hello.sender, hello.host, hello.clock_s
        self.greeted()
        self.is_greeted = True
        receiver = self._receiver
        self._connection.hasten(receiver.native)
        self._demands_checksums = needs_checksums(receiver.checksums, self.path, receiver.host, hello.host)
        self._connection.send(frames.Welcome(self._ledger.worker, self._ledger.incarnation, self._demands_checksums))

    def _begun(self) -> None:
        self.deadline_s = self._receiver.clock.monotonic() + HANDSHAKE_S

    def _begin(self, claim: frames.Claim) -> Writer | None:
        """Admits a claim; refuses it to the sender's face otherwise."""
        if claim.id in self._writers:
            raise frames.FrameError(f"claim {claim.id} is in progress already")
        try:
            if len(self._writers) >= MAX_WRITERS:
                raise Refused(f"{MAX_WRITERS} claims of this connection are in progress")
            if self._demands_checksums and claim.spans and not claim.checksums:
                raise Refused("checksums are demanded here")
            if claim.note is not None and not self._receiver.can_notify():
                raise Refused("nobody takes the notifications that are here already")
            writer = self._ledger.begin(claim, path=self.path, sender=self.sender, condemn=self.condemn)
        except Refused as refused:
            self._connection.send(frames.Ack(claim.id, refused=str(refused)[:1024]))
            return None
        self._writers[claim.id] = writer
        return writer

    def _commit(self, claim: frames.Claim, checksums: list[int], good: bytes = b"") -> list[int]:
        """Ends a claim well: booked before its note is passed on, and that before it is acknowledged.

        ``good``: its :func:`frames.good_ack`, if that is made already. Returns the indexes of spans that differ from
        their checksums.
        """
        bad = self._ledger.verify(self._writers[claim.id], checksums)
        del self._writers[claim.id]
        if claim.note is not None and not bad:
            self._receiver.notify(Notification(OperationId(claim.operation), WorkerId(self.sender), claim.note))
        if bad:
            self._connection.send(frames.Ack(claim.id, bad=bad))
        else:
            self._connection.send_whole(good or frames.good_ack(claim.id))
        return bad

    def _begin_copy(self, claim: frames.Copy) -> Writer | None:
        """Admits a copy, unless its sender has hung up: it may have sent these bytes by another way already."""
        if self._connection.hung_up():
            raise Closed
        return self._begin(claim)

    def _commit_copy(self, claim: frames.Copy) -> None:
        """Ends a copy well if the sender's bytes cannot have changed by now.

        They stay as they are until the deadline, or until the sender gives up the connection.
        """
        if not host_clock_s() <= claim.deadline_s:  # nor is not-a-number a deadline that is kept
            self._refuse(claim, "copied after the sender's deadline")
        elif self._connection.hung_up():
            raise Closed
        else:
            self._commit(claim, claim.checksums)

    def _refuse(self, claim: frames.Claim, why: str) -> None:
        """Ends a claim badly; nothing writes for it any more."""
        self._ledger.fail(self._writers.pop(claim.id))
        self._connection.send(frames.Ack(claim.id, refused=why))


OpenSession = Callable[["Receiver", socket.socket, str], Session]
"""Receiver, accepted socket, thread name → a session that is not started yet; owns the socket."""


class Receiver:
    """Listeners and sessions of one engine.

    ``notify`` passes a notification on, from any thread; ``can_notify``: is there room for one?
    """

    def __init__(self, ledger: Ledger, *, host: HostId, checksums: str, clock: Clock, max_connections: int,
                 native: Native | None, name: str, notify: Callable[[Notification], None],
                 can_notify: Callable[[], bool]) -> None:
        self.ledger, self.host, self.checksums, self.clock = ledger, host, checksums, clock
        self.native = native
        self.notify, self.can_notify = notify, can_notify
        self._max_connections = max_connections
        self._name = name
        self._lock = threading.Lock()
        self._listeners: list[tuple[socket.socket, threading.Thread]] = []
        self._sessions: list[Session] = []
        self._stopping = threading.Event()
        self.dropped: dict[str, int] = {}
        """{reason: connections we ended or refused}; protocol, deadline, full, accept, internal."""

    def listen(self, sock: socket.socket, open_session: OpenSession) -> None:
        """Accepts on ``sock`` (ours from now on) until :meth:`close`."""
        sock.listen(128)
        thread = threading.Thread(target=self._accept, args=(sock, open_session),
                                  name=f"{self._name}-accept", daemon=True)
        self._listeners.append((sock, thread))
        thread.start()

    def watch(self) -> None:
        """Condemns what is overdue; to be called a few times a second."""
        now = self.clock.monotonic()
        for writer in self.ledger.overdue(now):
            writer.condemn(f"writer of operation {writer.operation} passed its deadline")
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            if session.deadline_s is not None and session.deadline_s <= now:
                session.condemn("an incomplete frame passed its deadline")

    def count_dropped(self, reason: str, why: str) -> None:
        """Notes that a connection was ended or refused by us."""
        _log.info("action=connection_dropped reason=%s why=%r", reason, why)
        with self._lock:
            self.dropped[reason] = self.dropped.get(reason, 0) + 1

    @property
    def connections(self) -> int:
        """Sessions open now."""
        with self._lock:
            self._prune()
            return len(self._sessions)

    def close(self) -> None:
        """Stops accepting, ends every session, waits for their threads."""
        self._stopping.set()
        for sock, thread in self._listeners:
            sock.shutdown(socket.SHUT_RDWR)
            thread.join()
            sock.close()
        for session in self._sessions:
            session.end()
        for session in self._sessions:
            session.thread.join()

    def _accept(self, listener: socket.socket, open_session: OpenSession) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                # Out of descriptors, or a peer that left while queued: serve those we have.
                self.count_dropped("accept", str(error))
                self._stopping.wait(0.05)
                continue
            with self._lock:
                self._prune()
                full = len(self._sessions) >= self._max_connections
                mute = next((session for session in self._sessions if not session.is_greeted), None) if full else None
            if mute is not None:  # whoever says nothing keeps nobody out who would
                mute.condemn("its place went to a newer connection before it said anything")
            elif full:
                # Counted first: whoever sees the connection end may look.
                self.count_dropped("full", f"{self._max_connections} connections are open")
                sock.close()
                continue
            try:
                session = open_session(self, sock, f"{self._name}-session")
                session.thread.start()
            except (OSError, RuntimeError) as error:  # reset while queued; no thread to be had
                sock.close()
                self.count_dropped("accept", str(error))
                continue
            with self._lock:
                self._sessions.append(session)

    def _prune(self) -> None:
        self._sessions = [session for session in self._sessions if session.thread.is_alive()]
