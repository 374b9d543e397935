"""The prefill queue: oldest first, chunks end on block boundaries, every token exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefill.core.queue import Chunk, PrefillQueue
from shared.ids import OperationId


def test_oldest_first_and_the_rest_of_the_pass_goes_to_the_next() -> None:
    queue = PrefillQueue(chunk_tokens=16, block_tokens=4)
    queue.add(OperationId("a"), total=10, done=0)
    queue.add(OperationId("b"), total=20, done=8)
    assert queue.plan() == [Chunk(OperationId("a"), 0, 10, True), Chunk(OperationId("b"), 8, 4, False)]


def test_a_removed_prompt_is_forgotten_even_while_computed() -> None:
    queue = PrefillQueue(chunk_tokens=4, block_tokens=4)
    queue.add(OperationId("a"), total=8, done=0)
    chunk = queue.plan()[0]
    queue.remove(OperationId("a"))
    queue.advance(chunk)
    assert not queue.plan() and queue.remaining_tokens == 0


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=6), st.integers(1, 4))
def test_every_token_once_in_order_and_blocks_never_split(prompts: list[tuple[int, int]], chunk_blocks: int) -> None:
    block = 4
    queue = PrefillQueue(chunk_tokens=chunk_blocks * block, block_tokens=block)
    expected = {}
    for i, (total, reused) in enumerate(prompts):
        done = min(reused, (total - 1) // block) * block
        expected[OperationId(str(i))] = list(range(done, total))
        queue.add(OperationId(str(i)), total=total, done=done)
    computed: dict[OperationId, list[int]] = {operation: [] for operation in expected}
    while chunks := queue.plan():
        assert sum(chunk.length for chunk in chunks) <= chunk_blocks * block
        for chunk in chunks:
            computed[chunk.operation] += range(chunk.start, chunk.start + chunk.length)
            assert chunk.start % block == 0
            assert chunk.last or chunk.length % block == 0
            queue.advance(chunk)
    assert computed == expected
