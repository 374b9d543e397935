"""One worker, and the work in flight on it.

A *job* is one request on its way: it burdens its prefill worker until it is prefilled and its decode worker until it
is done. What a worker is burdened with is summed over its jobs, again whenever one of them changes, so nothing can
drift; a decision, which looks at every worker, finds the sums made. A heartbeat corrects
in both directions: tokens that the worker counts and no job explains (another conductor's, or from before our start)
are *unexplained* and add to its queue; jobs that should long be there while the worker says it is idle are dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter, itemgetter
from typing import NamedTuple

from services.conductor.core.answers import Answers, Beginning
from services.conductor.core.estimate import Costs
from shared.errors import Bug
from shared.ids import RequestId, SpecDigest, WorkerId
from shared.messages import Hello, Load, Role
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

_MOST_CHANGES = 4096
"""Changes of workers at hand; who asks more rarely looks at all workers."""


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


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that ``num_tokens`` fill, the last one perhaps in part."""
    return -(-num_tokens // block_tokens)
