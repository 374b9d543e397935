"""Opens everything a worker needs, in order, and closes it in reverse."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from shared.bus.bus import Bus
from shared.bus.nats import NatsBus
from shared.clock import Clock, SystemClock
from shared.engine.thread import EngineThread
from shared.errors import SettingError
from shared.ids import Incarnation, WorkerId, fresh
from shared.kv import CacheSpec
from shared.lifecycle import Lifecycle, run
from shared.messages import Hello, Role
from shared.models import ModelDir, cache_spec, resolve
from shared.store.agent import StoreAgent
from shared.store.blocks import BlockPool
from shared.store.door import INLINE_BYTES, Door
from shared.store.policies import POLICIES, make
from shared.store.ssd.files import Files
from shared.store.ssd.slots import check_directory
from shared.store.ssd.tier import SsdTier
from shared.transfer import Segment, TransferEngine
from shared.units import format_bytes
from shared.worker.jobs import Shell, serving
from shared.worker.presence import Presence
from shared.worker.room import Room
from shared.worker.settings import StoreSettings, WorkerSettings

log = logging.getLogger(__name__)
S = TypeVar("S", bound=StoreSettings)

SEGMENT = "kv"
_FEWEST_BLOCKS = 8


@dataclass(frozen=True)
class Worker:
    """An opened worker: everything its service works with."""

    id: WorkerId
    incarnation: Incarnation
    role: Role
    settings: WorkerSettings
    model: ModelDir
    spec: CacheSpec
    num_blocks: int
    clock: Clock
    bus: Bus
    transfer: TransferEngine
    agent: StoreAgent
    engine: EngineThread
    room: Room

    def hello(self, *, max_running: int) -> Hello:
        """How the worker introduces itself."""
        return Hello(
            worker=self.id, incarnation=self.incarnation, role=self.role, spec=self.spec,
            endpoint=self.transfer.endpoint, capacity_blocks=self.num_blocks, max_running=max_running,
            started_at_s=self.clock.wall(), device=self.settings.device, profile=self.engine.profile, pid=os.getpid(),
            elastic=self.settings.elastic,
        )


@asynccontextmanager
async def open_worker(settings: WorkerSettings, role: Role, *, files: Files | None = None) -> AsyncIterator[Worker]:
    """The worker's parts, from the model on disk to the store agent on the bus; ``settings`` name the worker.

    ``files``: what the SSD tier's files are opened with, for tests.
    """
    worker = WorkerId(settings.worker_id)
    await asyncio.to_thread(check, settings)
    incarnation = Incarnation(fresh())
    model = await asyncio.to_thread(resolve, settings.model, settings.cache_path())
    spec = cache_spec(model, dtype=settings.dtype, block_tokens=settings.block_tokens)
    num_blocks = settings.pool_bytes // spec.block_bytes
    if num_blocks < _FEWEST_BLOCKS:
        raise SettingError("pool_bytes", format_bytes(settings.pool_bytes),
                           f"room for at least {_FEWEST_BLOCKS} blocks of {format_bytes(spec.block_bytes)}")
    clock = SystemClock()
    async with (
        NatsBus.connect(settings.nats_url, name=worker, credentials=settings.nats_credentials,
                        wait_s=settings.nats_wait_s) as bus,
        TransferEngine.open(worker=worker, incarnation=incarnation, settings=settings.transfer) as transfer,
    ):
        segment = transfer.register(SEGMENT, num_blocks * spec.block_bytes)
        began_s = time.monotonic()
        async with EngineThread.open(model, spec, num_blocks, segment.buffer, device=settings.device,
                                     threads=settings.threads) as engine:
            log.info("action=engine_loaded model=%s blocks=%d seconds=%.2f", model.name, num_blocks,
                     time.monotonic() - began_s)
            async with open_agent(
                settings, worker=worker, incarnation=incarnation, spec=spec, num_blocks=num_blocks,
                segment=segment, transfer=transfer, bus=bus, clock=clock, files=files,
                on_handed_out=engine.handed_out,
            ) as agent:
                yield Worker(id=worker, incarnation=incarnation, role=role, settings=settings, model=model, spec=spec,
                             num_blocks=num_blocks, clock=clock, bus=bus, transfer=transfer, agent=agent, engine=engine,
                             room=Room(num_blocks))


@asynccontextmanager
async def open_agent(settings: StoreSettings, *, worker: WorkerId, incarnation: Incarnation, spec: CacheSpec,
                     num_blocks: int, segment: Segment, transfer: TransferEngine, bus: Bus, clock: Clock,
                     files: Files | None = None, inline_bytes: int = INLINE_BYTES,
                     on_handed_out: Callable[[Sequence[int]], None] | None = None) -> AsyncIterator[StoreAgent]:
    """A store agent over the registered ``segment``, with the SSD tier that ``settings`` want and a door for clients,
    whose puts of up to ``inline_bytes`` this loop copies itself.
    """
    await asyncio.to_thread(check, settings)
    pool = BlockPool(num_blocks, make(settings.cache_policy))
    async with AsyncExitStack() as stack:
        ssd = None
        if settings.ssd.dir:
            ssd = await stack.enter_async_context(SsdTier.open(
                settings.ssd.directory(worker, spec.digest), spec, settings.ssd, clock=clock, files=files))
        agent = StoreAgent(worker=worker, incarnation=incarnation, spec=spec, pool=pool, transfer=transfer,
                           segment=SEGMENT, memory=segment.buffer, bus=bus, clock=clock, ssd=ssd,
                           ssd_settings=settings.ssd, on_handed_out=on_handed_out)
        await stack.enter_async_context(agent.open())
        await stack.enter_async_context(Door.open(
            agent=agent, spec=spec, segment=segment, num_blocks=num_blocks, bus=bus, worker=worker,
            incarnation=incarnation, clock=clock, settings=settings.transfer, inline_bytes=inline_bytes,
            all_tenants=settings.door_tenants == "all"))
        yield agent


def check(settings: StoreSettings) -> None:
    """Raises :class:`SettingError` for what can be known to be wrong before anything is opened."""
    if settings.cache_policy not in POLICIES:
        raise SettingError("cache_policy", settings.cache_policy, f"one of {', '.join(POLICIES)}")
    if isinstance(settings, WorkerSettings) and settings.chunk_tokens % settings.block_tokens:
        raise SettingError("chunk_tokens", settings.chunk_tokens,
                           f"a multiple of block_tokens, which is {settings.block_tokens}")
    if settings.ssd.dir:
        check_directory(settings.ssd.dir)


def named(settings: S, role: Role) -> S:
    """``settings`` with a worker id; an SSD is only found again by who has a name of its own."""
    if settings.ssd.dir and not settings.worker_id:
        raise SettingError("worker_id", "", "a name, since ssd_dir is set: blocks are found again by it")
    if settings.worker_id and not re.fullmatch(r"[A-Za-z0-9_-]+", settings.worker_id):
        raise SettingError("worker_id", settings.worker_id, "letters, digits, - and _")
    return msgspec.structs.replace(settings, worker_id=settings.worker_id or fresh(role, 4))


def run_worker(settings: WorkerSettings, role: Role, shells_of: Callable[[Worker], Sequence[Shell]], *,
               max_running: int) -> int:
    """Runs a worker until it is told to stop, or a conductor refuses it; the process's exit code."""
    settings = named(settings, role)

    async def body(lifecycle: Lifecycle) -> None:
        async with open_worker(settings, role) as worker:
            shells = shells_of(worker)
            presence = Presence(worker.bus, settings, worker.hello(max_running=max_running),
                                *(shell.load for shell in shells))
            async with serving(worker.bus, worker.id, shells), presence.open():
                lifecycle.ready(worker=worker.id, model=worker.model.name)
                await _until_stopped(lifecycle, presence)
                await asyncio.gather(*(shell.drain() for shell in shells), presence.changed())
                await worker.agent.save()

    return run(role, settings.worker_id, settings, body)


async def _until_stopped(lifecycle: Lifecycle, presence: Presence) -> None:
    """Waits until the process is told to stop; raises when a conductor refuses the worker."""
    stopping = asyncio.create_task(lifecycle.stopping.wait(), name="until-stopped")
    try:
        either: set[asyncio.Future[Any]] = {stopping, presence.refused}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if presence.refused.done():
            presence.refused.result()
    finally:
        stopping.cancel()
