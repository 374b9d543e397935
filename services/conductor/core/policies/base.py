"""What a policy is, and what all policies of others have in common.

A published policy chooses a prefill worker, what to reuse there, and a decode worker. The rest is the same for all:
the estimates of the workers' costs, reuse that ends at ``(num_tokens - 1) // block_tokens`` blocks, the answer's form,
and who is turned away (``admission``). So what differs between two policies is what their papers and code say differs.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from services.conductor.core.cluster import Cluster
from services.conductor.core.placement import Usable
from services.conductor.core.policies.admission import Admission, Prediction
from services.conductor.core.policy import Policy
from services.conductor.core.prefix_index import Match
from services.conductor.core.rejection import Reasons
from services.conductor.core.worker import Worker
from shared.ids import ConductorId, WorkerId
from shared.messages import Candidate, DecodeCandidate, Placement, PlaceRequest, Rejection, Source

_MOST_DECODE = 4
"""Decode workers reported with a decision."""


class PlacementPolicy(Protocol):
    """Decides where a request runs."""

    def place(self, ask: PlaceRequest, cluster: Cluster, usable: Usable, match: Match, *,
              now: float) -> Placement | Rejection:
        """The decision on ``ask``; changes nothing but the policy's own state. ``match`` is over at most the reusable
        blocks, ``now`` is monotonic seconds."""
        ...


@dataclass(frozen=True)
class Choice:
    """A prefill worker and what it shall reuse: its own leading blocks, then what it pulls."""

    worker: Worker
    own_blocks: int
    sources: Sequence[Source] = ()

    @property
    def hit_blocks(self) -> int:
        """Blocks that need no computing."""
        return self.own_blocks + sum(source.num_blocks for source in self.sources)


@dataclass(frozen=True)
class View:
    """What a policy sees of one request and the cluster at one moment."""

    ask: PlaceRequest
    cluster: Cluster
    prefill: Sequence[Worker]
    decode: Sequence[Worker]
    match: Match
    now: float
    #: {worker: its predicted step}, of those that were asked for
    _steps: dict[WorkerId, float] = field(default_factory=dict)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.prefill[0].hello.spec.block_tokens

    @property
    def blocks(self) -> int:
        """Blocks of the prompt, the last one perhaps partial."""
        return -(-self.ask.num_tokens // self.block_tokens)

    def own(self, worker: Worker) -> int:
        """Leading blocks ``worker`` has, or will have when it gets to this prompt."""
        return self.match.own.get(worker.id, 0)

    def local(self, worker: Worker) -> Choice:
        """``worker`` with what it has itself."""
        return Choice(worker, self.own(worker))

    def prefill_s(self, worker: Worker, hit_blocks: int) -> float:
        """Computing the prompt on ``worker`` when so many blocks are reused."""
        return worker.costs.prefill_s(num_tokens=self.ask.num_tokens, hit_tokens=hit_blocks * self.block_tokens)

    def transfer_s(self, choice: Choice) -> float:
        """Pulling what ``choice`` pulls, behind what is under way on those links."""
        if not choice.sources:
            return 0.0
        nbytes = sum(source.num_blocks for source in choice.sources) * choice.worker.hello.spec.block_bytes
        ahead, same_host = self.cluster.link(choice.worker, choice.sources)
        return choice.worker.costs.transfer_s(nbytes + ahead, same_host=same_host is True)

    def tbt_s(self, worker: Worker) -> float:
        """A decode step on ``worker`` with this request in the batch, those on their way counted."""
        step_s = self._steps.get(worker.id)
        if step_s is None:
            batch = min(worker.batch() + 1, worker.hello.max_running)
            step_s = self._steps[worker.id] = worker.costs.step_s(
                batch=batch, context_tokens=worker.context_tokens() + self.ask.num_tokens)
        return step_s

    def predict(self, choice: Choice, decode: Worker) -> Prediction:
        """What is to be expected of a choice."""
        return Prediction(queue_s=choice.worker.queue_s(self.now), transfer_s=self.transfer_s(choice),
                          prefill_s=self.prefill_s(choice.worker, choice.hit_blocks), tbt_s=self.tbt_s(decode),
                          decode=decode)


_T = TypeVar("_T")


class PublishedPolicy(ABC):
    """Base of the policies of others; the generator breaks ties."""

    def __init__(self, conductor: ConductorId, policy: Policy, admission: Admission, *, seed: int) -> None:
        self._conductor, self._policy, self._admission = conductor, policy, admission
        self._rng = random.Random(seed)

    @abstractmethod
    def choose_prefill(self, view: View) -> Choice:
        """Where the prompt is computed; ``view.prefill`` is not empty."""

    def choose_decode(self, view: View) -> Worker:
        """Where the answer is; the shortest predicted step unless the policy says otherwise."""
        return self._least([(view.tbt_s(worker), worker) for worker in view.decode])

    def place(self, ask: PlaceRequest, cluster: Cluster, usable: Usable, match: Match, *,
              now: float) -> Placement | Rejection:
        """See :class:`PlacementPolicy`."""
        reasons = Reasons(ask, self._policy, now)
        if not usable.prefill or not usable.decode:
            return reasons.no_worker(prefill=len(usable.prefill), decode=len(usable.decode), excluded=usable.excluded,
                                     retry_after_s=self._policy.suspect_after_s)
        view = View(ask, cluster, usable.prefill, usable.decode, match, now)
        choice, decode = self.choose_prefill(view), self.choose_decode(view)
        prediction = view.predict(choice, decode)
        candidates = [Candidate(
            prefill=choice.worker.id, queue_s=prediction.queue_s, transfer_s=prediction.transfer_s,
            prefill_s=prediction.prefill_s, own_blocks=choice.own_blocks,
            fetched_blocks=choice.hit_blocks - choice.own_blocks)]
        decode_candidates = self._decode_candidates(view, decode)
        reasons = Reasons(ask, self._policy, now, decode=decode_candidates)
        rejection = self._admission.check(ask, prediction, usable, self._policy, reasons, candidates, now=now)
        if rejection is not None:
            return rejection
        hello = choice.worker.hello
        return Placement(
            request=ask.request, attempt=ask.attempt, conductor=self._conductor, prefill=hello.worker,
            prefill_incarnation=hello.incarnation, decode=decode.id, decode_incarnation=decode.hello.incarnation,
            own_blocks=choice.own_blocks, sources=list(choice.sources),
            hit_tokens=choice.hit_blocks * view.block_tokens,
            predicted_queue_s=prediction.queue_s, predicted_transfer_s=prediction.transfer_s,
            predicted_prefill_s=prediction.prefill_s, predicted_tbt_s=prediction.tbt_s, candidates=candidates,
            decode_candidates=decode_candidates)

    def _decode_candidates(self, view: View, chosen: Worker) -> list[DecodeCandidate]:
        """The chosen one, then those with the shortest predicted steps."""
        others = [worker for worker in view.decode if worker is not chosen]
        others.sort(key=view.tbt_s)
        return [DecodeCandidate(worker.id, view.tbt_s(worker), view.own(worker))
                for worker in (chosen, *others[:_MOST_DECODE - 1])]

    def _least(self, scored: Sequence[tuple[float, _T]]) -> _T:
        """The one with the least score; one of them drawn when several have it."""
        least = min(score for score, _ in scored)
        return self._rng.choice([one for score, one in scored if score == least])
