"""TCP: the payload follows its claim at once and is received straight into the registered segment."""

from __future__ import annotations

import socket

import numpy as np

from shared.messages import Grant
from shared.transfer import frames
from shared.transfer.addresses import split_address
from shared.transfer.lane import INLINE_BYTES, StreamLane, Transfer
from shared.transfer.receiver import Receiver, Session
from shared.transfer.segment import Segment
from shared.transfer.wire import Bytes, Connection, keep_alive

PATH = "tcp"
LOCAL_QUEUE_BYTES = 256 << 10
"""What the kernel may hold of a connection within a host: four times as much fell out of the cache (measured)."""
_DRAIN_BYTES = 256 << 10


class TcpLane(StreamLane):
    """Sends claim and payload in one gathered write; nothing is copied in this process."""

    path = PATH

    def connect(self, address: str, timeout_s: float) -> Connection:
        sock = socket.create_connection(split_address(address), timeout=timeout_s)
        keep_alive(sock)
        connection = Connection(sock)
        if self._peer.host == self._sender.host:
            connection.shorten_queues(LOCAL_QUEUE_BYTES)
        return connection

    def send_now(self, connection: Connection, transfer: Transfer) -> bool | None:
        if self._sender.is_staged(transfer.batch) or (self.checksums and transfer.batch.nbytes > INLINE_BYTES):
            return False
        # The receiver has something to do with the first bytes while the thread wakes that sends the others.
        return connection.send_now(self._frame(transfer), self._payload(transfer), at_most=INLINE_BYTES)

    def send(self, connection: Connection, transfer: Transfer) -> None:
        connection.send(self._frame(transfer), self._payload(transfer))

    def form(self, grant: Grant, remote: str, segment: Segment) -> frames.Form | None:
        if self.checksums or segment.staged:
            return None
        return frames.Form(grant.operation, grant.incarnation, grant.token, remote, None)

    def _frame(self, transfer: Transfer) -> frames.Write:
        grant = transfer.grant
        return frames.Write(
            transfer.id, grant.operation, grant.incarnation, grant.token, self._sender.timeout_ms(transfer),
            [piece.remote for piece in transfer.batch.pieces], transfer.note, self.proofs(transfer))

    def _payload(self, transfer: Transfer) -> list[Bytes]:
        payload = [self._sender.source(piece) for piece in transfer.batch.pieces]
        for i in transfer.corrupt:
            payload[i] = payload[i].copy()
            payload[i][0] ^= 0xFF
        return payload


class TcpSession(Session):
    """Receives into the segment after the claim was admitted; drains the payload of a refused one."""

    path = PATH

    def greeted(self) -> None:
        if self.sender_host == self._receiver.host:
            self._connection.shorten_queues(LOCAL_QUEUE_BYTES)

    def handle(self, body: frames.Body) -> None:
        if not isinstance(body, frames.Write):
            raise frames.FrameError(f"a sender does not say {type(body).__name__} over TCP")
        self.deadline_s = self._receiver.clock.monotonic() + body.timeout_ms / 1e3
        if self._begin(body) is None:
            self._drain(sum(span.length for span in body.spans))
            return
        good = frames.good_ack(body.id)  # here, where the bytes are still on their way
        for span in body.spans:
            segment = self._ledger.segment_of(span)
            landing = segment.landing(span.offset, span.length)
            self._connection.receive_into(landing.data)
            segment.landed(span.offset, landing)
        self.deadline_s = None
        self._commit(body, body.checksums, good)

    def _drain(self, nbytes: int) -> None:
        scratch = np.empty(min(nbytes, _DRAIN_BYTES), dtype=np.uint8).data
        while nbytes:
            part = scratch[:min(nbytes, len(scratch))]
            self._connection.receive_into(part)
            nbytes -= len(part)


def listen_tcp(bind_host: str) -> tuple[socket.socket, int]:
    """A bound socket on a free port, and the port."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        bind_host or "0.0.0.0", 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock, int(sock.getsockname()[1])


def open_session(receiver: Receiver, sock: socket.socket, name: str) -> Session:
    """For :meth:`Receiver.listen`."""
    keep_alive(sock)
    return TcpSession(receiver, Connection(sock), name)
