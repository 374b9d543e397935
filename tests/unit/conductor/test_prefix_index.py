"""The index against a model that is too simple to be wrong."""

from __future__ import annotations

import random

import pytest

from services.conductor.core.prefix_index import PrefixIndex
from shared.ids import BlockKey, WorkerId
from shared.kv import Tier


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def dram(*numbers: int) -> list[tuple[BlockKey, Tier]]:
    return [(key(number), Tier.DRAM) for number in numbers]


def test_longest_contiguous_prefix_per_worker() -> None:
    index = PrefixIndex()
    index.store(A, dram(1, 2, 3, 5))
    index.store(B, dram(1))
    index.store(C, dram(2, 3))
    match = index.match(keys(1, 2, 3, 4, 5), (A, B, C))
    assert match.own == {A: 3, B: 1}
    assert match.covered == 3


def test_runs_from_the_middle_and_only_from_those_who_may_send() -> None:
    index = PrefixIndex()
    index.store(A, dram(1, 2))
    index.store(B, dram(2, 3, 4))
    index.store(C, dram(2, 3, 4, 5))
    match = index.match(keys(1, 2, 3, 4, 5), (A, B, C))
    assert match.run(0) == (2, [A])
    assert match.run(2) == (5, [C])
    match = index.match(keys(1, 2, 3, 4, 5), (A, B))
    assert match.run(2) == (4, [B])
    assert match.run(4) == (4, []) and match.covered == 4
    assert match.own[A] == 2, "who may not send still has its own prefix"


def test_a_block_is_gone_with_its_last_tier() -> None:
    index = PrefixIndex()
    index.store(A, [(key(1), Tier.DRAM), (key(1), Tier.SSD)])
    assert index.tiers(key(1)) == {A: Tier.DRAM} and len(index) == 1
    index.evict(A, keys(1), Tier.DRAM)
    assert index.tiers(key(1)) == {A: Tier.SSD} and len(index) == 1
    index.evict(A, keys(1), Tier.DRAM)
    index.evict(A, keys(1, 2), Tier.SSD)
    assert index.tiers(key(1)) == {} and len(index) == 0


def test_promises_count_for_the_worker_itself_and_cannot_be_pulled() -> None:
    index = PrefixIndex()
    index.promise(A, keys(1, 2))
    match = index.match(keys(1, 2, 3), (A, B))
    assert match.own == {A: 2} and match.covered == 0
    index.store(A, dram(1))
    index.unpromise(A, keys(1, 2))
    assert index.match(keys(1, 2, 3), (A, B)).own == {A: 1}


def test_a_full_index_takes_no_more_and_counts() -> None:
    index = PrefixIndex(max_blocks=2)
    index.store(A, dram(1, 2, 3, 2))
    assert (len(index), index.dropped_blocks) == (2, 1)
    index.store(A, [(key(1), Tier.SSD)])
    assert index.dropped_blocks == 1, "another tier of a known copy is no new copy"
    index.evict(A, keys(2), Tier.DRAM)
    index.store(B, dram(1))
    assert len(index) == 2
    index.check_invariants()


def test_removed_workers_leave_nothing_and_their_slots_are_used_again() -> None:
    index = PrefixIndex()
    for life in range(50):
        worker = WorkerId(f"w{life}")
        index.store(worker, dram(1, 2))
        index.promise(worker, keys(3))
        index.remove(worker)
        index.remove(worker)
    assert len(index) == 0 and len(index._workers) == 1 and not index._blocks
    assert index.match(keys(1, 2), ()).own == {}


class Model:
    """{(worker, key): tiers} and {(worker, key)} promised, as naive as can be."""

    def __init__(self) -> None:
        self.held: dict[tuple[WorkerId, int], set[Tier]] = {}
        self.promised: set[tuple[WorkerId, int]] = set()

    def own(self, worker: WorkerId, prompt: list[int]) -> int:
        for i, number in enumerate(prompt):
            if not self.held.get((worker, number)) and (worker, number) not in self.promised:
                return i
        return len(prompt)

    def run(self, workers: list[WorkerId], prompt: list[int], start: int) -> tuple[int, set[WorkerId]]:
        ends = {}
        for worker in workers:
            end = start
            while end < len(prompt) and self.held.get((worker, prompt[end])):
                end += 1
            ends[worker] = end
        best = max(ends.values())
        return best, {worker for worker, end in ends.items() if end == best > start}


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_against_the_model(seed: int) -> None:
    rng = random.Random(seed)
    index, model = PrefixIndex(), Model()
    workers = [WorkerId(f"w{i}") for i in range(7)]
    numbers = range(40)
    for step in range(10_000):
        worker, some = rng.choice(workers), rng.sample(numbers, rng.randint(1, 8))
        tier = rng.choice(list(Tier))
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                index.store(worker, [(key(number), tier) for number in some])
                for number in some:
                    model.held.setdefault((worker, number), set()).add(tier)
            case 4 | 5 | 6:
                index.evict(worker, [key(number) for number in some], tier)
                for number in some:
                    model.held.get((worker, number), set()).discard(tier)
            case 7:
                index.promise(worker, [key(number) for number in some])
                model.promised.update((worker, number) for number in some)
            case 8:
                index.unpromise(worker, [key(number) for number in some])
                model.promised.difference_update((worker, number) for number in some)
            case 9 if rng.random() < 0.1:
                index.remove(worker)
                model.held = {pair: tiers for pair, tiers in model.held.items() if pair[0] != worker}
                model.promised = {pair for pair in model.promised if pair[0] != worker}
            case 10 if rng.random() < 0.2:
                index.replace(worker, [(key(number), tier) for number in some])
                model.held = {pair: tiers for pair, tiers in model.held.items() if pair[0] != worker}
                model.held.update({(worker, number): {tier} for number in some})
        prompt = rng.sample(numbers, rng.randint(1, 12))
        senders = rng.sample(workers, rng.randint(1, 7))
        found = index.match([key(number) for number in prompt], senders)
        assert found.own == {w: own for w in workers if (own := model.own(w, prompt))}
        covered = 0
        while covered < len(prompt) and any(model.held.get((w, prompt[covered])) for w in senders):
            covered += 1
        assert found.covered == covered
        start = rng.randrange(len(prompt))
        if start < covered:
            end, owners = model.run(senders, prompt, start)
            assert (found.run(start)[0], set(found.run(start)[1])) == (end, owners)
        if step % 500 == 0:
            index.check_invariants()
            assert len(index) == sum(bool(tiers) for tiers in model.held.values())
