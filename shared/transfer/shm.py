"""Shared memory: the receiver is told where the bytes lie in the sender's memory, and copies them into its own.

A unix socket carries the claims; the descriptor of the sender's memory rides along (SCM_RIGHTS) with the first
claim that needs it. One round trip, one copy, and nobody can write into the receiver's memory but the receiver:
a sender that stalls, dies or goes mad in the middle of a transfer can hurt nothing, and ``release`` waits for nobody.

The sender may change its bytes once a push has ended. It ends with the acknowledgement or at its deadline, so the
receiver looks at the clock, which both ends share, after the copy: what was copied by the deadline is what was meant.

Memory that no other process can map (a caller's own array) goes through a small ring of memory that can.
"""

from __future__ import annotations

import os
import socket
from functools import partial

import numpy as np
import numpy.typing as npt

from shared.messages import Endpoint, Grant
from shared.transfer import frames
from shared.transfer.addresses import host_clock_s
from shared.transfer.lane import Sender, StreamLane, Transfer, connected
from shared.transfer.receiver import Receiver, Session
from shared.transfer.segment import MappedSegment, Segment
from shared.transfer.stage import Stage
from shared.transfer.types import Trouble
from shared.transfer.wire import Connection

PATH = "shm"
MAX_SOCKET_PATH_BYTES = 107
"""The kernel's limit for a unix socket's path."""
MAX_SOURCES = 256
"""Segments of one sender mapped at the same time."""
MAX_BEHIND_S = 60.0
"""A greeting may have waited that long for us to read it. A clock that is behind makes deadlines come too early, which
hurts nobody but its owner; one that is ahead, in a time namespace of its own, would make them come too late."""


class ShmLane(StreamLane):
    """Says where the bytes lie; the thread stages those that lie where nobody else can see them."""

    path = PATH

    def __init__(self, sender: Sender, peer: Endpoint, address: str) -> None:
        super().__init__(sender, peer, address)
        self._attached: set[int] = set()
        """Serials of the segments whose descriptors the receiver has."""
        self._stage = Stage(partial(Segment.allocate, "stage"))
        self._slots: dict[int, int] = {}
        """{id of a staged transfer: its slot}"""

    def connect(self, address: str, timeout_s: float) -> Connection:
        return Connection(connect_unix(address, timeout_s))

    def send_now(self, connection: Connection, transfer: Transfer) -> bool | None:
        if not self._is_mappable(transfer):
            return False
        body, fresh = self._describe(transfer)
        taken = connection.send_now(body, descriptors=[segment.fd for segment in fresh])
        if taken is not False:
            self._attached.update(body.attached)
        return taken

    def send(self, connection: Connection, transfer: Transfer) -> None:
        if self._is_mappable(transfer):
            body, fresh = self._describe(transfer)
        elif (staged := self._staged(transfer)) is not None:
            body, fresh = staged
        else:
            return
        connection.send(body, descriptors=[segment.fd for segment in fresh])
        self._attached.update(body.attached)

    def form(self, grant: Grant, remote: str, segment: Segment) -> frames.Form | None:
        if self.checksums or not segment.mappable or segment.serial not in self._attached:
            return None
        return frames.Form(grant.operation, grant.incarnation, grant.token, remote, segment.serial)

    def ended(self, transfer: Transfer) -> None:
        slot = self._slots.pop(transfer.id, None)
        if slot is not None:
            self._stage.give_back(slot)

    def fail(self, trouble: Trouble) -> None:
        super().fail(trouble)
        self._stage.end()

    def forget(self, serial: int) -> None:
        if serial in self._attached:
            self._attached.discard(serial)
            self._jobs.put(lambda connection: connection.send(frames.Detach(serial)))

    def release(self) -> None:
        if self._stage.memory is not None:
            self._stage.memory.close()

    def _is_mappable(self, transfer: Transfer) -> bool:
        segments = self._sender.segments
        return not transfer.corrupt and all(segments[piece.segment].mappable for piece in transfer.batch.pieces)

    def _describe(self, transfer: Transfer) -> tuple[frames.Copy, list[Segment]]:
        """The claim, and the segments whose descriptors go with it."""
        segments = self._sender.segments
        sources, fresh = [], {}
        for piece in transfer.batch.pieces:
            segment = segments[piece.segment]
            sources.append(frames.Source(segment.serial, piece.offset))
            if segment.serial not in self._attached:
                fresh[segment.serial] = segment
        return self._claim(transfer, sources, list(fresh), self.proofs(transfer)), list(fresh.values())

    def _staged(self, transfer: Transfer) -> tuple[frames.Copy, list[Segment]] | None:
        """The claim for a copy of the bytes, once there is a slot for it; ``None`` when the lane failed meanwhile."""
        slot = self._stage.take()
        if slot is None:
            return None
        self._slots[transfer.id] = slot
        if transfer.ended:
            self.ended(transfer)
            return None
        memory, offsets, proofs = self._stage.fill(slot, transfer, self._sender.segments, proven=self.checksums)
        sources = [frames.Source(memory.serial, offset) for offset in offsets]
        attached = [] if memory.serial in self._attached else [memory]
        return self._claim(transfer, sources, [segment.serial for segment in attached], proofs), attached

    def _claim(self, transfer: Transfer, sources: list[frames.Source], attached: list[int],
               proofs: list[int]) -> frames.Copy:
        grant = transfer.grant
        return frames.Copy(
            transfer.id, grant.operation, grant.incarnation, grant.token, self._sender.timeout_ms(transfer),
            [piece.remote for piece in transfer.batch.pieces], transfer.note, proofs, sources, attached,
            transfer.deadline_s)


class ShmSession(Session):
    """Copies out of the sender's memory after the claim was admitted."""

    path = PATH

    def __init__(self, receiver: Receiver, connection: Connection, name: str) -> None:
        super().__init__(receiver, connection, name)
        self._sources: dict[int, MappedSegment] = {}
        """{serial: memory of the sender}"""

    def greeted(self) -> None:
        check_clock(self.sender_clock_s)

    def handle(self, body: frames.Body) -> None:
        match body:
            case frames.Copy():
                self._copy(body)
            case frames.Detach():
                source = self._sources.pop(body.serial, None)
                if source is not None:
                    source.close()
            case _:
                raise frames.FrameError(f"a sender does not say {type(body).__name__} over shm")

    def ended(self) -> None:
        for source in self._sources.values():
            source.close()

    def _copy(self, body: frames.Copy) -> None:
        self._attach(body.attached)
        writer = self._begin_copy(body)
        if writer is None:
            return
        while True:
            for span, source in zip(body.spans, body.sources, strict=True):
                self._ledger.segment_of(span).write_parts(span, self._source(source, span))
            if not writer.disturbed:
                break
            writer.disturbed = False  # as by a former attempt at the same bytes, whose connection broke
        self._commit_copy(body)

    def _attach(self, serials: list[int]) -> None:
        for serial in serials:
            if not self._connection.descriptors or len(self._sources) >= MAX_SOURCES:
                raise frames.FrameError(f"memory {serial} came without a descriptor, or is one of too many")
            try:
                self._sources[serial] = MappedSegment(self._connection.descriptors.pop(0))
            except (OSError, ValueError, OverflowError) as error:  # no memfd, an empty one, one of absurd size
                raise frames.FrameError(f"memory {serial} cannot be mapped: {error}") from error

    def _source(self, source: frames.Source, span: frames.Span) -> npt.NDArray[np.uint8]:
        mapped, length = self._sources.get(source.serial), span.stop - span.offset
        if mapped is None or source.offset + length > len(mapped.array):
            raise frames.FrameError(f"{length} bytes at {source.offset} of memory {source.serial} were not handed over")
        return mapped.array[source.offset:source.offset + length]


def check_clock(sender_clock_s: float) -> None:
    """Raises :class:`frames.FrameError` unless the sender's clock is ours: its deadlines would mean nothing."""
    behind_s = host_clock_s() - sender_clock_s
    if not 0 <= behind_s <= MAX_BEHIND_S:
        raise frames.FrameError(f"the sender's monotonic clock is {behind_s:.1f} s behind; it is none of this host")


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """A connected unix socket; raises ``OSError``."""
    return connected(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path, timeout_s)


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
    return ShmSession(receiver, Connection(sock, takes_descriptors=True), name)
