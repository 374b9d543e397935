"""Continuous batching, advanced from change to change instead of from token to token.

Between two changes of the batch its steps get longer by the same amount each, since every request's context grows by
one: so where the batch is at any time, and when its next request is done, is a formula. A request joins at the next
step boundary if there is a seat and room for its prompt and its whole answer; else it waits, first come first served.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from load.sim.profile import NodeProfile
from load.sim.request import Job
from shared.store.events import EventLog

if TYPE_CHECKING:
    from load.sim.loop import Loop
    from load.sim.node import Life, SharedGpus
    from shared.messages import Load, Progress

_KEPT_STEPS = 8_192
WORST_SHARE = 0.1
"""A request's TBT is the mean of this share of its gaps, the longest ones."""


_PROMPT_SHARE = 0.15
"""Of the memory for KV, kept free for the prompt being computed on a node that does both."""


def room_tokens(profile: NodeProfile, *, is_shared: bool) -> int:
    """Tokens of KV that a decode node has room for; a node that prefills too leaves some to the prompts."""
    return int(profile.vram_tokens * (1 - _PROMPT_SHARE)) if is_shared else profile.vram_tokens


class Steps:
    """How long each of a node's steps took, as far back as somebody may still ask."""

    def __init__(self) -> None:
        self._seconds: npt.NDArray[np.float64] = np.empty(_KEPT_STEPS)
        self._first = 0
        self.count = 0
        """Steps so far."""

    def add(self, first_s: float, growth_s: float, count: int) -> None:
        """``count`` steps, the first of ``first_s`` seconds, each ``growth_s`` longer than the one before."""
        start = self.count - self._first
        if start + count > len(self._seconds):
            grown = np.empty(2 * (start + count))
            grown[:start] = self._seconds[:start]
            self._seconds = grown
        self._seconds[start:start + count] = first_s + growth_s * np.arange(count)
        self.count += count

    @property
    def is_long(self) -> bool:
        """Whether there is much to forget."""
        return self.count - self._first > _KEPT_STEPS

    def forget(self, before: int) -> None:
        """Nobody will ask for steps before this one."""
        self._seconds = np.concatenate([self._seconds[before - self._first:self.count - self._first],
                                        np.empty(_KEPT_STEPS)])
        self._first = before

    def worst_s(self, start: int, end: int, *, waited_s: float = 0.0) -> float:
        """Mean of the longest tenth of the gaps of a request that joined at step ``start`` and ended with ``end``.

        ``waited_s`` passed between its first token, which the prefill brought, and its joining.
        """
        gaps = self._seconds[start - self._first:end - self._first].copy()
        gaps[0] += waited_s
        worst = math.ceil(len(gaps) * WORST_SHARE)
        return float(np.mean(np.partition(gaps, len(gaps) - worst)[len(gaps) - worst:]))


class DecodeNode:
    """One life of one decode node. ``finished`` is called with each request whose answer is complete."""

    def __init__(self, life: Life, loop: Loop, profile: NodeProfile, finished: Callable[[Job], None], *,
                 log: EventLog | None = None, gpus: SharedGpus | None = None) -> None:
        """``log`` announces the node's blocks, if it has a cache; with ``gpus`` it shares them with a prefill node."""
        self.life, self.port = life, life.port
        self._loop, self._profile, self._finished, self._gpus = loop, profile, finished, gpus
        self._room_tokens = room_tokens(profile, is_shared=gpus is not None)
        self._block_tokens = life.hello.spec.block_tokens
        self.steps = Steps()
        #: requests whose KV is on its way here, and those here that wait for a seat
        self._expected: dict[Job, None] = {}
        self._waiting: deque[Job] = deque()
        #: (step it ends with, order, request)
        self._running: list[tuple[int, int, Job]] = []
        self._order = 0
        self._context = 0
        """Tokens of context of the running requests, at the beginning of the stretch."""
        self._used_tokens = 0
        self._since_s = 0.0
        """When this stretch of equal membership began."""
        self._since_step = 0
        self._version = 0
        self._pace = self._share = 1.0
        self.sums = (0.0, 0, 0)
        """Over all steps so far: seconds, without those of prompts in between, requests, and tokens of context."""
        self.is_dead = False
        hello = life.hello
        self.log = log or EventLog(hello.worker, hello.incarnation, hello.spec.digest, list)
        """A decode node without a cache announces no blocks: nobody reuses its memory in a simulation."""

    # Work

    def expect(self, job: Job) -> None:
        """A request was placed here; its KV takes room from when its prefill starts."""
        self._expected[job] = None

    def forget(self, job: Job) -> None:
        """Its KV will not come."""
        self._expected.pop(job, None)

    def join(self, job: Job) -> None:
        """All its KV is here."""
        self.forget(job)
        self._waiting.append(job)
        self._look()

    @property
    def used_share(self) -> float:
        """Of its room, what the running requests take with all of their answers."""
        return self._used_tokens / self._room_tokens

    def step_s(self, batch: int, context: float) -> float:
        """A step of such a batch."""
        profile = self._profile
        return self._pace * self._share * (profile.decode_fixed_s + profile.decode_per_request_s * batch
                             + profile.decode_per_context_token_s * context)

    def predicted_step_s(self, job: Job) -> float:
        """The next step with ``job`` in it, as the node itself sees it when the KV has come."""
        batch = len(self._running) + len(self._waiting) + 1
        waiting = sum(other.num_tokens for other in self._waiting)
        return self.step_s(batch, self.context_tokens + waiting + job.num_tokens)

    @property
    def batch(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def context_tokens(self) -> int:
        """Tokens of context of the batch."""
        return self._context + len(self._running) * self._step_by(self._loop.now, whole=False)

    def finished(self, job: Job) -> Progress:
        """Its answer is complete; what the steps it was in were like on average."""
        steps = job.finish_step - job.join_step
        own_s, requests, tokens = (now - then for now, then in zip(self.sums, job.join_sums, strict=True))
        return self.life.progress(job, "finished", batch=max(round(requests / steps), 1) if steps else 1,
                                  context_tokens=round(tokens / steps) if steps else 0,
                                  step_s=own_s / steps if steps else 0.0)

    def load(self) -> Load:
        """The heartbeat."""
        free = self._room_tokens - self._used_tokens
        free -= sum(job.num_tokens for job in self._expected if job.started_s >= 0)
        free -= sum(job.num_tokens for job in self._waiting)
        return self.life.load(kv_seq=self.log.seq, queued=len(self._expected) + len(self._waiting),
                              running=len(self._running), context_tokens=self.context_tokens,
                              free_blocks=max(free, 0) // self._block_tokens)

    def die(self) -> list[Job]:
        """The node is gone; the requests that were here or on their way, with ``generated`` brought up to date."""
        self._advance(self._step_by(self._loop.now, whole=False))
        self.is_dead = True
        self._version += 1
        lost = [*self._expected, *self._waiting]
        for end, _, job in self._running:
            job.generated = job.output_tokens - (end - self.steps.count)
            lost.append(job)
        self._expected.clear()
        self._waiting.clear()
        self._running.clear()
        return lost

    def set_pace(self, pace: float, share: float = 1.0) -> None:
        """From now on steps take ``pace`` times as long as the profile says, and with what is computed in between
        ``share`` times that."""
        now = self._loop.now
        if self._running:  # of a step that is under way, the rest takes longer or shorter
            exact = self._exact_steps_by(now)
            whole = math.floor(exact + 1e-9)
            self._advance(whole)
            self._pace, self._share = pace, share
            self._since_s = now - max(exact - whole, 0.0) * self.step_s(len(self._running), self._context)
        self._pace, self._share = pace, share
        self._plan()

    # Time

    def _look(self) -> None:
        """Something waits: it can join at the end of the present step."""
        if not self._running:
            self._since_s = self._loop.now
            self._turn(self._version)
        elif self._fits(self._waiting[0]):
            self._plan()

    def _fits(self, job: Job) -> bool:
        profile = self._profile
        return (len(self._running) < profile.max_running
                and self._used_tokens + job.num_tokens + job.output_tokens <= self._room_tokens)

    def _at(self, steps: int) -> float:
        """When ``steps`` steps of this stretch are done."""
        batch = len(self._running)
        growth_s = self._pace * self._share * self._profile.decode_per_context_token_s * batch
        return self._since_s + steps * self.step_s(batch, self._context) + growth_s * steps * (steps - 1) / 2

    def _step_by(self, at_s: float, *, whole: bool) -> int:
        """Steps of this stretch that are done by ``at_s``; with ``whole`` the running one is brought to its end."""
        exact = self._exact_steps_by(at_s)
        return math.ceil(exact - 1e-9) if whole else math.floor(exact + 1e-9)

    def _exact_steps_by(self, at_s: float) -> float:
        batch = len(self._running)
        if not batch:
            return 0.0
        half = self._pace * self._share * self._profile.decode_per_context_token_s * batch / 2
        first = self.step_s(batch, self._context) - half
        spent_s = max(at_s - self._since_s, 0.0)
        return (-first + math.sqrt(first * first + 4 * half * spent_s)) / (2 * half) if half else spent_s / first

    def _plan(self) -> None:
        """Calls :meth:`_turn` when the batch changes next."""
        self._version += 1
        if not self._running:
            return
        steps = self._running[0][0] - self._since_step
        if self._waiting and self._fits(self._waiting[0]):
            steps = min(steps, max(self._step_by(self._loop.now, whole=True), 1))
        self._loop.at(self._at(steps), self._turn_after, self._version, steps)

    def _turn_after(self, version: int, steps: int) -> None:
        if version == self._version and not self.is_dead:
            self._advance(steps)
            self._since_s = self._loop.now
            self._turn(version)

    def _advance(self, steps: int) -> None:
        batch = len(self._running)
        if steps <= 0 or not batch:
            return
        growth_s = self._pace * self._share * self._profile.decode_per_context_token_s * batch
        first_s = self.step_s(batch, self._context)
        self.steps.add(first_s, growth_s, steps)
        own_s, requests, tokens = self.sums
        pairs = steps * (steps - 1) // 2
        self.sums = (own_s + (steps * first_s + growth_s * pairs) / self._share, requests + steps * batch,
                     tokens + steps * self._context + batch * pairs)
        self._context += batch * steps
        self._since_step = self.steps.count

    def _turn(self, version: int) -> None:
        """A step is over: who is done leaves, who waits joins."""
        now, step = self._loop.now, self.steps.count
        done = []
        while self._running and self._running[0][0] <= step:
            job = heapq.heappop(self._running)[2]
            self._context -= job.num_tokens + job.output_tokens - 1
            self._used_tokens -= job.num_tokens + job.output_tokens
            done.append(job)
        while self._waiting and self._fits(self._waiting[0]):
            job = self._waiting.popleft()
            job.joined_s, job.join_step, job.join_sums = now, step, self.sums
            job.finish_step = step + job.output_tokens - 1
            self._order += 1
            heapq.heappush(self._running, (job.finish_step, self._order, job))
            self._context += job.num_tokens
            self._used_tokens += job.num_tokens + job.output_tokens
        self._since_step = step
        self._plan()
        if self._gpus is not None:
            self._gpus.changed()
        for job in done:
            waited_s = job.joined_s - job.first_s if not job.attempt else 0.0
            job.gap_s = self.steps.worst_s(job.join_step, job.finish_step, waited_s=waited_s)
            job.generated = job.output_tokens
            job.finished_s = now
            self._finished(job)
        if done and self.steps.is_long:
            self.steps.forget(min((job.join_step for _, _, job in self._running), default=step))
