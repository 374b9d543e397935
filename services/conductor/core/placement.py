"""Where a request shall run: the pair of workers with the shortest predicted wait for its first token.

For each prefill worker that may take it, the shortest of

* what it holds itself, computing the rest, and
* that plus a chain of pulls: the longest continuation a single owner holds, then the longest from there, and so on,

in seconds of queue + transfer + computing. So transfer and recomputation are compared per worker, in one unit, and no
ratio has to be tuned. At least the last token is always computed: reuse ends at ``(num_tokens - 1) // block_tokens``
blocks. The decode worker is the one with the shortest predicted step among those with room; among equals the one
that holds most of the prompt already, since that much less has to be pushed to it.

Options within ``Policy.tie`` of the best are equals and one is drawn: replicas that see the same picture would
otherwise all pick the same worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from services.conductor.core.cluster import Cluster, Worker
from services.conductor.core.estimate import Costs
from services.conductor.core.policy import Policy
from services.conductor.core.prefix_index import Match
from services.conductor.core.rejection import Reasons
from shared.ids import ConductorId, WorkerId
from shared.messages import Candidate, Placement, PlaceRequest, Rejection, Source


@dataclass(frozen=True)
class Usable:
    """The workers of the request's spec that may get new work."""

    prefill: Sequence[Worker]
    decode: Sequence[Worker]
    excluded: int
    """Workers that would be usable were they not excluded by the request."""

    def without(self, exclude: Collection[WorkerId]) -> Usable:
        """The others."""
        if not exclude:
            return self
        prefill = [worker for worker in self.prefill if worker.id not in exclude]
        decode = [worker for worker in self.decode if worker.id not in exclude]
        left = len(prefill) + len(decode)
        return Usable(prefill, decode, self.excluded + len(self.prefill) + len(self.decode) - left)


@dataclass(frozen=True)
class _Option:
    """One way to prefill, with its terms in seconds."""

    worker: Worker
    own_blocks: int
    sources: Sequence[Source]
    queue_s: float
    transfer_s: float
    prefill_s: float
    note: str = ""

    @property
    def compute_s(self) -> float:
        """What the request needs once it is its turn."""
        return self.transfer_s + self.prefill_s

    @property
    def ttft_s(self) -> float:
        """Predicted seconds to the first token."""
        return self.queue_s + self.compute_s

    @property
    def fetched_blocks(self) -> int:
        """Blocks pulled."""
        return sum(source.num_blocks for source in self.sources)

    def candidate(self) -> Candidate:
        """As it is reported."""
        return Candidate(
            prefill=self.worker.id, queue_s=self.queue_s, transfer_s=self.transfer_s, prefill_s=self.prefill_s,
            own_blocks=self.own_blocks, fetched_blocks=self.fetched_blocks, note=self.note)


@dataclass(frozen=True)
class _Decode:
    """One decode worker, with what is predicted of it."""

    worker: Worker
    tbt_s: float
    wait_s: float
    own_blocks: int


class Placer:
    """Decides. Its only state is the generator that breaks ties."""

    def __init__(self, conductor: ConductorId, policy: Policy, *, seed: int) -> None:
        self._conductor, self._policy = conductor, policy
        self._rng = random.Random(seed)

    def place(self, ask: PlaceRequest, cluster: Cluster, usable: Usable, match: Match, *,
              now: float) -> Placement | Rejection:
        """The decision on ``ask``; changes nothing but the generator. ``match`` is over at most the reusable blocks."""
        reasons = Reasons(ask, now)
        if not usable.prefill or not usable.decode:
            return reasons.no_worker(prefill=len(usable.prefill), decode=len(usable.decode), excluded=usable.excluded,
                                     retry_after_s=self._policy.suspect_after_s)
        known = self._known(usable.prefill, now, key=lambda costs: costs.prefill_s(
            num_tokens=ask.num_tokens, hit_tokens=0))
        options = [option for worker in usable.prefill
                   for option in self._options(ask, worker, cluster, match, known, now)]
        options.sort(key=lambda option: option.ttft_s)
        candidates = [option.candidate() for option in options[:self._policy.candidates]]
        prefill = self._draw([option for option in options if option.queue_s <= self._policy.max_queue_s])
        if prefill is None:
            return reasons.queues_full(options[0].queue_s, self._policy.max_queue_s, candidates)
        decode = self._decode(ask, usable.decode, match, now)
        if decode is None:
            return reasons.no_room(usable.decode, self._policy.max_queue_s, candidates)
        ttft_slo_s = _slo(ask.ttft_slo_s, self._policy.ttft_slo_s)
        if ttft_slo_s is not None and prefill.ttft_s > ttft_slo_s:
            return reasons.ttft(prefill.ttft_s, prefill.queue_s, ttft_slo_s, candidates)
        tbt_slo_s = _slo(ask.tbt_slo_s, self._policy.tbt_slo_s)
        if tbt_slo_s is not None and decode.tbt_s > tbt_slo_s:
            return reasons.tbt(decode.tbt_s, tbt_slo_s, decode.worker, candidates)
        return self._placement(ask, prefill, decode, candidates)

    def _placement(self, ask: PlaceRequest, prefill: _Option, decode: _Decode,
                   candidates: list[Candidate]) -> Placement:
        hit_blocks = prefill.own_blocks + prefill.fetched_blocks
        return Placement(
            request=ask.request, attempt=ask.attempt, conductor=self._conductor,
            prefill=prefill.worker.id, prefill_incarnation=prefill.worker.hello.incarnation,
            decode=decode.worker.id, decode_incarnation=decode.worker.hello.incarnation,
            own_blocks=prefill.own_blocks, sources=list(prefill.sources),
            hit_tokens=hit_blocks * prefill.worker.hello.spec.block_tokens,
            predicted_queue_s=prefill.queue_s, predicted_transfer_s=prefill.transfer_s,
            predicted_prefill_s=prefill.prefill_s, predicted_tbt_s=decode.tbt_s, candidates=candidates)

    def _known(self, workers: Sequence[Worker], now: float, *, key: Callable[[Costs], float]) -> Costs | None:
        """The costs of the best of ``workers`` whose pace was learnt lately; ``None`` when there is no such worker."""
        lately = [worker.costs for worker in workers if now - worker.taught_s <= self._policy.trust_s]
        return min(lately, key=key, default=None)

    def _pace(self, worker: Worker, known: Costs | None, now: float, seconds: Callable[[Costs], float]) -> float:
        """``seconds`` by the worker's own costs, or by those better known where its own are old and worse."""
        own_s = seconds(worker.costs)
        if known is None or now - worker.taught_s <= self._policy.trust_s:
            return own_s
        return min(own_s, seconds(known))

    def _options(self, ask: PlaceRequest, worker: Worker, cluster: Cluster, match: Match, known: Costs | None,
                 now: float) -> list[_Option]:
        """The best option without pulling on ``worker``, and the best with, when that is worth it."""
        def prefill_s(hit_blocks: int) -> float:
            hit_tokens = hit_blocks * worker.hello.spec.block_tokens
            return self._pace(worker, known, now, lambda costs: costs.prefill_s(
                num_tokens=ask.num_tokens, hit_tokens=hit_tokens))

        queue_s = worker.queue_s(now)
        own = match.own.get(worker.id, 0)
        alone = _Option(worker, own, (), queue_s, 0.0, prefill_s(own))
        pulls: list[_Option] = []
        sources: list[Source] = []
        end = own
        while len(sources) < self._policy.max_sources:
            source = self._longest(worker, cluster, match, end)
            if source is None:
                break
            sources.append(source)
            end = source.first_block + source.num_blocks
            pulls.append(_Option(worker, own, tuple(sources), queue_s, self._transfer_s(worker, cluster, sources),
                                 prefill_s(end)))
        if not pulls:
            return [alone]
        pull = min(pulls, key=lambda option: option.compute_s)
        gain_s = alone.prefill_s - pull.prefill_s
        if gain_s >= pull.transfer_s * self._policy.fetch_gain:
            return [alone, pull]
        return [replace(alone, note=f"recomputes {pull.fetched_blocks} blocks in {gain_s:.3g} s: "
                                            f"pulling them would take {pull.transfer_s:.3g} s")]

    def _longest(self, worker: Worker, cluster: Cluster, match: Match, start: int) -> Source | None:
        """The longest run from ``start`` that one other worker can send, by the owner that has least to send."""
        end, owners = match.run(start)
        senders = [owner for owner in owners if owner != worker.id]
        if end == start or not senders:
            return None
        host = worker.hello.endpoint.host
        owner = min((cluster.workers[sender] for sender in senders), key=lambda owner: (
            owner.hello.endpoint.host != host, owner.sending_bytes(), self._rng.random()))
        return Source(owner=owner.id, incarnation=owner.hello.incarnation, first_block=start, num_blocks=end - start)

    @staticmethod
    def _transfer_s(worker: Worker, cluster: Cluster, sources: Sequence[Source]) -> float:
        nbytes = sum(source.num_blocks for source in sources) * worker.hello.spec.block_bytes
        ahead_bytes, same_host = cluster.link(worker, sources)
        return worker.costs.transfer_s(nbytes + ahead_bytes, same_host=same_host is True)

    def _decode(self, ask: PlaceRequest, workers: Sequence[Worker], match: Match, now: float) -> _Decode | None:
        known = self._known(workers, now, key=lambda costs: costs.step_s(batch=1, context_tokens=ask.num_tokens))
        found = []
        for worker in workers:
            wait_s = worker.slot_wait_s(now)
            needed = worker.needed_blocks(ask.num_tokens, ask.max_tokens)
            if wait_s <= self._policy.max_queue_s and needed <= worker.free_blocks():
                batch = min(worker.batch() + 1, worker.hello.max_running)
                tbt_s = self._pace(worker, known, now, partial(
                    Costs.step_s, batch=batch, context_tokens=worker.context_tokens() + ask.num_tokens))
                found.append(_Decode(worker, tbt_s, wait_s, match.own.get(worker.id, 0)))
        if not found:
            return None
        best = min(found, key=lambda one: (one.wait_s, one.tbt_s))
        limit_s = best.tbt_s * (1 + self._policy.tie)
        equals = [one for one in found if one.wait_s <= best.wait_s and one.tbt_s <= limit_s]
        most = max(one.own_blocks for one in equals)
        return self._rng.choice([one for one in equals if one.own_blocks == most])

    def _draw(self, options: list[_Option]) -> _Option | None:
        """One of the best of ``options``, which are sorted."""
        if not options:
            return None
        limit_s = options[0].ttft_s * (1 + self._policy.tie)
        best: dict[WorkerId, _Option] = {}
        for option in options:
            if option.ttft_s <= limit_s:
                best.setdefault(option.worker.id, option)
        return self._rng.choice(list(best.values()))


def _slo(asked_s: float | None, default_s: float | None) -> float | None:
    return asked_s if asked_s is not None and asked_s > 0 else default_s
