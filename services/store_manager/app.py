"""Puts a store-manager together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.store_manager.leadership import Leadership
from services.store_manager.planning import PlannerShell
from services.store_manager.reconcile import Reconciler
from services.store_manager.settings import Settings
from services.store_manager.shell import DATABASE_CONNECTIONS, StoreManagerShell
from shared.bus.nats import NatsBus
from shared.bus.streams import CATALOG_CONSUMER, STREAMS
from shared.catalog.migrate import require_schema
from shared.catalog.repository import Catalog
from shared.catalog.session import connect
from shared.clock import SystemClock
from shared.ids import fresh
from shared.lifecycle import Lifecycle, run
from shared.settings import load


def main(overrides: Mapping[str, Any]) -> int:
    """Runs a store-manager until it is told to stop; the exit code.

    Postgres must be there at the start, migrated: an operator learns of a wrong address at once. Later it may go
    and come.
    """
    settings = load(Settings, "store-manager", overrides=overrides)
    name = settings.store_manager_id or fresh("store-manager", 4)
    consumer = replace(CATALOG_CONSUMER, ack_wait_s=settings.redeliver_s)

    async def body(lifecycle: Lifecycle) -> None:
        async with (
            connect(settings.postgres_url, connections=DATABASE_CONNECTIONS) as database,
            NatsBus.connect(settings.nats_url, name=name, credentials=settings.nats_credentials,
                            wait_s=settings.nats_wait_s) as bus,
        ):
            await require_schema(database)
            await bus.ensure(STREAMS, (consumer,))
            clock = SystemClock()
            catalog = Catalog(database, settings.retention())
            reconciler = Reconciler(bus, catalog, clock, timeout_s=settings.sync_timeout_s,
                                    patience_s=settings.gap_delay_s)
            shell = StoreManagerShell(settings, bus, catalog, reconciler, consumer, clock, name)
            planner = PlannerShell(settings, bus, clock, name)
            leadership = Leadership(bus, clock, name, settings.lease_s, (shell.lead, planner.driver.feed))
            planner.leadership = leadership
            async with shell.open() as archiving, planner.open() as planning:
                leading = asyncio.create_task(leadership.run(), name="store-manager lease")
                stopping = asyncio.create_task(lifecycle.stopping.wait(), name="wait for stop")
                lifecycle.ready(database=database.name)
                running = {archiving, planning, leading}
                try:
                    await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stopping.cancel()
                    leading.cancel()
                    await asyncio.wait({leading})
                    await leadership.give_back()
                for task in running:
                    if task.done() and not task.cancelled():
                        task.result()
                await shell.drain()

    return run("store-manager", name, settings, body)
