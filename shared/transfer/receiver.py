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
from shared.transfer import frames
from shared.transfer.ledger import Ledger, Refused, Writer
from shared.transfer.wire import Closed, Connection, close_all

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
        self.deadline_s: float | None = receiver.clock.monotonic() + HANDSHAKE_S
        """Monotonic seconds by which what is being received must be complete; ``None`` while idle."""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def handle(self, body: frames.Body) -> None:
        """Does what ``body`` asks for; raises :class:`frames.FrameError` when it has no business here."""

    def condemn(self, why: str) -> None:
        """Ends the session, from any thread; its writers are failed by its own thread. Idempotent."""
        if not self._condemned:
            self._condemned = why
            self._receiver.count_dropped("deadline", why)
            self.cut()

    def cut(self) -> None:
        """Makes the thread end, but not before the sender has surely stopped writing."""
        self._connection.shutdown()

    def end(self) -> None:
        """Makes the thread end now: the memory is going away and will not be used again."""
        self._connection.shutdown()

    def _run(self) -> None:
        try:
            self._greet()
            while True:
                self.deadline_s = None
                body = self._next()
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
            if self._writers:
                self._outlast_sender()
            self._connection.close()
            for writer in self._writers.values():
                self._ledger.fail(writer)

    def _outlast_sender(self) -> None:
        """Reads on to the end of the stream: until then the sender may write."""
        self.cut()
        scratch = bytearray(4096)
        try:
            while True:
                self._connection.receive_into(memoryview(scratch))
        except (Closed, OSError):
            pass

    def _greet(self) -> None:
        kind, length, descriptors = self._connection.receive_header()
        close_all(descriptors)
        if kind is not frames.Kind.HELLO:
            raise frames.FrameError(f"first frame is {kind.name}, not HELLO")
        self._connection.receive_body(kind, length)
        self._connection.send(frames.Welcome(self._ledger.worker, self._ledger.incarnation))

    def _next(self) -> frames.Body:
        kind, length, descriptors = self._connection.receive_header()
        close_all(descriptors)
        self.deadline_s = self._receiver.clock.monotonic() + HANDSHAKE_S
        return self._connection.receive_body(kind, length)

    def _begin(self, claim: frames.Claim) -> Writer | None:
        """Admits a claim; refuses it to the sender's face otherwise."""
        if claim.id in self._writers:
            raise frames.FrameError(f"claim {claim.id} is in progress already")
        try:
            if len(self._writers) >= MAX_WRITERS:
                raise Refused(f"{MAX_WRITERS} claims of this connection are in progress")
            writer = self._ledger.begin(claim, path=self.path, condemn=self.condemn)
        except Refused as refused:
            self._connection.send(frames.Ack(claim.id, refused=str(refused)[:1024]))
            return None
        self._writers[claim.id] = writer
        return writer

    def _verify(self, claim_id: int, checksums: list[int]) -> None:
        """Ends a claim well and acknowledges it: booked before told."""
        bad = self._ledger.verify(self._writers[claim_id], checksums)
        del self._writers[claim_id]
        self._connection.send(frames.Ack(claim_id, bad=bad))


OpenSession = Callable[["Receiver", socket.socket, str], Session]
"""Receiver, accepted socket, thread name → a session that is not started yet; owns the socket."""


class Receiver:
    """Listeners and sessions of one engine."""

    def __init__(self, ledger: Ledger, *, clock: Clock, max_connections: int, name: str) -> None:
        self.ledger, self.clock = ledger, clock
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
            if full:
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
