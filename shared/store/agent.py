"""The store agent: acts for one worker's block pool on the bus and the transfer engine.

It announces what is stored and evicted, answers "what did I miss?", pushes blocks to those who ask (the owner decides
and sends; nobody reads its memory), and fetches blocks from other owners. With an SSD tier it also copies blocks there
ahead of need (demotion) and reads them back when a request or a reader wants them (promotion).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import msgspec

from shared.bus.bus import Bus, Delivery
from shared.bus.subjects import KV_DIGEST, KV_EVICTED, KV_STORED, KV_SYNC, PUSH
from shared.clock import Clock
from shared.errors import BusError, NoResponders, RequestTimeout
from shared.ids import BlockKey, Incarnation, OperationId, RequestId, WorkerId, fresh
from shared.kv import KEY_BYTES, CacheSpec, Tier, pack_keys, unpack_keys
from shared.messages import (
    DigestReply,
    Evicted,
    KvEvent,
    PushBlocks,
    Pushed,
    Range,
    SnapshotPage,
    StoredBlock,
    SyncEvents,
    SyncReply,
)
from shared.store.blocks import BlockPool, PoolStatistics
from shared.store.events import EventLog, Gone
from shared.store.owners import Owners
from shared.store.parts import Fetched, Part
from shared.store.settings import SsdSettings
from shared.store.ssd.record import fits
from shared.store.ssd.tier import WRITE_BLOCKS, Reading, SsdTier
from shared.store.tiers import plan_demotion
from shared.store.upkeep import Upkeep
from shared.telemetry import metrics, tracing
from shared.transfer import PushResult, Slice, TransferEngine

log = logging.getLogger(__name__)
T = TypeVar("T")

_ANNOUNCE_S = 0.005
"""Pause between two batches of news. The first news goes out at once; a stream of puts would else spend more time on
announcing each block than on taking it."""
_RELEASE_PATIENCE_S = 0.5
"""How long a fetch waits for its writer to be done before it does without what came."""
_LOOK_S = 0.05
"""Shortest pause between two looks for blocks to copy to the SSD."""
_NOTHING_WRITTEN_S = 1.0
"""Pause after the SSD took nothing, if it does not ask for a longer one."""
_IDLE_S = 5.0
"""How long a block lies in memory before it is copied to the SSD although nothing asks for its slot; also the pause
between two looks for such blocks that found none."""
_RECALL_BLOCKS = 16
"""Blocks that a push reads back from the SSD at a time: what is there leaves while the next ones are read."""
_HOLE_S = 10.0
"""Pause between two looks at how the free slots lie, which takes time."""


@dataclass(frozen=True, slots=True)
class _Landed:
    """One owner's push as it arrived in private slots of its own operation."""

    arrived: int
    seconds: float
    path: str
    why: str
    quiet: bool
    """No writer can touch the slots any more."""


class StoreAgent:
    """One per worker; everything here runs on the worker's event loop.

    ``memory`` is the registered segment, slot i at ``i * spec.block_bytes``; ``ssd`` is the tier below it, if any.
    ``on_handed_out`` is told of slots that are about to be filled.
    """

    def __init__(self, *, worker: WorkerId, incarnation: Incarnation, spec: CacheSpec, pool: BlockPool,
                 transfer: TransferEngine, segment: str, memory: memoryview, bus: Bus, clock: Clock,
                 ssd: SsdTier | None = None, ssd_settings: SsdSettings | None = None,
                 on_handed_out: Callable[[Sequence[int]], None] | None = None) -> None:
        self._worker, self._spec, self._segment, self._memory = worker, spec, segment, memory
        self._bus, self._clock, self._transfer = bus, clock, transfer
        self.pool = pool
        self._on_handed_out = on_handed_out
        self.ssd = ssd
        self._ssd_settings = ssd_settings or SsdSettings()
        self.is_retired = False
        """It takes nothing new."""
        self._drops = False
        """It is retired and drops what nobody uses."""
        self._budgets: Mapping[str, int] = {}
        """{tenant: bytes of all tiers}; who is not here has no limit"""
        self._log = EventLog(worker, incarnation, spec.digest, self.blocks)
        #: what happened and is not announced yet, in order
        self._pending: list[StoredBlock | Gone] = []
        self._wake = asyncio.Event()
        self._released: asyncio.Event | None = None
        """What somebody waits for, if anybody does."""
        self._cooled = asyncio.Event()
        """Some block may have become one to copy to the SSD."""
        self._uncopied: dict[BlockKey, float] = {}
        """{block in memory that the SSD has not: since when}, all and only those, if there is an SSD; the longest
        stored first, and those that were not worth a write behind the others."""
        self._copying = asyncio.Lock()
        """Held from the choice of blocks to copy until they are copied."""
        self._idle_s = 0.0
        """No copying for the sake of idleness before this time."""
        self._owners = Owners()
        self._background: set[asyncio.Task[Any]] = set()
        self._hole, self._hole_s = 0, -math.inf
        if ssd is not None:
            ssd.on_stored = self.announce_stored
            ssd.on_evicted = self._announce_lost

    @property
    def clock(self) -> Clock:
        """The worker's clock."""
        return self._clock

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._spec.block_bytes

    @property
    def seq(self) -> int:
        """Number of the last announced batch, for heartbeats."""
        return self._log.seq

    @asynccontextmanager
    async def open(self) -> AsyncIterator[StoreAgent]:
        """Answers and announces while the context is open; afterwards nothing of it runs any more."""
        if self.ssd is not None:
            self.announce_stored(list(self.ssd.blocks()))  # oldest first, so parents first
        upkeep = Upkeep(self, self._bus, self._worker)
        serving = [
            await self._bus.serve(KV_SYNC.at(worker=self._worker), self._on_sync),
            await self._bus.serve(KV_DIGEST.at(worker=self._worker), self._on_digest),
            await self._bus.serve(PUSH.at(worker=self._worker), self._on_push, concurrency=16),
            *await upkeep.listen(),
        ]
        try:
            async with asyncio.TaskGroup() as group:  # an announcer that dies ends the worker instead of its news
                running = [group.create_task(self._announce(), name="store-announce")]
                if self.ssd is not None:
                    running.append(group.create_task(self._demote(self.ssd), name="store-demote"))
                try:
                    yield self
                finally:
                    for task in running:
                        task.cancel()
        finally:
            for subscription in serving:
                await subscription.close()
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)

    # --- the pool, announced -----------------------------------------------------------------------------------

    def blocks(self) -> Iterator[StoredBlock]:
        """Every reusable block, once for each tier it lies in."""
        return self.pool.blocks() if self.ssd is None else chain(self.pool.blocks(), self.ssd.blocks())

    def holds(self, key: BlockKey) -> bool:
        """Is the block in some tier?"""
        return self.pool.block(key) is not None or (self.ssd is not None and self.ssd.holds(key))

    def pin(self, operation: OperationId, keys: Sequence[BlockKey], *, use: bool = True) -> list[int]:
        """Pins the leading cached ``keys``; their slots, in order. ``use=False``: they are only moved about."""
        return self.pool.pin(operation, keys, now=self._clock.monotonic(), use=use)

    def allocate(self, operation: OperationId, count: int, *, tenant: str = "") -> list[int] | None:
        """``count`` private slots, or ``None`` when there is no room now. A tenant that would exceed its budget makes
        room among its own blocks first."""
        over = self._blocks_over(tenant, count)
        if over > 0:
            self._evict_tenant(tenant, over)
        allocation = self.pool.allocate(operation, count, now=self._clock.monotonic())
        if allocation is None:
            return None
        self.announce_evicted(allocation.evicted, "capacity")
        if self._on_handed_out is not None:
            self._on_handed_out(allocation.slots)
        return allocation.slots

    async def wait_allocate(self, operation: OperationId, count: int, *, tenant: str = "") -> list[int]:
        """Waits until there is room; the caller bounds the wait."""
        while True:
            released = self.next_release
            slots = self.allocate(operation, count, tenant=tenant)
            if slots is not None:
                return slots
            await released.wait()

    @property
    def next_release(self) -> asyncio.Event:
        """Is set when an operation ends from now on. Take it before looking for room, so that no end is missed."""
        if self._released is None:
            self._released = asyncio.Event()
        return self._released

    def seal(self, operation: OperationId, slot: int, block: StoredBlock) -> None:
        """Makes a filled private slot reusable and says so (unless its twin was first)."""
        if self.pool.seal(operation, slot, block, now=self._clock.monotonic()):
            self.announce_stored([block])

    def release(self, operation: OperationId) -> None:
        """Ends ``operation``: unpins, frees, and lets whoever waits for room try again."""
        self.pool.release(operation)
        self.settle()

    def settle(self) -> None:
        """Blocks may be evictable that were not: lets whoever waits for room try again, and keeps to the budgets."""
        self._tell_waiting()
        if self._drops:
            self._drop_all("drain")
        self._respect_budgets()
        self._cooled.set()

    def give_back(self, operation: OperationId, slots: Sequence[int]) -> None:
        """Frees private ``slots`` of ``operation``, which goes on."""
        spare = OperationId(fresh("spare", 4))
        self.pool.move(slots, operation, spare)
        self.release(spare)

    def _let_go(self, operation: OperationId) -> None:
        self.pool.release(operation)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        if self._released is not None:
            self._released.set()
            self._released = None

    def announce_stored(self, blocks: Sequence[StoredBlock]) -> None:
        """Queues the news of stored blocks; the next turn of the loop sends it."""
        for block in blocks:
            if block.tier is Tier.SSD:  # a copy of one that was counted
                self._uncopied.pop(block.key, None)
                continue
            if self.ssd is not None and not self.ssd.has(block.key):
                self._uncopied.setdefault(block.key, self._clock.monotonic())
        self._pending.extend(blocks)
        self._wake.set()
        self._cooled.set()

    def announce_evicted(self, keys: Sequence[BlockKey], reason: str, tier: Tier = Tier.DRAM) -> None:
        """Queues the news of evicted blocks."""
        if keys:
            self._pending.extend(Gone(key, reason, tier) for key in keys)
            self._wake.set()
        for key in keys if tier is Tier.DRAM else ():
            self._uncopied.pop(key, None)

    def _announce_lost(self, keys: Sequence[BlockKey], reason: str) -> None:
        self.announce_evicted(keys, reason, Tier.SSD)
        now = self._clock.monotonic()
        self._uncopied.update((key, now) for key in keys if self.pool.block(key) is not None)

    def observe(self) -> PoolStatistics:
        """Counts of the pool's slots, which also become metrics."""
        set_levels([self])
        return self.pool.statistics()

    def largest_hole(self) -> int:
        """Longest run of free slots, as of a few seconds ago."""
        if (now := self._clock.monotonic()) >= self._hole_s + _HOLE_S:
            self._hole_s, self._hole = now, self.pool.largest_hole()
        return self._hole

    def range(self, slot: int) -> Range:
        """The slot's place in the registered segment."""
        return Range(segment=self._segment, offset=slot * self._spec.block_bytes, length=self._spec.block_bytes)

    def buffer(self, slot: int) -> memoryview:
        """The slot's bytes."""
        return self._memory[slot * self._spec.block_bytes:(slot + 1) * self._spec.block_bytes]

    # --- budgets, and the end ----------------------------------------------------------------------------------

    def set_budgets(self, budgets: Mapping[str, int]) -> None:
        """{tenant: bytes of all tiers}: who holds more loses its own coldest blocks, from now on."""
        self._budgets = dict(budgets)
        self._respect_budgets()

    def retire(self, *, drop: bool = True) -> int:
        """Takes nothing new from now on and, unless some of it is nowhere else, drops what nobody uses; how many blocks
        went."""
        self.is_retired, self._drops = True, drop
        return self._drop_all("drain") if drop else 0

    def trim(self, keys: Sequence[BlockKey], reason: str) -> int:
        """Drops the blocks from every tier, as far as nobody uses or continues them; how many are in no tier now."""
        held = [key for key in keys if self.holds(key)]
        self.announce_evicted(self.pool.drop(held), reason)
        if self.ssd is not None:
            self.ssd.drop(held, reason)
        return sum(not self.holds(key) for key in held)

    def protect(self, keys: Sequence[BlockKey], ttl_s: float) -> int:
        """Evicts the blocks last for ``ttl_s`` seconds; how many are held."""
        until_s = self._clock.monotonic() + ttl_s
        self.pool.protect(keys, until_s)
        if self.ssd is not None:
            self.ssd.pool.protect(keys, until_s)
        return sum(map(self.holds, keys))

    def _drop_all(self, reason: str) -> int:
        return self.trim(list({block.key for block in self.blocks()}), reason)

    def _respect_budgets(self) -> None:
        for tenant in self._budgets:
            if (over := self._blocks_over(tenant, 0)) > 0:
                self._evict_tenant(tenant, over)

    def _blocks_over(self, tenant: str, more: int) -> int:
        """By how many blocks the tenant would exceed its budget with ``more`` of them."""
        budget = self._budgets.get(tenant)
        if budget is None:
            return 0
        held = self.pool.tenant_blocks(tenant) + (self.ssd.pool.tenant_blocks(tenant) if self.ssd else 0)
        return held + more - budget // self._spec.block_bytes

    def _evict_tenant(self, tenant: str, count: int) -> None:
        """The copies on the SSD go first: they are the colder ones, or there twice."""
        if self.ssd is not None:
            count -= self.ssd.evict_tenant(tenant, count, "quota")
        if count > 0:
            gone = self.pool.evict_tenant(tenant, count, now=self._clock.monotonic())
            self.announce_evicted([key for key, _ in gone], "quota")

    # --- between the tiers -------------------------------------------------------------------------------------

    async def promote(self, operation: OperationId, keys: Sequence[BlockKey], slots: Sequence[int], *,
                      timeout_s: float) -> tuple[int, list[int]]:
        """Reads the leading ``keys`` that lie on our SSD into ``slots``, private ones of ``operation``.

        ``keys`` continue a chain whose blocks so far are cached and pinned by ``operation``. Returns how many of them
        are cached and pinned by it now, and the slots that were not used and may be. Never raises for what the disk
        does; ends within ``timeout_s``.
        """
        count = 0 if self.ssd is None else min(self.ssd.match(keys), len(slots))
        if self.ssd is None or count == 0:
            return 0, list(slots)
        landing = OperationId(f"{operation}.{fresh('read', 3)}")
        places, spare = list(slots[:count]), list(slots[count:])
        self.pool.move(places, operation, landing)
        blocks = [block for key in keys[:count] if (block := self.ssd.pool.block(key)) is not None]
        # Its ancestors must stay until it is sealed, even if whoever asked is gone by then.
        self.pool.pin(landing, [blocks[0].parent], now=self._clock.monotonic(), use=False)
        reading = self.spawn(self._read_back(self.ssd, landing, blocks, places, timeout_s), f"promote-{landing}")
        try:
            came = await asyncio.shield(reading)
        except asyncio.CancelledError:
            reading.add_done_callback(
                lambda task: None if task.cancelled() else self._landed(landing, task.result()))
            raise
        self.pin(operation, keys[:came.blocks], use=False)
        if came.settled is None:  # a slot whose block got a twin meanwhile was not used either, and stays
            self.pool.move(places[came.blocks:], landing, operation)
            spare = places[came.blocks:] + spare
        self._landed(landing, came)
        return came.blocks, spare

    async def pin_in_dram(self, operation: OperationId, key: BlockKey, *, timeout_s: float) -> bool:
        """Pins a block and its ancestors, read back from the SSD where need be; false when that cannot be had."""
        missing: list[BlockKey] = []
        while self.pool.block(key) is None:
            block = self.ssd.pool.block(key) if self.ssd is not None else None
            if block is None:
                return False
            missing.append(key)
            if block.depth == 0:
                break
            key = block.parent
        self.pin(operation, [key], use=False)
        missing.reverse()
        slots = self.allocate(operation, len(missing))
        if slots is None:
            return False
        came, _ = await self.promote(operation, missing, slots, timeout_s=timeout_s) if missing else (0, [])
        return came == len(missing)

    async def _read_back(self, ssd: SsdTier, landing: OperationId, blocks: Sequence[StoredBlock],
                         places: Sequence[int], timeout_s: float) -> Reading:
        began_s = self._clock.wall()
        reading = await ssd.read([block.key for block in blocks], [self.buffer(slot) for slot in places],
                                 timeout_s=timeout_s)
        for block, slot in zip(blocks[:reading.blocks], places, strict=False):
            self.seal(landing, slot, msgspec.structs.replace(block, tier=Tier.DRAM))
        metrics.KV_PROMOTED_BLOCKS.inc(reading.blocks)
        tracing.record("kv.promote", start_s=began_s, end_s=self._clock.wall(), attributes={
            "moonbus.blocks": reading.blocks, "moonbus.asked": len(blocks), "moonbus.why": reading.why})
        return reading

    def _landed(self, landing: OperationId, reading: Reading) -> None:
        """Ends ``landing`` once no thread writes into its slots any more."""
        async def wait(settled: asyncio.Future[None]) -> None:
            await settled
            self.release(landing)

        if reading.settled is None:
            self.release(landing)
        else:
            self.spawn(wait(reading.settled), f"settle-{landing}")

    async def _demote(self, ssd: SsdTier) -> None:
        """Copies blocks to the SSD ahead of need, and when idle, until cancelled."""
        while True:
            async with self._copying:
                began_s = self._clock.monotonic()
                # Before the choice, so that it knows: what only has time to spare must not push out what is as good.
                room = await ssd.make_room() if self._uncopied else 0
                blocks = self._to_demote(ssd, room=room) or self._to_write_behind(ssd, room=room)
                looked_s = self._clock.monotonic() - began_s
                written = await self._copy_down(ssd, blocks) if blocks else 0
            if not blocks:
                self._cooled.clear()
            elif not written:
                await asyncio.sleep(max(ssd.pause_left_s(), _NOTHING_WRITTEN_S))
            # Looking may take a twentieth of the loop's time at most.
            pause_s = 20 * looked_s - (self._clock.monotonic() - began_s)
            await asyncio.sleep(max(pause_s, 0.0 if blocks else _LOOK_S))
            # No wait_for: it loses a cancellation that comes together with what it waits for.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._until_idle_s()):
                    await self._cooled.wait()

    def _until_idle_s(self) -> float | None:
        """Seconds until it is worth looking for blocks to copy although nothing happens; ``None`` for never."""
        if not self._uncopied or not self._ssd_settings.idle_bytes_per_s or self._drops:
            return None
        now = self._clock.monotonic()
        oldest_s = next(iter(self._uncopied.values()))
        return max(_LOOK_S, self._idle_s - now, oldest_s + _IDLE_S - now)

    def _to_write_behind(self, ssd: SsdTier, *, room: int) -> list[StoredBlock]:
        """What to copy now since there is nothing else to do; paced by its bytes."""
        now, rate = self._clock.monotonic(), self._ssd_settings.idle_bytes_per_s
        if not rate or now < self._idle_s:
            return []
        blocks = self._to_demote(ssd, behind=1.0, before_s=now - _IDLE_S, room=room)
        self._idle_s = now + (len(blocks) * self._spec.block_bytes / rate if blocks else _IDLE_S)
        return blocks

    async def save(self) -> int:
        """Copies to the SSD all in memory that is worth it, in the place of colder blocks if need be; how many were.

        For an orderly end: the caller bounds the time, and what was copied by then stays. Never raises for what the
        disk does.
        """
        if self.ssd is None:
            return 0
        began_s, saved, in_vain = self._clock.monotonic(), 0, 0
        # More would push each other out, and what comes meanwhile would keep it from ending.
        most = len(self._uncopied)
        while saved < min(most, self.ssd.capacity) and in_vain < len(self._uncopied):
            async with self._copying:
                blocks = self._to_demote(self.ssd, behind=1.0, room=WRITE_BLOCKS)
                written = await self._copy_down(self.ssd, blocks) if blocks else 0
            if blocks and not written:
                break
            saved += written
            in_vain = 0 if blocks else in_vain + self._look_blocks()
            await asyncio.sleep(0)
        log.info("action=ssd_saved blocks=%d left=%d seconds=%.2f", saved, len(self._uncopied),
                 self._clock.monotonic() - began_s)
        return saved

    async def _copy_down(self, ssd: SsdTier, blocks: Sequence[StoredBlock]) -> int:
        """Writes the blocks, which stay where they are meanwhile; how many were written."""
        operation, now = OperationId(fresh("demote", 4)), self._clock.monotonic()
        slots = [self.pool.pin(operation, [block.key], now=now, use=False)[0] for block in blocks]
        try:
            return await ssd.write(blocks, [self.buffer(slot) for slot in slots])
        finally:
            self._let_go(operation)

    def _look_blocks(self) -> int:
        """Uncopied blocks that are looked at together; half as many are copied together."""
        # Few enough not to keep running requests from their memory while a slow disk holds them.
        return 2 * min(WRITE_BLOCKS, max(1, self.pool.statistics().total // 16))

    def _to_demote(self, ssd: SsdTier, *, room: int, behind: float = 0.0,
                   before_s: float = math.inf) -> list[StoredBlock]:
        """See :func:`plan_demotion`; ``before_s`` leaves out what was stored later."""
        if self._drops:
            return []
        settings = self._ssd_settings
        looked, limit = self._look_blocks(), self._look_blocks() // 2
        oldest = list(islice((key for key, since_s in self._uncopied.items() if since_s <= before_s), looked))
        plan = plan_demotion(
            self.pool, oldest=[block for key in oldest if (block := self.pool.block(key)) is not None],
            uncopied=len(self._uncopied), held=ssd.has,
            fits=lambda block: fits(block) and self._blocks_over(block.tenant, 1) <= 0, ahead=settings.ahead,
            behind=behind, capacity=ssd.capacity, room=room,
            least_odds=settings.least_odds, limit=limit, now=self._clock.monotonic())
        chosen = {block.key for block in plan}
        for key in oldest:  # those that are not worth it now come up again after all others
            if key not in chosen and (since_s := self._uncopied.pop(key, None)) is not None:
                self._uncopied[key] = since_s
        return plan

    # --- fetching ----------------------------------------------------------------------------------------------

    async def fetch(self, operation: OperationId, request: RequestId, parts: Sequence[Part], slots: Sequence[int], *,
                    timeout_s: float) -> tuple[list[Fetched], list[int]]:
        """Asks several owners at once to push the parts of one chain into ``slots``, private ones of ``operation``.

        ``slots`` are one a block of all parts, in order. Returns one answer a part, and the slots that were not used
        and may be. Whatever the owners say, only blocks that our transfer engine has verified count, and only up to
        the first gap; those are sealed as received and pinned by ``operation``. The block before the first part must
        be cached and pinned. An owner that did not deliver lately is not asked (``paused``). Never raises for what
        others do; ends within ``timeout_s`` and a little.
        """
        landings = [OperationId(f"{operation}.{fresh('fetch', 3)}") for _ in parts]
        places: list[list[int]] = []
        for landing, part in zip(landings, parts, strict=True):
            first = sum(map(len, places))
            places.append(list(slots[first:first + len(part.blocks)]))
            self.pool.move(places[-1], operation, landing)
        try:
            async with asyncio.TaskGroup() as group:
                landing_tasks = [
                    group.create_task(self._land(landing, request, part, place, timeout_s=timeout_s))
                    for landing, part, place in zip(landings, parts, places, strict=True)]
            answers: list[Fetched] = []
            spare: list[int] = []
            unbroken = True
            for landing, part, place, task in zip(landings, parts, places, landing_tasks, strict=True):
                came = task.result()
                usable = came.arrived if unbroken else 0
                for slot, block in zip(place[:usable], part.blocks, strict=False):
                    self.seal(landing, slot, block)
                self.pin(operation, [block.key for block in part.blocks[:usable]], use=False)
                if came.quiet:
                    # A slot whose block got a twin meanwhile was not used either, and stays with the landing.
                    self.pool.move(place[usable:], landing, operation)
                    spare += place[usable:]
                short = usable < len(part.blocks)
                unbroken = unbroken and not short
                answers.append(Fetched(part.owner, usable, usable * self._spec.block_bytes, came.seconds, came.path,
                                       (came.why or "gap") if short else ""))
            return answers, spare
        finally:
            for landing in landings:
                self.release_landing_soon(landing)

    async def _land(self, landing: OperationId, request: RequestId, part: Part, slots: Sequence[int], *,
                    timeout_s: float) -> _Landed:
        started_s = self._clock.monotonic()
        if not self._owners.allows(part.owner, started_s):
            return _Landed(0, 0.0, "", "paused", True)
        ranges = [self.range(slot) for slot in slots]
        ask = PushBlocks(
            operation=landing, request=request, keys=pack_keys([block.key for block in part.blocks]),
            endpoint=self._transfer.endpoint, grant=self._transfer.grant(landing, ranges, ttl_s=timeout_s),
            slots=ranges, deadline_s=timeout_s)
        path, why, quiet, is_there = "", "", True, True
        try:
            reply: Pushed = await self._bus.request(PUSH.at(worker=part.owner), ask, timeout_s=timeout_s)
            path, why = reply.path, reply.why
        except NoResponders:  # which costs nobody a wait
            why, is_there = "peer", False
        except RequestTimeout:
            why = "deadline"
        except BusError as error:
            why = "bus"
            log.warning("action=fetch_failed owner=%s error=%s", part.owner, error)
        self._transfer.shut(landing)  # or a straggler could write once we have looked
        arrived = next((i for i, place in enumerate(ranges) if not self._transfer.covered(landing, place)), len(slots))
        try:
            async with asyncio.timeout(_RELEASE_PATIENCE_S):
                await self._transfer.release(landing)
        except TimeoutError:
            # A writer that stopped half-way still has our memory mapped: nothing in these slots can be trusted, and
            # they stay out of use until it is gone.
            arrived, why, quiet = 0, "deadline", False
        if is_there:
            now = self._clock.monotonic()
            self._owners.heard(part.owner, blocks=arrived, why=why, waited_s=now - started_s, now=now)
        return _Landed(arrived, self._clock.monotonic() - started_s, path, why, quiet)

    async def release_landing(self, operation: OperationId) -> None:
        """Revokes ``operation``'s grant and frees its slots once no writer can touch them any more."""
        await self._transfer.release(operation)
        self.release(operation)

    def release_landing_soon(self, operation: OperationId) -> None:
        """:meth:`release_landing` in the background."""
        self.spawn(self.release_landing(operation), f"release-{operation}")

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Runs ``work`` in the background; cancelled when the agent closes."""
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # --- inside ------------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            pending, self._pending = self._pending, []
            at_s = self._clock.wall()
            for event in self._log.number(pending, at_s=at_s):
                _count(event)
                subject = KV_EVICTED if isinstance(event, Evicted) else KV_STORED
                try:
                    await self._bus.publish(subject.at(worker=self._worker), event)
                except BusError as error:
                    # Its number is spent: the next heartbeat shows the gap, and who cares asks.
                    log.warning("action=announce_lost seq=%d error=%s", event.seq, error)
                await asyncio.sleep(0)  # publishing seldom waits, and a restart tells of very many blocks at once
            await asyncio.sleep(_ANNOUNCE_S)

    async def _on_sync(self, delivery: Delivery) -> SyncReply:
        reply = self._log.since(delivery.message, now=self._clock.monotonic())
        metrics.KV_SYNCS.labels(kind="events" if isinstance(reply, SyncEvents) else "snapshot").inc()
        return reply

    async def _on_digest(self, delivery: Delivery) -> DigestReply | SnapshotPage:
        return self._log.digest(delivery.message, now=self._clock.monotonic())

    async def _on_push(self, delivery: Delivery) -> Pushed:
        ask: PushBlocks = delivery.message
        keys = unpack_keys(ask.keys)
        if len(keys) != len(ask.slots) or any(place.length != self._spec.block_bytes for place in ask.slots):
            return Pushed(operation=ask.operation, blocks=0, nbytes=0, seconds=0.0, path="", why="shape")
        sending = OperationId(f"{ask.operation}.{fresh('send', 3)}")
        began_s = self._clock.wall()
        slots = self.pin(sending, keys)
        try:
            if self.ssd is not None and len(slots) < len(keys) and self.ssd.holds(keys[len(slots)]):
                result = await self._push_recalled(ask, sending, keys, slots)
            else:
                slices = self._slices(slots, ask.slots)
                result = await self._transfer.push(ask.endpoint, slices, ask.grant, timeout_s=ask.deadline_s)
        finally:
            self.release(sending)
        why = result.error.code if result.error else ("missing" if result.arrived < len(keys) else "")
        tracing.record("kv.send", start_s=began_s, end_s=self._clock.wall(), attributes={
            "moonbus.reader": ask.endpoint.worker, "moonbus.blocks": result.arrived, "moonbus.asked": len(keys),
            "moonbus.bytes": result.nbytes, "moonbus.path": result.path, "moonbus.why": why})
        return Pushed(operation=ask.operation, blocks=result.arrived, nbytes=result.nbytes, seconds=result.seconds,
                      path=result.path, why=why)

    async def _push_recalled(self, ask: PushBlocks, sending: OperationId, keys: Sequence[BlockKey],
                             slots: list[int]) -> PushResult:
        """Sends what is in DRAM while the rest is read back from the SSD, which follows piece by piece."""
        until_s = self._clock.monotonic() + ask.deadline_s
        stream = self._transfer.stream(ask.endpoint, ask.grant, timeout_s=ask.deadline_s)
        try:
            stream.push(self._slices(slots, ask.slots))
            sent = len(slots)
            while sent < len(keys) and not stream.broken.done():
                left_s = until_s - self._clock.monotonic()
                # Readers must not take all the memory of those who compute here.
                room = min(_RECALL_BLOCKS, len(keys) - sent, self.pool.available // 2)
                places = self.allocate(sending, room) if room and left_s > 0 else None
                if places is None:
                    break
                came, _ = await self.promote(sending, keys[sent:sent + room], places, timeout_s=left_s)
                stream.push(self._slices([self.pool.slot(key) for key in keys[sent:sent + came]], ask.slots[sent:]))
                sent += came
                if came < room:
                    break
            return await stream.close()
        finally:
            await stream.stop()

    def _slices(self, slots: Sequence[int], ranges: Sequence[Range]) -> list[Slice]:
        return [Slice(self._segment, self.range(slot).offset, place)
                for slot, place in zip(slots, ranges, strict=False)]


def _count(event: KvEvent) -> None:
    if isinstance(event, Evicted):
        metrics.KV_EVICTED_BLOCKS.labels(reason=event.reason).inc(len(event.keys) // KEY_BYTES)
        return
    for origin, count in Counter(block.origin for block in event.blocks if block.tier is not Tier.SSD).items():
        metrics.KV_STORED_BLOCKS.labels(origin=origin).inc(count)


def set_levels(agents: Sequence[StoreAgent]) -> None:
    """Sets the metrics of a process whose agents these are."""
    pools = [(agent.pool.statistics(), agent.block_bytes) for agent in agents]
    metrics.KV_BLOCKS.labels(use="used").set(sum(pool.private + pool.pinned for pool, _ in pools))
    metrics.KV_BLOCKS.labels(use="cached").set(sum(pool.cached - pool.pinned for pool, _ in pools))
    metrics.KV_BLOCKS.labels(use="free").set(sum(pool.free for pool, _ in pools))
    metrics.KV_CACHED_BYTES.labels(tier=Tier.DRAM).set(sum(pool.cached * nbytes for pool, nbytes in pools))
    metrics.KV_LARGEST_HOLE.set(max((agent.largest_hole() for agent in agents), default=0))
    tiers = [(agent.ssd, agent.ssd.pool.statistics(), agent.block_bytes) for agent in agents if agent.ssd is not None]
    if tiers:
        metrics.KV_CACHED_BYTES.labels(tier=Tier.SSD).set(sum(pool.cached * nbytes for _, pool, nbytes in tiers))
        metrics.SSD_BLOCKS.labels(use="used").set(sum(pool.cached for _, pool, _ in tiers))
        metrics.SSD_BLOCKS.labels(use="ready").set(sum(ssd.ready_slots for ssd, _, _ in tiers))
        metrics.SSD_BLOCKS.labels(use="limit").set(sum(pool.total for _, pool, _ in tiers))
        metrics.SSD_PAUSE_SECONDS.set(max(ssd.pause_left_s() for ssd, _, _ in tiers))
