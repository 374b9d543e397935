"""NVLink: both ends in CUDA memory of one host, copied from device to device. Untested on hardware.

As in shared memory the receiver does the copying, under its own grant, out of the sender's memory: a unix socket
carries the claims, and before the first claim that needs it, a handle that opens the sender's memory (CUDA IPC).
One round trip, nothing passes through the host. The copy runs on a side stream and is waited for before
it is committed and acknowledged; the sender sends a claim only when what its default stream was given is done.

A handle opens the whole of a registered tensor for reading. It can be opened where the two GPUs have direct
access to each other, which the rule of this path looks at, and not in the process that made it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec

from shared.messages import Endpoint
from shared.transfer import cuda, frames
from shared.transfer.lane import Sender, StreamLane, Transfer
from shared.transfer.receiver import Receiver, Session
from shared.transfer.shm import MAX_SOURCES, check_clock, connect_unix
from shared.transfer.wire import Connection

PATH = "nvlink"

_handles = msgspec.msgpack.Decoder(cuda.DeviceHandle)


class NvlinkLane(StreamLane):
    """Shares the memory once, then says where the bytes lie in it."""

    path = PATH

    def __init__(self, sender: Sender, peer: Endpoint, address: str) -> None:
        super().__init__(sender, peer, address)
        self._shared: set[int] = set()
        """Serials of the segments whose handles the receiver has."""

    def connect(self, address: str, timeout_s: float) -> Connection:
        return Connection(connect_unix(address, timeout_s))

    def send_now(self, connection: Connection, transfer: Transfer) -> bool | None:
        return False  # the thread waits for the device, the event loop must not

    def send(self, connection: Connection, transfer: Transfer) -> None:
        pieces, segments = transfer.batch.pieces, self._sender.segments
        for segment in {piece.segment: segments[piece.segment] for piece in pieces}.values():
            assert segment.gpu is not None, "the rule of this path lets no other pass"
            if segment.serial not in self._shared:
                connection.send(frames.Share(segment.serial, msgspec.msgpack.encode(segment.gpu.handle())))
                self._shared.add(segment.serial)
            segment.settle()
        grant, proofs = transfer.grant, self.proofs(transfer)
        for i in transfer.corrupt:  # other bytes than were meant, seen from the receiver
            proofs[i] ^= 1
        connection.send(frames.Copy(
            transfer.id, grant.operation, grant.incarnation, grant.token, self._sender.timeout_ms(transfer),
            [piece.remote for piece in pieces], transfer.note, proofs,
            [frames.Source(segments[piece.segment].serial, piece.offset) for piece in pieces], [], transfer.deadline_s))

    def forget(self, serial: int) -> None:
        if serial in self._shared:
            self._shared.discard(serial)
            self._jobs.put(lambda connection: connection.send(frames.Detach(serial)))


class NvlinkSession(Session):
    """Opens the sender's memory and copies out of it after the claim was admitted."""

    path = PATH

    def __init__(self, receiver: Receiver, connection: Connection, name: str) -> None:
        super().__init__(receiver, connection, name)
        self._sources: dict[int, cuda.Tensor] = {}
        """{serial: memory of the sender, uint8}"""

    def greeted(self) -> None:
        check_clock(self.sender_clock_s)

    def handle(self, body: frames.Body) -> None:
        match body:
            case frames.Share():
                self._open(body)
            case frames.Copy():
                self._copy(body)
            case frames.Detach():
                self._sources.pop(body.serial, None)
            case _:
                raise frames.FrameError(f"a sender does not say {type(body).__name__} over nvlink")

    def ended(self) -> None:
        self._sources.clear()

    def _open(self, body: frames.Share) -> None:
        if len(self._sources) >= MAX_SOURCES:
            raise frames.FrameError(f"memory {body.serial} is one of too many")
        try:
            self._sources[body.serial] = cuda.open_handle(_handles.decode(body.handle))
        except (msgspec.DecodeError, ValueError, RuntimeError) as error:  # none, or not for this process
            raise frames.FrameError(f"memory {body.serial} cannot be opened: {error}") from error

    def _copy(self, body: frames.Copy) -> None:
        if self._begin_copy(body) is None:
            return
        waits: list[Callable[[], None]] = []
        try:
            for span, source in zip(body.spans, body.sources, strict=True):
                waits.append(self._ledger.segment_of(span).fetch(span.offset, self._source(source, span.length)))
        finally:  # whatever happens, nothing may write once the claim has ended
            for wait in waits:
                wait()
        self._commit_copy(body)

    def _source(self, source: frames.Source, length: int) -> cuda.Tensor:
        memory = self._sources.get(source.serial)
        if memory is None or source.offset + length > len(memory):
            raise frames.FrameError(f"{length} bytes at {source.offset} of memory {source.serial} were not shared")
        return memory[source.offset:source.offset + length]


def open_session(receiver: Receiver, sock: socket.socket, name: str) -> Session:
    """For :meth:`Receiver.listen`."""
    return NvlinkSession(receiver, Connection(sock), name)
