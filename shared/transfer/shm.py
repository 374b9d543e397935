"""Shared memory: the sender maps the receiver's segment and copies into it.

A unix socket carries the claims. The first claim that names a segment brings its descriptor back (SCM_RIGHTS),
so only the holder of a valid grant can map it. From then on that peer *could* write anywhere in the segment:
peers on one host trust each other that far; what they write by claim is checked and verified all the same.

A sender that stalls in the middle of a copy keeps its mapping, whatever the receiver does. So a claim past its
deadline ends only when the sender's side of the connection is closed: by the sender, which closes it after its
last write, or by the kernel, when the sender is dead.
"""

from __future__ import annotations

import os
import socket
import threading

from shared.messages import Endpoint
from shared.transfer import frames
from shared.transfer.lane import Sender, StreamLane, Transfer, Trouble, connected
from shared.transfer.plan import Run, plan_runs
from shared.transfer.receiver import Receiver, Session
from shared.transfer.segment import MappedSegment
from shared.transfer.tcp import timeout_ms
from shared.transfer.types import PeerGone
from shared.transfer.wire import Connection, close_all

PATH = "shm"
MAX_SOCKET_PATH_BYTES = 107
"""The kernel's limit for a unix socket's path."""


class ShmLane(StreamLane):
    """Claims, then copies when told to go; the hearing thread does the copying."""

    def __init__(self, sender: Sender, peer: Endpoint, address: str) -> None:
        super().__init__(sender, peer, address)
        self._mapped: dict[str, MappedSegment] = {}
        self._writing = threading.Lock()
        """Held while bytes are copied: the stream must not end before the copy does."""

    def connect(self, address: str, timeout_s: float) -> Connection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return Connection(connected(sock, address, timeout_s), takes_descriptors=True)

    def send(self, connection: Connection, transfer: Transfer) -> None:
        grant, spans = transfer.grant, [piece.remote for piece in transfer.batch.pieces]
        unmapped = sorted(name for name in {span.segment for span in spans} if name not in self._mapped)
        connection.send(frames.Begin(transfer.id, grant.operation, grant.incarnation, grant.token,
                                     timeout_ms(transfer.timeout_s), spans, unmapped))

    def hear(self, connection: Connection, body: frames.Body, descriptors: list[int]) -> None:
        match body:
            case frames.Go():
                self._map(body.segments, descriptors)
                self._write(connection, self._pending.get(body.id))
            case frames.Ack():
                close_all(descriptors)
                self.acknowledge(body)
            case _:
                close_all(descriptors)
                raise frames.FrameError(f"a receiver does not say {type(body).__name__} over shm")

    def stop_writing(self, connection: Connection) -> None:
        with self._writing:
            connection.shutdown()

    def release(self) -> None:
        for mapped in self._mapped.values():
            mapped.close()

    def _map(self, names: list[str], descriptors: list[int]) -> None:
        if len(names) != len(descriptors):
            close_all(descriptors)
            raise frames.FrameError(f"{len(descriptors)} descriptors came for segments {names}")
        while descriptors:
            name, descriptor = names[-len(descriptors)], descriptors.pop(0)
            if name in self._mapped:  # two claims asked for it before the first answer came
                os.close(descriptor)
                continue
            try:
                self._mapped[name] = MappedSegment(descriptor)
            except BaseException:
                close_all(descriptors)
                raise

    def _write(self, connection: Connection, transfer: Transfer) -> None:
        pieces = transfer.batch.pieces
        for run in plan_runs(pieces):
            with self._writing:
                if self._pending.trouble is not None:
                    return
                if not transfer.abandoned:
                    self._copy(run)
        if transfer.abandoned:
            if self._pending.pop(transfer):
                transfer.finish_all(Trouble(PeerGone, "given up while it was written"))
            connection.send(frames.Abort(transfer.id))
            return
        for i in transfer.corrupt:
            remote = pieces[i].remote
            self._mapped[remote.segment].array[remote.offset] ^= 0xFF
        checksums = [value for piece in pieces for value in self._sender.checksum(piece)]
        connection.send(frames.Done(transfer.id, checksums))

    def _copy(self, run: Run) -> None:
        target = self._mapped.get(run.remote_segment)
        if target is None or run.remote_offset + run.length > len(target.array):
            raise frames.FrameError(f"GO for bytes of segment {run.remote_segment} that were not handed out")
        source = self._sender.segments[run.segment].array
        target.array[run.remote_offset:run.remote_offset + run.length] = source[run.offset:run.offset + run.length]


class ShmSession(Session):
    """Admits claims, hands out descriptors, verifies what was written."""

    path = PATH

    def handle(self, body: frames.Body) -> None:
        match body:
            case frames.Begin():
                self._admit(body)
            case frames.Done():
                self._finish(body)
            case frames.Abort():
                writer = self._writers.pop(body.id, None)
                if writer is None:
                    raise frames.FrameError(f"ABORT of {body.id}, which is not in progress")
                self._ledger.fail(writer)
            case _:
                raise frames.FrameError(f"a sender does not say {type(body).__name__} over shm")

    def cut(self) -> None:
        # Our half only: the sender sees the end of the stream, finishes its copy and closes; then so do we.
        self._connection.shutdown(socket.SHUT_WR)

    def _admit(self, body: frames.Begin) -> None:
        if self._begin(body) is None:
            return
        # Only segments that the admitted spans name: a grant for one segment opens no other.
        names = sorted({span.segment for span in body.spans} & set(body.unmapped))
        self._connection.send(frames.Go(body.id, names), descriptors=[self._ledger.descriptor(name) for name in names])

    def _finish(self, body: frames.Done) -> None:
        writer = self._writers.get(body.id)
        if writer is None:
            raise frames.FrameError(f"DONE of {body.id}, which is not in progress")
        if body.checksums and len(body.checksums) != len(writer.spans):
            raise frames.FrameError(f"{len(body.checksums)} checksums for {len(writer.spans)} spans")
        self._verify(body.id, body.checksums)


def listen_shm(path: str) -> socket.socket:
    """A bound unix socket that only this user can connect to."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
    except BaseException:
        sock.close()
        raise
    return sock


def open_session(receiver: Receiver, sock: socket.socket, name: str) -> Session:
    """For :meth:`Receiver.listen`."""
    return ShmSession(receiver, Connection(sock), name)
