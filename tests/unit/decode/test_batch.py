"""The continuous batch: who runs, who waits, and that a preempted answer is the same answer."""

from __future__ import annotations

import random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.decode.core.batch import DecodeBatch, Outcome, Running, Sums
from shared.ids import BlockKey, OperationId, RequestId, WorkerId
from shared.kv import block_keys
from shared.messages import Sampling
from shared.store.blocks import BlockPool

BLOCK = 4
ROOT = BlockKey(b"\0" * 32)


def next_token(tokens: list[int]) -> int:
    """Stands for the model: a function of the whole context, so a wrong context shows."""
    return sum((place + 3) * token for place, token in enumerate(tokens)) * 31 % 97 + 1


def answer_of(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt):]


def make(pool: BlockPool, *, max_running: int = 4, max_context: int = 1000) -> DecodeBatch:
    return DecodeBatch(pool, block_tokens=BLOCK, block_bytes=1, max_running=max_running, chunk_tokens=8,
                       max_context=max_context)


def arrive(batch: DecodeBatch, pool: BlockPool, name: str, prompt: list[int], sampling: Sampling) -> Outcome | None:
    """A handover as the shell does it; ``None`` when the pool has no room for the prompt."""
    operation = OperationId(name)
    allocation = pool.allocate(operation, -(-len(prompt) // BLOCK), now=0)
    if allocation is None:
        return None
    running = Running(operation=operation, request=RequestId(name), tenant="t", root=ROOT, tokens=list(prompt),
                      prompt_len=len(prompt), sampling=sampling, keys=block_keys(ROOT, prompt, BLOCK),
                      slots=allocation.slots, computed_len=len(prompt))
    batch.seal(running, now=0, source=WorkerId("p"))
    return batch.start(running, next_token(prompt))


def step(batch: DecodeBatch, pool: BlockPool, now: float, preemptions: list[int] | None = None, *,
         seconds: float = 1.0) -> list[Outcome]:
    """One step with the stand-in model, which takes ``seconds`` for it; ends what is over."""
    plan = batch.plan(now=now)
    if preemptions is not None:
        preemptions.append(plan.preempted)
    outcomes = list(plan.ended)
    batch.computed(plan, seconds)
    for row in plan.rows:
        assert len(row.running.slots) * BLOCK >= row.start + row.length
        token = next_token(row.running.tokens) if row.samples else None
        outcomes.append(batch.apply(row, token, now=now)[0])
    for outcome in outcomes:
        if outcome.finish:
            pool.release(outcome.running.operation)
    pool.check_invariants()
    return outcomes


def test_an_answer_ends_at_its_length_and_its_blocks_stay() -> None:
    pool = BlockPool(8)
    batch = make(pool)
    prompt = [1, 2, 3, 4, 5]
    first = arrive(batch, pool, "a", prompt, Sampling(max_tokens=8))
    assert first is not None and first.token == next_token(prompt) and not first.finish
    tokens = [first.token]
    while len(batch):
        tokens += [outcome.token for outcome in step(batch, pool, 1) if outcome.token is not None]
    assert tokens == answer_of(prompt, 8)
    whole = prompt + tokens
    assert pool.match(block_keys(ROOT, whole, BLOCK)) == 3  # the last token's own KV was never computed


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    pool = BlockPool(8)
    batch = make(pool)
    expected = answer_of([7], 5)
    first = arrive(batch, pool, "a", [7], Sampling(max_tokens=50, stop_token_ids=[expected[3]]))
    assert first is not None
    tokens, finish = [first.token], ""
    while len(batch):
        for outcome in step(batch, pool, 1):
            finish = outcome.finish or finish
            tokens += [outcome.token] if outcome.token is not None else []
    assert (tokens, finish) == (expected[:3], "stop")


def test_one_token_wanted_means_no_step_at_all() -> None:
    pool = BlockPool(8)
    batch = make(pool)
    outcome = arrive(batch, pool, "a", [1, 2], Sampling(max_tokens=1))
    assert outcome is not None and outcome.finish == "length" and len(batch) == 0


def sums(batch: DecodeBatch, pool: BlockPool, *step_s: float) -> dict[str, Sums]:
    """The steps take these seconds; the sums of whoever ended with one."""
    outcomes = [outcome for seconds in step_s for outcome in step(batch, pool, 1, seconds=seconds)]
    return {str(outcome.running.request): outcome.running.own for outcome in outcomes if outcome.finish}


def test_an_answer_sums_the_steps_it_was_in() -> None:
    pool = BlockPool(20)
    batch = make(pool)
    arrive(batch, pool, "long", [1] * 10, Sampling(max_tokens=5))  # 4 steps, over 11, 12, 13 and 14 tokens
    assert not sums(batch, pool, 1.0)
    arrive(batch, pool, "short", [2] * 20, Sampling(max_tokens=3))  # 2 steps, over 21 and 22
    assert sums(batch, pool, 2.0, 4.0, 8.0) == {
        "short": Sums(2, 2.0 + 4.0, 4, (12 + 21) + (13 + 22)),
        "long": Sums(4, 1.0 + 2.0 + 4.0 + 8.0, 6, 11 + (12 + 21) + (13 + 22) + 14)}


def test_no_sum_has_steps_without_the_answer_or_that_computed_anew() -> None:
    """"young" loses its memory for the fifth step, and computes 5 tokens anew in the sixth."""
    pool = BlockPool(5)
    batch = make(pool)
    arrive(batch, pool, "old", [1] * 4, Sampling(max_tokens=6))
    arrive(batch, pool, "young", [2] * 8, Sampling(max_tokens=7))
    assert sums(batch, pool, 1, 2, 4, 8, 16, 32, 64) == {
        "old": Sums(5, 1 + 2 + 4 + 8 + 16, 9, (5 + 9) + (6 + 10) + (7 + 11) + (8 + 12) + 9),
        "young": Sums(5, 1 + 2 + 4 + 8 + 64, 9, (5 + 9) + (6 + 10) + (7 + 11) + (8 + 12) + 14)}


def test_alone_in_a_full_pool_an_answer_ends_with_length() -> None:
    pool = BlockPool(2)
    batch = make(pool)
    arrive(batch, pool, "a", [1, 2, 3, 4], Sampling(max_tokens=100))
    finishes = []
    while len(batch):
        finishes += [outcome.finish for outcome in step(batch, pool, 1) if outcome.finish]
    assert finishes == ["length"]
    assert pool.statistics().private == 0


def test_while_others_hold_the_memory_an_answer_waits_instead_of_ending_short() -> None:
    pool = BlockPool(4)
    batch = make(pool)
    landing = OperationId("a reservation of somebody else")
    pool.allocate(landing, 2, now=0)
    first = arrive(batch, pool, "a", [1, 2, 3, 4, 5, 6, 7], Sampling(max_tokens=6))
    assert first is not None and first.token is not None
    tokens = [first.token]
    for _ in range(5):
        tokens += [outcome.token for outcome in step(batch, pool, 1) if outcome.token is not None]
    assert len(batch) == 1 and len(tokens) < 6
    pool.release(landing)
    while len(batch):
        tokens += [outcome.token for outcome in step(batch, pool, 1) if outcome.token is not None]
    assert tokens == answer_of([1, 2, 3, 4, 5, 6, 7], 6)


def test_who_has_memory_does_not_wait_behind_who_has_none() -> None:
    """The one whose prompt has just come holds the very blocks that the preempted one waits for."""
    pool = BlockPool(5)
    batch = make(pool)
    young = OperationId("young")
    reservation = pool.allocate(young, 3, now=0)
    assert reservation is not None
    arrive(batch, pool, "old", [1, 2, 3, 4, 5, 6, 7], Sampling(max_tokens=6))
    while not batch.has_preempted:
        step(batch, pool, 1)
    prompt = list(range(11))
    running = Running(operation=young, request=RequestId("young"), tenant="t", root=ROOT, tokens=prompt[:],
                      prompt_len=11, sampling=Sampling(max_tokens=3), keys=block_keys(ROOT, prompt, BLOCK),
                      slots=reservation.slots, computed_len=11)
    batch.start(running, next_token(prompt))
    ended: dict[str, list[int]] = {}
    for now in range(20):
        for outcome in step(batch, pool, now):
            if outcome.finish:
                ended[outcome.running.operation] = outcome.running.tokens[outcome.running.prompt_len:]
    assert ended == {"young": answer_of(prompt, 3), "old": answer_of([1, 2, 3, 4, 5, 6, 7], 6)}


def test_the_youngest_is_preempted_and_comes_back() -> None:
    pool = BlockPool(5)
    batch = make(pool)
    answers: dict[str, list[int]] = {}
    for name in ("old", "young"):
        outcome = arrive(batch, pool, name, [len(name)] * 7, Sampling(max_tokens=9))
        assert outcome is not None and outcome.token is not None
        answers[name] = [outcome.token]
    order = []
    preemptions: list[int] = []
    while len(batch):
        for outcome in step(batch, pool, 1, preemptions):
            if outcome.token is not None:
                answers[outcome.running.operation].append(outcome.token)
            if outcome.finish:
                order.append(outcome.running.operation)
    assert sum(preemptions) >= 1
    assert order == ["old", "young"]
    assert answers == {name: answer_of([len(name)] * 7, 9) for name in ("old", "young")}


@settings(max_examples=100, deadline=None, phases=[Phase.generate])
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=14), st.integers(1, 14)),
                min_size=1, max_size=7), st.integers(8, 14), st.integers(1, 4), st.randoms(use_true_random=False))
def test_whatever_is_preempted_or_cancelled_the_others_answers_are_right(
        requests: list[tuple[list[int], int]], blocks: int, seats: int, chance: random.Random) -> None:
    pool = BlockPool(blocks)
    batch = make(pool, max_running=seats)
    waiting = [(str(i), prompt, count) for i, (prompt, count) in enumerate(requests)]
    answers: dict[str, list[int]] = {}
    finishes: dict[str, str] = {}
    cancelled: set[str] = set()
    for _ in range(400):
        if waiting and chance.random() < 0.5:
            name, prompt, count = waiting[0]
            outcome = arrive(batch, pool, name, prompt, Sampling(max_tokens=count))
            if outcome is not None:
                waiting.pop(0)
                answers[name] = [outcome.token] if outcome.token is not None else []
                if outcome.finish:
                    finishes[name] = outcome.finish
                    pool.release(OperationId(name))
        if len(batch) and chance.random() < 0.1:
            victim = chance.choice(sorted(set(answers) - set(finishes) - cancelled))
            assert batch.remove(OperationId(victim)) is not None
            pool.release(OperationId(victim))
            cancelled.add(victim)
        for outcome in step(batch, pool, 1):
            if outcome.token is not None:
                answers[outcome.running.operation].append(outcome.token)
            if outcome.finish:
                finishes[outcome.running.operation] = outcome.finish
        if not waiting and not len(batch):
            break
    assert set(finishes) | cancelled == {str(i) for i in range(len(requests))}, "somebody never ended"
    for i, (prompt, count) in enumerate(requests):
        expected = answer_of(prompt, count)
        got = answers[str(i)]
        assert got == expected[:len(got)]
        if str(i) not in cancelled and len(got) < count:
            assert finishes[str(i)] == "length" and -(-(len(prompt) + len(got) + 1) // BLOCK) > blocks - seats
    assert pool.statistics().private == 0
