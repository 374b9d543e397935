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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.store_manager.core.asking import Asker, Side
from services.store_manager.core.copying import Copier, Copy, all_of
from services.store_manager.core.drains import Drains, OrdersRead
from services.store_manager.core.events import Deaf, Led, Reconnected, Started, Unled
from services.store_manager.core.heat import HotEnds
from services.store_manager.core.keeping import Keeper
from services.store_manager.core.notes import Notes
from services.store_manager.core.orders import Drain, Orders
from services.store_manager.core.picture import TURN_S, Addresses, Picture
from services.store_manager.core.policy import PlannerPolicy
from shared.errors import Bug
from shared.ids import BlockKey
from shared.machine import Answered, Effect, Unanswered, Woke
from shared.messages import Bye, CopiesReply, Evicted, Hello, Holder, HotRow, Load, Placed, Stored, WorkerRow


class OrdersFailed(msgspec.Struct, frozen=True):
    """The record could not be read or written.

    ``damaged``: it is there and nothing that we can read. What does not depend on it goes on then.
    """

    damaged: bool = False


class KeepOrders(Effect, frozen=True):
    """Read the record, write ``progress`` into it if there is any; comes back as OrdersRead or OrdersFailed."""

    progress: tuple[Drain, ...]
    term: int


Event = (Started | Deaf | Reconnected | Led | Unled | OrdersRead | OrdersFailed | Hello | Load | Bye | Stored | Evicted
         | Placed | Answered | Unanswered | Woke)


@dataclass(frozen=True)
class Statistics:
    """The machine's state in numbers, for metrics."""

    blocks: int
    copies: int
    nbytes: int
    """Memory the replica map takes, about."""
    unseen: int
    hot: int
    under_way: int
    outcomes: Mapping[tuple[str, str], int]
    """{(what was asked, what came of it): blocks}"""
    nbytes_copied: int
    suspended: int


class Planner:
    """See the module. ``handle`` is the only door."""

    def __init__(self, name: str, addresses: Addresses, policy: PlannerPolicy) -> None:
        self._name, self._policy = name, policy
        self.picture = Picture(name, addresses, policy)
        """For reading."""
        self._notes = Notes()
        self._copier = Copier(name, addresses, policy, self.picture, self._notes)
        self._asker = Asker(addresses, policy, self.picture, self._notes)
        self._drains = Drains(policy, self.picture, self._copier, self._asker, self._notes)
        self._keeper = Keeper(addresses, policy, self.picture, self._copier, self._asker, self._notes)
        self._now_s = 0.0
        self._term = 0
        self._until_s = self._led_s = -math.inf
        #: when each look is due
        self._plan_at_s = self._trim_at_s = self._protect_at_s = self._quota_at_s = self._orders_at_s = -math.inf
        self._reading = False
        self._ends = HotEnds(self.picture.heat, self.picture.map.parent)
        #: those whose turn is still to come, in order of heat
        self._to_look_at: deque[BlockKey] = deque()
        self._orders: Orders | None = None
        self._orders_damaged = False
        """As read in this term."""

    def handle(self, event: Event, *, now: float) -> Sequence[Effect]:
        """Applies ``event``; see the module."""
        self._now_s = now
        out: list[Effect] = []
        if not self.picture.hear(event, out, now=now):
            self._hear(event, now)
        self.picture.advance(out, now=now)
        self._copier.forget(now)
        for worker, why in self.picture.gone:
            self._drains.died(worker, why, now=now)
        self.picture.gone.clear()
        if self.leads(now):
            self._plan(out, now)
        return out

    def next_wake(self) -> float | None:
        """The next step of anything."""
        if math.isinf(self.picture.started_s):
            return None
        times = [self.picture.next_wake(self._now_s)]
        if self.leads(self._now_s):
            times.append(self._until_s)
            times += [at_s for at_s in (self._plan_at_s, self._trim_at_s, self._protect_at_s, self._quota_at_s)
                      if at_s > self._now_s]
            if not self._reading:
                times.append(self._orders_at_s)
            if self._drains:
                times.append(self._drains.due_s)
        return max(min(times), self._now_s + TURN_S / 10)

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when the state contradicts itself."""
        self.picture.check_invariants()
        self._copier.check_invariants()

    # For the shell.

    def leads(self, now: float) -> bool:
        """Whether we may act."""
        return now < self._until_s

    def statistics(self) -> Statistics:
        """The state in numbers."""
        picture = self.picture
        return Statistics(
            blocks=len(picture.map), copies=picture.map.copies, nbytes=picture.map.nbytes,
            unseen=picture.map.unseen_blocks, hot=picture.heat.hot_count, under_way=len(self._copier.under_way),
            outcomes=dict(self._notes.outcomes), nbytes_copied=self._notes.nbytes_copied,
            suspended=sum(peer.suspended_until_s > self._now_s for peer in picture.fleet.peers.values()))

    def describe(self, limit: int, *, leader: str, now: float) -> CopiesReply:
        """The state for people: hot prefixes, workers, and the latest decisions."""
        picture, peers = self.picture, self.picture.fleet.peers
        hot = []
        if self._ends.found == [] or picture.heat.hot_count <= self._policy.few_hot:
            self._look_for_all_ends(now)
        for key in self._ends.found[:limit]:
            place = picture.map.get(key)
            if place is None:
                continue
            heat = picture.heat.of(key, now=now)
            hot.append(HotRow(
                key=key, blocks=place.depth + 1, tenant=place.tenant, tokens=(place.depth + 1) * place.tokens,
                heat=heat, wanted=self._policy.wanted(heat),
                holders=[Holder(worker=worker, host=peers[worker].host, tiers=[str(tier) for tier in tiers])
                         for worker, tiers in picture.map.tiers(key).items() if worker in peers]))
        workers = [
            WorkerRow(worker=worker, role=peer.hello.role, host=peer.host,
                      state="draining" if picture.is_leaving(worker) else picture.membership.members[worker].state,
                      blocks=picture.map.blocks_of(worker), nbytes=picture.map.bytes_of(worker),
                      made=len(picture.map.ours_of(worker)), weight=picture.fleet.weight(worker, now=now),
                      suspended_s=max(0.0, peer.suspended_until_s - now))
            for worker, peer in sorted(peers.items())]
        return CopiesReply(hot=hot, workers=workers, decisions=self._notes.latest(now)[:limit], blocks=len(picture.map),
                           copies=picture.map.copies, unseen=picture.unseen(), answered_by=self._name,
                           leader=leader, term=self._term)

    # Leading.

    def _hear(self, event: Any, now: float) -> None:
        match event:
            case Answered(tag=Copy() as copy) | Unanswered(tag=Copy() as copy):
                landed = self._copier.answered(copy, _reply(event), now=now)
                if landed is not None:
                    self._drains.landed(landed)
            case Answered(tag=Side() as side) | Unanswered(tag=Side() as side):
                why = self._asker.answered(side, _reply(event), now=now)
                if side.kind == "retire" and why is not None:
                    self._drains.retired(side.worker, why, now=now)
            case Led():
                self._lead(event, now)
            case Unled():
                self._until_s = -math.inf
            case OrdersRead():
                self._reading = False
                if self.leads(now):
                    if self._orders is None or self._orders.quotas != event.orders.quotas:
                        self._quota_at_s = now
                    self._orders, self._orders_damaged = event.orders, False
                    self._drains.take(event, now=now)
            case OrdersFailed():
                self._reading = False
                self._orders_damaged = event.damaged
            case Woke():
                pass  # what is due shows when we plan
            case _:
                raise Bug(f"the planner knows no event {event!r}")

    def _lead(self, led: Led, now: float) -> None:
        began = not self.leads(now) or led.term != self._term
        self._term, self._until_s = led.term, led.until_s
        if began:
            self._led_s = self._plan_at_s = self._quota_at_s = self._orders_at_s = self._protect_at_s = now
            self._trim_at_s = now + self._policy.settle_s
            self._drains.forget()
            self._keeper.forget()
            self._orders = None

    def _plan(self, out: list[Effect], now: float) -> None:
        policy = self._policy
        if now >= self._orders_at_s and not self._reading:
            self._reading, self._orders_at_s = True, now + policy.orders_s
            out.append(KeepOrders(self._drains.progress(), self._term))
        knows = self._orders is not None or self._orders_damaged
        if not knows or not self.picture.has_learnt(now, since_s=self._led_s):
            return
        if self._orders is not None and now >= self._quota_at_s:  # without orders workers keep to what they heard last
            self._quota_at_s = now + policy.quota_s
            self._keeper.send_quotas(self._orders.quotas, out)
        if self._drains and now >= self._drains.due_s:
            self._drains.step(out, now=now)
        if now >= self._plan_at_s:
            self._plan_at_s = now + policy.plan_s
            self._replicate(out, now)
        if now >= self._protect_at_s:
            more = self._keeper.protect(out, now=now)
            self._protect_at_s = now + (TURN_S if more else policy.protect_ttl_s / 3)
        if now >= self._trim_at_s:
            self._trim_at_s = now + policy.trim_s
            self._keeper.trim(out, now=now)

    def _look_for_all_ends(self, now: float) -> None:
        while self._ends.look(self._policy.fill_step, now=now):
            pass

    def _replicate(self, out: list[Effect], now: float) -> None:
        """Asks for one copy of each hot prefix that has too few; of many prefixes a part each time, in turn."""
        policy, picture = self._policy, self.picture
        if picture.heat.hot_count <= policy.few_hot:
            self._look_for_all_ends(now)
            self._to_look_at = deque(self._ends.found)
        elif not self._to_look_at:
            if self._ends.look(policy.fill_step, now=now):
                self._plan_at_s = now + TURN_S
                return
            self._to_look_at = deque(self._ends.found)
        staying, promised, budget = picture.staying(), self._copier.promised(), policy.plan_blocks
        while self._to_look_at and not self._copier.is_full and budget > 0:
            path = picture.map.path(self._to_look_at.popleft(), limit=policy.max_path)
            budget -= 1 + len(path)
            if not path:
                continue
            heats, masks = picture.heat.levels(path, now=now), picture.map.masks(path)
            masks = [(mask | promised.get(key, 0)) & staying for key, mask in zip(path, masks, strict=True)]
            for wanted in range(2, policy.wanted(max(heats)) + 1):
                # Heat falls along a chain, but for what was forgotten: the part that wants so many copies is a prefix.
                least = policy.heat_for(wanted)
                length = next((i for i, heat in enumerate(heats) if heat < least), len(path))
                if not length:
                    break
                holding = all_of(masks[:length])
                if holding.bit_count() >= wanted:
                    continue
                why = (f"heat {heats[length - 1]:.1f} wants {wanted} copies of {length} blocks, "
                       f"{holding.bit_count()} have them")
                copy = self._copier.copy(path[:length], masks[:length], holding, out, now, why)
                if copy is not None:
                    for key in copy.keys:
                        promised[key] = promised.get(key, 0) | picture.map.bit(copy.target)
                break  # one copy of a chain at a time: the next one may come from the first


def _reply(event: Answered | Unanswered) -> Any:
    return event.message if isinstance(event, Answered) else event.why
