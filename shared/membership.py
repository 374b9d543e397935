"""Who is there: workers ALIVE, SUSPECT (silent for a while: no new work) or DEAD (their blocks are gone).

Pure. Gateway, conductor and store-manager each keep one :class:`Membership` and feed it what they hear. A reader
that could not hear must not declare everybody dead: silence only counts while the reader was listening. So
:meth:`Membership.tick` notices its own lag and gives every worker that time back, and whoever owns the bus calls
:meth:`Membership.deaf` again and again while the connection is away, and once more when it is back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from shared.ids import Incarnation, SpecDigest, WorkerId
from shared.kv import spec_difference
from shared.messages import Bye, Hello, Load

State = Literal["alive", "suspect", "dead"]


@dataclass
class Member:
    """One worker in its present incarnation."""

    hello: Hello
    heard_s: float
    """Monotonic seconds of the last sign of life."""
    load: Load | None = None
    """Its last heartbeat; of an elastic worker the last one of its home role."""
    other_load: Load | None = None
    """The last one of an elastic worker's other role."""
    state: State = "alive"
    draining: bool = False
    """It said in its last load that it takes no new work."""
    left: bool = False
    """It said bye: nothing of this life revives it."""
    spec: SpecDigest = field(init=False)
    """Digest of its cache spec, computed once a hello."""

    def __post_init__(self) -> None:
        self.spec = self.hello.spec.digest

    def does(self, role: str) -> bool:
        """Whether it takes jobs of ``role``."""
        return self.hello.role == role or (self.hello.elastic and role != "store")

    def said(self, hello: Hello) -> None:
        """It registers again, in the same life."""
        self.hello, self.spec = hello, hello.spec.digest


@dataclass(frozen=True)
class Joined:
    """A worker is new, or came back with a new incarnation (``previous`` is the one whose promises are void)."""

    hello: Hello
    previous: Incarnation | None


@dataclass(frozen=True)
class Changed:
    """A worker went from ``before`` to ``after``; its incarnation tells which life."""

    worker: WorkerId
    incarnation: Incarnation
    before: State
    after: State
    why: str


@dataclass(frozen=True)
class Unknown:
    """A heartbeat of somebody whose hello we never heard: ask for a rollcall."""

    worker: WorkerId


@dataclass(frozen=True)
class Conflict:
    """A hello whose cache spec differs from that of the live workers of the same model: it must be refused."""

    hello: Hello
    message: str


Change = Joined | Changed | Unknown | Conflict


@dataclass
class Membership:
    """The workers one reader knows. All times are monotonic seconds of that reader."""

    suspect_after_s: float
    dead_after_s: float
    #: {worker id: its present life}; a dead worker stays until it says hello again or ``forget_after_s`` passes
    members: dict[WorkerId, Member] = field(default_factory=dict)
    forget_after_s: float = 600.0
    _ticked_s: float | None = None
    _deaf_s: float = -math.inf
    """Until when nothing could be heard."""

    def hello(self, hello: Hello, *, now: float) -> list[Change]:
        """A worker registers (again)."""
        conflict = self._conflict(hello)
        if conflict:
            return [Conflict(hello, conflict)]
        known = self.members.get(hello.worker)
        if known is not None and known.hello.incarnation == hello.incarnation:
            if known.left:
                return []  # a hello that was overtaken by its own bye
            known.said(hello)
            return self._heard(known, now=now)
        if known is not None and known.state == "alive" and known.hello.started_at_s > hello.started_at_s:
            # An earlier life's hello, delivered late. Only the living are proof of that: clocks may go back, and who
            # follows one that fell silent must get in whatever its clock says.
            return []
        self.members[hello.worker] = Member(hello=hello, heard_s=now)
        return [Joined(hello, known.hello.incarnation if known else None)]

    def load(self, load: Load, *, now: float) -> list[Change]:
        """A heartbeat."""
        known = self.members.get(load.worker)
        if known is None or known.hello.incarnation != load.incarnation:
            return [Unknown(load.worker)]
        if known.left:
            return []  # it said bye: a heartbeat that was under way does not revive it
        known.draining = load.draining
        if load.role == known.hello.role or not known.hello.elastic:
            known.load = load
        else:
            known.other_load = load
        return self._heard(known, now=now)

    def bye(self, bye: Bye) -> list[Change]:
        """An orderly leave."""
        known = self.members.get(bye.worker)
        if known is None or known.hello.incarnation != bye.incarnation:
            return []
        known.left = True
        return [] if known.state == "dead" else [self._change(known, "dead", bye.reason or "said bye")]

    def gone(self, worker: WorkerId, incarnation: Incarnation) -> list[Change]:
        """Somebody found that nobody listens on the worker's subjects any more: its connection is closed.

        That proves nothing of a worker not heard since our own connection came back: its own may be on the way.
        """
        known = self.members.get(worker)
        if known is None or known.hello.incarnation != incarnation or known.state == "dead":
            return []
        if known.heard_s <= self._deaf_s:
            return []
        return [self._change(known, "dead", "its connection is gone")]

    def deaf(self, *, now: float) -> None:
        """Until now nobody could be heard, the bus was away: everybody's silence begins anew."""
        self._ticked_s = self._deaf_s = now
        for member in self.members.values():
            if member.state != "dead":
                member.heard_s = now

    def tick(self, *, now: float) -> list[Change]:
        """Lets time pass; call it at least every half ``suspect_after_s``."""
        if self._ticked_s is not None:
            lag_s = (now - self._ticked_s) - self.suspect_after_s / 2
            if lag_s > 0:  # we ourselves did not run: nobody was silent, we were deaf
                for member in self.members.values():
                    member.heard_s += lag_s
        self._ticked_s = now
        changes: list[Change] = []
        for worker, member in list(self.members.items()):
            silence_s = now - member.heard_s
            if member.state == "dead":
                if silence_s > self.forget_after_s:
                    del self.members[worker]
            elif silence_s > self.dead_after_s:
                changes.append(self._change(member, "dead", f"silent for {silence_s:.1f} s"))
            elif silence_s > self.suspect_after_s and member.state == "alive":
                changes.append(self._change(member, "suspect", f"silent for {silence_s:.1f} s"))
        return changes

    def next_wake(self, *, now: float) -> float:
        """When to call :meth:`tick` next."""
        return now + self.suspect_after_s / 4

    def get(self, worker: WorkerId) -> Member | None:
        """The worker unless dead or unknown."""
        member = self.members.get(worker)
        return member if member is not None and member.state != "dead" else None

    def usable(self, spec: SpecDigest, role: str) -> list[Member]:
        """Workers of ``role`` that may get new work under ``spec``, in order of id."""
        return [
            member for _, member in sorted(self.members.items())
            if member.state == "alive" and not member.draining
            and member.does(role) and member.spec == spec
        ]

    def specs(self) -> dict[str, Hello]:
        """{model name: a hello that carries its spec}, over workers that compute and are not dead."""
        found: dict[str, Hello] = {}
        for _, member in sorted(self.members.items()):
            if member.state != "dead" and member.hello.role != "store":
                found.setdefault(member.hello.spec.model, member.hello)
        return found

    def _conflict(self, hello: Hello) -> str:
        if hello.role == "store":
            return ""  # it lends for what it is told, and may outlive those who told it
        for other in self.members.values():
            if other.state == "dead" or other.hello.worker == hello.worker or other.hello.role == "store":
                continue
            if other.hello.spec.model != hello.spec.model:
                continue
            difference = spec_difference(other.hello.spec, hello.spec)
            if difference:
                return (f"worker {hello.worker} registers model {hello.spec.model} with another cache spec than "
                        f"{other.hello.worker}: {difference}; give both the same model files and settings")
        return ""

    def _heard(self, member: Member, *, now: float) -> list[Change]:
        member.heard_s = now
        return [] if member.state == "alive" else [self._change(member, "alive", "heard again")]

    def _change(self, member: Member, after: State, why: str) -> Changed:
        before, member.state = member.state, after
        return Changed(member.hello.worker, member.hello.incarnation, before, after, why)
