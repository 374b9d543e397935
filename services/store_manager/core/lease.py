"""Which store-manager leads: a lease on one record that all of them write with compare-and-set.

Theory of operation. The record names a holder and a term. Nobody compares clocks:

* The leader writes the record again every ``renew_s``. Its lease ends ``lease_s`` minus a margin after the moment
  *before* it sent its last successful write, by its own monotonic clock. A leader that was stopped (SIGSTOP, a long
  pause of its loop, a NATS that does not answer) finds its time over at its first look and leads no more.
* A follower reads the record every ``renew_s``. A revision it has watched unchanged for ``lease_s``, by its own clock,
  is that of a lease that is over: it writes itself in, with the next term. Whoever comes second is refused by the
  compare-and-set. A record that names nobody was given back by an orderly stop, and is free at once.

The follower saw the revision after the leader had it written, so its ``lease_s`` ends after the leader's: no two lead
at the same time while both clocks run at about the same pace. The term fences what outlives that: what a leader
writes for its successors carries the term, and a lower one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

_MARGIN = 0.2
"""Share of the lease that the leader gives up for clocks of unequal pace and for what it has just begun."""


class LeaseRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the record says."""

    holder: str
    """Name of the leader; empty when the lease was given back."""
    term: int
    """Grows with each change of hands."""


@dataclass(frozen=True)
class Claim:
    """Write ``record`` over ``revision``; then call ``claimed`` or ``lost``."""

    record: LeaseRecord
    revision: int


@dataclass
class Lease:
    """One store-manager's view. Pure; times are its monotonic seconds."""

    name: str
    lease_s: float
    term: int = 0
    """Of the lease we hold or held last."""
    holder: str = ""
    """Who leads as far as we know."""
    _revision: int = 0
    _since_s: float = float("-inf")
    """When the revision was first seen here."""
    _seen: bool = False
    _until_s: float = float("-inf")

    @property
    def until_s(self) -> float:
        """When our own lease ends; in the past for a follower."""
        return self._until_s

    def leads(self, now: float) -> bool:
        """Whether we may act."""
        return now < self._until_s

    def seen(self, record: LeaseRecord | None, revision: int, *, now: float) -> Claim | None:
        """What the record says; the claim to make, if any. ``now`` is when the answer was here, so that a revision
        is never taken for older than it is."""
        if not self._seen or revision != self._revision:
            self._seen, self._revision, self._since_s = True, revision, now
        if record is None:
            return Claim(LeaseRecord(self.name, 1), 0)
        self.holder = record.holder
        if record.holder == self.name and record.term == self.term and self.leads(now):
            return Claim(record, revision)
        self._until_s = float("-inf")
        if not record.holder or now - self._since_s >= self.lease_s:
            return Claim(LeaseRecord(self.name, record.term + 1), revision)
        return None

    def claimed(self, claim: Claim, revision: int, *, now: float) -> None:
        """Our claim was written as ``revision``; ``now`` is from before it was sent."""
        self.holder, self.term = claim.record.holder, claim.record.term
        self._revision, self._since_s = revision, now
        self._until_s = now + self.lease_s * (1 - _MARGIN)

    def lost(self) -> None:
        """Somebody else wrote first: whatever we held, they know better."""
        self._until_s = float("-inf")

    def give_back(self, now: float) -> Claim | None:
        """The claim that frees the lease for the next; ``None`` when we do not hold it."""
        if not self.leads(now):
            return None
        self._until_s = float("-inf")
        return Claim(LeaseRecord("", self.term), self._revision)
