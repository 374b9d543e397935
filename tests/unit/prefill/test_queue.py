"""The prefill queue: in order, chunks end on block boundaries, every token exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefill.core.queue import Chunk, PrefillQueue
from shared.ids import OperationId
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
