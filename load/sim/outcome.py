"""What became of the requests of a run, and the numbers over them. The definitions are those of ``load.slo``."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from load.sim.profile import NodeProfile
from load.sim.request import Job

_COLUMNS = 10

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Objective:
    """Bounds in seconds. With ``stretch`` the one on TTFT grows with the prompt's own uncached prefill time."""

    ttft_s: float
    tbt_s: float
    stretch: float = 0.0

    def ttft_bound_s(self, num_tokens: float, profile: NodeProfile) -> float:
        """The bound a prompt of ``num_tokens`` is held to."""
        return self.ttft_s + (self.stretch * profile.prefill_s(num_tokens) if self.stretch else 0.0)


class Distribution(msgspec.Struct, frozen=True):
    """A sample in a few numbers, seconds; ``None`` for an empty one."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: _Array) -> Distribution:
        """Of all values."""
        if not len(values):
            return cls(None, None, None, None)
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        return cls(float(values.mean()), float(p50), float(p90), float(p99))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers: what ``moonbus sim run --json`` writes under ``summary``."""

    requests: int
    """Of the trace, all that were sent."""
    accepted: int
    """Placed at first asking; ``requests`` less those rejected at arrival."""
    rejected: dict[str, int]
    """{reason: requests}; ``decode`` is a rejection by the decode node after the prefill was done."""
    failed: int
    """Given up after worker failures."""
    completed: int
    ttft_s: Distribution
    """Of the requests that got a first token."""
    tbt_s: Distribution
    """Of the completed ones; each request's is the mean of the longest tenth of its gaps."""
    slo_share: float
    """Completed within both bounds, of all requests."""
    ttft_share: float
    """First token within its bound, of all requests."""
    tbt_share: float
    """Completed with their TBT within its bound, of all requests."""
    prompt_tokens: int
    """Of the requests whose prefill began."""
    hit_tokens: int
    """Of those, reused."""
    transferred_bytes: int
    """Over all links."""
    pulled_bytes: int
    """Of those, prefixes from cache to cache."""
    prefill_busy_s: float
    """GPU time of all prefills."""
    prefill_mean_s: float
    """Time a prefill has its node, waiting for what it reuses included."""
    prefill_compute_s: float
    """Of that, computing: what the Mooncake paper calls the GPU time of a prefill."""
    wasted_prefill_s: float
    """GPU time of prefills whose request was turned away or lost afterwards."""
    ttft_error: float | None
    """Mean of |predicted - actual| over the mean actual TTFT; ``None`` when nothing predicted came."""
    long_ttft_p99_s: float | None
    """99th percentile of the TTFT of the longest hundredth of the prompts; ``None`` when none had a first token."""
    duration_s: float
    """Simulated, to the last end."""
    sim_wall_s: float


class Outcomes:
    """Collects. One row a request that ended; rejections are counted and have a row without times.

    What becomes of requests is held to ``objective``; ``others`` are looked at besides.
    """

    def __init__(self, objective: Objective, profile: NodeProfile, *, expected: int,
                 others: Sequence[Objective] = ()) -> None:
        self.objective, self._profile = objective, profile
        self._objectives = (objective, *others)
        self._missed = [0] * len(self._objectives)
        self.expected = expected
        self.rejected: Counter[str] = Counter()
        self.failed = self.completed = 0
        self.prompt_tokens = self.hit_tokens = self.pulled_bytes = 0
        self.prefills = 0
        self.computed_s = self.wasted_s = self.loading_s = 0.0
        #: per ended request, ``_COLUMNS`` numbers: index, arrival, prompt tokens, TTFT (nan: none), TBT (nan: none),
        #: TTFT bound, end, predicted TTFT (nan: none), hit tokens, answer tokens
        self._rows = array("d")
        self.reasons: dict[int, str] = {}
        """{index: why it was rejected or failed}."""

    @property
    def ended(self) -> int:
        """Requests that are over."""
        return len(self._rows) // _COLUMNS

    @property
    def missed(self) -> int:
        """Requests that are over and missed a bound, under the objective of which the fewest did."""
        return min(self._missed)

    def prefilled(self, job: Job) -> None:
        """A prefill is computed."""
        self.prefills += 1
        self.computed_s += job.computed_s
        self.loading_s += job.loading_s
        self.prompt_tokens += job.num_tokens
        self.hit_tokens += job.hit_tokens
        self.pulled_bytes += job.fetched_bytes

    def reject(self, job: Job, reason: str, now: float) -> None:
        """A request is turned away."""
        self.rejected[reason] += 1
        self._row(job, now, reason)

    def fail(self, job: Job, reason: str, now: float) -> None:
        """A request is given up."""
        self.failed += 1
        self._row(job, now, reason)

    def complete(self, job: Job) -> None:
        """An answer is complete."""
        self.completed += 1
        self._row(job, job.finished_s, "")

    def _row(self, job: Job, end_s: float, reason: str) -> None:
        nan = float("nan")
        ttft_s = job.first_s - job.at_s if job.first_s >= 0 else nan
        tbt_s = max(job.gap_s, job.worst_gap_s) if not reason and job.output_tokens > 1 else nan
        bounds_s = [objective.ttft_bound_s(job.num_tokens, self._profile) for objective in self._objectives]
        for i, (objective, bound_s) in enumerate(zip(self._objectives, bounds_s, strict=True)):
            if reason or not ttft_s <= bound_s or tbt_s > objective.tbt_s:
                self._missed[i] += 1
        if reason:
            self.reasons[job.index] = reason
        self._rows.extend((job.index, job.at_s, job.num_tokens, ttft_s, tbt_s, bounds_s[0], end_s,
                          job.predicted_ttft_s if job.predicted_ttft_s >= 0 else nan, job.hit_tokens,
                          job.output_tokens))

    def table(self) -> _Array:
        """One row a request that ended, in order of index: index, arrival, prompt tokens, TTFT, TBT, TTFT bound, end,
        predicted TTFT, hit tokens, answer tokens; what did not happen is nan. Shape ``(requests, 10)``."""
        table = np.array(self._rows).reshape(-1, _COLUMNS)
        return table[np.argsort(table[:, 0], kind="stable")]

    def shares(self) -> list[float]:
        """Requests inside both bounds, of all, under each objective."""
        return [1.0 - (missed + self.expected - self.ended) / max(self.expected, 1) for missed in self._missed]

    def summary(self, *, transferred_bytes: float, busy_s: float, duration_s: float, wall_s: float) -> Summary:
        """All rows in numbers."""
        table = self.table()
        ttft_s, tbt_s, bound_s = table[:, 3], table[:, 4], table[:, 5]
        is_done = np.array([int(index) not in self.reasons for index in table[:, 0]], dtype=bool)
        has_first = ~np.isnan(ttft_s)
        is_quick = has_first & (ttft_s <= bound_s)
        is_smooth = is_done & (np.isnan(tbt_s) | (tbt_s <= self.objective.tbt_s))
        predicted = has_first & ~np.isnan(table[:, 7])
        longest = np.percentile(table[:, 2], 99) if len(table) else 0.0
        is_long = has_first & (table[:, 2] >= longest)
        count = max(self.expected, 1)
        turned_away = sum(number for reason, number in self.rejected.items() if reason != "decode")
        return Summary(
            requests=self.expected, accepted=len(table) - turned_away, rejected=dict(self.rejected),
            failed=self.failed, completed=self.completed, ttft_s=Distribution.of(ttft_s[has_first]),
            tbt_s=Distribution.of(tbt_s[is_done & ~np.isnan(tbt_s)]),
            slo_share=float(np.sum(is_quick & is_smooth)) / count, ttft_share=float(np.sum(is_quick)) / count,
            tbt_share=float(np.sum(is_smooth)) / count, prompt_tokens=self.prompt_tokens, hit_tokens=self.hit_tokens,
            transferred_bytes=round(transferred_bytes), pulled_bytes=self.pulled_bytes, prefill_busy_s=busy_s,
            prefill_mean_s=self.computed_s / max(self.prefills, 1),
            prefill_compute_s=(self.computed_s - self.loading_s) / max(self.prefills, 1),
            wasted_prefill_s=self.wasted_s,
            ttft_error=(float(np.mean(np.abs(table[predicted, 7] - ttft_s[predicted])) / np.mean(ttft_s[predicted]))
                        if predicted.any() else None),
            long_ttft_p99_s=float(np.percentile(ttft_s[is_long], 99)) if is_long.any() else None,
            duration_s=duration_s, sim_wall_s=wall_s)
