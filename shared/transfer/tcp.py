"""TCP: the payload follows its claim at once and is received straight into the registered segment."""

from __future__ import annotations

import socket

import numpy as np

from shared.transfer import frames
from shared.transfer.addresses import split_address
from shared.transfer.lane import StreamLane, Transfer
from shared.transfer.plan import join_spans, plan_runs
from shared.transfer.receiver import Receiver, Session
from shared.transfer.wire import Bytes, Connection, keep_alive

PATH = "tcp"
_DRAIN_BYTES = 256 << 10


class TcpLane(StreamLane):
    """Sends claim and payload in one gathered write; nothing is copied in this process."""

    def connect(self, address: str, timeout_s: float) -> Connection:
        sock = socket.create_connection(split_address(address), timeout=timeout_s)
        keep_alive(sock)
        return Connection(sock)

    def send(self, connection: Connection, transfer: Transfer) -> None:
        sender, grant, pieces = self._sender, transfer.grant, transfer.batch.pieces
        checksums = [value for piece in pieces for value in sender.checksum(piece)]
        payload: list[Bytes]
        if transfer.corrupt:
            payload = []
            for i, piece in enumerate(pieces):
                part = sender.source(piece).copy()
                if i in transfer.corrupt:
                    part[0] ^= 0xFF
                payload.append(part)
        else:
            payload = [sender.segments[run.segment].array[run.offset:run.offset + run.length]
                       for run in plan_runs(pieces)]
        connection.send(frames.Write(transfer.id, grant.operation, grant.incarnation, grant.token,
                                     timeout_ms(transfer.timeout_s), [piece.remote for piece in pieces], checksums),
                        payload)

    def hear(self, connection: Connection, body: frames.Body, descriptors: list[int]) -> None:
        if not isinstance(body, frames.Ack):
            raise frames.FrameError(f"a receiver does not say {type(body).__name__} over TCP")
        self.acknowledge(body)


class TcpSession(Session):
    """Receives into the segment after the claim was admitted; drains the payload of a refused one."""

    path = PATH

    def handle(self, body: frames.Body) -> None:
        if not isinstance(body, frames.Write):
            raise frames.FrameError(f"a sender does not say {type(body).__name__} over TCP")
        self.deadline_s = self._receiver.clock.monotonic() + body.timeout_ms / 1e3
        writer = self._begin(body)
        if writer is None:
            self._drain(sum(span.length for span in body.spans))
            return
        for segment, offset, length in join_spans(body.spans):
            self._connection.receive_into(self._ledger.array(segment)[offset:offset + length].data)
        self.deadline_s = None
        self._verify(body.id, body.checksums)

    def _drain(self, nbytes: int) -> None:
        scratch = np.empty(min(nbytes, _DRAIN_BYTES), dtype=np.uint8).data
        while nbytes:
            part = scratch[:min(nbytes, len(scratch))]
            self._connection.receive_into(part)
            nbytes -= len(part)


def timeout_ms(timeout_s: float) -> int:
    """A deadline as it travels: at least 1 ms, at most what a receiver accepts."""
    return max(1, min(frames.MAX_TIMEOUT_MS, int(timeout_s * 1e3)))


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
