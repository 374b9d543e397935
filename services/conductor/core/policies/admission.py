"""Who is turned away at arrival: the Mooncake paper's schemes. (Ours is part of ``placement``.)

Numbers and names are those of the technical report (arXiv 2407.00079 v3), section 7. A request's own bounds count,
else the settings'; without a bound nothing is checked against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from services.conductor.core.placement import Usable
from services.conductor.core.policy import Policy
from services.conductor.core.rejection import Reasons
from services.conductor.core.worker import Worker
from shared.ids import RequestId
from shared.messages import Candidate, PlaceRequest, Rejection

_REMEMBERED = 100_000
"""Requests whose predicted prefill end is remembered at most."""


@dataclass(frozen=True)
class Prediction:
    """What is expected of a choice, in seconds."""

    queue_s: float
    transfer_s: float
    prefill_s: float
    tbt_s: float
    decode: Worker

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return self.queue_s + self.transfer_s + self.prefill_s


@dataclass(frozen=True)
class Bounds:
    """The service levels one request is held to; ``None`` is no bound."""

    ttft_s: float | None
    tbt_s: float | None

    @classmethod
    def of(cls, ask: PlaceRequest, policy: Policy) -> Bounds:
        """The request's own, else the settings'."""
        return cls(policy.ttft_left_s(ask), ask.tbt_slo_s or policy.tbt_slo_s)


class Admission(ABC):
    """One scheme."""

    @abstractmethod
    def check(self, ask: PlaceRequest, prediction: Prediction, usable: Usable, policy: Policy, reasons: Reasons,
              candidates: list[Candidate], *, now: float) -> Rejection | None:
        """The rejection, or ``None`` for a request that is taken."""


class TakeAll(Admission):
    """Nobody is turned away."""

    def check(self, ask: PlaceRequest, prediction: Prediction, usable: Usable, policy: Policy, reasons: Reasons,
              candidates: list[Candidate], *, now: float) -> Rejection | None:
        """Nothing."""
        return None


class Bounded(Admission):
    """Algorithm 1, line 13: the predicted TTFT or TBT of the chosen pair exceeds its bound.

    With ``checks_tbt`` false it is the report's baseline: decode looks at its own load when the prefill is there, and
    may turn a request away whose prefill is done.
    """

    def __init__(self, *, checks_tbt: bool) -> None:
        self._checks_tbt = checks_tbt

    def check(self, ask: PlaceRequest, prediction: Prediction, usable: Usable, policy: Policy, reasons: Reasons,
              candidates: list[Candidate], *, now: float) -> Rejection | None:
        """By this request's own prediction."""
        bounds = Bounds.of(ask, policy)
        if bounds.ttft_s is not None and prediction.ttft_s > bounds.ttft_s:
            return reasons.ttft(prediction.ttft_s, prediction.queue_s, candidates, doubt=0.0)
        if self._checks_tbt and bounds.tbt_s is not None and prediction.tbt_s > bounds.tbt_s:
            return reasons.tbt(prediction.tbt_s, bounds.tbt_s, prediction.decode, candidates)
        return None


class EarlyRejection(Admission):
    """Section 7.2: accept iff the load of the prefill pool and that of the decode pool are at most 1.

    Prefill load: the predicted TTFT over its bound. Decode load: the step of the batches *as they are now* over its
    bound, mean over the workers; what is still being prefilled does not count, which makes the two pools oscillate.
    """

    what = "without this request, steps of the decode workers take on average"
    """What the time is that is compared with the bound."""

    def check(self, ask: PlaceRequest, prediction: Prediction, usable: Usable, policy: Policy, reasons: Reasons,
              candidates: list[Candidate], *, now: float) -> Rejection | None:
        """By the pools' loads."""
        bounds = Bounds.of(ask, policy)
        if bounds.ttft_s is not None and prediction.ttft_s > bounds.ttft_s:
            return reasons.ttft(prediction.ttft_s, prediction.queue_s, candidates, doubt=0.0)
        if bounds.tbt_s is not None:
            tbt_s = _mean([self.step_s(worker, prediction, now) for worker in usable.decode])
            if tbt_s > bounds.tbt_s:
                return reasons.tbt(tbt_s, bounds.tbt_s, prediction.decode, candidates, what=self.what)
        return None

    def step_s(self, worker: Worker, prediction: Prediction, now: float) -> float:
        """The step of the requests that decode on ``worker`` now."""
        jobs = [job for job in worker.decoding.values() if job.prefilled_s is not None]
        return worker.costs.step_s(batch=len(jobs), context_tokens=sum(job.num_tokens for job in jobs))


class PredictedRejection(EarlyRejection):
    """Section 7.4: the same, with the decode load of the moment the prefill is predicted to end.

    Added are requests whose prefill is over by then, taken off those that will have decoded for ``decode_s`` seconds,
    which is assumed to be the same for all.
    """

    what = "without this request, steps of the decode workers are predicted to take on average"

    def __init__(self, *, decode_s: float) -> None:
        self._decode_s = decode_s
        #: {request: when its prefill is predicted to end}, of those taken; the oldest go first
        self._ready_s: dict[RequestId, float] = {}

    def check(self, ask: PlaceRequest, prediction: Prediction, usable: Usable, policy: Policy, reasons: Reasons,
              candidates: list[Candidate], *, now: float) -> Rejection | None:
        """By the pools' loads; remembers who was taken."""
        rejection = super().check(ask, prediction, usable, policy, reasons, candidates, now=now)
        if rejection is None:
            self._ready_s[ask.request] = now + prediction.ttft_s
            if len(self._ready_s) > _REMEMBERED:
                del self._ready_s[next(iter(self._ready_s))]
        return rejection

    def step_s(self, worker: Worker, prediction: Prediction, now: float) -> float:
        """The step of the requests that are predicted to decode on ``worker`` then."""
        then_s = now + prediction.ttft_s
        tokens = [job.num_tokens for job in worker.decoding.values()
                  if (then_s - job.prefilled_s < self._decode_s if job.prefilled_s is not None
                      else self._ready_s.get(job.request, now) <= then_s)]
        return worker.costs.step_s(batch=len(tokens), context_tokens=sum(tokens))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
