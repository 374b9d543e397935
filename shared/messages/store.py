"""Questions to the store-manager. It is off the request path: these are for people and tools."""

from __future__ import annotations

from typing import Literal

from shared.ids import BlockKey
from shared.messages.base import Message, Part


class Failure(Message, frozen=True):
    """The question could not be answered; ``message`` is one line for a person."""

    message: str


class ReplicaRow(Part, frozen=True):
    """One copy of a block, now or once."""

    worker: str
    incarnation: str
    tier: str
    stored_at_s: float
    origin: str
    source: str
    evicted_at_s: float | None = None
    why: str = ""
    """Why it left."""


class BlockRow(Part, frozen=True):
    """One block of the catalog."""

    key: BlockKey
    parent: BlockKey
    depth: int
    model: str
    tenant: str
    tokens: int
    nbytes: int
    created_by: str
    created_at_s: float
    request: str
    hits: int
    last_used_at_s: float | None
    replicas: list[ReplicaRow]


class LineageQuery(Message, frozen=True):
    """The chain from root to ``key``; a unique prefix of the key (hex) is enough."""

    key_hex: str


class LineageReply(Message, frozen=True):
    """Root first."""

    blocks: list[BlockRow]
    descendants: int
    """Blocks that continue the asked one."""


class BlocksQuery(Message, frozen=True):
    """Blocks, most recently stored first; only those with a live copy unless ``all``."""

    limit: int = 50
    worker: str = ""
    tenant: str = ""
    all: bool = False
    order: Literal["recent", "hot", "deep"] = "recent"


class BlocksReply(Message, frozen=True):
    """Answer to :class:`BlocksQuery`."""

    blocks: list[BlockRow]
    total: int


class StatsQuery(Message, frozen=True):
    """Totals of the catalog."""


class WorkerStats(Part, frozen=True):
    """What one worker holds."""

    worker: str
    role: str
    state: str
    blocks: int
    nbytes: int


class StatsReply(Message, frozen=True):
    """Answer to :class:`StatsQuery`."""

    blocks: int
    live_blocks: int
    live_replicas: int
    live_bytes: int
    requests: int
    prompt_tokens: int
    hit_tokens: int
    feed_pending: int
    """Messages of the durable feed not yet written."""
    workers: list[WorkerStats]
