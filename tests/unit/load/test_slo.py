"""The definitions, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from load.record import RunRecord
from load.slo import Distribution, Slo, is_good, mean_gap_s, meets_tbt, percentile, summarize, tbt_s, ttft_s

BOUNDS = Slo(ttft_s=1.0, tbt_s=0.1)


def record(index: int = 0, **fields: Any) -> RunRecord:
    base: dict[str, Any] = {"index": index, "scheduled_s": float(index), "sent_s": index + 0.25,
                            "finished_s": index + 2.0, "outcome": "ok", "input_tokens": 100, "output_tokens": 10,
                            "first_token_s": index + 1.0}
    return RunRecord(**{**base, **fields})


def test_ttft_counts_from_leaving_not_from_the_schedule() -> None:
    assert ttft_s(record(scheduled_s=0.0, sent_s=0.25, first_token_s=1.0)) == 0.75
    assert ttft_s(record(first_token_s=None)) is None


def test_tbt_is_the_mean_of_the_longest_tenth() -> None:
    # 20 gaps: the longest two are 0.30 and 0.20.
    gaps = [0.01] * 18 + [0.20, 0.30]
    assert tbt_s(record(gaps_s=gaps)) == pytest.approx(0.25)
    assert mean_gap_s(record(gaps_s=gaps)) == pytest.approx((0.18 + 0.5) / 20)
    # 11 gaps: a tenth is 1.1, rounded up to two.
    assert tbt_s(record(gaps_s=[0.0] * 9 + [0.1, 0.3])) == pytest.approx(0.2)
    # Fewer than ten: the longest one.
    assert tbt_s(record(gaps_s=[0.05, 0.4, 0.1])) == 0.4
    assert tbt_s(record()) is None and mean_gap_s(record()) is None


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (99, 3.97), (100, 4.0)])
def test_percentiles_are_linear_between_ranks(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)
    assert percentile([7.0], percent) == 7.0


def test_a_good_request_finished_within_both_bounds() -> None:
    assert is_good(record(sent_s=0.0, first_token_s=1.0, gaps_s=[0.1]), BOUNDS)  # the bounds themselves are in
    assert not is_good(record(sent_s=0.0, first_token_s=1.001), BOUNDS)
    assert not is_good(record(gaps_s=[0.2]), BOUNDS)
    assert meets_tbt(record(), BOUNDS)  # one chunk: no gap to be too long
    for outcome in ("failed", "rejected", "interrupted", "dropped"):
        assert not is_good(record(outcome=outcome), BOUNDS)


def test_distribution_leaves_out_what_is_not_there() -> None:
    found = Distribution.of([None, 1.0, 3.0])
    assert found is not None and (found.count, found.mean, found.maximum, found.percentiles[50]) == (2, 2.0, 3.0, 2.0)
    assert Distribution.of([None]) is None


def test_summary_of_a_mixed_run() -> None:
    records = [
        record(0, gaps_s=[0.05], prompt_tokens=100, cached_tokens=0, shared_tokens=0, predicted_hit_tokens=0,
               completion_tokens=2),
        record(1, gaps_s=[0.5], prompt_tokens=100, cached_tokens=64, shared_tokens=80, predicted_hit_tokens=48,
               completion_tokens=2),
        record(2, outcome="rejected", code="ttft", first_token_s=None, finished_s=2.5),
        record(3, outcome="rejected", code="ttft", first_token_s=None, finished_s=3.5),
        record(4, outcome="failed", code="timeout", first_token_s=None, finished_s=9.0),
        record(10, outcome="dropped", code="max_in_flight", first_token_s=None, finished_s=10.0, sent_s=10.0),
    ]
    found = summarize(records, BOUNDS)
    assert found.outcomes == {"ok": 2, "rejected": 2, "failed": 1, "dropped": 1}
    assert (found.offered, found.offered_s, found.duration_s) == (6, 10.0, 10.0)
    assert (found.met_ttft, found.met_tbt, found.good) == (2, 1, 1)
    assert (found.offered_rps, found.goodput_rps) == (0.6, 0.1)
    assert found.rejections == {"ttft": 2} and found.failures == {"timeout": 1}
    assert found.output_tokens == 4
    assert (found.cache.prompt_tokens, found.cache.cached_tokens, found.cache.shared_tokens) == (200, 64, 80)
    assert (found.cache.predicted_tokens, found.cache.mean_error_tokens) == (48, 8.0)
    assert found.lag is not None and found.lag.count == 5 and found.lag.maximum == 0.25
    assert found.total is not None and found.total.mean == 1.75


def test_summary_of_nothing() -> None:
    found = summarize([], BOUNDS)
    assert (found.offered, found.good, found.goodput_rps, found.duration_s) == (0, 0, 0.0, 0.0)
    assert found.ttft is None and found.cache.mean_error_tokens is None
