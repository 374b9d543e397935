"""A worker that only lends memory, without an engine: the other end of `bench-store`, and of tests.

As a program: ``python -m load.bench.store_owner ORDER``, a JSON :class:`Order`. Greeting ``{"pid": n}``; ends with its
stdin.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import uvloop

from load.bench.program import hear, say
from shared.bus.nats import NatsBus
from shared.clock import SystemClock
from shared.ids import Incarnation, WorkerId, fresh
from shared.kv import CacheSpec
from shared.messages import Hello, Load
from shared.store.agent import StoreAgent
from shared.store.blocks import BlockPool
from shared.store.door import Door
from shared.store.door_frames import MAX_INLINE_BYTES
from shared.store.settings import SsdSettings
from shared.store.ssd.tier import SsdTier
from shared.transfer import TransferEngine, TransferSettings
from shared.worker.presence import Presence
from shared.worker.settings import WorkerSettings

SEGMENT = "kv"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to lend."""

    nats_url: str
    spec: CacheSpec
    num_blocks: int
    worker: WorkerId = WorkerId("store-1")
    settings: TransferSettings = TransferSettings()
    ssd: SsdSettings = SsdSettings()
    heartbeat_s: float = 1.0
    all_tenants: bool = False


@dataclass(frozen=True)
class Owner:
    """An opened worker."""

    agent: StoreAgent
    door: Door
    incarnation: Incarnation


@asynccontextmanager
async def open_owner(order: Order) -> AsyncIterator[Owner]:
    """Lends memory on this event loop while the context is open."""
    incarnation, clock, spec = Incarnation(fresh()), SystemClock(), order.spec
    async with (
        NatsBus.connect(order.nats_url, name=order.worker) as bus,
        TransferEngine.open(worker=order.worker, incarnation=incarnation, settings=order.settings) as transfer,
        AsyncExitStack() as stack,
    ):
        segment = transfer.register(SEGMENT, order.num_blocks * spec.block_bytes)
        ssd = None
        if order.ssd.dir:
            ssd = await stack.enter_async_context(SsdTier.open(
                order.ssd.directory(order.worker, spec.digest), spec, order.ssd, clock=clock))
        agent = StoreAgent(worker=order.worker, incarnation=incarnation, spec=spec, pool=BlockPool(order.num_blocks),
                           transfer=transfer, segment=SEGMENT, memory=segment.buffer, bus=bus, clock=clock, ssd=ssd,
                           ssd_settings=order.ssd)
        hello = Hello(worker=order.worker, incarnation=incarnation, role="store", spec=spec,
                      endpoint=transfer.endpoint, capacity_blocks=order.num_blocks, max_running=0,
                      started_at_s=time.time(), pid=os.getpid())

        def load() -> Load:
            return Load(worker=order.worker, incarnation=incarnation, role="store", kv_seq=agent.seq,
                        free_blocks=agent.pool.available, cached_blocks=agent.pool.statistics().cached)

        presence = Presence(bus, WorkerSettings(nats_url=order.nats_url, heartbeat_s=order.heartbeat_s), hello, load)
        async with agent.open(), Door.open(
                agent=agent, spec=spec, segment=segment, num_blocks=order.num_blocks, bus=bus, worker=order.worker,
                incarnation=incarnation, clock=clock, settings=order.settings,
                inline_bytes=MAX_INLINE_BYTES, all_tenants=order.all_tenants) as door, presence.open():
            yield Owner(agent, door, incarnation)


async def _main(order: Order) -> None:
    async with open_owner(order):
        say({"pid": os.getpid()})
        while await hear():
            pass


if __name__ == "__main__":
    uvloop.run(_main(msgspec.json.decode(sys.argv[1], type=Order)))
