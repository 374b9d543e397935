"""IntervalSet against a plain set of integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.transfer.intervals import IntervalSet

SIZE = 40
bounds = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE))
steps = st.lists(st.tuples(st.booleans(), bounds), max_size=25)


@given(steps, bounds)
def test_agrees_with_a_set_of_integers(steps: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]) -> None:
    intervals, model = IntervalSet(), set[int]()
    for add, (start, stop) in steps:
        if add:
            intervals.add(start, stop)
            model |= set(range(start, stop))
        else:
            intervals.remove(start, stop)
            model -= set(range(start, stop))
    wanted = set(range(*asked))
    assert intervals.covers(*asked) == (wanted <= model)
    assert intervals.overlaps(*asked) == bool(wanted & model)
    assert intervals.total == len(model)


@given(steps)
def test_intervals_stay_sorted_disjoint_and_apart(steps: list[tuple[bool, tuple[int, int]]]) -> None:
    intervals = IntervalSet()
    for add, (start, stop) in steps:
        (intervals.add if add else intervals.remove)(start, stop)
        flat = [bound for interval in intervals for bound in interval]
        assert flat == sorted(set(flat)), "an empty interval, or two that touch"
