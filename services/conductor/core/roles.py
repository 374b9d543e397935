"""Which elastic workers prefill and which decode, by what the load needs; and whether fixed roles fit it.

What is needed
--------------

Both needs are in *workers*. Prompts arrive that take ``λ`` seconds of computing a second; ``B`` seconds are queued::

    prefill = λ / utilisation + B / horizon

Of a decode step, ``f + r·batch + c·context`` seconds, ``f`` is there for nobody in particular. What answers take of a
worker is ``1 - f/step``, and summed over the workers this is the same however they are spread: the fuller a batch, the
longer its steps and the fewer of them. If steps may take ``s`` seconds, a worker has ``1 - f/s`` for answers::

    decode = max(Σ (1 - f/step) / (1 - f/s), tokens of context / (fill · tokens a worker has room for))

Counted are answers that run and those whose prefill has begun. ``s`` is a share of the bound on the time between tokens
(see :class:`Rules`): the rest is for batches that turn out larger, and for the wait of a request until it joins one.

Who does what
-------------

Workers stand in one line that all conductors know: those at home in prefill by id, then those at home in decode by id
backwards. So many from its front prefill, the others decode: conductors that count the same agree. Everybody is at home
until a role needs more workers than are at home there; then the next in line change sides. Where there are not enough
for a crowd of prompts, decode has what it needs: prompts merely wait.

Where both are short
--------------------

When the load is more than all workers can do, these needs do not tell how to divide them. Prompts queue up without end,
while the answers that run are only those to prompts that are through; whom decode misses a little later has its own
queue of prompts to end first. Both roles count as short while, of ``N`` workers,
``(λ + B / backlog) / full + A > N``, and for a while after. ``A`` are those that answers to the prompts that arrive
will keep busy, by the lengths that are usual for these. ``P`` workers prefill ``P / λ`` of what arrives, so most is
served to its end by the whole number ``P`` that comes nearest to::

    P + max(D + spare · √D, M) = N,  D = P · computing of A / λ,  M = P · memory of A / λ

The root is for answers that come in crowds (square-root staffing: Halfin and Whitt, Operations Research 29, 1981); who
finds no room merely waits, so memory needs none. This *balance* hangs on what arrives, not on how much, so it is steady
while all else overflows. Then no more prefill than it says, or than are at home there; and decode leaves it so many.

Conductors that are replicas hear of the same placements, bounds and heartbeats. They may still disagree for as long as
a need is remembered: on what one heard and another did not (it came later, or a message was lost), and on whom one
called because its own request found no room. What then differs is where new work goes; a worker takes jobs of both
roles whoever sends them.

The need of prefill counts as the most it was in the last minutes, that of decode as the most its smoothed value was;
and a worker is sent home only when the need has fallen by more than one. So who was called stays for a while, and a
load that merely varies moves nobody.

There is no switch message. A worker that is to prefill gets no new answers, and its first prompts when its answers have
ended: beside them a long prompt would take more than twice as long. One that is to decode gets no new prompts, and its
first answers when few prompts are left.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.conductor.core.worker import Worker
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
    stretch: float = 4.0
    """Where there is no bound on the time between tokens, so many times a lone request's step is taken for it."""
    bound_share: float = 0.65
    """Steps may take this share of the bound at most; half of it where most answers are so short that what counts is
    the wait for their first step."""
    bounds: int = 50
    """Bounds of about so many requests make the mean one."""
    missed: float = 0.02
    """Share of answers that may exceed by that wait what is taken for the bound where there is none."""
    missed_asked: float = 0.001
    """The same of a bound that was asked for."""
    fill: float = 0.8
    """Share of decode memory that may be in use."""
    queue_s: float = 1.0
    """A worker with no more than this queued takes answers beside its prompts."""
    rate_s: float = 60.0
    """What arrived longer ago weighs less than 1/e."""
    window_s: float = 90.0
    """Needs are the most they were in this time."""
    smooth_s: float = 10.0
    """What was needed longer ago than this weighs less than 1/e in the need of decode."""
    slack: float = 0.25
    """A need must be so much below one worker less before that one goes home."""
    look_s: float = 1.0
    """Pause between two looks."""
    spare: float = 0.45
    """Where both roles are short, decode has so many times the root of the workers that it needs on average besides."""
    first_s: float = 30.0
    first_tokens: float = 512.0
    """In the first ``first_s`` answers are taken to have so many tokens at least, where that is not more than they may
    have: those that end first are short."""
    backlog_s: float = 60.0
    """Both roles are short where what arrives and what is queued, computed within this time, is too much."""


@dataclass(frozen=True)
class Need:
    """What the load needs, with the terms."""

    prefill_rate: float
    """Seconds of prefill computing that arrive a second."""
    queued_s: float
    """Seconds of it that are queued, over all workers."""
    decode_rate: float
    """Seconds of decode steps that answers take a second, over all workers, the fixed part of a step left out."""
    step_s: float
    """The fixed part of a step."""
    step_limit_s: float
    """What a step may take."""
    batch: int
    """Answers that run or whose prefill has begun, over all workers."""
    context_tokens: int
    """Tokens of context of these."""
    memory: float
    """Decode workers whose memory these fill."""
    prefill: float
    """Prefill workers needed."""
    decode: float
    """Decode workers needed."""
    answers: float
    """Decode workers that answers to the prompts that arrive will need on average, if all of these are prefilled."""
    answers_memory: float
    """The same, whose memory they need."""


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
    """Whether one side has less than it needs while the other has workers to spare; while ``is_short``, whether fewer
    prefill than the balance says, or more while decode lacks some."""
    is_short: bool
    """Whether the load needs more workers than there are, whatever they do, or did in the last ``Rules.window_s``; then
    the best is the balance."""


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


_NEARLY = 0.95
"""A balance by which this share of what is possible is served is left as it is."""
_FIRST_S = 5.0
"""The first work is taken to be that of so many seconds."""


@dataclass
class _Peak:
    """The whole workers that are needed: at once when more are, later when fewer are."""

    window_s: float
    slack: float
    smooth_s: float
    workers: int = 0
    #: (when, need), falling
    _seen: deque[tuple[float, float]] = field(default_factory=deque)
    _mean: float = 0.0
    _at_s: float = -math.inf

    def take(self, need: float, now: float, *, least: float = 0.0) -> int:
        """``least`` is needed at once, of ``need`` a smoothed part."""
        if self.smooth_s:
            old = math.exp((self._at_s - now) / self.smooth_s)
            self._mean, self._at_s = old * self._mean + (1.0 - old) * need, now
            need = max(self._mean, least)
        return self.raise_to(need, now)

    def raise_to(self, need: float, now: float) -> int:
        """So much is needed now, at least; the mean knows nothing of it."""
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
        """``tbt_slo_s`` is the bound of requests that bring none."""
        self._rules = rules = rules or Rules()
        self._tbt_slo_s = tbt_slo_s
        #: share of the requests that brought a bound, and 1/bound of these, 0 of others; both smoothed
        self._bounded_share = self._bounds = 0.0
        self._since_s = now
        self._prefill_rate = _Rate(rules.rate_s, now)
        #: steps of expected answers that arrive a second, and tokens of context in all of these
        self._step_rate, self._context_rate = _Rate(rules.rate_s, now), _Rate(rules.rate_s, now)
        self._prefill = _Peak(rules.window_s, rules.slack, 0.0)
        self._decode = _Peak(rules.window_s, rules.slack, rules.smooth_s)
        self.version = 0
        """Counts changes of what :meth:`split` answers for the same workers."""
        self._look_s = -math.inf
        self._called_s = -math.inf
        #: who was called to decode for want of room and has not been sent back, the latest first
        self._called: list[WorkerId] = []
        self._need: Need | None = None
        self._most = 0
        """No more workers are called to prefill than this."""
        self._short_until_s = -math.inf
        self._is_short = False
        """Whether both roles were short lately."""
        self._balanced = 0
        """So many should prefill then; 0 before anything arrived."""
        #: who was to prefill and to decode at the last look
        self._last: tuple[list[WorkerId], list[WorkerId]] = ([], [])

    def asked(self, prefill_s: float, now: float, *, num_tokens: int = 0, answer_tokens: float = 0.0,
              max_tokens: float = 0.0) -> None:
        """A request was placed whose prompt of ``num_tokens`` takes so long to compute, and whose answer is usually so
        long, and at most ``max_tokens``."""
        if not math.isfinite(prefill_s):
            return
        steps = max(answer_tokens, 0.0)  # what the usual ones were limited by is in there
        if now < self._since_s + self._rules.first_s:
            steps = max(min(max(steps, self._rules.first_tokens), max_tokens), 0.0)
        self._prefill_rate.add(max(prefill_s, 0.0), now)
        self._step_rate.add(steps, now)
        self._context_rate.add(steps * (max(num_tokens, 0) + steps / 2), now)

    def bounded(self, tbt_slo_s: float | None, *, lone_s: float) -> None:
        """A request was placed under this bound on the time between tokens, or none; alone its steps take ``lone_s``.

        No worker does better than that, whatever is asked. The harmonic mean of the bounds counts, since needs go by
        1/bound: in it a request weighs no more than one that asks for its lone step, or for nothing.
        """
        asked = 0.0 if tbt_slo_s is None else 1.0
        bound = 0.0 if tbt_slo_s is None else 1.0 / max(tbt_slo_s, lone_s)
        self._bounded_share += (asked - self._bounded_share) / self._rules.bounds
        self._bounds += (bound - self._bounds) / self._rules.bounds

    def need(self, workers: Sequence[Worker], now: float) -> Need:
        """What the load needs; ``workers`` are those that may get work, and are not empty."""
        rules = self._rules
        takers = [worker for worker in workers if worker.does("decode")] or workers
        step_s, request_s, token_s = (sum(terms) / len(takers) for terms in zip(
            *(worker.costs.decode for worker in takers), strict=True))
        limit_s = self._step_limit(step_s + request_s, workers[0].answers.short_share)
        batch = context_tokens = 0
        decode_rate = 0.0
        for worker in takers:
            here, tokens = worker.decoding_now()
            if here:
                one_s = worker.costs.step_s(batch=here, context_tokens=tokens)
                decode_rate += 1.0 - worker.costs.decode[0] / one_s
                batch, context_tokens = batch + here, context_tokens + tokens
        room = sum(worker.hello.capacity_blocks * worker.hello.spec.block_tokens for worker in takers) / len(takers)
        memory = context_tokens / max(room, 1.0)
        prefill_rate = self._prefill_rate.get(now)
        queued_s = sum(worker.queue_s(now) for worker in workers if worker.does("prefill"))
        context_rate = self._context_rate.get(now)
        answers_s = request_s * self._step_rate.get(now) + token_s * context_rate
        return Need(
            prefill_rate=prefill_rate, queued_s=queued_s, decode_rate=decode_rate, step_s=step_s,
            step_limit_s=limit_s, batch=batch, context_tokens=context_tokens, memory=memory,
            prefill=prefill_rate / rules.utilisation + queued_s / rules.horizon_s,
            decode=max(decode_rate / (1.0 - step_s / limit_s), memory / rules.fill),
            answers=answers_s / (1.0 - step_s / limit_s),
            answers_memory=context_rate * limit_s / max(room, 1.0) / rules.fill)

    def _step_limit(self, lone_s: float, short_share: float) -> float:
        """A request joins at the next step boundary, after up to a step. A short answer that waits longer than the
        bound less a step exceeds the bound: with steps of ``s`` a share ``2 - bound/s`` of the short ones."""
        rules, unbounded = self._rules, 1.0 - self._bounded_share
        usual_s, missed = self._tbt_slo_s, rules.missed_asked
        if usual_s is None:
            usual_s = rules.stretch * lone_s
            missed += unbounded * (rules.missed - rules.missed_asked)
        bound_s = 1.0 / (self._bounds + unbounded / usual_s)
        parts = 2.0 - min(missed / max(short_share, 1e-9), 1.0)
        return max(min(bound_s / parts, rules.bound_share * bound_s), 1.1 * lone_s)

    def look(self, workers: Sequence[Worker], now: float) -> Need:
        """Looks at the load, when it is time to; answers what it needed at the last look."""
        if self._need is not None and now < self._look_s:
            return self._need
        self._look_s = now + self._rules.look_s
        self._need = need = self.need(workers, now)
        self._prefill.take(need.prefill, now)
        self._decode.take(need.decode, now, least=need.memory / self._rules.fill)
        self._balance(need, len(workers), now)
        # whom decode lets go is only wanted if prompts press now, not if they did a while ago
        self._most = max(self._count(workers), math.ceil(need.prefill))
        decoding = {worker.id for worker in self._sides(workers)[1]}
        self._called = [worker for worker in self._called if worker in decoding]
        prefill, decode = self.split(workers)
        split = [worker.id for worker in prefill], [worker.id for worker in decode]
        if split != self._last:
            self._last = split
            self.version += 1
        return need

    def call_decode(self, workers: Sequence[Worker], now: float) -> bool:
        """No decode worker has room: one more is needed, at once, the one with the fewest prompts to end first. Nobody
        is called while somebody still has prompts to end, nor twice between two looks. Answers whether one was."""
        if self._called_s + self._rules.look_s > now:
            return False
        self._called_s = now
        prefill, decode = self._sides(workers)
        if any(worker.burden.behind_s > self._rules.queue_s for worker in decode):
            return False
        self._decode.raise_to(len(decode) + 1.0, now)
        if self._count(workers) >= len(prefill):
            return False
        last = prefill[-1].hello.role  # who is not at home goes home before others leave theirs
        called = min((worker for worker in reversed(prefill) if worker.hello.role == last and worker.does("decode")),
                     key=lambda worker: worker.queue_s(now))
        self._called.insert(0, called.id)
        self.version += 1
        return True

    def split(self, workers: Sequence[Worker]) -> tuple[list[Worker], list[Worker]]:
        """Who may get new prompts and who new answers, of these workers; as was right at the last look."""
        prefill, decode = self._sides(workers)
        return ([worker for worker in prefill if not (worker.does("decode") and worker.batch())] or prefill,
                [worker for worker in decode if worker.burden.behind_s <= self._rules.queue_s] or decode)

    def advice(self, workers: Sequence[Worker], now: float) -> Advice:
        """Whether the ratio fits, be the workers elastic or not; there are two or more. Looks when it is time to."""
        need = self.look(workers, now)
        prefill = self._count(workers)
        decode = len(workers) - prefill
        wanted = self._prefill.workers, self._decode.workers
        if self._is_short:
            balance = min(self._balanced, len(workers) - 1)
            is_wrong = prefill < balance or (prefill > balance and wanted[1] > decode)
            best = balance if is_wrong else prefill
        else:
            is_wrong = ((wanted[0] > prefill and wanted[1] < decode) or (wanted[1] > decode and wanted[0] < prefill))
            best = round(len(workers) * wanted[0] / sum(wanted)) if is_wrong else prefill
        if is_wrong:
            best = min(max(best, 1), len(workers) - 1)
        return Advice(need=need, prefill=prefill, decode=decode, best_prefill=best, best_decode=len(workers) - best,
                      is_wrong=is_wrong, is_short=self._is_short)

    def _sides(self, workers: Sequence[Worker]) -> tuple[list[Worker], list[Worker]]:
        """Who is to prefill and who to decode, whether or not it can begin."""
        line, count = in_line(workers, self._called), self._count(workers)
        return line[:count], line[count:]

    def _balance(self, need: Need, count: int, now: float) -> None:
        """Whether both roles are short of these ``count`` workers, and how many should prefill then."""
        rules = self._rules
        arriving = need.prefill_rate + need.queued_s / rules.backlog_s
        if arriving / rules.full + max(need.answers, need.answers_memory) > count:
            self._short_until_s = now + rules.window_s
        self._is_short = now < self._short_until_s
        if (rate := need.prefill_rate) > 0.0:
            self._balanced = balanced(count, need.answers / rate, need.answers_memory / rate, rules.spare,
                                      self._balanced)

    def _count(self, workers: Sequence[Worker]) -> int:
        """How many of them prefill: at least one, and not all, where that can be."""
        home = sum(worker.hello.role == "prefill" for worker in workers)
        least = sum(not worker.does("decode") for worker in workers)
        most = sum(worker.does("prefill") for worker in workers)
        wanted = min(max(home, min(self._prefill.workers, self._most)), len(workers) - self._decode.workers)
        if self._is_short:
            wanted = max(min(wanted, max(self._balanced, home)), self._balanced)
        return max(min(max(wanted, 1), most, len(workers) - 1), least)


def balanced(count: int, computing: float, memory: float, spare: float, before: int = 0) -> int:
    """Of ``count`` workers, how many should prefill for most of the load to be served.

    For each that prefills, decode needs ``computing`` workers, and ``spare`` times the root of their number besides;
    or as many as ``memory``, without any to spare: who has no room waits, and nobody's tokens are slower for it. The
    answer to the last such question, ``before``, stays where it serves nearly as much.
    """
    def fed(prefill: int) -> float:
        """So many prefill workers the others can decode for."""
        decode = count - prefill
        root = (math.sqrt(spare * spare + 4.0 * decode) - spare) / 2.0  # of x in x + spare·√x = decode
        return min(root * root / max(computing, 1e-9), decode / max(memory, 1e-9))

    def served(prefill: int) -> float:
        return min(float(prefill), fed(prefill))

    fits = bisect_left(range(1, count), True, key=lambda prefill: fed(prefill) < prefill)
    best = max(max(fits, 1), min(fits + 1, count - 1), key=served)
    return before if 0 < before < count and served(before) >= _NEARLY * served(best) else best


def in_line(workers: Sequence[Worker], called: Sequence[WorkerId] = ()) -> list[Worker]:
    """The order in which workers are taken for prefill: those that can do nothing else, then those at home there, then
    those at home in decode, backwards, and last those that can do nothing but decode. Of those with the same home who
    was ``called`` to decode comes last."""
    places = {worker: place for place, worker in enumerate(called, 1)}
    line = sorted(workers, key=lambda worker: worker.id)
    prefill = [worker for worker in line if worker.hello.role == "prefill"]
    decode = [worker for worker in reversed(line) if worker.hello.role == "decode"]
    return [*sorted(prefill, key=lambda worker: (worker.hello.elastic, places.get(worker.id, 0))),
            *sorted(decode, key=lambda worker: (not worker.hello.elastic, places.get(worker.id, 0)))]
