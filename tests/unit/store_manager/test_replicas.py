"""The replica map and what it is bounded by, heat, and the record of orders."""

from __future__ import annotations

import itertools
import math
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.store_manager.core.heat import ByHeat, Heat, HotEnds
from services.store_manager.core.orders import (
    MOST_DRAINS,
    MOST_QUOTAS,
    Drain,
    Orders,
    split_quota,
    with_drain,
    with_progress,
    with_quota,
)
from services.store_manager.core.replicas import BLOCK_BYTES, COPY_BYTES, ReplicaMap
from shared.ids import BlockKey, Incarnation, WorkerId
from shared.kv import Tier
from shared.messages import StoredBlock
from tests.support.pool_cluster import chain

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def map_of(**bounds: int) -> ReplicaMap:
    return ReplicaMap(**{"max_blocks": 1000, "max_copies": 1000, "max_bytes": 1 << 30, **bounds}, ours="us")


def in_tier(blocks: list[StoredBlock], tier: Tier) -> list[StoredBlock]:
    return [msgspec.structs.replace(block, tier=tier) for block in blocks]


def test_tiers_tenants_and_bytes() -> None:
    known, blocks = map_of(), chain("x", 3)
    known.store(A, blocks)
    known.store(A, in_tier(blocks[:1], Tier.SSD))
    known.store(B, blocks[:2])
    assert known.tiers(blocks[0].key) == {A: [Tier.DRAM, Tier.SSD], B: [Tier.DRAM]}
    assert known.usage(A, "acme") == known.bytes_of(A) == 4 * blocks[0].nbytes
    known.evict(A, [blocks[0].key], Tier.DRAM)
    assert known.holders(blocks[0].key) == [A, B]
    known.evict(A, [blocks[0].key, blocks[0].key], Tier.SSD)
    assert known.holders(blocks[0].key) == [B] and known.usage(A, "acme") == 2 * blocks[0].nbytes
    assert known.path(blocks[2].key, limit=10) == [block.key for block in blocks]
    assert known.path(blocks[2].key, limit=2) == []
    known.evict(B, [block.key for block in blocks], Tier.DRAM)
    assert known.path(blocks[2].key, limit=10) == [], "a hole"
    known.check_invariants()


def test_a_full_map_takes_nothing_new_and_says_so() -> None:
    """Complaint 1: objects limited by bytes only grew until the memory was gone."""
    for bounds in ({"max_blocks": 10}, {"max_copies": 10}, {"max_bytes": 10 * (BLOCK_BYTES + COPY_BYTES)}):
        known, blocks = map_of(**bounds), chain("x", 30)
        known.store(A, blocks)
        assert (len(known), known.copies, known.unseen_blocks, known.is_full) == (10, 10, 20, True)
        assert known.incomplete() == [], "there is no room to ask for them"
        known.evict(A, [block.key for block in blocks[5:]], Tier.DRAM)
        assert known.incomplete() == [A]
        known.replace(A, blocks[:5])
        known.sweep(100)
        assert known.incomplete() == []
        known.check_invariants()


def test_a_death_costs_nobody_else_and_is_taken_apart_by_steps() -> None:
    """Complaint 2: expiry that scanned the whole table froze everything."""
    known = map_of(max_blocks=100_000, max_copies=200_000)
    mine, others = chain("mine", 2_000), [chain(f"o{i}", 50) for i in range(400)]
    for blocks in others:
        known.store(B, blocks)
    known.store(A, mine)
    began_s = time.perf_counter()
    known.remove(A)
    removed_s = time.perf_counter() - began_s
    assert known.get(mine[0].key) is None and known.mask(mine[0].key) == 0
    assert known.sweep(500) and known.copies == 21_500
    assert known.sweep(500) and known.sweep(500) and not known.sweep(500)
    assert known.copies == 20_000
    assert removed_s < 0.01, "no walk over twenty thousand blocks of others"
    known.store(C, mine[:1])
    assert known.holders(mine[0].key) == [C], "the slot is used again only when it is clean"
    known.check_invariants()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("serpx"), st.sampled_from([A, B, C]), st.integers(0, 5), st.integers(0, 6),
                          st.sampled_from(list(Tier))), max_size=40))
def test_the_map_equals_a_set(steps: list[tuple[str, WorkerId, int, int, Tier]]) -> None:
    known, blocks = map_of(), chain("x", 8)
    model: dict[WorkerId, set[tuple[BlockKey, Tier]]] = {A: set(), B: set(), C: set()}
    for what, worker, begin, count, tier in steps:
        some = blocks[begin:begin + count]
        match what:
            case "s":
                known.store(worker, in_tier(some, tier))
                model[worker] |= {(block.key, tier) for block in some}
            case "e":
                known.evict(worker, [block.key for block in some], tier)
                model[worker] -= {(block.key, tier) for block in some}
            case "r":
                known.remove(worker)
                model[worker] = set()
            case "p":
                known.replace(worker, in_tier(some, tier))
                model[worker] = {(block.key, tier) for block in some}
            case "x":
                known.sweep(begin)
        known.check_invariants()
        for block in blocks:
            assert known.tiers(block.key) == {
                w: tiers for w in (A, B, C) if (tiers := [t for t in Tier if (block.key, t) in model[w]])}


def test_heat_fades_and_is_bounded() -> None:
    heat, keys = Heat(100.0, 8, 4.0), [block.key for block in chain("x", 20)]
    heat.use(keys[:2], now=0.0)
    heat.use(keys[:1], now=0.0, weight=3.0)
    assert heat.of(keys[0], now=0.0) == 4.0 and heat.of(keys[1], now=100.0) == 0.5
    assert heat.still_hot(heat.hot_keys(), now=0.0) == [(4.0, keys[0])]
    assert heat.still_hot(heat.hot_keys(), now=99.0) == [(heat.of(keys[0], now=99.0), keys[0])], "leaves below half"
    assert heat.still_hot(heat.hot_keys(), now=101.0) == [] and not heat.is_hot(keys[0])
    assert heat.levels(keys[:2], now=0.0) == [4.0, 1.0]
    heat.use(keys, now=200.0)
    assert len(heat) == 4 and heat.forgotten == 16
    assert heat.of(keys[0], now=200.0) > 1.0, "the coldest were forgotten"
    heat.use(keys[:1], now=1e6, weight=8.0)
    assert math.isclose(heat.of(keys[0], now=1e6), 8.0) and len(heat) == 1


@given(st.integers(0, 10**12), st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 10**10)),
       st.dictionaries(st.sampled_from([A, B, C]), st.integers(1, 10**10), min_size=1))
def test_a_budget_is_split_without_rest(quota: int, usage: dict[WorkerId, int], capacity: dict[WorkerId, int]) -> None:
    budgets = split_quota(quota, usage, capacity)
    assert budgets.keys() == capacity.keys() and sum(budgets.values()) == quota
    assert all(nbytes >= 0 for nbytes in budgets.values())
    if sum(usage.get(worker, 0) for worker in capacity) <= quota:
        assert all(budgets[worker] >= usage.get(worker, 0) for worker in capacity), "nobody evicts below the quota"


def drain(worker: str, at_s: float = 0.0, **fields: object) -> Drain:
    return Drain(worker=WorkerId(worker), incarnation=Incarnation("1"), ordered_at_s=at_s, timeout_s=1.0,
                 **fields)  # type: ignore[arg-type]


def test_orders_are_bounded_and_fenced() -> None:
    orders = with_drain(Orders(), drain("a"))
    kept = with_progress(orders, [drain("a", state="copying", copied=3), drain("b", state="done")], 5)
    assert kept is not None and [d.worker for d in kept.drains] == ["a"] and kept.drains[0].copied == 3
    assert with_progress(kept, [drain("a", state="done")], 4) is None, "an old leader writes nothing"
    cancelled = with_drain(kept, msgspec.structs.replace(kept.drains[0], cancel=True))
    kept = with_progress(cancelled, [drain("a", state="copying", copied=4)], 5)
    assert kept is not None and kept.drains[0].cancel and kept.drains[0].copied == 4
    done = with_progress(kept, [drain("a", state="cancelled")], 5)
    assert done is not None
    again = with_progress(done, [drain("a", state="copying")], 6)
    assert again is not None and again.drains[0].state == "cancelled", "what is over stays over"
    many = again
    for i in range(MOST_DRAINS - 1):
        many = with_drain(many, drain(f"w{i}", at_s=float(i)))
    many = with_drain(many, drain("one more"))
    assert len(many.drains) == MOST_DRAINS and many.drain_of("a") is None, "what is over makes room"
    with pytest.raises(ValueError, match="wait for one to end"):
        with_drain(many, drain("two more"))


def test_quotas_are_bounded() -> None:
    orders = with_quota(with_quota(Orders(), "b", 2), "a", 1)
    assert list(orders.quotas.items()) == [("a", 1), ("b", 2)]
    assert with_quota(orders, "a", None).quotas == {"b": 2}
    full = msgspec.structs.replace(orders, quotas={f"t{i}": i for i in range(MOST_QUOTAS)})
    with pytest.raises(ValueError, match="take one away"):
        with_quota(full, "more", 1)


def test_the_ends_of_hot_prefixes_are_found_part_by_part() -> None:
    heat, blocks = Heat(half_life_s=100.0, max_keys=100, hot_uses=2.0), {}
    for name, uses in (("warm", 1), ("hot", 2), ("hotter", 6)):
        for block in chain(name, 5):
            blocks[block.key] = block
            heat.use([block.key], now=0.0, weight=uses)
    lost = chain("nobody holds it", 1)[0].key
    heat.use([lost], now=0.0, weight=4)
    ends = HotEnds(heat, lambda key: blocks[key].parent if key in blocks else None)
    looks = [ends.look(4, now=0.0) for _ in range(3)]
    assert looks == [True, True, False]
    assert ends.found == [chain("hotter", 5)[-1].key, lost, chain("hot", 5)[-1].key], "hottest first"
    assert ends.look(100, now=101.0) is False and len(ends.found) == 2, "hot is below half of what made it hot"


def test_order_of_heat_is_within_an_eighth_of_a_doubling() -> None:
    ordered, heats = ByHeat(), {BlockKey(bytes([n]) * 32): 0.01 * 1.3 ** (n * 7 % 50) for n in range(50)}
    for key, level in heats.items():
        ordered.add(key, level)
    found = [heats[key] for key in ordered]
    assert sorted(found) == sorted(heats.values())
    assert all(later < earlier * 2 ** 0.125 for earlier, later in itertools.pairwise(found))


def test_a_full_map_gives_up_what_came_first_and_may_go() -> None:
    kept = {block.key for block in chain("warm", 3)}
    known = ReplicaMap(max_blocks=10, max_copies=100, max_bytes=1 << 30, ours="m", is_kept=kept.__contains__)
    known.store(A, chain("warm", 3))
    known.store(A, chain("old", 4))
    known.store(B, chain("old", 4))
    known.store(A, chain("new", 6))
    known.check_invariants()
    assert all(known.holds(A, block.key) for block in [*chain("warm", 3), *chain("new", 6)])
    assert known.unseen_of(A) + known.unseen_of(B) == known.unseen_blocks >= 6, "a block of two holders counts twice"
    assert known.get(chain("old", 4)[0].key) is None
    assert known.usage(B, "acme") == chain("old", 1)[0].nbytes, "the last of the old ones had not to go"
    known.evict(B, [block.key for block in chain("old", 4)], Tier.DRAM)
    assert known.unseen_of(B) == 0, "what was unseen is gone"
    full = ReplicaMap(max_blocks=3, max_copies=100, max_bytes=1 << 30, ours="m", is_kept=lambda key: True)
    full.store(A, chain("warm", 9))
    full.check_invariants()
    assert (len(full), full.unseen_of(A)) == (3, 6), "nothing may go"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("se"), st.sampled_from([A, B, C]), st.integers(0, 5), st.integers(1, 6))),
       st.sets(st.integers(0, 5)))
def test_a_full_map_stays_whole_and_counts_what_it_does_not_know(
        steps: list[tuple[str, WorkerId, int, int]], warm: set[int]) -> None:
    kept = {block.key for n in warm for block in chain(f"c{n}", 6)}
    known = ReplicaMap(max_blocks=8, max_copies=12, max_bytes=1 << 30, ours="m", is_kept=kept.__contains__)
    held: dict[WorkerId, set[BlockKey]] = {A: set(), B: set(), C: set()}
    for what, worker, n, length in steps:
        blocks = [block for block in chain(f"c{n}", length) if (block.key in held[worker]) == (what == "e")]
        if what == "s":
            known.store(worker, blocks)
            held[worker] |= {block.key for block in blocks}
        else:
            known.evict(worker, [block.key for block in blocks], Tier.DRAM)
            held[worker] -= {block.key for block in blocks}
        known.check_invariants()
        for holder, keys in held.items():
            assert known.blocks_of(holder) + known.unseen_of(holder) == len(keys)
