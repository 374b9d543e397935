"""The hands of a store: hears which specs are in use, and lends for each of them as a worker of its own.

A message carries one spec, so a process that lends for several is several workers: ``<worker_id>-<digits of the
spec>``, each with its transfer engine, agent, door and heartbeat, and an equal share of memory and disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from services.store.core.specs import Specs
from services.store.settings import Settings
from shared.bus.bus import Bus, Delivery
from shared.bus.subjects import HELLO, LOAD, ROLLCALL
from shared.clock import Clock
from shared.errors import UserError
from shared.ids import Incarnation, SpecDigest, WorkerId, fresh
from shared.kv import CacheSpec
from shared.messages import Hello, Load, Rollcall
from shared.store.agent import StoreAgent, set_levels
from shared.store.door_frames import MAX_INLINE_BYTES
from shared.store.ssd.slots import DirectoryTaken, read_spec
from shared.transfer import TransferEngine
from shared.worker.presence import Presence
from shared.worker.runtime import SEGMENT, open_agent

log = logging.getLogger(__name__)

FEWEST_BLOCKS = 8


class StoreShell:
    """Lends while open."""

    def __init__(self, settings: Settings, bus: Bus, clock: Clock) -> None:
        self._settings, self._bus, self._clock = settings, bus, clock
        self._specs = Specs(limit=settings.max_specs, forget_after_s=settings.forget_after_s)
        self._lending: dict[SpecDigest, asyncio.Task[None]] = {}
        self._agents: dict[SpecDigest, StoreAgent] = {}
        self._workers: dict[WorkerId, SpecDigest] = {}
        """{engine worker: its spec}"""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def agents(self) -> dict[SpecDigest, StoreAgent]:
        """{spec: the agent that keeps its blocks}, of those that are open."""
        return dict(self._agents)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[asyncio.Future[None]]:
        """Lends for what is on its disk and in its settings at once, for others when they are heard of.

        Yields a future that ends, with an error, when one of its workers did.
        """
        for spec in self._settings.opaque_specs():
            self._specs.keep(spec.digest)
            self._hear(spec)
        for spec in await asyncio.to_thread(self._specs_on_disk):
            self._hear(spec)
        subscriptions = [await self._bus.subscribe(HELLO.any(), self._on_hello),
                         await self._bus.subscribe(LOAD.any(), self._on_load)]
        await self._bus.publish(ROLLCALL.at(), Rollcall(asker=self._settings.worker_id))
        try:
            yield self._failed
        finally:
            for subscription in subscriptions:
                await subscription.close()
            lending = list(self._lending.values())
            for task in lending:
                task.cancel()
            await asyncio.gather(*lending, return_exceptions=True)
            self._failed.cancel()

    async def save(self) -> None:
        """Copies what is in memory and worth it to the disk; the caller bounds the time."""
        await asyncio.gather(*(agent.save() for agent in self._agents.values()))

    async def _on_hello(self, delivery: Delivery) -> None:
        hello: Hello = delivery.message
        if hello.role != "store":
            self._workers[hello.worker] = hello.spec.digest
            self._hear(hello.spec)

    async def _on_load(self, delivery: Delivery) -> None:
        spec = self._workers.get(delivery.message.worker)
        if spec in self._lending:
            self._specs.heard(spec, now=self._clock.monotonic())

    def _hear(self, spec: CacheSpec) -> None:
        digest = spec.digest
        decision = self._specs.heard(digest, now=self._clock.monotonic())
        if decision.end is not None:
            self._lending[decision.end].cancel()
        if not decision.begin:
            if digest not in self._lending:
                log.warning("action=spec_ignored model=%s spec=%s lending=%d", spec.model, digest[:8],
                            len(self._lending))
            return
        before = self._lending.get(decision.end) if decision.end is not None else None
        task = self._lending[digest] = asyncio.create_task(self._lend(spec, after=before), name=f"lend-{digest[:8]}")
        task.add_done_callback(lambda task: self._ended(digest, task))

    def _ended(self, digest: SpecDigest, task: asyncio.Task[None]) -> None:
        if self._lending.get(digest) is task:
            del self._lending[digest]
            self._specs.ended(digest)
        if task.cancelled() or (error := task.exception()) is None:
            return
        # One spec that cannot be served must not end the others; but who has another's name must not go on under it.
        if isinstance(error, UserError) and not isinstance(error, DirectoryTaken):
            log.error("action=lending_ended spec=%s error=%s", digest[:8], error)
            if self._lending:
                return
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _lend(self, spec: CacheSpec, *, after: asyncio.Task[None] | None) -> None:
        """One worker's life, until cancelled."""
        if after is not None:
            await asyncio.wait({after})
        share, digest = self._settings.max_specs, spec.digest
        worker = WorkerId(f"{self._settings.worker_id}-{digest[:8]}")
        num_blocks = self._settings.pool_bytes // share // spec.block_bytes
        if num_blocks < FEWEST_BLOCKS:
            log.warning("action=spec_too_large model=%s block_bytes=%d blocks=%d", spec.model, spec.block_bytes,
                        num_blocks)
            return
        ssd = self._settings.ssd
        settings = msgspec.structs.replace(
            self._settings, worker_id=worker,
            ssd=msgspec.structs.replace(ssd, bytes=ssd.bytes // share, blocks=-(-ssd.blocks // share)))
        incarnation = Incarnation(fresh())
        async with TransferEngine.open(worker=worker, incarnation=incarnation, settings=settings.transfer) as transfer:
            segment = transfer.register(SEGMENT, num_blocks * spec.block_bytes)
            async with open_agent(settings, worker=worker, incarnation=incarnation, spec=spec, num_blocks=num_blocks,
                                  segment=segment, transfer=transfer, bus=self._bus, clock=self._clock,
                                  inline_bytes=MAX_INLINE_BYTES) as agent:
                hello = Hello(worker=worker, incarnation=incarnation, role="store", spec=spec,
                              endpoint=transfer.endpoint, capacity_blocks=num_blocks, max_running=1,
                              started_at_s=self._clock.wall(), pid=os.getpid())
                presence = Presence(self._bus, settings, hello, lambda: self._load(hello, agent))
                self._agents[digest] = agent
                try:
                    async with presence.open():
                        log.info("action=lending model=%s worker=%s blocks=%d", spec.model, worker, num_blocks)
                        if (task := asyncio.current_task()) is not None and task.cancelling():
                            raise asyncio.CancelledError  # the bus's client swallows one that meets it while it flushes
                        await presence.refused
                finally:
                    del self._agents[digest]

    def _load(self, hello: Hello, agent: StoreAgent) -> Load:
        set_levels(list(self._agents.values()))
        return Load(worker=hello.worker, incarnation=hello.incarnation, role="store", kv_seq=agent.seq,
                    free_blocks=agent.pool.available, cached_blocks=agent.pool.statistics().cached,
                    draining=agent.is_retired)

    def _specs_on_disk(self) -> list[CacheSpec]:
        """Of what an earlier life left blocks behind."""
        if not self._settings.ssd.dir:
            return []
        home = self._settings.ssd.worker_directory(WorkerId(self._settings.worker_id))
        found = [read_spec(path) for path in sorted(home.parent.glob(f"{home.name}-*/*"))
                 if path.parent.name == f"{home.name}-{path.name[:8]}"]
        return [spec for spec in found if spec is not None]
