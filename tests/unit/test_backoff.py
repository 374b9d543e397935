"""The one retry schedule."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.backoff import delay_s


@given(st.integers(min_value=0, max_value=10_000), st.integers())
def test_a_delay_is_within_its_bounds(attempt: int, seed: int) -> None:
    delay = delay_s(attempt, first_s=0.05, limit_s=2.0, chance=random.Random(seed))
    full_s = min(2.0, 0.05 * 2.0 ** min(attempt, 60))
    assert full_s / 2 <= delay <= full_s


def test_it_doubles_up_to_the_limit() -> None:
    chance = random.Random(0)
    mean_s = [sum(delay_s(attempt, chance=chance) for _ in range(500)) / 500 for attempt in range(12)]
    assert all(1.8 < later / earlier < 2.2 for earlier, later in pairwise(mean_s[:6]))
    assert 1.4 < mean_s[-1] < 1.6


def test_equal_seeds_give_equal_delays() -> None:
    first, second = random.Random(7), random.Random(7)
    assert [delay_s(n, chance=first) for n in range(5)] == [delay_s(n, chance=second) for n in range(5)]
