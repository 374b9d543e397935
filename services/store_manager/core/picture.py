"""What a store-manager knows of the cluster: workers, who holds which block, how hot it is. Leading or not.

The copy is rebuilt from the owners whenever news is missing (``FeedTracker``). Large changes are taken in by steps of
``fill_step`` blocks, so that neither a worker that comes with millions of blocks nor one that leaves with them holds
up the loop; news that comes meanwhile waits in line behind them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from services.store_manager.core.events import Deaf, Reconnected, Started
from services.store_manager.core.fleet import Fleet
from services.store_manager.core.heat import Heat
from services.store_manager.core.policy import PlannerPolicy
from services.store_manager.core.replicas import ReplicaMap
from shared.errors import Bug
from shared.ids import BlockKey, Incarnation, RequestId, WorkerId
from shared.kv import unpack_keys
from shared.kv.feed import Action, Apply, Ask, FeedTracker, Reset
from shared.machine import Answered, Effect, Publish, Request, Unanswered
from shared.membership import Change, Changed, Conflict, Joined, Membership, Unknown
from shared.messages import Bye, Evicted, Hello, KvEvent, Load, Placed, Rollcall, Stored, StoredBlock

MADE_FOR = RequestId("store-manager")
"""The request that copies made at our request name, in everybody's news of them."""
ROLL_PAUSE_S = 1.0
"""Least pause between two rollcalls."""
LEARN_S = 2.0
"""From the start to the first look: a rollcall is answered by then."""
LEARN_LIMIT_S = 15.0
"""A worker that has not told its blocks by then is planned without."""
TURN_S = 0.001
"""Pause between two steps of taking in what workers hold."""
SYNC_S = 5.0
"""Longest wait for an owner's answer."""


class Addresses(Protocol):
    """Where effects go; rendered by the shell, since the core knows no subjects."""

    rollcall: Any

    def sync(self, worker: WorkerId) -> Any:
        """Where ``worker`` answers what was missed."""
        ...

    def pool(self, worker: WorkerId) -> Any:
        """Where it hears what is wanted of its memory."""
        ...

    def quotas(self, worker: WorkerId) -> Any:
        """Where it hears of budgets."""
        ...


class Picture:
    """See the module. Times are monotonic seconds."""

    def __init__(self, name: str, addresses: Addresses, policy: PlannerPolicy) -> None:
        self._name, self._addresses, self._policy = name, addresses, policy
        self.membership = Membership(policy.suspect_after_s, policy.dead_after_s)
        self.fleet = Fleet(policy, self.membership)
        self.map = ReplicaMap(max_blocks=policy.max_blocks, max_copies=policy.max_copies,
                              max_bytes=policy.max_map_bytes, ours=MADE_FOR, is_kept=self._is_kept)
        self.heat = Heat(policy.half_life_s, policy.max_heat_keys, policy.hot_uses)
        self._now_s = 0.0
        self.started_s = math.inf
        self.leaving: set[WorkerId] = set()
        """Workers that are drained by order; kept by whoever drains them."""
        self.gone: list[tuple[WorkerId, str]] = []
        """Lives that ended, and why; for the planner to take."""
        self._feed = FeedTracker()
        #: news that waits to be taken in, {worker: in order}: what came after a snapshot that is taken in by steps
        self._filling: dict[WorkerId, deque[Sequence[StoredBlock] | KvEvent]] = {}
        self._sweeping = False
        """Workers that left are not taken apart yet."""
        self._tick_s = 0.0
        self._rolled_s = -math.inf

    def hear(self, event: Any, out: list[Effect], *, now: float) -> bool:
        """Takes in ``event`` if it tells something of the cluster; whether it did."""
        self._now_s = now
        match event:
            case Stored() | Evicted():
                self._act(self._feed.offer(event, now), out)
            case Placed():
                self._use(event, now)
            case Load():
                self._follow(self.membership.load(event, now=now), out, now)
                self._act(self._feed.heartbeat(event.worker, event.incarnation, event.kv_seq, now), out)
            case Hello():
                self._follow(self.membership.hello(event, now=now), out, now)
            case Bye():
                self._follow(self.membership.bye(event), out, now)
            case Answered(tag=Ask() as ask):
                self._act(self._feed.synced(ask.worker, event.message, now), out)
            case Unanswered(tag=Ask() as ask):
                self._act(self._feed.sync_failed(ask.worker, now, ask.since.incarnation), out)
                if event.gone:
                    self._follow(self.membership.gone(ask.worker, ask.since.incarnation), out, now)
            case Started():
                self.started_s = now
                self.membership.tick(now=now)
                self._call_roll(out, now)
            case Deaf():
                self.membership.deaf(now=now)
            case Reconnected():
                self.membership.deaf(now=now)
                self._call_roll(out, now)
            case _:
                return False
        return True

    def advance(self, out: list[Effect], *, now: float) -> None:
        """What is due at ``now``: silences, holes, and the next step of what waits to be taken in."""
        self._now_s = now
        if now >= self._tick_s:
            self._follow(self.membership.tick(now=now), out, now)
            self._tick_s = self.membership.next_wake(now=now)
            for worker in self.map.incomplete():
                self.relearn(worker, out, now=now)
        if (due_s := self._feed.next_wake()) is not None and due_s <= now:
            self._act(self._feed.tick(now), out)
        self._take_in()

    def next_wake(self, now: float) -> float:
        """When :meth:`advance` has something to do."""
        times = [self._tick_s]
        if (due_s := self._feed.next_wake()) is not None:
            times.append(due_s)
        if self._filling or self._sweeping:
            times.append(now + TURN_S)
        return min(times)

    def has_learnt(self, now: float, *, since_s: float) -> bool:
        """Whether it is true enough to act on, for somebody who leads since ``since_s``."""
        if now - self.started_s < LEARN_S:
            return False
        if now - max(since_s, self.started_s) > LEARN_LIMIT_S:
            return True
        return all(map(self.knows, self.fleet.peers))

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when it contradicts itself."""
        self.map.check_invariants()
        live = {worker for worker, member in self.membership.members.items() if member.state != "dead"}
        if live != set(self.fleet.peers):
            raise Bug(f"planner: live members {sorted(live)} are not the peers {sorted(self.fleet.peers)}")

    # Reading.

    def knows(self, worker: WorkerId) -> bool:
        """Whether the map has all that the worker told of its blocks: it is not being told, or taken in, anew."""
        return worker not in self._filling and self._feed.is_converged(worker)

    def relearn(self, worker: WorkerId, out: list[Effect], *, now: float) -> None:
        """Asks the worker for all that it holds, if some of it had no room in the map."""
        incarnation = self.life(worker)
        if incarnation is not None and self.map.unseen_of(worker) and worker not in self._filling:
            self._act(self._feed.joined(worker, incarnation, now), out)

    def is_leaving(self, worker: WorkerId) -> bool:
        """Whether its copies will be gone soon: it is drained, by order or by its own word."""
        member = self.membership.get(worker)
        return worker in self.leaving or member is None or member.draining

    def staying(self) -> int:
        """The bits of workers whose copies will be there tomorrow."""
        return sum(self.map.bit(worker) for worker in self.fleet.peers if not self.is_leaving(worker))

    def holders(self, path: Sequence[BlockKey]) -> set[WorkerId]:
        """Who holds the beginning or the end of a chain: whoever may have a part of it to send."""
        return {*self.map.holders(path[0]), *self.map.holders(path[-1])}

    def spec_of(self, path: Sequence[BlockKey]) -> str:
        """The cache spec of a chain: that of whoever holds it."""
        for worker in self.map.holders(path[0]):
            member = self.membership.get(worker)
            if member is not None:
                return member.spec
        return ""

    def life(self, worker: str) -> Incarnation | None:
        """The worker's present life; ``None`` when it is dead or unknown."""
        member = self.membership.get(WorkerId(worker))
        return member.hello.incarnation if member is not None else None

    def workers(self) -> list[WorkerId]:
        """Who is not dead, in order of name."""
        return sorted(self.fleet.peers)

    def unseen(self) -> int:
        """Blocks of all workers, each once a tier, that the map has no room for."""
        return sum(map(self.map.unseen_of, self.fleet.peers))

    def usage(self, tenant: str) -> int:
        """Bytes of a tenant's blocks, over all workers and tiers."""
        return sum(self.map.usage(worker, tenant) for worker in self.fleet.peers)

    # Inside.

    def _is_kept(self, key: BlockKey) -> bool:
        """Whether others go from a full map before it: it is warm, or has to be copied out."""
        return (self._policy.is_warm(self.heat.of(key, now=self._now_s))
                or any(self.map.holds(worker, key) for worker in self.leaving))

    def _use(self, placed: Placed, now: float) -> None:
        """A request was placed: its whole prompt is used once. Another attempt is no other use.

        Had it gained by more copies of what is held of its prompt, that counts as more uses of it.
        """
        if placed.placement.attempt == 0 and len(placed.keys) % 32 == 0:
            keys = unpack_keys(placed.keys)[:self._policy.max_path]
            self.heat.use(keys, now=now)
            gain_s = placed.placement.reuse_gain_s
            if 0.0 < gain_s < math.inf:
                held = self.map.held(keys)
                weight = self._policy.worth(gain_s, sum(place.nbytes for place in held))
                self.heat.use(keys[:len(held)], now=now, weight=weight)

    def _follow(self, changes: list[Change], out: list[Effect], now: float) -> None:
        for change in changes:
            match change:
                case Joined(hello):
                    self._drop(hello.worker, "it began anew")
                    fresh = now - self.started_s > LEARN_S
                    self.fleet.join(hello, now=now, fresh=fresh)
                    self.map.replace(hello.worker, ())
                    self._act(self._feed.joined(hello.worker, hello.incarnation, now), out)
                case Changed(worker, incarnation, before, after, why):
                    if after == "dead":
                        self._drop(worker, f"it died: {why}")
                    elif before == "dead":
                        hello = self.membership.members[worker].hello
                        self.fleet.join(hello, now=now, fresh=False)
                        self.map.replace(worker, ())
                        self._act(self._feed.joined(worker, incarnation, now), out)
                case Unknown():
                    self._call_roll(out, now)
                case Conflict():
                    pass  # a worker with a conflicting cache spec is the conductor's to refuse
                case _:
                    raise Bug(f"the planner knows no change {change!r}")

    def _drop(self, worker: WorkerId, why: str) -> None:
        """Nothing of this life of the worker counts any more."""
        self._feed.left(worker)
        self.fleet.leave(worker)
        self._filling.pop(worker, None)
        self.map.remove(worker)
        self._sweeping = True
        self.gone.append((worker, why))

    def _call_roll(self, out: list[Effect], now: float) -> None:
        if now - self._rolled_s >= ROLL_PAUSE_S:
            self._rolled_s = now
            out.append(Publish(self._addresses.rollcall, Rollcall(asker=self._name)))

    def _act(self, actions: Iterable[Action], out: list[Effect]) -> None:
        for action in actions:
            match action:
                case Ask():
                    out.append(Request(self._addresses.sync(action.worker), action.since, action, SYNC_S))
                case Reset():
                    self.map.replace(action.worker, ())
                    self._sweeping = True
                    self._filling[action.worker] = deque([list(action.blocks)] if action.blocks else [])
                case Apply():
                    if action.event.worker in self._filling:
                        self._filling[action.event.worker].append(action.event)
                    else:
                        self._apply(action.event)

    def _apply(self, event: KvEvent) -> None:
        if isinstance(event, Stored):
            self.map.store(event.worker, event.blocks)
        else:
            self.map.evict(event.worker, unpack_keys(event.keys), event.tier)

    def _take_in(self) -> None:
        """A bounded part of what waits: first what left is taken apart, then what came is taken in."""
        room = self._policy.fill_step
        if self._sweeping:
            self._sweeping = self.map.sweep(room)
            if self._sweeping:
                return
        for worker, waiting in list(self._filling.items()):
            while waiting and room > 0:
                first = waiting[0]
                if isinstance(first, Stored | Evicted):
                    self._apply(first)
                    room -= len(first.blocks) if isinstance(first, Stored) else len(first.keys) // 32
                    waiting.popleft()
                    continue
                self.map.store(worker, first[:room])
                rest = first[room:]
                room -= len(first) - len(rest)
                if rest:
                    waiting[0] = rest
                else:
                    waiting.popleft()
            if not waiting:
                del self._filling[worker]
