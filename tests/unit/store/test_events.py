"""The event log answers "what did I miss?" from its ring or with a paged snapshot of one moment."""

from __future__ import annotations

import pytest

from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.messages import Since, SnapshotPage, StoredBlock, SyncEvents
from shared.store import events as events_module
from shared.store.events import EventLog

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
    state = [block(2), block(1)]
    log = log_of(state, kept=2)
    for n in range(5):
        log.stored([block(n)], at_s=0.0)
    reply = log.since(asked, now=0)
    assert isinstance(reply, SnapshotPage)
    assert (reply.seq, reply.page, reply.pages) == (5, 0, 1)
    assert [b.depth for b in reply.blocks] == [1, 2]


def test_an_answer_is_bounded_in_blocks_not_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "EVENT_BLOCKS", 10)
    log = log_of([block(1)], kept=100)
    for _ in range(3):
        log.stored([block(n) for n in range(8)], at_s=0.0)
    assert isinstance(log.since(ask(2), now=0), SyncEvents)
    assert isinstance(log.since(ask(0), now=0), SnapshotPage)


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
