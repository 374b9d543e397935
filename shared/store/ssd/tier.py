"""The SSD tier as its store agent uses it.

A :class:`~shared.store.blocks.BlockPool` says which block lies in which slot; slots that have no room on the disk yet
are private slots of the operation ``_UNBACKED`` and are freed as the file grows. Reads run on several threads, writes
on one, which also keeps the order of a slot's writes. The event loop only ever waits for futures.

Memory that a thread reads into, or writes from, stays its own until the call is over, however late that is: see
:attr:`Reading.settled` and :meth:`SsdTier.write`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.clock import Clock
from shared.errors import SettingError
from shared.ids import BlockKey, OperationId, fresh
from shared.kv import CacheSpec, Tier
from shared.messages import StoredBlock
from shared.store.blocks import BlockPool
from shared.store.policies.lru import Lru
from shared.store.settings import SsdSettings
from shared.store.ssd import record
from shared.store.ssd.files import FULL, DiskFiles, Files
from shared.store.ssd.record import Damaged
from shared.store.ssd.slots import SlotFiles, slots_for
from shared.store.ssd.threads import DiskThreads, Job
from shared.store.tiers import Breaker
from shared.telemetry import metrics
from shared.units import format_bytes

log = logging.getLogger(__name__)
T = TypeVar("T")

WRITE_BLOCKS = 16
"""Most blocks of one write: as many are held in DRAM while it lasts."""
_READ_BYTES = 4 << 20
"""One job reads as many blocks as make so much, so that small blocks do not cost a job each."""
_WRITE_PATIENCE = 5
"""Times as long as a read may a write take: nobody waits for it."""
_UNBACKED = OperationId("unbacked")
_FULL_PAUSE_S = 30.0
"""So long after the disk was full the file does not try to grow."""
_CLOSE_S = 2.0
_WRITES = 64
"""Jobs of the writing thread that may wait."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What came of a read: the first ``blocks`` of the asked ones are in their buffers, verified."""

    blocks: int
    why: str
    """Why not all: ``corrupt``, ``error``, ``stalled``, ``paused``, ``busy`` or ``missing``; empty when all came."""
    settled: asyncio.Future[None] | None
    """Ends when no thread can touch the buffers any more; ``None`` when that is so now."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one job reads: slots into buffers."""

    slots: Sequence[int]
    buffers: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class _BatchRead:
    blocks: int
    error: Exception | None


class SsdTier:
    """One per store agent; made by :meth:`open`. Everything here runs on the agent's event loop.

    ``on_stored`` and ``on_evicted`` (keys, reason) are told of every change; set them before anything is written.
    """

    def __init__(self, slots: SlotFiles, pool: BlockPool, settings: SsdSettings, spec: CacheSpec, clock: Clock) -> None:
        self._slots, self.pool, self._settings, self._clock = slots, pool, settings, clock
        self._block_bytes = spec.block_bytes
        self._breaker = Breaker(pause_s=settings.pause_s)
        self._readers = DiskThreads("ssd-read", count=settings.readers, limit=settings.queue)
        self._writer = DiskThreads("ssd-write", count=1, limit=_WRITES)
        self._doomed: set[BlockKey] = set()
        """Lost blocks that are still pinned: told as evicted, matched no more, dropped when their pins end."""
        self._stale: deque[int] = deque()
        """Slots whose records are to be erased: by one job of the writing thread, however many they become."""
        self._will_erase = False
        """Does that job wait, or has it not looked yet?"""
        self._is_full = False
        """The file could not grow when it last tried: what is ready is all there is."""
        self._full_until_s = -math.inf
        self._background: set[asyncio.Task[None]] = set()
        self.on_stored: Callable[[Sequence[StoredBlock]], None] = lambda blocks: None
        self.on_evicted: Callable[[Sequence[BlockKey], str], None] = lambda keys, reason: None

    @classmethod
    @asynccontextmanager
    async def open(cls, directory: Path, spec: CacheSpec, settings: SsdSettings, *, clock: Clock,
                   files: Files | None = None) -> AsyncIterator[SsdTier | None]:
        """The tier in ``directory`` with the blocks it held; ``None`` when the disk fails.

        Raises :class:`SettingError` when the directory is not ours to use, or no block fits into what it may take.
        """
        began_s = clock.monotonic()
        most = slots_for(spec, nbytes=settings.bytes, blocks=settings.blocks)
        if most == 0:
            raise SettingError("ssd_bytes", format_bytes(settings.bytes),
                               f"room for a block of {format_bytes(spec.block_bytes)}; or leave ssd_dir empty")
        try:
            slots, pool = await asyncio.to_thread(
                _open, directory, spec, most, files or DiskFiles(), clock.monotonic())
        except OSError as error:
            metrics.SSD_FAILURES.labels(call="open", why="error").inc()
            log.error("action=ssd_unusable dir=%s error=%s", directory, error)
            yield None
            return
        tier = cls(slots, pool, settings, spec, clock)
        found = slots.found
        metrics.SSD_RESTORED_BLOCKS.labels(what="usable").inc(len(found.records))
        metrics.SSD_RESTORED_BLOCKS.labels(what="damaged").inc(found.damaged)
        metrics.SSD_RESTORED_BLOCKS.labels(what="orphaned").inc(found.orphans)
        log.info("action=ssd_opened dir=%s blocks=%d damaged=%d orphans=%d slots=%d seconds=%.3f", directory,
                 len(found.records), found.damaged, found.orphans, most, clock.monotonic() - began_s)
        try:
            yield tier
        finally:
            await tier._close()

    # --- reading -----------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[StoredBlock]:
        """Every block here, ``tier`` ``ssd``, in no order."""
        return (block for block in self.pool.blocks() if block.key not in self._doomed)

    def holds(self, key: BlockKey) -> bool:
        """Is the block here?"""
        return self.pool.block(key) is not None and key not in self._doomed

    def has(self, key: BlockKey) -> bool:
        """Does a slot hold the block, usable or not? Then it cannot be written."""
        return self.pool.block(key) is not None

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading ``keys`` can be read now: none while the disk is left alone."""
        if not self._breaker.allows(self._clock.monotonic()):
            return 0
        return next((i for i, key in enumerate(keys) if not self.holds(key)), len(keys))

    def pause_left_s(self) -> float:
        """Seconds for which the disk is still left alone."""
        return self._breaker.pause_left_s(self._clock.monotonic())

    def timeout_s(self, blocks: int) -> float:
        """How long a call over so many blocks may take."""
        return self._settings.timeout_s + blocks * self._block_bytes / self._settings.min_bytes_per_s

    @property
    def ready_slots(self) -> int:
        """Slots that have room on the disk."""
        return self._slots.ready_slots

    @property
    def capacity(self) -> int:
        """Blocks that it holds at most: what it may take, or what a full disk left it."""
        return self._slots.ready_slots if self._is_full else self.pool.statistics().total

    async def make_room(self) -> int:
        """How many blocks, up to ``WRITE_BLOCKS`` for sure, can be written without evicting others; the file grows for
        them when it may and the disk lets it."""
        if self.pool.statistics().free < WRITE_BLOCKS and not self.pause_left_s():
            await self._grow()
        return self.pool.statistics().free

    async def read(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], *,
                   timeout_s: float | None = None) -> Reading:
        """Reads the blocks ``keys``, a stretch of one chain, into ``buffers`` of a block's size each.

        Ends within ``timeout_s``, or :meth:`timeout_s` when that is sooner. Blocks that turn out to be lost are
        dropped, with all that continues them. Never raises for what the disk does.
        """
        count = self.match(keys)
        if count == 0:
            return Reading(0, "paused" if self.pause_left_s() else "missing", None)
        operation = OperationId(fresh("read", 4))
        now = self._clock.monotonic()
        slots = [self.pool.pin(operation, [key], now=now)[0] for key in keys[:count]]
        jobs: list[Job[_BatchRead]] = []
        batch_blocks = max(1, _READ_BYTES // self._block_bytes)
        for first in range(0, count, batch_blocks):
            batch = _Batch(slots[first:first + batch_blocks], buffers[first:min(first + batch_blocks, count)])
            job = self._readers.submit(lambda batch=batch: self._read_batch(batch))  # type: ignore[misc]
            if job is None:
                break
            jobs.append(job)
        patience_s = min(self.timeout_s(count), math.inf if timeout_s is None else timeout_s)
        try:
            if jobs:
                await asyncio.wait({job.future for job in jobs}, timeout=patience_s)
        finally:
            settled = self._settle(operation, jobs)
        came, why = self._came(keys, jobs, batch_blocks, count, late=patience_s >= self._settings.timeout_s)
        metrics.SSD_READ_BLOCKS.labels(outcome=why or "ok").inc(len(keys) - came if why else came)
        if why and came:
            metrics.SSD_READ_BLOCKS.labels(outcome="ok").inc(came)
        metrics.SSD_SECONDS.labels(call="read").observe(self._clock.monotonic() - now)
        return Reading(came, why or ("" if came == len(keys) else "missing"), settled)

    def _read_batch(self, batch: _Batch) -> _BatchRead:
        """On a reading thread."""
        for done, (slot, buffer) in enumerate(zip(batch.slots, batch.buffers, strict=True)):
            try:
                self._slots.read(slot, buffer)
            except (OSError, Damaged) as error:
                return _BatchRead(done, error)
        return _BatchRead(len(batch.slots), None)

    def _came(self, keys: Sequence[BlockKey], jobs: Sequence[Job[_BatchRead]], batch_blocks: int, count: int, *,
              late: bool) -> tuple[int, str]:
        """How many leading blocks are there, and why not ``count``."""
        now = self._clock.monotonic()
        came, why = 0, ""
        for number, job in enumerate(jobs):
            if not job.future.done() or job.future.cancelled():
                if late:  # not because the caller had no time
                    self._fail("read", "stalled", "too slow")
                    self._breaker.stalled(now)
                why = why or "stalled"
                break
            result = job.future.result()
            came = came if why else number * batch_blocks + result.blocks
            if result.error is not None:
                lost = keys[number * batch_blocks + result.blocks]
                mine = "corrupt" if isinstance(result.error, Damaged) else "error"
                why = why or mine
                self._fail("read", mine, str(result.error))
                if mine == "error":
                    self._breaker.failed(now)
                self.lose([lost], "corrupt")
            else:
                self._breaker.succeeded()
        if not why and came < count:
            why = "busy"
        return came, why

    def _settle(self, operation: OperationId, jobs: Sequence[Job[_BatchRead]]) -> asyncio.Future[None] | None:
        """Gives up what has not begun, and ends ``operation`` once nothing runs any more."""
        for job in jobs:
            if not job.future.done():
                self._readers.abandon(job)
        running = [job.future for job in jobs if not job.future.done()]
        if not running:
            self._end(operation)
            return None
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            try:
                await asyncio.wait(running)
            finally:
                self._end(operation)
                if not settled.done():
                    settled.set_result(None)

        self._spawn(wait(), f"ssd-settle-{operation}")
        return settled

    # --- changing ----------------------------------------------------------------------------------------------

    async def write(self, blocks: Sequence[StoredBlock], buffers: Sequence[memoryview]) -> int:
        """Copies ``blocks`` (up to ``WRITE_BLOCKS``, parents before children) from their ``buffers``; how many were
        written. One whose parent is not here is left out.

        Returns only when no thread reads the buffers any more, also if the disk stalls: hold them until then. Never
        raises for what the disk does.
        """
        if self.pause_left_s() or not blocks:
            return 0
        operation = OperationId(fresh("write", 4))
        try:
            plan = await self._plan_write(operation, blocks, buffers)
            if not plan:
                return 0
            return await self._write(operation, plan)
        finally:
            self._end(operation)

    async def _plan_write(self, operation: OperationId, blocks: Sequence[StoredBlock], buffers: Sequence[memoryview],
                          ) -> list[tuple[int, StoredBlock, memoryview]]:
        """A slot for each block that can be written now: its parent is here or is written before it."""
        wanted: dict[BlockKey, tuple[StoredBlock, memoryview]] = {}
        for block, buffer in zip(blocks, buffers, strict=True):
            if self.pool.block(block.key) is not None:
                continue
            if block.depth and block.parent not in wanted and not self.holds(block.parent):
                continue
            if record.fits(block):
                wanted[block.key] = msgspec.structs.replace(block, tier=Tier.SSD), buffer
        if len(wanted) > self.pool.statistics().free:
            await self._grow()
        now = self._clock.monotonic()
        chosen: list[tuple[int, StoredBlock, memoryview]] = []
        keys: set[BlockKey] = set()
        for block, buffer in wanted.values():
            above = block.depth > 0 and block.parent not in keys
            if above and not self.pool.pin(operation, [block.parent], now=now, use=False):
                continue
            allocation = self.pool.allocate(operation, 1, now=now)
            if allocation is None:
                break
            self._tell_evicted(allocation.evicted, "capacity")
            chosen.append((allocation.slots[0], block, buffer))
            keys.add(block.key)
        return chosen

    async def _write(self, operation: OperationId, plan: Sequence[tuple[int, StoredBlock, memoryview]]) -> int:
        def write() -> tuple[int, OSError | None]:
            for done, (slot, block, buffer) in enumerate(plan):
                try:
                    self._slots.write(slot, block, buffer)
                except OSError as error:
                    return done, error
            return len(plan), None

        began_s = self._clock.monotonic()
        job = self._writer.submit(write)
        if job is None:
            return 0
        done, error = await self._see_through(job, _WRITE_PATIENCE * self.timeout_s(len(plan)))
        now = self._clock.monotonic()
        metrics.SSD_SECONDS.labels(call="write").observe(now - began_s)
        if error is None:
            self._breaker.succeeded()
        elif error.errno in FULL:
            self._full(error)
        else:
            self._fail("write", "error", str(error))
            self._breaker.failed(now)
        stored = []
        for slot, block, _ in plan[:done]:
            if self.pool.seal(operation, slot, block, now=now):
                stored.append(block)
        metrics.SSD_WRITTEN_BLOCKS.inc(len(stored))
        if stored:
            self.on_stored(stored)
        return done

    async def _grow(self) -> None:
        """Lets the file grow by an extent, when it may and the disk lets it; a full one is tried again later."""
        ready, most = self._slots.ready_slots, self.pool.statistics().total
        if ready >= most or self._clock.monotonic() < self._full_until_s:
            return
        job = self._writer.submit(self._slots.grow)
        if job is None:
            return
        try:
            now_ready = await self._see_through(job, _WRITE_PATIENCE * self._settings.timeout_s)
        except OSError as error:
            self._full(error)
            return
        self._is_full = False
        _free(self.pool, range(ready, now_ready), _UNBACKED)

    async def _see_through(self, job: Job[T], timeout_s: float) -> T:
        """The job's result, however late: the memory it works on is in use until then. A late one trips the breaker.

        Cancelled, it still waits for a few seconds; it is only at the end of all that somebody does, when nobody fills
        that memory again.
        """
        try:
            done, _ = await asyncio.wait({job.future}, timeout=timeout_s)
            if not done:
                self._fail("write", "stalled", f"not done after {timeout_s:.3g} s")
                self._breaker.stalled(self._clock.monotonic())
                await asyncio.wait({job.future})
        except asyncio.CancelledError:
            self._writer.abandon(job)
            await asyncio.wait({job.future}, timeout=_CLOSE_S)
            raise
        return job.future.result()

    def lose(self, keys: Sequence[BlockKey], reason: str) -> list[BlockKey]:
        """Drops blocks that cannot be used any more, and all that continues them; the keys that are gone."""
        lost = [key for key in self.pool.continuing(keys) if key not in self._doomed]
        self._doomed.update(lost)
        if lost:
            self.on_evicted(lost, reason)
        self._bury()
        return lost

    def drop(self, keys: Sequence[BlockKey], reason: str) -> list[BlockKey]:
        """Drops those of ``keys`` that nobody uses and nothing here continues; the keys that are gone."""
        slots = {key: self.pool.slot(key) for key in keys if self.pool.block(key) is not None}
        gone = self.pool.drop(list(slots))
        self._erase([slots[key] for key in gone])
        self._tell_evicted(gone, reason)
        self._doomed.difference_update(gone)
        return gone

    def evict_tenant(self, tenant: str, count: int, reason: str) -> int:
        """Evicts up to ``count`` of the tenant's blocks, coldest leaves first; how many went."""
        gone = self.pool.evict_tenant(tenant, count, now=self._clock.monotonic())
        self._erase([slot for _, slot in gone])
        self._tell_evicted([key for key, _ in gone], reason)
        return len(gone)

    # --- inside ------------------------------------------------------------------------------------------------

    def _tell_evicted(self, keys: Sequence[BlockKey], reason: str) -> None:
        told = [key for key in keys if key not in self._doomed]
        if told:
            self.on_evicted(told, reason)
        self._doomed.difference_update(keys)

    def _bury(self) -> None:
        """Drops what is doomed and not pinned any more."""
        if self._doomed:
            slots = {key: self.pool.slot(key) for key in self._doomed}
            gone = self.pool.drop(list(self._doomed))
            self._doomed.difference_update(gone)
            self._erase([slots[key] for key in gone])

    def _erase(self, slots: Sequence[int]) -> None:
        """Forgets on the disk what the slots held. If that fails, a restart finds blocks that are good all the same.

        The job is ahead of whatever fills these slots again.
        """
        def erase() -> None:
            self._will_erase = False  # before it looks: what is added later has a job of its own
            failed = False
            while True:
                try:
                    slot = self._stale.popleft()
                except IndexError:
                    return
                try:
                    if not failed:
                        self._slots.erase(slot)
                except OSError as error:
                    log.warning("action=ssd_erase_failed slot=%d error=%s", slot, error)
                    failed = True  # the others are forgotten here too: erased later, they might hold something else

        self._stale.extend(slots)
        if slots and not self._will_erase:
            self._will_erase = True
            if self._writer.submit(erase) is None:
                self._will_erase = False
                self._stale.clear()

    def _end(self, operation: OperationId) -> None:
        self.pool.release(operation)
        self._bury()

    def _full(self, error: OSError) -> None:
        self._full_until_s = self._clock.monotonic() + _FULL_PAUSE_S
        metrics.SSD_FAILURES.labels(call="write", why="full").inc()
        log.log(logging.DEBUG if self._is_full else logging.WARNING, "action=ssd_full slots=%d error=%s",
                self._slots.ready_slots, error)
        self._is_full = True

    def _fail(self, call: str, why: str, message: str) -> None:
        metrics.SSD_FAILURES.labels(call=call, why=why).inc()
        log.warning("action=ssd_failed call=%s why=%s error=%s", call, why, message)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _close(self) -> None:
        """Ends the threads; a disk that does not answer is left behind."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        ended = await asyncio.to_thread(self._end_threads)
        if not ended:
            log.error("action=ssd_left_behind why=%s", "a call to the disk does not end")

    def _end_threads(self) -> bool:
        if not all([threads.close(_CLOSE_S) for threads in (self._readers, self._writer)]):
            return False
        self._slots.close()
        return True


def _open(directory: Path, spec: CacheSpec, most: int, files: Files, now: float) -> tuple[SlotFiles, BlockPool]:
    """The files and what they held; on a thread, since a large index takes seconds. Raises what the files raise."""
    slots = SlotFiles.open(directory, spec, max_slots=most, files=files)
    try:
        return slots, _restored(slots, most, now)
    except BaseException:
        slots.close()
        raise


def _restored(slots: SlotFiles, most: int, now: float) -> BlockPool:
    """A pool with what was found, each in its slot; slots without room on the disk belong to ``_UNBACKED``.

    Its policy is LRU whatever memory's is: that one chose what is written, and the order of writing is the order in
    which memory gave it up.
    """
    pool, found = BlockPool(most, Lru()), slots.found.records
    restoring = OperationId("restore")
    pool.allocate(_UNBACKED, most, now=now - 1.0)
    pool.move(range(slots.ready_slots), _UNBACKED, restoring)
    for number, (slot, held) in enumerate(found):
        pool.seal(restoring, slot, held.block, now=now - 1.0 + number / len(found))
    used = {slot for slot, _ in found}
    _free(pool, [slot for slot in range(slots.ready_slots) if slot not in used], restoring)
    pool.release(restoring)
    return pool


def _free(pool: BlockPool, slots: Sequence[int], holder: OperationId) -> None:
    """Frees private slots so that the lowest are used first: blocks of a chain then lie behind each other."""
    freeing = OperationId(f"{holder}.free")
    for slot in reversed(slots):
        pool.move([slot], holder, freeing)
        pool.release(freeing)
