"""A NATS that lost its disk: streams, consumers, lease and orders are gone, and everybody goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

from services.launcher.embedded import nats_server
from shared.bus.nats import NatsBus
from shared.catalog.migrate import upgrade_database
from shared.catalog.session import connect
from tests.support.eventually import eventually
from tests.support.store_managers import Worker, chain, holds, store_manager


async def test_news_that_its_stream_lost_are_asked_for(tmp_path: Path, postgres_url: str) -> None:
    async with connect(postgres_url) as database:
        await upgrade_database(database)
    async with (
        nats_server(tmp_path / "nats") as nats,
        NatsBus.connect(nats.url, name="workers") as bus,
        Worker(bus, "a").open() as a,
        store_manager(nats.url, postgres_url, RECONCILE_S="1", LEASE_S="0.5"),
    ):
        await a.store(chain("x", 5))
        await eventually(holds(bus, live_replicas=5), timeout_s=20.0)
        await nats.stop(kill=True)
        shutil.rmtree(tmp_path / "nats" / "jetstream")
        a.remember(chain("y", 3))  # happened while nobody could be told
        await nats.start()
        await eventually(lambda: bus.connected, timeout_s=20.0)
        await a.store(chain("z", 2))
        await eventually(holds(bus, live_replicas=10), "the catalog is what the worker holds", timeout_s=30.0)
