"""Whom a client asks: who is there, who is said to have what, where a key belongs."""

from __future__ import annotations

import hashlib
from collections import Counter

from shared.ids import BlockKey, HostId, Incarnation, WorkerId
from shared.kv import CacheSpec, Tier, pack_keys
from shared.kv.feed import Ask
from shared.messages import Bye, Endpoint, Evicted, Hello, Load, SnapshotPage, Stored, StoredBlock
from shared.store.client_map import DEAD_AFTER_S, Whereabouts

SPEC = CacheSpec.opaque("values", 4096)
HERE, THERE = HostId("here"), HostId("there")
KEYS = [BlockKey(hashlib.sha256(bytes([i])).digest()) for i in range(64)]


def hello(worker: str, *, host: HostId = HERE, life: str = "1", spec: CacheSpec = SPEC, at_s: float = 0.0) -> Hello:
    name, incarnation = WorkerId(worker), Incarnation(life)
    return Hello(worker=name, incarnation=incarnation, role="store", spec=spec, capacity_blocks=8, max_running=1,
                 started_at_s=at_s, endpoint=Endpoint(worker=name, incarnation=incarnation, host=host))


def load(worker: str, *, free: int = 8, draining: bool = False, kv_seq: int = 0, life: str = "1") -> Load:
    return Load(worker=WorkerId(worker), incarnation=Incarnation(life), role="store", kv_seq=kv_seq, free_blocks=free,
                draining=draining)


def stored(worker: str, keys: list[BlockKey], seq: int, tier: Tier = Tier.DRAM) -> Stored:
    return Stored(worker=WorkerId(worker), incarnation=Incarnation("1"), seq=seq, spec=SPEC.digest, at_s=0.0, blocks=[
        StoredBlock(key=key, parent=BlockKey(bytes(32)), depth=0, nbytes=4096, tier=tier) for key in keys])


def evicted(worker: str, keys: list[BlockKey], seq: int, tier: Tier = Tier.DRAM) -> Evicted:
    return Evicted(worker=WorkerId(worker), incarnation=Incarnation("1"), seq=seq, at_s=0.0, keys=pack_keys(keys),
                   tier=tier)


def joined(whereabouts: Whereabouts, *workers: Hello) -> None:
    """They say hello, and answer those that are asked that they have nothing yet."""
    asks: list[Ask] = []
    for who in workers:
        asks += whereabouts.hello(who, 0.0)
    for ask in asks:
        whereabouts.synced(ask.worker, SnapshotPage(
            worker=ask.worker, incarnation=ask.since.incarnation, seq=0, spec=SPEC.digest, snapshot="s", page=0,
            pages=1, blocks=[]), 0.0)
    assert {ask.worker for ask in asks} == ({who.worker for who in workers} if len(workers) > 1 else set())


def names(seats: list[object]) -> list[str]:
    return [seat.worker for seat in seats]  # type: ignore[attr-defined]


def test_keys_spread_over_workers_and_stay_when_one_leaves() -> None:
    whereabouts = Whereabouts(SPEC, HERE)
    joined(whereabouts, *(hello(f"w{i}") for i in range(4)))
    before = {key: names(whereabouts.ranked(key))[0] for key in KEYS}
    assert min(Counter(before.values()).values()) >= 6 and len(set(before.values())) == 4
    whereabouts.bye(Bye(worker=WorkerId("w1"), incarnation=Incarnation("1")), 0.1)
    after = {key: names(whereabouts.ranked(key))[0] for key in KEYS}
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == "w1"}


def test_the_same_host_comes_first() -> None:
    whereabouts = Whereabouts(SPEC, HERE)
    joined(whereabouts, hello("a", host=THERE), hello("b", host=THERE), hello("near", host=HERE))
    assert all(names(whereabouts.ranked(key))[0] == "near" for key in KEYS)
    for worker in ("a", "near"):
        whereabouts.event(stored(worker, KEYS[:1], 1), 0.0)
    assert names(whereabouts.owners(KEYS[0])) == ["near", "a"]


def test_what_is_heard_and_what_owners_say() -> None:
    whereabouts = Whereabouts(SPEC, HERE)
    joined(whereabouts, hello("a"), hello("b"))
    whereabouts.event(stored("a", KEYS[:3], 1), 0.0)
    assert names(whereabouts.owners(KEYS[1])) == ["a"]
    whereabouts.event(evicted("a", KEYS[1:2], 2), 0.0)
    assert whereabouts.owners(KEYS[1]) == []
    whereabouts.learn(KEYS[1], WorkerId("b"))
    whereabouts.forget(KEYS[0], WorkerId("a"))
    assert names(whereabouts.owners(KEYS[1])) == ["b"] and whereabouts.owners(KEYS[0]) == []
    whereabouts.learn(KEYS[5], WorkerId("nobody"))
    assert whereabouts.owners(KEYS[5]) == []


def test_who_is_alone_is_not_followed_before_another_one_comes() -> None:
    whereabouts = Whereabouts(SPEC, HERE)
    assert whereabouts.hello(hello("a"), 0.0) == []
    assert whereabouts.load(load("a", kv_seq=7), 0.1) == ([], False)
    whereabouts.learn(KEYS[0], WorkerId("a"))
    assert not whereabouts.follows(WorkerId("a")) and whereabouts.owners(KEYS[0]) == [], "nothing is noted of it"
    assert names(whereabouts.ranked(KEYS[0])) == ["a"]
    assert [ask.worker for ask in whereabouts.hello(hello("b"), 0.2)] == ["a", "b"]
    assert whereabouts.follows(WorkerId("a")) and whereabouts.follows(WorkerId("b"))
    whereabouts.bye(Bye(worker=WorkerId("b"), incarnation=Incarnation("1")), 0.3)
    assert whereabouts.follows(WorkerId("a")) and not whereabouts.follows(WorkerId("b"))
    assert [ask.worker for ask in whereabouts.hello(hello("b", life="2", at_s=1.0), 0.4)] == ["b"]


def test_a_block_that_went_to_the_disk_is_still_there() -> None:
    whereabouts = Whereabouts(SPEC, HERE)
    joined(whereabouts, hello("a"), hello("b"))
    whereabouts.event(stored("a", KEYS[:1], 1), 0.0)
    whereabouts.event(stored("a", KEYS[:1], 2, Tier.SSD), 0.0)
    whereabouts.event(evicted("a", KEYS[:1], 3), 0.0)
    assert names(whereabouts.owners(KEYS[0])) == ["a"]
    whereabouts.event(evicted("a", KEYS[:1], 4, Tier.SSD), 0.0)
    assert whereabouts.owners(KEYS[0]) == []


def test_another_life_has_nothing_of_the_former() -> None:
    whereabouts = Whereabouts(SPEC, HERE)
    joined(whereabouts, hello("a"), hello("b"))
    whereabouts.event(stored("a", KEYS[:1], 1), 0.0)
    assert whereabouts.hello(hello("a", life="2", at_s=1.0), 1.0)
    assert whereabouts.owners(KEYS[0]) == []
    assert [seat.incarnation for seat in whereabouts.seats] == ["2", "1"]


def test_the_dead_leave_the_table_and_a_deaf_reader_buries_nobody() -> None:
    whereabouts = Whereabouts(SPEC, HERE)
    joined(whereabouts, hello("a"))
    whereabouts.tick(0.1)
    whereabouts.tick(100.0)  # it was us who did not run
    assert names(list(whereabouts.seats)) == ["a"]
    now_s = 100.0
    while now_s < 100.0 + 2 * DEAD_AFTER_S:
        now_s += 0.5
        whereabouts.tick(now_s)
    assert whereabouts.seats == ()


def test_who_is_not_heard_is_asked_last() -> None:
    """A call has one deadline: it must not be spent on a worker that stands still while another has the value."""
    whereabouts = Whereabouts(SPEC, HERE)
    joined(whereabouts, hello("near"), hello("far", host=THERE))
    for worker in ("near", "far"):
        whereabouts.event(stored(worker, KEYS[:1], 1), 0.1)
        whereabouts.load(load(worker, kv_seq=1), 0.1)
    assert names(whereabouts.owners(KEYS[0])) == ["near", "far"]
    for tenth in range(1, 50):
        whereabouts.load(load("far", kv_seq=1), tenth / 10)
        whereabouts.tick(tenth / 10)
    assert names(whereabouts.owners(KEYS[0])) == names(whereabouts.ranked(KEYS[1])) == ["far", "near"]
    assert [seat.takes for seat in whereabouts.ranked(KEYS[1])] == [True, False]
    whereabouts.load(load("near", kv_seq=1), 5.0)
    assert names(whereabouts.owners(KEYS[0])) == ["near", "far"]


def test_who_takes_new_values() -> None:
    whereabouts = Whereabouts(SPEC, HERE)
    joined(whereabouts, hello("full"), hello("leaving"), hello("ready"))
    for beat in (load("full", free=0), load("leaving", draining=True), load("ready")):
        whereabouts.load(beat, 0.1)
    assert {seat.worker: seat.takes for seat in whereabouts.seats} == {"full": False, "leaving": False, "ready": True}


def test_workers_of_another_spec_are_none_of_ours() -> None:
    whereabouts = Whereabouts(SPEC, HERE)
    assert whereabouts.hello(hello("a", spec=CacheSpec.opaque("values", 8192)), 0.0) == []
    assert whereabouts.hello(hello("b", spec=CacheSpec.opaque("others", 4096)), 0.0) == []
    assert whereabouts.seats == () and "values of 4096 bytes here, 8192 there" in whereabouts.foreign
    _, unknown = whereabouts.load(load("a"), 0.1)
    assert unknown


def test_an_opaque_spec_is_a_name_and_a_size() -> None:
    assert SPEC.block_bytes == SPEC.layer_bytes == 4096 and SPEC.is_opaque
    assert CacheSpec.opaque("values", 4097).block_bytes == 4097, "any size, not only even ones"
    assert len({CacheSpec.opaque(name, size).digest for name in ("a", "b") for size in (1, 2)}) == 4
