"""The prefill queue: in order, chunks end on block boundaries, every token exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.prefill.core.queue import Chunk, PrefillQueue
from shared.errors import Bug
from shared.ids import BlockKey, OperationId
from shared.messages import Profile
from shared.order import FCFS, ORDER, SRPT, Order, aged

PROFILE = Profile(prefill_fixed_s=0.0, prefill_per_token_s=1.0, prefill_per_token2_s=0.0)
"""A second a token."""


def queue_of(order: Order, *, chunk_tokens: int, block_tokens: int = 4) -> PrefillQueue:
    return PrefillQueue(order, PROFILE, chunk_tokens=chunk_tokens, block_tokens=block_tokens)


def test_oldest_first_and_the_rest_of_the_pass_goes_to_the_next() -> None:
    queue = queue_of(FCFS, chunk_tokens=16, block_tokens=4)
    queue.add(OperationId("a"), total=10, done=0, now=0.0)
    queue.add(OperationId("b"), total=20, done=8, now=1.0)
    assert queue.plan() == [Chunk(OperationId("a"), 0, 10, True), Chunk(OperationId("b"), 8, 4, False)]


def test_who_has_less_left_takes_over_at_the_next_pass() -> None:
    queue = queue_of(SRPT, chunk_tokens=8)
    queue.add(OperationId("long"), total=40, done=0, now=0.0)
    queue.advance(queue.plan()[0])
    queue.add(OperationId("short"), total=12, done=0, now=1.0)
    assert queue.plan() == [Chunk(OperationId("short"), 0, 8, False)]
    queue.advance(queue.plan()[0])
    assert queue.plan() == [Chunk(OperationId("short"), 8, 4, True), Chunk(OperationId("long"), 8, 4, False)]


def test_what_is_reused_is_not_left_and_waiting_counts() -> None:
    queue = queue_of(Order(stretch=1.0, most_s=20.0), chunk_tokens=4)
    queue.add(OperationId("whole"), total=16, done=0, now=0.0)
    queue.add(OperationId("reusing"), total=32, done=24, now=5.0)
    assert queue.plan()[0].operation == "reusing", "5 + 8 is less than 0 + 16"
    queue.remove(OperationId("reusing"))
    queue.add(OperationId("late"), total=4, done=0, now=13.0)
    assert queue.plan()[0].operation == "whole", "13 + 4 is more than 0 + 16"
    queue.add(OperationId("huge"), total=400, done=0, now=6.0)
    queue.add(OperationId("after"), total=12, done=0, now=15.0)
    queue.remove(OperationId("whole"))
    queue.remove(OperationId("late"))
    assert queue.plan()[0].operation == "huge", "nobody waits for who comes over 20 s later"


def test_a_head_start_counts_as_having_waited() -> None:
    queue = queue_of(Order(stretch=1.0), chunk_tokens=4)
    queue.add(OperationId("usual"), total=16, done=0, now=0.0)
    queue.add(OperationId("high"), total=16, done=0, now=15.0, head_start_s=20.0)
    queue.add(OperationId("low"), total=4, done=0, now=0.0, head_start_s=-20.0)
    assert queue.plan()[0].operation == "high"
    queue.remove(OperationId("high"))
    assert queue.plan()[0].operation == "usual", "20 + 4 is more than 0 + 16"


def test_a_conductor_says_by_how_much_others_may_come_later() -> None:
    queue = queue_of(Order(stretch=1.0), chunk_tokens=4)
    queue.add(OperationId("usual"), total=16, done=0, now=0.0)
    queue.add(OperationId("yields"), total=4, done=0, now=1.0, head_start_s=100.0, lead_s=15.5)
    assert queue.plan()[0].operation == "usual", "1 + 15.5 is more than 0 + 16"
    queue.advance(queue.plan()[0])
    queue.add(OperationId("hurries"), total=40, done=0, now=2.0, lead_s=9.0)
    assert queue.plan()[0].operation == "hurries", "2 + 9 is less than 0 + 12"
    queue.advance(queue.plan()[0])
    assert queue.plan()[0].operation == "hurries", "and what is computed sets nobody back"


def test_a_removed_prompt_is_forgotten_even_while_computed() -> None:
    queue = queue_of(FCFS, chunk_tokens=4, block_tokens=4)
    queue.add(OperationId("a"), total=8, done=0, now=0.0)
    chunk = queue.plan()[0]
    queue.remove(OperationId("a"))
    queue.advance(chunk)
    assert not queue.plan() and queue.remaining_tokens == 0


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=6), st.integers(1, 4),
       st.sampled_from([FCFS, SRPT, ORDER, aged(0.5)]))
def test_every_token_once_in_order_and_blocks_never_split(prompts: list[tuple[int, int]], chunk_blocks: int,
                                                          order: Order) -> None:
    block = 4
    queue = queue_of(order, chunk_tokens=chunk_blocks * block, block_tokens=block)
    expected = {}
    for i, (total, reused) in enumerate(prompts):
        done = min(reused, (total - 1) // block) * block
        expected[OperationId(str(i))] = list(range(done, total))
        queue.add(OperationId(str(i)), total=total, done=done, now=float(i))
    computed: dict[OperationId, list[int]] = {operation: [] for operation in expected}
    while chunks := queue.plan():
        assert sum(chunk.length for chunk in chunks) <= chunk_blocks * block
        for chunk in chunks:
            computed[chunk.operation] += range(chunk.start, chunk.start + chunk.length)
            assert chunk.start % block == 0
            assert chunk.last or chunk.length % block == 0
            queue.advance(chunk)
    assert computed == expected


def keys_of(path: str) -> list[BlockKey]:
    """A key a letter, chained: prompts share the blocks of the prefix they share."""
    return [BlockKey(path[:n].encode()) for n in range(1, len(path) + 1)]


def test_siblings_wait_for_the_block_that_is_computed_and_go_on_behind_it() -> None:
    queue = queue_of(FCFS, chunk_tokens=32)
    queue.add(OperationId("first"), total=13, done=0, now=0.0, keys=keys_of("aab"))
    queue.add(OperationId("second"), total=14, done=0, now=1.0, keys=keys_of("aac"))
    queue.add(OperationId("other"), total=9, done=0, now=2.0, keys=keys_of("xy"))
    assert queue.plan() == [Chunk(OperationId("first"), 0, 13, True), Chunk(OperationId("other"), 0, 9, True)]
    for chunk in queue.plan():
        queue.advance(chunk)
    queue.reuse(OperationId("second"), 8)
    assert queue.remaining_tokens == 6
    assert queue.plan() == [Chunk(OperationId("second"), 8, 6, True)]


def test_what_is_on_its_way_is_waited_for_but_the_last_token_is_computed() -> None:
    queue = queue_of(FCFS, chunk_tokens=32)
    queue.add(OperationId("a"), total=8, done=0, now=0.0, keys=keys_of("ab"))
    assert queue.plan(set(keys_of("a"))) == []
    queue.reuse(OperationId("a"), 4)
    assert queue.plan(set(keys_of("ab"))) == [Chunk(OperationId("a"), 4, 4, True)], "its last block is its own work"
    for done in (0, 6, 8):
        with pytest.raises(Bug):
            queue.reuse(OperationId("a"), done)


PATHS = st.lists(st.tuples(st.text("ab", min_size=1, max_size=5), st.integers(0, 3)), min_size=1, max_size=8)


@given(PATHS, st.integers(1, 5), st.sampled_from([FCFS, SRPT, ORDER]), st.lists(st.integers(0, 7), max_size=6),
       st.sets(st.text("ab", min_size=1, max_size=3), max_size=2), st.booleans())
def test_no_block_is_computed_twice(prompts: list[tuple[str, int]], chunk_blocks: int, order: Order,
                                    cancelled: list[int], coming: set[str], arrives: bool) -> None:
    """A prefix tree of prompts, some of which end early, some of whose blocks come from elsewhere or fail to."""
    block = 4
    queue = queue_of(order, chunk_tokens=chunk_blocks * block, block_tokens=block)
    keys, totals, done = {}, {}, Counter[OperationId]()
    for i, (path, more) in enumerate(prompts):
        operation = OperationId(str(i))
        keys[operation], totals[operation] = keys_of(path), len(path) * block + more
        queue.add(operation, total=totals[operation], done=0, now=float(i), keys=keys[operation])
    cached: set[BlockKey] = set()
    computed: Counter[BlockKey] = Counter()
    on_its_way = {key for path in coming for key in keys_of(path)}
    while True:
        chunks = queue.plan(on_its_way)
        if not chunks and on_its_way:
            cached |= on_its_way if arrives else set()
            on_its_way = set()
            continue
        if not chunks:
            break
        reused = False
        for chunk in chunks:
            usable = keys[chunk.operation][:(totals[chunk.operation] - 1) // block]
            end = chunk.start // block
            while end < len(usable) and usable[end] in cached:
                end += 1
            if end * block > chunk.start:
                queue.reuse(chunk.operation, end * block)
                done[chunk.operation] = end * block
                reused = True
        if reused:
            continue
        for chunk in chunks:
            assert chunk.start == done[chunk.operation]
            done[chunk.operation] += chunk.length
            blocks = keys[chunk.operation][chunk.start // block:done[chunk.operation] // block]
            usable = set(keys[chunk.operation][:(totals[chunk.operation] - 1) // block])
            computed.update(usable.intersection(blocks))
            cached.update(blocks)
            queue.advance(chunk)
        if cancelled:
            queue.remove(OperationId(str(cancelled[0])))
            totals.pop(OperationId(str(cancelled.pop(0))), None)
    assert all(done[operation] == total for operation, total in totals.items())
    assert set(computed.values()) <= {1}
