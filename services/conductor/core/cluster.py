"""The workers and the work in flight on them, tracked at decisions, progress and ends; heartbeats only correct it."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable

from services.conductor.core.answers import Answers, Beginning
from services.conductor.core.estimate import Costs
from services.conductor.core.policy import Policy
from services.conductor.core.worker import Changes, Job, Worker
from shared.ids import RequestId, WorkerId
from shared.messages import Hello, Load, Placement, Progress, Source

_MOST_ASKED = 10_000
"""Requests whose beginnings are remembered until their answers end; the oldest goes first."""


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
