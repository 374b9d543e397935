"""Which partitions come and go."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.catalog.retention import AHEAD, AHEAD_S, HOUR_S, MOST_MOVED, Partition, plan

DAY_S = 24 * HOUR_S
NOW_S = 1000 * DAY_S + 5 * HOUR_S


def test_the_first_ones() -> None:
    made = plan("t", [], now_s=NOW_S, keep_s=DAY_S, max_bytes=10**9).make
    assert [(part.start_s, part.stop_s) for part in made] == [
        ((1000 + day) * DAY_S, (1001 + day) * DAY_S) for day in range(3)]
    assert made[0].name == f"t_{1000 * 86400}"
    assert plan("t", made, now_s=NOW_S, keep_s=DAY_S, max_bytes=10**9).make == ()


def test_the_old_ones_go_and_the_large_ones() -> None:
    days = [Partition(str(day), day * DAY_S, (day + 1) * DAY_S, nbytes=100) for day in range(990, 1003)]
    by_age = plan("t", days, now_s=NOW_S, keep_s=5 * DAY_S, max_bytes=10**9)
    assert [part.name for part in by_age.drop] == ["990", "991", "992", "993", "994"]
    by_size = plan("t", days, now_s=NOW_S, keep_s=50 * DAY_S, max_bytes=450)
    assert [part.name for part in by_size.drop] == [str(day) for day in range(990, 999)]
    everything = plan("t", days, now_s=NOW_S, keep_s=50 * DAY_S, max_bytes=1)
    assert [part.name for part in everything.drop] == [str(day) for day in range(990, 1000)], "not what is written to"


def test_what_is_too_much_to_be_moved_stays_in_the_rest() -> None:
    few = plan("t", [], now_s=NOW_S, keep_s=DAY_S, max_bytes=10**9, rest_bytes=MOST_MOVED).make
    assert few[0].start_s == 1000 * DAY_S
    many = plan("t", [], now_s=NOW_S, keep_s=DAY_S, max_bytes=10**9, rest_bytes=MOST_MOVED + 1).make
    assert [part.start_s for part in many] == [1001 * DAY_S, 1002 * DAY_S]
    assert plan("t", many, now_s=NOW_S, keep_s=DAY_S, max_bytes=10**9, rest_bytes=MOST_MOVED + 1).make == ()


def test_a_fast_table_gets_short_ones() -> None:
    today = Partition("today", 1000 * DAY_S, 1001 * DAY_S, nbytes=10**6)
    made = plan("t", [today], now_s=NOW_S, keep_s=DAY_S, max_bytes=4 * 10**6).make
    assert made[0].start_s == today.stop_s
    assert {part.stop_s - part.start_s for part in made} == {HOUR_S}
    assert len(made) == AHEAD - 1


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10**8)), max_size=30), st.integers(10**6, 10**9))
def test_partitions_never_overlap_and_cover_now(steps: list[tuple[int, int]], max_bytes: int) -> None:
    """Hours pass, bytes come, and the plan is followed each time."""
    now_s, parts = NOW_S, []
    for hours, nbytes in steps:
        todo = plan("t", parts, now_s=now_s, keep_s=3 * DAY_S, max_bytes=max_bytes)
        parts = [part for part in parts if part not in todo.drop] + list(todo.make)
        ordered = sorted(parts, key=lambda part: part.start_s)
        assert all(one.stop_s <= other.start_s for one, other in pairwise(ordered))
        current = [part for part in parts if part.start_s <= now_s < part.stop_s]
        assert len(current) == 1 or max(part.stop_s for part in parts) > now_s
        assert max(part.stop_s for part in parts) <= now_s + AHEAD_S + DAY_S
        if current:
            parts = [Partition(part.name, part.start_s, part.stop_s, part.nbytes + (part in current) * nbytes)
                     for part in parts]
        now_s += hours * HOUR_S
