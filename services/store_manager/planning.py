"""The planner's hands: live events, heartbeats and decisions in; requests to workers and progress on the record out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.store_manager.core.drains import OrdersRead
from services.store_manager.core.events import Deaf, Reconnected, Started
from services.store_manager.core.planner import Event, KeepOrders, OrdersFailed, Planner, Statistics
from services.store_manager.desk import Desk, OrdersDamaged
from services.store_manager.leadership import Leadership
from services.store_manager.settings import Settings
from shared.bus.bus import Bus, Delivery
from shared.bus.subjects import (
    BYE,
    COPIES,
    DRAIN,
    HELLO,
    KV_EVICTED,
    KV_STORED,
    KV_SYNC,
    LOAD,
    PLACED,
    POOL,
    QUOTA,
    QUOTAS,
    ROLLCALL,
    Address,
)
from shared.clock import Clock
from shared.driver import Driver
from shared.errors import BusError
from shared.ids import WorkerId
from shared.telemetry import metrics
from shared.telemetry.logs import Limited

_LOOK_EVERY_S = 0.25
"""Pause between two looks at the connection: shorter than any silence that makes a worker suspect."""
_EXPORT_EVERY_S = 1.0
_ORDERS_TAKEN = 16
"""People's orders taken at a time."""

_log = logging.getLogger(__name__)


class _Addresses:
    rollcall = ROLLCALL.at()

    def sync(self, worker: WorkerId) -> Address:
        return KV_SYNC.at(worker=worker)

    def pool(self, worker: WorkerId) -> Address:
        return POOL.at(worker=worker)

    def quotas(self, worker: WorkerId) -> Address:
        return QUOTAS.at(worker=worker)


class PlannerShell:
    """Plans while it is open; whether it may act, ``leadership`` tells it."""

    def __init__(self, settings: Settings, bus: Bus, clock: Clock, name: str) -> None:
        self._bus, self._clock = bus, clock
        self.machine = Planner(name, _Addresses(), settings.planner())
        self.driver: Driver[Event] = Driver(self.machine, bus, clock, name="store-planner",
                                            effects={KeepOrders: self._keep_orders})
        self.leadership: Leadership | None = None
        self._desk = Desk(bus, clock, self.machine, lambda: self.leadership.leader if self.leadership else "")
        self._exported = _Exported()
        self._limited = Limited(_log, every_s=60.0)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[asyncio.Task[None]]:
        """Runs until the block ends; the task given ends early only by failing."""
        serve = {"queue": "store-manager", "concurrency": _ORDERS_TAKEN}
        subscriptions = [
            *[await self._bus.subscribe(subject.any(), self._hear)
              for subject in (HELLO, LOAD, BYE, KV_STORED, KV_EVICTED, PLACED)],
            await self._bus.serve(DRAIN.at(), self._desk.drain, **serve),  # type: ignore[arg-type]
            await self._bus.serve(QUOTA.at(), self._desk.quota, **serve),  # type: ignore[arg-type]
            await self._bus.serve(COPIES.at(), self._desk.copies, **serve),  # type: ignore[arg-type]
        ]
        self._bus.on_reconnect(self._reconnected)
        self.driver.feed(Started())
        tasks = [asyncio.create_task(self.driver.run(), name="store-planner machine"),
                 asyncio.create_task(self._watch(), name="store-planner connection")]
        try:
            yield tasks[0]
        finally:
            for subscription in subscriptions:
                await subscription.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _hear(self, delivery: Delivery) -> None:
        self.driver.feed(delivery.message)  # what does not fit is a hole, and is asked for

    async def _reconnected(self) -> None:
        await self.driver.put(Reconnected())

    async def _watch(self) -> None:
        exported_s = self._clock.monotonic()
        while True:
            if not self._bus.connected:
                self.driver.feed(Deaf())
            if self._clock.monotonic() - exported_s >= _EXPORT_EVERY_S:
                exported_s = self._clock.monotonic()
                self._exported.update(self.machine.statistics())
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _keep_orders(self, effect: KeepOrders) -> Any:
        try:
            orders = await self._desk.keep(effect.progress, effect.term)
        except OrdersDamaged as error:
            self._limited.warning("orders_damaged", key="", why=error)
            return OrdersFailed(damaged=True)
        except BusError as error:
            _log.debug("orders_not_kept", extra={"fields": {"why": error}})
            return OrdersFailed()
        return OrdersRead(orders, self._clock.wall())


class _Exported:
    """The machine's state as metrics."""

    def __init__(self) -> None:
        self._unseen = self._nbytes = 0
        self._outcomes: dict[tuple[str, str], int] = {}

    def update(self, now: Statistics) -> None:
        """Shows ``now``."""
        metrics.STORE_MAP_BLOCKS.set(now.blocks)
        metrics.STORE_MAP_COPIES.set(now.copies)
        metrics.STORE_MAP_BYTES.set(now.nbytes)
        metrics.STORE_HOT_BLOCKS.set(now.hot)
        metrics.STORE_SUSPENDED_WORKERS.set(now.suspended)
        metrics.STORE_COPY_REQUESTS.set(now.under_way)
        metrics.STORE_UNSEEN_BLOCKS.inc(now.unseen - self._unseen)
        metrics.STORE_COPIED_BYTES.inc(now.nbytes_copied - self._nbytes)
        for (kind, outcome), blocks in now.outcomes.items():
            metrics.STORE_ASKED_BLOCKS.labels(kind=kind, outcome=outcome).inc(
                blocks - self._outcomes.get((kind, outcome), 0))
        self._unseen, self._nbytes, self._outcomes = now.unseen, now.nbytes_copied, dict(now.outcomes)
