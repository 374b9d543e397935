"""The workers and the work in flight on them, tracked at decisions, progress and ends; heartbeats only correct it.

A *job* is one request on its way: it burdens its prefill worker until it is prefilled and its decode worker until it
is done. What a worker is burdened with is summed over its jobs, again whenever one of them changes, so nothing can
drift; a decision, which looks at every worker, finds the sums made. A heartbeat corrects
in both directions: tokens that the worker counts and no job explains (another conductor's, or from before our start)
are *unexplained* and add to its queue; jobs that should long be there while the worker says it is idle are dropped.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter, itemgetter
from typing import NamedTuple

from services.conductor.core.estimate import Costs
from services.conductor.core.policy import Policy
from shared.errors import Bug
from shared.ids import RequestId, SpecDigest, WorkerId
from shared.kv import KEY_BYTES
from shared.messages import Hello, Load, Placement, Progress, Role, Source
from shared.order import FCFS, Order

_LEAST_REMAINING = 0.1
"""A prefill that runs longer than predicted still counts for this share of its prediction."""

_REACH_S = 0.2
"""A heartbeat cannot yet count a job decided less than this before it came."""

DOUBT = 0.05
"""Share by which a queue may turn out longer than predicted, where a bound is to be kept."""
MARGIN_S = 1.5
"""Who would be left with less than this to spare cannot wait for others any longer."""
LATE_S = 5.0
"""Who will be later than this is late anyway, and may wait."""
BEHIND_S = 0.1
"""By so much a prompt comes after one that cannot wait: messages do not take equally long."""

_RANK = attrgetter("rank")
_FIRST = itemgetter(0)

_FIRST_ANSWER_TOKENS = 256.0
"""Length of an answer before any was seen."""
_MOST_CHANGES = 4096
"""Changes of workers at hand; who asks more rarely looks at all workers."""
_SHORT_TOKENS = 11
"""Answers up to here have at most ten gaps."""
_MOST_TENANTS = 10_000
"""Tenants whose answers are remembered apart; who was not heard of for longest goes first."""
_MOST_BEGINNINGS = 30_000
"""The same for beginnings of prompts."""
_MOST_ASKED = 10_000
"""Requests whose beginnings are remembered until their answers end; the oldest goes first."""
_BEGIN = (0, 1, 3)
"""Blocks of a prompt that tell what it is like; they predict best on the traces (docs/conductor.md)."""
_FIRST_PART = struct.Struct("<Q")
_BELIEF = 0.5
"""What was seen of a beginning so many times weighs as much as what was known without."""


Beginning = tuple[int, ...]
"""First parts of the keys of some leading blocks of a prompt, see ``_BEGIN``; the longer it is, the fewer share it."""


def beginning(keys: bytes) -> Beginning:
    """That of a prompt with these packed keys."""
    last = len(keys) // KEY_BYTES - 1
    return tuple([_FIRST_PART.unpack_from(keys, at * KEY_BYTES)[0] for at in _BEGIN if at <= last])


class Answers:
    """What is expected of an answer, by what those to prompts that begin alike were like lately; of unknown ones, by
    the same tenant's, of unknown ones, by all tenants'."""

    def __init__(self) -> None:
        self.tokens = _FIRST_ANSWER_TOKENS
        """Length of any answer: a smoothed mean."""
        self.short_share = 0.0
        """Share of answers so short that their longest tenth is one gap, the one until they join a batch; smoothed."""
        #: {tenant: (smoothed length, smoothed distance from it)}, whoever was heard of last at the end
        self._of: OrderedDict[str, tuple[float, float]] = OrderedDict()
        #: {block: (smoothed length, smoothed distance from it, how many)}, in the same order
        self._after: OrderedDict[int, tuple[float, float, int]] = OrderedDict()

    def observe(self, tokens: int, tenant: str, begins: Beginning = ()) -> None:
        """One ended by itself after so many."""
        expected, _ = self._expected(tenant, begins)
        for block in begins:
            usual, apart, count = self._after.pop(block, (float(tokens), abs(tokens - expected), 0))
            weight = max(0.1, 1 / (count + 1))
            self._after[block] = (usual + weight * (tokens - usual),
                                  apart + weight * (abs(tokens - usual) - apart) if count else apart, count + 1)
        while len(self._after) > _MOST_BEGINNINGS:
            self._after.popitem(last=False)
        usual, apart = self._of.pop(tenant, (self.tokens, 0.0))
        self._of[tenant] = (0.9 * usual + 0.1 * tokens, 0.9 * apart + 0.1 * abs(tokens - usual))
        self.tokens = 0.95 * self.tokens + 0.05 * tokens
        self.short_share += (float(1 < tokens <= _SHORT_TOKENS) - self.short_share) / 100
        if len(self._of) > _MOST_TENANTS:
            self._of.popitem(last=False)

    def usual(self, tenant: str, begins: Beginning = ()) -> float:
        """Tokens of a usual one."""
        return self._expected(tenant, begins)[0]

    def most(self, tenant: str, begins: Beginning = ()) -> float:
        """Tokens that most of them (about four of five) stay below."""
        usual, apart = self._expected(tenant, begins)
        return usual + apart

    def _expected(self, tenant: str, begins: Beginning) -> tuple[float, float]:
        usual, apart = self._of.get(tenant, (self.tokens, 0.0))
        for block in begins:
            if (known := self._after.get(block)) is None:
                break
            belief = known[2] / (known[2] + _BELIEF)
            usual += belief * (known[0] - usual)
            apart += belief * (known[1] - apart)
        return usual, apart


class Changes:
    """Which workers changed, in order. Readers remember ``count`` and ask what came after it."""

    def __init__(self) -> None:
        self.count = 0
        self._latest: deque[WorkerId] = deque(maxlen=_MOST_CHANGES)

    def note(self, worker: WorkerId) -> None:
        """It is not what it was."""
        self.count += 1
        self._latest.append(worker)

    def since(self, count: int) -> set[WorkerId] | None:
        """Who changed after the first ``count`` changes; ``None`` when these are longer ago than is known."""
        missed = self.count - count
        return set(islice(reversed(self._latest), missed)) if missed <= len(self._latest) else None


@dataclass(eq=False, slots=True)
class Job:
    """One request on its way. Times are monotonic seconds."""

    request: RequestId
    attempt: int
    prefill: WorkerId
    decode: WorkerId
    num_tokens: int
    max_tokens: int
    hit_tokens: int
    work_s: float
    """Predicted seconds of computing the prefill."""
    placed_s: float
    ready_s: float
    """When its prefill is predicted to end."""
    answer_tokens: float = 0.0
    """How long its answer is expected to be."""
    reserved_blocks: int = 0
    """Slots it is expected to take on its decode worker: its prompt, and an answer of the usual length."""
    fetches: list[tuple[WorkerId, int]] = field(default_factory=list)
    """(owner, bytes) still to be pulled by the prefill worker."""
    fetch_same_host: bool | None = None
    """Whether all owners share the prefill worker's host; ``None`` when some do."""
    fetch_ahead_bytes: int = 0
    """Bytes that were under way on the link when this was decided."""
    ranked_s: float = 0.0
    """Seconds of computing by which its prefill worker ranks it until it starts."""
    due_s: float = math.inf
    """When its first token is due."""
    unmade_tokens: int = 0
    """Of ``hit_tokens``, those that others have yet to compute, until it starts: its worker still counts them."""
    head_start_s: float = 0.0
    """In a queue it counts as placed so much earlier."""
    rank: float = 0.0
    """Its number in the queue of its prefill worker; see :mod:`shared.order`."""
    done_share: float = 0.0
    """How much of its prefill is computed, as of when its worker was last accounted for."""
    started_s: float | None = None
    prefilled_s: float | None = None

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that have to be computed."""
        return self.num_tokens - self.hit_tokens

    @property
    def counted_tokens(self) -> int:
        """Prompt tokens that its prefill worker counts as to be computed."""
        return self.computed_tokens + self.unmade_tokens

    @property
    def since_s(self) -> float:
        """From when on it counts in the queue."""
        return self.placed_s - self.head_start_s

    @property
    def left_s(self) -> float:
        """Seconds of computing that were left when its worker was last accounted for."""
        return self.work_s * (1.0 - self.done_share)

    def advance(self, done_share: float, order: Order) -> None:
        """So much of it is computed; it gets another number."""
        self.done_share = done_share
        if self.started_s is not None:
            self.rank = order.rank(self.since_s, self.left_s)


Waiting = tuple[float, float, float]
"""One prompt of a queue that is not being computed right now: its rank, the seconds of computing it has left, and by
how many seconds it will be early as things are, its queue taken a little longer than predicted (below 0 it will be
late; infinite when nothing is asked)."""


class Line(NamedTuple):
    """Where a new prompt would come in the queue of a worker."""

    queue_s: float
    """What is computed before it."""
    delayed: int
    """How many it makes wait longer."""
    yields_s: float
    """How much later it counts as come, lest it make others late."""


class Burden(NamedTuple):
    """What a worker is burdened with, summed over its jobs: valid until one of them, or the worker, changes."""

    front: Job | None
    """The prefill that is being computed, or is first in line."""
    waiting: tuple[Waiting, ...]
    """The others, in their order."""
    behind_s: float
    """Their seconds of computing."""
    first_left_s: float
    first_since_s: float
    """The front's seconds of computing that were left then; time has passed since."""
    first_least_s: float
    """What it counts for however long it runs."""
    first_spare_s: float
    """By how many seconds it will be early, as in :data:`Waiting`."""
    unexplained_s: float
    """Seconds of computing that the last heartbeat counted and no job explains."""
    receiving_bytes: int
    sending_bytes: int
    batch: int
    context_tokens: int
    free_blocks: int


@dataclass
class Worker:
    """One live worker: what it said, what it costs, what it was given. Who changes it says so (:meth:`changed`)."""

    hello: Hello
    spec: SpecDigest
    costs: Costs
    load: Load | None = None
    """Its last heartbeat; of an elastic worker the last one of its prefill role."""
    load_s: float = 0.0
    decode_load: Load | None = None
    """Its last heartbeat, of an elastic worker the last one of its decode role."""
    decode_load_s: float = 0.0
    #: prompt tokens its last heartbeat counts and no job explains
    unexplained_tokens: int = 0
    #: {request: job}: not yet prefilled on this prefill worker / not yet done on this decode worker
    prefilling: dict[RequestId, Job] = field(default_factory=dict)
    decoding: dict[RequestId, Job] = field(default_factory=dict)
    #: {request: bytes} this worker has to send to others
    sending: dict[RequestId, int] = field(default_factory=dict)
    #: when somebody else's turn began here, or a heartbeat showed how far the present one is
    turned_s: float = -math.inf
    order: Order = FCFS
    """In which it computes its prompts."""
    #: smoothed seconds from prefilled to done on this decode worker; ``None`` before the first
    residence_s: float | None = None
    #: when its pace was learnt from last
    taught_s: float = -math.inf
    answers: Answers = field(default_factory=Answers)
    """Shared by all workers, as is the next."""
    changes: Changes = field(default_factory=Changes)
    _burden: Burden | None = None

    def __post_init__(self) -> None:
        self.id: WorkerId = self.hello.worker
        """Its worker id."""

    def does(self, role: Role) -> bool:
        """Whether it takes jobs of this role."""
        return self.hello.role == role or (self.hello.elastic and role != "store")

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when something changed and nobody said so."""
        if self._burden is not None and self._burden != self._sum():
            raise Bug(f"worker {self.id}: believed to be {self._burden}, is {self._sum()}")

    def changed(self) -> None:
        """Something about it or its jobs is not what it was."""
        self.changes.note(self.id)
        self._burden = None

    @property
    def burden(self) -> Burden:
        """The sums over its jobs."""
        if self._burden is None:
            self._burden = self._sum()
        return self._burden

    def queue_s(self, now: float) -> float:
        """Predicted seconds until a new prompt's computing starts here."""
        burden = self.burden
        queue_s = burden.behind_s + max(burden.first_left_s - (now - burden.first_since_s), burden.first_least_s)
        if burden.unexplained_s:
            queue_s += max(burden.unexplained_s - (now - self.load_s), 0.0)
        return queue_s

    def line(self, prefill_s: float, now: float, *, since_s: float) -> Line:
        """Where a prompt comes that needs so many seconds of computing and counts from ``since_s`` on.

        Who was accepted under a bound and has too little to spare does not wait for it: it yields until it comes after
        the last of these.
        """
        burden, order = self.burden, self.order
        front, front_s = burden.front, self.queue_s(now) - burden.behind_s
        rank = order.rank(since_s, prefill_s)
        front_rank = -math.inf
        if front is not None and order.is_preemptive:
            front_rank = order.rank(front.since_s, front_s)
        behind = max((other for other, _, spare_s in ((front_rank, 0.0, burden.first_spare_s), *burden.waiting)
                      if -LATE_S < spare_s < prefill_s + MARGIN_S), default=-math.inf)
        yields_s = behind + BEHIND_S - rank if behind > rank else 0.0
        rank += yields_s
        ahead = bisect_right(burden.waiting, rank, key=_FIRST)
        queue_s, delayed = sum(left_s for _, left_s, _ in burden.waiting[:ahead]), len(burden.waiting) - ahead
        if front_rank <= rank:
            return Line(queue_s + front_s, delayed, yields_s)
        return Line(queue_s, delayed + (front_s > 0), yields_s)

    def account(self, now: float) -> None:
        """Whoever was computed until now has got that much further."""
        front = self.burden.front
        if front is not None and front.work_s > 0:
            left_s = max(front.left_s - (now - self.burden.first_since_s), self.burden.first_least_s)
            front.advance(1.0 - left_s / front.work_s, self.order)
        self.turned_s = now
        self.changed()

    def receiving_bytes(self) -> int:
        """Bytes under way to this worker."""
        return self.burden.receiving_bytes

    def sending_bytes(self) -> int:
        """Bytes under way from this worker."""
        return self.burden.sending_bytes

    def batch(self) -> int:
        """Requests decoding here or on their way."""
        return self.burden.batch

    def context_tokens(self) -> int:
        """Tokens of context of all of them."""
        return self.burden.context_tokens

    def free_blocks(self) -> int:
        """Slots for a new request's prompt and answer, those of jobs on their way taken off."""
        return self.burden.free_blocks

    def decoding_at(self, at_s: float, *, now: float) -> tuple[int, float]:
        """Requests that will be decoding here at ``at_s`` or come later, and their tokens of context.

        Who is predicted to be done by then is not among them, unless that should have been long ago. Those that come
        later count: they will decode together with a request that begins at ``at_s``.
        """
        burden = self.burden
        batch, context_tokens = burden.batch, float(burden.context_tokens)
        if self.decoding:
            step_s = self._present_step_s(burden.context_tokens)
            most_s = math.inf if self.residence_s is None else self.residence_s
            done = done_tokens = 0
            for job in self.decoding.values():
                begin_s, stay_s = job.prefilled_s, job.answer_tokens * step_s
                leaves_s = (job.ready_s if begin_s is None else begin_s) + (stay_s if stay_s < most_s else most_s)
                if now < leaves_s <= at_s:
                    done += 1
                    done_tokens += job.num_tokens
            if done:
                tokens = sum([job.num_tokens for job in self.decoding.values()])
                batch = max(batch - done, 0)
                context_tokens *= 1.0 - done_tokens / max(tokens, 1)
        return batch, context_tokens + self._growth(batch, at_s - now)

    def decoding_now(self) -> tuple[int, int]:
        """Requests that decode here, and those whose prefill has begun; and their tokens of context."""
        batch = context_tokens = 0
        for job in self.decoding.values():
            if job.started_s is not None or job.prefilled_s is not None:
                batch += 1
                context_tokens += job.num_tokens
        if (load := self.decode_load) is not None:  # others' answers, and what was generated so far
            batch, context_tokens = max(batch, load.running), max(context_tokens, load.context_tokens)
        return batch, context_tokens

    def _growth(self, batch: int, seconds: float) -> float:
        """Tokens that a batch will have added to its context."""
        if not batch:
            return 0.0
        step_s = self.costs.step_s(batch=batch, context_tokens=self.burden.context_tokens)
        return batch * min(max(seconds, 0.0) / max(step_s, 1e-6), self.answers.tokens)

    def needed_blocks(self, num_tokens: int, max_tokens: int, tenant: str, begins: Beginning = ()) -> int:
        """Slots for such a request. Decode reserves the prompt only; answers rarely reach ``max_tokens``."""
        return blocks_for(num_tokens + min(max_tokens, round(self.answers.most(tenant, begins))),
                          self.hello.spec.block_tokens)

    def residence_of(self, job: Job) -> float:
        """Predicted seconds from prefilled to done: what is usual here, or the usual answer at the present pace."""
        step_s = self._present_step_s(self.burden.context_tokens)
        longest_s = max(job.answer_tokens, 1.0) * step_s
        return min(longest_s, self.residence_s) if self.residence_s is not None else longest_s

    def next_free_s(self, now: float) -> float:
        """Predicted seconds until one of its requests is done and leaves its room."""
        return min((max(self.residence_of(job) - (now - (job.prefilled_s or now)), 0.0)
                    for job in self.decoding.values()), default=0.0)

    def slot_wait_s(self, now: float) -> float:
        """Predicted seconds until a new request would get a place in the batch."""
        ahead = self.batch() - self.hello.max_running + 1
        if ahead <= 0:
            return 0.0
        typical = next(iter(self.decoding.values()), None)
        residence_s = self.residence_s if typical is None else self.residence_of(typical)
        return ahead / max(self.hello.max_running, 1) * (residence_s or 0.0)

    def _present_step_s(self, context_tokens: int) -> float:
        return self.costs.step_s(batch=max(len(self.decoding), 1), context_tokens=context_tokens)

    def _sum(self) -> Burden:
        receiving_bytes, behind_s = 0, 0.0
        front: Job | None = None
        waiting: list[Waiting] = []
        first_left_s = first_since_s = first_least_s = unexplained_s = 0.0
        first_spare_s = math.inf
        if self.unexplained_tokens:
            unexplained_s = self.costs.prefill_s(num_tokens=self.unexplained_tokens, hit_tokens=0)
        if self.prefilling:
            for job in self.prefilling.values():
                for _, nbytes in job.fetches:
                    receiving_bytes += nbytes
            ranked = self.ranked()
            front = ranked[0]
            first_left_s = front.left_s
            first_since_s = max(front.placed_s if front.started_s is None else front.started_s, self.turned_s)
            first_least_s = min(first_left_s, front.work_s * _LEAST_REMAINING)
            first_s = first_left_s + unexplained_s
            overtaking_s = 0.0
            for job in ranked[1:]:
                left_s = job.work_s * (1.0 - job.done_share)
                begin_s = first_since_s + (first_s + behind_s) * (1.0 + DOUBT)
                behind_s += left_s
                if self.order.is_preemptive and job.rank < front.rank:
                    overtaking_s += left_s
                waiting.append((job.rank, left_s, job.due_s - (begin_s + left_s)))
            first_spare_s = front.due_s - (first_since_s + first_s + overtaking_s * (1.0 + DOUBT))
        load = self.decode_load
        if load is None:  # then no job is in it
            batch = context_tokens = 0
            free_blocks, seen_s = self.hello.capacity_blocks, -math.inf
        else:
            batch, context_tokens = load.running + load.queued, load.context_tokens
            free_blocks, seen_s = load.free_blocks, self.decode_load_s - _REACH_S
        if self.decoding:
            known_tokens = 0
            for job in self.decoding.values():
                known_tokens += job.num_tokens
                if job.placed_s > seen_s:  # decided after the last heartbeat left: not in it
                    batch += 1
                    context_tokens += job.num_tokens
                    free_blocks -= job.reserved_blocks
            batch, context_tokens = max(batch, len(self.decoding)), max(context_tokens, known_tokens)
        return Burden(
            front, tuple(waiting), behind_s, first_left_s, first_since_s, first_least_s, first_spare_s, unexplained_s,
            receiving_bytes, sum(self.sending.values()), batch, context_tokens, free_blocks)

    def ranked(self) -> list[Job]:
        """The prefills here in the order they will be computed in: first the one that runs."""
        ranked = sorted(self.prefilling.values(), key=_RANK)
        for place, job in enumerate(ranked):
            if job.started_s is not None:  # of those that began the first in order runs: it took over from the others
                ranked.insert(0, ranked.pop(place))
                break
        return ranked


class Cluster:
    """{worker id: worker} and {request: job}."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.workers: dict[WorkerId, Worker] = {}
        self.jobs: dict[RequestId, Job] = {}
        self.answers = Answers()
        #: {request: how its prompt begins}, until its answer has ended
        self._begins: OrderedDict[RequestId, Beginning] = OrderedDict()
        self._changes = Changes()
        self.refused: Counter[str] = Counter()
        """{kind: loads and observations that cannot be true}."""

    def join(self, hello: Hello) -> None:
        """A worker begins a life: it has no work and its profile is all that is known of its speed."""
        self.leave(hello.worker)
        self.workers[hello.worker] = Worker(hello, hello.spec.digest, Costs(hello.profile), answers=self.answers,
                                            changes=self._changes, order=self._policy.order)

    def leave(self, worker: WorkerId) -> list[RequestId]:
        """A worker is gone with all it had in hand; answers the requests it was computing the prefill of."""
        gone = self.workers.pop(worker, None)
        if gone is None:
            return []
        lost = list(gone.prefilling)
        for job in [*gone.prefilling.values(), *gone.decoding.values()]:
            job.fetches = [] if job.prefill == worker else job.fetches
        for other in self.workers.values():
            for request in lost:
                other.sending.pop(request, None)
            other.changed()
        return lost

    def place(self, placement: Placement, *, num_tokens: int, max_tokens: int, now: float,
              ttft_slo_s: float | None = None, tenant: str = "", begins: Beginning = (),
              head_start_s: float = 0.0) -> None:
        """A decision was made, here or by another conductor; it replaces the request's former one."""
        self.release(placement.request, now=now)
        prefill, decode = self.workers.get(placement.prefill), self.workers.get(placement.decode)
        job = Job(placement.request, placement.attempt, placement.prefill, placement.decode, num_tokens, max_tokens,
                  placement.hit_tokens, placement.predicted_prefill_s, now, now + placement.predicted_ttft_s,
                  ranked_s=placement.ranked_s or placement.predicted_prefill_s,
                  due_s=math.inf if ttft_slo_s is None else now + ttft_slo_s,
                  unmade_tokens=placement.unmade_tokens, head_start_s=head_start_s)
        job.answer_tokens = min(max_tokens, self.answers.usual(tenant, begins))
        self._begins[job.request] = begins
        if len(self._begins) > _MOST_ASKED:
            self._begins.popitem(last=False)
        if prefill is not None:
            block_bytes = prefill.hello.spec.block_bytes
            job.fetch_ahead_bytes, job.fetch_same_host = self.link(prefill, placement.sources)
            for source in placement.sources:
                nbytes = source.num_blocks * block_bytes
                job.fetches.append((source.owner, nbytes))
                if (owner := self.workers.get(source.owner)) is not None:
                    owner.sending[job.request] = owner.sending.get(job.request, 0) + nbytes
                    owner.changed()
            if placement.lead_s is not None:
                job.head_start_s = prefill.order.lead_s(job.ranked_s) - placement.lead_s
            job.rank = prefill.order.rank(job.since_s, job.ranked_s)
            prefill.prefilling[job.request] = job
            prefill.changed()
        if decode is not None:
            job.reserved_blocks = decode.needed_blocks(num_tokens, max_tokens, tenant, begins)
            decode.decoding[job.request] = job
            decode.changed()
        if prefill is not None or decode is not None:
            self.jobs[job.request] = job

    def link(self, receiver: Worker, sources: Iterable[Source]) -> tuple[int, bool | None]:
        """Bytes under way that new pulls would queue behind, and whether all sources are on the receiver's host."""
        ahead, same_host = receiver.receiving_bytes(), set()
        for source in sources:
            owner = self.workers.get(source.owner)
            if owner is not None:
                ahead = max(ahead, owner.sending_bytes())
                same_host.add(owner.hello.endpoint.host == receiver.hello.endpoint.host)
        return ahead, same_host.pop() if len(same_host) == 1 else None

    def release(self, request: RequestId, *, now: float, attempt: int = -1) -> bool:
        """A request is over (or only its ``attempt``): nothing of it burdens anybody. Answers whether it was known."""
        job = self.jobs.get(request)
        if job is None or attempt not in (-1, job.attempt):
            return False
        del self.jobs[request]
        self._fetched(job)
        if (prefill := self.workers.get(job.prefill)) is not None:
            prefill.prefilling.pop(request, None)
            prefill.changed()
        if (decode := self.workers.get(job.decode)) is not None:
            decode.decoding.pop(request, None)
            if job.prefilled_s is not None:
                here_s = now - job.prefilled_s
                known_s = decode.residence_s
                decode.residence_s = here_s if known_s is None else 0.9 * known_s + 0.1 * here_s
            decode.changed()
        return True

    def progress(self, progress: Progress, now: float) -> None:
        """A stage of a job is over; its times teach the worker's costs."""
        self._learn(progress, now)
        job = self.jobs.get(progress.request)
        if job is None or job.attempt != progress.attempt or progress.worker not in (job.prefill, job.decode):
            return
        prefill = self.workers.get(job.prefill)
        match progress.stage:
            case "prefill_started":
                self._fetched(job)
                if prefill is not None and job.started_s is None:
                    prefill.account(now)
                job.started_s, job.unmade_tokens = now, 0
                if prefill is not None:
                    if 0 <= progress.hit_tokens < progress.num_tokens:
                        job.hit_tokens = progress.hit_tokens
                        job.work_s = prefill.costs.prefill_s(
                            num_tokens=progress.num_tokens, hit_tokens=progress.hit_tokens)
                    job.advance(0.0, prefill.order)
                    prefill.changed()
            case "prefilled" | "first_token":
                self._prefilled(job, now)
            case "finished" | "failed":
                self.release(progress.request, now=now)

    def _learn(self, progress: Progress, now: float) -> None:
        """Takes in what a stage took. 0 seconds were not measured."""
        worker, stages = self.workers.get(progress.worker), progress.stages
        if worker is None:
            return
        if progress.stage == "prefilled" and stages is not None and stages.prefill_s != 0:
            self._took(worker, "prefill", now, learnt=worker.costs.observe_prefill(
                stages.prefill_s, num_tokens=progress.num_tokens, hit_tokens=stages.hit_tokens))
            job = self.jobs.get(progress.request)
            if stages.fetched_bytes and job is not None and job.fetch_same_host is not None:
                self._took(worker, "transfer", None, learnt=worker.costs.observe_transfer(
                    stages.fetch_s, stages.fetched_bytes + job.fetch_ahead_bytes, same_host=job.fetch_same_host))
            if stages.ssd_bytes:
                self._took(worker, "ssd", None, learnt=worker.costs.observe_ssd(stages.ssd_s, stages.ssd_bytes))
        elif progress.stage == "finished" and progress.step_s != 0:
            self._took(worker, "decode", now, learnt=worker.costs.observe_step(
                progress.step_s, batch=progress.batch, context_tokens=progress.context_tokens))

    def _took(self, worker: Worker, kind: str, now: float | None, *, learnt: bool) -> None:
        """Counts what was refused; ``now`` is when the pace was learnt, if it was that."""
        if not learnt:
            self.refused[kind] += 1
            return
        worker.taught_s = worker.taught_s if now is None else now
        worker.changed()

    def load(self, load: Load, now: float) -> None:
        """A heartbeat corrects what is believed of the worker; one of an earlier life, or below zero, does not."""
        worker = self.workers.get(load.worker)
        if worker is None or worker.hello.incarnation != load.incarnation:
            return
        if min(load.queued, load.queued_tokens, load.running, load.context_tokens, load.free_blocks) < 0:
            self.refused["load"] += 1
            return
        if load.role != "decode" or not worker.hello.elastic:
            worker.load, worker.load_s = load, now
        if load.role != "prefill" or not worker.hello.elastic:
            worker.decode_load, worker.decode_load_s = load, now
        worker.changed()
        if load.role == "prefill":
            self._compare(worker, load, now)
        if load.queued or load.running or load.queued_tokens:
            return
        settled_s = now - self._policy.settle_s
        if load.role == "prefill":
            for job in [job for job in worker.prefilling.values() if job.placed_s < settled_s]:
                self._prefilled(job, now)
        if load.role == "decode":
            for job in list(worker.decoding.values()):
                if job.prefilled_s is not None and job.prefilled_s < settled_s:
                    self.release(job.request, now=now)

    def answered(self, completion_tokens: int, tenant: str, request: RequestId) -> None:
        """A tenant's request ended by itself after so many tokens."""
        begins = self._begins.pop(request, ())
        if completion_tokens < 0:
            self.refused["answer"] += 1
        else:
            self.answers.observe(completion_tokens, tenant, begins)

    def _compare(self, worker: Worker, load: Load, now: float) -> None:
        """What the worker counts and we do not is unexplained; what we count and it does not, it has computed."""
        worker.account(now)
        ranked = worker.ranked()
        aside = [job for job in ranked[1:] if job.started_s is not None]
        reached = [*aside, *ranked[:1], *(job for job in ranked[1:] if job.started_s is None)]
        if load.queued + load.running < len(reached):  # some are still on their way, or lost
            reached = [job for job in reached if job.placed_s < now - self._policy.settle_s]
        ours = sum(job.counted_tokens for job in worker.prefilling.values())
        worker.unexplained_tokens = max(load.queued_tokens - ours, 0)
        computed = max(sum(job.counted_tokens for job in reached) - load.queued_tokens, 0)
        for job in reached:  # who was put aside is as far as it was; the one that runs is as far as the rest shows
            most, prompt = job.computed_tokens, {"num_tokens": job.num_tokens, "hit_tokens": job.hit_tokens}
            if job in aside:
                most = round(worker.costs.done_tokens(job.done_share, **prompt))
            done = min(computed, most)
            job.advance(worker.costs.done_share(done, **prompt), worker.order)
            computed -= done

    def sweep(self, now: float) -> list[RequestId]:
        """Forgets requests nobody reported on for too long; answers which."""
        old = [job.request for job in self.jobs.values()
               if now - max(job.placed_s, job.started_s or 0.0, job.prefilled_s or 0.0) > self._policy.job_ttl_s]
        for request in old:
            self.release(request, now=now)
        return old

    def _prefilled(self, job: Job, now: float) -> None:
        self._fetched(job)
        prefill = self.workers.get(job.prefill)
        if job.prefilled_s is None:
            job.prefilled_s = now
            if prefill is not None:
                prefill.account(now)
            if (decode := self.workers.get(job.decode)) is not None:
                decode.changed()
        if prefill is not None:
            prefill.prefilling.pop(job.request, None)
            prefill.changed()

    def _fetched(self, job: Job) -> None:
        """Nothing of the job is on the way to the prefill worker any more."""
        for owner_id, _ in job.fetches:
            if (owner := self.workers.get(owner_id)) is not None:
                owner.sending.pop(job.request, None)
                owner.changed()
        if job.fetches:
            job.fetches = []
            if (prefill := self.workers.get(job.prefill)) is not None:
                prefill.changed()


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that ``num_tokens`` fill, the last one perhaps in part."""
    return -(-num_tokens // block_tokens)
