"""The store-manager's decisions, as scripts of events and expected effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.store_manager.core import effects as do
from services.store_manager.core.events import (
    Deaf,
    Draining,
    Entry,
    Fetched,
    FetchFailed,
    Led,
    Maintained,
    MaintainFailed,
    Marked,
    MarkFailed,
    Reconciled,
    ReconcileFailed,
    Reconnected,
    Started,
    Unled,
    WriteFailed,
    Written,
)
from services.store_manager.core.machine import Event, Policy, StoreManager
from shared.errors import Bug
from shared.ids import HostId, Incarnation, WorkerId
from shared.kv import CacheSpec
from shared.machine import Effect, Woke
from shared.messages import Bye, Endpoint, Hello, Load

SPEC = CacheSpec(model="toy", weights_digest="", tokenizer_digest="", dtype="float32", layers=1, kv_heads=1, head_dim=1,
                 block_tokens=1, max_context=1)
POLICY = Policy(batch_rows=10, held_rows=40, fetch_messages=5, retry_first_s=1.0, retry_limit_s=4.0, reconcile_s=100.0,
                join_delay_s=2.0, gap_delay_s=3.0, suspect_after_s=2.0, dead_after_s=8.0)
LEADS = Led(1, 1e9)


def hello(worker: str, life: str = "1", *, started_at_s: float = 0.0) -> Hello:
    return Hello(worker=WorkerId(worker), incarnation=Incarnation(life), role="prefill", spec=SPEC,
                 endpoint=Endpoint(worker=WorkerId(worker), incarnation=Incarnation(life), host=HostId("h")),
                 capacity_blocks=1, max_running=1, started_at_s=started_at_s)


def load(worker: str, life: str = "1") -> Load:
    return Load(worker=WorkerId(worker), incarnation=Incarnation(life), role="prefill", kv_seq=0)


def entries(*seqs: int, rows: int = 1) -> tuple[Entry, ...]:
    return tuple(Entry(seq, rows) for seq in seqs)


@dataclass
class Play:
    """``at(now, event)`` returns what the machine wants, leaving out kinds a script does not care for.

    ``Maintain`` is left out unless ``upkeep`` is set.
    """

    upkeep: bool = False
    machine: StoreManager = field(default_factory=lambda: StoreManager(POLICY))
    leave_out: tuple[type[Effect], ...] = ()

    def at(self, now: float, event: Event) -> Sequence[Effect]:
        leave_out = self.leave_out if self.upkeep else (*self.leave_out, do.Maintain)
        out = [effect for effect in self.machine.handle(event, now=now) if not isinstance(effect, leave_out)]
        self.machine.check_invariants()
        wake_s = self.machine.next_wake()
        assert wake_s is not None and wake_s > now
        return out

    def until(self, now: float, stop: float, *workers: str) -> list[tuple[float, Effect]]:
        """Lets time pass to ``stop`` with a beat of ``workers`` each half second; what happened when."""
        seen: list[tuple[float, Effect]] = []
        while now < stop:
            now += 0.5
            for event in (Woke(), *(load(worker) for worker in workers)):
                seen.extend((now, effect) for effect in self.at(now, event))
        return seen


@pytest.fixture
def feed() -> Play:
    play = Play(leave_out=(do.CallRoll, do.Mark))
    assert play.at(0.0, Started()) == [do.Fetch(5)]
    assert play.at(0.0, LEADS) == []
    return play


@pytest.fixture
def workers() -> Play:
    play = Play(leave_out=(do.Fetch,))
    assert play.at(0.0, Started()) == [do.CallRoll()]
    assert play.at(0.0, LEADS) == []
    return play


# Feed.

def test_nothing_is_acknowledged_before_it_is_written(feed: Play) -> None:
    assert feed.at(1.0, Fetched(entries(1, 2))) == [do.Fetch(5), do.Write((1, 2))]
    assert feed.at(1.1, Fetched(entries(3))) == [do.Fetch(5)], "one write at a time"
    assert feed.at(1.2, Written()) == [do.Ack((1, 2)), do.Write((3,))]
    assert feed.at(1.3, Written()) == [do.Ack((3,))]


def test_batches_end_at_their_rows(feed: Play) -> None:
    assert feed.at(1.0, Fetched(entries(1, 2, 3, rows=7))) == [do.Fetch(5), do.Write((1, 2))]
    assert feed.at(1.1, Written()) == [do.Ack((1, 2)), do.Write((3,))]


def test_holding_is_bounded(feed: Play) -> None:
    assert feed.at(1.0, Fetched(entries(1, 2, rows=20))) == [do.Write((1,))], "full: no fetch"
    assert feed.at(1.1, Written()) == [do.Ack((1,)), do.Fetch(5), do.Write((2,))]


def test_what_is_held_is_not_taken_twice(feed: Play) -> None:
    feed.at(1.0, Fetched(entries(1, 2)))
    assert feed.at(1.1, Fetched(entries(1, 2, 3))) == [do.Fetch(5)]
    assert feed.at(1.2, Written()) == [do.Ack((1, 2)), do.Write((3,))]
    assert feed.at(1.3, Written()) == [do.Ack((3,))]
    assert feed.at(1.4, Fetched(entries(1))) == [do.Fetch(5), do.Write((1,))], "its acknowledgement was lost"


def test_postgres_away(feed: Play) -> None:
    feed.at(1.0, Fetched(entries(1, 2)))
    assert feed.at(1.1, WriteFailed("refused")) == [do.Report(False, "refused")]
    assert feed.at(2.0, Woke()) == []
    assert feed.at(2.1, Woke()) == [do.Write((1, 2))]
    assert feed.at(2.2, WriteFailed("refused")) == [], "said once"
    assert feed.machine.next_wake() is not None
    assert feed.at(4.1, Woke()) == [], "the pause doubles"
    assert feed.at(4.2, Woke()) == [do.Write((1, 2))]
    for now in (4.3, 8.4, 12.5):
        assert feed.at(now, WriteFailed("refused")) == []
        assert feed.at(now + 4.0, Woke()) == [do.Write((1, 2))], "but not for ever"
    assert feed.at(17.0, Written()) == [do.Ack((1, 2)), do.Report(True)]


def test_the_one_message_that_is_refused_is_found(feed: Play) -> None:
    feed.at(1.0, Fetched(entries(1, 2, 3, 4)))
    bad = WriteFailed("never", refused=True)
    assert feed.at(1.1, bad) == [do.Write((1, 2))]
    assert feed.at(1.2, Written()) == [do.Ack((1, 2)), do.Write((3, 4))]
    assert feed.at(1.3, bad) == [do.Write((3,))]
    assert feed.at(1.4, bad) == [do.Discard(3, "never"), do.Write((4,))]
    assert feed.at(1.5, Written()) == [do.Ack((4,))]


def test_the_feed_away(feed: Play) -> None:
    assert feed.at(1.0, FetchFailed("no bus")) == []
    assert feed.machine.next_wake() == 1.5
    assert feed.at(2.0, Woke()) == [do.Fetch(5)]
    assert feed.at(2.1, FetchFailed("no bus")) == []
    assert feed.at(4.0, Woke()) == []
    assert feed.at(4.1, Woke()) == [do.Fetch(5)]


def test_draining_writes_what_is_held(feed: Play) -> None:
    feed.at(1.0, Fetched(entries(1)))
    assert feed.at(1.1, Draining()) == []
    assert feed.at(1.2, Written()) == [do.Ack((1,))]
    assert feed.at(1.3, Fetched(entries(2))) == [do.Write((2,))], "it was under way"
    assert feed.at(1.4, Written()) == [do.Ack((2,)), do.Drained()]


def test_draining_does_not_wait_for_postgres(feed: Play) -> None:
    feed.at(1.0, Fetched(entries(1)))
    feed.at(1.1, FetchFailed("no bus"))
    feed.at(1.2, WriteFailed("away"))
    assert feed.at(1.3, Draining()) == [do.Drained()]


# Workers.

def test_marks_follow_what_is_heard(workers: Play) -> None:
    workers.at(0.5, hello("a"))
    seen = workers.until(0.5, 8.0, "a")
    assert (8.0, do.Mark((("a", "1"),), ())) in seen and len([e for _, e in seen if isinstance(e, do.Mark)]) == 1, (
        "nobody is missed before everybody could be heard")
    workers.at(8.1, Marked())
    assert workers.at(8.2, hello("b")) == [do.Mark((("a", "1"), ("b", "1")), ())]
    workers.at(8.3, Marked())
    seen = workers.until(8.3, 17.5, "a")
    assert [effect for _, effect in seen if isinstance(effect, do.Mark)] == [
        do.Mark((("a", "1"),), ((("b", "1"), "silent for 8.1 s"),))]
    workers.at(17.6, MarkFailed("away"))
    assert do.Mark((("a", "1"),), ((("b", "1"), "silent for 8.1 s"),)) in [e for _, e in workers.until(17.6, 19.0, "a")]
    workers.at(19.0, Marked())
    assert do.Mark((("a", "1"), ("b", "1")), ()) in workers.at(19.1, load("b")), "it was only silent"


def test_a_life_that_entered_late_is_marked(workers: Play) -> None:
    workers.until(0.0, 8.5)
    workers.at(8.5, Marked())
    workers.at(9.0, Fetched(entries(1)))
    assert do.Mark((), ()) in workers.at(9.1, Written(workers=1))


def test_strangers_are_asked_for_their_names(workers: Play) -> None:
    assert workers.at(0.5, load("a")) == [], "a rollcall is just out"
    assert workers.at(1.5, load("a")) == [do.CallRoll()]
    assert workers.at(3.0, Reconnected()) == [do.CallRoll()]


def test_inventories(workers: Play) -> None:
    workers.leave_out = (do.Fetch, do.Mark, do.CallRoll)
    workers.at(1.0, hello("a"))
    workers.at(1.0, hello("b"))
    assert workers.until(1.0, 3.0, "a", "b") == [(3.0, do.Reconcile(("a", "1")))]
    assert workers.at(3.1, Reconciled()) == [do.Reconcile(("b", "1"))], "one at a time"
    assert workers.at(3.2, ReconcileFailed("slow")) == []
    assert workers.until(3.0, 7.5, "a", "b") == [(7.5, do.Reconcile(("b", "1")))], "again after a pause"
    workers.at(7.5, Reconciled())
    assert workers.until(7.5, 103.0, "a", "b") == []
    assert workers.until(103.0, 103.5, "a", "b") == [(103.5, do.Reconcile(("a", "1")))]


def test_a_hole_brings_the_comparison_forward(workers: Play) -> None:
    workers.leave_out = (do.Fetch, do.Mark, do.CallRoll, do.Ack, do.Write)
    workers.at(1.0, hello("a"))
    workers.until(1.0, 3.0, "a")
    workers.at(3.1, Reconciled())
    workers.at(4.0, Fetched(entries(1)))
    assert workers.at(4.0, Written(gaps=(("a", "1"), ("a", "0"), ("stranger", "1")))) == []
    assert workers.until(4.0, 7.0, "a") == [(7.0, do.Reconcile(("a", "1")))]


def test_a_new_life_is_compared_even_while_the_old_one_was(workers: Play) -> None:
    workers.leave_out = (do.Fetch, do.Mark, do.CallRoll)
    workers.at(1.0, hello("a"))
    workers.until(1.0, 3.0, "a")
    assert workers.at(3.2, hello("a", "2", started_at_s=5.0)) == []
    workers.at(3.3, ReconcileFailed("another life"))
    assert workers.at(5.0, load("a", "2")) == []
    assert workers.at(5.2, load("a", "2")) == [do.Reconcile(("a", "2"))]


def test_who_does_not_answer_at_all_is_gone(workers: Play) -> None:
    workers.until(0.0, 8.5)
    workers.at(8.5, Marked())
    workers.at(9.0, hello("a"))
    workers.at(9.0, Marked())
    workers.until(9.0, 11.0, "a")
    assert workers.at(11.1, ReconcileFailed("nobody", gone=True)) == [
        do.Mark((), ((("a", "1"), "its connection is gone"),))]


def test_byes_and_no_comparison_while_postgres_is_away(workers: Play) -> None:
    workers.leave_out = (do.Fetch, do.Mark, do.CallRoll, do.Report)
    workers.at(1.0, hello("a"))
    workers.at(1.0, hello("b"))
    workers.at(1.0, Bye(worker=WorkerId("b"), incarnation=Incarnation("1")))
    workers.at(1.1, Fetched(entries(1)))
    workers.at(1.2, WriteFailed("away"))
    assert {effect for _, effect in workers.until(1.2, 6.0, "a")} == {do.Write((1,))}
    assert workers.at(6.1, Written()) == [do.Ack((1,)), do.Reconcile(("a", "1"))]


def test_nobody_dies_while_the_bus_is_away(workers: Play) -> None:
    workers.leave_out = (do.Fetch, do.CallRoll, do.Reconcile)
    workers.at(0.5, hello("a"))
    workers.until(0.5, 8.0, "a")
    workers.at(8.1, Marked())
    for now in range(9, 40):
        assert workers.at(float(now), Deaf()) == []
    workers.at(40.0, Reconnected())
    assert workers.until(40.0, 48.0) == []
    assert [effect for _, effect in workers.until(48.0, 48.5)] == [
        do.Mark((), ((("a", "1"), "silent for 8.5 s"),))], "its silence began anew"


def test_a_follower_only_takes_its_part_of_the_feed() -> None:
    play = Play(upkeep=True, leave_out=(do.CallRoll,))
    assert play.at(0.0, Started()) == [do.Fetch(5)]
    assert play.at(1.0, hello("a")) == []
    assert play.until(1.0, 130.0, "a") == [], "no comparison, no marking, no upkeep"
    assert play.at(130.0, Fetched(entries(1))) == [do.Fetch(5), do.Write((1,))]
    assert play.at(130.0, Written(gaps=(("a", "1"),))) == [do.Ack((1,))]
    assert play.until(130.0, 133.0, "a") == [(133.0, do.Reconcile(("a", "1")))], "the hole it found is its own to fill"
    assert play.at(133.1, Reconciled()) == []
    assert play.until(133.1, 250.0, "a") == []


def test_what_is_done_once_follows_the_lease() -> None:
    play = Play(upkeep=True, leave_out=(do.CallRoll, do.Fetch))
    play.at(0.0, Started())
    play.at(1.0, hello("a"))
    play.until(1.0, 20.0, "a")
    assert play.at(20.0, Led(7, 23.0)) == [do.Mark((("a", "1"),), ()), do.Maintain()]
    play.at(20.1, Marked())
    play.at(20.1, Maintained())
    assert play.at(21.0, Led(7, 24.0)) == [], "a renewal is no news"
    assert play.until(21.0, 22.0, "a") == [(22.0, do.Reconcile(("a", "1")))]
    play.at(22.1, Reconciled())
    assert play.until(22.0, 200.0, "a") == [], "the lease ran out at 24"
    assert play.at(200.0, Led(9, 1e9))[0] == do.Mark((("a", "1"),), ())
    assert play.at(200.1, MaintainFailed("away")) == [do.Report(False, "away")]
    play.at(200.2, Marked())
    play.at(200.3, Unled())
    assert play.until(200.5, 400.0, "a") == []


def test_upkeep_with_more_to_do_goes_on_soon() -> None:
    play = Play(upkeep=True, leave_out=(do.CallRoll, do.Fetch, do.Mark))
    play.at(0.0, Started())
    assert play.at(1.0, LEADS) == [do.Maintain()]
    play.at(2.0, Maintained(more=True))
    assert play.until(2.0, 7.0) == [(6.0, do.Maintain())]


def test_what_nobody_knows_is_a_bug(workers: Play) -> None:
    with pytest.raises(Bug, match="knows no event 'what'"):
        workers.at(1.0, "what")  # type: ignore[arg-type]


def test_a_worker_of_another_kind_is_not_ours_to_refuse(workers: Play) -> None:
    workers.at(1.0, hello("a"))
    other = msgspec.structs.replace(hello("b"), spec=msgspec.structs.replace(SPEC, block_tokens=2))
    assert workers.at(1.1, other) == []


class Anything(RuleBasedStateMachine):
    """Any answers in any order: every position fetched is acknowledged or discarded once, and held meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.play = Play(leave_out=(do.CallRoll, do.Mark, do.Report))
        self.now = 0.0
        self.next_seq = 1
        self.fetching = False
        self.writing: tuple[int, ...] = ()
        self.given: set[int] = set()
        self.ended: set[int] = set()
        self._do(Started())
        self._do(LEADS)

    def _do(self, event: Event) -> None:
        self.now += 0.25
        for effect in self.play.at(self.now, event):
            match effect:
                case do.Fetch():
                    assert not self.fetching
                    self.fetching = True
                case do.Write(seqs):
                    assert not self.writing and seqs and self.given.issuperset(seqs)
                    self.writing = seqs
                case do.Ack(seqs):
                    assert self.given.issuperset(seqs) and self.ended.isdisjoint(seqs)
                    self.ended.update(seqs)
                case do.Discard(seq, _):
                    assert seq % 7 == 0 and seq not in self.ended
                    self.ended.add(seq)

    @precondition(lambda self: self.fetching)
    @rule(count=st.integers(0, 5), again=st.booleans())
    def fetched(self, count: int, again: bool) -> None:
        new = range(self.next_seq, self.next_seq + count)
        self.next_seq += count
        self.given.update(new)
        held = sorted(self.given - self.ended)[:3] if again else []
        self.fetching = False
        self._do(Fetched(entries(*held, *(seq for seq in new if seq not in held), rows=3)))

    @precondition(lambda self: self.writing)
    @rule(away=st.booleans())
    def written(self, away: bool) -> None:
        refused = any(seq % 7 == 0 for seq in self.writing)
        self.writing, tried = (), self.writing
        self._do(WriteFailed("away") if away else WriteFailed("never", refused=True) if refused else Written())
        assert away or refused or self.ended.issuperset(tried)

    @rule()
    def woke(self) -> None:
        self.now += 4.0
        self._do(Woke())

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.play.machine._held == self.given - self.ended

    def teardown(self) -> None:
        for _ in range(4 * len(self.given) + 8):
            if self.writing:
                self.written(away=False)
            else:
                self.woke()
        assert self.ended == self.given


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
