"""Values and errors of the transfer engine.

::

    MoonbusError
    └── TransferError              names peer, segment and bytes
        ├── PeerGone               the connection broke or could not be made
        ├── GrantRefused           the receiver did not accept the grant (forged, expired, revoked, out of range)
        ├── TransferTimeout        not acknowledged before the deadline
        ├── ChecksumMismatch       the receiver read other bytes than were sent
        ├── PathFailed             no transport connects the two ends
        └── TransferCancelled      the pusher changed its mind
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared.errors import MoonbusError
from shared.ids import OperationId, WorkerId
from shared.messages import Range


class TransferError(MoonbusError):
    """A push did not arrive; nothing of it may be read."""

    code = "transfer"

    def __init__(self, peer: str, why: str, *, nbytes: int = 0, segment: str = "") -> None:
        self.peer, self.why, self.nbytes, self.segment = peer, why, nbytes, segment
        where = f" segment {segment}" if segment else ""
        super().__init__(f"push of {nbytes} bytes to {peer}{where}: {why}")


class PeerGone(TransferError):
    """The connection broke or could not be made."""

    code = "peer"


class GrantRefused(TransferError):
    """The receiver did not accept the grant."""

    code = "grant"


class TransferTimeout(TransferError):
    """Not acknowledged before the deadline."""

    code = "deadline"


class ChecksumMismatch(TransferError):
    """The receiver read other bytes than were sent."""

    code = "checksum"


class PathFailed(TransferError):
    """No transport connects the two ends."""

    code = "path"


class TransferCancelled(TransferError):
    """The pusher changed its mind."""

    code = "cancelled"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why bytes did not arrive, before it is known which slice they were of."""

    kind: type[TransferError]
    why: str


Outcome = Sequence[Trouble | None]
"""What became of a batch: one a piece; a batch without pieces, which only brings a note, has one all the same."""


class Slice(msgspec.Struct, frozen=True):
    """``remote.length`` bytes from ``[offset, ...)`` of the local segment ``segment`` into ``remote``.

    With a ``count``, that many parts of this length, the next one ``stride`` bytes further on both sides: one layer of
    blocks whose slots follow each other is one slice.
    """

    segment: str
    offset: int
    remote: Range
    count: int = 1
    stride: int = 0

    @property
    def nbytes(self) -> int:
        """Of all parts together."""
        return self.remote.length * self.count

    @property
    def extent(self) -> int:
        """From the first byte of the first part to the last one of the last."""
        return self.remote.length + (self.count - 1) * self.stride


class SliceStatus(msgspec.Struct, frozen=True):
    """What became of one slice: ``error`` is ``None`` when the receiver has verified and acknowledged it."""

    slice: Slice
    error: TransferError | None = None
    path: str = ""
    """What carried it, or was tried last."""
    seconds: float = 0.0
    """From the push's start to this outcome."""

    @property
    def nbytes(self) -> int:
        """Bytes acknowledged: all of the slice's, or none."""
        return 0 if self.error is not None else self.slice.nbytes


class Notification(msgspec.Struct, frozen=True):
    """``data`` that ``sender`` wanted known once everything it pushed under ``operation`` by then was committed."""

    operation: OperationId
    sender: WorkerId
    data: bytes


class PushResult(msgspec.Struct, frozen=True):
    """What became of one push; every push ends with one of these, whatever happens to the peer."""

    slices: list[SliceStatus] = []
    note_error: TransferError | None = None
    """Why the receiver was not notified, although every slice arrived."""
    nbytes: int = 0
    """Bytes acknowledged."""
    seconds: float = 0.0
    path: str = ""
    """Transports that carried it, joined by ``+``; see :data:`shared.transfer.plan.RULES`."""

    @property
    def error(self) -> TransferError | None:
        """The first slice's error, if any, or the notification's."""
        return next((status.error for status in self.slices if status.error is not None), self.note_error)

    @property
    def ok(self) -> bool:
        """Every slice arrived and was verified, and the notification, if there was one, was taken."""
        return self.error is None

    @property
    def arrived(self) -> int:
        """How many leading slices arrived, in the order they were given."""
        for i, status in enumerate(self.slices):
            if status.error is not None:
                return i
        return len(self.slices)
