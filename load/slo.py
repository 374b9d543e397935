"""What the numbers mean. Pure: records in, numbers out; the report prints the definitions below beside them.

TTFT: from sending a request to its first chunk with text. Queueing at the client (schedule lag) is not in it.
TBT: the mean of the longest tenth of a request's gaps between chunks, rounded up to at least one gap, as the
Mooncake paper measures it (Qin et al., FAST'25, section 5). The plain mean gap is shown beside it.
Goodput: requests that finished and met both bounds, a second of offered load; rejected, failed and dropped
requests count as offered and not as good (the paper's "effective request capacity").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from load.record import RunRecord

WORST_SHARE = 0.1
"""Share of a request's gaps that its TBT is the mean of."""

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds a good request meets, in seconds, the bound itself included."""

    ttft_s: float
    tbt_s: float


def ttft_s(record: RunRecord) -> float | None:
    """Seconds to the first token; ``None`` when there was none."""
    return None if record.first_token_s is None else record.first_token_s - record.sent_s


def tbt_s(record: RunRecord) -> float | None:
    """Mean of the longest tenth of the gaps, in seconds; ``None`` for an answer of fewer than two chunks."""
    if not record.gaps_s:
        return None
    worst = sorted(record.gaps_s)[-math.ceil(len(record.gaps_s) * WORST_SHARE):]
    return sum(worst) / len(worst)


def mean_gap_s(record: RunRecord) -> float | None:
    """Mean of all gaps, in seconds; ``None`` for an answer of fewer than two chunks."""
    return sum(record.gaps_s) / len(record.gaps_s) if record.gaps_s else None


def meets_ttft(record: RunRecord, slo: Slo) -> bool:
    """It finished, its first token in time."""
    first = ttft_s(record)
    return record.outcome == "ok" and first is not None and first <= slo.ttft_s


def meets_tbt(record: RunRecord, slo: Slo) -> bool:
    """It finished, its tokens fast enough; an answer without gaps has none that is too long."""
    gap = tbt_s(record)
    return record.outcome == "ok" and (gap is None or gap <= slo.tbt_s)


def is_good(record: RunRecord, slo: Slo) -> bool:
    """It finished within both bounds."""
    return meets_ttft(record, slo) and meets_tbt(record, slo)


def percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile, linear between the two nearest ranks; ``values`` must not be empty."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample in a few numbers, all in the sample's unit."""

    count: int
    mean: float
    percentiles: dict[int, float]
    """{percent: value} for :data:`PERCENTILES`."""
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution | None:
        """Of the values that are there; ``None`` when there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(len(known), sum(known) / len(known),
                   {percent: percentile(known, percent) for percent in PERCENTILES}, max(known))


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Prompt tokens of finished requests whose server counted them."""

    requests: int
    prompt_tokens: int
    shared_tokens: int
    """An endless cache could have reused these, if every earlier request had been computed."""
    predicted_tokens: int
    """The conductor expected these; over ``predicted_requests``."""
    predicted_requests: int
    cached_tokens: int
    """Were not computed."""
    mean_error_tokens: float | None
    """Mean of |predicted - actual| over the requests with both."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Rates are per second of ``offered_s``."""

    offered: int
    outcomes: dict[str, int]
    """{outcome: requests}, all outcomes there are."""
    offered_s: float
    """Length of the schedule: first to last scheduled time, one second at least."""
    duration_s: float
    """First scheduled time to last end."""
    ttft: Distribution | None
    tbt: Distribution | None
    mean_gap: Distribution | None
    total: Distribution | None
    """Sending to end of finished requests."""
    lag: Distribution | None
    """How much later than scheduled requests left."""
    met_ttft: int
    met_tbt: int
    good: int
    output_tokens: int
    cache: CacheUse
    rejections: dict[str, int]
    """{code: requests}, most frequent first."""
    failures: dict[str, int]

    @property
    def goodput_rps(self) -> float:
        """Good requests a second."""
        return self.good / self.offered_s

    @property
    def offered_rps(self) -> float:
        """Requests the schedule asked for, a second."""
        return self.offered / self.offered_s


def summarize(records: Sequence[RunRecord], slo: Slo) -> Summary:
    """Everything the report's tables show; ``records`` may be empty."""
    finished = [record for record in records if record.outcome == "ok"]
    start_s = min((record.scheduled_s for record in records), default=0.0)
    end_s = max((record.scheduled_s for record in records), default=0.0)
    done_s = max((record.finished_s for record in records), default=0.0)
    return Summary(
        offered=len(records),
        outcomes=_counted(record.outcome for record in records),
        offered_s=max(1.0, end_s - start_s),
        duration_s=done_s - start_s,
        ttft=Distribution.of(ttft_s(record) for record in finished),
        tbt=Distribution.of(tbt_s(record) for record in finished),
        mean_gap=Distribution.of(mean_gap_s(record) for record in finished),
        total=Distribution.of(record.finished_s - record.sent_s for record in finished),
        lag=Distribution.of(record.sent_s - record.scheduled_s for record in records if record.outcome != "dropped"),
        met_ttft=sum(meets_ttft(record, slo) for record in records),
        met_tbt=sum(meets_tbt(record, slo) for record in records),
        good=sum(is_good(record, slo) for record in records),
        output_tokens=sum(record.completion_tokens or 0 for record in records),
        cache=_cache_use(finished),
        rejections=_counted(record.code or "unknown" for record in records if record.outcome == "rejected"),
        failures=_counted(record.code or "unknown" for record in records if record.outcome == "failed"),
    )


def _cache_use(finished: Sequence[RunRecord]) -> CacheUse:
    counted = [record for record in finished if record.prompt_tokens is not None]
    predicted = [record for record in counted if record.predicted_hit_tokens is not None]
    errors = [abs((record.predicted_hit_tokens or 0) - (record.cached_tokens or 0)) for record in predicted]
    return CacheUse(
        requests=len(counted),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in counted),
        shared_tokens=sum(record.shared_tokens for record in counted),
        predicted_tokens=sum(record.predicted_hit_tokens or 0 for record in predicted),
        predicted_requests=len(predicted),
        cached_tokens=sum(record.cached_tokens or 0 for record in counted),
        mean_error_tokens=sum(errors) / len(errors) if errors else None,
    )


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())
