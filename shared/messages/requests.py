"""The road of a request: place, reserve, prefill, hand over, stream, finish."""

from __future__ import annotations

from typing import Literal

from shared.ids import BlockKey, ConductorId, GatewayId, Incarnation, OperationId, RequestId, SpecDigest, WorkerId
from shared.messages.base import Message, Part
from shared.messages.transfers import Endpoint, Grant, Range

RejectionCode = Literal["ttft", "tbt", "capacity", "quota", "no_worker"]
Finish = Literal["", "stop", "length", "cancelled"]


class Sampling(Part, frozen=True):
    """How to choose tokens. The token at position ``i`` depends only on the logits, these values and ``i``."""

    max_tokens: int
    temperature: float = 0.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    seed: int = 0
    stop_token_ids: list[int] = []
    """Ids that end the answer; not part of it. Includes the model's own end tokens unless ``ignore_eos``."""
    min_tokens: int = 0


class PlaceRequest(Message, frozen=True):
    """gateway → conductor: where shall this run?"""

    request: RequestId
    model: str
    spec: SpecDigest
    tenant: str
    num_tokens: int
    """Prompt length."""
    keys: bytes
    """Packed keys of the prompt's full blocks."""
    max_tokens: int
    attempt: int = 0
    exclude: list[WorkerId] = []
    """Workers that must not get it: failed before, or excluded by the client."""
    ttft_slo_s: float | None = None
    """What is left of the request's own bound on the first token; 0 or less once that has passed."""
    tbt_slo_s: float | None = None
    head_start_s: float = 0.0
    """Where prompts queue, it counts as having come so much earlier; below 0: later."""
    waited_s: float = 0.0
    """How long this attempt has been held since it was to be placed first: taken off ``ttft_slo_s`` already, and to be
    taken off any other bound on the first token."""


class Source(Part, frozen=True):
    """Pull blocks ``[first_block, first_block + num_blocks)`` of the prompt from ``owner``."""

    owner: WorkerId
    incarnation: Incarnation
    first_block: int
    num_blocks: int


class Candidate(Part, frozen=True):
    """One option the conductor weighed, with its terms in seconds."""

    prefill: WorkerId
    queue_s: float
    transfer_s: float
    prefill_s: float
    own_blocks: int
    fetched_blocks: int
    note: str = ""
    delays_s: float = 0.0
    """What it makes requests already there wait longer, all together."""

    @property
    def ttft_s(self) -> float:
        """Sum of the terms."""
        return self.queue_s + self.transfer_s + self.prefill_s


class DecodeCandidate(Part, frozen=True):
    """One decode worker the conductor weighed."""

    decode: WorkerId
    tbt_s: float
    """Predicted step at the time the prefill will end."""
    own_blocks: int
    """Leading blocks of the prompt that it holds."""


class Placement(Message, frozen=True):
    """conductor → gateway: run it there, and why."""

    request: RequestId
    attempt: int
    conductor: ConductorId
    prefill: WorkerId
    prefill_incarnation: Incarnation
    decode: WorkerId
    decode_incarnation: Incarnation
    own_blocks: int
    """Leading blocks the prefill worker should have itself, or read from its SSD."""
    sources: list[Source]
    """What to pull from others; contiguous after ``own_blocks``."""
    hit_tokens: int
    """Prompt tokens that should not need computing."""
    predicted_queue_s: float
    predicted_transfer_s: float
    predicted_prefill_s: float
    predicted_tbt_s: float
    candidates: list[Candidate] = []
    ranked_s: float = 0.0
    """Seconds of computing by which the prefill worker will rank it until it starts; 0 for the predicted ones. They
    are more where blocks are counted on that others ahead of it have yet to compute."""
    unmade_tokens: int = 0
    """Of ``hit_tokens``, those that others ahead of it have yet to compute: until then they count as its own."""
    lead_s: float | None = None
    """By how much others may come later than it to its prefill worker and go first, from the moment of the decision
    on; ``None``: as the worker's order says. It is more where others, accepted under a bound, could not wait for it."""
    decode_candidates: list[DecodeCandidate] = []
    """Best first."""
    reuse_gain_s: float = 0.0
    """Seconds by which its first token would have come sooner, as predicted, had every prefill worker held what
    anybody holds of its prefix: what more copies of that prefix would be worth."""
    policy: str = ""
    """The published policy that decided; empty for our own."""

    @property
    def predicted_ttft_s(self) -> float:
        """Queue, transfer and prefill."""
        return self.predicted_queue_s + self.predicted_transfer_s + self.predicted_prefill_s


class Rejection(Message, frozen=True):
    """conductor → gateway: not now; ``retry_after_s`` is computed, not a constant."""

    request: RequestId
    code: RejectionCode
    message: str
    retry_after_s: float
    candidates: list[Candidate] = []
    wait_s: float = 0.0
    """Ask again after so many seconds: there is room by then as predicted, and the request still in time. 0: do not."""
    spare_s: float = 0.0
    """Where ``wait_s`` is set: it may wait so long at most and would still be in time."""
    late_s: float = 0.0
    """With code ``ttft``: how much later than asked the first token may come; had the request waited so much less, it
    would have been taken."""
    decode_candidates: list[DecodeCandidate] = []
    """As far as decode workers were looked at, best first."""
    policy: str = ""
    """As in :class:`Placement`."""


class Placed(Message, frozen=True):
    """What a conductor decided, for its replicas: they count the load before any worker reports it."""

    placement: Placement
    num_tokens: int
    max_tokens: int
    keys: bytes
    ttft_slo_s: float | None = None
    """The bound it was accepted under, from the moment of the decision on."""
    tenant: str = ""
    head_start_s: float = 0.0
    """As in the question."""
    tbt_slo_s: float | None = None
    """The bound on the time between tokens that it was accepted under."""


class DecodeJob(Message, frozen=True):
    """gateway → decode worker: reserve room for this prompt and its answer."""

    request: RequestId
    attempt: int
    spec: SpecDigest
    gateway: GatewayId
    tenant: str
    tokens: bytes
    """Packed prompt token ids."""
    keys: bytes
    root: BlockKey
    sampling: Sampling
    deadline_s: float
    """Seconds from receipt until the whole request is given up."""
    prefill: WorkerId
    tbt_slo_s: float | None = None


class Landing(Part, frozen=True):
    """Where a prompt's KV shall land: one range of ``block_bytes`` for each block from ``first_block`` on.

    The blocks before ``first_block`` are on the decode worker already. The last range may be of a partial block.
    """

    endpoint: Endpoint
    grant: Grant
    first_block: int
    slots: list[Range]


class Reserved(Message, frozen=True):
    """decode worker → gateway: room is reserved; no prefill without it."""

    request: RequestId
    attempt: int
    landing: Landing


class PrefillJob(Message, frozen=True):
    """gateway → prefill worker: compute this prompt into ``landing``."""

    request: RequestId
    attempt: int
    spec: SpecDigest
    gateway: GatewayId
    tenant: str
    tokens: bytes
    keys: bytes
    root: BlockKey
    sampling: Sampling
    """For the first token, which the prefill worker samples."""
    sources: list[Source]
    endpoints: list[Endpoint]
    """How to reach the owners named in ``sources``; informational, pushes go through the owner."""
    decode: WorkerId
    landing: Landing
    deadline_s: float
    own_blocks: int | None = None
    """Leading blocks that are worth reading from its own SSD, where they are not in memory; ``None``: all there are."""
    head_start_s: float = 0.0
    """Where prompts queue, it counts as having come so much earlier; below 0: later."""
    lead_s: float | None = None
    """By how much others may come later and go first, from receipt on, as its conductor counts on, the head start
    counted in; ``None``: as the worker's order says."""


class Accepted(Message, frozen=True):
    """The job is in hand."""

    request: RequestId
    attempt: int


class Refused(Message, frozen=True):
    """The job is not taken; the gateway places it again elsewhere."""

    request: RequestId
    attempt: int
    code: Literal["capacity", "tbt", "spec", "draining", "unknown", "expired", "cancelled", "incomplete"]
    message: str
    retry_after_s: float = 1.0


class Stages(Part, frozen=True):
    """Where a request's time went, in seconds, and what it moved. Filled by each party as it passes."""

    prefill_queue_s: float = 0.0
    """Waiting for the engine, also between two chunks while it computes others that have less left, or answers."""
    fetch_s: float = 0.0
    """Waiting for owners to push prefix blocks."""
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    fetch_path: str = ""
    """Transport the prefix came by: ``shm``, ``tcp`` ...; several joined by ``+``."""
    ssd_s: float = 0.0
    """Reading blocks back from the worker's own SSD."""
    ssd_bytes: int = 0
    fetch_failed_blocks: int = 0
    """Blocks that a source promised and that did not arrive verified."""
    local_hit_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens whose KV was not computed for this request (local and fetched)."""
    prefill_s: float = 0.0
    """Computing: the engine's own time for the prompt's chunks."""
    pushed_bytes: int = 0
    push_path: str = ""
    push_wait_s: float = 0.0
    """After the last chunk, waiting for the last push to be acknowledged."""
    decode_queue_s: float = 0.0


class Handover(Message, frozen=True):
    """prefill → decode worker: every block has been pushed and acknowledged; start."""

    request: RequestId
    attempt: int
    worker: WorkerId
    first_token: int
    stages: Stages


class Inquiry(Message, frozen=True):
    """gateway → worker: do you still have this job? Asked when nothing is heard of it for too long."""

    request: RequestId
    attempt: int


class JobState(Message, frozen=True):
    """Answer to :class:`Inquiry`. ``waiting``: not yet decoding; ``running``: ``sent`` tokens have left."""

    request: RequestId
    attempt: int
    stage: Literal["unknown", "waiting", "running"]
    sent: int = 0


class PushBlocks(Message, frozen=True):
    """A reader → the owner: write these blocks into my memory."""

    operation: OperationId
    request: RequestId
    keys: bytes
    """Packed keys of the wanted blocks, a chain, in order."""
    endpoint: Endpoint
    grant: Grant
    slots: list[Range]
    """One range a key."""
    deadline_s: float


class Pushed(Message, frozen=True):
    """Owner's answer: the first ``blocks`` of the asked keys were written and verified by the receiver."""

    operation: OperationId
    blocks: int
    nbytes: int
    seconds: float
    path: str
    why: str = ""
    """Why fewer than asked: ``missing``, ``grant``, ``checksum``, ``deadline``, ``peer`` ..., else empty."""


class TokenChunk(Message, frozen=True):
    """Tokens of one request, in order; ``first`` is the index of the first of them in the answer."""

    request: RequestId
    attempt: int
    worker: WorkerId
    first: int
    tokens: bytes
    finish: Finish = ""
    stages: Stages | None = None
    """With the first chunk."""


class JobFailed(Message, frozen=True):
    """A worker gives up on its part of a request."""

    request: RequestId
    attempt: int
    worker: WorkerId
    """Who gives up."""
    code: str
    message: str
    blame: WorkerId = WorkerId("")
    """Who must not get the next attempt; the speaker when empty."""


class TokenBatch(Message, frozen=True):
    """What one step of a decode worker has for one gateway."""

    items: list[TokenChunk | JobFailed]


class Cancel(Message, frozen=True):
    """Everybody frees everything of this request at once; ``attempt`` -1 means all attempts."""

    request: RequestId
    reason: str
    attempt: int = -1


class Progress(Message, frozen=True):
    """A stage of a request is over; conductors keep their load and refit their estimates from these."""

    request: RequestId
    attempt: int
    worker: WorkerId
    stage: Literal["prefill_started", "prefilled", "first_token", "finished", "failed"]
    num_tokens: int = 0
    hit_tokens: int = 0
    stages: Stages | None = None
    batch: int = 0
    """Requests in a decode step, the mean over the answer's steps (``finished``); so are the next two. Steps that also
    computed tokens anew are left out."""
    context_tokens: int = 0
    """Tokens of context of all requests of the step."""
    step_s: float = 0.0
    """The engine's own seconds for the step, without chunks of prompts between two; 0 when there was no step."""


class Decision(Part, frozen=True):
    """What a conductor answered to one attempt at placing a request, and how the attempt ended."""

    attempt: int
    at_s: float
    """Seconds from the request's arrival to the answer."""
    answer: Placement | Rejection
    code: str = ""
    """Why the attempt ended before its answer was complete; empty for one that went well and for a rejection."""
    message: str = ""
    """The same for people."""


class RequestDone(Message, frozen=True):
    """gateway → everybody, durable: how a request ended. One row of ``request`` in the catalog."""

    request: RequestId
    gateway: GatewayId
    model: str
    spec: SpecDigest
    tenant: str
    received_at_s: float
    """Unix seconds."""
    outcome: Literal["ok", "cancelled", "rejected", "failed"]
    code: str = ""
    """Rejection or failure code."""
    finish: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    predicted_hit_tokens: int = 0
    hit_tokens: int = 0
    predicted_ttft_s: float = 0.0
    ttft_s: float | None = None
    tbt_s: float | None = None
    """Mean gap between tokens."""
    duration_s: float = 0.0
    attempts: int = 1
    conductor: ConductorId = ConductorId("")
    prefill: WorkerId = WorkerId("")
    decode: WorkerId = WorkerId("")
    trace: str = ""
    """Hex trace id."""
    stages: Stages | None = None
    last_key: bytes = b""
    """Key of the prompt's last full block: its lineage is the prompt's."""
    decisions: list[Decision] = []
    """One for each attempt that a conductor answered, in order; none when none of them did."""
    client_id: str = ""
    """What the client calls it, in its header ``x-request-id``; it need not be unique."""
