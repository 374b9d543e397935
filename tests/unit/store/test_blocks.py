"""The block pool against what it promises: no holes, exact room, nothing lost."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shared.errors import Bug
from shared.ids import BlockKey, OperationId
from shared.messages import StoredBlock
from shared.store.blocks import BlockPool

ROOT = BlockKey(b"\0" * 32)


def key_of(parent: bytes, name: int) -> BlockKey:
    return BlockKey(hashlib.sha256(parent + bytes([name])).digest())


def chain(*names: int) -> list[StoredBlock]:
    blocks, parent = [], ROOT
    for depth, name in enumerate(names):
        key = key_of(parent, name)
        blocks.append(StoredBlock(key=key, parent=parent, depth=depth, nbytes=1))
        parent = key
    return blocks


def keys(blocks: list[StoredBlock]) -> list[BlockKey]:
    return [block.key for block in blocks]


def store(pool: BlockPool, name: str, blocks: list[StoredBlock], now: float) -> list[BlockKey]:
    """Caches ``blocks`` under an operation of its own, as a worker would, and ends it."""
    operation = OperationId(name)
    have = len(pool.pin(operation, keys(blocks), now=now))
    allocation = pool.allocate(operation, len(blocks) - have, now=now)
    assert allocation is not None
    for slot, block in zip(allocation.slots, blocks[have:], strict=True):
        pool.seal(operation, slot, block, now=now)
    pool.release(operation)
    return allocation.evicted


def test_what_is_sealed_is_matched_and_pinned_by_its_maker() -> None:
    pool = BlockPool(4)
    store(pool, "a", chain(1, 2, 3), now=0)
    assert pool.match(keys(chain(1, 2, 3, 4))) == 3
    assert pool.match(keys(chain(1, 9))) == 1
    assert len(pool.pin(OperationId("b"), keys(chain(1, 2)), now=1)) == 2
    assert pool.available == 2


def test_eviction_takes_the_coldest_leaf_and_never_makes_a_hole() -> None:
    pool = BlockPool(5)
    store(pool, "cold", chain(1, 2, 3), now=0)
    store(pool, "warm", chain(1, 7), now=1)
    evicted = store(pool, "new", chain(8, 9), now=2)
    assert evicted == [chain(1, 2, 3)[2].key]
    assert pool.match(keys(chain(1, 2, 3))) == 2
    assert store(pool, "more", chain(5), now=3) == [chain(1, 2)[1].key]
    assert pool.match(keys(chain(1, 7))) == 2


def test_pinned_blocks_and_their_ancestors_stay() -> None:
    pool = BlockPool(3)
    store(pool, "a", chain(1, 2, 3), now=0)
    reader = OperationId("reader")
    pool.pin(reader, keys(chain(1, 2)), now=1)
    assert pool.available == 1
    assert pool.allocate(OperationId("b"), 2, now=2) is None
    pool.release(reader)
    assert pool.available == 3
    assert pool.allocate(OperationId("b"), 3, now=2) is not None


def test_two_makers_of_one_block_share_the_first() -> None:
    pool = BlockPool(4)
    first, second = OperationId("first"), OperationId("second")
    one, two = pool.allocate(first, 1, now=0), pool.allocate(second, 2, now=0)
    assert one is not None and two is not None
    blocks = chain(1, 2)
    assert pool.seal(first, one.slots[0], blocks[0], now=0)
    assert not pool.seal(second, two.slots[0], blocks[0], now=0)
    pool.release(first)
    assert pool.seal(second, two.slots[1], blocks[1], now=0)
    pool.release(second)
    pool.check_invariants()
    assert pool.statistics().free == 2


def test_slots_move_from_one_operation_to_another() -> None:
    pool = BlockPool(3)
    giver, taker = OperationId("giver"), OperationId("taker")
    allocation = pool.allocate(giver, 3, now=0)
    assert allocation is not None
    pool.move(allocation.slots[:2], giver, taker)
    pool.release(giver)
    assert pool.available == 1
    pool.release(taker)
    assert pool.available == 3
    with pytest.raises(Bug):
        pool.move([0], giver, taker)


def test_a_pool_that_never_evicts_keeps_no_stale_entries() -> None:
    pool = BlockPool(100)
    for n in range(1_000):
        store(pool, f"op{n}", chain(1, 2), now=n)
    assert pool.policy._leaves.entries < 100


def test_sealing_without_the_parent_is_our_bug() -> None:
    pool = BlockPool(2)
    operation = OperationId("a")
    allocation = pool.allocate(operation, 1, now=0)
    assert allocation is not None
    with pytest.raises(Bug):
        pool.seal(operation, allocation.slots[0], chain(1, 2)[1], now=0)


class PoolModel(RuleBasedStateMachine):
    """Random operations, any interleaving: invariants hold and ``available`` is exact."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.now = 0.0
        self.serial = 0

    @rule(target=running, names=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def begin(self, names: list[int]) -> tuple[OperationId, list[StoredBlock], list[int]]:
        self.serial += 1
        self.now += 1
        operation, blocks = OperationId(f"op{self.serial}"), chain(*names)
        have = len(self.pool.pin(operation, keys(blocks), now=self.now))
        room = self.pool.available
        allocation = self.pool.allocate(operation, len(blocks) - have, now=self.now)
        assert (allocation is None) == (len(blocks) - have > room)
        return operation, blocks[have:], allocation.slots if allocation else []

    @rule(work=running, count=st.integers(0, 6))
    def seal_some(self, work: tuple[OperationId, list[StoredBlock], list[int]], count: int) -> None:
        operation, blocks, slots = work
        for _ in range(min(count, len(slots))):
            self.pool.seal(operation, slots.pop(0), blocks.pop(0), now=self.now)

    @rule(work=consumes(running))
    def end(self, work: tuple[OperationId, list[StoredBlock], list[int]]) -> None:
        self.now += 1
        self.pool.release(work[0])

    @invariant()
    def holds(self) -> None:
        self.pool.check_invariants()


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
