"""The event log answers "what did I miss?" from its ring or with a paged snapshot of one moment."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ids import BlockKey, Incarnation, RequestId, SpecDigest, WorkerId
from shared.kv import Tier, unpack_keys
from shared.messages import Evicted, Since, SnapshotPage, Stored, StoredBlock, SyncEvents, codec
from shared.store import events as events_module
from shared.store.events import EventLog, Gone

LIFE = Incarnation("life-1")


def block(n: int) -> StoredBlock:
    return StoredBlock(key=BlockKey(bytes([n]) * 32), parent=BlockKey(b"\0" * 32), depth=n, nbytes=1)


def log_of(state: list[StoredBlock], kept: int = 4) -> EventLog:
    return EventLog(WorkerId("w"), LIFE, SpecDigest("spec"), lambda: state, kept=kept)


def ask(seq: int, *, incarnation: Incarnation = LIFE, snapshot: str = "", page: int = 0) -> Since:
    return Since(incarnation=incarnation, seq=seq, snapshot=snapshot, page=page)


def test_recent_batches_come_from_the_ring() -> None:
    log = log_of([])
    first = log.stored([block(1)], at_s=1.0)
    second = log.evicted([block(1).key], at_s=2.0, reason="capacity")
    assert log.since(ask(0), now=0) == SyncEvents(worker=WorkerId("w"), incarnation=LIFE, events=[first, second])
    assert log.since(ask(1), now=0).events == [second]  # type: ignore[union-attr]
    assert log.since(ask(2), now=0).events == []  # type: ignore[union-attr]


@pytest.mark.parametrize("asked", [ask(0), ask(99), ask(3, incarnation=Incarnation("before"))])
def test_what_the_ring_has_not_is_answered_with_a_snapshot(asked: Since) -> None:
    state = [block(1), block(2)]
    log = log_of(state, kept=2)
    for n in range(5):
        log.stored([block(n)], at_s=0.0)
    reply = log.since(asked, now=0)
    assert isinstance(reply, SnapshotPage)
    assert (reply.seq, reply.page, reply.pages) == (5, 0, 1)
    assert [b.depth for b in reply.blocks] == [1, 2]


def test_an_answer_is_bounded_in_bytes_not_in_batches() -> None:
    log = log_of([block(1)], kept=100)
    named = [msgspec.structs.replace(block(n), tenant="t" * 200, request=RequestId("r" * 128)) for n in range(200)]
    for _ in range(100):
        log.stored(named, at_s=0.0)
    some = next(seq for seq in range(100) if isinstance(log.since(ask(seq), now=0), SyncEvents))
    assert 0 < some < 99
    reply = log.since(ask(some), now=0)
    assert events_module.EVENT_BYTES * 0.7 < len(codec.encode(reply)) < events_module.EVENT_BYTES * 1.1
    assert isinstance(log.since(ask(some - 1), now=0), SnapshotPage)
    log.evicted([b.key for b in named] * 400, at_s=0.0, reason="capacity")
    assert isinstance(log.since(ask(100), now=0), SnapshotPage), "keys count too"


def test_pages_are_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "PAGE_BLOCKS", 2)
    state = [block(n) for n in range(5)]
    log = log_of(state, kept=1)
    for n in range(3):
        log.stored([block(n)], at_s=0.0)
    pages = [log.since(ask(0), now=0)]
    state.clear()
    log.stored([block(9)], at_s=0.0)
    while isinstance(pages[-1], SnapshotPage) and pages[-1].page + 1 < pages[-1].pages:
        pages.append(log.since(ask(0, snapshot=pages[-1].snapshot, page=pages[-1].page + 1), now=1))
    got = [b.depth for page in pages if isinstance(page, SnapshotPage) for b in page.blocks]
    assert got == [0, 1, 2, 3, 4]
    assert {page.seq for page in pages if isinstance(page, SnapshotPage)} == {3}


def test_who_asks_at_the_same_moment_reads_the_same_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "PAGE_BLOCKS", 2)
    taken = []

    def state() -> list[StoredBlock]:
        taken.append(log.seq)
        return [block(n) for n in range(4)]

    log = EventLog(WorkerId("w"), LIFE, SpecDigest("spec"), state, kept=1)
    for n in range(3):
        log.stored([block(n)], at_s=0.0)
    pages = [log.since(ask(0), now=0) for _ in range(3)]
    names = {page.snapshot for page in pages if isinstance(page, SnapshotPage)}
    assert taken == [3] and len(names) == 1
    for _ in range(3):  # nobody's last page ends it for the others
        last = log.since(ask(0, snapshot=names.copy().pop(), page=1), now=1)
        assert isinstance(last, SnapshotPage)
        assert (last.page, [b.depth for b in last.blocks]) == (1, [2, 3])
    log.since(ask(0), now=2)
    assert taken == [3, 3], "all were through"
    log.stored([block(9)], at_s=0.0)
    log.since(ask(0), now=2)
    assert taken == [3, 3, 4], "it is no more what is there"


def test_a_forgotten_snapshot_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "PAGE_BLOCKS", 1)
    log = log_of([block(0), block(1)], kept=1)
    log.stored([block(0)], at_s=0.0)
    log.stored([block(1)], at_s=0.0)
    first = log.since(ask(0), now=0)
    assert isinstance(first, SnapshotPage)
    late = log.since(ask(0, snapshot=first.snapshot, page=1), now=1e6)
    assert isinstance(late, SnapshotPage)
    assert late.page == 0 and late.snapshot != first.snapshot


NEWS = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["store", "capacity", "quota", "ssd"])), max_size=60)


@given(NEWS)
def test_gathered_news_add_up_to_the_same_and_keep_the_order_of_each_block(told: list[tuple[int, str]]) -> None:
    news = [block(n) if what == "store" else Gone(block(n).key, what, Tier.SSD if what == "ssd" else Tier.DRAM)
            for n, what in told]
    unfolded: list[StoredBlock | Gone] = []
    events = list(log_of([]).number(news, at_s=0.0))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    for event in events:
        unfolded += event.blocks if isinstance(event, Stored) else [
            Gone(key, event.reason, event.tier) for key in unpack_keys(event.keys)]
    for n in range(13):
        assert [item for item in unfolded if item.key == block(n).key] == [
            item for item in news if item.key == block(n).key]
    assert [item for item in unfolded if isinstance(item, Gone)] == [item for item in news if isinstance(item, Gone)]
    assert [item for item in unfolded if isinstance(item, StoredBlock)] == [
        item for item in news if isinstance(item, StoredBlock)]


def test_a_full_pool_tells_in_two_batches_what_it_took_and_what_it_gave_up_for_that() -> None:
    news = [item for n in range(9) for item in (Gone(block(n).key, "capacity", Tier.DRAM), block(100 + n))]
    assert [type(event) for event in log_of([]).number(news, at_s=0.0)] == [Evicted, Stored]
