"""The block pool against what it promises: no holes, exact room, nothing lost."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from shared.errors import Bug
from shared.ids import BlockKey, OperationId
from shared.messages import StoredBlock
from shared.store.blocks import BlockPool
from shared.store.policies import POLICIES, hit_density, make
from shared.store.policies.lru import Lru


def key_of(parent: bytes, name: int) -> BlockKey:
    return BlockKey(hashlib.sha256(parent + bytes([name])).digest())


def chain(*names: int, tenant: str = "") -> list[StoredBlock]:
    blocks, parent = [], BlockKey(tenant.encode().ljust(32, b"\0"))
    for depth, name in enumerate(names):
        key = key_of(parent, name)
        blocks.append(StoredBlock(key=key, parent=parent, depth=depth, nbytes=1, tenant=tenant))
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


def test_the_first_block_of_a_chain_continues_nothing_whatever_it_names_as_its_parent() -> None:
    """Clients of the store say themselves what their blocks continue."""
    pool, (later,) = BlockPool(2), chain(1)
    earlier = StoredBlock(key=key_of(b"", 9), parent=later.key, depth=0, nbytes=1)
    store(pool, "earlier", [earlier], now=0)
    store(pool, "later", [later], now=1)
    pool.pin(OperationId("reader"), [earlier.key], now=2)
    assert pool.available == 1
    pool.release(OperationId("reader"))
    pool.check_invariants()
    assert pool.drop([earlier.key]) == [earlier.key]
    pool.check_invariants()
    assert store(pool, "new", chain(2, 3), now=3) == [later.key]


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


def test_free_slots_serve_however_they_lie() -> None:
    pool = BlockPool(10)
    halves = OperationId("even"), OperationId("odd")
    allocation = pool.allocate(OperationId("all"), 10, now=0)
    assert allocation is not None and pool.largest_hole() == 0
    for number, half in enumerate(halves):
        pool.move([slot for slot in allocation.slots if slot % 2 == number], OperationId("all"), half)
    pool.release(halves[1])
    assert pool.statistics().free == 5 and pool.largest_hole() == 1, "as scattered as can be"
    scattered = pool.allocate(OperationId("new"), 5, now=1)
    assert scattered is not None and sorted(scattered.slots) == [1, 3, 5, 7, 9]
    assert pool.allocate(OperationId("one more"), 1, now=1) is None
    pool.release(halves[0])
    pool.release(OperationId("new"))
    assert pool.largest_hole() == 10
    pool.check_invariants()


def test_a_pool_that_never_evicts_keeps_no_stale_entries() -> None:
    policy = Lru()
    pool = BlockPool(100, policy)
    for n in range(1_000):
        store(pool, f"op{n}", chain(1, 2), now=n)
    assert policy._leaves.entries < 100


def test_sealing_without_the_parent_is_our_bug() -> None:
    pool = BlockPool(2)
    operation = OperationId("a")
    allocation = pool.allocate(operation, 1, now=0)
    assert allocation is not None
    with pytest.raises(Bug):
        pool.seal(operation, allocation.slots[0], chain(1, 2)[1], now=0)


def test_protected_blocks_go_last_until_their_time_is_over() -> None:
    pool = BlockPool(3, Lru())
    for n in range(3):
        store(pool, f"op{n}", chain(n), now=n)
    hot = keys(chain(0))
    assert pool.protect([*hot, *keys(chain(9))], until_s=10.0) == 1
    assert store(pool, "next", chain(5), now=3) == keys(chain(1))
    pool.check_invariants()
    assert store(pool, "late", chain(6), now=10) == hot
    pool.check_invariants()


def test_protected_blocks_go_all_the_same_when_nothing_else_is_left() -> None:
    pool = BlockPool(3, Lru())
    for n in range(3):
        store(pool, f"op{n}", chain(n), now=n)
    pool.protect(keys(chain(0)), until_s=90.0)
    pool.protect(keys(chain(1)), until_s=80.0)
    pool.protect(keys(chain(2)), until_s=70.0)
    assert store(pool, "big", chain(7, 8), now=5) == [*keys(chain(2)), *keys(chain(1))]


def test_a_newer_word_about_protection_replaces_the_older() -> None:
    pool = BlockPool(2, Lru())
    store(pool, "a", chain(0), now=0)
    store(pool, "b", chain(1), now=1)
    pool.protect(keys(chain(0)), until_s=100.0)
    assert [block.key for block in pool.coldest(2, now=2)] == [*keys(chain(1)), *keys(chain(0))]
    pool.protect(keys(chain(0)), until_s=0.0)
    assert store(pool, "c", chain(2), now=3) == keys(chain(0))


@pytest.mark.parametrize("policy", POLICIES)
def test_looking_at_the_coldest_makes_no_leaf_of_a_protected_block_with_children(policy: str) -> None:
    pool = BlockPool(4, make(policy))
    store(pool, "a", chain(1, 2), now=0)
    store(pool, "b", chain(5), now=1)
    store(pool, "c", chain(6), now=2)
    pool.protect(keys(chain(1)), until_s=100.0)
    pool.protect(keys(chain(1, 2))[1:], until_s=200.0)
    pool.coldest(4, now=3)
    pool.check_invariants()
    pool.protect(keys(chain(1, 2))[1:], until_s=0.0)
    pool.coldest(2, now=3)
    pool.check_invariants()
    assert store(pool, "d", chain(7, 8, 9), now=4)[-1] != chain(1)[0].key and pool.match(keys(chain(1))) == 1


def test_what_is_given_up_is_dropped_leaves_first_if_nobody_needs_it() -> None:
    pool = BlockPool(6)
    store(pool, "a", chain(1, 2, 3), now=0)
    store(pool, "b", chain(1, 7), now=0)
    assert pool.drop([*keys(chain(1, 2, 3)), *keys(chain(42))]) == [chain(1, 2, 3)[2].key, chain(1, 2)[1].key]
    pool.pin(OperationId("reader"), keys(chain(1, 7)), now=1)
    assert pool.drop(keys(chain(1, 7))) == []
    pool.release(OperationId("reader"))
    assert len(pool.drop(keys(chain(1, 7)))) == 2
    assert pool.statistics().free == 6
    pool.check_invariants()


def test_the_first_pin_of_an_operation_is_a_use_unless_it_says_otherwise() -> None:
    policy = Lru()
    pool = BlockPool(2, policy)
    store(pool, "maker", chain(1), now=0)
    key = chain(1)[0].key
    pool.pin(OperationId("mover"), [key], now=1, use=False)
    assert policy._entries[key].uses == 0
    pool.pin(OperationId("reader"), [key], now=2)
    pool.pin(OperationId("reader"), [key], now=3)
    assert (policy._entries[key].uses, policy._entries[key].used_s) == (1, 2)


class PoolModel(RuleBasedStateMachine):
    """Random operations, any interleaving: the pool agrees with a model that keeps plain sets and searches them.

    The model knows what may be evicted, not what should be: which leaf goes is the policy's word, and whatever it says
    must be allowed.
    """

    policy = "lru"
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, make(self.policy))
        self.now = 0.0
        self.serial = 0
        #: {key: block}
        self.cached: dict[BlockKey, StoredBlock] = {}
        #: {operation: keys it pins}
        self.pins: dict[OperationId, set[BlockKey]] = {}
        self.protected: dict[BlockKey, float] = {}
        self.private = 0

    # --- the model ---

    def pinned(self) -> set[BlockKey]:
        return set().union(*self.pins.values())

    def leaves(self) -> set[BlockKey]:
        parents = {block.parent for block in self.cached.values()}
        return {key for key in self.cached if key not in parents} - self.pinned()

    def pin(self, operation: OperationId, key: BlockKey) -> None:
        while key in self.cached:
            self.pins[operation].add(key)
            key = self.cached[key].parent

    def lose(self, evicted: list[BlockKey], *, tenant: str | None = None) -> None:
        """Each was a leaf when it went, and protected only if all others were."""
        for key in evicted:
            allowed = {leaf for leaf in self.leaves() if tenant in (None, self.cached[leaf].tenant)}
            assert key in allowed
            if self.protected.get(key, 0.0) > self.now:
                assert all(self.protected.get(leaf, 0.0) >= self.protected[key] for leaf in allowed)
            del self.cached[key]
            self.protected.pop(key, None)

    # --- what happens ---

    @rule(target=running, names=st.lists(st.integers(0, 2), min_size=1, max_size=6), tenant=st.sampled_from("ab"))
    def begin(self, names: list[int], tenant: str) -> tuple[OperationId, list[StoredBlock], list[int]]:
        self.serial += 1
        self.now += 1
        operation, blocks = OperationId(f"op{self.serial}"), chain(*names, tenant=tenant)
        slots = self.pool.pin(operation, keys(blocks), now=self.now)
        expected = next((i for i, block in enumerate(blocks) if block.key not in self.cached), len(blocks))
        assert len(slots) == expected
        self.pins[operation] = set(keys(blocks[:expected]))
        missing = len(blocks) - expected
        room = self.pool.available
        assert room == 12 - self.private - len(self.pinned())
        allocation = self.pool.allocate(operation, missing, now=self.now)
        assert (allocation is None) == (missing > room)
        if allocation is not None:
            self.lose(allocation.evicted)
            self.private += missing
        return operation, blocks[expected:], allocation.slots if allocation else []

    @rule(work=running, count=st.integers(0, 6), pin=st.booleans())
    def seal_some(self, work: tuple[OperationId, list[StoredBlock], list[int]], count: int, pin: bool) -> None:
        operation, blocks, slots = work
        for _ in range(min(count, len(slots))):
            if blocks[0].depth and blocks[0].parent not in self.cached:
                return  # it was sealed without a pin, and is gone
            block = blocks.pop(0)
            new = self.pool.seal(operation, slots.pop(0), block, now=self.now, pin=pin)
            assert new == (block.key not in self.cached)
            if new:
                self.private -= 1
                self.cached[block.key] = block
            if pin:
                self.pin(operation, block.key)

    @rule(work=consumes(running))
    def end(self, work: tuple[OperationId, list[StoredBlock], list[int]]) -> None:
        self.now += 1
        self.pool.release(work[0])
        del self.pins[work[0]]
        self.private = self.pool.statistics().private

    @rule(names=st.lists(st.integers(0, 2), min_size=1, max_size=6), tenant=st.sampled_from("ab"),
          ttl_s=st.integers(0, 9))
    def protect(self, names: list[int], tenant: str, ttl_s: int) -> None:
        wanted = keys(chain(*names, tenant=tenant))
        held = [key for key in wanted if key in self.cached]
        assert self.pool.protect(wanted, self.now + ttl_s) == len(held)
        self.protected.update(dict.fromkeys(held, self.now + ttl_s))

    @rule(names=st.lists(st.integers(0, 2), min_size=1, max_size=6), tenant=st.sampled_from("ab"))
    def drop(self, names: list[int], tenant: str) -> None:
        expected = []
        for key in reversed(keys(chain(*names, tenant=tenant))):
            if key in self.leaves():
                expected.append(key)
                del self.cached[key]
                self.protected.pop(key, None)
        assert self.pool.drop(keys(chain(*names, tenant=tenant))) == expected

    @rule(tenant=st.sampled_from("ab"), count=st.integers(0, 5))
    def evict_tenant(self, tenant: str, count: int) -> None:
        self.now += 1
        slots = {key: self.pool.slot(key) for key in self.cached}
        gone = self.pool.evict_tenant(tenant, count, now=self.now)
        assert gone == [(key, slots[key]) for key, _ in gone]
        evicted = [key for key, _ in gone]
        self.lose(evicted, tenant=tenant)
        assert len(evicted) == count or not [leaf for leaf in self.leaves() if self.cached[leaf].tenant == tenant]

    @rule(count=st.integers(0, 12))
    def look_at_the_coldest(self, count: int) -> None:
        coldest = keys(self.pool.coldest(count, now=self.now))
        assert keys(self.pool.coldest(count, now=self.now)) == coldest
        assert len(coldest) == min(count, len(self.cached) - len(self.pinned()))
        cached, protected = dict(self.cached), dict(self.protected)
        self.lose(coldest)  # would be allowed, one after another
        self.cached, self.protected = cached, protected
        free = self.pool.statistics().free
        if free + count <= self.pool.available:
            operation = OperationId("prophecy")
            allocation = self.pool.allocate(operation, free + count, now=self.now)
            assert allocation is not None and allocation.evicted == coldest
            self.lose(allocation.evicted)
            self.pool.release(operation)

    @rule(names=st.lists(st.integers(0, 2), min_size=1, max_size=3), tenant=st.sampled_from("ab"))
    def look_at_what_continues(self, names: list[int], tenant: str) -> None:
        asked = keys(chain(*names, tenant=tenant))[-1:]
        expected = {key for key in asked if key in self.cached}
        while more := {key for key, block in self.cached.items() if block.parent in expected} - expected:
            expected |= more
        found = self.pool.continuing([*asked, *asked])
        assert set(found) == expected and len(found) == len(expected)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_invariants()
        seen: set[BlockKey] = set()
        for block in self.pool.blocks():
            assert not block.depth or block.parent in seen, "parents come before what continues them"
            seen.add(block.key)
        assert {block.key for block in self.pool.blocks()} == self.cached.keys()
        assert self.pool.statistics().pinned == len(self.pinned())
        for tenant in "ab":
            assert self.pool.tenant_blocks(tenant) == sum(b.tenant == tenant for b in self.cached.values())


@pytest.mark.parametrize("name", POLICIES)
def test_pool_and_policy_agree_with_the_model(name: str) -> None:
    model = type(f"PoolModelWith{name}", (PoolModel,), {"policy": name})
    run_state_machine_as_test(model, settings=settings(max_examples=25, stateful_step_count=30, deadline=None))


def test_pool_and_the_default_agree_with_the_model_while_it_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_density, "_LEAST_REUSES", 1)
    monkeypatch.setattr(hit_density, "_RELEARN_EVENTS", 4)
    model = type("PoolModelLearning", (PoolModel,), {"policy": "hit_density"})
    run_state_machine_as_test(model, settings=settings(max_examples=25, stateful_step_count=50, deadline=None))
