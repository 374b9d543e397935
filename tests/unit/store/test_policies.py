"""Every policy against its contract, and each against what only it promises."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec import structs

from shared.errors import Bug
from shared.ids import BlockKey, OperationId
from shared.messages import StoredBlock
from shared.store.blocks import BlockPool
from shared.store.policies import DEFAULT, POLICIES, Policy, make
from shared.store.policies.base import Ranked
from shared.store.policies.hit_density import HitDensity
from shared.store.policies.leaves import Leaves
from shared.store.policies.length_aware import LengthAware
from shared.store.policies.lfu import Lfu
from shared.store.policies.lru import Lru
from shared.store.policies.recall import MOST_USES, Recall
from shared.store.policies.reuse import UNKNOWN, LifeTable, Outlook, bucket_of, outlooks
from shared.store.policies.s3fifo import S3Fifo

ROOT = BlockKey(bytes(32))
every_policy = pytest.mark.parametrize("name", POLICIES)


def chain(*names: int, tenant: str = "") -> list[StoredBlock]:
    """A chain whose blocks are told apart by ``names``."""
    blocks: list[StoredBlock] = []
    for depth, name in enumerate(names):
        parent = blocks[-1].key if blocks else ROOT
        key = BlockKey(hashlib.sha256(parent + name.to_bytes(4, "little")).digest())
        blocks.append(StoredBlock(key=key, parent=parent, depth=depth, nbytes=1, tenant=tenant, tokens=64))
    return blocks


def request(pool: BlockPool, blocks: list[StoredBlock], now: float) -> tuple[int, list[BlockKey]]:
    """One whole request; how many leading blocks it hit, and what it evicted."""
    operation = OperationId("request")
    hit = len(pool.pin(operation, [block.key for block in blocks], now=now))
    allocation = pool.allocate(operation, min(len(blocks) - hit, pool.available), now=now)
    assert allocation is not None
    for slot, block in zip(allocation.slots, blocks[hit:], strict=False):
        pool.seal(operation, slot, block, now=now)
    pool.release(operation)
    return hit, allocation.evicted


def test_names_are_those_of_the_classes_and_a_wrong_one_is_told_the_right_ones() -> None:
    assert {name: make(name).name for name in POLICIES} == {name: name for name in POLICIES}
    assert make().name == DEFAULT
    with pytest.raises(ValueError, match=r"'mru' is unknown; expected one of .*lru.*s3fifo"):
        make("mru")


@every_policy
def test_the_same_events_lead_to_the_same_evictions(name: str) -> None:
    def run() -> list[list[BlockKey]]:
        pool, rng = BlockPool(40, make(name)), random.Random(3)
        return [request(pool, chain(*(rng.randrange(4) for _ in range(rng.randrange(1, 9)))), now=n // 3)[1]
                for n in range(600)]

    assert run() == run()


@every_policy
def test_take_hands_out_each_offered_block_once_and_nothing_else(name: str) -> None:
    policy = make(name)
    policy.bind(8)
    blocks = [chain(n)[0] for n in range(6)]
    for block in blocks:
        policy.stored(block, now=1.0)
        policy.offer(block.key)
    policy.withdraw(blocks[2].key)
    taken = {policy.take() for _ in range(5)}
    assert taken == {block.key for block in blocks} - {blocks[2].key}
    assert policy.take() is None
    assert policy.take("nobody") is None


@every_policy
def test_a_tenant_loses_only_its_own(name: str) -> None:
    pool = BlockPool(30, make(name))
    for n in range(5):
        request(pool, chain(n, 1, tenant="a"), now=n)
        request(pool, chain(n + 100, 1, tenant="b"), now=n)
    gone = pool.evict_tenant("a", 7, now=9.0)
    assert len(gone) == 7 and pool.tenant_blocks("a") == 3 and pool.tenant_blocks("b") == 10
    assert len(pool.evict_tenant("a", 99, now=9.0)) == 3
    assert pool.evict_tenant("a", 1, now=9.0) == []
    pool.check_invariants()


@every_policy
def test_books_that_differ_from_the_pools_are_our_bug(name: str) -> None:
    policy = make(name)
    policy.bind(4)
    block = chain(1)[0]
    policy.stored(block, now=0.0)
    with pytest.raises(Bug, match="knows 1 blocks"):
        policy.check_invariants(stored=set(), offered=set())
    policy.offer(block.key)
    with pytest.raises(Bug, match="evict other blocks"):
        policy.check_invariants(stored={block.key}, offered=set())


@every_policy
def test_odds_are_odds(name: str) -> None:
    pool = BlockPool(60, make(name))
    rng = random.Random(1)
    for n in range(300):
        request(pool, chain(rng.randrange(30), rng.randrange(2)), now=n)
    assert all(0 <= pool.policy.reuse_odds(block.key) <= 1 for block in pool.blocks())


@every_policy
def test_memory_is_bounded_however_many_blocks_pass_through(name: str) -> None:
    pool = BlockPool(64, make(name))
    for n in range(2_000):
        request(pool, chain(n, 1), now=n / 10)
    policy = pool.policy
    assert len(policy.stored_keys()) <= 64
    for leaves in _leaves_of(policy):
        assert leaves.entries <= 2 * 64 + 65
    if isinstance(policy, S3Fifo):
        assert len(policy._ghosts) <= 64
    if isinstance(policy, HitDensity):
        assert len(policy._watched) <= 4_096 and len(policy._queues) <= 7 * 16 and len(policy._tables) <= 7 * 16


def _leaves_of(policy: Policy) -> list[Leaves]:
    if isinstance(policy, HitDensity):
        return list(policy._queues.values())
    if isinstance(policy, S3Fifo):
        return [policy._small, policy._main]
    assert isinstance(policy, Ranked)
    return [policy._leaves]


def test_lru_takes_what_was_used_longest_ago() -> None:
    pool = BlockPool(3, Lru())
    for n in range(3):
        request(pool, chain(n), now=n)
    request(pool, chain(0), now=3)
    assert request(pool, chain(9), now=4)[1] == [chain(1)[0].key]


def test_lfu_takes_what_was_used_least() -> None:
    pool = BlockPool(3, Lfu())
    for n in (0, 1, 2, 0, 0, 1, 1, 2):
        request(pool, chain(n), now=n)
    assert request(pool, chain(9), now=9)[1] == [chain(2)[0].key]


def test_length_aware_takes_the_end_of_a_long_chain_before_an_older_short_one() -> None:
    pool = BlockPool(12, LengthAware())
    request(pool, chain(1), now=0)
    request(pool, chain(*range(10, 21)), now=5)
    assert request(pool, chain(2), now=6)[1] == [chain(*range(10, 21))[-1].key]


def test_s3fifo_keeps_what_was_used_on_probation_through_a_scan() -> None:
    pool = BlockPool(20, S3Fifo())
    request(pool, chain(1), now=0)
    request(pool, chain(1), now=1)
    for n in range(100, 160):
        request(pool, chain(n), now=n)
    assert request(pool, chain(1), now=200)[0] == 1


def test_s3fifo_takes_a_ghost_back_into_the_main_queue() -> None:
    policy = S3Fifo()
    pool = BlockPool(4, policy)
    for n in range(5):
        request(pool, chain(n), now=n)
    assert chain(0)[0].key in policy._ghosts
    request(pool, chain(0), now=9)
    assert policy._queued[chain(0)[0].key].main and chain(0)[0].key not in policy._ghosts


# --- the default ---------------------------------------------------------------------------------------------------


def chats_and_scans(seed: int, requests: int, *, chat_share: float) -> list[tuple[float, list[StoredBlock]]]:
    """Prompts of four blocks, one a second: some of chats that go on every 120 s for a few turns, the others once."""
    rng = random.Random(seed)
    prompts: list[tuple[float, list[int]]] = []
    for n in range(requests):
        first = [n * 10 + i for i in range(4)]
        prompts.append((n, first))
        if rng.random() < chat_share:
            for turn in range(1, 5):
                prompts.append((n + turn * 120 + rng.random() * 20, first + [n * 10 + 4 + i for i in range(turn)]))
    return [(at, chain(*names)) for at, names in sorted(prompts)]


def hit_share(policy: Policy, blocks: int, prompts: list[tuple[float, list[StoredBlock]]]) -> float:
    pool = BlockPool(blocks, policy)
    hits = sum(request(pool, prompt, now=at)[0] for at, prompt in prompts)
    return hits / sum(len(prompt) for _, prompt in prompts)


def test_the_default_keeps_chats_that_went_on_where_lru_keeps_what_never_returns() -> None:
    prompts = chats_and_scans(1, 2_500, chat_share=0.12)
    lru, ours = hit_share(Lru(), 400, prompts), hit_share(HitDensity(), 400, prompts)
    assert ours > lru + 0.1


def test_the_default_tells_a_tenant_who_scans_from_one_who_chats() -> None:
    """Half of one tenant's prompts come again after a minute, none of the other's ever does."""
    rng = random.Random(4)
    prompts: list[tuple[float, list[StoredBlock]]] = []
    for n in range(2_500):
        prompts.append((n, chain(1_000_000 + n, 1, tenant="batch")))
        prompts.append((n, chain(n, 1, tenant="chat")))
        if rng.random() < 0.5:
            prompts.append((n + 60, chain(n, 1, tenant="chat")))
    prompts.sort(key=lambda prompt: prompt[0])
    one_tenant = [(at, [structs.replace(block, tenant="") for block in blocks]) for at, blocks in prompts]
    apart = hit_share(HitDensity(), 150, prompts)
    assert apart > 1.3 * hit_share(HitDensity(), 150, one_tenant)


def test_the_default_is_no_worse_than_lru_where_lru_is_right() -> None:
    rng = random.Random(5)
    recent = [(float(n), chain(max(0, n - int(rng.expovariate(1 / 40))), 1, 2)) for n in range(2_000)]
    lru, ours = hit_share(Lru(), 90, recent), hit_share(HitDensity(), 90, recent)
    assert ours > lru - 0.01


def test_the_default_is_lru_until_it_has_seen_reuse() -> None:
    rng = random.Random(2)
    prompts = [(float(n), chain(rng.randrange(60), 1)) for n in range(300)]
    lru, ours = BlockPool(20, Lru()), BlockPool(20, HitDensity())
    for at, prompt in prompts:
        assert request(lru, prompt, at) == request(ours, prompt, at)


def test_the_default_follows_a_workload_that_changes() -> None:
    """Chats of one kind for an hour, then only fresh prompts that come back at once: the old lesson must fade."""
    chats = chats_and_scans(1, 1_500, chat_share=0.12)
    turn = chats[-1][0] + 1
    pairs = [(turn + n / 2, chain(10_000_000 + n // 2, 1, 2, 3)) for n in range(4_000)]
    pool = BlockPool(400, HitDensity())
    for at, prompt in chats:
        request(pool, prompt, at)
    hits = [request(pool, prompt, at)[0] for at, prompt in pairs]
    assert sum(hits[-1_000:]) == 4 * 500


def test_events_of_the_default_fit_into_an_event_loop() -> None:
    prompts = chats_and_scans(3, 600, chat_share=0.12)
    events = sum(len(prompt) for _, prompt in prompts)

    def seconds(policy: Policy) -> float:
        started = time.process_time()
        hit_share(policy, 400, prompts)
        return time.process_time() - started

    assert min(seconds(HitDensity()) for _ in range(2)) / events < 200e-6  # some 15 us where nothing else runs


# --- what the default is made of -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.integers(0, 5)), max_size=60),
       st.lists(st.tuples(st.sampled_from(["pop", "discard", "pop a", "pop b"]), st.integers(0, 9)), max_size=60))
@hypothesis_settings(deadline=None)
def test_leaves_are_a_sorted_set(adds: list[tuple[int, str, int]], steps: list[tuple[str, int]]) -> None:
    leaves = Leaves()
    model: dict[BlockKey, tuple[tuple[float, float], BlockKey, str]] = {}

    def name(number: int) -> BlockKey:
        return BlockKey(bytes([number]))

    def add(number: int, tenant: str, rank: int) -> None:
        tenant = "ab"[number % 2] if tenant else tenant  # a block's tenant never changes
        leaves.add(name(number), tenant, (rank, 0))
        model[name(number)] = ((rank, 0), name(number), tenant)

    for index, one in enumerate(adds):
        add(*one)
        for step, number in steps[index:index + 1]:
            if step == "discard":
                leaves.discard(name(number))
                model.pop(name(number), None)
                continue
            tenant = step[4:] or None
            expected = min((item for item in model.values() if tenant in (None, item[2])), default=None)
            assert leaves.first(tenant) == (expected and expected[:2])
            assert leaves.pop(tenant) == (expected and expected[1])
            if expected:
                del model[expected[1]]
        assert leaves.keys() == model.keys() and len(leaves) == len(model)


def test_leaves_forget_tenants_that_are_too_many() -> None:
    leaves = Leaves()
    for n in range(600):
        leaves.add(BlockKey(n.to_bytes(4, "big")), f"t{n}", (n, 0))
        assert leaves.first(f"t{n}") is not None
    assert leaves.pop("t0") == BlockKey(bytes(4))
    assert len(leaves._of) <= 256


def test_recall_remembers_counts_of_the_last_keys_told() -> None:
    recall = Recall(1_000)
    assert len(recall) == 1_024
    keys = [chain(n)[0].key for n in range(300)]
    for n, key in enumerate(keys):
        recall.put(key, n)
    known = [(n, found) for n, key in enumerate(keys) if (found := recall.get(key)) is not None]
    assert len(known) > 200 and all(found == min(n, MOST_USES) for n, found in known)
    assert sum(recall.get(chain(n)[0].key) is not None for n in range(1_000, 3_000)) < 10


def test_an_ignorant_outlook_is_lru() -> None:
    assert UNKNOWN.density == sorted(UNKNOWN.density, reverse=True)


def table(reused: dict[float, float], lost: dict[float, float]) -> LifeTable:
    made = LifeTable()
    for counts, into in ((reused, made.reused), (lost, made.lost)):
        for age_s, count in counts.items():
            into[bucket_of(age_s)] += count
    return made


def test_density_is_low_before_anybody_can_answer_and_after_everybody_has() -> None:
    outlook = outlooks([("chat", "all", table({100.0: 5_000, 130.0: 5_000}, {3_000.0: 2_000}))])["chat"]
    young, ripe, late = (outlook.density[bucket_of(age_s)] for age_s in (1.0, 80.0, 400.0))
    assert late < young < ripe
    assert outlook.odds[bucket_of(1.0)] == pytest.approx(10 / 12, abs=0.05)
    assert outlook.odds[bucket_of(400.0)] < 0.2


def test_a_thin_class_leans_on_its_group() -> None:
    found = outlooks([("rich", "g", table({60.0: 3_000}, {3_000.0: 1_000})), ("thin", "g", table({}, {600.0: 2}))])
    assert found["thin"].odds[0] == pytest.approx(found["rich"].odds[0], abs=0.15)


@given(st.lists(st.floats(0, 0.99), min_size=37, max_size=37))
def test_density_is_the_best_ratio_of_hits_to_seconds(hazards: list[float]) -> None:
    def best(start: int, widths: Callable[[int], float]) -> float:
        alive, hits, seconds, found = 1.0, 0.0, 0.0, 0.0
        for i in range(start, len(hazards)):
            seconds += alive * (1 - hazards[i] / 2) * widths(i)
            hits += alive * hazards[i]
            alive *= 1 - hazards[i]
            found = max(found, hits / seconds)
        return found

    def width(i: int) -> float:
        return 0.25 if i == 0 else 0.25 * 2 ** (i / 2) - 0.25 * 2 ** ((i - 1) / 2) if i < 36 else 0.25 * 2 ** 17.5

    outlook = Outlook.of(hazards)
    reachable = 1.0
    for i, hazard in enumerate(hazards):
        if reachable > 1e-6:  # further on differences drown in rounding
            assert outlook.density[i] == pytest.approx(best(i, width), rel=1e-4, abs=1e-9)
        reachable *= 1 - hazard
