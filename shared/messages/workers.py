"""Workers come, report their load, and leave."""

from __future__ import annotations

from typing import Literal

from shared.ids import Incarnation, SpecDigest, WorkerId
from shared.kv import CacheSpec
from shared.messages.base import Message, Part
from shared.messages.transfers import Endpoint

Role = Literal["prefill", "decode", "store"]


class Profile(Part, frozen=True):
    """Cost estimates a worker starts with; receivers refit them from what they observe.

    Prefill of ``n`` tokens over a cached prefix of ``p``:
    ``prefill_fixed_s + prefill_per_token_s * (n - p) + prefill_per_token2_s * (n² - p²)`` seconds.
    A decode step of batch ``b`` with ``c`` context tokens in all:
    ``decode_fixed_s + decode_per_request_s * b + decode_per_context_token_s * c`` seconds.
    """

    prefill_fixed_s: float = 0.02
    prefill_per_token_s: float = 2e-3
    prefill_per_token2_s: float = 2e-8
    decode_fixed_s: float = 0.03
    decode_per_request_s: float = 0.01
    decode_per_context_token_s: float = 1e-6
    transfer_bytes_per_s: float = 1e9
    transfer_fixed_s: float = 0.005
    ssd_bytes_per_s: float = 1e9
    """At which blocks come from its SSD, if it has one."""


class Hello(Message, frozen=True):
    """A worker is ready. Sent at start, on :class:`Rollcall`, and after the bus reconnected."""

    worker: WorkerId
    incarnation: Incarnation
    role: Role
    spec: CacheSpec
    endpoint: Endpoint
    capacity_blocks: int
    """Blocks its pool holds."""
    max_running: int
    """Requests it runs at the same time (decode: batch size)."""
    started_at_s: float
    """Unix seconds."""
    device: str = "cpu"
    profile: Profile = Profile()
    pid: int = 0
    elastic: bool = False
    """Whether it also takes jobs of the other role, prefill or decode, and reports the load of each in a message of
    its own."""


class Load(Message, frozen=True):
    """Heartbeat and load in one; sent every ``heartbeat_s`` and at once when something big changes."""

    worker: WorkerId
    incarnation: Incarnation
    role: Role
    """Whose numbers these are: an elastic worker sends one message for each."""
    kv_seq: int
    """Sequence number of the last KV event batch it published: a receiver that is behind asks for a sync."""
    queued: int = 0
    """Requests accepted and not yet running."""
    queued_tokens: int = 0
    """Prompt tokens still to be computed, queued and running."""
    running: int = 0
    context_tokens: int = 0
    """Tokens of context of all running requests (decode)."""
    free_blocks: int = 0
    """Slots that are free or could be freed by eviction."""
    cached_blocks: int = 0
    draining: bool = False


class Bye(Message, frozen=True):
    """An orderly leave: no new work, its blocks go with it."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str = ""
    at_s: float = 0.0
    """Unix seconds; 0 when the sender did not say."""


class Refuse(Message, frozen=True):
    """A conductor will not have this worker; it stops with ``message`` as its last word."""

    worker: WorkerId
    incarnation: Incarnation
    message: str


class Rollcall(Message, frozen=True):
    """Somebody new wants to know who is there: every worker answers with a :class:`Hello`."""

    asker: str


class WorkersQuery(Message, frozen=True):
    """What does the conductor know about its workers?"""


class WorkerState(Part, frozen=True):
    """One worker as a conductor sees it."""

    hello: Hello
    load: Load | None
    state: Literal["alive", "suspect", "dead"]
    silence_s: float
    indexed_blocks: int
    waiting_s: float = 0.0
    """Predicted seconds until a new prompt would start."""
    other_load: Load | None = None
    """Of an elastic worker: what it reported last of the role that is not its home."""
    now: Role | None = None
    """Of an elastic worker: the role it is given work for; ``None`` for neither."""
    errors: dict[str, float] = {}
    """{kind of work: smoothed |predicted - observed| / observed of its cost model}; only what it was seen to do often
    enough to tell."""


class RoleAdvice(Part, frozen=True):
    """Whether the ratio of prefill to decode workers fits what one model is asked for, with the terms.

    Workers are those that may get work now. What arrives is counted over the last minute, by predicted cost.
    """

    model: str
    spec: SpecDigest
    prefill: int
    """Workers that prefill now."""
    decode: int
    best_prefill: int
    """Of the same number of workers, how many should prefill."""
    best_decode: int
    needed_prefill: float
    """Workers that the load needs for prefill, whatever there are."""
    needed_decode: float
    is_wrong: bool
    """One side has less than it needs while the other has workers to spare; while ``is_short``, so few prefill that
    more of the load would be served if more did, or so many while decode lacks some."""
    is_short: bool
    """There are too few workers, whatever they do, or were lately: all that arrives could not be prefilled and
    answered. Then the best is what serves most of it."""
    prefill_rate: float
    """Seconds of prefill computing that arrive a second."""
    queued_s: float
    """Seconds of it that wait, over all workers."""
    decode_rate: float
    """Seconds of decode steps that arriving answers take a second, the fixed part of a step left out."""
    step_s: float
    """The fixed part of a step."""
    step_limit_s: float
    """What a step may take."""
    batch: int
    """Answers running and about to, over all workers."""
    context_tokens: int
    memory: float
    """Decode workers whose memory these fill."""
    answers: float = 0.0
    """Decode workers that the answers to all prompts that arrive would need on average, if all of these were prefilled:
    for computing or for memory, whichever are more. ``needed_decode`` counts what is being answered only."""


class IndexState(Part, frozen=True):
    """How full a conductor's index is. ``block_copies`` counts a block once for each worker that holds it."""

    block_copies: int
    max_block_copies: int
    nbytes: int
    max_bytes: int
    dropped: int = 0
    """Block copies that it had no room for, since the conductor started."""


class WorkersReply(Message, frozen=True):
    """Answer to :class:`WorkersQuery`."""

    conductor: str
    workers: list[WorkerState]
    advice: list[RoleAdvice] = []
    """For each model that was asked for and has two workers or more."""
    index: IndexState | None = None
