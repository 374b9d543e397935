"""Digests: equal for equal inventories however they came about, and pointing at what differs otherwise."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.kv import Tier
from shared.messages import DigestQuery, DigestReply, SnapshotPage, StoredBlock
from shared.store.digest import BUCKETS, Buckets, Inventory, bucket_of, differing, mix, unpack
from shared.store.events import PAGE_BLOCKS, EventLog

WORKER, LIFE = WorkerId("w"), Incarnation("1")


def block(number: int, tier: Tier = Tier.DRAM) -> StoredBlock:
    """Regular keys, as users' keys may be: the digest must not depend on keys being random."""
    return StoredBlock(key=BlockKey(number.to_bytes(32, "big") if number % 2 else number.to_bytes(32, "little")),
                       parent=BlockKey(bytes(32)), depth=0, nbytes=1, tier=tier)


def tiers_of(inventory: Inventory) -> dict[Tier, Buckets]:
    return {packed.tier: unpack(packed) for packed in inventory.digest.pack()}


copies = st.sets(st.tuples(st.integers(0, 600), st.sampled_from(list(Tier))), max_size=40)


@settings(max_examples=40, deadline=None)
@given(copies, copies, st.randoms())
def test_equal_inventories_and_only_those_have_equal_digests(
        one: set[tuple[int, Tier]], other: set[tuple[int, Tier]], chance: object) -> None:
    left, right = Inventory(), Inventory()
    left.store(block(number, tier) for number, tier in sorted(one))
    noise = sorted(other - one)
    right.store(block(number, tier) for number, tier in noise)
    right.store(block(number, tier) for number, tier in sorted(one, reverse=True))
    right.store(block(number, tier) for number, tier in sorted(one))
    for number, tier in noise:
        right.evict([block(number).key, block(number).key], tier)
    assert left.digest.pack() == right.digest.pack()
    third = Inventory()
    third.store(block(number, tier) for number, tier in sorted(other))
    found = differing(tiers_of(left), tiers_of(third))
    assert found == sorted({bucket_of(block(number).key) for number, _ in one ^ other})
    assert {(b.key, b.tier) for b in left.blocks(range(BUCKETS))} == {(block(n).key, t) for n, t in one}


def test_swapped_regular_keys_do_not_cancel() -> None:
    assert mix(block(2).key) ^ mix(block(4).key) != mix(block(6).key) ^ mix(block(0).key)
    left, right = Inventory(), Inventory()
    left.store([block(1), block(3)])
    right.store([block(5), block(7)])
    assert differing(tiers_of(left), tiers_of(right)) == [0]


def test_a_log_answers_with_the_digest_and_pages_of_what_differs() -> None:
    held = [block(2 * i) for i in range(PAGE_BLOCKS + 200)]
    log = EventLog(WORKER, LIFE, SpecDigest("s"), lambda: held)
    log.stored(held, at_s=0.0)
    log.evicted([held[0].key], at_s=0.0, reason="capacity")
    reply = log.digest(DigestQuery(incarnation=LIFE), now=0.0)
    assert isinstance(reply, DigestReply) and reply.seq == 2
    assert [(tier.tier, tier.count) for tier in reply.tiers] == [(Tier.DRAM, len(held) - 1)]
    buckets = sorted(unpack(reply.tiers[0]))
    page = log.digest(DigestQuery(incarnation=LIFE, buckets=buckets), now=0.0)
    assert isinstance(page, SnapshotPage) and page.pages == 2
    log.stored([block(999_999)], at_s=0.0)
    second = log.digest(DigestQuery(incarnation=LIFE, buckets=buckets, snapshot=page.snapshot, page=1), now=0.0)
    assert isinstance(second, SnapshotPage) and second.seq == 2, "all pages are of one moment"
    assert {b.key for b in [*page.blocks, *second.blocks]} == {b.key for b in held[1:]}
    some = log.digest(DigestQuery(incarnation=LIFE, buckets=[bucket_of(held[7].key), -1, BUCKETS]), now=0.0)
    assert isinstance(some, SnapshotPage)
    assert {b.key for b in some.blocks} == {b.key for b in held[1:] if bucket_of(b.key) == bucket_of(held[7].key)}


def test_a_log_that_keeps_no_digest_makes_one_when_asked() -> None:
    held = [block(i) for i in range(10)]
    log = EventLog(WORKER, LIFE, SpecDigest("s"), lambda: held, digests=False)
    log.stored(held, at_s=0.0)
    reply = log.digest(DigestQuery(incarnation=LIFE), now=0.0)
    assert isinstance(reply, DigestReply) and reply.tiers[0].count == 10
    log.evicted([held[0].key], at_s=0.0, reason="capacity")
    reply = log.digest(DigestQuery(incarnation=LIFE), now=0.0)
    assert isinstance(reply, DigestReply) and reply.tiers[0].count == 9
