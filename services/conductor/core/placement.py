"""Where a request shall run: the pair of workers with the shortest predicted wait for its first token.

For each prefill worker that may take it, the shortest of

* what it holds itself, in memory or, where loading is quicker than computing, on its SSD, computing the rest, and
* that plus a chain of pulls: the longest continuation a single owner holds, then the longest from there, and so on,

in seconds of queue + transfer + computing, plus the seconds for which requests already there would have to wait longer.
The queue is what the worker's order (:mod:`shared.order`) computes before this prompt, so each reuse option has its
own: a prompt of which more is reused is shorter, waits for fewer and delays more. A worker pulls while it computes for
others, so of the transfer only what outlasts the queue is waited for. Everything is compared per worker, in one unit,
and no ratio has to be tuned. At least the last token is always computed: reuse ends at
``(num_tokens - 1) // block_tokens`` blocks. The decode worker is the one with the shortest predicted step among those
with room; among equals the one that holds most of the prompt already, since that much less has to be pushed to it.

A request with a bound goes where it will be in time; where no worker meets its bound it is turned away. That it may
wait until its bound is no reason to turn it away. Nobody who was accepted under a bound is made late: who has too
little to spare does not wait for a newcomer, which comes after the last of these whatever its length (``lead_s``).

Queues and costs of all workers are compared side by side (``board``); pulls, which have to be put together, only on
workers that could win by them. As a pull gets longer, the seconds of computing it saves grow ever faster and those of
the transfer evenly, so pulling all there is bounds what any pull can bring.

Options within ``Policy.tie`` of the best are equals and one is drawn: replicas that see the same picture would
otherwise all pick the same worker.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np

from services.conductor.core.answers import beginning
from services.conductor.core.board import Column, DecodeBoard, Mask, PrefillBoard
from services.conductor.core.cluster import Cluster
from services.conductor.core.estimate import Costs
from services.conductor.core.policy import Policy
from services.conductor.core.prefix_index import Match
from services.conductor.core.rejection import Reasons
from services.conductor.core.survey import BESIDE, Prompt, Survey, take_survey
from services.conductor.core.worker import DOUBT, Worker
from shared.ids import ConductorId, HostId, SpecDigest, WorkerId
from shared.messages import Candidate, DecodeCandidate, Placement, PlaceRequest, Rejection, Source

_MOST_PULLS = 12
"""Workers for which pulls are put together, those first that could gain most."""
_MOST_FUTURES = 4
"""Decode workers whose batch at the end of the prefill is looked at, those first that are best now."""
_KNOWN_S = 1.0
"""How long the best of the workers whose pace was learnt lately is taken to be that."""


@dataclass(frozen=True)
class Usable:
    """The workers of the request's spec that may get new work."""

    prefill: Sequence[Worker]
    decode: Sequence[Worker]
    excluded: int
    """Workers that would be usable were they not excluded by the request."""

    @cached_property
    def prefill_board(self) -> PrefillBoard:
        """The numbers of ``prefill``."""
        return PrefillBoard(self.prefill)

    @cached_property
    def decode_board(self) -> DecodeBoard:
        """The numbers of ``decode``."""
        return DecodeBoard(self.decode)

    def refresh(self) -> None:
        """Brings the boards that were ever asked for up to date, so that the next question finds them ready."""
        for board in ("prefill_board", "decode_board"):
            if board in self.__dict__:
                self.__dict__[board].refresh()


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to prefill, with its terms in seconds."""

    worker: Worker
    own_blocks: int
    queue_s: float
    prefill_s: float
    delays_s: float
    """What it makes others wait longer, all together."""
    ranked_s: float
    """Seconds of computing by which it is ranked."""
    yields_s: float = 0.0
    """How much later it counts as come, lest it make others late."""
    transfer_s: float = 0.0
    """What the transfer takes longer than the queue."""
    sources: Sequence[Source] = ()
    note: str = ""

    @property
    def ttft_s(self) -> float:
        """Predicted seconds to the first token."""
        return self.queue_s + self.transfer_s + self.prefill_s

    def is_in_time(self, slo_s: float) -> bool:
        """Whether it is fast enough even if the queue takes longer than predicted."""
        return self.ttft_s + DOUBT * self.queue_s <= slo_s

    @property
    def fetched_blocks(self) -> int:
        """Blocks pulled."""
        return sum(source.num_blocks for source in self.sources)

    def candidate(self) -> Candidate:
        """As it is reported."""
        return Candidate(
            prefill=self.worker.id, queue_s=self.queue_s, transfer_s=self.transfer_s, prefill_s=self.prefill_s,
            own_blocks=self.own_blocks, fetched_blocks=self.fetched_blocks, note=self.note, delays_s=self.delays_s)


@dataclass(frozen=True, slots=True)
class _Decode:
    """One decode worker, with what is predicted of it."""

    worker: Worker
    tbt_s: float
    own_blocks: int

    def candidate(self) -> DecodeCandidate:
        """As it is reported."""
        return DecodeCandidate(self.worker.id, self.tbt_s, self.own_blocks)


@dataclass(frozen=True, slots=True)
class _Loading:
    """What a worker reads from its SSD before it computes, while it computes for others."""

    blocks: int
    seconds: float
    waits_s: float
    """What it takes longer than the queue."""

    @property
    def note(self) -> str:
        """For people."""
        return f"reads {self.blocks} blocks from its SSD in {self.seconds:.3g} s"


class _Run:
    """Blocks that single senders hold, and who of them sends: who is on the receiver's host, then who has least to
    send, then the one that is drawn. What they have to send stays the same for one decision."""

    def __init__(self, end: int, owners: Sequence[WorkerId], cluster: Cluster) -> None:
        self.end = end
        self.senders = [cluster.workers[owner] for owner in owners]
        self._places = {owner: place for place, owner in enumerate(owners)}
        #: {host: places of its senders}
        self._hosts: dict[HostId, list[int]] = {}
        self._loads: list[int] = []
        #: places of those who have least to send, and of those who have least of the others
        self._least: tuple[list[int], list[int]] = ([], [])
        if len(owners) > 1:
            for place, sender in enumerate(self.senders):
                self._hosts.setdefault(sender.hello.endpoint.host, []).append(place)
            self._loads = [sender.sending_bytes() for sender in self.senders]
            first, *others = sorted(set(self._loads))
            self._least = (self._with(first), self._with(others[0]) if others else [])

    def pick(self, receiver: Worker, rng: random.Random) -> Worker | None:
        """Who sends to ``receiver``; ``None`` where there is nobody else."""
        own = self._places.get(receiver.id)
        count = len(self.senders) - (own is not None)
        if count <= 0:
            return None
        if count == 1:
            return self.senders[0 if own != 0 else 1]
        draw = rng.random
        draws = [draw() for _ in range(count)]  # one for each, whoever is asked: a seed repeats the draw
        near = [place for place in self._hosts.get(receiver.hello.endpoint.host, ()) if place != own]
        if near:
            least = min(self._loads[place] for place in near)
            equals = [place for place in near if self._loads[place] == least]
        else:
            equals = [place for place in self._least[0] if place != own] or self._least[1]
        if len(equals) > 1:
            equals = [min(equals, key=lambda place: draws[place - (own is not None and place > own)])]
        return self.senders[equals[0]]

    def _with(self, load: int) -> list[int]:
        return [place for place, other in enumerate(self._loads) if other == load]


@dataclass(slots=True)
class _Field:
    """All prefill workers, side by side, for one request. Arrays have a cell for each worker of the board."""

    board: PrefillBoard
    match: Match
    survey: Survey
    is_doubted: bool
    """Whether some are thought faster than their own costs say."""
    is_open: Mask | None
    """Whose queue is short enough; ``None`` when all are."""
    regard: float
    cost_s: Column
    """Of the best way known."""
    loads: dict[int, _Loading] = field(default_factory=dict)
    """{place on the board: what it reads from its SSD}."""
    pulls: dict[int, _Option] = field(default_factory=dict)
    """{place on the board: the best way with pulls}, of those that were looked at."""
    runs: dict[int, _Run] = field(default_factory=dict)
    """{first block: what single senders hold from there on}, of those that were asked for."""

    def alone(self, place: int) -> _Option:
        """Without pulls."""
        loading, survey = self.loads.get(place), self.survey
        return _Option(self.board.workers[place], int(survey.own[place]), float(survey.queue_s[place]),
                       float(survey.prefill_s[place]), float(survey.delays_s[place]), float(survey.ranked_s[place]),
                       0.0 if survey.yields_s is None else float(survey.yields_s[place]),
                       0.0 if loading is None else loading.waits_s)

    def take(self, place: int, pull: _Option) -> float:
        """A way with pulls; answers what it costs."""
        if not self.pulls:
            self.cost_s = self.survey.alone_s.copy()
        self.pulls[place] = pull
        cost_s = pull.ttft_s + self.regard * pull.delays_s
        if cost_s < self.cost_s[place]:
            self.cost_s[place] = cost_s
        return cost_s

    def in_time(self, slo_s: float) -> Mask:
        """Where the best way is fast enough."""
        in_time: Mask = self.survey.queue_s * (1 + DOUBT) + self.survey.prefill_s <= slo_s
        for place in self.loads:
            in_time[place] = self.alone(place).is_in_time(slo_s)
        for place in self.pulls:
            in_time[place] = self.best(place).is_in_time(slo_s)
        return in_time

    def best(self, place: int) -> _Option:
        """The best way known."""
        pull = self.pulls.get(place)
        is_best = pull is not None and pull.ttft_s + self.regard * pull.delays_s <= self.cost_s[place]
        return pull if pull is not None and is_best else self.alone(place)

    def note(self, place: int) -> str:
        """Why nothing is pulled; empty where nothing could be."""
        survey = self.survey
        missing = self.match.covered - int(survey.own[place])
        if missing <= 0 or not self.match.covered or place in self.pulls:
            return ""
        return (f"recomputes {missing} blocks in {float(survey.prefill_s[place] - survey.rest_s[place]):.3g} s: "
                f"pulling them would take {float(survey.pull_s[place]):.3g} s")


class Placer:
    """Decides. Its state is the generator that breaks ties, and who was known best a moment ago."""

    def __init__(self, conductor: ConductorId, policy: Policy, *, seed: int) -> None:
        self._conductor, self._policy = conductor, policy
        self._rng = random.Random(seed)
        #: {(role, spec): (until when, costs of the best whose pace was learnt lately)}
        self._known: dict[tuple[str, SpecDigest], tuple[float, Costs | None]] = {}

    def place(self, ask: PlaceRequest, cluster: Cluster, usable: Usable, match: Match, *,
              now: float) -> Placement | Rejection:
        """The decision on ``ask``; changes nothing but the generator. ``match`` is over at most the reusable blocks."""
        reasons = Reasons(ask, self._policy, now)
        if not usable.prefill or not usable.decode:
            return reasons.no_worker(prefill=len(usable.prefill), decode=len(usable.decode), excluded=usable.excluded,
                                     retry_after_s=self._policy.suspect_after_s)
        options = self._field(ask, usable.prefill_board, match, now)
        if options.is_open is not None and not options.is_open.any():
            return reasons.queues_full(float(options.survey.queue_s.min()), self._policy.max_queue_s,
                                       self._candidates(options))
        self._pull(ask, cluster, options, now)
        ttft_slo_s = self._policy.ttft_left_s(ask)
        in_time = None if ttft_slo_s is None else options.in_time(ttft_slo_s)
        candidates = self._candidates(options)
        prefill = self._draw(options, in_time)
        decode = self._decode(ask, usable.decode_board, match, now, prefill.ttft_s)
        decode_candidates = [one.candidate() for one in decode]
        reasons = Reasons(ask, self._policy, now, decode=decode_candidates)
        spare_s = (self._policy.max_queue_s - prefill.queue_s - ask.waited_s if ttft_slo_s is None
                   else ttft_slo_s - prefill.ttft_s - DOUBT * prefill.queue_s)
        if not decode:
            return reasons.no_room(usable.decode, self._policy.max_queue_s, candidates, spare_s=spare_s)
        if ttft_slo_s is not None and spare_s < 0:
            return reasons.ttft(prefill.ttft_s, prefill.queue_s, candidates)
        tbt_slo_s = ask.tbt_slo_s or self._policy.tbt_slo_s
        if tbt_slo_s is not None and decode[0].tbt_s > tbt_slo_s:
            return reasons.tbt(decode[0].tbt_s, tbt_slo_s, decode[0].worker, candidates, spare_s=spare_s)
        return self._placement(ask, match, prefill, decode, candidates, decode_candidates, reuse_gain_s=(
            max(prefill.ttft_s - options.survey.held_s, 0.0) if match.covered else 0.0))

    def _placement(self, ask: PlaceRequest, match: Match, prefill: _Option, decode: Sequence[_Decode],
                   candidates: list[Candidate], decode_candidates: list[DecodeCandidate], *,
                   reuse_gain_s: float) -> Placement:
        hit_blocks = prefill.own_blocks + prefill.fetched_blocks
        block_tokens = prefill.worker.hello.spec.block_tokens
        unmade_blocks = prefill.own_blocks - match.unmade.get(prefill.worker.id, prefill.own_blocks)
        return Placement(
            request=ask.request, attempt=ask.attempt, conductor=self._conductor,
            prefill=prefill.worker.id, prefill_incarnation=prefill.worker.hello.incarnation,
            decode=decode[0].worker.id, decode_incarnation=decode[0].worker.hello.incarnation,
            own_blocks=prefill.own_blocks, sources=list(prefill.sources),
            hit_tokens=hit_blocks * block_tokens, unmade_tokens=unmade_blocks * block_tokens,
            predicted_queue_s=prefill.queue_s, predicted_transfer_s=prefill.transfer_s,
            predicted_prefill_s=prefill.prefill_s, predicted_tbt_s=decode[0].tbt_s, candidates=candidates,
            decode_candidates=decode_candidates,
            ranked_s=0.0 if prefill.ranked_s == prefill.prefill_s else prefill.ranked_s, reuse_gain_s=reuse_gain_s,
            lead_s=prefill.worker.order.lead_s(prefill.ranked_s) + prefill.yields_s - ask.head_start_s)

    # What workers' paces are worth

    def _best_known(self, role: Literal["prefill", "decode"], workers: Sequence[Worker], now: float) -> Costs | None:
        """The costs of the best of ``workers`` whose pace was learnt lately; ``None`` when there is no such worker."""
        key = role, workers[0].spec
        until_s, known = self._known.get(key, (-1.0, None))
        if now > until_s:
            lately = [worker.costs for worker in workers if now - worker.taught_s <= self._policy.trust_s]
            if role == "prefill":
                known = min(lately, key=lambda costs: costs.prefill_s(num_tokens=8192, hit_tokens=0), default=None)
            else:
                known = min(lately, key=lambda costs: costs.step_s(batch=8, context_tokens=65_536), default=None)
            self._known[key] = now + _KNOWN_S, known
        return known

    def _doubted(self, role: Literal["prefill", "decode"], board: PrefillBoard | DecodeBoard,
                 now: float) -> tuple[Mask | None, Costs | None]:
        """Whose own costs are too old to be held against them, and the costs to take instead where those are less."""
        if now - board.first_taught_s <= self._policy.trust_s:
            return None, None
        is_old = now - board.taught_s > self._policy.trust_s
        if is_old.all():
            return None, None
        return is_old, self._best_known(role, board.workers, now)

    # Prefill

    def _field(self, ask: PlaceRequest, board: PrefillBoard, match: Match, now: float) -> _Field:
        """Everything that needs no pull to be put together."""
        board.refresh()
        is_old, known = self._doubted("prefill", board, now)
        ranked = {  # until they are made, it is as long as without them
            place: board.workers[place].costs.prefill_s(
                num_tokens=ask.num_tokens, hit_tokens=blocks * board.block_tokens)
            for worker, blocks in match.unmade.items() if (place := board.places.get(worker)) is not None}
        policy = self._policy
        prompt = Prompt(ask.num_tokens, now, now - ask.head_start_s, match.own, match.covered, ranked,
                        known if is_old is not None else None)
        survey = take_survey(board, prompt, policy)
        is_open = None if survey.longest_s <= policy.max_queue_s else survey.queue_s <= policy.max_queue_s
        options = _Field(board, match, survey, is_old is not None, is_open, policy.regard, survey.alone_s)
        for name, in_memory in match.on_ssd.items():
            if name not in match.unmade and (place := board.places.get(name)) is not None:
                self._load(ask, options, place, in_memory, now)
        return options

    def _load(self, ask: PlaceRequest, options: _Field, place: int, in_memory: int, now: float) -> None:
        """What a worker has on its SSD is read, or computed again if that is better."""
        board, survey = options.board, options.survey
        worker, own = board.workers[place], int(survey.own[place])
        load_s = worker.costs.ssd_s((own - in_memory) * board.block_bytes)
        queue_s, prefill_s = float(survey.queue_s[place]), float(survey.prefill_s[place])
        waits_s = max(load_s - queue_s, 0.0)
        anew_s, known_s = (worker.costs.prefill_s(num_tokens=ask.num_tokens, hit_tokens=blocks * board.block_tokens)
                           for blocks in (in_memory, own))
        again_s = prefill_s + anew_s - known_s
        line = worker.line(again_s, now, since_s=now - ask.head_start_s)
        loaded_s = float(survey.alone_s[place]) + waits_s
        computed_s = line.queue_s + again_s * (1.0 + options.regard * line.delayed)
        if loaded_s <= computed_s and again_s - prefill_s >= _price_s(load_s, queue_s) * self._policy.fetch_gain:
            options.loads[place] = _Loading(own - in_memory, load_s, waits_s)
            survey.alone_s[place] = loaded_s
            return
        survey.own[place], survey.queue_s[place], survey.prefill_s[place] = in_memory, line.queue_s, again_s
        survey.ranked_s[place], survey.delays_s[place] = again_s, line.delayed * again_s
        if survey.yields_s is not None:
            survey.yields_s[place] = line.yields_s
        survey.alone_s[place] = computed_s

    def _pull(self, ask: PlaceRequest, cluster: Cluster, options: _Field, now: float) -> None:
        """Puts pulls together where they may be the best there is."""
        if not options.match.covered:
            return
        tied = 1 + self._policy.tie
        bound_s, cost_s, is_open = options.survey.bound_s, options.cost_s, options.is_open
        if is_open is not None:
            bound_s, cost_s = np.where(is_open, bound_s, np.inf), cost_s[is_open]
        best_s = float(np.minimum.reduce(cost_s)) * tied
        for _ in range(_MOST_PULLS):
            place = int(bound_s.argmin())
            if bound_s[place] > best_s:
                break
            bound_s[place] = np.inf
            pull = self._chain(ask, cluster, options, place, now)
            if pull is not None:
                best_s = min(best_s, options.take(place, pull) * tied)

    def _chain(self, ask: PlaceRequest, cluster: Cluster, options: _Field, place: int, now: float) -> _Option | None:
        """The best chain of pulls on a worker; ``None`` when computing is about as fast."""
        board, match, policy = options.board, options.match, self._policy
        own, alone_s = int(options.survey.own[place]), float(options.survey.prefill_s[place])
        worker = board.workers[place]
        costs, num_tokens, block_tokens = worker.costs, ask.num_tokens, board.block_tokens
        unmade = own - match.unmade.get(worker.id, own)
        # what its own costs say too much of all it has to compute, they say of a part of it
        doubt = 1.0 if not options.is_doubted else alone_s / costs.prefill_s(
            num_tokens=num_tokens, hit_tokens=own * block_tokens)
        loading = options.loads.get(place)
        load_s = 0.0 if loading is None else loading.seconds
        best: _Option | None = None
        best_s, end, ssd_s = float("inf"), own, 0.0
        sources: list[Source] = []
        while len(sources) < policy.max_sources:
            source = self._longest(worker, cluster, options, end)
            if source is None:
                break
            sources.append(source)
            end = source.first_block + source.num_blocks
            ahead_bytes, same_host = cluster.link(worker, sources)
            if (on_ssd := end - max(match.on_ssd.get(source.owner, end), source.first_block)) > 0:
                ssd_s += cluster.workers[source.owner].costs.ssd_s(on_ssd * board.block_bytes)
            transfer_s = ssd_s + costs.transfer_s(
                (end - own) * board.block_bytes + ahead_bytes, same_host=same_host is True)
            prefill_s = doubt * costs.prefill_s(num_tokens=num_tokens, hit_tokens=end * block_tokens)
            ranked_s = prefill_s if not unmade else costs.prefill_s(
                num_tokens=num_tokens, hit_tokens=(end - unmade) * block_tokens)
            queue_s, delayed, yields_s = worker.line(ranked_s, now, since_s=now - ask.head_start_s)
            if alone_s - prefill_s < _price_s(transfer_s, queue_s) * policy.fetch_gain:
                continue
            transfer_s = max(transfer_s, load_s)
            cost_s = max(queue_s, transfer_s) + prefill_s * (1.0 + options.regard * delayed)
            if cost_s < best_s:
                best_s = cost_s
                note = "" if loading is None else loading.note
                if ssd_s:
                    note = f"{note}; owners read from SSD for {ssd_s:.3g} s".removeprefix("; ")
                best = _Option(worker, own, queue_s, prefill_s, delayed * prefill_s, ranked_s, yields_s,
                               max(transfer_s - queue_s, 0.0), tuple(sources), note)
        return best

    def _longest(self, worker: Worker, cluster: Cluster, options: _Field, start: int) -> Source | None:
        """The longest run from ``start`` that one other worker can send, by the owner that has least to send."""
        match = options.match
        found = options.runs.get(start)
        if found is None:
            found = options.runs[start] = _Run(*match.run(start), cluster)
        if found.end == start:
            return None
        if match.on_ssd:  # what somebody has in memory first, then what is on SSD
            senders = [sender for sender in found.senders if sender.id != worker.id]
            ends = [min(match.on_ssd.get(sender.id, found.end), found.end) for sender in senders]
            if senders and (furthest := max(ends)) > start:
                found = _Run(furthest, [sender.id for sender, until in zip(senders, ends, strict=True)
                                        if until == furthest], cluster)
        owner = found.pick(worker, self._rng)
        if owner is None:
            return None
        return Source(owner=owner.id, incarnation=owner.hello.incarnation, first_block=start,
                      num_blocks=found.end - start)

    def _draw(self, options: _Field, in_time: Mask | None) -> _Option:
        """One of the best; of those in time when any is."""
        cost_s = options.cost_s if options.is_open is None else np.where(options.is_open, options.cost_s, np.inf)
        if in_time is not None and np.isfinite(in_time_s := np.where(in_time, cost_s, np.inf)).any():
            cost_s = in_time_s
        equals = (cost_s <= np.minimum.reduce(cost_s) * (1 + self._policy.tie)).nonzero()[0]
        return options.best(self._rng.choice(equals.tolist()))

    def _candidates(self, options: _Field) -> list[Candidate]:
        """The best ways, best first; the best one without pulls says why."""
        survey = options.survey
        places = survey.alone_s.argsort()[:self._policy.candidates]
        workers = options.board.workers
        ways = [Candidate(workers[place].id, queue_s, 0.0, prefill_s, int(own), 0, "", delays_s)
                for place, own, queue_s, prefill_s, delays_s in zip(
                    places.tolist(), *(column[places].tolist() for column in (
                        survey.own, survey.queue_s, survey.prefill_s, survey.delays_s)), strict=True)]
        if note := options.note(int(places[0])):
            ways[0] = msgspec.structs.replace(ways[0], note=note)
        if options.loads:
            ways = [self._loaded(options, place, way) for place, way in zip(places.tolist(), ways, strict=True)]
        if options.pulls:
            ways += [pull.candidate() for pull in options.pulls.values()]
            regard = options.regard
            ways.sort(key=lambda way: way.queue_s + way.transfer_s + way.prefill_s + regard * way.delays_s)
            del ways[self._policy.candidates:]
        return ways

    @staticmethod
    def _loaded(options: _Field, place: int, way: Candidate) -> Candidate:
        loading = options.loads.get(place)
        if loading is None:
            return way
        note = f"{loading.note}; {way.note}" if way.note else loading.note
        return msgspec.structs.replace(way, transfer_s=loading.waits_s, note=note)

    # Decode

    def _decode(self, ask: PlaceRequest, board: DecodeBoard, match: Match, now: float,
                ttft_s: float) -> list[_Decode]:
        """The one with the shortest step at the time the prefill is predicted to end, then the others that were looked
        at, best first; nobody when there is no room."""
        board.refresh()
        workers = board.workers
        step_s = board.step_s(ask.num_tokens)
        is_old, known = self._doubted("decode", board, now)
        if is_old is not None and known is not None:
            step_s = np.where(is_old, np.minimum(step_s, board.step_s(ask.num_tokens, costs=known)), step_s)
        needed_blocks = workers[0].needed_blocks(ask.num_tokens, ask.max_tokens, ask.tenant, beginning(ask.keys))
        if board.full or np.minimum.reduce(board.free_blocks) < needed_blocks:
            wait_s = np.zeros(len(workers))
            for place in board.full:
                wait_s[place] = workers[place].slot_wait_s(now)
            wait_s[board.free_blocks < needed_blocks] = np.inf
            least_s = wait_s.min()
            if least_s > self._policy.max_queue_s:
                return []
            step_s[wait_s > least_s] = np.inf
        places = step_s.argsort().tolist()
        limit_s = step_s[places[0]] * (1 + self._policy.tie)
        if len(places) > _MOST_FUTURES and step_s[places[_MOST_FUTURES]] <= limit_s:
            places = (step_s <= limit_s).nonzero()[0].tolist()
            equals = set(places)
            holders = sorted(place for worker in match.own.keys() & board.places.keys()
                             if (place := board.places[worker]) in equals)
            places = [*holders[:_MOST_FUTURES], *self._rng.sample(places, _MOST_FUTURES)]
        else:
            places = [place for place in places[:_MOST_FUTURES] if step_s[place] < np.inf]
        found = []
        for place in places:
            worker = workers[place]
            batch, context_tokens = worker.decoding_at(now + ttft_s, now=now)
            batch, context_tokens = min(batch + 1, worker.hello.max_running), context_tokens + ask.num_tokens
            tbt_s = worker.costs.step_s(batch=batch, context_tokens=context_tokens)
            if is_old is not None and known is not None and is_old[place]:
                tbt_s = min(tbt_s, known.step_s(batch=batch, context_tokens=context_tokens))
            found.append(_Decode(worker, tbt_s, match.own.get(worker.id, 0)))
        limit_s = min(one.tbt_s for one in found) * (1 + self._policy.tie)
        equally = [one for one in found if one.tbt_s <= limit_s]
        most = max(one.own_blocks for one in equally)
        chosen = self._rng.choice([one for one in equally if one.own_blocks == most])
        found.sort(key=lambda one: (one is not chosen, one.tbt_s))
        return found


def _price_s(transfer_s: float, queue_s: float) -> float:
    """What a transfer counts for: it is waited for when it outlasts the queue, and takes a link in any case."""
    return max(transfer_s - queue_s, BESIDE * transfer_s)
