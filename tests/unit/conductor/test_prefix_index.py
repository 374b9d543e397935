"""The index against a model that is too simple to be wrong.

``INDEX_OPERATIONS`` (an environment variable) says how many random operations, 20,000 if it does not.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from services.conductor.core import native, prefix_index
from services.conductor.core.machine import Conductor, Started
from services.conductor.core.prefix_index import BLOCK_BYTES, ROW_BYTES, PrefixIndex, fingerprints
from shared.ids import BlockKey, Incarnation, WorkerId
from shared.kv import Tier, pack_keys
from shared.machine import Answered, Request, Unanswered, Woke
from shared.messages import Bye, Evicted, KvEvent, Since, SnapshotPage, Stored, StoredBlock, SyncEvents, SyncReply
from tests.unit.conductor.builders import SPEC, conductor, hello, load

OPERATIONS = int(os.environ.get("INDEX_OPERATIONS", "20000"))
"""Random operations of each test against a model; a thorough run takes 100,000."""

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def prints(*numbers: int) -> list[int]:
    return fingerprints(pack_keys(list(map(key, numbers))))


def store(index: PrefixIndex, worker: WorkerId, *numbers: int, tier: Tier = Tier.DRAM) -> None:
    index.store(worker, prints(*numbers), tier)


def test_longest_contiguous_prefix_per_worker() -> None:
    index = PrefixIndex()
    store(index, A, 1, 2, 3, 5)
    store(index, B, 1)
    store(index, C, 2, 3)
    match = index.match(prints(1, 2, 3, 4, 5), (A, B, C))
    assert match.own == {A: 3, B: 1}
    assert match.covered == 3


def test_longest_contiguous_prefix_per_tier() -> None:
    index = PrefixIndex()
    store(index, A, 1, tier=Tier.DEVICE)
    store(index, A, 1, 2)
    store(index, A, 2, 3, 4, tier=Tier.SSD)
    store(index, B, 1, 2, tier=Tier.SSD)
    match = index.match(prints(1, 2, 3, 4, 5), (A, B))
    assert match.within == {Tier.DEVICE: {A: 1}, Tier.DRAM: {A: 2}, Tier.SSD: {A: 4, B: 2}}
    assert match.own == {A: 4, B: 2}


def test_runs_from_the_middle_and_only_from_those_who_may_send() -> None:
    index = PrefixIndex()
    store(index, A, 1, 2)
    store(index, B, 2, 3, 4)
    store(index, C, 2, 3, 4, 5)
    match = index.match(prints(1, 2, 3, 4, 5), (A, B, C))
    assert match.run(0) == (2, [A])
    assert match.run(2) == (5, [C])
    match = index.match(prints(1, 2, 3, 4, 5), (A, B))
    assert match.run(2) == (4, [B])
    assert match.run(4) == (4, []) and match.covered == 4
    assert match.own[A] == 2


def test_hundreds_may_hold_the_same_and_some_leave() -> None:
    index, workers = PrefixIndex(), [WorkerId(f"w{i}") for i in range(200)]
    for i, worker in enumerate(workers):
        store(index, worker, *range(1, 2 + i % 3), tier=Tier.SSD if i % 5 == 0 else Tier.DRAM)
    for worker in workers[::7]:
        index.remove(worker)
    stay = {worker: 1 + i % 3 for i, worker in enumerate(workers) if i % 7}
    match = index.match(prints(1, 2, 3), stay)
    assert match.own == stay and match.run(1) == (3, [worker for worker, blocks in stay.items() if blocks == 3])
    assert match.on_ssd == {worker: 0 for i, worker in enumerate(workers) if i % 7 and i % 5 == 0}
    assert index.tiers(prints(3)[0]).keys() == {worker for worker, blocks in stay.items() if blocks == 3}


def test_a_block_is_gone_with_its_last_tier() -> None:
    index = PrefixIndex()
    (one,) = prints(1)
    store(index, A, 1)
    store(index, A, 1, tier=Tier.SSD)
    assert index.tiers(one) == {A: Tier.DRAM} and len(index) == 1
    index.evict(A, [one], Tier.DRAM)
    assert index.tiers(one) == {A: Tier.SSD} and len(index) == 1
    index.evict(A, [one], Tier.DRAM)
    index.evict(A, prints(1, 2), Tier.SSD)
    assert index.tiers(one) == {} and len(index) == 0


def test_a_full_index_takes_no_more_and_counts() -> None:
    index = PrefixIndex(max_blocks=2)
    store(index, A, 1, 2, 3, 2)
    assert (len(index), index.dropped_blocks) == (2, 1)
    store(index, A, 1, tier=Tier.SSD)
    assert index.dropped_blocks == 1, "another tier of a known copy is no new copy"
    index.evict(A, prints(2), Tier.DRAM)
    store(index, B, 1)
    assert len(index) == 2
    index.check_invariants()


def test_bytes_are_bounded_too() -> None:
    index = PrefixIndex(max_bytes=2 * ROW_BYTES + 10 * BLOCK_BYTES)
    store(index, A, *range(100))
    assert len(index) == 10 and index.dropped_blocks == 90 and index.nbytes <= 2 * ROW_BYTES + 10 * BLOCK_BYTES
    index.evict(A, prints(*range(5)), Tier.DRAM)
    store(index, A, *range(200, 203))
    assert len(index) == 8


def test_the_estimate_of_bytes_covers_what_python_takes() -> None:
    rng, index = random.Random(1), PrefixIndex()
    for worker in (A, B, C):
        for _ in range(200):
            index.store(worker, [rng.getrandbits(60) for _ in range(512)], Tier.DRAM)
            taken = sys.getsizeof(index._row_of)
            assert taken <= len(index._row_of) * BLOCK_BYTES + 4096
    rows = PrefixIndex()
    for i in range(128):
        store(rows, WorkerId(f"w{i}"), *rng.sample(range(2000), 500))
    columns = sum(map(sys.getsizeof, (rows._masks, rows._fast, rows._any, rows._sizes, rows._rows)))
    values = sum(sys.getsizeof(masks) + sum(map(sys.getsizeof, masks)) for masks in rows._masks)
    values += sum(map(sys.getsizeof, rows._fast)) + sum(map(sys.getsizeof, rows._any))
    assert columns + values <= len(rows._masks) * ROW_BYTES


def test_removed_workers_leave_nothing_and_their_slots_are_used_again() -> None:
    index = PrefixIndex()
    for life in range(50):
        worker = WorkerId(f"w{life}")
        store(index, worker, *range(5000))
        index.remove(worker)
        index.remove(worker)
        assert index.match(prints(1, 2), ()).own == {} and len(index) == 0
        while not index.tidy(100):
            pass
    assert len(index._workers) == 1 and not index._row_of
    index.check_invariants()


def test_sets_of_holders_that_nobody_has_any_more_are_forgotten() -> None:
    rng, index = random.Random(2), PrefixIndex()
    workers = [WorkerId(f"w{i}") for i in range(20)]
    for _ in range(20_000):
        store(index, rng.choice(workers), rng.randrange(50))
        index.evict(rng.choice(workers), prints(rng.randrange(50)), Tier.DRAM)
    assert len(index._masks) < 4096
    index.check_invariants()


def test_a_snapshot_shows_when_it_is_complete() -> None:
    index = PrefixIndex()
    store(index, A, 1, 2, 3)
    index.gather(A, prints(2), Tier.SSD)
    index.gather(A, prints(7, 8), Tier.DRAM)
    assert index.match(prints(1, 2, 3), (A,)).own == {A: 3} and index.blocks_of(A) == 3
    index.swap(A)
    assert index.match(prints(1, 2, 3), (A,)).own == {} and index.blocks_of(A) == 3
    assert index.match(prints(2, 7), (A,)).within[Tier.SSD] == {A: 2}
    index.gather(A, prints(1), Tier.DRAM)
    index.drop_gathered(A)
    index.swap(A)
    assert index.blocks_of(A) == 0
    index.check_invariants()


def test_torn_keys_have_no_fingerprint() -> None:
    assert fingerprints(pack_keys([key(1), key(2)])[:-5]) == prints(1) and fingerprints(b"") == []


@dataclass
class Model:
    """{worker: {number: tiers}} and what is gathered, as naive as can be."""

    held: dict[WorkerId, dict[int, set[Tier]]] = field(default_factory=dict)
    gathered: dict[WorkerId, dict[int, set[Tier]]] = field(default_factory=dict)

    def length(self, worker: WorkerId, prompt: Sequence[int], tiers: set[Tier]) -> int:
        for i, number in enumerate(prompt):
            if not self.held.get(worker, {}).get(number, set()) & tiers:
                return i
        return len(prompt)

    def lengths(self, prompt: Sequence[int], tiers: set[Tier]) -> dict[WorkerId, int]:
        return {worker: length for worker in self.held if (length := self.length(worker, prompt, tiers))}

    def run(self, workers: Sequence[WorkerId], prompt: Sequence[int], start: int) -> tuple[int, set[WorkerId]]:
        ends = {worker: start + self.length(worker, prompt[start:], set(Tier)) for worker in workers}
        best = max(ends.values())
        return best, {worker for worker, end in ends.items() if end == best > start}


def compare(index: PrefixIndex, model: Model, prompt: list[int], senders: Sequence[WorkerId], start: int) -> None:
    """One question: the index says what the model does."""
    found = index.match(prints(*prompt), senders)
    assert found.own == model.lengths(prompt, set(Tier)) == found.within[Tier.SSD]
    assert found.within[Tier.DRAM] == model.lengths(prompt, {Tier.DEVICE, Tier.DRAM})
    assert found.within[Tier.DEVICE] == model.lengths(prompt, {Tier.DEVICE})
    covered = 0
    while covered < len(prompt) and any(model.held.get(w, {}).get(prompt[covered]) for w in senders):
        covered += 1
    assert found.covered == covered
    if start < covered:
        end, owners = model.run(senders, prompt, start)
        assert (found.run(start)[0], set(found.run(start)[1])) == (end, owners)


@pytest.mark.parametrize("without", ["", "left out"], ids=["as it is", "not compiled"])
@pytest.mark.parametrize("numbers", [range(12), range(200)], ids=["few blocks", "many"])
def test_random_operations_against_the_model(numbers: range, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "_FEWEST_DEAD", 2)  # so that blocks are swept while others come and go
    if without:
        monkeypatch.setattr(native, "WHY_NOT", without)
    rng = random.Random(len(numbers))
    index, model = PrefixIndex(), Model()
    workers = [WorkerId(f"w{i}") for i in range(7)]
    for step in range(OPERATIONS // 4):
        worker, tier = rng.choice(workers), rng.choice(list(Tier))
        some = rng.choices(numbers, k=rng.randint(1, 12))  # some of them twice
        match rng.randrange(14):
            case 0 | 1 | 2 | 3:
                index.store(worker, prints(*some), tier)
                for number in some:
                    model.held.setdefault(worker, {}).setdefault(number, set()).add(tier)
            case 4 | 5 | 6 | 7:
                index.evict(worker, prints(*some), tier)
                for number in some:
                    model.held.get(worker, {}).get(number, set()).discard(tier)
            case 8:
                index.evict(worker, prints(*numbers), tier)
                for tiers in model.held.get(worker, {}).values():
                    tiers.discard(tier)
            case 9 if rng.random() < 0.2:
                index.remove(worker)
                model.held.pop(worker, None)
                model.gathered.pop(worker, None)
            case 10 | 11:
                index.gather(worker, prints(*some), tier)
                for number in some:
                    model.gathered.setdefault(worker, {}).setdefault(number, set()).add(tier)
            case 12 if rng.random() < 0.5:
                index.swap(worker)
                model.held[worker] = model.gathered.pop(worker, {})
            case 12:
                index.drop_gathered(worker)
                model.gathered.pop(worker, None)
            case 13:
                index.tidy(rng.choice((1, 10, 1000)))
        compare(index, model, rng.sample(numbers, rng.randint(1, 10)), rng.sample(workers, rng.randint(1, 7)),
                rng.randrange(4))
        if step % 500 == 0:
            index.check_invariants()
            pairs = [tiers for held in (*model.held.values(), *model.gathered.values()) for tiers in held.values()]
            assert len(index) == sum(map(bool, pairs))
    while not index.tidy(10):
        pass
    for worker in workers:
        index.remove(worker)
    while not index.tidy(10):
        pass
    assert len(index._row_of) <= 2


class Owner:
    """A worker: says what it stores and evicts, and answers questions."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name, self._rng, self.life = WorkerId(name), rng, 0
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.seq = 0
        self.blocks: dict[int, set[Tier]] = {}
        self.kept: list[KvEvent] = []
        self.snapshots: dict[str, tuple[int, list[StoredBlock]]] = {}

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.name}-life-{self.life}")

    def act(self, numbers: range) -> KvEvent:
        """Something happens to its blocks."""
        tier, some = self._rng.choice(list(Tier)), self._rng.choices(numbers, k=self._rng.randint(1, 10))
        self.seq += 1
        event: KvEvent
        if self._rng.random() < 0.6:
            for number in some:
                self.blocks.setdefault(number, set()).add(tier)
            event = Stored(worker=self.name, incarnation=self.incarnation, seq=self.seq, spec=SPEC.digest, at_s=0.0,
                           blocks=[_block(number, tier) for number in some])
        else:
            if self._rng.random() < 0.1:
                some = list(numbers)  # cleared
            for number in some:
                self.blocks.get(number, set()).discard(tier)
            event = Evicted(worker=self.name, incarnation=self.incarnation, seq=self.seq, at_s=0.0, tier=tier,
                            keys=pack_keys(list(map(key, some))))
        self.kept = [*self.kept, event][-4:]
        return event

    def answer(self, since: Since) -> SyncReply:
        """The missing batches, or a page."""
        missing = [event for event in self.kept if event.seq > since.seq]
        if not since.snapshot and len(missing) == self.seq - since.seq:
            return SyncEvents(worker=self.name, incarnation=self.incarnation, events=missing)
        name, page = since.snapshot, since.page
        if name not in self.snapshots:
            name, page = f"s{self.seq}", 0
            self.snapshots[name] = self.seq, [
                _block(number, tier) for number, tiers in self.blocks.items() for tier in tiers]
        seq, blocks = self.snapshots[name]
        return SnapshotPage(worker=self.name, incarnation=self.incarnation, seq=seq, spec=SPEC.digest, snapshot=name,
                            page=page, pages=max(-(-len(blocks) // 8), 1), blocks=blocks[page * 8:page * 8 + 8])


def _block(number: int, tier: Tier) -> StoredBlock:
    return StoredBlock(key=key(number), parent=key(number), depth=0, nbytes=1, tier=tier)


class Town:
    """Owners, a conductor, and a wire on which anything happens to what is said."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now = random.Random(seed), 1000.0
        self.machine: Conductor = conductor()
        self.owners = [Owner(f"w{i}", self.rng) for i in range(5)]
        self.wire: list[KvEvent] = []
        self.asked: list[Request] = []
        self.feed(Started())
        for owner in self.owners:
            self.greet(owner)

    def feed(self, event: object) -> None:
        effects = self.machine.handle(event, now=self.now)  # type: ignore[arg-type]
        self.asked += [effect for effect in effects if isinstance(effect, Request)]

    def greet(self, owner: Owner) -> None:
        self.feed(hello(owner.name, life=owner.life))

    def beat(self) -> None:
        for owner in self.owners:
            self.feed(load(owner.name, kv_seq=owner.seq, life=owner.life))

    def step(self, numbers: range) -> None:
        rng = self.rng
        owner = rng.choice(self.owners)
        match rng.randrange(16):
            case 0 | 1 | 2 | 3 | 4:
                self.wire.append(owner.act(numbers))
            case 5 if rng.random() < 0.3:
                owner.act(numbers)  # lost
            case 6 if self.wire:  # repeated
                self.wire.append(rng.choice(self.wire))
            case 7 if owner.kept:  # replayed, long after
                self.wire.append(rng.choice(owner.kept))
            case 8 if rng.random() < 0.05:
                owner.restart()
                self.greet(owner)
            case 9 if rng.random() < 0.05:
                self.feed(Bye(worker=owner.name, incarnation=owner.incarnation))
                owner.restart()
                self.greet(owner)
            case 10 | 11 if self.asked:
                self.reply(self.asked.pop(rng.randrange(len(self.asked))), fails=rng.random() < 0.1)
            case 12:
                owner.snapshots.clear()
            case 13 if rng.random() < 0.3:
                self.beat()
            case _:
                for _ in range(min(len(self.wire), 4)):  # delivered, in any order
                    self.feed(self.wire.pop(rng.randrange(len(self.wire))))
        self.now += rng.choice((0.0, 0.001, 0.05))
        self.wake()

    def wake(self) -> None:
        if (wake_s := self.machine.next_wake()) is not None and wake_s <= self.now:
            self.feed(Woke())

    def reply(self, request: Request, *, fails: bool) -> None:
        owner = next(owner for owner in self.owners if owner.name == request.tag.worker)
        self.feed(Unanswered(request.tag, "late") if fails else Answered(request.tag, owner.answer(request.message)))

    def settle(self) -> None:
        """Everything on its way arrives."""
        while self.wire:
            self.feed(self.wire.pop())
        for _ in range(400):
            self.beat()
            while self.asked:
                self.reply(self.asked.pop(), fails=False)
            self.now += 0.1
            self.wake()
        assert not self.asked


@pytest.mark.parametrize("numbers", [range(40), range(400)], ids=["few blocks", "many"])
def test_events_over_a_bad_bus_end_with_the_owners_blocks(numbers: range) -> None:
    town = Town(seed=len(numbers))
    index = town.machine._index
    for _ in range(10):
        for _ in range(OPERATIONS // 20):
            town.step(numbers)
        town.settle()
        model = Model(held={owner.name: owner.blocks for owner in town.owners})
        town.machine.check_invariants()
        for owner in town.owners:
            assert index.blocks_of(owner.name) == sum(map(bool, owner.blocks.values()))
        for number in numbers:
            tiers = {owner.name: min(found, key=list(Tier).index) for owner in town.owners
                     if (found := owner.blocks.get(number))}
            assert index.tiers(prints(number)[0]) == tiers
        for _ in range(20):
            prompt = town.rng.sample(numbers, 8)
            compare(index, model, prompt, [owner.name for owner in town.owners], 0)
