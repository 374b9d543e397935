"""The order within a worker, against hand-computed numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.order import FCFS, ORDER, SRPT, Order, aged

ORDERS = (FCFS, SRPT, ORDER, aged(0.05), Order(stretch=2.0, most_s=5.0))
seconds = st.floats(0.0, 1e4)


def test_waiting_and_length_are_one_number() -> None:
    order = Order(stretch=20.0, most_s=40.0)
    assert order.rank(100.0, 0.5) == 110.0
    assert order.rank(100.0, 3.0) == 140.0, "60 s would be more than anybody may come later and go first"
    assert aged(0.05).rank(100.0, 3.0) == 160.0
    assert FCFS.rank(100.0, 3.0) == 100.0 and not FCFS.is_preemptive


def test_without_aging_only_what_is_left_counts_and_between_equals_who_came_first() -> None:
    assert aged(0.0) is SRPT
    assert SRPT.rank(1e5, 0.001) < SRPT.rank(0.0, 0.002)
    assert SRPT.rank(1.0, 0.001) < SRPT.rank(2.0, 0.001)


@given(st.sampled_from(ORDERS), seconds, seconds, seconds)
def test_the_order_of_two_that_wait_does_not_depend_on_when_it_is_asked(order: Order, since_s: float, left_s: float,
                                                                        less_s: float) -> None:
    assert order.rank(since_s, min(less_s, left_s)) <= order.rank(since_s, left_s), "computing never sets back"
    assert order.rank(since_s + order.most_s, 0.0) >= order.rank(since_s, left_s)


def test_many_side_by_side_are_the_same() -> None:
    left_s = np.array([0.0, 0.1, 1.0, 7.0])
    for order in ORDERS:
        assert order.ranks(3.0, left_s) == pytest.approx([order.rank(3.0, value) for value in left_s])
