"""Questions to the store-manager. It is off the request path: these are for people and tools."""

from __future__ import annotations

from typing import Literal

from shared.ids import BlockKey
from shared.messages.base import Message, Part
from shared.messages.requests import Decision, Stages


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
    is_about: bool = False
    """The catalog is large: ``total`` is about how many blocks it has, whatever was asked for."""
    looked_at: int = 0
    """Blocks looked at, the first ones in the order asked for, where those were not all; else 0."""


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
    is_about: bool = False
    """The catalog is large: ``blocks`` and ``live_blocks`` are estimates, within some per cent."""


class DrainAsk(Message, frozen=True):
    """Empty ``worker``: copy out what nobody else holds, then let it go; or look how far that is, or stop it.

    Any store-manager takes it; whoever leads does it. Asked twice, it is the same drain.
    """

    worker: str
    what: Literal["start", "look", "cancel"] = "start"
    timeout_s: float = 300.0
    """From the order on; a drain that is not over by then fails, and its worker keeps what it has."""
    force: bool = False
    """Also the last worker of its role and model, so that nobody serves the model any more."""


class DrainReply(Message, frozen=True):
    """How far the worker's latest drain is."""

    worker: str
    state: Literal["waiting", "copying", "retiring", "done", "failed", "cancelled"]
    blocks: int = 0
    """Blocks that had no other copy."""
    copied: int = 0
    """Of those, how many have one now."""
    left: int = 0
    """Of those, how many stay behind."""
    nbytes: int = 0
    """Bytes copied."""
    why: str = ""
    """What a person should know of the end."""
    leader: str = ""


class QuotaAsk(Message, frozen=True):
    """Give ``tenant`` a quota of ``nbytes`` bytes in the whole cluster, or take it away; or list the quotas."""

    tenant: str = ""
    nbytes: int = 0
    remove: bool = False


class QuotaRow(Part, frozen=True):
    """One tenant's bytes."""

    tenant: str
    quota: int
    used: int
    """Bytes of its blocks on all workers and tiers."""


class QuotaReply(Message, frozen=True):
    """Every tenant with a quota."""

    quotas: list[QuotaRow]
    unseen: int = 0
    """Blocks, each once a worker and tier, for which the map of who holds what has no room: ``used`` is without
    them."""


class CopiesQuery(Message, frozen=True):
    """Where are the hot prefixes, what do workers hold, and what was decided lately?"""

    limit: int = 20


class Holder(Part, frozen=True):
    """One worker that holds a block."""

    worker: str
    host: str
    tiers: list[str]


class HotRow(Part, frozen=True):
    """A hot prefix, named by its last hot block."""

    key: BlockKey
    blocks: int
    """Length of the prefix."""
    tenant: str
    tokens: int
    heat: float
    """Uses, each counting half after a half-life."""
    wanted: int
    """Copies there should be."""
    holders: list[Holder]


class WorkerRow(Part, frozen=True):
    """One worker's part in the pool."""

    worker: str
    role: str
    host: str
    state: str
    blocks: int
    nbytes: int
    made: int
    """Copies there that the store-manager asked for."""
    weight: float
    """Share of copying that it takes: below 1 while it is fresh."""
    suspended_s: float = 0.0
    """For how long it gets nothing, after failures."""


class DecisionRow(Part, frozen=True):
    """Something the store-manager decided, and why."""

    age_s: float
    what: str
    worker: str
    blocks: int
    nbytes: int
    why: str


class CopiesReply(Message, frozen=True):
    """Answer to :class:`CopiesQuery`."""

    hot: list[HotRow]
    workers: list[WorkerRow]
    decisions: list[DecisionRow]
    """Latest first; only the leader has any."""
    blocks: int
    copies: int
    unseen: int
    """Blocks, each once a worker and tier, for which the map has no room."""
    answered_by: str
    leader: str
    term: int


class PrefixRow(Part, frozen=True):
    """A stretch of a chain without a branch, all of whose blocks were reused equally often: a node of the prefix
    tree."""

    key: BlockKey
    """Of the last block."""
    parent: BlockKey
    """The block before the first: the last one of the stretch before, or the root."""
    depth: int
    """Of the first block."""
    blocks: int
    tokens: int
    nbytes: int
    model: str
    tenant: str
    hits: int
    """Requests that reused it."""
    last_used_at_s: float | None
    created_by: str
    created_at_s: float
    """Of the last block."""
    request: str
    workers: list[str]
    """Who holds the last block now, each with its tier where that is not DRAM: ``decode-1``, ``prefill-2 (ssd)``."""


class HotQuery(Message, frozen=True):
    """The prefixes reused most; of about ``limit`` blocks."""

    limit: int = 1_000
    tenant: str = ""
    model: str = ""


class HotReply(Message, frozen=True):
    """Stretches of chains, parents first: every one but a root's child continues another one of them."""

    prefixes: list[PrefixRow]


class DescendantsQuery(Message, frozen=True):
    """What continues a block; a unique prefix of the key (hex) is enough."""

    key_hex: str
    limit: int = 1_000
    """Most blocks to look at, nearest first."""


class DescendantsReply(Message, frozen=True):
    """The asked block's stretch first, then what continues it, parents first."""

    prefixes: list[PrefixRow]
    descendants: int
    """Blocks that continue the asked one, also those beyond the limit."""


class EvictionsQuery(Message, frozen=True):
    """Copies that ended during the last ``window_s`` seconds; an empty text asks for any."""

    window_s: float = 86_400.0
    limit: int = 20
    worker: str = ""
    tenant: str = ""
    why: str = ""
    key_hex: str = ""
    """Only this block's."""


class EvictionRow(Part, frozen=True):
    """One copy that ended."""

    at_s: float
    key: BlockKey
    depth: int
    """-1 when the block is not known any more."""
    tenant: str
    worker: str
    incarnation: str
    tier: str
    why: str
    nbytes: int
    held_s: float | None
    """From its storing to its end; ``None`` when its storing is not known."""
    origin: str
    request: str


class EvictionGroup(Part, frozen=True):
    """How much one worker evicted from a tier for one reason."""

    worker: str
    tier: str
    why: str
    blocks: int
    nbytes: int
    held_s: float | None
    """Mean."""


class EvictionsReply(Message, frozen=True):
    """The latest ended copies first; ``groups`` sum up all of the window."""

    evictions: list[EvictionRow]
    groups: list[EvictionGroup]


class ReuseQuery(Message, frozen=True):
    """Prompt tokens that needed no computing, of requests received during the last ``window_s`` seconds."""

    by: Literal["tenant", "model", "day"] = "tenant"
    window_s: float = 7 * 86_400.0


class ReuseRow(Part, frozen=True):
    """The requests of one tenant, model or day (UTC)."""

    name: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    predicted_hit_tokens: int
    completion_tokens: int
    ttft_s: float | None
    """Mean of those that got a first token."""


class ReuseReply(Message, frozen=True):
    """Days latest first, tenants and models by what they saved."""

    rows: list[ReuseRow]


class RequestsQuery(Message, frozen=True):
    """Requests received during the last ``window_s`` seconds; an empty text asks for any."""

    window_s: float = 86_400.0
    limit: int = 20
    tenant: str = ""
    model: str = ""
    outcome: str = ""
    """An outcome, or the code that came with it."""
    worker: str = ""
    """Prefill or decode."""


class RequestRow(Part, frozen=True):
    """How one request ended."""

    request: str
    gateway: str
    model: str
    tenant: str
    received_at_s: float
    outcome: str
    code: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    predicted_hit_tokens: int
    hit_tokens: int
    predicted_ttft_s: float
    ttft_s: float | None
    tbt_s: float | None
    duration_s: float
    attempts: int
    conductor: str
    prefill: str
    decode: str
    trace: str
    last_key: bytes
    """Of the prompt's last full block; empty when there was none."""
    stages: Stages | None = None
    decisions: list[Decision] = []
    """Where it was placed and why; only when a single request is asked for."""
    client_id: str = ""
    """What the client called it."""


class RequestsReply(Message, frozen=True):
    """The latest first."""

    requests: list[RequestRow]


class RequestQuery(Message, frozen=True):
    """One request: by a unique beginning of its id or of its answer's, or by all of what only its client calls it."""

    request: str


class RequestReply(Message, frozen=True):
    """Answer to :class:`RequestQuery`."""

    request: RequestRow


class StorageQuery(Message, frozen=True):
    """What workers held during the last ``window_s`` seconds, averaged over ``steps`` steps of it."""

    window_s: float = 86_400.0
    steps: int = 24
    worker: str = ""


class StorageRow(Part, frozen=True):
    """What a worker held in a tier during the step that began at ``at_s``."""

    at_s: float
    worker: str
    tier: str
    blocks: int
    nbytes: int


class StorageReply(Message, frozen=True):
    """Oldest first; a worker that held nothing has no row."""

    rows: list[StorageRow]
    step_s: float
