"""Which elastic workers prefill and which decode, by what the load needs.

What is needed
--------------

Both needs are in *workers*. Prompts arrive that take ``λ`` seconds of computing a second; ``B`` seconds are queued::

    prefill = λ / utilisation + B / horizon

Of a decode step ``f + r·batch + c·context``, ``f`` is there for nobody in particular. With steps that may take ``s``
seconds, a share ``1 - f/s`` of a worker is left to the answers. An answer of ``L`` tokens after a prompt of ``n`` takes
``L·(r + c·(n + L/2))`` of that, whatever its batch; these arrive at ``δ`` seconds a second. What is there already, with
``batch`` and ``context`` over all workers, has to fit too, and so has its memory::

    decode = max(δ / (1 - f/s), (r·batch + c·context) / (s - f), blocks in use / (fill · blocks of a worker))

Where both together are more than there are workers, prefill is what limits: no more answers come than it lets through,
and the first of the three is taken in that proportion.

Who does what
-------------

Workers are put in one order that all conductors know: those with the home role prefill by id, then those with the home
role decode, by id backwards. The first so many prefill, the others decode; so two conductors that count the same agree.
Everybody is at home until prefill needs more workers than have it as home role, or decode does; then the needed ones
change sides, decode first, since answers that are under way suffer at once and prompts merely wait.

A need counts as the most it was in the last ``window_s``, and becomes less only when it has fallen by more than one
worker: so a worker that was called does not go home before the load has been lower for a while.

There is no switch message. A worker that is to prefill gets no new answers, and its first prompts when its running ones
leave enough of it to spare. One that is to decode gets no new prompts, and answers at once: they come after a prefill.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.conductor.core.cluster import Worker
from shared.ids import WorkerId


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The numbers it goes by; all ``_s`` are seconds."""

    utilisation: float = 0.45
    """Share of the prefill workers' time that arriving prompts shall take: more, and they wait for each other."""
    full: float = 0.95
    """The same at the most."""
    horizon_s: float = 10.0
    """Time in which what is queued shall be computed."""
    soon_s: float = 5.0
    """Answers whose prefill is predicted to end within this time count."""
    stretch: float = 2.5
    """Steps may take so many times a lone request's, where no bound is known."""
    bound_share: float = 0.7
    """Steps may take this share of the bound on the time between tokens."""
    fill: float = 0.8
    """Share of decode memory that may be in use."""
    aside: float = 0.6
    """A worker whose step takes up to this share of what it may takes prompts beside its answers."""
    rate_s: float = 60.0
    """What arrived longer ago weighs less than 1/e."""
    window_s: float = 30.0
    """Needs are the most they were in this time."""
    slack: float = 0.25
    """A need must be so much lower than one worker less before that one goes."""
    look_s: float = 1.0
    """Pause between two looks."""


@dataclass(frozen=True)
class Need:
    """What the load needs, with the terms."""

    prefill_rate: float
    """Seconds of prefill computing that arrive a second."""
    queued_s: float
    """Seconds of it that are queued, over all workers."""
    decode_rate: float
    """Seconds of decode steps that arriving answers take a second, the fixed part of a step left out."""
    step_s: float
    """The fixed part of a step."""
    step_limit_s: float
    """What a step may take."""
    batch: int
    """Answers running and on their way, over all workers."""
    context_tokens: int
    """Tokens of context of these."""
    memory: float
    """Decode workers whose memory these fill."""
    prefill: float
    """Prefill workers needed."""
    decode: float
    """Decode workers needed."""


@dataclass(frozen=True)
class Advice:
    """Whether the ratio of prefill to decode workers fits the load, and what it should be."""

    need: Need
    prefill: int
    """Workers that prefill now."""
    decode: int
    """Workers that decode now."""
    best_prefill: int
    """Of the same number of workers, how many should prefill."""
    best_decode: int
    is_wrong: bool
    """Whether one side has less than it needs while the other has workers to spare."""
    is_short: bool
    """Whether the load needs more workers than there are, whatever they do."""


@dataclass
class _Rate:
    """Seconds of work that arrive a second, weighing the last ``over_s`` most."""

    over_s: float
    since_s: float
    work_s: float = 0.0
    at_s: float = 0.0

    def add(self, work_s: float, now: float) -> None:
        self.work_s = self.work_s * math.exp((self.at_s - now) / self.over_s) + work_s
        self.at_s = now

    def get(self, now: float) -> float:
        """Mean over the time it knows; a burst at the start is not taken for a flood."""
        known_s = now - self.since_s + _FIRST_S
        seen_s = self.over_s * (1.0 - math.exp(-known_s / self.over_s))
        return self.work_s * math.exp((self.at_s - now) / self.over_s) / seen_s


_FIRST_S = 5.0
"""The first work is taken to be that of so many seconds."""


@dataclass
class _Peak:
    """The whole workers that are needed: at once when more are, later when fewer are."""

    window_s: float
    slack: float
    workers: int = 0
    #: (when, need), falling
    _seen: deque[tuple[float, float]] = field(default_factory=deque)

    def take(self, need: float, now: float) -> int:
        seen = self._seen
        while seen and seen[-1][1] <= need:
            seen.pop()
        seen.append((now, need))
        while seen[0][0] < now - self.window_s:
            seen.popleft()
        most = seen[0][1]
        if most > self.workers or most < self.workers - 1 - self.slack:
            self.workers = math.ceil(most)
        return self.workers


class Roles:
    """The workers of one cache spec. State: what arrived lately, what was needed lately."""

    def __init__(self, *, tbt_slo_s: float | None, now: float, rules: Rules | None = None) -> None:
        self._rules = rules = rules or Rules()
        self._tbt_slo_s = tbt_slo_s
        self._prefill_rate, self._decode_rate = _Rate(rules.rate_s, now), _Rate(rules.rate_s, now)
        self._prefill, self._decode = (_Peak(rules.window_s, rules.slack) for _ in range(2))
        self.next_look_s = -math.inf
        """When :meth:`look` looks again."""
        self._step_limit_s = math.inf
        #: who was to prefill and to decode at the last look
        self._before: tuple[list[WorkerId], list[WorkerId]] = ([], [])

    def asked(self, *, prefill_s: float, decode_s: float, now: float) -> None:
        """A request was placed: seconds of computing its prompt, and of decode steps for its answer."""
        if math.isfinite(prefill_s) and math.isfinite(decode_s):
            self._prefill_rate.add(max(prefill_s, 0.0), now)
            self._decode_rate.add(max(decode_s, 0.0), now)

    def need(self, workers: Sequence[Worker], now: float) -> Need:
        """What the load needs; ``workers`` are those that may get work, and are not empty."""
        rules = self._rules
        step_s, request_s, token_s = (
            sum(worker.costs.decode[term] for worker in workers) / len(workers) for term in range(3))
        limit_s = rules.stretch * (step_s + request_s)
        if self._tbt_slo_s is not None:
            limit_s = max(rules.bound_share * self._tbt_slo_s, 1.1 * step_s)
        soon = [worker.decoding_soon(now + rules.soon_s) for worker in workers]
        batch = sum(requests for requests, _ in soon)
        context_tokens = sum(tokens for _, tokens in soon)
        room = [worker.hello.capacity_blocks * worker.hello.spec.block_tokens
                for worker in workers if worker.does("decode")]
        memory = context_tokens / max(sum(room) / max(len(room), 1), 1.0)
        prefill_rate, decode_rate = self._prefill_rate.get(now), self._decode_rate.get(now)
        queued_s = sum(worker.queue_s(now) for worker in workers if worker.does("prefill"))
        flow = decode_rate / (1.0 - step_s / limit_s)
        both = prefill_rate / rules.full + flow
        if both > len(workers):
            flow *= len(workers) / both
        return Need(
            prefill_rate=prefill_rate, queued_s=queued_s, decode_rate=decode_rate, step_s=step_s,
            step_limit_s=limit_s, batch=batch, context_tokens=context_tokens, memory=memory,
            prefill=prefill_rate / rules.utilisation + queued_s / rules.horizon_s,
            decode=max(flow, (request_s * batch + token_s * context_tokens) / (limit_s - step_s),
                       memory / rules.fill))

    def look(self, workers: Sequence[Worker], now: float) -> bool:
        """Looks at the load when it is time to; answers whether :meth:`split` may be another one now."""
        if now < self.next_look_s:
            return False
        self.next_look_s = now + self._rules.look_s
        need = self.need(workers, now)
        self._prefill.take(need.prefill, now)
        self._decode.take(need.decode, now)
        self._step_limit_s = need.step_limit_s
        prefill, decode = self.split(workers)
        split = [worker.id for worker in prefill], [worker.id for worker in decode]
        before, self._before = self._before, split
        return split != before

    def split(self, workers: Sequence[Worker]) -> tuple[list[Worker], list[Worker]]:
        """Who may get new prompts and who new answers, of these workers; as was right at the last look."""
        line = in_line(workers)
        count = self._count(line)
        return [worker for worker in line[:count] if self._may_prefill(worker)] or line[:count], line[count:]

    def advice(self, workers: Sequence[Worker], now: float) -> Advice:
        """Whether the ratio fits, be the workers elastic or not; changes nothing."""
        need, line = self.need(workers, now), in_line(workers)
        prefill = self._count(line)
        decode = len(line) - prefill
        both = need.prefill + need.decode
        best = min(max(round(len(line) * need.prefill / both), 1), len(line) - 1) if both > 0 else prefill
        is_wrong = ((need.prefill > prefill and need.decode <= decode - 1)
                    or (need.decode > decode and need.prefill <= prefill - 1))
        is_short = need.prefill_rate / self._rules.full + need.decode > len(line)
        return Advice(need, prefill, decode, best if is_wrong else prefill,
                      len(line) - best if is_wrong else decode, is_wrong, is_short)

    def _count(self, line: Sequence[Worker]) -> int:
        """How many of the line prefill: at least one, and not all, where that can be."""
        home = sum(worker.hello.role == "prefill" for worker in line)
        least = max(sum(not worker.does("decode") for worker in line), 1)
        most = min(sum(worker.does("prefill") for worker in line), len(line) - 1)
        wanted = min(max(home, self._prefill.workers), len(line) - self._decode.workers)
        return max(min(wanted, most), least)

    def _may_prefill(self, worker: Worker) -> bool:
        """Whether its answers leave enough of it."""
        if not worker.does("decode") or not worker.batch():
            return True
        step_s = worker.costs.step_s(batch=worker.batch(), context_tokens=worker.context_tokens())
        return step_s <= self._rules.aside * self._step_limit_s


def in_line(workers: Sequence[Worker]) -> list[Worker]:
    """The order in which workers are taken for prefill: those that can do nothing else, then those at home there, then
    those at home in decode, backwards, and last those that can do nothing but decode."""
    def place(worker: Worker) -> int:
        at_home = 1 if worker.hello.role == "prefill" else 2
        return at_home if worker.hello.elastic else 3 * (at_home - 1)

    line = sorted(workers, key=lambda worker: worker.id)
    prefill, decode = ([worker for worker in line if worker.hello.role == role] for role in ("prefill", "decode"))
    return sorted([*prefill, *reversed(decode)], key=place)
