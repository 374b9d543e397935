"""Values and errors of the transfer engine.

::

    MoonbusError
    └── TransferError              names peer, segment and bytes
        ├── PeerGone               the connection broke or could not be made
        ├── GrantRefused           the receiver did not accept the grant (forged, expired, revoked, out of range)
        ├── TransferTimeout        not acknowledged before the deadline
        ├── ChecksumMismatch       the receiver read other bytes than were sent
        └── PathFailed             no transport connects the two ends
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import MoonbusError
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


@dataclass(frozen=True, slots=True)
class Slice:
    """``remote.length`` bytes from ``[offset, ...)`` of the local segment ``segment`` into ``remote``."""

    segment: str
    offset: int
    remote: Range


@dataclass(frozen=True, slots=True)
class SliceStatus:
    """What became of one slice: ``error`` is ``None`` when the receiver has verified and acknowledged it."""

    slice: Slice
    error: TransferError | None = None


@dataclass(frozen=True, slots=True)
class PushResult:
    """What became of one push; every push ends with one of these, whatever happens to the peer."""

    slices: list[SliceStatus] = field(default_factory=list)
    nbytes: int = 0
    """Bytes acknowledged."""
    seconds: float = 0.0
    path: str = ""
    """Transport that carried it: ``copy``, ``shm``, ``tcp``."""

    @property
    def error(self) -> TransferError | None:
        """The first slice's error, if any."""
        return next((status.error for status in self.slices if status.error is not None), None)

    @property
    def ok(self) -> bool:
        """Every slice arrived and was verified."""
        return self.error is None

    @property
    def arrived(self) -> int:
        """How many leading slices arrived, in the order they were given."""
        for i, status in enumerate(self.slices):
            if status.error is not None:
                return i
        return len(self.slices)
