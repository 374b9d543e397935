"""Percentiles of many durations, against the exact ones."""

from __future__ import annotations

import random

import msgspec
import pytest

from load.bench.histogram import Histogram
from load.slo import percentile


def filled(durations: list[float]) -> Histogram:
    histogram = Histogram()
    for duration_s in durations:
        histogram.add(duration_s)
    return histogram


@pytest.mark.parametrize("percent", [1, 50, 99, 100])
def test_percentiles_are_within_a_bucket_of_the_exact_ones(percent: float) -> None:
    chance = random.Random(7)
    durations = [chance.lognormvariate(-7, 1) for _ in range(20_000)]
    assert filled(durations).percentile_s(percent) == pytest.approx(percentile(durations, percent), rel=0.02)


def test_histograms_add_up_and_cross_a_wire() -> None:
    first, second = filled([0.001] * 3), filled([0.1])
    first.merge(msgspec.json.decode(msgspec.json.encode(second), type=Histogram))
    assert first == filled([0.001, 0.001, 0.001, 0.1]) and first.total == 4
    assert first.percentile_s(75) == pytest.approx(0.001, rel=0.01)
    assert first.percentile_s(76) == pytest.approx(0.1, rel=0.01)


def test_no_duration_is_too_short() -> None:
    assert filled([0.0]).percentile_s(50) < 1e-6
