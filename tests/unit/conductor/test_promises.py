"""Promises against {request: (worker, prompt)}."""

from __future__ import annotations

import random

from services.conductor.core.promises import Promises
from shared.ids import BlockKey, RequestId, WorkerId
from shared.kv import pack_keys

A, B = WorkerId("a"), WorkerId("b")
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")


def packed(text: str) -> bytes:
    """A chain with a block for each letter: the key of each tells all letters before it."""
    return pack_keys([BlockKey(text[:i + 1].rjust(32).encode()) for i in range(len(text))])


def test_lengths_of_prompts_that_share_a_head() -> None:
    promises = Promises(max_blocks=100)
    promises.make(R1, A, packed("abcd"), until_s=1.0)
    promises.make(R2, B, packed("abxy"), until_s=1.0)
    promises.make(R3, B, packed("ab"), until_s=1.0)
    assert promises.lengths(packed("abcz")) == {A: 3, B: 2}
    assert promises.lengths(packed("abxyz")) == {A: 2, B: 4}
    assert promises.lengths(packed("z")) == promises.lengths(b"") == {}
    assert len(promises) == 6
    promises.end(R1)
    assert promises.lengths(packed("abcz")) == {B: 2} and len(promises) == 4
    promises.forget(B)
    assert len(promises) == 0
    promises.check_invariants()


def test_no_more_than_the_bound_and_the_former_promise_ends() -> None:
    promises = Promises(max_blocks=5)
    promises.make(R1, A, packed("abcd"), until_s=1.0)
    promises.make(R2, A, packed("xy"), until_s=1.0)
    assert promises.lengths(packed("xy")) == {} and len(promises) == 4
    promises.make(R1, B, packed("xyz"), until_s=1.0)
    assert promises.lengths(packed("abcd")) == {} and promises.lengths(packed("xyz")) == {B: 3}


def test_promises_end_at_their_time_which_may_change() -> None:
    promises = Promises(max_blocks=100)
    promises.make(R1, A, packed("ab"), until_s=1.0)
    promises.make(R2, A, packed("cd"), until_s=2.0)
    promises.end_at(R1, 3.0)
    promises.tick(2.5)
    assert promises.lengths(packed("ab")) == {A: 2} and promises.lengths(packed("cd")) == {}
    promises.tick(3.0)
    assert len(promises) == 0 and promises.next_wake() is None


def test_random_operations_against_the_model() -> None:
    rng, promises = random.Random(1), Promises(max_blocks=10**6)
    made: dict[RequestId, tuple[WorkerId, str]] = {}
    for _ in range(1500):
        request, worker = RequestId(f"r{rng.randrange(30)}"), WorkerId(f"w{rng.randrange(4)}")
        match rng.randrange(5):
            case 0 | 1 | 2:
                text = "".join(rng.choices("ab", k=rng.randint(0, 9)))
                promises.make(request, worker, packed(text), until_s=0.0)
                made[request] = worker, text
            case 3:
                promises.end(request)
                made.pop(request, None)
            case 4 if rng.random() < 0.1:
                promises.forget(worker)
                made = {one: way for one, way in made.items() if way[0] != worker}
        asked = "".join(rng.choices("ab", k=rng.randint(0, 9)))
        expected: dict[WorkerId, int] = {}
        for who, text in made.values():
            shared = 0
            while shared < min(len(text), len(asked)) and text[shared] == asked[shared]:
                shared += 1
            if shared:
                expected[who] = max(expected.get(who, 0), shared)
        assert promises.lengths(packed(asked)) == expected
        promises.check_invariants()
    assert len(promises) == len({text[:i + 1] for _, text in made.values() for i in range(len(text))})
