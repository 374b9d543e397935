"""The workers and the work in flight on them, tracked at decisions, progress and ends; heartbeats only correct it.

A *job* is one request on its way: it burdens its prefill worker until it is prefilled and its decode worker until it
is done. What a worker is burdened with is summed over its jobs when asked, so nothing can drift. A heartbeat corrects
in both directions: tokens that the worker counts and no job explains (another conductor's, or from before our start)
are *unexplained* and add to its queue; jobs that should long be there while the worker says it is idle are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.conductor.core.estimate import Costs
from services.conductor.core.policy import Policy
from shared.ids import RequestId, SpecDigest, WorkerId
from shared.messages import Hello, Load, Placement, Progress, Source

_LEAST_REMAINING = 0.1
"""A prefill that runs longer than predicted still counts for this share of its prediction."""

_REACH_S = 0.2
"""A heartbeat cannot yet count a job decided less than this before it came."""

_FIRST_ANSWER_TOKENS = 256.0
"""Length of an answer before any was seen."""


@dataclass
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
    fetches: list[tuple[WorkerId, int]] = field(default_factory=list)
    """(owner, bytes) still to be pulled by the prefill worker."""
    fetch_same_host: bool | None = None
    """Whether all owners share the prefill worker's host; ``None`` when some do."""
    fetch_ahead_bytes: int = 0
    """Bytes that were under way on the link when this was decided."""
    done_share: float = 0.0
    """How much of its prefill the worker's last heartbeat shows as computed."""
    started_s: float | None = None
    prefilled_s: float | None = None

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that have to be computed."""
        return self.num_tokens - self.hit_tokens


@dataclass
class Worker:
    """One live worker: what it said, what it costs, what it was given."""

    hello: Hello
    spec: SpecDigest
    costs: Costs
    load: Load | None = None
    load_s: float = 0.0
    #: prompt tokens its last heartbeat counts and no job explains
    unexplained_tokens: int = 0
    #: {request: job}: not yet prefilled on this prefill worker / not yet done on this decode worker
    prefilling: dict[RequestId, Job] = field(default_factory=dict)
    decoding: dict[RequestId, Job] = field(default_factory=dict)
    #: {request: bytes} this worker has to send to others
    sending: dict[RequestId, int] = field(default_factory=dict)
    #: when the last prefill here was over: the next one in line began then
    prefilled_s: float = -math.inf
    #: smoothed seconds from prefilled to done on this decode worker; ``None`` before the first
    residence_s: float | None = None
    #: when its pace was learnt from last
    taught_s: float = -math.inf
    #: answer length to expect of any request, in tokens
    answer_tokens: float = _FIRST_ANSWER_TOKENS

    @property
    def id(self) -> WorkerId:
        """Its worker id."""
        return self.hello.worker

    def queue_s(self, now: float) -> float:
        """Predicted seconds until a new prompt's computing starts here."""
        known_s = sum(job.work_s * (1.0 - job.done_share) for job in self.prefilling.values())
        if (head := next(iter(self.prefilling.values()), None)) is not None:
            since_s = max(head.started_s or head.placed_s, self.prefilled_s)
            if head.done_share:
                since_s = max(since_s, self.load_s)
            left_s = head.work_s * (1.0 - head.done_share)
            known_s += max(left_s - (now - since_s), min(left_s, head.work_s * _LEAST_REMAINING)) - left_s
        if not self.unexplained_tokens:
            return known_s
        unexplained_s = self.costs.prefill_s(num_tokens=self.unexplained_tokens, hit_tokens=0)
        return known_s + max(unexplained_s - (now - self.load_s), 0.0)

    def receiving_bytes(self) -> int:
        """Bytes under way to this worker."""
        return sum(nbytes for job in self.prefilling.values() for _, nbytes in job.fetches)

    def sending_bytes(self) -> int:
        """Bytes under way from this worker."""
        return sum(self.sending.values())

    def batch(self) -> int:
        """Requests decoding here or on their way."""
        running = self.load.running + self.load.queued if self.load is not None else 0
        return max(len(self.decoding), running + sum(1 for _ in self._unseen()))

    def context_tokens(self) -> int:
        """Tokens of context of all of them."""
        ours = sum(job.num_tokens for job in self.decoding.values())
        theirs = self.load.context_tokens if self.load is not None else 0
        return max(ours, theirs + sum(job.num_tokens for job in self._unseen()))

    def free_blocks(self) -> int:
        """Slots for a new request's prompt and answer, those of jobs on their way taken off."""
        if self.load is None:
            return self.hello.capacity_blocks - sum(map(self.reserved_blocks, self.decoding.values()))
        return self.load.free_blocks - sum(map(self.reserved_blocks, self._unseen()))

    def reserved_blocks(self, job: Job) -> int:
        """Slots a job is expected to take: its prompt, and an answer of the usual length."""
        return self.needed_blocks(job.num_tokens, job.max_tokens)

    def needed_blocks(self, num_tokens: int, max_tokens: int) -> int:
        """Slots for such a request. Decode reserves the prompt only; answers rarely reach ``max_tokens``."""
        return blocks_for(num_tokens + min(max_tokens, round(self.answer_tokens)), self.hello.spec.block_tokens)

    def residence_of(self, job: Job) -> float:
        """Predicted seconds from prefilled to done: what is usual here, or the usual answer at the present pace."""
        step_s = self.costs.step_s(batch=max(len(self.decoding), 1), context_tokens=self.context_tokens())
        longest_s = max(min(job.max_tokens, self.answer_tokens), 1.0) * step_s
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

    def _unseen(self) -> Iterable[Job]:
        """Jobs decided after the last heartbeat left: it cannot count them."""
        return (job for job in self.decoding.values() if job.placed_s > self.load_s - _REACH_S)


class Cluster:
    """{worker id: worker} and {request: job}."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.workers: dict[WorkerId, Worker] = {}
        self.jobs: dict[RequestId, Job] = {}

    def join(self, hello: Hello) -> None:
        """A worker begins a life: it has no work and its profile is all that is known of its speed."""
        self.leave(hello.worker)
        self.workers[hello.worker] = Worker(hello, hello.spec.digest, Costs(hello.profile))

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
        return lost

    def place(self, placement: Placement, *, num_tokens: int, max_tokens: int, now: float) -> None:
        """A decision was made, here or by another conductor; it replaces the request's former one."""
        self.release(placement.request, now=now)
        prefill, decode = self.workers.get(placement.prefill), self.workers.get(placement.decode)
        job = Job(placement.request, placement.attempt, placement.prefill, placement.decode, num_tokens, max_tokens,
                  placement.hit_tokens, placement.predicted_prefill_s, now)
        if prefill is not None:
            block_bytes = prefill.hello.spec.block_bytes
            job.fetch_ahead_bytes, job.fetch_same_host = self.link(prefill, placement.sources)
            for source in placement.sources:
                nbytes = source.num_blocks * block_bytes
                job.fetches.append((source.owner, nbytes))
                if (owner := self.workers.get(source.owner)) is not None:
                    owner.sending[job.request] = owner.sending.get(job.request, 0) + nbytes
            prefill.prefilling[job.request] = job
        if decode is not None:
            decode.decoding[job.request] = job
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
        if (decode := self.workers.get(job.decode)) is not None:
            decode.decoding.pop(request, None)
            if job.prefilled_s is not None:
                here_s = now - job.prefilled_s
                known_s = decode.residence_s
                decode.residence_s = here_s if known_s is None else 0.9 * known_s + 0.1 * here_s
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
                job.started_s = now
                if prefill is not None and 0 <= progress.hit_tokens < progress.num_tokens:
                    job.hit_tokens = progress.hit_tokens
                    job.work_s = prefill.costs.prefill_s(num_tokens=progress.num_tokens, hit_tokens=progress.hit_tokens)
            case "prefilled" | "first_token":
                self._prefilled(job, now)
            case "finished" | "failed":
                self.release(progress.request, now=now)

    def _learn(self, progress: Progress, now: float) -> None:
        worker, stages = self.workers.get(progress.worker), progress.stages
        if worker is None:
            return
        if progress.stage == "prefilled" and stages is not None:
            if worker.costs.observe_prefill(
                    stages.prefill_s, num_tokens=progress.num_tokens, hit_tokens=stages.hit_tokens):
                worker.taught_s = now
            job = self.jobs.get(progress.request)
            if stages.fetched_bytes and job is not None and job.fetch_same_host is not None:
                worker.costs.observe_transfer(stages.fetch_s, stages.fetched_bytes + job.fetch_ahead_bytes,
                                              same_host=job.fetch_same_host)
        elif progress.stage == "finished" and worker.costs.observe_step(
                progress.step_s, batch=progress.batch, context_tokens=progress.context_tokens):
            worker.taught_s = now

    def load(self, load: Load, now: float) -> None:
        """A heartbeat corrects what is believed of the worker; one of an earlier life, or below zero, does not."""
        worker = self.workers.get(load.worker)
        if worker is None or worker.hello.incarnation != load.incarnation:
            return
        if min(load.queued, load.queued_tokens, load.running, load.context_tokens, load.free_blocks) < 0:
            return
        worker.load, worker.load_s = load, now
        if load.role == "prefill":
            self._compare(worker, load, now)
        if load.queued or load.running or load.queued_tokens:
            return
        settled_s = now - self._policy.settle_s
        for job in [job for job in worker.prefilling.values() if job.placed_s < settled_s]:
            self._prefilled(job, now)
        for job in list(worker.decoding.values()):
            if job.prefilled_s is not None and job.prefilled_s < settled_s:
                self.release(job.request, now=now)

    def answered(self, completion_tokens: int) -> None:
        """A request ended by itself after so many tokens."""
        for worker in self.workers.values():
            worker.answer_tokens = 0.95 * worker.answer_tokens + 0.05 * completion_tokens

    def _compare(self, worker: Worker, load: Load, now: float) -> None:
        """What the worker counts and we do not is unexplained; what we count and it does not, it has computed."""
        reached = list(worker.prefilling.values())
        if load.queued + load.running < len(reached):  # some are still on their way, or lost
            reached = [job for job in reached if job.placed_s < now - self._policy.settle_s]
        ours = sum(job.computed_tokens for job in worker.prefilling.values())
        worker.unexplained_tokens = max(load.queued_tokens - ours, 0)
        computed = max(sum(job.computed_tokens for job in reached) - load.queued_tokens, 0)
        for job in reached:
            done = min(computed, job.computed_tokens)
            job.done_share = done / job.computed_tokens if job.computed_tokens else 0.0
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
        if job.prefilled_s is None:
            job.prefilled_s = now
            if (worker := self.workers.get(job.prefill)) is not None:
                worker.prefilled_s = now
        if (prefill := self.workers.get(job.prefill)) is not None:
            prefill.prefilling.pop(job.request, None)

    def _fetched(self, job: Job) -> None:
        """Nothing of the job is on the way to the prefill worker any more."""
        for owner_id, _ in job.fetches:
            if (owner := self.workers.get(owner_id)) is not None:
                owner.sending.pop(job.request, None)
        job.fetches = []


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that ``num_tokens`` fill, the last one perhaps in part."""
    return -(-num_tokens // block_tokens)
