"""KV events: what a worker stores and evicts, numbered so that nothing is lost unseen.

One counter ``seq`` per (worker, incarnation) runs over both kinds of batches, from 1. The two kinds travel on two
subjects and may overtake each other; a receiver applies them in order of ``seq``, holds early ones for a moment,
and asks the owner (:class:`Since`) when a number stays missing.
"""

from __future__ import annotations

from typing import Literal

from shared.ids import BlockKey, Incarnation, RequestId, SpecDigest, WorkerId
from shared.kv import Tier
from shared.messages.base import Message, Part


class StoredBlock(Part, frozen=True):
    """One full block that can be reused from now on."""

    key: BlockKey
    parent: BlockKey
    """Key of the block before it; the root key for depth 0."""
    depth: int
    """Position in its chain, from 0."""
    nbytes: int
    tier: Tier = Tier.DRAM
    origin: Literal["computed", "received"] = "computed"
    source: WorkerId = WorkerId("")
    """Who sent it, when received."""
    request: RequestId = RequestId("")
    """The request it was computed or fetched for."""
    tenant: str = ""
    tokens: int = 0


class Stored(Message, frozen=True):
    """Blocks became reusable on a worker."""

    worker: WorkerId
    incarnation: Incarnation
    seq: int
    spec: SpecDigest
    at_s: float
    """Unix seconds."""
    blocks: list[StoredBlock]


class Evicted(Message, frozen=True):
    """Blocks are gone from a worker's tier."""

    worker: WorkerId
    incarnation: Incarnation
    seq: int
    at_s: float
    keys: bytes
    """Packed block keys."""
    tier: Tier = Tier.DRAM
    reason: str = "capacity"
    """``capacity``, ``corrupt``, ``quota``, ``trim``, ``drain`` or ``shutdown``."""


KvEvent = Stored | Evicted


class Since(Message, frozen=True):
    """Asks an owner for what happened after ``seq`` of ``incarnation``; ``snapshot`` continues a paged one.

    ``seq`` -1 asks for the whole state.
    """

    incarnation: Incarnation
    seq: int
    snapshot: str = ""
    page: int = 0


class SyncEvents(Message, frozen=True):
    """The owner still had the batches after the asked ``seq``: here they are, in order."""

    worker: WorkerId
    incarnation: Incarnation
    events: list[KvEvent]


class SnapshotPage(Message, frozen=True):
    """The owner's whole state as of ``seq``, a page at a time; all pages of one ``snapshot`` are of one moment."""

    worker: WorkerId
    incarnation: Incarnation
    seq: int
    spec: SpecDigest
    snapshot: str
    page: int
    pages: int
    blocks: list[StoredBlock]


SyncReply = SyncEvents | SnapshotPage


class DigestQuery(Message, frozen=True):
    """Asks an owner for the digest of what it holds (``shared.store.digest``), or for what some of its buckets hold.

    ``snapshot`` continues a paged answer.
    """

    incarnation: Incarnation
    buckets: list[int] = []
    snapshot: str = ""
    page: int = 0


class TierDigest(Part, frozen=True):
    """The digest of one tier."""

    tier: Tier
    count: int
    buckets: bytes
    """Packed buckets."""


class DigestReply(Message, frozen=True):
    """What the owner holds as of ``seq``, without saying which blocks; tiers with none are left out."""

    worker: WorkerId
    incarnation: Incarnation
    seq: int
    spec: SpecDigest
    tiers: list[TierDigest]
