"""The baseline: instances that do prefill and decode on the same GPUs, as vLLM of the paper's time does.

*Prefill first*: while a prompt waits and there is room for it and its answer, it is computed and the running answers
stand still. With *chunked* prefill every step computes a chunk of the oldest waiting prompt and one token of each
running answer; chunks take ``CHUNK_COST`` times as long as whole prompts. With *prefix cache* prompts reuse what is
left of others in the instance's own GPU memory. A request goes to the instance with the fewest unfinished tokens.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from load.sim.decode import Steps
from load.sim.loop import Loop
from load.sim.node import CHUNK_COST
from load.sim.outcome import Outcomes
from load.sim.profile import NodeProfile
from load.sim.request import Job
from shared.errors import UserError
from shared.ids import BlockKey
from shared.messages import StoredBlock
from shared.store.blocks import BlockPool

_ROOT = BlockKey(b"\xff" * 32)
"""No key of a trace, see :mod:`load.sim.cache`."""


@dataclass(frozen=True, kw_only=True)
class CoupledOptions:
    """What the instances are like."""

    profile: NodeProfile
    instances: int
    block_tokens: int
    has_prefix_cache: bool = False
    chunk_tokens: int = 0
    """Tokens of a prompt computed per step; 0: whole prompts, before everything else."""


class Instance:
    """One instance; see the module."""

    def __init__(self, options: CoupledOptions, loop: Loop, outcomes: Outcomes) -> None:
        self._options, self._profile, self._loop, self._outcomes = options, options.profile, loop, outcomes
        self._pool = BlockPool(options.profile.vram_tokens // options.block_tokens)
        self._steps = Steps()
        self._waiting: deque[Job] = deque()
        self._prefilling: Job | None = None
        self._running: list[tuple[int, int, Job]] = []
        self._order = 0
        self._context = 0
        self._stall_s = 0.0
        """Time the running answers have stood still since their last token."""
        self._version = 0
        self._since_s = 0.0
        self._since_step = 0
        self.unfinished_tokens = 0
        self.busy_s = 0.0

    def take(self, job: Job) -> None:
        """A request arrives."""
        job.arrived_s = self._loop.now
        self.unfinished_tokens += job.num_tokens + job.output_tokens
        self._waiting.append(job)
        if self._prefilling is not None:
            return
        if not self._running:
            self._turn()
        elif self._has_room(self._waiting[0]):  # the present step is brought to its end
            self._plan(self._steps_by(self._loop.now))

    # Room

    def _blocks(self, job: Job) -> int:
        return -(-(job.num_tokens + job.output_tokens) // self._options.block_tokens)

    def _has_room(self, job: Job) -> bool:
        return self._blocks(job) <= self._pool.available and len(self._running) < self._profile.max_running

    def _admit(self, job: Job) -> None:
        now = self._loop.now
        own = 0
        if self._options.has_prefix_cache:
            own = len(self._pool.pin(job.operation, job.keys[:job.reusable_blocks], now=now))
        allocation = self._pool.allocate(job.operation, self._blocks(job) - own, now=now)
        assert allocation is not None  # _has_room said so, and pins only take from what was needed anyway
        job.slots = allocation.slots
        job.hit_tokens = job.done_tokens = own * self._options.block_tokens
        job.started_s = now

    def _keep(self, job: Job) -> None:
        """The prompt's blocks can be reused from now on."""
        assert job.slots is not None
        first = job.hit_tokens // self._options.block_tokens
        for depth in range(first, len(job.keys)):
            self._pool.seal(job.operation, job.slots[depth - first], StoredBlock(
                key=job.keys[depth], parent=job.keys[depth - 1] if depth else _ROOT, depth=depth, nbytes=0),
                now=self._loop.now)

    # Steps

    def _turn(self) -> None:
        """Nothing runs: what next?"""
        job = self._prefilling
        if job is None and self._waiting and self._has_room(self._waiting[0]):
            job = self._prefilling = self._waiting.popleft()
            self._admit(job)
        if job is None:
            self._since_s, self._since_step = self._loop.now, self._steps.count
            if self._running:
                self._plan(self._running[0][0] - self._since_step)
            return
        profile, chunk = self._profile, self._options.chunk_tokens
        end = min(job.done_tokens + chunk, job.num_tokens) if chunk else job.num_tokens
        compute_s = profile.compute_s(job.done_tokens, end) * (CHUNK_COST if chunk else 1.0)
        if not job.computed_s:
            compute_s += profile.prefill_fixed_s
        job.done_tokens = end
        decode_s = 0.0
        if chunk and self._running:
            decode_s = self._step_s() - profile.decode_fixed_s  # the weights are read for the chunk anyway
        job.computed_s += compute_s + (decode_s if chunk else 0.0)
        self.busy_s += compute_s
        self._version += 1
        self._loop.after(compute_s + decode_s, self._computed, job, compute_s + decode_s)

    def _computed(self, job: Job, step_s: float) -> None:
        if self._options.chunk_tokens and self._running:
            self._steps.add(step_s + self._stall_s, 0.0, 1)
            self._context += len(self._running)
            self._stall_s = 0.0
        elif self._running:
            self._stall_s += step_s
        if job.done_tokens == job.num_tokens:
            self._prefilled(job)
        self._leave()
        self._turn()

    def _prefilled(self, job: Job) -> None:
        now = self._loop.now
        self._prefilling = None
        job.prefilled_s = job.first_s = job.joined_s = now
        job.generated = 1
        if self._options.has_prefix_cache:
            self._keep(job)
        self._outcomes.prefilled(job)
        job.join_step = self._steps.count
        job.finish_step = job.join_step + job.output_tokens - 1
        self._order += 1
        heapq.heappush(self._running, (job.finish_step, self._order, job))
        self._context += job.num_tokens

    def _step_s(self) -> float:
        profile = self._profile
        return (profile.decode_fixed_s + profile.decode_per_request_s * len(self._running)
                + profile.decode_per_context_token_s * self._context)

    def _growth_s(self) -> float:
        return self._profile.decode_per_context_token_s * len(self._running)

    def _plan(self, steps: int) -> None:
        """Nothing changes for ``steps`` steps."""
        self._version += 1
        end_s = self._since_s + steps * self._step_s() + self._growth_s() * steps * (steps - 1) / 2
        self._loop.at(end_s, self._stepped, self._version, steps)

    def _steps_by(self, at_s: float) -> int:
        """Steps of this stretch, the one that runs at ``at_s`` brought to its end."""
        steps, limit = 1, self._running[0][0] - self._since_step
        first, growth = self._step_s(), self._growth_s()
        while steps < limit and self._since_s + steps * first + growth * steps * (steps - 1) / 2 < at_s:
            steps += 1
        return steps

    def _stepped(self, version: int, steps: int) -> None:
        if version != self._version:
            return
        if steps:
            first_s = self._step_s()
            if self._stall_s:
                self._steps.add(first_s + self._stall_s, 0.0, 1)
                self._steps.add(first_s + self._growth_s(), self._growth_s(), steps - 1)
                self._stall_s = 0.0
            else:
                self._steps.add(first_s, self._growth_s(), steps)
            self._context += len(self._running) * steps
        self._leave()
        self._turn()

    def _leave(self) -> None:
        now, step = self._loop.now, self._steps.count
        while self._running and self._running[0][0] <= step:
            job = heapq.heappop(self._running)[2]
            self._context -= job.num_tokens + job.finish_step - job.join_step
            if job.output_tokens > 1:
                job.gap_s = self._steps.worst_s(job.join_step, job.finish_step)
            job.generated, job.finished_s = job.output_tokens, now
            self._pool.release(job.operation)
            self.unfinished_tokens -= job.num_tokens + job.output_tokens
            self._outcomes.complete(job)
        if self._steps.is_long:
            self._steps.forget(min((job.join_step for _, _, job in self._running), default=step))


class CoupledCluster:
    """Instances behind a router; offers the same as :class:`load.sim.cluster.Cluster`."""

    def __init__(self, loop: Loop, options: CoupledOptions, outcomes: Outcomes) -> None:
        if options.instances < 1:
            raise UserError(f"--coupled is {options.instances}; a cluster needs at least 1 instance")
        if options.profile.vram_tokens < 1:
            raise UserError(f"profile {options.profile.name}: the model does not fit the accelerator memory")
        self._loop = loop
        self.instances = [Instance(options, loop, outcomes) for _ in range(options.instances)]
        self.transferred_bytes = 0.0

    @property
    def busy_s(self) -> float:
        """GPU time of all prefills."""
        return sum(instance.busy_s for instance in self.instances)

    def offer(self, jobs: Iterable[Job]) -> None:
        """Requests arrive at their times, which must not go back."""
        self._arrive_next(iter(jobs))

    def _arrive_next(self, jobs: Iterator[Job]) -> None:
        job = next(jobs, None)
        if job is not None:
            self._loop.at(job.at_s, self._arrive, job, jobs)

    def _arrive(self, job: Job, jobs: Iterator[Job]) -> None:
        min(self.instances, key=lambda instance: instance.unfinished_tokens).take(job)
        self._arrive_next(jobs)
