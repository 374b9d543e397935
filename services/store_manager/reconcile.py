"""Comparing the catalog with a worker: digests first, then only the buckets that differ, a part of them at a time."""

from __future__ import annotations

import asyncio
import logging

from services.store_manager.inventory import RESTARTS, InventoryFailed, ask_inventory
from shared.bus.bus import Bus
from shared.bus.subjects import KV_DIGEST
from shared.catalog.repository import Catalog, Difference, Repaired
from shared.clock import Clock
from shared.errors import NoResponders
from shared.ids import Incarnation, WorkerId
from shared.messages import DigestQuery, DigestReply, SnapshotPage, StoredBlock
from shared.store.digest import differing, unpack

BUCKETS_AT_ONCE = 512
"""Buckets put right in one transaction: an eighth of all."""
_LOOK_S = 0.2
"""Pause between two looks at whether news under way has come."""

_log = logging.getLogger(__name__)


class Reconciler:
    """Compares and repairs; ``patience_s`` is how long news under way is waited for, ``timeout_s`` for each answer."""

    def __init__(self, bus: Bus, catalog: Catalog, clock: Clock, *, timeout_s: float, patience_s: float) -> None:
        self._bus, self._catalog, self._clock = bus, catalog, clock
        self._timeout_s, self._patience_s = timeout_s, patience_s

    async def compare(self, worker: WorkerId, incarnation: Incarnation) -> Repaired:
        """Makes the rows of one life equal to what it holds; what happens meanwhile is left to its own news.

        Raises ``BusError`` (``NoResponders`` when nobody answers for the worker), ``Unavailable`` or ``Unwritable``.
        """
        try:
            theirs = await self._digest(worker, incarnation)
        except NoResponders:  # an older worker that knows no digests, or nobody at all: then this raises it again
            inventory = await ask_inventory(self._bus, worker, incarnation, timeout_s=self._timeout_s)
            return await self._catalog.reconcile(inventory, now_s=self._clock.wall())
        ends_s = self._clock.monotonic() + self._patience_s
        while True:
            ours = await self._catalog.digest(worker, incarnation, seq=theirs.seq)
            different = differing(ours.tiers, {tier.tier: unpack(tier) for tier in theirs.tiers})
            if not different or ours.complete or self._clock.monotonic() >= ends_s:
                break
            await asyncio.sleep(_LOOK_S)  # what is only late is no error to be repaired
        missing = stale = 0
        for begin in range(0, max(1, len(different)), BUCKETS_AT_ONCE):  # once also without any: all news is in it
            difference = await self._difference(theirs, different[begin:begin + BUCKETS_AT_ONCE])
            repaired = await self._catalog.repair(difference, now_s=self._clock.wall())
            missing, stale = missing + repaired.missing, stale + repaired.stale
        _log.debug("compared", extra={"fields": {"worker": worker, "buckets": len(different), "missing": missing,
                                                 "stale": stale}})
        return Repaired(missing=missing, stale=stale)

    async def _digest(self, worker: WorkerId, incarnation: Incarnation) -> DigestReply:
        reply = await self._bus.request(KV_DIGEST.at(worker=worker), DigestQuery(incarnation=incarnation),
                                        timeout_s=self._timeout_s)
        if not isinstance(reply, DigestReply) or reply.incarnation != incarnation:
            raise InventoryFailed(f"{worker} lives again as {reply.incarnation}, asked was {incarnation}")
        return reply

    async def _difference(self, digest: DigestReply, buckets: list[int]) -> Difference:
        """What differs in ``buckets``.

        They are looked at a moment after the digest, and the difference still carries the digest's number, at which
        all other buckets were equal: what the worker did since comes, or came, as news with a higher one.
        """
        worker, incarnation = digest.worker, digest.incarnation
        held = {(block.key, block.tier): block for block in await self._held(worker, incarnation, buckets)}
        known = await self._catalog.known(worker, incarnation, buckets) if buckets else set()
        return Difference(worker, incarnation, digest.seq, digest.spec,
                          missing=tuple(block for place, block in held.items() if place not in known),
                          stale=tuple(sorted(known - held.keys())))

    async def _held(self, worker: WorkerId, incarnation: Incarnation, buckets: list[int]) -> list[StoredBlock]:
        """What the worker holds in ``buckets``, of one moment."""
        if not buckets:
            return []
        for _ in range(RESTARTS):
            pages: list[SnapshotPage] = []
            while True:
                ask = DigestQuery(incarnation=incarnation, buckets=buckets,
                                  snapshot=pages[0].snapshot if pages else "", page=len(pages))
                reply = await self._bus.request(KV_DIGEST.at(worker=worker), ask, timeout_s=self._timeout_s)
                if not isinstance(reply, SnapshotPage) or reply.incarnation != incarnation:
                    raise InventoryFailed(f"{worker} lives again as {reply.incarnation}, asked was {incarnation}")
                if reply.page != len(pages) or (pages and reply.snapshot != pages[0].snapshot):
                    break
                pages.append(reply)
                if len(pages) == reply.pages:
                    return [block for page in pages for block in page.blocks]
        raise InventoryFailed(f"{worker} began another snapshot {RESTARTS} times before the last page")
