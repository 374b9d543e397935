"""The workers as the planner uses them: what each is doing for us, how much it may, and whether it is to be trusted.

* **Slow start.** A worker that joined while we were watching takes a share of copying that grows from a tenth to the
  whole over ``ramp_s``, and blocks only at that share of ``copy_bytes_per_s``: an empty newcomer is the emptiest of
  all, and would otherwise get everything at once.
* **Circuit breaker.** Each failure in a row doubles the time for which a worker gets nothing and sends nothing, up to
  ``suspend_limit_s``; one success ends that. One sick worker costs a try now and then, not every try. When a copy
  fails it is seldom plain whose fault it was: then the pair is left alone, and a worker only once it failed with two
  others and with nobody succeeded since. So a sick worker does not take those down that deal with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.store_manager.core.policy import PlannerPolicy
from shared.ids import WorkerId
from shared.membership import Member, Membership
from shared.messages import Hello

_ROLE_RANK = {"prefill": 0, "store": 1, "decode": 2}
"""Where a hot prefix does most good: where prompts are computed, then where only memory is lent."""

SMALLEST_WEIGHT = 0.1


@dataclass
class Peer:
    """One worker that is not dead. Times are monotonic seconds."""

    id: WorkerId
    hello: Hello
    joined_s: float
    """When it was new to us; minus infinity for one that was there before us."""
    sending: int = 0
    """Copies under way from it."""
    receiving: int = 0
    """Copies under way to it."""
    failures: int = 0
    """In a row."""
    suspended_until_s: float = float("-inf")
    failed_with: set[WorkerId] = field(default_factory=set)
    """Partners with which copies failed since the last that did not."""
    next_copy_s: float = float("-inf")
    """When it may get the next copy: what it got lately is paid for by then."""
    busy: set[str] = field(default_factory=set)
    """Other questions that are open: ``trim``, ``protect``."""

    @property
    def host(self) -> str:
        """What copies are spread over."""
        return str(self.hello.endpoint.host)

    @property
    def role_rank(self) -> int:
        """Lower is better as a place for copies."""
        return _ROLE_RANK.get(self.hello.role, len(_ROLE_RANK))

    @property
    def capacity_bytes(self) -> int:
        """Of its pool."""
        return self.hello.capacity_blocks * self.hello.spec.block_bytes


class Fleet:
    """The peers, in step with a :class:`Membership` that its owner feeds."""

    def __init__(self, policy: PlannerPolicy, membership: Membership) -> None:
        self._policy, self._membership = policy, membership
        #: all and only members that are not dead
        self.peers: dict[WorkerId, Peer] = {}
        #: {(source, target): (failures in a row, until when they are left alone)}
        self._pairs: dict[tuple[WorkerId, WorkerId], tuple[int, float]] = {}

    def member(self, worker: WorkerId) -> Member | None:
        """The worker unless dead or unknown."""
        return self._membership.get(worker)

    def join(self, hello: Hello, *, now: float, fresh: bool) -> None:
        """A worker is new."""
        self.peers[hello.worker] = Peer(hello.worker, hello, now if fresh else float("-inf"))

    def leave(self, worker: WorkerId) -> None:
        """A worker is dead."""
        self.peers.pop(worker, None)
        self._pairs = {pair: pause for pair, pause in self._pairs.items() if worker not in pair}

    def is_usable(self, worker: WorkerId, *, now: float) -> bool:
        """Whether it may send and, unless it drains, receive: heard of lately, and not failing."""
        peer, member = self.peers.get(worker), self._membership.get(worker)
        return peer is not None and member is not None and member.state == "alive" and peer.suspended_until_s <= now

    def targets(self, spec: str, *, now: float) -> Iterator[Peer]:
        """Workers of ``spec`` that can take a copy now, in order of name; ordered drains are the caller's to know."""
        for worker, peer in sorted(self.peers.items()):
            member = self._membership.get(worker)
            if (member is not None and member.spec == spec and not member.draining and self.is_usable(worker, now=now)
                    and peer.receiving < self._policy.receive_limit and peer.next_copy_s <= now):
                yield peer

    def free_blocks(self, worker: WorkerId) -> int:
        """Slots that are free or could be freed, as it said last; 0 when it said nothing yet."""
        member = self._membership.get(worker)
        return member.load.free_blocks if member is not None and member.load is not None else 0

    def empty_blocks(self, worker: WorkerId) -> int:
        """Slots for which nothing would have to go, at least."""
        member = self._membership.get(worker)
        return 0 if member is None or member.load is None else max(
            0, member.load.free_blocks - member.load.cached_blocks)

    def fullness(self, worker: WorkerId) -> float:
        """Share of its slots that are cached or in use."""
        peer = self.peers.get(worker)
        capacity = peer.hello.capacity_blocks if peer else 0
        return 1.0 - self.empty_blocks(worker) / capacity if capacity else 1.0

    def queued(self, worker: WorkerId) -> int:
        """Prompt tokens that wait there."""
        member = self._membership.get(worker)
        loads = () if member is None else (member.load, member.other_load)
        return sum(load.queued_tokens for load in loads if load is not None)

    def weight(self, worker: WorkerId, *, now: float) -> float:
        """The share of copying it takes: see the module."""
        peer = self.peers.get(worker)
        if peer is None:
            return 0.0
        return min(1.0, max(SMALLEST_WEIGHT, (now - peer.joined_s) / self._policy.ramp_s))

    def load(self, worker: WorkerId, *, now: float) -> float:
        """What a copy to it weighs: how full it is and how much is under way, the more the fresher it is."""
        peer = self.peers[worker]
        return (self.fullness(worker) + peer.receiving + peer.sending) / self.weight(worker, now=now)

    def sent(self, source: WorkerId, target: WorkerId, nbytes: int, *, now: float) -> None:
        """A copy began."""
        if source in self.peers:
            self.peers[source].sending += 1
        peer = self.peers[target]
        peer.receiving += 1
        peer.next_copy_s = now + nbytes / (self._policy.copy_bytes_per_s * self.weight(target, now=now))

    def over(self, source: WorkerId, target: WorkerId) -> None:
        """A copy ended. Peers of another life than it began with count it as none."""
        for worker, kind in ((source, "sending"), (target, "receiving")):
            peer = self.peers.get(worker)
            if peer is not None:
                setattr(peer, kind, max(0, getattr(peer, kind) - 1))

    def are_apart(self, source: WorkerId, target: WorkerId, *, now: float) -> bool:
        """Whether copies between these two are left alone for now."""
        pause = self._pairs.get((source, target))
        return pause is not None and now < pause[1]

    def succeeded(self, worker: WorkerId) -> None:
        """It did what it was asked."""
        peer = self.peers.get(worker)
        if peer is not None:
            peer.failures, peer.suspended_until_s = 0, float("-inf")
            peer.failed_with.clear()

    def pair_succeeded(self, source: WorkerId, target: WorkerId) -> None:
        """A copy between them arrived."""
        self._pairs.pop((source, target), None)
        self.succeeded(source)
        self.succeeded(target)

    def pair_failed(self, source: WorkerId, target: WorkerId, *, now: float) -> float:
        """A copy between them failed, by whose fault ever; for how many seconds they are kept apart now."""
        failures = self._pairs.get((source, target), (0, 0.0))[0]
        pause_s = self._pause_s(failures)
        self._pairs[source, target] = (failures + 1, now + pause_s)
        for worker, other in ((source, target), (target, source)):
            peer = self.peers.get(worker)
            if peer is not None:
                peer.failed_with.add(other)
                if len(peer.failed_with) > 1:
                    self.failed(worker, now=now)
        return pause_s

    def failed(self, worker: WorkerId, *, now: float) -> float:
        """It did not; for how many seconds it is left alone now."""
        peer = self.peers.get(worker)
        if peer is None:
            return 0.0
        pause_s = self._pause_s(peer.failures)
        peer.failures += 1
        peer.suspended_until_s = now + pause_s
        return pause_s

    def _pause_s(self, failures: int) -> float:
        return min(self._policy.suspend_limit_s, self._policy.suspend_first_s * 2.0 ** min(failures, 30))
