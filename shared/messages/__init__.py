"""The wire, all of it. A union of tagged structs is the protocol; ``match`` dispatches it.

``codec`` turns messages into MessagePack and back; which message travels where is said by ``shared.bus.subjects``.
"""

from shared.messages.base import Message, Part
from shared.messages.blocks import Evicted, KvEvent, Since, SnapshotPage, Stored, StoredBlock, SyncEvents, SyncReply
from shared.messages.door import DoorOpened, DoorRefused, OpenDoor
from shared.messages.pool import (
    Protect,
    Protected,
    Quotas,
    Replicate,
    Replicated,
    Retire,
    Retired,
    TenantQuota,
    Trim,
    Trimmed,
)
from shared.messages.requests import (
    Accepted,
    Cancel,
    Candidate,
    DecodeJob,
    Finish,
    Handover,
    Inquiry,
    JobFailed,
    JobState,
    Landing,
    Placed,
    Placement,
    PlaceRequest,
    PrefillJob,
    Progress,
    PushBlocks,
    Pushed,
    Refused,
    Rejection,
    RejectionCode,
    RequestDone,
    Reserved,
    Sampling,
    Source,
    Stages,
    TokenBatch,
    TokenChunk,
)
from shared.messages.store import (
    BlockRow,
    BlocksQuery,
    BlocksReply,
    Failure,
    LineageQuery,
    LineageReply,
    ReplicaRow,
    StatsQuery,
    StatsReply,
    WorkerStats,
)
from shared.messages.transfers import Endpoint, Grant, Range
from shared.messages.workers import (
    Bye,
    Hello,
    Load,
    Profile,
    Refuse,
    Role,
    Rollcall,
    WorkersQuery,
    WorkersReply,
    WorkerState,
)

__all__ = [
    "Accepted", "BlockRow", "BlocksQuery", "BlocksReply", "Bye", "Cancel", "Candidate", "DecodeJob", "DoorOpened",
    "DoorRefused", "Endpoint", "Evicted", "Failure", "Finish", "Grant", "Handover", "Hello", "Inquiry", "JobFailed",
    "JobState", "KvEvent", "Landing", "LineageQuery", "LineageReply", "Load", "Message", "OpenDoor", "Part",
    "PlaceRequest", "Placed", "Placement", "PrefillJob", "Profile", "Progress", "Protect", "Protected",
    "PushBlocks", "Pushed", "Quotas", "Range", "Refuse", "Refused", "Rejection", "RejectionCode", "ReplicaRow",
    "Replicate", "Replicated", "RequestDone", "Reserved", "Retire", "Retired", "Role", "Rollcall", "Sampling",
    "Since", "SnapshotPage", "Source", "Stages", "StatsQuery", "StatsReply", "Stored", "StoredBlock", "SyncEvents",
    "SyncReply", "TenantQuota", "TokenBatch", "TokenChunk", "Trim", "Trimmed", "WorkerState", "WorkerStats",
    "WorkersQuery", "WorkersReply",
]
