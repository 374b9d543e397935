"""What is kept and what goes: last copies of hot blocks, copies that are too many, tenants' budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from services.store_manager.core.asking import Asker
from services.store_manager.core.copying import Copier
from services.store_manager.core.heat import ByHeat
from services.store_manager.core.notes import Notes
from services.store_manager.core.orders import split_quota
from services.store_manager.core.picture import Addresses, Picture
from services.store_manager.core.policy import PlannerPolicy
from shared.ids import BlockKey, WorkerId
from shared.kv import pack_keys
from shared.machine import Effect, Publish
from shared.messages import Protect, Quotas, TenantQuota, Trim


@dataclass
class _Look:
    """A look at all blocks that were hot when it began, part by part."""

    #: those not looked at yet
    left: list[BlockKey]
    #: {worker: its last copies of hot blocks}
    alone: dict[WorkerId, ByHeat] = field(default_factory=dict)


class Keeper:
    """Only a leader's acts. Levels, not edges: each look sees what is and asks for a bounded part of what should be."""

    def __init__(self, addresses: Addresses, policy: PlannerPolicy, picture: Picture, copier: Copier, asker: Asker,
                 notes: Notes) -> None:
        self._addresses, self._policy, self._picture = addresses, policy, picture
        self._copier, self._asker, self._notes = copier, asker, notes
        #: {worker: how far the look at its old copies is}
        self._scanned: dict[WorkerId, int] = {}
        self._look: _Look | None = None

    def forget(self) -> None:
        """A new term begins."""
        self._look = None

    def protect(self, out: list[Effect], *, now: float) -> bool:
        """Looks at the next part of the hot blocks; whether more are left. At the end, asks whoever has last copies of
        some to evict those last, the hottest first."""
        if self._look is None:
            self._look = _Look(self._picture.heat.hot_keys())
        look, picture, fleet = self._look, self._picture, self._picture.fleet
        some, look.left = look.left[-self._policy.fill_step:], look.left[:-self._policy.fill_step]
        staying = picture.staying()
        hot = picture.heat.still_hot(some, now=now)
        for (heat, key), mask in zip(hot, picture.map.masks(key for _, key in hot), strict=True):
            if (mask & staying).bit_count() == 1:
                look.alone.setdefault(picture.map.named(mask & staying)[0], ByHeat()).add(key, heat)
        if look.left:
            return True
        self._look = None
        for worker, alone in sorted(look.alone.items()):
            peer = fleet.peers.get(worker)
            if peer is not None and fleet.is_usable(worker, now=now) and self._asker.can_ask("protect", worker):
                keys = list(islice(alone, math.ceil(self._policy.protect_share * peer.hello.capacity_blocks)))
                self._asker.ask("protect", worker, Protect(keys=pack_keys(keys), ttl_s=self._policy.protect_ttl_s),
                                len(keys), out)
        return False

    def trim(self, out: list[Effect], *, now: float) -> None:
        """Copies that are too many, deepest first. What one worker is asked to drop, the next must keep."""
        picture, fleet = self._picture, self._picture.fleet
        staying = picture.staying() & sum(picture.map.bit(worker) for worker in fleet.peers
                                          if picture.membership.members[worker].state == "alive")
        self._scanned = {worker: begin for worker, begin in self._scanned.items() if worker in fleet.peers}
        asked: dict[BlockKey, int] = {}
        promised = self._copier.promised()
        order = sorted(fleet.peers, key=lambda worker: (-fleet.fullness(worker), worker))
        for worker in order:
            if (not self._asker.can_ask("trim", worker) or picture.is_leaving(worker)
                    or not fleet.is_usable(worker, now=now)):
                continue
            bit = picture.map.bit(worker)
            keys = []
            for key in [*picture.map.ours_of(worker), *self._old_copies(worker, now)]:
                if key in promised:
                    continue
                others = (picture.map.mask(key) & staying & ~bit).bit_count() - asked.get(key, 0)
                kept = self._policy.kept(picture.heat.of(key, now=now))
                if others >= kept and not picture.heat.is_hot(key):
                    keys.append(key)
            keys = sorted(set(keys), key=self._deepest_first)[:self._policy.trim_blocks]
            if keys:
                for key in keys:
                    asked[key] = asked.get(key, 0) + 1
                self._asker.ask("trim", worker, Trim(keys=pack_keys(keys)), len(keys), out)
                self._notes.decided("trim", worker, len(keys), 0, "cold, and others have them", now)

    def _deepest_first(self, key: BlockKey) -> tuple[int, BlockKey]:
        place = self._picture.map.get(key)
        return (-(place.depth if place is not None else 0), key)

    def _old_copies(self, worker: WorkerId, now: float) -> list[BlockKey]:
        """The next part of the older half of what a full worker holds, without those used lately."""
        picture, fleet = self._picture, self._picture.fleet
        if (fleet.fullness(worker) < self._policy.full
                or now - picture.started_s < 2 * self._policy.half_life_s):  # too young to know what is cold
            return []
        half = picture.map.blocks_of(worker) // 2
        begin = self._scanned.get(worker, 0)
        begin = begin if begin < half else 0
        end = min(half, begin + self._policy.scan_blocks)
        self._scanned[worker] = end
        return [key for key in islice(picture.map.keys_of(worker), begin, end)
                if not self._policy.is_warm(picture.heat.of(key, now=now))]

    def send_quotas(self, quotas: Mapping[str, int], out: list[Effect]) -> None:
        """Everybody's budgets, to everybody: a worker that missed them, or is new, learns them all the same.

        Not to one whose blocks are being taken in anew: it seems to hold less than it does, and would evict the rest.
        """
        picture = self._picture
        capacity = {worker: peer.capacity_bytes for worker, peer in sorted(picture.fleet.peers.items())
                    if not picture.is_leaving(worker)}
        budgets: dict[WorkerId, list[TenantQuota]] = {worker: [] for worker in capacity}
        for tenant, quota in quotas.items():
            usage = {worker: picture.map.usage(worker, tenant) for worker in capacity}
            for worker, nbytes in split_quota(quota, usage, capacity).items():
                budgets[worker].append(TenantQuota(tenant=tenant, nbytes=nbytes))
        for worker, rows in budgets.items():
            if picture.knows(worker):
                out.append(Publish(self._addresses.quotas(worker), Quotas(worker=worker, budgets=rows)))
