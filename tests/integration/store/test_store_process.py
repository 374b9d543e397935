"""`moonbus serve store` as a process: it learns a spec, keeps what it is given, and has it after a SIGKILL."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from shared.bus.bus import Delivery
from shared.bus.nats import NatsBus
from shared.bus.subjects import HELLO, KV_SYNC, LOAD, POOL, ROLLCALL
from shared.ids import OperationId, WorkerId
from shared.kv import CacheSpec, Tier
from shared.messages import Hello, Load, Replicate, Since, SnapshotPage, Stored, SyncEvents
from shared.store.settings import SsdSettings
from tests.support.agents import Holder, open_holder
from tests.support.blocks import SPEC, make_chain
from tests.support.eventually import Eventually

START_S = 60.0
STORE = WorkerId(f"store-1-{SPEC.digest[:8]}")


class Listener:
    """Hears hellos and heartbeats of store workers, and says hello as an engine worker would."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self.hellos: dict[WorkerId, Hello] = {}
        self.beats: list[tuple[float, Load]] = []

    async def open(self) -> None:
        bus = self._holder.bus
        self.subscriptions = [
            await bus.subscribe(HELLO.any(), self._on_hello), await bus.subscribe(LOAD.any(), self._on_load),
            await bus.subscribe(ROLLCALL.at(), self._on_rollcall)]

    async def close(self) -> None:
        for subscription in self.subscriptions:
            await subscription.close()

    async def _on_hello(self, delivery: Delivery) -> None:
        if delivery.message.role == "store":
            self.hellos[delivery.message.worker] = delivery.message

    async def _on_load(self, delivery: Delivery) -> None:
        self.beats.append((time.monotonic(), delivery.message))

    async def _on_rollcall(self, delivery: Delivery) -> None:
        holder = self._holder
        await holder.bus.publish(HELLO.at(worker=holder.id), Hello(
            worker=holder.id, incarnation=holder.incarnation, role="prefill", spec=SPEC, endpoint=holder.endpoint,
            capacity_blocks=32, max_running=1, started_at_s=time.time()))


async def spawn(nats_url: str, directory: Path, **env: str) -> Process:
    settings = {"NATS_URL": nats_url, "WORKER_ID": "store-1", "SSD_DIR": str(directory), "SSD_AHEAD": "1",
                "POOL_BYTES": "1MiB", "SSD_BYTES": "64MiB", "HEARTBEAT_S": "0.2", **env}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; from services.store.app import main; "
        "code = main({}); assert 'torch' not in sys.modules; raise SystemExit(code)", stdout=PIPE, limit=2**20,
        env={"PATH": "/usr/bin:/bin", **{f"MOONBUS_{name}": value for name, value in settings.items()}})


@asynccontextmanager
async def running(nats_url: str, directory: Path, **env: str) -> AsyncIterator[tuple[Process, dict[str, Any]]]:
    process = await spawn(nats_url, directory, **env)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # or its pipes warn when collected


async def inventory(bus: NatsBus, hello: Hello) -> list[tuple[Tier, int]]:
    reply = await bus.request(KV_SYNC.at(worker=hello.worker), Since(incarnation=hello.incarnation, seq=0),
                              timeout_s=5.0)
    if isinstance(reply, SyncEvents):
        blocks = [block for event in reply.events if isinstance(event, Stored) for block in event.blocks]
    else:
        assert isinstance(reply, SnapshotPage)
        blocks = reply.blocks
    return [(block.tier, block.depth) for block in blocks]


async def test_a_killed_store_has_its_blocks_when_it_is_back(
        nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    chain = make_chain("a", 12)
    async with open_holder(nats_url, "p1") as one:
        listener = Listener(one)
        await listener.open()
        one.put(chain)
        async with running(nats_url, tmp_path) as (process, _):
            hello = await eventually(lambda: listener.hellos.get(STORE), "it lends for the spec it heard of",
                                     timeout_s=10.0)
            assert hello.spec == SPEC and hello.capacity_blocks == (1 << 20) // 2 // SPEC.block_bytes
            order = Replicate(operation=OperationId("copy"), source=one.id, blocks=chain, deadline_s=5.0)
            reply = await one.bus.request(POOL.at(worker=STORE), order, timeout_s=6.0)
            assert (reply.blocks, reply.copied, reply.why) == (12, 12, "")

            async def on_disk() -> bool:
                return [depth for tier, depth in await inventory(one.bus, hello) if tier is Tier.SSD] == list(range(12))

            await eventually(on_disk, "copied ahead of need")
            process.send_signal(signal.SIGKILL)
            await process.wait()
        one.agent.trim([block.key for block in chain], "test")
        async with running(nats_url, tmp_path) as (process, ready):
            again = await eventually(
                lambda: (found := listener.hellos[STORE]).incarnation != hello.incarnation and found, timeout_s=10.0)
            assert await inventory(one.bus, again) == [(Tier.SSD, depth) for depth in range(12)]
            fetched = await one.fetch(STORE, chain)
            assert (fetched.blocks, fetched.why) == (12, "")
            async with httpx.AsyncClient(base_url=f"http://{ready['admin']}") as admin:
                page = (await admin.get("/metrics")).text
            assert 'moonbus_ssd_restored_blocks_total{what="usable"} 12.0' in page
            assert 'moonbus_ssd_blocks{use="used"} 12.0' in page
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 10.0) == 0
        await listener.close()


async def test_a_stopped_store_has_its_blocks_too(nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    chain = make_chain("a", 3)
    async with open_holder(nats_url, "p1") as one:
        listener = Listener(one)
        await listener.open()
        one.put(chain)
        async with running(nats_url, tmp_path, SSD_AHEAD="0", SSD_IDLE_BYTES_PER_S="0") as (process, _):
            await eventually(lambda: listener.hellos.get(STORE), timeout_s=10.0)
            order = Replicate(operation=OperationId("copy"), source=one.id, blocks=chain, deadline_s=5.0)
            assert (await one.bus.request(POOL.at(worker=STORE), order, timeout_s=6.0)).copied == 3
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 10.0) == 0
        await listener.close()
    async with open_holder(nats_url, STORE, ssd=SsdSettings(dir=str(tmp_path), bytes=32 << 20)) as heir:
        assert heir.held == {(block.key, Tier.SSD) for block in chain}, "written before its end"


async def test_a_store_with_anothers_name_ends(nats_url: str, tmp_path: Path) -> None:
    """Also if it could lend for another spec meanwhile."""
    ssd = SsdSettings(dir=str(tmp_path), bytes=32 << 20)
    async with open_holder(nats_url, STORE, ssd=ssd):
        async with running(nats_url, tmp_path, STORE_VALUES="embeddings:4KiB") as (process, _):
            assert await asyncio.wait_for(process.wait(), 10.0) == 1


async def test_a_store_whose_directory_another_store_uses_is_never_ready(nats_url: str, tmp_path: Path) -> None:
    """Even while neither lends for anything yet."""
    async with running(nats_url, tmp_path):
        second = await spawn(nats_url, tmp_path)
        said, _ = await asyncio.wait_for(second.communicate(), START_S)
        assert (second.returncode, said) == (1, b"")
    async with running(nats_url, tmp_path) as (_, ready):
        assert ready["ready"] == "store", "a killed one leaves nothing that is in the way"


async def test_it_lends_for_values_from_its_settings(nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    values = CacheSpec.opaque("embeddings", 4096)
    async with open_holder(nats_url, "p1") as one:
        listener = Listener(one)
        await listener.open()
        async with running(nats_url, tmp_path, STORE_VALUES="embeddings:4KiB", STORE_MAX_SPECS="1"):
            hello = await eventually(lambda: listener.hellos.get(WorkerId(f"store-1-{values.digest[:8]}")),
                                     timeout_s=10.0)
            assert hello.spec == values
        assert STORE not in listener.hellos, "it has one place"
        await listener.close()
