"""Rows of a batch: the parts that need no Postgres."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.catalog.fold import Folded, Seen, first_missing, fold, has_hole, join, lives, multirange
from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.kv import Tier, pack_keys
from shared.messages import Bye, Evicted, Stored, StoredBlock

LIFE = ("a", "1")


def block(number: int, tier: Tier = Tier.DRAM) -> StoredBlock:
    return StoredBlock(key=BlockKey(bytes([number]) * 32), parent=BlockKey(bytes(32)), depth=0, nbytes=1, tier=tier)


def stored(seq: int, *numbers: int) -> Stored:
    return Stored(worker=WorkerId("a"), incarnation=Incarnation("1"), seq=seq, spec=SpecDigest("s"), at_s=float(seq),
                  blocks=[block(number) for number in numbers])


def evicted(seq: int, *numbers: int) -> Evicted:
    return Evicted(worker=WorkerId("a"), incarnation=Incarnation("1"), seq=seq, at_s=float(seq),
                   keys=pack_keys([block(number).key for number in numbers]))


def folded(*events: Stored | Evicted, spans: tuple[tuple[int, int], ...] = ()) -> Folded:
    return fold(events, {LIFE: Seen(7, spans)}, now_s=0.0)


@given(st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)))
def test_spans_are_sets(some: set[int], others: set[int]) -> None:
    spans = join(join((), some), others)
    numbers = some | others
    assert {seq for start, stop in spans for seq in range(start, stop)} == numbers
    assert all(stop < start for (_, stop), (start, _) in pairwise(spans)), "joined up"
    assert [seq for seq in range(70) if seq in Seen(1, spans)] == sorted(numbers)
    assert first_missing(spans) == next(seq for seq in range(1, 70) if seq not in numbers)
    assert has_hole(spans) == (bool(numbers) and len(numbers) < max(numbers))
    assert multirange(spans).count("[") == len(spans)


def test_a_row_a_key_in_order_of_keys() -> None:
    rows = folded(stored(1, 3, 1), evicted(2, 3), stored(3, 3, 2), stored(1, 3, 1))
    assert [(row[0][0], row[1], row[4]) for row in rows.copy_rows()] == [(1, 7, 1), (2, 7, 3), (3, 7, 3)]
    assert [row[0][0] for row in rows.block_rows()] == [1, 2, 3]
    assert [(row[1][0], row[4], row[7].timestamp()) for row in rows.eviction_rows()] == [(3, 2, 1.0)]
    assert rows.seen == {LIFE: ((1, 4),)}
    assert (rows.gaps, rows.broken, rows.late_rows()) == ([], {}, [])


def test_what_was_seen_only_claims_blocks() -> None:
    rows = folded(stored(1, 1), evicted(2, 1), spans=((1, 3),))
    assert [row[0][0] for row in rows.block_rows()] == [1]
    assert (rows.copy_rows(), rows.eviction_rows(), rows.seen) == ([], [], {})


def test_an_eviction_above_a_hole_is_kept_for_the_late() -> None:
    rows = folded(stored(4, 1, 2), evicted(5, 1, 2), stored(6, 2), spans=((1, 3),))
    assert (rows.gaps, rows.broken) == ([LIFE], {7: 3})
    assert [(row[0][0], row[3]) for row in rows.late_rows()] == [(1, 5), (2, 5)]
    closed = folded(stored(3, 1), spans=((1, 3), (4, 7)))
    assert (closed.gaps, closed.broken, closed.late_rows()) == ([], {7: 7}, [])


def test_a_hole_is_told_by_every_batch() -> None:
    assert folded(stored(1, 1), spans=((1, 2), (3, 4))).gaps == [LIFE]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2**32))
def test_the_order_of_a_batch_does_not_matter(kinds: list[bool], seed: int) -> None:
    chance = random.Random(seed)
    events = [(stored if kind else evicted)(seq, *chance.sample(range(4), 2)) for seq, kind in enumerate(kinds, 1)]
    shuffled = chance.sample(events + chance.choices(events, k=3), k=len(events) + 3)
    one, other = folded(*events), folded(*shuffled)
    for rows in (Folded.copy_rows, Folded.eviction_rows, Folded.block_rows):
        assert rows(one) == rows(other)


def test_lives_are_those_of_news() -> None:
    other = Evicted(worker=WorkerId("b"), incarnation=Incarnation("0"), seq=1, at_s=0.0, keys=b"")
    assert lives([other, stored(1, 1), Bye(worker=WorkerId("c"), incarnation=Incarnation("1"))]) == [LIFE, ("b", "0")]


def test_a_bye_without_a_time_takes_now() -> None:
    bye = Bye(worker=WorkerId("a"), incarnation=Incarnation("1"))
    assert fold([bye], {}, now_s=7.0).worker_rows()[0][9].timestamp() == 7.0


@pytest.mark.parametrize("at_s", [float("nan"), float("inf"), 1e300])
def test_times_that_are_none(at_s: float) -> None:
    event = Stored(worker=WorkerId("a"), incarnation=Incarnation("1"), seq=1, spec=SpecDigest("s"), at_s=at_s,
                   blocks=[])
    with pytest.raises((ValueError, OverflowError)):
        fold([event], {LIFE: Seen(1, ())}, now_s=0.0)
