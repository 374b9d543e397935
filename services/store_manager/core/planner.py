"""The store-manager as the cluster's memory planner: where copies should be, and what must go.

Theory of operation
-------------------

**Knowing.** Every store-manager keeps the replica map, all the time, from the live events (``FeedTracker`` asks owners
for what was missed), the heat of blocks from what conductors place, and the workers from their heartbeats. So whoever
comes to lead knows already what to do.

**Acting.** Only the leader asks anything of workers. ``Led`` comes with each renewal of the lease and says until when;
after that time nothing is begun, whatever else happens: a leader that was stopped finds itself a follower. All it asks
is advice about memory and may be repeated or ignored, so what an old leader still has under way does no harm.

**Levels, not edges.** Each look compares what is with what should be and asks for a bounded part of the difference.
A lost answer, a failed copy or a new leader needs no repair: the next look sees what is still to do.

=========  =======================================================================================================
replicate  A hot prefix wants copies by its heat, on different hosts first, then on the least loaded workers; from the
           nearest owner that sends least. Never to a worker that is suspect, draining, failing, or full of copies
protect    A hot block with one copy: its worker evicts it last, for as long as we repeat that
trim       A copy that we had made and whose block cooled; and, at full workers, cold copies that others have too.
           Never the last copy, never below what the heat wants
quotas     Every worker hears every budget again and again; see ``orders.split_quota``
drain      Blocks without another copy are copied out, hot ones whatever has to go for them, cold ones into empty
           room; then the worker retires. It ends, always: done, failed or cancelled, with a reason
=========  =======================================================================================================
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from services.store_manager.core.draining import Draining
from services.store_manager.core.events import Deaf, Led, Reconnected, Started, Unled
from services.store_manager.core.fleet import Fleet, Peer
from services.store_manager.core.heat import Heat
from services.store_manager.core.orders import OVER, Drain, Orders, split_quota
from services.store_manager.core.policy import PlannerPolicy
from services.store_manager.core.replicas import ReplicaMap, leading
from shared.errors import Bug
from shared.ids import BlockKey, Incarnation, OperationId, RequestId, WorkerId
from shared.kv import pack_keys, unpack_keys
from shared.kv.feed import Action, Apply, Ask, FeedTracker, Reset
from shared.machine import Answered, Effect, Publish, Request, Unanswered, Woke
from shared.membership import Change, Changed, Conflict, Joined, Membership, Unknown
from shared.messages import (
    Bye,
    CopiesReply,
    DecisionRow,
    Evicted,
    Hello,
    Holder,
    HotRow,
    KvEvent,
    Load,
    Placed,
    Protect,
    Quotas,
    Replicate,
    Replicated,
    Retire,
    Retired,
    Rollcall,
    Stored,
    StoredBlock,
    TenantQuota,
    Trim,
    Trimmed,
    WorkerRow,
)

MADE_FOR = RequestId("store-manager")
"""The request that copies made at our request name, in everybody's news of them."""
ROLL_PAUSE_S = 1.0
"""Least pause between two rollcalls."""
_LEARN_S = 2.0
"""From the start to the first look: a rollcall is answered by then."""
_LEARN_LIMIT_S = 15.0
"""A worker that has not told its blocks by then is planned without."""
_LANDING_S = 3.0
"""A copy that was answered counts as there for so long, until the news of it comes."""
_TURN_S = 0.001
"""Pause between two steps of taking in what workers hold."""
_DECISIONS = 64
"""Decisions remembered for people."""
_MOST_PAUSES = 10_000
"""Failed copies remembered."""
_NOT_THEIR_FAULT = ("capacity", "room", "full", "draining", "retired", "spec", "shape", "missing", "parent")
"""Why a copy may come short without anybody failing."""


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


class OrdersRead(msgspec.Struct, frozen=True):
    """What people want, as the record says at ``wall_s`` (Unix seconds)."""

    orders: Orders
    wall_s: float


class OrdersFailed(msgspec.Struct, frozen=True):
    """The record could not be read or written."""


class KeepOrders(Effect, frozen=True):
    """Read the record, write ``progress`` into it if there is any; comes back as OrdersRead or OrdersFailed."""

    progress: tuple[Drain, ...]
    term: int


Event = (Started | Deaf | Reconnected | Led | Unled | OrdersRead | OrdersFailed | Hello | Load | Bye | Stored | Evicted
         | Placed | Answered | Unanswered | Woke)


@dataclass(frozen=True)
class Copy:
    """One request to copy; the tag of its answer."""

    operation: OperationId
    source: WorkerId
    target: WorkerId
    keys: tuple[BlockKey, ...]
    nbytes: int
    prefix: BlockKey
    """The end of the chain it is part of."""
    drain: WorkerId | None = None


@dataclass(frozen=True)
class Side:
    """A question that moves no bytes; the tag of its answer."""

    kind: str
    worker: WorkerId
    incarnation: Incarnation
    blocks: int = 0


@dataclass(frozen=True)
class Statistics:
    """The machine's state in numbers, for metrics."""

    leads: bool
    blocks: int
    copies: int
    nbytes: int
    unseen: int
    hot: int
    under_way: int
    outcomes: Mapping[tuple[str, str], int]
    """{(what was asked, what came of it): blocks}"""
    nbytes_copied: int
    suspended: int


@dataclass
class Planner:
    """See the module. ``handle`` is the only door."""

    name: str
    addresses: Addresses
    policy: PlannerPolicy
    _started_s: float = math.inf
    _now_s: float = 0.0
    _tick_s: float = 0.0
    _rolled_s: float = -math.inf
    #: news that waits to be taken in, {worker: in order}: all that came after a snapshot that is taken in by steps
    _filling: dict[WorkerId, deque[Sequence[StoredBlock] | KvEvent]] = field(default_factory=dict)
    _sweeping: bool = False
    """Workers that left are not taken apart yet."""
    # Leading.
    _term: int = 0
    _until_s: float = -math.inf
    _led_s: float = -math.inf
    _plan_at_s: float = -math.inf
    _trim_at_s: float = -math.inf
    _protect_at_s: float = -math.inf
    _quota_at_s: float = -math.inf
    _orders_at_s: float = -math.inf
    _drain_at_s: float = -math.inf
    _reading: bool = False
    _orders: Orders | None = None
    _drains: dict[WorkerId, Draining] = field(default_factory=dict)
    #: news of drains to be written on the record
    _progress: dict[tuple[WorkerId, float], Drain] = field(default_factory=dict)
    #: ends of drains, until the record has them
    _ended: dict[tuple[WorkerId, float], Drain] = field(default_factory=dict)
    _copies: dict[OperationId, Copy] = field(default_factory=dict)
    #: {operation: (copy that was answered, until when it counts as there)}
    _landing: dict[OperationId, tuple[Copy, float]] = field(default_factory=dict)
    #: {(target, end of the chain): (failures in a row, when it may be tried again)}
    _pauses: dict[tuple[WorkerId, BlockKey], tuple[int, float]] = field(default_factory=dict)
    #: {worker: how far the look at its old copies is}
    _scanned: dict[WorkerId, int] = field(default_factory=dict)
    _operations: int = 0
    _decisions: deque[tuple[float, DecisionRow]] = field(default_factory=lambda: deque(maxlen=_DECISIONS))
    _outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    _nbytes_copied: int = 0

    def __post_init__(self) -> None:
        policy = self.policy
        self._membership = Membership(policy.suspect_after_s, policy.dead_after_s)
        self._fleet = Fleet(policy, self._membership)
        self._feed = FeedTracker()
        self.map = ReplicaMap(max_blocks=policy.max_blocks, max_copies=policy.max_copies,
                              max_bytes=policy.max_map_bytes, ours=MADE_FOR)
        self.heat = Heat(policy.half_life_s, policy.max_heat_keys, policy.hot_uses)

    # The door.

    def handle(self, event: Event, *, now: float) -> Sequence[Effect]:
        """Applies ``event``; see the module."""
        self._now_s = now
        out: list[Effect] = []
        match event:
            case Stored() | Evicted():
                self._act(self._feed.offer(event, now), out)
            case Placed():
                self._use(event, now)
            case Load():
                self._follow(self._membership.load(event, now=now), out, now)
                self._act(self._feed.heartbeat(event.worker, event.incarnation, event.kv_seq, now), out)
            case Hello():
                self._follow(self._membership.hello(event, now=now), out, now)
            case Bye():
                self._follow(self._membership.bye(event), out, now)
            case Answered(tag=Ask() as ask):
                self._act(self._feed.synced(ask.worker, event.message, now), out)
            case Unanswered(tag=Ask() as ask):
                self._act(self._feed.sync_failed(ask.worker, now, ask.since.incarnation), out)
                if event.gone:
                    self._follow(self._membership.gone(ask.worker, ask.since.incarnation), out, now)
            case Answered(tag=Copy() as copy):
                self._copied(copy, event.message, now)
            case Unanswered(tag=Copy() as copy):
                self._copied(copy, event.why, now)
            case Answered(tag=Side() as side):
                self._answered(side, event.message, now)
            case Unanswered(tag=Side() as side):
                self._answered(side, event.why, now)
            case Led():
                self._lead(event, now)
            case Unled():
                self._until_s = -math.inf
            case OrdersRead():
                self._reading = False
                self._take_orders(event, now)
            case OrdersFailed():
                self._reading = False
            case Started():
                self._started_s = now
                self._membership.tick(now=now)
                self._call_roll(out, now)
            case Deaf():
                self._membership.deaf(now=now)
            case Reconnected():
                self._membership.deaf(now=now)
                self._call_roll(out, now)
            case Woke():
                pass  # what is due shows below
            case _:
                raise Bug(f"the planner knows no event {event!r}")
        if now >= self._tick_s:
            self._follow(self._membership.tick(now=now), out, now)
            self._tick_s = self._membership.next_wake(now=now)
            self._forget(now)
            for worker in self.map.incomplete():
                member = self._membership.get(worker)
                if member is not None and worker not in self._filling:
                    self._act(self._feed.joined(worker, member.hello.incarnation, now), out)
        if (due_s := self._feed.next_wake()) is not None and due_s <= now:
            self._act(self._feed.tick(now), out)
        self._take_in()
        if self.leads(now):
            self._plan(out, now)
        return out

    def next_wake(self) -> float | None:
        """The next step of anything."""
        if math.isinf(self._started_s):
            return None
        times = [self._tick_s]
        if (due_s := self._feed.next_wake()) is not None:
            times.append(due_s)
        if self._filling or self._sweeping:
            times.append(self._now_s + _TURN_S)
        if self.leads(self._now_s):
            times.append(self._until_s)
            times += [at_s for at_s in (self._plan_at_s, self._trim_at_s, self._protect_at_s, self._quota_at_s)
                      if at_s > self._now_s]
            if not self._reading:
                times.append(self._orders_at_s)
            if self._drains:
                times.append(self._drain_at_s)
        return max(min(times), self._now_s + _TURN_S / 10)

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when the state contradicts itself."""
        self.map.check_invariants()
        live = {worker for worker, member in self._membership.members.items() if member.state != "dead"}
        if live != set(self._fleet.peers):
            raise Bug(f"planner: live members {sorted(live)} are not the peers {sorted(self._fleet.peers)}")
        if len(self._copies) > self.policy.copies_limit:
            raise Bug(f"planner: {len(self._copies)} copies are under way")
        for worker, peer in self._fleet.peers.items():
            for kind, role in (("receiving", "target"), ("sending", "source")):
                if getattr(peer, kind) > sum(getattr(copy, role) == worker for copy in self._copies.values()):
                    raise Bug(f"planner: {worker} is {kind} more than there is")

    # For the shell.

    def leads(self, now: float) -> bool:
        """Whether we may act."""
        return now < self._until_s

    def life(self, worker: str) -> Incarnation | None:
        """The worker's present life; ``None`` when it is dead or unknown."""
        member = self._membership.get(WorkerId(worker))
        return member.hello.incarnation if member is not None else None

    def workers(self) -> list[WorkerId]:
        """Who is not dead, in order of name."""
        return sorted(self._fleet.peers)

    def usage(self, tenant: str) -> int:
        """Bytes of a tenant's blocks, over all workers and tiers."""
        return sum(self.map.usage(worker, tenant) for worker in self._fleet.peers)

    def statistics(self) -> Statistics:
        """The state in numbers."""
        return Statistics(
            leads=self.leads(self._now_s), blocks=len(self.map), copies=self.map.copies, nbytes=self.map.nbytes,
            unseen=self.map.unseen_blocks, hot=self.heat.hot_count, under_way=len(self._copies),
            outcomes=dict(self._outcomes), nbytes_copied=self._nbytes_copied,
            suspended=sum(peer.suspended_until_s > self._now_s for peer in self._fleet.peers.values()))

    def describe(self, limit: int, *, leader: str, now: float) -> CopiesReply:
        """The state for people: hot prefixes, workers, and the latest decisions."""
        hot = []
        for key in self._frontier(now)[:limit]:
            place = self.map.get(key)
            if place is None:
                continue
            heat = self.heat.of(key, now=now)
            hot.append(HotRow(
                key=key, blocks=place.depth + 1, tenant=place.tenant, tokens=(place.depth + 1) * place.tokens,
                heat=heat, wanted=self._wanted(heat),
                holders=[Holder(worker=worker, host=self._fleet.peers[worker].host, tiers=[str(t) for t in tiers])
                         for worker, tiers in self.map.tiers(key).items() if worker in self._fleet.peers]))
        workers = [
            WorkerRow(worker=worker, role=peer.hello.role, host=peer.host,
                      state="draining" if self._is_leaving(worker) else self._membership.members[worker].state,
                      blocks=self.map.blocks_of(worker), nbytes=self.map.bytes_of(worker),
                      made=len(self.map.ours_of(worker)), weight=self._fleet.weight(worker, now=now),
                      suspended_s=max(0.0, peer.suspended_until_s - now))
            for worker, peer in sorted(self._fleet.peers.items())]
        decisions = [msgspec.structs.replace(row, age_s=now - at_s) for at_s, row in reversed(self._decisions)]
        return CopiesReply(hot=hot, workers=workers, decisions=decisions[:limit], blocks=len(self.map),
                           copies=self.map.copies, unseen=self.map.unseen_blocks, answered_by=self.name,
                           leader=leader, term=self._term)

    # Knowing.

    def _use(self, placed: Placed, now: float) -> None:
        """A request was placed: its whole prompt is used once. Another attempt is no other use."""
        if placed.placement.attempt == 0 and len(placed.keys) % 32 == 0:
            self.heat.use(unpack_keys(placed.keys)[:self.policy.max_path], now=now)

    def _follow(self, changes: list[Change], out: list[Effect], now: float) -> None:
        for change in changes:
            match change:
                case Joined(hello):
                    self._drop(hello.worker, now, "it began anew")
                    fresh = now - self._started_s > _LEARN_S
                    self._fleet.join(hello, now=now, fresh=fresh)
                    self.map.replace(hello.worker, ())
                    self._act(self._feed.joined(hello.worker, hello.incarnation, now), out)
                case Changed(worker, incarnation, before, after, why):
                    if after == "dead":
                        self._drop(worker, now, f"it died: {why}")
                    elif before == "dead":
                        hello = self._membership.members[worker].hello
                        self._fleet.join(hello, now=now, fresh=False)
                        self.map.replace(worker, ())
                        self._act(self._feed.joined(worker, incarnation, now), out)
                case Unknown():
                    self._call_roll(out, now)
                case Conflict():
                    pass  # a worker with a conflicting cache spec is the conductor's to refuse
                case _:
                    raise Bug(f"the planner knows no change {change!r}")

    def _drop(self, worker: WorkerId, now: float, why: str) -> None:
        """Nothing of this life of the worker counts any more."""
        self._feed.left(worker)
        self._fleet.leave(worker)
        self._filling.pop(worker, None)
        self._scanned.pop(worker, None)
        self.map.remove(worker)
        self._sweeping = True
        draining = self._drains.get(worker)
        if draining is not None:
            self._end_drain(draining, "done" if draining.retire_asked else "failed", now,
                            "" if draining.retire_asked else f"{why} before all was copied")

    def _call_roll(self, out: list[Effect], now: float) -> None:
        if now - self._rolled_s >= ROLL_PAUSE_S:
            self._rolled_s = now
            out.append(Publish(self.addresses.rollcall, Rollcall(asker=self.name)))

    def _act(self, actions: Iterable[Action], out: list[Effect]) -> None:
        for action in actions:
            match action:
                case Ask():
                    out.append(Request(self.addresses.sync(action.worker), action.since, action, 5.0))
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
        room = self.policy.fill_step
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

    def _forget(self, now: float) -> None:
        """What is over."""
        for operation, (_, until_s) in list(self._landing.items()):
            if until_s <= now:
                del self._landing[operation]
        if self._pauses:
            limit_s = now - self.policy.suspend_limit_s
            self._pauses = {place: pause for place, pause in self._pauses.items() if pause[1] > limit_s}

    # Leading.

    def _lead(self, led: Led, now: float) -> None:
        began = not self.leads(now) or led.term != self._term
        self._term, self._until_s = led.term, led.until_s
        if began:
            self._led_s = self._plan_at_s = self._quota_at_s = self._orders_at_s = self._protect_at_s = now
            self._trim_at_s = now + self.policy.settle_s
            self._drains.clear()
            self._progress.clear()
            self._ended.clear()
            self._orders = None

    def _has_learnt(self, now: float) -> bool:
        """Whether the map is good enough to act on."""
        if now - self._started_s < _LEARN_S:
            return False
        if now - max(self._led_s, self._started_s) > _LEARN_LIMIT_S:
            return True
        return not self._filling and all(self._feed.is_converged(worker) for worker in self._fleet.peers)

    def _plan(self, out: list[Effect], now: float) -> None:
        if now >= self._orders_at_s and not self._reading:
            self._reading, self._orders_at_s = True, now + self.policy.orders_s
            news = {**self._progress, **self._ended}
            self._progress = {}
            out.append(KeepOrders(tuple(news.values()), self._term))
        if self._orders is None or not self._has_learnt(now):
            return
        if now >= self._quota_at_s:
            self._quota_at_s = now + self.policy.quota_s
            self._send_quotas(out)
        if self._drains and now >= self._drain_at_s:
            self._drain_at_s = now + self.policy.drain_step_s
            for draining in list(self._drains.values()):
                self._drain(draining, out, now)
        if now >= self._plan_at_s:
            self._plan_at_s = now + self.policy.plan_s
            self._replicate(out, now)
        if now >= self._protect_at_s:
            self._protect_at_s = now + self.policy.protect_ttl_s / 3
            self._protect(out, now)
        if now >= self._trim_at_s:
            self._trim_at_s = now + self.policy.trim_s
            self._trim(out, now)

    def _decided(self, what: str, worker: WorkerId, blocks: int, nbytes: int, why: str, now: float) -> None:
        self._decisions.append((now, DecisionRow(age_s=0.0, what=what, worker=worker, blocks=blocks, nbytes=nbytes,
                                                 why=why)))

    # Replicating.

    def _wanted(self, heat: float) -> int:
        """Copies that a block of this heat should have."""
        if heat < self.policy.hot_uses:
            return 1
        return min(self.policy.max_wanted, 2 + int(math.log2(heat / self.policy.hot_uses)))

    def _kept(self, heat: float) -> int:
        """Copies that are left to a block of this heat: what it wanted when it was twice as hot, so that a prefix whose
        heat goes up and down a little is not copied and dropped in turn."""
        return self._wanted(2 * heat)

    def _frontier(self, now: float) -> list[BlockKey]:
        """Ends of hot prefixes, hottest first."""
        hot = list(self.heat.hot(now=now))
        inner = {place.parent for key in hot if (place := self.map.get(key)) is not None}
        return [key for key in hot if key not in inner]

    def _is_leaving(self, worker: WorkerId) -> bool:
        member = self._membership.get(worker)
        return worker in self._drains or member is None or member.draining

    def _staying(self) -> int:
        """The bits of workers whose copies will be there tomorrow."""
        return sum(self.map.bit(worker) for worker in self._fleet.peers if not self._is_leaving(worker))

    def _promised(self) -> dict[BlockKey, int]:
        """{block: bits of workers to which it is under way}."""
        promised: dict[BlockKey, int] = {}
        for copy in [*self._copies.values(), *(copy for copy, _ in self._landing.values())]:
            bit = self.map.bit(copy.target)
            for key in copy.keys:
                promised[key] = promised.get(key, 0) | bit
        return promised

    def _replicate(self, out: list[Effect], now: float) -> None:
        staying, promised = self._staying(), self._promised()
        budget = self.policy.plan_blocks
        for prefix in self._frontier(now)[:self.policy.max_frontier]:
            if len(self._copies) >= self.policy.copies_limit or budget <= 0:
                return
            path = self.map.path(prefix, limit=self.policy.max_path)
            budget -= len(path)
            if not path:
                continue
            masks = [(self.map.mask(key) | promised.get(key, 0)) & staying for key in path]
            wants = [self._wanted(self.heat.of(key, now=now)) for key in path]
            for wanted in range(2, max(wants) + 1):
                # Heat falls along a chain, but for what was forgotten: the part that wants so many copies is a prefix.
                length = next((i for i, want in enumerate(wants) if want < wanted), len(path))
                if not length:
                    break
                holding = _all(masks[:length])
                if holding.bit_count() >= wanted:
                    continue
                heat = self.heat.of(path[length - 1], now=now)
                why = f"heat {heat:.1f} wants {wanted} copies of {length} blocks, {holding.bit_count()} have them"
                copy = self._copy(path[:length], masks[:length], holding, out, now, why)
                if copy is not None:
                    for key in copy.keys:
                        promised[key] = promised.get(key, 0) | self.map.bit(copy.target)
                break  # one copy of a chain at a time: the next one may come from the first

    def _copy(self, path: Sequence[BlockKey], masks: Sequence[int], holding: int, out: list[Effect], now: float,
              why: str, *, drain: WorkerId | None = None, into: str = "free") -> Copy | None:
        """Asks for the first batch of ``path`` that the best worker lacks; ``None`` when there is none now.

        ``masks`` are the holders of each block that count, promised copies among them; ``holding`` those of all.
        ``into`` is ``free`` when others' blocks may go for it, ``empty`` when not.
        """
        if len(self._copies) >= self.policy.copies_limit:
            return None
        spec = self._spec_of(path)
        on_host = Counter(self._fleet.peers[worker].host for worker in self.map.named(holding)
                          if worker in self._fleet.peers)
        candidates: list[tuple[tuple[Any, ...], Peer, int]] = []
        for peer in self._fleet.targets(spec, now=now):
            bit = self.map.bit(peer.id)
            if bit & holding or self._is_leaving(peer.id) or self._is_paused(peer.id, path[-1], now):
                continue
            have = leading(masks, bit)
            room = self._fleet.free_blocks(peer.id) if into == "free" else self._fleet.empty_blocks(peer.id)
            made = len(self.map.ours_of(peer.id)) + len(path) - have
            if room < len(path) - have or (
                    drain is None and made > self.policy.made_share * peer.hello.capacity_blocks):
                continue
            load = self._fleet.load(peer.id, now=now)
            # A drain keeps chains together; a copy for heat goes where there is none.
            score = ((-min(have, 1), peer.role_rank, load, peer.id) if drain is not None else
                     (on_host[peer.host], peer.role_rank, load, -have, peer.id))
            candidates.append((score, peer, have))
        for _, target, have in sorted(candidates, key=lambda candidate: candidate[0]):
            keys = path[have:have + self.policy.batch_blocks]
            chosen = self._source(keys, target, now)
            if chosen is not None:
                source, run = chosen
                break
        else:
            return None
        blocks: list[StoredBlock] = []
        nbytes = 0
        for key in keys[:run]:
            place = self.map.get(key)
            assert place is not None, "the source holds it"
            if blocks and nbytes + place.nbytes > self.policy.batch_bytes:
                break
            nbytes += place.nbytes
            blocks.append(msgspec.structs.replace(place.block(key), origin="received", source=source,
                                                  request=MADE_FOR))
        self._operations += 1
        operation = OperationId(f"{self.name}-{self._term}-{self._operations}")
        copy = Copy(operation, source, target.id, tuple(block.key for block in blocks), nbytes, path[-1], drain)
        deadline_s = self.policy.copy_fixed_s + nbytes / self.policy.slowest_bytes_per_s
        self._copies[operation] = copy
        self._fleet.sent(source, target.id, nbytes, now=now)
        out.append(Request(self.addresses.pool(target.id), Replicate(
            operation=operation, source=source, blocks=blocks, deadline_s=deadline_s), copy,
            deadline_s + self.policy.ask_s))
        near = "the same host" if self._fleet.peers[source].host == target.host else "another host"
        self._decided("drain" if drain else "replicate", target.id, len(blocks), nbytes,
                      f"{why}; from {source} on {near}, {on_host[target.host]} copies on {target.host} so far", now)
        return copy

    def _spec_of(self, path: Sequence[BlockKey]) -> str:
        """The cache spec of a chain: that of whoever holds it."""
        for worker in self.map.holders(path[0]):
            member = self._membership.get(worker)
            if member is not None:
                return member.spec
        return ""

    def _source(self, keys: Sequence[BlockKey], target: Peer, now: float) -> tuple[WorkerId, int] | None:
        """Who shall send, and how many leading ``keys`` it has: most of them, then nearest, then least busy."""
        masks = [self.map.mask(key) for key in keys]
        best: tuple[tuple[Any, ...], WorkerId, int] | None = None
        for worker in self.map.named(masks[0]):
            peer = self._fleet.peers.get(worker)
            if (peer is None or worker == target.id or peer.sending >= self.policy.send_limit
                    or not self._fleet.is_usable(worker, now=now)
                    or self._fleet.are_apart(worker, target.id, now=now)):
                continue
            run = leading(masks, self.map.bit(worker))
            score = (-run, peer.host != target.host, peer.sending, self._fleet.queued(worker), worker)
            if best is None or score < best[0]:
                best = (score, worker, run)
        return None if best is None else (best[1], best[2])

    def _is_paused(self, target: WorkerId, prefix: BlockKey, now: float) -> bool:
        pause = self._pauses.get((target, prefix))
        return pause is not None and now < pause[1]

    def _copied(self, copy: Copy, reply: Any, now: float) -> None:
        """A copy was answered, or was not (``reply`` says why)."""
        if self._copies.pop(copy.operation, None) is None:
            return
        self._fleet.over(copy.source, copy.target)
        held, answered = 0, isinstance(reply, Replicated)
        if isinstance(reply, Replicated):
            held, why = max(0, min(reply.blocks, len(copy.keys))), reply.why
            self._nbytes_copied += max(0, reply.nbytes)
        else:
            why = str(getattr(reply, "message", reply))
        draining = self._drains.get(copy.drain) if copy.drain is not None else None
        if held:
            self._landing[copy.operation] = (
                Copy(copy.operation, copy.source, copy.target, copy.keys[:held], copy.nbytes, copy.prefix, copy.drain),
                now + _LANDING_S)
            if draining is not None:
                draining.is_copied(copy.keys[:held])
                draining.nbytes += reply.nbytes
        self._outcomes["copy", "done"] += held
        self._outcomes["copy", "failed"] += len(copy.keys) - held
        place = (copy.target, copy.prefix)
        if held == len(copy.keys):
            self._fleet.pair_succeeded(copy.source, copy.target)
            self._pauses.pop(place, None)
            return
        failures = self._pauses.get(place, (0, 0.0))[0]
        pause_s = min(self.policy.suspend_limit_s, self.policy.suspend_first_s * 2.0 ** min(failures, 30))
        if len(self._pauses) >= _MOST_PAUSES:
            self._pauses.clear()
        self._pauses[place] = (failures + 1, now + pause_s)
        if draining is not None:
            draining.tries[copy.prefix] += 1
        apart = ""
        if not answered:
            apart = f"; {copy.target} is left alone for {self._fleet.failed(copy.target, now=now):.0f} s"
        elif why not in _NOT_THEIR_FAULT:
            apart_s = self._fleet.pair_failed(copy.source, copy.target, now=now)
            apart = f"; {copy.source} and {copy.target} are kept apart for {apart_s:.0f} s"
        self._decided("failed", copy.target, len(copy.keys) - held, copy.nbytes,
                      f"{why or 'no reason given'}; this prefix again there in {pause_s:.0f} s{apart}", now)

    # Protecting and trimming.

    def _ask(self, kind: str, worker: WorkerId, message: Any, blocks: int, out: list[Effect]) -> None:
        peer = self._fleet.peers[worker]
        peer.busy.add(kind)
        out.append(Request(self.addresses.pool(worker), message,
                           Side(kind, worker, peer.hello.incarnation, blocks), self.policy.ask_s))

    def _protect(self, out: list[Effect], now: float) -> None:
        staying = self._staying()
        lists: dict[WorkerId, list[BlockKey]] = {}
        for key in self.heat.hot(now=now):
            mask = self.map.mask(key) & staying
            if mask.bit_count() == 1:
                worker = self.map.named(mask)[0]
                keys = lists.setdefault(worker, [])
                if len(keys) < self.policy.protect_share * self._fleet.peers[worker].hello.capacity_blocks:
                    keys.append(key)
        for worker, keys in sorted(lists.items()):
            if keys and "protect" not in self._fleet.peers[worker].busy and self._fleet.is_usable(worker, now=now):
                self._ask("protect", worker, Protect(keys=pack_keys(keys), ttl_s=self.policy.protect_ttl_s),
                          len(keys), out)

    def _trim(self, out: list[Effect], now: float) -> None:
        """Copies that are too many, deepest first. What one worker is asked to drop, the next must keep."""
        staying = self._staying() & sum(self.map.bit(worker) for worker in self._fleet.peers
                                        if self._membership.members[worker].state == "alive")
        asked: dict[BlockKey, int] = {}
        promised = self._promised()
        order = sorted(self._fleet.peers, key=lambda worker: (-self._fleet.fullness(worker), worker))
        for worker in order:
            peer = self._fleet.peers[worker]
            if "trim" in peer.busy or self._is_leaving(worker) or not self._fleet.is_usable(worker, now=now):
                continue
            bit = self.map.bit(worker)
            keys = []
            for key in [*self.map.ours_of(worker), *self._old_copies(worker, now)]:
                if key in promised:
                    continue
                others = (self.map.mask(key) & staying & ~bit).bit_count() - asked.get(key, 0)
                if others >= self._kept(self.heat.of(key, now=now)) and not self.heat.is_hot(key):
                    keys.append(key)
            keys = sorted(set(keys), key=self._deepest_first)[:self.policy.trim_blocks]
            if keys:
                for key in keys:
                    asked[key] = asked.get(key, 0) + 1
                self._ask("trim", worker, Trim(keys=pack_keys(keys)), len(keys), out)
                self._decided("trim", worker, len(keys), 0, "cold, and others have them", now)

    def _deepest_first(self, key: BlockKey) -> tuple[int, BlockKey]:
        place = self.map.get(key)
        return (-(place.depth if place is not None else 0), key)

    def _old_copies(self, worker: WorkerId, now: float) -> list[BlockKey]:
        """The next part of the older half of what a full worker holds, without those used lately."""
        if (self._fleet.fullness(worker) < self.policy.full
                or now - self._started_s < 2 * self.policy.half_life_s):  # too young to know what is cold
            return []
        half = self.map.blocks_of(worker) // 2
        begin = self._scanned.get(worker, 0)
        begin = begin if begin < half else 0
        end = min(half, begin + self.policy.scan_blocks)
        self._scanned[worker] = end
        keys = [key for i, key in zip(range(end), self.map.keys_of(worker), strict=False) if i >= begin]
        return [key for key in keys if self.heat.of(key, now=now) < self.policy.hot_uses / 16]

    def _answered(self, side: Side, reply: Any, now: float) -> None:
        peer = self._fleet.peers.get(side.worker)
        if peer is None or peer.hello.incarnation != side.incarnation:
            return
        peer.busy.discard(side.kind)
        good = not isinstance(reply, str) and not hasattr(reply, "message")
        blocks = reply.blocks if isinstance(reply, Trimmed | Retired) else side.blocks if good else 0
        self._outcomes[side.kind, "done" if good else "failed"] += blocks if good else side.blocks
        if not good:
            why = str(getattr(reply, "message", reply))
            self._decided("failed", side.worker, side.blocks, 0, f"{side.kind}: {why}", now)
            if side.kind != "retire":
                self._fleet.failed(side.worker, now=now)
        draining = self._drains.get(side.worker)
        if side.kind == "retire" and draining is not None:
            self._retired(draining, good, reply, now)

    # Quotas.

    def _send_quotas(self, out: list[Effect]) -> None:
        """Everybody's budgets, to everybody: a worker that missed them, or is new, learns them all the same."""
        assert self._orders is not None, "asked for before anything is planned"
        capacity = {worker: peer.capacity_bytes for worker, peer in sorted(self._fleet.peers.items())
                    if not self._is_leaving(worker)}
        budgets: dict[WorkerId, list[TenantQuota]] = {worker: [] for worker in capacity}
        for tenant, quota in self._orders.quotas.items():
            usage = {worker: self.map.usage(worker, tenant) for worker in capacity}
            for worker, nbytes in split_quota(quota, usage, capacity).items():
                budgets[worker].append(TenantQuota(tenant=tenant, nbytes=nbytes))
        for worker, rows in budgets.items():
            out.append(Publish(self.addresses.quotas(worker), Quotas(worker=worker, budgets=rows)))

    # Draining.

    def _take_orders(self, read: OrdersRead, now: float) -> None:
        changed = self._orders is None or self._orders.quotas != read.orders.quotas
        self._orders = read.orders
        if changed:
            self._quota_at_s = now
        for name, drain in list(self._ended.items()):
            known = next((d for d in read.orders.drains if (d.worker, d.ordered_at_s) == name), None)
            if known is None or known.state == drain.state:
                del self._ended[name]
        if not self.leads(now):
            return
        for order in read.orders.drains:
            draining = self._drains.get(order.worker)
            name = (order.worker, order.ordered_at_s)
            if order.state in OVER or name in self._ended:
                continue
            if draining is not None and draining.order.ordered_at_s == order.ordered_at_s:
                if order.cancel:
                    self._end_drain(draining, "cancelled", now, "somebody cancelled it")
                continue
            left_s = min(order.timeout_s, order.ordered_at_s + order.timeout_s - read.wall_s)
            draining = Draining(order, now + left_s)
            if order.cancel:
                self._end_drain(draining, "cancelled", now, "somebody cancelled it")
            elif self.life(order.worker) != order.incarnation:
                self._end_drain(draining, "failed", now, "this life of the worker is over")
            else:
                self._drains[order.worker] = draining
                draining.begin_scan(self.map.keys_of(order.worker))
                self._drain_at_s = now
                self._decided("drain", order.worker, self.map.blocks_of(order.worker), 0, "ordered", now)

    def _end_drain(self, draining: Draining, state: str, now: float, why: str) -> None:
        self._drains.pop(draining.order.worker, None)
        report = draining.report(state, why)  # type: ignore[arg-type]
        self._ended[report.worker, report.ordered_at_s] = report
        self._progress.pop((report.worker, report.ordered_at_s), None)
        self._decided("drain", report.worker, report.copied, report.nbytes, f"{state}: {report.why or 'all copied'}",
                      now)

    def _drain(self, draining: Draining, out: list[Effect], now: float) -> None:
        worker = draining.order.worker
        if now >= draining.deadline_s:
            left = len(draining.last)
            self._end_drain(draining, "failed", now, f"time is over; {left} of {draining.blocks} blocks have no other "
                            "copy yet, and the worker keeps what it has")
            return
        if draining.scanning:
            self._scan(draining, now)
        elif draining.retiring:
            self._retire(draining, out, now)
        elif draining.todo:
            self._copy_out(draining, out, now)
        elif not any(copy.drain == worker for copy in self._copies.values()):
            if draining.rounds < self.policy.drain_rounds:  # what came while we copied
                draining.begin_scan(self.map.keys_of(worker))
            else:
                draining.retiring = True
        report = draining.report()
        self._progress[report.worker, report.ordered_at_s] = report

    def _scan(self, draining: Draining, now: float) -> None:
        others = self._staying()
        promised = self._promised()
        keys = draining.next_keys(self.policy.fill_step)
        for key in keys:
            if (self.map.holds(draining.order.worker, key)
                    and not (self.map.mask(key) | promised.get(key, 0)) & others):
                draining.found_last(key)
        if not keys:
            draining.end_scan(lambda key: place.parent if (place := self.map.get(key)) is not None else None,
                              lambda key: self.heat.of(key, now=now))
            if not draining.todo:
                draining.rounds = self.policy.drain_rounds

    def _copy_out(self, draining: Draining, out: list[Effect], now: float) -> None:
        worker, others, promised = draining.order.worker, self._staying(), self._promised()
        under_way = sum(copy.drain == worker for copy in self._copies.values())
        for _ in range(min(self.policy.drain_look, len(draining.todo))):
            if under_way >= self.policy.drain_copies:
                return
            prefix = draining.todo.popleft()
            path = self.map.path(prefix, limit=self.policy.max_path)
            if not self.map.holds(worker, prefix):
                draining.is_gone([prefix])
                continue
            if not path:
                draining.give_up([prefix], "part of the chain before them is gone")
                continue
            masks = [self.map.mask(key) & others for key in path]
            draining.is_copied(key for key, mask in zip(path, masks, strict=True) if mask)
            if masks[-1]:
                continue
            masks = [mask | promised.get(key, 0) & others for key, mask in zip(path, masks, strict=True)]
            if masks[-1]:  # under way
                draining.todo.append(prefix)
                continue
            spec = self._spec_of(path)
            if draining.tries[prefix] >= self.policy.drain_tries:
                draining.give_up(path, "copying them failed")
                continue
            heat = self.heat.of(prefix, now=now)
            hot = heat >= self.policy.hot_uses / 16
            copy = self._copy(path, masks, _all(masks), out, now, f"{worker} is drained, heat {heat:.1f}",
                              drain=worker, into="free" if hot else "empty")
            if copy is not None:
                under_way += 1
                for key in copy.keys:
                    promised[key] = promised.get(key, 0) | self.map.bit(copy.target)
                draining.todo.append(prefix)
            elif not self._could_take(spec, len(path), "free" if hot else "empty"):
                draining.give_up(path, "no other worker has room for them" if hot else
                                 "cold, and no other worker has empty room for them")
            else:
                draining.todo.append(prefix)

    def _could_take(self, spec: str, blocks: int, into: str) -> bool:
        """Whether some worker could take so many blocks, if not now then later."""
        room = self._fleet.free_blocks if into == "free" else self._fleet.empty_blocks
        return any(not self._is_leaving(worker) and self._membership.members[worker].spec == spec
                   and room(worker) >= min(blocks, self.policy.batch_blocks) for worker in self._fleet.peers)

    def _retire(self, draining: Draining, out: list[Effect], now: float) -> None:
        worker = draining.order.worker
        if "retire" in self._fleet.peers[worker].busy or now < draining.retire_not_before_s:
            return
        draining.retire_asked = True
        self._ask("retire", worker, Retire(), self.map.blocks_of(worker), out)

    def _retired(self, draining: Draining, good: bool, reply: Any, now: float) -> None:
        if good:
            self._end_drain(draining, "done", now, "")
            return
        draining.retire_tries += 1
        draining.retire_asked = False
        draining.retire_not_before_s = now + self.policy.suspend_first_s
        if draining.retire_tries >= self.policy.drain_tries:
            self._end_drain(draining, "failed", now, "all was copied, but the worker did not let go: "
                            + str(getattr(reply, "message", reply)))


def _all(masks: Sequence[int]) -> int:
    """The bits that all have."""
    holding = masks[0]
    for mask in masks[1:]:
        holding &= mask
    return holding
