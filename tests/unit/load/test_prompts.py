"""Prompts: equal ids give equal contents, and prompts part exactly where their ids part."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load.workload.prompts import WORDS, Plan, Planner, Scaling, text, token_ids, words_per_token
from load.workload.traces import Arrival

VOCABULARY = range(100, 1100)
GOLDEN_IDS = [21391, 21391, 36000, 30372, 20203, 34925]
GOLDEN_TEXT = "field field foot floor practice tree"


def arrivals_of(paths: list[list[int]], block_tokens: int, tails: list[int]) -> list[Arrival]:
    """Arrivals whose prompts walk ``paths`` of a tree: a path is the child number taken at each depth.

    Ids are numbered in order of first use, as in a trace. The last block of a path is as long as its id's
    tail.
    """
    ids: dict[tuple[int, ...], int] = {}
    tail_of: dict[int, int] = {}
    inner = {tuple(path[:depth]) for path in paths for depth in range(1, len(path))}
    arrivals = []
    for index, path in enumerate(paths):
        chain = tuple(ids.setdefault(tuple(path[:depth + 1]), len(ids)) for depth in range(len(path)))
        # An id that goes on elsewhere names a full block; its length is a property of the id.
        tail = block_tokens if tuple(path) in inner else tail_of.setdefault(chain[-1], tails[index % len(tails)])
        arrivals.append(Arrival(index, float(index), block_tokens * (len(path) - 1) + tail, 10, chain))
    return arrivals


def shared_prefix(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Arrival], int, Scaling]:
    block_tokens = draw(st.integers(1, 40))
    paths = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=2, max_size=8))
    tails = draw(st.lists(st.integers(1, block_tokens), min_size=1, max_size=4))
    scale = draw(st.floats(1 / block_tokens, 3, allow_nan=False))
    if block_tokens * scale < 1:
        scale = 1.0
    max_input = draw(st.none() | st.integers(1, 60))
    return arrivals_of(paths, block_tokens, tails), block_tokens, Scaling(length_scale=scale, max_input=max_input)


@settings(max_examples=200, deadline=None)
@given(workloads(), st.integers(0, 5))
def test_prompts_share_exactly_what_their_ids_share(workload: tuple[list[Arrival], int, Scaling], seed: int) -> None:
    arrivals, block_tokens, scaling = workload
    planner = Planner(block_tokens=block_tokens, scaling=scaling)
    plans = [planner.plan(arrival) for arrival in arrivals]
    filled = [token_ids(plan, vocabulary=VOCABULARY, seed=seed) for plan in plans]
    for plan, ids in zip(plans, filled, strict=True):
        assert len(ids) == plan.input_tokens and all(token in VOCABULARY for token in ids)
    for i, left in enumerate(plans):
        for j, right in enumerate(plans[:i]):
            same = [a.length for a, b in zip(left.pieces, right.pieces, strict=False) if a.hash_id == b.hash_id]
            assert shared_prefix(filled[i], filled[j]) == sum(same)
        # What an endless cache would have is the most that any one earlier prompt shares.
        assert left.shared_tokens == max((shared_prefix(filled[i], filled[j]) for j in range(i)), default=0)


def plans_of(arrivals: list[Arrival], scaling: Scaling, block_tokens: int = 512) -> list[Plan]:
    planner = Planner(block_tokens=block_tokens, scaling=scaling)
    return [planner.plan(arrival) for arrival in arrivals]


def test_lengths_scale_and_are_cut_at_the_end() -> None:
    arrival = Arrival(0, 0.0, 1300, 200, (0, 1, 2))
    plan, = plans_of([arrival], Scaling(length_scale=0.1, output_scale=0.5, max_output=64))
    assert plan.input_tokens == 130 and plan.output_tokens == 64
    assert [(piece.start, piece.length) for piece in plan.pieces] == [(0, 51), (51, 51), (102, 28)]
    cut, = plans_of([arrival], Scaling(length_scale=0.1, max_input=60))
    assert cut.input_tokens == 60
    whole = token_ids(plan, vocabulary=VOCABULARY, seed=0)
    assert token_ids(cut, vocabulary=VOCABULARY, seed=0) == whole[:60]


def test_an_answer_has_a_token_at_least() -> None:
    plan, = plans_of([Arrival(0, 0.0, 512, 0, (0,))], Scaling(output_scale=0.01))
    assert plan.output_tokens == 1


def test_a_scale_that_loses_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 0\.001953"):
        Planner(block_tokens=512, scaling=Scaling(length_scale=0.001))


def test_contents_stay_what_they_are() -> None:
    """Results of different versions can be compared only if the prompts are the same."""
    plan, = plans_of([Arrival(0, 0.0, 20, 1, (0, 1))], Scaling(), block_tokens=16)
    assert token_ids(plan, vocabulary=range(12288, 36864), seed=0)[:6] == GOLDEN_IDS
    assert text(plan, words_per_token=0.3, seed=0) == GOLDEN_TEXT


def test_seeds_share_nothing() -> None:
    plan, = plans_of([Arrival(0, 0.0, 600, 1, (0, 1))], Scaling())
    firsts = {token_ids(plan, vocabulary=range(20_000), seed=seed)[0] for seed in range(20)}
    assert len(firsts) == 20


def test_more_siblings_than_vocabulary_part_at_the_second_token() -> None:
    arrivals = [Arrival(i, 0.0, 32, 1, (0, i + 1)) for i in range(25)]
    filled = [token_ids(plan, vocabulary=range(10), seed=3) for plan in plans_of(arrivals, Scaling(), block_tokens=16)]
    assert all(shared_prefix(filled[i], filled[j]) in (16, 17) for i in range(25) for j in range(i))


def test_text_is_as_long_as_asked_and_shares_words() -> None:
    arrivals = [Arrival(0, 0.0, 1500, 1, (0, 1, 2)), Arrival(1, 0.0, 1500, 1, (0, 1, 3))]
    left, right = (text(plan, words_per_token=0.5, seed=0).split() for plan in plans_of(arrivals, Scaling()))
    assert len(left) == 750 and set(left) <= set(WORDS)
    assert left[:512] == right[:512] and left[512] != right[512]


def test_words_per_token_leaves_the_template_out() -> None:
    assert words_per_token([(16, 16 * 2 + 30), (64, 64 * 2 + 30)]) == 0.5
    with pytest.raises(ValueError, match="64 words made 10 tokens"):
        words_per_token([(16, 10), (64, 10)])


def test_words_are_many_and_distinct() -> None:
    assert len(WORDS) == len(set(WORDS)) and len(WORDS) >= 200
    assert all(a != b for a, b in pairwise(sorted(WORDS)))
