"""Who is there: scripts for the rules, and hypothesis for what no script thought of."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.ids import HostId, Incarnation, WorkerId
from shared.kv import CacheSpec
from shared.membership import Changed, Conflict, Joined, Membership, Unknown
from shared.messages import Bye, Endpoint, Hello, Load

SPEC = CacheSpec(model="m", weights_digest="w", tokenizer_digest="t", dtype="float32", layers=2, kv_heads=2, head_dim=8,
                 block_tokens=4, max_context=128)
SUSPECT_S, DEAD_S = 2.0, 8.0


def hello(worker: str = "w1", life: int = 1, *, role: Any = "prefill", spec: CacheSpec = SPEC) -> Hello:
    incarnation = Incarnation(f"{worker}.{life}")
    return Hello(
        worker=WorkerId(worker), incarnation=incarnation, role=role, spec=spec, capacity_blocks=8, max_running=1,
        endpoint=Endpoint(worker=WorkerId(worker), incarnation=incarnation, host=HostId("h")), started_at_s=float(life),
    )


def load(worker: str = "w1", life: int = 1, *, draining: bool = False) -> Load:
    return Load(worker=WorkerId(worker), incarnation=Incarnation(f"{worker}.{life}"), role="prefill", kv_seq=0,
                draining=draining)


def bye(worker: str = "w1", life: int = 1) -> Bye:
    return Bye(worker=WorkerId(worker), incarnation=Incarnation(f"{worker}.{life}"))


def test_an_elastic_worker_does_both_and_each_load_is_kept_apart() -> None:
    members = Membership(suspect_after_s=SUSPECT_S, dead_after_s=DEAD_S)
    members.hello(msgspec.structs.replace(hello(), elastic=True), now=0.0)
    members.hello(hello("w2"), now=0.0)
    for role, queued in (("prefill", 3), ("decode", 2)):
        members.load(msgspec.structs.replace(load(), role=role, queued=queued), now=1.0)
    one = members.get(WorkerId("w1"))
    assert one is not None and one.load is not None and one.other_load is not None
    assert (one.load.queued, one.other_load.queued) == (3, 2)
    spec = SPEC.digest
    assert [[member.hello.worker for member in members.usable(spec, role)] for role in ("prefill", "decode", "store")] \
        == [["w1", "w2"], ["w1"], []]


def some() -> Membership:
    return Membership(suspect_after_s=SUSPECT_S, dead_after_s=DEAD_S)


def pass_time(members: Membership, *, start_s: float, end_s: float) -> list[Any]:
    """Ticks as often as it wants to be ticked."""
    changes: list[Any] = []
    now = start_s
    while now <= end_s:
        changes += members.tick(now=now)
        now = members.next_wake(now=now)
    return changes


def edges(changes: list[Any]) -> list[tuple[str, str]]:
    return [(change.before, change.after) for change in changes if isinstance(change, Changed)]


def test_a_new_worker_joins_and_may_be_used() -> None:
    members = some()
    assert members.hello(hello(), now=0.0) == [Joined(hello(), None)]
    assert [member.hello.worker for member in members.usable(SPEC.digest, "prefill")] == ["w1"]
    assert members.usable(SPEC.digest, "decode") == []
    assert members.usable(hello().spec.digest, "prefill")[0].state == "alive"
    assert members.specs() == {"m": hello()}


def test_silence_makes_it_suspect_then_dead_and_a_beat_revives_it() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    assert edges(pass_time(members, start_s=0.0, end_s=7.9)) == [("alive", "suspect")]
    assert members.usable(SPEC.digest, "prefill") == []
    assert members.get(WorkerId("w1")) is not None
    assert edges(members.load(load(), now=7.9)) == [("suspect", "alive")]
    assert edges(pass_time(members, start_s=8.0, end_s=17.0)) == [("alive", "suspect"), ("suspect", "dead")]
    assert members.get(WorkerId("w1")) is None
    assert edges(members.load(load(), now=18.0)) == [("dead", "alive")]


def test_a_reader_that_was_deaf_declares_nobody_dead() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    members.tick(now=0.5)
    assert members.tick(now=100.0) == []  # we slept, not they
    assert members.usable(SPEC.digest, "prefill")
    assert edges(pass_time(members, start_s=100.5, end_s=120.0)) == [("alive", "suspect"), ("suspect", "dead")]


def test_a_slightly_late_reader_gives_back_only_its_lag() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    members.tick(now=0.0)
    assert members.tick(now=2.5) == []  # 1.5 s more than the pause that is allowed, and given back
    assert members.tick(now=3.0) == []
    assert edges(members.tick(now=4.0)) == [("alive", "suspect")]  # silent for 2.5 s of those 4


def test_a_new_life_replaces_the_old_one_and_says_so() -> None:
    members = some()
    members.hello(hello(life=1), now=0.0)
    assert members.hello(hello(life=2), now=1.0) == [Joined(hello(life=2), Incarnation("w1.1"))]
    assert members.load(load(life=1), now=1.5) == [Unknown(WorkerId("w1"))]  # a beat of the life before
    assert members.bye(bye(life=1)) == []
    assert members.gone(WorkerId("w1"), Incarnation("w1.1")) == []


def test_a_hello_of_an_earlier_life_that_comes_late_changes_nothing() -> None:
    members = some()
    members.hello(hello(life=2), now=0.0)
    assert members.hello(hello(life=1), now=1.0) == []
    assert members.members[WorkerId("w1")].hello == hello(life=2)


def test_a_new_life_whose_clock_is_behind_gets_in_once_the_old_one_is_silent_or_has_left() -> None:
    members = some()
    members.hello(hello(life=2), now=0.0)
    assert edges(pass_time(members, start_s=0.0, end_s=3.0)) == [("alive", "suspect")]
    assert members.hello(hello(life=1), now=3.0) == [Joined(hello(life=1), Incarnation("w1.2"))]
    members.bye(bye(life=1))
    assert members.hello(hello(life=0), now=3.1) == [Joined(hello(life=0), Incarnation("w1.1"))]


def test_while_the_bus_is_away_nobody_is_silent() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    now = 0.0
    while now < 60.0:
        members.deaf(now=now)
        assert members.tick(now=now) == []
        now = members.next_wake(now=now)
    members.deaf(now=60.0)
    assert edges(pass_time(members, start_s=60.0, end_s=61.9)) == []
    assert edges(pass_time(members, start_s=62.0, end_s=69.0)) == [("alive", "suspect"), ("suspect", "dead")]


def test_an_absent_listener_proves_nothing_until_it_was_heard_after_the_bus_was_away() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    members.deaf(now=5.0)
    assert members.gone(WorkerId("w1"), Incarnation("w1.1")) == []
    members.load(load(), now=5.5)
    assert edges(members.gone(WorkerId("w1"), Incarnation("w1.1"))) == [("alive", "dead")]


def test_the_digest_is_that_of_the_last_hello() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    changed = msgspec.structs.replace(SPEC, dtype="float16")
    members.hello(hello(spec=changed), now=0.1)
    assert members.members[WorkerId("w1")].spec == changed.digest
    assert members.usable(changed.digest, "prefill") and not members.usable(SPEC.digest, "prefill")


def test_a_repeated_hello_is_a_sign_of_life() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    pass_time(members, start_s=0.0, end_s=3.0)
    assert edges(members.hello(hello(), now=3.0)) == [("suspect", "alive")]


def test_a_beat_of_a_stranger_asks_for_a_rollcall() -> None:
    assert some().load(load("w9"), now=0.0) == [Unknown(WorkerId("w9"))]


def test_who_said_bye_is_not_revived_by_what_was_under_way() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    assert edges(members.bye(bye())) == [("alive", "dead")]
    assert members.bye(bye()) == []
    assert members.load(load(), now=0.1) == []
    assert members.hello(hello(), now=0.2) == []
    assert members.get(WorkerId("w1")) is None
    assert members.hello(hello(life=2), now=1.0) == [Joined(hello(life=2), Incarnation("w1.1"))]


def test_a_bye_that_comes_after_silence_still_counts() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    pass_time(members, start_s=0.0, end_s=9.0)
    assert members.bye(bye()) == []  # it is dead already
    assert members.load(load(), now=9.1) == []
    assert members.get(WorkerId("w1")) is None


def test_who_drains_and_is_silent_may_come_back_to_finish() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    members.load(load(draining=True), now=0.0)
    pass_time(members, start_s=0.0, end_s=9.0)
    assert edges(members.load(load(draining=True), now=9.1)) == [("dead", "alive")]


def test_who_drains_gets_no_new_work_but_is_there() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    members.load(load(draining=True), now=0.1)
    assert members.usable(SPEC.digest, "prefill") == []
    assert members.get(WorkerId("w1")) is not None
    members.load(load(draining=False), now=0.2)
    assert members.usable(SPEC.digest, "prefill")


def test_a_lost_connection_is_known_at_once_and_may_come_back() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    assert edges(members.gone(WorkerId("w1"), Incarnation("w1.1"))) == [("alive", "dead")]
    assert members.gone(WorkerId("w1"), Incarnation("w1.1")) == []
    assert edges(members.load(load(), now=0.5)) == [("dead", "alive")]


def test_another_spec_under_the_same_name_is_a_conflict_with_both_values() -> None:
    members = some()
    members.hello(hello("w1"), now=0.0)
    stranger = hello("w2", spec=msgspec.structs.replace(SPEC, dtype="bfloat16"))
    [conflict] = members.hello(stranger, now=0.0)
    assert isinstance(conflict, Conflict)
    for part in ("w2", "w1", "model m", "dtype: float32 here, bfloat16 there"):
        assert part in conflict.message
    assert WorkerId("w2") not in members.members


def test_another_model_is_no_conflict_and_neither_is_a_new_spec_once_the_old_workers_are_gone() -> None:
    members = some()
    members.hello(hello("w1"), now=0.0)
    other = msgspec.structs.replace(SPEC, model="n", dtype="bfloat16")
    assert isinstance(members.hello(hello("w2", spec=other), now=0.0)[0], Joined)
    changed = msgspec.structs.replace(SPEC, dtype="float16")
    assert isinstance(members.hello(hello("w1", life=2, spec=changed), now=0.0)[0], Joined)  # its own former spec
    members.bye(bye("w1", life=2))
    assert isinstance(members.hello(hello("w3"), now=0.0)[0], Joined)


def test_the_dead_are_forgotten_after_a_while() -> None:
    members = some()
    members.hello(hello(), now=0.0)
    pass_time(members, start_s=0.0, end_s=500.0)
    assert WorkerId("w1") in members.members
    pass_time(members, start_s=500.5, end_s=700.0)
    assert members.members == {}


class Interleavings(RuleBasedStateMachine):
    """Hellos, beats, byes, silence and deafness in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.members = some()
        self.now = 0.0
        #: {worker: the life that counts: the newest, unless a hello came when that one was not alive}
        self.lives: dict[str, int] = {}
        self.left: set[tuple[str, int]] = set()

    workers = st.sampled_from(["w1", "w2", "w3"])

    @rule(worker=workers, life=st.integers(min_value=1, max_value=4))
    def says_hello(self, worker: str, life: int) -> None:
        known = self.members.members.get(WorkerId(worker))
        alive = known is not None and known.state == "alive"
        self.members.hello(hello(worker, life), now=self.now)
        if life > self.lives[worker] if alive else life != self.lives.get(worker):
            self.lives[worker] = life
            self.left.discard((worker, life))  # what comes after another life is none that was overtaken by its bye

    @rule(worker=workers, life=st.integers(min_value=1, max_value=4))
    def beats(self, worker: str, life: int) -> None:
        changes = self.members.load(load(worker, life), now=self.now)
        known = self.members.members.get(WorkerId(worker))
        if known is None or known.hello.incarnation != f"{worker}.{life}":
            assert changes == [Unknown(WorkerId(worker))]

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def says_bye(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.lives)))
        if self.members.members.get(WorkerId(worker)) is not None:
            self.members.bye(bye(worker, self.lives[worker]))
            self.left.add((worker, self.lives[worker]))

    @rule(pause_s=st.sampled_from([0.1, 0.5, 1.0]), times=st.integers(min_value=1, max_value=12))
    def time_passes(self, pause_s: float, times: int) -> None:
        for _ in range(times):
            self.now += pause_s
            self.members.tick(now=self.now)

    @rule(deaf_s=st.floats(min_value=SUSPECT_S, max_value=100.0))
    def reader_is_deaf(self, deaf_s: float) -> None:
        self.members.tick(now=self.now)
        alive = {worker for worker, member in self.members.members.items() if member.state == "alive"}
        silence_s = {worker: self.now - self.members.members[worker].heard_s for worker in alive}
        self.now += deaf_s
        self.members.tick(now=self.now)
        for worker in alive:
            if silence_s[worker] + SUSPECT_S / 2 < SUSPECT_S:
                assert self.members.members[worker].state == "alive", "deafness is nobody's silence"

    @rule()
    def the_bus_is_away(self) -> None:
        before = {worker: member.state for worker, member in self.members.members.items()}
        self.now += DEAD_S
        self.members.deaf(now=self.now)
        assert self.members.tick(now=self.now) == []
        assert before.items() >= {worker: member.state for worker, member in self.members.members.items()}.items()

    @invariant()
    def the_right_life_counts(self) -> None:
        for worker, member in self.members.members.items():
            assert member.hello.incarnation == f"{worker}.{self.lives[worker]}"

    @invariant()
    def who_left_stays_away(self) -> None:
        for worker, life in self.left:
            member = self.members.members.get(WorkerId(worker))
            if member is not None and member.hello.incarnation == f"{worker}.{life}":
                assert member.state == "dead"

    @invariant()
    def only_the_living_get_work(self) -> None:
        for member in self.members.usable(SPEC.digest, "prefill"):
            assert member.state == "alive" and not member.draining


TestInterleavings = Interleavings.TestCase


def test_a_store_serves_no_model_and_conflicts_with_nobody() -> None:
    """It may lend for a spec whose workers are gone, while others serve the same model anew."""
    members = Membership(2, 8)
    other = msgspec.structs.replace(SPEC, weights_digest="22" * 32)
    assert [type(change) for change in members.hello(hello("s1", role="store"), now=0)] == [Joined]
    assert members.specs() == {} and members.usable(SPEC.digest, "prefill") == []
    assert [type(change) for change in members.hello(hello("w1", spec=other), now=0)] == [Joined]
    assert [type(change) for change in members.hello(hello("s2", role="store"), now=0)] == [Joined]
    assert members.specs()[SPEC.model].worker == "w1"
    assert isinstance(members.hello(hello("w2"), now=0)[0], Conflict)
