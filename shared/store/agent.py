"""The store agent: acts for one worker's block pool on the bus and the transfer engine.

It announces what is stored and evicted, answers "what did I miss?", pushes blocks to those who ask (the owner decides
and sends; nobody reads its memory), and fetches blocks from other owners.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby

from shared.bus.bus import Bus, Delivery
from shared.bus.subjects import KV_EVICTED, KV_STORED, KV_SYNC, PUSH
from shared.clock import Clock
from shared.errors import BusError, NoResponders, RequestTimeout
from shared.ids import BlockKey, Incarnation, OperationId, RequestId, WorkerId, fresh
from shared.kv import CacheSpec, Tier, pack_keys, unpack_keys
from shared.messages import Evicted, KvEvent, PushBlocks, Pushed, Range, StoredBlock, SyncEvents, SyncReply
from shared.store.blocks import BlockPool, PoolStatistics
from shared.store.events import EventLog
from shared.telemetry import metrics, tracing
from shared.transfer import Slice, TransferEngine

log = logging.getLogger(__name__)

_RELEASE_PATIENCE_S = 0.5
"""How long a fetch waits for its writer to be done before it does without what came."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a chain that one owner is asked for."""

    owner: WorkerId
    blocks: Sequence[StoredBlock]
    """As they shall be sealed here: origin ``received``, source the owner."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of asking one owner: the first ``blocks`` of its part are cached and pinned now."""

    owner: WorkerId
    blocks: int
    nbytes: int
    seconds: float
    path: str
    why: str = ""
    """Why fewer than wanted; empty when all came."""


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
    """One per worker; everything here runs on the worker's event loop."""

    def __init__(self, *, worker: WorkerId, incarnation: Incarnation, spec: CacheSpec, pool: BlockPool,
                 transfer: TransferEngine, segment: str, bus: Bus, clock: Clock) -> None:
        self._worker, self._spec, self._segment = worker, spec, segment
        self._bus, self._clock, self._transfer = bus, clock, transfer
        self.pool = pool
        self._log = EventLog(worker, incarnation, spec.digest, pool.blocks)
        #: what happened and is not announced yet, in order: a stored block, or (evicted key, reason)
        self._pending: list[StoredBlock | tuple[BlockKey, str]] = []
        self._wake = asyncio.Event()
        self._released = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def seq(self) -> int:
        """Number of the last announced batch, for heartbeats."""
        return self._log.seq

    @asynccontextmanager
    async def open(self) -> AsyncIterator[StoreAgent]:
        """Answers and announces while the context is open; afterwards nothing of it runs any more."""
        serving = [
            await self._bus.serve(KV_SYNC.at(worker=self._worker), self._on_sync),
            await self._bus.serve(PUSH.at(worker=self._worker), self._on_push, concurrency=16),
        ]
        try:
            async with asyncio.TaskGroup() as group:  # an announcer that dies ends the worker instead of its news
                announcer = group.create_task(self._announce(), name="store-announce")
                try:
                    yield self
                finally:
                    announcer.cancel()
        finally:
            for subscription in serving:
                await subscription.close()
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)

    # --- the pool, announced -----------------------------------------------------------------------------------

    def pin(self, operation: OperationId, keys: Sequence[BlockKey]) -> list[int]:
        """Pins the leading cached ``keys``; their slots, in order."""
        return self.pool.pin(operation, keys, now=self._clock.monotonic())

    def allocate(self, operation: OperationId, count: int) -> list[int] | None:
        """``count`` private slots, or ``None`` when there is no room now."""
        allocation = self.pool.allocate(operation, count, now=self._clock.monotonic())
        if allocation is None:
            return None
        self.announce_evicted(allocation.evicted, "capacity")
        return allocation.slots

    async def wait_allocate(self, operation: OperationId, count: int) -> list[int]:
        """Waits until there is room; the caller bounds the wait."""
        while True:
            released = self.next_release
            slots = self.allocate(operation, count)
            if slots is not None:
                return slots
            await released.wait()

    @property
    def next_release(self) -> asyncio.Event:
        """Is set when an operation ends from now on. Take it before looking for room, so that no end is missed."""
        return self._released

    def seal(self, operation: OperationId, slot: int, block: StoredBlock) -> None:
        """Makes a filled private slot reusable and says so (unless its twin was first)."""
        if self.pool.seal(operation, slot, block, now=self._clock.monotonic()):
            self.announce_stored([block])

    def release(self, operation: OperationId) -> None:
        """Ends ``operation``: unpins, frees, and lets whoever waits for room try again."""
        self.pool.release(operation)
        self._released.set()
        self._released = asyncio.Event()

    def announce_stored(self, blocks: Sequence[StoredBlock]) -> None:
        """Queues the news of stored blocks; the next turn of the loop sends it."""
        for block in blocks:
            metrics.KV_STORED_BLOCKS.labels(origin=block.origin).inc()
        self._pending.extend(blocks)
        self._wake.set()

    def announce_evicted(self, keys: Sequence[BlockKey], reason: str) -> None:
        """Queues the news of evicted blocks."""
        if keys:
            self._pending.extend((key, reason) for key in keys)
            metrics.KV_EVICTED_BLOCKS.labels(reason=reason).inc(len(keys))
            self._wake.set()

    def observe(self) -> PoolStatistics:
        """Counts of the pool's slots, which also become metrics."""
        statistics = self.pool.statistics()
        metrics.KV_BLOCKS.labels(use="used").set(statistics.private + statistics.pinned)
        metrics.KV_BLOCKS.labels(use="cached").set(statistics.cached - statistics.pinned)
        metrics.KV_BLOCKS.labels(use="free").set(statistics.free)
        metrics.KV_CACHED_BYTES.labels(tier=Tier.DRAM).set(statistics.cached * self._spec.block_bytes)
        return statistics

    def range(self, slot: int) -> Range:
        """The slot's place in the registered segment."""
        return Range(segment=self._segment, offset=slot * self._spec.block_bytes, length=self._spec.block_bytes)

    # --- fetching ----------------------------------------------------------------------------------------------

    async def fetch(self, operation: OperationId, request: RequestId, parts: Sequence[Part], slots: Sequence[int], *,
                    timeout_s: float) -> tuple[list[Fetched], list[int]]:
        """Asks several owners at once to push the parts of one chain into ``slots``, private ones of ``operation``.

        ``slots`` are one a block of all parts, in order. Returns one answer a part, and the slots that were not used
        and may be. Whatever the owners say, only blocks that our transfer engine has verified count, and only up to
        the first gap; those are sealed as received and pinned by ``operation``. The block before the first part must
        be cached and pinned. Never raises for what others do; ends within ``timeout_s`` and a little.
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
                self.pin(operation, [block.key for block in part.blocks[:usable]])
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
        ranges = [self.range(slot) for slot in slots]
        ask = PushBlocks(
            operation=landing, request=request, keys=pack_keys([block.key for block in part.blocks]),
            endpoint=self._transfer.endpoint, grant=self._transfer.grant(landing, ranges, ttl_s=timeout_s),
            slots=ranges, deadline_s=timeout_s)
        path, why, quiet = "", "", True
        try:
            reply: Pushed = await self._bus.request(PUSH.at(worker=part.owner), ask, timeout_s=timeout_s)
            path, why = reply.path, reply.why
        except NoResponders:
            why = "peer"
        except RequestTimeout:
            why = "deadline"
        except BusError as error:
            why = "bus"
            log.warning("action=fetch_failed owner=%s error=%s", part.owner, error)
        self._transfer.shut(landing)  # or a straggler could write once we have looked
        arrived = next((i for i, place in enumerate(ranges) if not self._transfer.covered(landing, place)), len(slots))
        try:
            await asyncio.wait_for(self._transfer.release(landing), _RELEASE_PATIENCE_S)
        except TimeoutError:
            # A writer that stopped half-way still has our memory mapped: nothing in these slots can be trusted, and
            # they stay out of use until it is gone.
            arrived, why, quiet = 0, "deadline", False
        return _Landed(arrived, self._clock.monotonic() - started_s, path, why, quiet)

    async def release_landing(self, operation: OperationId) -> None:
        """Revokes ``operation``'s grant and frees its slots once no writer can touch them any more."""
        await self._transfer.release(operation)
        self.release(operation)

    def release_landing_soon(self, operation: OperationId) -> None:
        """:meth:`release_landing` in the background."""
        self.spawn(self.release_landing(operation), f"release-{operation}")

    def spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        """Runs ``work`` in the background; cancelled when the agent closes."""
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- inside ------------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            pending, self._pending = self._pending, []
            at_s = self._clock.wall()
            for kind, run in groupby(pending, key=lambda news: "" if isinstance(news, StoredBlock) else news[1]):
                event: KvEvent
                if kind:
                    event = self._log.evicted([news[0] for news in run if not isinstance(news, StoredBlock)],
                                              at_s=at_s, reason=kind)
                else:
                    event = self._log.stored([news for news in run if isinstance(news, StoredBlock)], at_s=at_s)
                subject = KV_EVICTED if isinstance(event, Evicted) else KV_STORED
                try:
                    await self._bus.publish(subject.at(worker=self._worker), event)
                except BusError as error:
                    # Its number is spent: the next heartbeat shows the gap, and who cares asks.
                    log.warning("action=announce_lost seq=%d error=%s", event.seq, error)

    async def _on_sync(self, delivery: Delivery) -> SyncReply:
        reply = self._log.since(delivery.message, now=self._clock.monotonic())
        metrics.KV_SYNCS.labels(kind="events" if isinstance(reply, SyncEvents) else "snapshot").inc()
        return reply

    async def _on_push(self, delivery: Delivery) -> Pushed:
        ask: PushBlocks = delivery.message
        keys = unpack_keys(ask.keys)
        if len(keys) != len(ask.slots) or any(place.length != self._spec.block_bytes for place in ask.slots):
            return Pushed(operation=ask.operation, blocks=0, nbytes=0, seconds=0.0, path="", why="shape")
        sending = OperationId(f"{ask.operation}.{fresh('send', 3)}")
        began_s = self._clock.wall()
        slots = self.pin(sending, keys)
        try:
            slices = [Slice(self._segment, self.range(slot).offset, place)
                      for slot, place in zip(slots, ask.slots, strict=False)]
            result = await self._transfer.push(ask.endpoint, slices, ask.grant, timeout_s=ask.deadline_s)
        finally:
            self.release(sending)
        why = result.error.code if result.error else ("missing" if len(slots) < len(keys) else "")
        tracing.record("kv.send", start_s=began_s, end_s=self._clock.wall(), attributes={
            "moonbus.reader": ask.endpoint.worker, "moonbus.blocks": result.arrived, "moonbus.asked": len(keys),
            "moonbus.bytes": result.nbytes, "moonbus.path": result.path, "moonbus.why": why})
        return Pushed(operation=ask.operation, blocks=result.arrived, nbytes=result.nbytes, seconds=result.seconds,
                      path=result.path, why=why)
