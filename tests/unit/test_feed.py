"""FeedTracker against owners that live, and a bus that loses, repeats and reorders."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.kv import Tier, pack_keys, unpack_keys
from shared.kv.feed import Action, Apply, Ask, FeedTracker, Gather, Reset, Swap
from shared.messages import Evicted, KvEvent, Since, SnapshotPage, Stored, StoredBlock, SyncEvents, SyncReply

E = TypeVar("E", Stored, Evicted)

W = WorkerId("w1")
SPEC = SpecDigest("spec")


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def block(number: int) -> StoredBlock:
    return StoredBlock(key=key(number), parent=key(0), depth=0, nbytes=1)


@dataclass
class Owner:
    """A worker that owns blocks: numbers its batches, keeps the last ``ring`` of them, answers syncs."""

    life: int = 1
    ring: int = 4
    page_blocks: int = 2
    seq: int = 0
    blocks: set[int] = field(default_factory=set)
    recent: list[KvEvent] = field(default_factory=list)
    snapshots: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"life-{self.life}")

    def store(self, *numbers: int) -> Stored:
        self.blocks.update(numbers)
        self.seq += 1
        return self._remember(Stored(worker=W, incarnation=self.incarnation, seq=self.seq, spec=SPEC, at_s=0.0,
                                     blocks=[block(number) for number in numbers]))

    def evict(self, *numbers: int) -> Evicted:
        self.blocks.difference_update(numbers)
        self.seq += 1
        return self._remember(Evicted(worker=W, incarnation=self.incarnation, seq=self.seq, at_s=0.0,
                                      keys=pack_keys([key(number) for number in numbers]), tier=Tier.DRAM))

    def restart(self) -> None:
        self.life += 1
        self.seq, self.blocks, self.recent, self.snapshots = 0, set(), [], {}

    def answer(self, since: Since) -> SyncReply:
        missed = [event for event in self.recent if event.seq > since.seq]
        if not since.snapshot and since.seq <= self.seq and len(missed) == self.seq - since.seq:
            return SyncEvents(worker=W, incarnation=self.incarnation, events=missed)
        if since.snapshot not in self.snapshots:
            since = Since(incarnation=self.incarnation, seq=0, snapshot=f"s{self.seq}-{len(self.snapshots)}")
            self.snapshots[since.snapshot] = (self.seq, sorted(self.blocks))
        seq, numbers = self.snapshots[since.snapshot]
        pages = max(1, -(-len(numbers) // self.page_blocks))
        here = numbers[since.page * self.page_blocks:(since.page + 1) * self.page_blocks]
        return SnapshotPage(worker=W, incarnation=self.incarnation, seq=seq, spec=SPEC, snapshot=since.snapshot,
                            page=since.page, pages=pages, blocks=[block(number) for number in here])

    def _remember(self, event: E) -> E:
        self.recent = [*self.recent, event][-self.ring:] if self.ring else []
        return event


class Copy:
    """A reader: a tracker and the set it leads to."""

    def __init__(self, **settings: float) -> None:
        self.tracker = FeedTracker(**settings)  # type: ignore[arg-type]
        self.blocks: set[BlockKey] = set()
        self.gathered: set[BlockKey] = set()
        self.asks: list[Ask] = []

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(event=Stored() as event):
                    self.blocks.update(block.key for block in event.blocks)
                case Apply(event=Evicted() as event):
                    self.blocks.difference_update(unpack_keys(event.keys))
                case Reset(blocks=blocks):
                    self.blocks = {block.key for block in blocks}
                case Gather(blocks=blocks, is_first=is_first):
                    self.gathered = (set() if is_first else self.gathered) | {block.key for block in blocks}
                case Swap():
                    self.blocks, self.gathered = self.gathered, set()
                case Ask():
                    self.asks.append(action)

    def settle(self, owner: Owner, now: float) -> float:
        """Answers every question until nothing is due; answers the time then."""
        for _ in range(1000):
            while self.asks:
                self.act(self.tracker.synced(W, owner.answer(self.asks.pop(0).since), now))
            wake = self.tracker.next_wake()
            if wake is None:
                return now
            now = max(now, wake)
            self.act(self.tracker.tick(now))
        raise AssertionError("the tracker never gets quiet")


def joined(owner: Owner, **settings: float) -> Copy:
    copy = Copy(**settings)
    copy.act(copy.tracker.joined(W, owner.incarnation, 0.0))
    copy.settle(owner, 0.0)
    assert copy.tracker.statistics.syncs == 1
    return copy


def keys(owner: Owner) -> set[BlockKey]:
    return {key(number) for number in owner.blocks}


def test_batches_in_order_need_no_question() -> None:
    owner = Owner()
    copy = joined(owner)
    for event in (owner.store(1, 2), owner.evict(1), owner.store(3)):
        copy.act(copy.tracker.offer(event, 1.0))
    assert copy.blocks == keys(owner) and not copy.asks and copy.tracker.next_wake() is None


def test_two_batches_that_overtook_each_other_need_no_question() -> None:
    owner = Owner()
    copy = joined(owner)
    first, second = owner.store(1), owner.evict(1)
    copy.act(copy.tracker.offer(second, 1.0))
    copy.act(copy.tracker.tick(1.05))
    copy.act(copy.tracker.offer(first, 1.09))
    copy.act(copy.tracker.tick(2.0))
    assert copy.blocks == set() and copy.tracker.statistics.syncs == 1


def test_a_gap_is_asked_for_once_and_the_cursor_is_the_owners_last() -> None:
    owner = Owner(ring=1)
    copy = joined(owner)
    owner.store(1)  # lost
    for number in range(2, 6):
        copy.act(copy.tracker.offer(owner.store(number), 1.0))
    copy.act(copy.tracker.tick(1.2))
    copy.act(copy.tracker.offer(owner.store(9), 1.25))  # while the answer is under way
    copy.settle(owner, 1.3)
    copy.act(copy.tracker.offer(owner.store(10), 1.4))
    copy.settle(owner, 10.0)
    assert copy.blocks == keys(owner)
    assert (copy.tracker.statistics.syncs, copy.tracker.statistics.gaps) == (2, 1)


def test_a_loss_with_nothing_after_it_shows_in_the_heartbeat() -> None:
    owner = Owner()
    copy = joined(owner)
    owner.store(1)  # lost
    copy.act(copy.tracker.heartbeat(W, owner.incarnation, owner.seq, 1.0))
    assert not copy.asks
    copy.settle(owner, 1.0)
    assert copy.blocks == keys(owner) and copy.tracker.statistics.syncs == 2


def test_a_failed_question_is_repeated_after_growing_pauses() -> None:
    owner = Owner()
    copy = Copy()
    copy.act(copy.tracker.joined(W, owner.incarnation, 0.0))
    pauses, now = [], 0.0
    for _ in range(8):
        copy.asks.clear()
        copy.act(copy.tracker.sync_failed(W, now, owner.incarnation))
        wake = copy.tracker.next_wake()
        assert wake is not None
        pauses.append(round(wake - now, 6))
        now = wake
        copy.act(copy.tracker.tick(now))
        assert len(copy.asks) == 1
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert not copy.tracker.is_converged(W)
    copy.settle(owner, now)
    assert copy.tracker.is_converged(W)


def test_an_owner_that_cannot_help_is_not_asked_in_a_loop() -> None:
    owner = Owner()
    copy = joined(owner)
    copy.act(copy.tracker.heartbeat(W, owner.incarnation, 7, 1.0))  # a number the owner does not know of
    copy.act(copy.tracker.tick(1.2))
    for _ in range(5):
        assert len(copy.asks) == 1
        copy.act(copy.tracker.synced(W, owner.answer(copy.asks.pop().since), 1.2))
        assert not copy.asks, "the next question must wait"
        wake = copy.tracker.next_wake()
        assert wake is not None and wake > 1.3
        copy.act(copy.tracker.tick(wake))


def test_a_new_life_replaces_the_old_and_its_late_batches_are_dropped() -> None:
    owner = Owner()
    copy = joined(owner)
    copy.act(copy.tracker.offer(owner.store(1, 2), 1.0))
    late = owner.store(3)
    owner.restart()
    fresh = owner.store(7)
    copy.act(copy.tracker.joined(W, owner.incarnation, 2.0))
    assert copy.blocks == set()
    copy.act(copy.tracker.offer(late, 2.0))
    copy.act(copy.tracker.offer(fresh, 2.0))
    copy.settle(owner, 2.0)
    copy.act(copy.tracker.offer(late, 2.1))
    assert copy.blocks == {key(7)}


def test_answers_of_another_life_and_unasked_answers_change_nothing() -> None:
    owner = Owner()
    copy = joined(owner)
    stale = owner.answer(Since(incarnation=owner.incarnation, seq=0))
    assert copy.tracker.synced(W, stale, 1.0) == []
    owner.restart()
    copy.act(copy.tracker.joined(W, owner.incarnation, 1.0))
    assert copy.tracker.synced(W, stale, 1.0) == []
    assert copy.tracker.sync_failed(W, 1.0, Incarnation("life-1")) == []
    assert copy.tracker.next_wake() is None, "the open question still waits for its own answer"
    assert copy.tracker.synced(WorkerId("stranger"), stale, 1.0) == []
    assert copy.tracker.offer(stale.events[0] if isinstance(stale, SyncEvents) and stale.events else
                              Owner().store(1), 1.0) == []


@pytest.mark.parametrize("by_page", [False, True])
def test_a_snapshot_that_changes_between_pages_is_collected_anew(*, by_page: bool) -> None:
    owner = Owner(ring=0)
    for number in range(7):
        owner.store(number)
    copy = Copy(by_page=by_page)
    copy.act(copy.tracker.joined(W, owner.incarnation, 0.0))
    copy.act(copy.tracker.synced(W, owner.answer(copy.asks.pop().since), 0.0))  # page 0 of 4
    owner.snapshots.clear()
    owner.evict(3)
    copy.act(copy.tracker.synced(W, owner.answer(copy.asks.pop().since), 0.0))  # page 0 of another one
    assert copy.blocks == set(), "half a snapshot is none"
    copy.settle(owner, 0.0)
    assert copy.blocks == keys(owner)


def test_what_overflows_while_waiting_leads_to_another_question() -> None:
    owner = Owner(ring=0)
    copy = Copy(max_held=3)
    copy.act(copy.tracker.joined(W, owner.incarnation, 0.0))
    first = owner.answer(copy.asks.pop().since)
    for number in range(10):
        copy.act(copy.tracker.offer(owner.store(number), 0.0))
    assert copy.tracker.statistics.dropped == 7
    copy.act(copy.tracker.synced(W, first, 0.0))
    copy.settle(owner, 0.0)
    assert copy.blocks == keys(owner)


def test_removed_workers_leave_nothing_due() -> None:
    owner = Owner()
    copy = joined(owner)
    copy.act(copy.tracker.heartbeat(W, owner.incarnation, 3, 1.0))
    copy.tracker.left(W)
    assert copy.tracker.next_wake() is None and copy.tracker.tick(100.0) == []
    assert copy.tracker.offer(owner.store(1), 1.0) == []


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120), ring=st.integers(0, 12), max_held=st.integers(1, 20),
       by_page=st.booleans())
def test_any_interleaving_ends_with_the_owners_set(
        seed: int, steps: int, ring: int, max_held: int, *, by_page: bool) -> None:
    rng = random.Random(seed)
    owner, now = Owner(ring=ring), 0.0
    copy = Copy(max_held=max_held, by_page=by_page)
    copy.act(copy.tracker.joined(W, owner.incarnation, now))
    wire: list[KvEvent] = []
    replies: list[SyncReply] = []
    for _ in range(steps):
        now += rng.choice((0.0, 0.01, 0.3))
        match rng.randrange(10):
            case 0 | 1 | 2:
                wire.append(owner.store(*rng.sample(range(12), rng.randint(1, 3))))
            case 3:
                wire.append(owner.evict(*rng.sample(range(12), 2)))
            case 4 if wire:  # lost
                wire.pop(rng.randrange(len(wire)))
            case 5 if wire:  # repeated
                wire.append(rng.choice(wire))
            case 6 if rng.random() < 0.3:
                owner.restart()
                copy.act(copy.tracker.joined(W, owner.incarnation, now))
            case 7 if copy.asks:
                ask = copy.asks.pop(0)
                if rng.random() < 0.3:
                    copy.act(copy.tracker.sync_failed(W, now, ask.since.incarnation))
                else:
                    replies.append(owner.answer(ask.since))
            case 8 if replies:
                copy.act(copy.tracker.synced(W, replies.pop(0), now))
            case _:
                for _ in range(min(len(wire), 3)):  # delivered, in any order
                    copy.act(copy.tracker.offer(wire.pop(rng.randrange(len(wire))), now))
                copy.act(copy.tracker.tick(now))
    for event in wire:
        copy.act(copy.tracker.offer(event, now))
    for reply in replies:
        copy.act(copy.tracker.synced(W, reply, now))
    copy.act(copy.tracker.heartbeat(W, owner.incarnation, owner.seq, now))
    copy.settle(owner, now)
    assert copy.blocks == keys(owner)
    assert copy.tracker.is_converged(W)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), lost=st.integers(0, 19), ring=st.integers(0, 30))
def test_one_gap_causes_one_question(seed: int, lost: int, ring: int) -> None:
    rng = random.Random(seed)
    owner = Owner(ring=ring, page_blocks=3)
    copy, now = joined(owner), 0.0
    for i in range(20):
        now += rng.choice((0.0, 0.01, 0.2))
        event = owner.store(i) if rng.random() < 0.7 else owner.evict(i // 2)
        if i != lost:
            copy.act(copy.tracker.offer(event, now))
        copy.act(copy.tracker.tick(now))
        if rng.random() < 0.5:
            while copy.asks:
                copy.act(copy.tracker.synced(W, owner.answer(copy.asks.pop(0).since), now))
    copy.act(copy.tracker.heartbeat(W, owner.incarnation, owner.seq, now))
    copy.settle(owner, now)
    assert copy.blocks == keys(owner)
    assert copy.tracker.statistics.syncs == 2
