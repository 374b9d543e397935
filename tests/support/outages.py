"""Everything that may go away goes away, and afterwards the catalog equals the inventories exactly.

A test runs the short form; ``python -m tests.support.outages --seconds 120`` (``make test-soak``) the long one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from services.launcher import embedded
from shared.bus.nats import NatsBus
from shared.catalog.migrate import upgrade_database
from shared.catalog.repository import Catalog
from shared.catalog.session import connect
from shared.messages import StoredBlock
from shared.store.digest import BUCKETS
from tests.support.eventually import eventually
from tests.support.store_managers import Worker, chain, store_manager

ALL_BUCKETS = list(range(BUCKETS))
CHURN_PAUSE_S = 0.01
ENV = {"REDELIVER_S": "2", "BATCH_ROWS": "512", "RECONCILE_S": "2", "LEASE_S": "1"}


class Churn:
    """A worker that stores and evicts all the time."""

    def __init__(self, worker: Worker, seed: int) -> None:
        self.worker, self._chance = worker, random.Random(seed)
        self._chains: list[list[StoredBlock]] = []
        self._made = self.events = 0
        self.going_on = True

    async def run(self) -> None:
        """Until ``going_on`` is false."""
        while self.going_on:
            if len(self._chains) < 40 or self._chance.random() < 0.5:
                self._made += 1
                blocks = chain(f"{self.worker.name}-{self._made}", self._chance.randint(1, 12))
                self._chains.append(blocks)
                await self.worker.store(blocks)
            else:
                await self.worker.evict(self._chains.pop(self._chance.randrange(len(self._chains))))
            self.events += 1
            await asyncio.sleep(CHURN_PAUSE_S)


async def survive(directory: Path, *, outage_s: float, limit_s: float) -> str:
    """Postgres is away for ``outage_s``, NATS restarts, the store-manager is killed; what there was to see.

    Fails when the catalog is not equal to the inventories ``limit_s`` after everybody is back.
    """
    async with (
        embedded.nats_server(directory / "nats") as nats,
        embedded.postgres_server(directory / "postgres") as postgres,
        connect(postgres.url) as database,
        NatsBus.connect(nats.url, name="workers") as bus,
    ):
        await upgrade_database(database)
        catalog = Catalog(database)
        workers = [Worker(bus, name) for name in ("a", "b")]
        churns = [Churn(worker, seed) for seed, worker in enumerate(workers)]

        async def is_equal() -> bool:
            known = [await catalog.known(worker.id, worker.incarnation, ALL_BUCKETS) for worker in workers]
            return [{key for key, _ in copies} for copies in known] == [set(worker.held) for worker in workers]

        async with workers[0].open(), workers[1].open():
            async with asyncio.TaskGroup() as group:
                for churn in churns:
                    group.create_task(churn.run())
                async with store_manager(nats.url, postgres.url, **ENV) as first:
                    await _churned(churns, 100)
                    await postgres.stop(kill=True)
                    await _passed(outage_s / 3)
                    await nats.stop(kill=True)
                    await _passed(outage_s / 6)
                    await nats.start()
                    await _passed(outage_s / 6)
                    first.process.send_signal(signal.SIGKILL)
                    await first.process.wait()
                    await _passed(outage_s / 3)
                    await postgres.start()
                async with store_manager(nats.url, postgres.url, **ENV):
                    await _churned(churns, 100)
                    for churn in churns:
                        churn.going_on = False
                    began_s = time.monotonic()
                    await eventually(is_equal, "the catalog equals the inventories", timeout_s=limit_s)
                    took_s = time.monotonic() - began_s
        held = sum(len(worker.held) for worker in workers)
        return (f"{sum(churn.events for churn in churns):,} events, Postgres away for {outage_s:g} s, NATS restarted, "
                f"store-manager killed: {held:,} copies, exactly equal {took_s:.1f} s after the last event")


async def _churned(churns: list[Churn], events: int) -> None:
    """Each has gone on by so many events."""
    goals = [churn.events + events for churn in churns]
    await eventually(lambda: all(churn.events >= goal for churn, goal in zip(churns, goals, strict=True)),
                     timeout_s=60.0)


async def _passed(seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    await eventually(lambda: time.monotonic() > ends_s, timeout_s=seconds + 10.0)


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long Postgres is away")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moonbus-soak-") as directory:
        Path(directory).chmod(0o755)
        said = asyncio.run(survive(Path(directory), outage_s=arguments.seconds, limit_s=60.0))
    sys.stdout.write(said + "\n")


if __name__ == "__main__":
    main()
