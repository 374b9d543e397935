"""Who leads: any interleaving of several store-managers, stops and refused writes has at most one leader at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.store_manager.core.lease import Claim, Lease, LeaseRecord

LEASE_S = 2.5


@dataclass
class Shared:
    """The record, as NATS keeps it."""

    record: LeaseRecord | None = None
    revision: int = 0

    def write(self, claim: Claim) -> int | None:
        if claim.revision != self.revision:
            return None
        self.record, self.revision = claim.record, self.revision + 1
        return self.revision


@dataclass
class Manager:
    lease: Lease
    shared: Shared
    #: a claim that was sent, and when; its answer comes later
    sent: tuple[Claim, float] | None = None
    terms: list[int] = field(default_factory=list)

    def look(self, now: float) -> None:
        claim = self.lease.seen(self.shared.record, self.shared.revision, now=now)
        self.sent = (claim, now) if claim is not None else None

    def settle(self, answered: bool = True) -> None:
        if self.sent is not None:
            claim, sent_s = self.sent
            self.sent = None
            revision = self.shared.write(claim)
            if answered and revision is not None:
                self.lease.claimed(claim, revision, now=sent_s)
            elif answered:
                self.lease.lost()

    def round(self, now: float) -> None:
        self.look(now)
        self.settle()


def managers(count: int) -> list[Manager]:
    shared = Shared()
    return [Manager(Lease(f"m{i}", LEASE_S), shared) for i in range(count)]


def test_one_leads_renews_and_is_followed_within_seconds() -> None:
    first, second = managers(2)
    first.round(0.0)
    second.round(0.1)
    assert first.lease.leads(0.2) and not second.lease.leads(0.2)
    assert second.lease.holder == "m0"
    for step in range(1, 20):
        first.round(step * 0.5)
        second.round(step * 0.5 + 0.1)
        assert first.lease.leads(step * 0.5 + 0.4)
    died_s = 9.5
    now = died_s
    while not second.lease.leads(now):
        now += 0.5
        second.round(now)
    assert now - died_s <= LEASE_S + 1.0
    assert second.lease.term == 2
    assert not first.lease.leads(now), "the stopped one knows by its own clock"
    first.round(now + 0.1)
    assert not first.lease.leads(now + 0.1) and first.lease.holder == "m1"


def test_an_orderly_stop_frees_the_lease_at_once() -> None:
    first, second = managers(2)
    first.round(0.0)
    second.round(0.1)
    claim = first.lease.give_back(0.2)
    assert claim is not None and first.shared.write(claim)
    assert not first.lease.leads(0.2)
    second.round(0.3)
    assert second.lease.leads(0.3) and second.lease.term == 2
    assert first.lease.give_back(0.4) is None


def test_a_renewal_whose_answer_was_lost_is_no_loss() -> None:
    first, _ = managers(2)
    first.round(0.0)
    first.look(0.5)
    first.settle(answered=False)
    first.round(1.0)
    assert first.lease.leads(1.0) and first.lease.term == 1


class Anything(RuleBasedStateMachine):
    """Looks, writes that land late or whose answers are lost, and long stops, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.all = managers(3)
        self.highest = 0

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.5, 1.0, 3.0, 20.0]))
    def passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(who=st.integers(0, 2))
    def looks(self, who: int) -> None:
        self.all[who].look(self.now)

    @rule(who=st.integers(0, 2), answered=st.booleans())
    def writes(self, who: int, answered: bool) -> None:
        self.all[who].settle(answered)

    @rule(who=st.integers(0, 2))
    def gives_back(self, who: int) -> None:
        claim = self.all[who].lease.give_back(self.now)
        if claim is not None:
            self.all[who].shared.write(claim)

    @invariant()
    def at_most_one_leads(self) -> None:
        leaders = [manager.lease for manager in self.all if manager.lease.leads(self.now)]
        assert len(leaders) <= 1, [lease.name for lease in leaders]
        for lease in leaders:
            assert lease.term >= self.highest, "terms only grow"
            self.highest = lease.term


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
