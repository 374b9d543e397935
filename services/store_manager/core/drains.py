"""The drains under way: what is ordered, what is copied next, how each ends.

What people order stands on the record, and so does how far it is: a new leader goes on with it. Every drain ends:
done, failed (time over, worker dead, it does not let go) or cancelled, with a reason. Hot blocks are copied out
whatever has to go for them, cold ones only into empty room, and what has none stays behind and is counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from services.store_manager.core.asking import Asker
from services.store_manager.core.copying import Copier, Landed, all_of
from services.store_manager.core.draining import Draining
from services.store_manager.core.notes import Notes
from services.store_manager.core.orders import OVER, Drain, DrainState, Orders
from services.store_manager.core.picture import Picture
from services.store_manager.core.policy import PlannerPolicy
from shared.ids import Incarnation, WorkerId
from shared.machine import Effect
from shared.messages import Retire

_Name = tuple[WorkerId, Incarnation, float]


class OrdersRead(msgspec.Struct, frozen=True):
    """What people want, as the record says at ``wall_s`` (Unix seconds)."""

    orders: Orders
    wall_s: float


class Drains:
    """See the module. Only a leader's move."""

    def __init__(self, policy: PlannerPolicy, picture: Picture, copier: Copier, asker: Asker, notes: Notes) -> None:
        self._policy, self._picture, self._copier, self._asker, self._notes = policy, picture, copier, asker, notes
        self.due_s = float("-inf")
        """When :meth:`step` is to be called next, if there are any."""
        self._running: dict[WorkerId, Draining] = {}
        self._progress: dict[_Name, Drain] = {}
        #: ends of drains, until the record has them
        self._ended: dict[_Name, Drain] = {}

    def __len__(self) -> int:
        """Drains under way."""
        return len(self._running)

    def take(self, read: OrdersRead, *, now: float) -> None:
        """Begins what was ordered, goes on with what another leader began, ends what somebody cancelled."""
        for name, drain in list(self._ended.items()):
            on_record = next((d for d in read.orders.drains if _name(d) == name), None)
            if on_record is None or on_record.state == drain.state:
                del self._ended[name]
        for order in read.orders.drains:
            if order.state in OVER or _name(order) in self._ended:
                continue
            draining = self._running.get(order.worker)
            if draining is not None and _name(draining.order) == _name(order):
                if order.cancel:
                    self._end(draining, "cancelled", now, "somebody cancelled it")
                continue
            left_s = min(order.timeout_s, order.ordered_at_s + order.timeout_s - read.wall_s)
            draining = Draining(order, now + left_s)
            if order.cancel:
                self._end(draining, "cancelled", now, "somebody cancelled it")
            elif self._picture.life(order.worker) != order.incarnation:
                self._end(draining, "failed", now, "this life of the worker is over")
            else:
                self._running[order.worker] = draining
                self._picture.leaving.add(order.worker)
                draining.begin_scan(self._picture.map.keys_of(order.worker))
                self.due_s = now
                self._notes.decided("drain", order.worker, self._picture.map.blocks_of(order.worker), 0, "ordered",
                                    now)

    def progress(self) -> tuple[Drain, ...]:
        """News of drains for the record, each once; of those that ended, until the record has it."""
        news, self._progress = {**self._progress, **self._ended}, {}
        return tuple(news.values())

    def step(self, out: list[Effect], *, now: float) -> None:
        """Goes on with every drain."""
        self.due_s = now + self._policy.drain_step_s
        for draining in list(self._running.values()):
            self._step(draining, out, now)

    def died(self, worker: WorkerId, why: str, *, now: float) -> None:
        """The worker's life ended."""
        draining = self._running.get(worker)
        if draining is not None:
            done = draining.retire_asked
            self._end(draining, "done" if done else "failed", now, "" if done else f"{why} before all was copied")

    def landed(self, landed: Landed) -> None:
        """A copy was answered."""
        copy = landed.copy
        draining = self._running.get(copy.drain) if copy.drain is not None else None
        if draining is not None:
            draining.is_copied(copy.keys[:landed.blocks])
            draining.nbytes += landed.nbytes
            if landed.blocks < len(copy.keys):
                draining.tries[copy.prefix] += 1

    def retired(self, worker: WorkerId, why: str, *, now: float) -> None:
        """The worker let go, or did not (``why``)."""
        draining = self._running.get(worker)
        if draining is None:
            return
        if not why:
            self._end(draining, "done", now, "")
            return
        draining.retire_tries += 1
        draining.retire_asked = False
        draining.retire_not_before_s = now + self._policy.suspend_first_s
        if draining.retire_tries >= self._policy.drain_tries:
            self._end(draining, "failed", now, f"all was copied, but the worker did not let go: {why}")

    def forget(self) -> None:
        """Another term begins: what is to be done stands on the record."""
        self._picture.leaving.clear()
        self._running.clear()
        self._progress.clear()
        self._ended.clear()

    # Inside.

    def _end(self, draining: Draining, state: DrainState, now: float, why: str) -> None:
        if self._running.get(draining.order.worker) is draining:
            del self._running[draining.order.worker]
            self._picture.leaving.discard(draining.order.worker)
        report = draining.report(state, why)
        self._ended[_name(report)] = report
        self._progress.pop(_name(report), None)
        self._notes.decided("drain", report.worker, report.copied, report.nbytes,
                            f"{state}: {report.why or 'all copied'}", now)

    def _step(self, draining: Draining, out: list[Effect], now: float) -> None:
        worker = draining.order.worker
        if now >= draining.deadline_s:
            left = len(draining.last)
            self._end(draining, "failed", now, f"time is over; {left} of {draining.blocks} blocks have no other "
                            "copy yet, and the worker keeps what it has")
            return
        if not draining.has_asked:  # what had no room in the map is to be known now, others' cold blocks go for it
            draining.has_asked = True
            self._picture.relearn(worker, out, now=now)
        if not self._picture.knows(worker):  # blocks that are not known would go without having been copied
            draining.is_unsure = True
        elif draining.is_unsure and not draining.retire_asked:
            draining.is_unsure = False
            draining.begin_scan(self._picture.map.keys_of(worker))
        elif draining.scanning:
            self._scan(draining, now)
        elif draining.retiring:
            self._retire(draining, out, now)
        elif draining.todo:
            self._copy_out(draining, out, now)
        elif not self._copier.draining(worker):
            if draining.rounds < self._policy.drain_rounds:  # what came while we copied
                draining.begin_scan(self._picture.map.keys_of(worker))
            else:
                draining.retiring = True
        report = draining.report()
        self._progress[_name(report)] = report

    def _scan(self, draining: Draining, now: float) -> None:
        others = self._picture.staying()
        promised = self._copier.promised()
        keys = draining.next_keys(self._policy.fill_step)
        for key in keys:
            if (self._picture.map.holds(draining.order.worker, key)
                    and not (self._picture.map.mask(key) | promised.get(key, 0)) & others):
                draining.found_last(key)
        if not keys:
            draining.unseen = self._picture.map.unseen_of(draining.order.worker)
            draining.end_scan(lambda key: place.parent if (place := self._picture.map.get(key)) is not None else None,
                              lambda key: self._picture.heat.of(key, now=now))
            if not draining.todo:
                draining.rounds = self._policy.drain_rounds

    def _copy_out(self, draining: Draining, out: list[Effect], now: float) -> None:
        worker, others, promised = draining.order.worker, self._picture.staying(), self._copier.promised()
        under_way = self._copier.draining(worker)
        for _ in range(min(self._policy.drain_look, len(draining.todo))):
            if under_way >= self._policy.drain_copies:
                return
            prefix = draining.todo.popleft()
            path = self._picture.map.path(prefix, limit=self._policy.max_path)
            if not self._picture.map.holds(worker, prefix):
                draining.is_gone([prefix])
                continue
            if not path:
                draining.give_up([prefix], "part of the chain before them is gone")
                continue
            masks = [mask & others for mask in self._picture.map.masks(path)]
            draining.is_copied(key for key, mask in zip(path, masks, strict=True) if mask)
            if masks[-1]:
                continue
            masks = [mask | promised.get(key, 0) & others for key, mask in zip(path, masks, strict=True)]
            if masks[-1]:  # under way
                draining.todo.append(prefix)
                continue
            spec = self._picture.spec_of(path)
            if draining.tries[prefix] >= self._policy.drain_tries:
                draining.give_up(path, "copying them failed")
                continue
            heat = self._picture.heat.of(prefix, now=now)
            into = "free" if self._policy.is_warm(heat) else "empty"
            copy = self._copier.copy(path, masks, all_of(masks), out, now, f"{worker} is drained, heat {heat:.1f}",
                                     drain=worker, into=into)
            if copy is not None:
                under_way += 1
                for key in copy.keys:
                    promised[key] = promised.get(key, 0) | self._picture.map.bit(copy.target)
                draining.todo.append(prefix)
            elif not (stay := self._stay(spec)):
                draining.give_up(path, self._why_nobody_stays(worker, spec))
            elif not self._could_take(stay, sum(not mask for mask in masks), into):
                draining.give_up(path, "no other worker has room for them" if into == "free" else
                                 "cold, and no other worker has empty room for them")
            else:
                draining.todo.append(prefix)

    def _stay(self, spec: str) -> list[WorkerId]:
        """Who has blocks of that cache spec and will be there tomorrow."""
        return [worker for worker in self._picture.fleet.peers if not self._picture.is_leaving(worker)
                and self._picture.membership.members[worker].spec == spec]

    def _why_nobody_stays(self, worker: WorkerId, spec: str) -> str:
        are_others = any(other != worker and self._picture.membership.members[other].spec == spec
                         for other in self._picture.fleet.peers)
        return ("the other workers that could have them are draining" if are_others else
                "no other worker could have them")

    def _could_take(self, workers: Iterable[WorkerId], blocks: int, into: str) -> bool:
        """Whether one of them could take a batch of so many blocks, if not now then later."""
        room = self._picture.fleet.free_blocks if into == "free" else self._picture.fleet.empty_blocks
        return any(room(worker) >= min(blocks, self._policy.batch_blocks) for worker in workers)

    def _retire(self, draining: Draining, out: list[Effect], now: float) -> None:
        worker = draining.order.worker
        if not self._asker.can_ask("retire", worker) or now < draining.retire_not_before_s:
            return
        draining.retire_asked = True
        retire = Retire(drop=draining.order.force or not draining.report().left)
        self._asker.ask("retire", worker, retire, self._picture.map.blocks_of(worker), out)


def _name(drain: Drain) -> _Name:
    return drain.worker, drain.incarnation, drain.ordered_at_s
