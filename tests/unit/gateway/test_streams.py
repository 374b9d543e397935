"""Token chunks that are late, doubled, lost, or of another attempt."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.streams import TokenOrder
from shared.ids import RequestId, WorkerId
from shared.kv import pack_tokens
from shared.messages import Finish, TokenChunk


def chunk(first: int, *tokens: int, finish: Finish = "", attempt: int = 0) -> TokenChunk:
    return TokenChunk(request=RequestId("r"), attempt=attempt, worker=WorkerId("d"), first=first,
                      tokens=pack_tokens(tokens), finish=finish)


def test_in_order() -> None:
    order = TokenOrder(0)
    fresh = order.push(chunk(0, 5, 6))
    assert fresh is not None and fresh.tokens == [5, 6]
    last = order.push(chunk(2, finish="length"))
    assert last is not None and (last.tokens, last.finish) == ([], "length")


def test_another_attempt_is_not_heard() -> None:
    assert TokenOrder(1).push(chunk(0, 5, attempt=0)) is None


def test_an_early_chunk_waits() -> None:
    order = TokenOrder(0)
    assert order.push(chunk(1, 7, finish="stop")) is None and order.gap
    fresh = order.push(chunk(0, 6))
    assert fresh is not None and (fresh.tokens, fresh.finish) == ([6, 7], "stop") and not order.gap


def test_a_double_brings_only_what_is_new() -> None:
    order = TokenOrder(0)
    order.push(chunk(0, 5, 6))
    assert order.push(chunk(0, 5, 6)) is None
    fresh = order.push(chunk(1, 6, 7))
    assert fresh is not None and fresh.tokens == [7]


def test_a_lost_chunk_is_noticed() -> None:
    order = TokenOrder(0, max_early=3)
    for i in range(1, 5):
        assert order.push(chunk(i, i)) is None
    assert order.hopeless


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers())
def test_any_order_with_doubles_gives_the_answer(lengths: list[int], seed: int) -> None:
    chance = random.Random(seed)
    chunks, first = [], 0
    for i, length in enumerate(lengths):
        finish: Finish = "stop" if i == len(lengths) - 1 else ""
        chunks.append(chunk(first, *range(first, first + length), finish=finish))
        first += length
    chunks += [one for one in chunks if chance.random() < 0.3]
    chance.shuffle(chunks)
    order, heard, finishes = TokenOrder(0), [], []
    for one in chunks:
        fresh = order.push(one)
        if fresh is not None:
            heard += fresh.tokens
            finishes += [fresh.finish] if fresh.finish else []
            if fresh.finish:
                break
    assert heard == list(range(first)) and finishes == ["stop"]
