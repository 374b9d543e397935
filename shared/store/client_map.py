"""Which worker has what, as one client knows it. Pure: messages in, questions to owners out.

A copy, as every view but the owner's is: it says whom to ask first, never that a value is there or is not. What an
owner says at its door corrects it at once (:meth:`Whereabouts.learn`, :meth:`Whereabouts.forget`). A worker that is
alone is asked whatever it has, so its news are not followed before there is another one.

The maps are read by the threads that serve calls while the event loop changes them: what they read is replaced as a
whole or looked up by one key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from shared.ids import BlockKey, HostId, Incarnation, WorkerId
from shared.kv import CacheSpec, Tier, spec_difference, unpack_keys
from shared.kv.feed import Action, Apply, Ask, FeedTracker, Reset
from shared.membership import Membership, Unknown
from shared.messages import Bye, Evicted, Hello, KvEvent, Load, Stored, SyncReply

SUSPECT_AFTER_S, DEAD_AFTER_S = 3.0, 10.0
MAX_INDEXED = 1_000_000
"""Keys noted a worker; what comes on top is found by asking."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker with our spec that is there."""

    worker: WorkerId
    incarnation: Incarnation
    host: HostId
    takes: bool
    """May it get new values: alive, not draining, with room?"""
    silent: bool
    """Was not heard for a while; it may answer all the same."""


class Whereabouts:
    """Times are the caller's monotonic seconds."""

    def __init__(self, spec: CacheSpec, host: HostId) -> None:
        self._spec, self._digest, self._host = spec, spec.digest, host
        self._membership = Membership(SUSPECT_AFTER_S, DEAD_AFTER_S)
        self._feed = FeedTracker()
        self._several = False
        #: {worker: its life whose news are followed}
        self._followed: dict[WorkerId, Incarnation] = {}
        #: {worker that is followed: {key: where it lies}}
        self._index: dict[WorkerId, dict[BlockKey, Tier]] = {}
        self.seats: tuple[Seat, ...] = ()
        """Who is there, in order of id."""
        self.foreign = ""
        """How the spec of a worker of the same name differs from ours, as it said last; empty if it does not."""

    # -- what is heard ------------------------------------------------------------------------------------------

    def hello(self, hello: Hello, now: float) -> list[Ask]:
        """A worker registers."""
        if hello.spec.digest != self._digest:
            if hello.spec.model == self._spec.model:
                how = (f"values of {self._spec.block_bytes} bytes here, {hello.spec.block_bytes} there"
                       if self._spec.is_opaque and hello.spec.is_opaque else spec_difference(self._spec, hello.spec))
                self.foreign = f"worker {hello.worker}: {how}"
            return []
        self._membership.hello(hello, now=now)
        return self._act(self._seat(now))

    def load(self, load: Load, now: float) -> tuple[list[Ask], bool]:
        """A heartbeat; also whether it is of somebody unknown, who may have our spec."""
        changes = self._membership.load(load, now=now)
        if any(isinstance(change, Unknown) for change in changes):
            return [], True
        actions = self._seat(now)
        actions += self._feed.heartbeat(load.worker, load.incarnation, load.kv_seq, now)
        return self._act(actions), False

    def bye(self, bye: Bye, now: float) -> None:
        """An orderly leave."""
        self._membership.bye(bye)
        self._seat(now)

    def event(self, event: KvEvent, now: float) -> list[Ask]:
        """Blocks were stored or evicted."""
        return self._act(self._feed.offer(event, now))

    def synced(self, worker: WorkerId, reply: SyncReply, now: float) -> list[Ask]:
        """An owner answered a question."""
        return self._act(self._feed.synced(worker, reply, now))

    def sync_failed(self, worker: WorkerId, incarnation: Incarnation, now: float) -> list[Ask]:
        """It did not."""
        return self._act(self._feed.sync_failed(worker, now, incarnation))

    def deaf(self, now: float) -> None:
        """Until now nobody could be heard."""
        self._membership.deaf(now=now)

    def tick(self, now: float) -> list[Ask]:
        """Time has passed; call it a few times a second."""
        self._membership.tick(now=now)
        return self._act([*self._seat(now), *self._feed.tick(now)])

    # -- what is known ------------------------------------------------------------------------------------------

    def follows(self, worker: WorkerId) -> bool:
        """Are its news of use?"""
        return worker in self._followed

    def owners(self, key: BlockKey) -> list[Seat]:
        """Those said to have it: those that are heard first, among them the nearest."""
        owners = [seat for seat in self.seats if key in self._index.get(seat.worker, ())]
        return owners if len(owners) < 2 else sorted(owners, key=self._order)

    def ranked(self, key: BlockKey) -> list[Seat]:
        """Everybody, in the order in which ``key`` belongs to them: who is heard, then the same host, then rendezvous
        hashing."""
        if len(self.seats) == 1:
            return list(self.seats)
        return sorted(self.seats, key=lambda seat: (
            *self._order(seat), -xxhash.xxh3_64_intdigest(seat.worker.encode() + key)))

    def learn(self, key: BlockKey, worker: WorkerId) -> None:
        """Its owner said that it has it."""
        index = self._index.get(worker)
        if index is not None and len(index) < MAX_INDEXED:
            index[key] = Tier.DRAM

    def forget(self, key: BlockKey, worker: WorkerId) -> None:
        """Its owner said that it has not."""
        self._index.get(worker, {}).pop(key, None)

    # -- inside -------------------------------------------------------------------------------------------------

    def _order(self, seat: Seat) -> tuple[bool, bool]:
        return seat.silent, seat.host != self._host

    def _seat(self, now: float) -> list[Action]:
        """Somebody may have come, changed or gone."""
        members = {worker: member for worker, member in sorted(self._membership.members.items())
                   if member.state != "dead"}
        self.seats = tuple(
            Seat(worker, member.hello.incarnation, member.hello.endpoint.host,
                 takes=member.state == "alive" and not member.draining
                 and (member.load is None or member.load.free_blocks > 0), silent=member.state == "suspect")
            for worker, member in members.items())
        for worker in self._followed.keys() - members.keys():
            self._feed.left(worker)
            del self._followed[worker], self._index[worker]
        self._several |= len(members) > 1
        actions: list[Action] = []
        for seat in self.seats if self._several else ():
            if self._followed.get(seat.worker) != seat.incarnation:
                self._followed[seat.worker], self._index[seat.worker] = seat.incarnation, {}
                actions += self._feed.joined(seat.worker, seat.incarnation, now)
        return actions

    def _act(self, actions: Sequence[Action]) -> list[Ask]:
        asks: list[Ask] = []
        for action in actions:
            match action:
                case Ask():
                    asks.append(action)
                case Reset(worker=worker, blocks=blocks):
                    self._index[worker] = {block.key: block.tier for block in blocks[:MAX_INDEXED]}
                case Apply(event=Stored() as event):
                    index = self._index[event.worker]
                    for block in event.blocks:
                        if len(index) < MAX_INDEXED:
                            index[block.key] = block.tier
                case Apply(event=Evicted() as event):
                    index = self._index[event.worker]
                    for key in unpack_keys(event.keys):
                        if index.get(key) == event.tier:  # it may have moved to another tier before it left this one
                            del index[key]
        return asks
