"""A store-manager process between a real NATS and a real Postgres, with workers that keep real event logs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from services.launcher import embedded
from shared.bus.bus import Bus
from shared.bus.nats import NatsBus
from shared.bus.subjects import BLOCKS, BYE, DONE, LINEAGE
from shared.catalog.migrate import upgrade_database
from shared.catalog.session import connect
from shared.ids import BlockKey, GatewayId, RequestId
from shared.messages import (
    BlocksQuery,
    Bye,
    Failure,
    LineageQuery,
    LineageReply,
    RequestDone,
    StatsReply,
    StoredBlock,
)
from tests.support.eventually import eventually
from tests.support.store_managers import SPEC, START_S, Worker, chain, holds, spawn, stats, store_manager


@pytest.fixture
async def migrated_url(postgres_url: str) -> str:
    async with connect(postgres_url) as database:
        await upgrade_database(database)
    return postgres_url


async def test_from_the_feed_to_the_answers(
    nats_url: str, nats_bus: NatsBus, migrated_url: str, tmp_path: Path,
) -> None:
    spans = tmp_path / "spans.jsonl"
    blocks = chain("x", 4)
    headers = {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01"}
    async with (
        store_manager(nats_url, migrated_url, TRACE_FILE=str(spans)) as service,
        Worker(nats_bus, "a").open() as a,
    ):
        await a.store(blocks)
        await a.evict(blocks[3:])
        await nats_bus.publish(DONE.at(), RequestDone(
            request=RequestId("r1"), gateway=GatewayId("g"), model="toy", spec=SPEC.digest, tenant="acme",
            received_at_s=time.time(), outcome="ok", prompt_tokens=70, hit_tokens=32, last_key=blocks[3].key),
            headers=headers)
        await eventually(holds(nats_bus, blocks=4, live_blocks=3, requests=1, hit_tokens=32, feed_pending=0),
                         timeout_s=20.0)

        lineage = await nats_bus.request(LINEAGE.at(), LineageQuery(key_hex=blocks[2].key.hex()[:16]), timeout_s=10.0)
        assert [row.key for row in lineage.blocks] == [block.key for block in blocks[:3]]
        assert [row.hits for row in lineage.blocks] == [1, 1, 0]
        assert (lineage.blocks[0].model, lineage.blocks[0].created_by, lineage.descendants) == ("toy", "a", 1)
        listed = await nats_bus.request(BLOCKS.at(), BlocksQuery(worker="a"), timeout_s=10.0)
        assert (len(listed.blocks), listed.total) == (3, 3)
        missing = await nats_bus.request(LINEAGE.at(), LineageQuery(key_hex="ffff"), timeout_s=10.0)
        assert isinstance(missing, Failure) and "no block's key starts with ffff" in missing.message

        async with httpx.AsyncClient(base_url=f"http://{service.admin}") as admin:
            assert (await admin.get("/ready")).status_code == 200
            metrics = (await admin.get("/metrics")).text
        assert 'moonbus_store_rows_written_total{table="request"} 1.0' in metrics
        assert await service.stop() == 0
    recorded = [json.loads(line) for line in spans.read_text().splitlines()]
    span = next(span for span in recorded if span["name"] == "catalog.record")
    assert (int(span["trace_id"], 16), int(span["parent_id"], 16)) == (0xABC, 0xDEF)
    assert span["attributes"]["moonbus.request"] == "r1"


async def test_postgres_away_for_a_while(nats_url: str, nats_bus: NatsBus, server_dir: Path) -> None:
    async with embedded.postgres_server(server_dir / "postgres-outage") as postgres:
        async with connect(postgres.url) as database:
            await upgrade_database(database)
        async with store_manager(nats_url, postgres.url, HELD_ROWS="64", BATCH_ROWS="16") as service:
            async with Worker(nats_bus, "a").open() as a:
                await a.store(chain("before", 8))
                await eventually(holds(nats_bus, live_blocks=8), timeout_s=20.0)
                await postgres.stop(kill=True)
                reply = await nats_bus.request(LINEAGE.at(), LineageQuery(key_hex="00"), timeout_s=15.0)
                assert isinstance(reply, Failure) and "MOONBUS_POSTGRES_URL" in reply.message
                for i in range(40):  # more than it may hold: the stream keeps the rest
                    await a.store(chain(f"during-{i}", 8))
                reply = await stats(nats_bus)
                assert isinstance(reply, Failure) and "\n" not in reply.message
                async with httpx.AsyncClient(base_url=f"http://{service.admin}") as admin:
                    assert (await admin.get("/health")).status_code == 200
                await postgres.start()
                await eventually(holds(nats_bus, live_blocks=328, blocks=328, feed_pending=0), timeout_s=30.0)
                assert await service.stop() == 0


async def test_postgres_away_for_longer_than_the_feed_waits(
        nats_url: str, nats_bus: NatsBus, server_dir: Path) -> None:
    """What is held is delivered again and again meanwhile, and the feed goes on."""
    async with embedded.postgres_server(server_dir / "postgres-long-outage") as postgres:
        async with connect(postgres.url) as database:
            await upgrade_database(database)
        async with (
            store_manager(nats_url, postgres.url, REDELIVER_S="0.5", BATCH_ROWS="64") as service,
            Worker(nats_bus, "a").open() as a,
        ):
            await a.store(chain("before", 8))
            await eventually(holds(nats_bus, live_blocks=8), timeout_s=20.0)
            chains, feeding = 1, True

            async def feed() -> None:
                nonlocal chains
                while feeding:
                    await a.store(chain(f"more-{chains}", 8))
                    chains += 1
                    await asyncio.sleep(0.03)

            running = asyncio.create_task(feed())
            for _ in range(2):
                seen, ends_s = chains, time.monotonic() + 2.0  # four times as long as the feed waits
                await postgres.stop(kill=True)
                await eventually(lambda: time.monotonic() > ends_s and chains > seen + 20, timeout_s=20.0)  # noqa: B023
                await postgres.start()
                await eventually(lambda: _some(nats_bus, 8 * chains // 2), timeout_s=30.0)
            feeding = False
            await running
            await eventually(holds(nats_bus, live_blocks=8 * chains, blocks=8 * chains, feed_pending=0), timeout_s=60.0)
            assert service.process.returncode is None
            assert await service.stop() == 0


async def test_killed_in_the_middle(nats_url: str, nats_bus: NatsBus, migrated_url: str) -> None:
    batches, length = 150, 16
    async with Worker(nats_bus, "a").open() as a:
        env = {"REDELIVER_S": "1", "BATCH_ROWS": "64"}
        async with store_manager(nats_url, migrated_url, **env) as first:
            for i in range(batches):
                await a.store(blocks := chain(f"c{i}", length))
                await nats_bus.publish(DONE.at(), RequestDone(
                    request=RequestId(f"r{i}"), gateway=GatewayId("g"), model="toy", spec=SPEC.digest, tenant="acme",
                    received_at_s=time.time(), outcome="ok", prompt_tokens=16 * length, hit_tokens=32,
                    last_key=blocks[-1].key))
            await eventually(lambda: _some(nats_bus, length), timeout_s=20.0)
            first.process.kill()
            await first.process.wait()
        async with store_manager(nats_url, migrated_url, **env), connect(migrated_url) as database:
            await eventually(holds(nats_bus, live_blocks=batches * length, requests=batches, feed_pending=0),
                             timeout_s=40.0)
            async with database.transaction() as connection:
                hits = await connection.execute(text(
                    "SELECT depth, min(coalesce(hits, 0)), max(coalesce(hits, 0)) FROM kv_block "
                    "LEFT JOIN kv_use USING (key) GROUP BY depth"))
                counted = {depth: (least, most) for depth, least, most in hits}
            assert counted == {depth: (1, 1) if depth < 2 else (0, 0) for depth in range(length)}


async def _some(bus: Bus, least: int) -> bool:
    reply = await stats(bus)
    return isinstance(reply, StatsReply) and reply.live_blocks >= least


@pytest.mark.parametrize("digests", [True, False])
async def test_a_hole_in_the_news_is_repaired_by_its_owner(
    nats_url: str, nats_bus: NatsBus, migrated_url: str, digests: bool,
) -> None:
    async with store_manager(nats_url, migrated_url), Worker(nats_bus, "a", digests=digests).open() as a:
        await a.store(chain("told", 3))
        await eventually(holds(nats_bus, live_blocks=3), timeout_s=20.0)
        lost, gone = chain("lost", 4), chain("gone", 2)
        await a.store(gone)
        a.remember(lost)
        for block in gone:
            del a.held[block.key]
        a.log.evicted([block.key for block in gone], at_s=time.time(), reason="capacity")
        await a.store(chain("after", 1))
        await eventually(holds(nats_bus, live_blocks=8, blocks=10), timeout_s=20.0)


async def test_what_the_stream_never_had_is_repaired_at_the_start(
    nats_url: str, nats_bus: NatsBus, migrated_url: str,
) -> None:
    async with Worker(nats_bus, "a").open() as a:
        await a.store(chain("early", 5))  # before there is a stream
        async with store_manager(nats_url, migrated_url):
            await eventually(holds(nats_bus, live_blocks=5), timeout_s=20.0)
            lineage = await nats_bus.request(LINEAGE.at(), LineageQuery(key_hex=chain("early", 5)[4].key.hex()),
                                             timeout_s=10.0)
            assert isinstance(lineage, LineageReply) and len(lineage.blocks) == 5


async def test_workers_die_leave_and_come_back(nats_url: str, nats_bus: NatsBus, migrated_url: str) -> None:
    def are(**wanted: str) -> Callable[[], Any]:
        async def condition() -> bool:
            reply = await stats(nats_bus)
            return isinstance(reply, StatsReply) and wanted == {row.worker: row.state for row in reply.workers}
        return condition

    async with store_manager(nats_url, migrated_url), Worker(nats_bus, "b").open() as b:
        async with Worker(nats_bus, "a").open() as a:
            await a.store(chain("x", 3))
            await b.store(chain("x", 3))
            await eventually(holds(nats_bus, live_blocks=3, live_replicas=6), timeout_s=20.0)
        await eventually(holds(nats_bus, live_blocks=3, live_replicas=3), timeout_s=20.0)
        await eventually(are(a="dead", b="alive"))
        async with a.open():  # only its network was gone
            await eventually(holds(nats_bus, live_replicas=6), timeout_s=20.0)
            await eventually(are(a="alive", b="alive"))
            await nats_bus.publish(BYE.at(worker="b"), Bye(worker=b.id, incarnation=b.incarnation, at_s=time.time()))
            await eventually(holds(nats_bus, live_replicas=3), timeout_s=20.0)
            await eventually(are(a="alive", b="left"))


async def test_one_bad_message_stops_nobody(nats_url: str, nats_bus: NatsBus, migrated_url: str) -> None:
    async with Worker(nats_bus, "a").open() as a, store_manager(nats_url, migrated_url) as service:
        bad = StoredBlock(key=BlockKey(b"k" * 32), parent=BlockKey(bytes(32)), depth=0, nbytes=1, tenant="a\x00b")
        await asyncio.gather(*(a.store(chain(f"c{i}", 2)) for i in range(10)),
                             a.tell(a.log.stored([bad], at_s=time.time())),
                             *(a.store(chain(f"d{i}", 2)) for i in range(10)))
        await eventually(holds(nats_bus, live_blocks=40, feed_pending=0), timeout_s=20.0)
        async with httpx.AsyncClient(base_url=f"http://{service.admin}") as admin:
            assert 'moonbus_store_write_failures_total{why="discarded"} 1.0' in (await admin.get("/metrics")).text


async def test_two_share_the_feed(nats_url: str, nats_bus: NatsBus, migrated_url: str) -> None:
    async with (
        Worker(nats_bus, "a").open() as a, Worker(nats_bus, "b").open() as b,
        store_manager(nats_url, migrated_url, BATCH_ROWS="32"), store_manager(nats_url, migrated_url, BATCH_ROWS="32"),
    ):
        for i in range(100):
            await a.store(blocks := chain(f"c{i}", 8))
            await b.store(blocks)
            if i % 2:
                await a.evict(blocks)
        await eventually(holds(nats_bus, live_blocks=800, live_replicas=1200, feed_pending=0), timeout_s=40.0)


@pytest.mark.parametrize(("wrong", "says"), [
    ("postgres", "cannot reach or use Postgres at 127.0.0.1:1"),
    ("schema", "run moonbus migrate"),
])
async def test_a_start_that_cannot_be(nats_url: str, postgres_url: str, wrong: str, says: str) -> None:
    url = "postgresql://moonbus:secret@127.0.0.1:1/moonbus" if wrong == "postgres" else postgres_url
    process = await spawn(nats_url, url)
    _, errors = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 1
    lines = [line for line in errors.decode().splitlines() if line.startswith("store-manager: ")]
    assert len(lines) == 1 and says in lines[0], errors.decode()
    assert "Traceback" not in errors.decode() and "secret" not in errors.decode()
