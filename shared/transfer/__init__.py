"""The data plane: a sender pushes bytes into a receiver's memory, with one copy, under the receiver's grant.

:class:`TransferEngine` registers memory as segments, grants ranges of it to operations, and pushes slices into a
peer's segments by the best path there is. ``plan`` decides how, ``tally`` and ``ledger`` keep the sender's and the
receiver's books, ``frames`` is the wire, ``router``, ``link`` and ``lane`` send, ``receiver`` receives, ``copy nvlink
shm rdma tcp`` are the paths; ``sync`` and ``direct`` are for programs without an event loop.
Needs Linux. See ``docs/transfer.md``.
"""

from shared.transfer.addresses import host_id
from shared.transfer.engine import TransferEngine
from shared.transfer.push import Push, PushStream
from shared.transfer.segment import Segment
from shared.transfer.settings import TransferSettings
from shared.transfer.statistics import Statistics
from shared.transfer.sync import SyncTransferEngine
from shared.transfer.types import (
    ChecksumMismatch,
    GrantRefused,
    Notification,
    PathFailed,
    PeerGone,
    PushResult,
    Slice,
    SliceStatus,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)

__all__ = [
    "ChecksumMismatch", "GrantRefused", "Notification", "PathFailed", "PeerGone", "Push", "PushResult", "PushStream",
    "Segment", "Slice", "SliceStatus", "Statistics", "SyncTransferEngine", "TransferCancelled", "TransferEngine",
    "TransferError", "TransferSettings", "TransferTimeout", "host_id",
]
