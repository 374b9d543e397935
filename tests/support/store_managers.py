"""Store-managers as processes, and what they can see of workers: hellos, beats, numbered news, answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shared.bus.bus import Bus, Delivery
from shared.bus.subjects import HELLO, KV_DIGEST, KV_EVICTED, KV_STORED, KV_SYNC, LOAD, ROLLCALL, STATS
from shared.errors import BusError
from shared.ids import BlockKey, HostId, Incarnation, RequestId, WorkerId
from shared.kv import CacheSpec
from shared.messages import Endpoint, Failure, Hello, KvEvent, Load, StatsQuery, StatsReply, Stored, StoredBlock
from shared.store.events import EventLog

SPEC = CacheSpec(model="toy", weights_digest="w", tokenizer_digest="t", dtype="float32", layers=2, kv_heads=1,
                 head_dim=4, block_tokens=16, max_context=4096)
START_S = 60.0
"""A loaded machine may take its time to start a process."""


def chain(name: str, length: int) -> list[StoredBlock]:
    blocks, parent = [], BlockKey(bytes(32))
    for depth in range(length):
        key = BlockKey(hashlib.sha256(parent + name.encode()).digest())
        blocks.append(StoredBlock(key=key, parent=parent, depth=depth, nbytes=SPEC.block_bytes, tokens=16,
                                  tenant="acme", request=RequestId(f"req-{name}")))
        parent = key
    return blocks


@dataclass
class Worker:
    """What a store-manager can see of a worker: hellos, beats, numbered news, and answers to what was missed."""

    bus: Bus
    name: str
    life: str = "1"
    digests: bool = True
    """It answers with digests; older ones do not."""
    held: dict[BlockKey, StoredBlock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id, self.incarnation = WorkerId(self.name), Incarnation(self.life)
        self.log = EventLog(self.id, self.incarnation, SPEC.digest, lambda: self.held.values())
        self.hello = Hello(
            worker=self.id, incarnation=self.incarnation, role="prefill", spec=SPEC, capacity_blocks=100,
            endpoint=Endpoint(worker=self.id, incarnation=self.incarnation, host=HostId("h")), max_running=4,
            started_at_s=time.time() - 100)

    @asynccontextmanager
    async def open(self, *, beats: bool = True) -> AsyncIterator[Worker]:
        """Lives; ends without a word, as a crash would. Without ``beats`` somebody else says that it is there."""
        async def sync(delivery: Delivery) -> Any:
            return self.log.since(delivery.message, now=time.monotonic())

        async def digest(delivery: Delivery) -> Any:
            return self.log.digest(delivery.message, now=time.monotonic())

        async def present(_: Delivery | None = None) -> None:
            await self.bus.publish(HELLO.at(worker=self.name), self.hello)

        serving = [await self.bus.serve(KV_SYNC.at(worker=self.name), sync)]
        if self.digests:
            serving.append(await self.bus.serve(KV_DIGEST.at(worker=self.name), digest))
        listening = await self.bus.subscribe(ROLLCALL.at(), present)
        await present()
        beating = asyncio.create_task(self._beat() if beats else asyncio.Event().wait())  # type: ignore[arg-type]
        try:
            yield self
        finally:
            beating.cancel()
            await asyncio.wait({beating})
            for subscription in (*serving, listening):
                await subscription.close()

    def load(self) -> Load:
        """What its beats say."""
        return Load(worker=self.id, incarnation=self.incarnation, role="prefill", kv_seq=self.log.seq)

    async def _beat(self) -> None:
        while True:
            await self.bus.publish(LOAD.at(worker=self.name), self.load())
            await asyncio.sleep(0.1)

    async def store(self, blocks: list[StoredBlock]) -> Stored:
        """Has them and says so."""
        event = self.remember(blocks)
        await self.tell(event)
        return event

    def remember(self, blocks: list[StoredBlock]) -> Stored:
        """Has them; the news is for the caller to lose or to tell."""
        self.held.update({block.key: block for block in blocks})
        return self.log.stored(blocks, at_s=time.time())

    async def evict(self, blocks: list[StoredBlock]) -> None:
        """Loses them and says so."""
        for block in blocks:
            del self.held[block.key]
        await self.tell(self.log.evicted([block.key for block in blocks], at_s=time.time(), reason="capacity"))

    async def tell(self, event: KvEvent) -> None:
        """Sends a piece of news."""
        subject = KV_STORED if isinstance(event, Stored) else KV_EVICTED
        await self.bus.publish(subject.at(worker=self.name), event)


@dataclass
class Service:
    """A running store-manager process."""

    process: Process
    admin: str

    async def stop(self) -> int:
        """Asks it to end; its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), START_S)


async def spawn(nats_url: str, postgres_url: str, **env: str) -> Process:
    settings = {"NATS_URL": nats_url, "POSTGRES_URL": postgres_url, "SUSPECT_AFTER_S": "0.5", "DEAD_AFTER_S": "1.5",
                "JOIN_DELAY_S": "0.2", "GAP_DELAY_S": "0.3", "RETRY_LIMIT_S": "0.3", "RECONCILE_S": "600", **env}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.store_manager", stdout=PIPE, stderr=PIPE, limit=2**20,
        env={"PATH": "/usr/bin:/bin", **{f"MOONBUS_{name}": value for name, value in settings.items()}})


@asynccontextmanager
async def store_manager(nats_url: str, postgres_url: str, **env: str) -> AsyncIterator[Service]:
    process = await spawn(nats_url, postgres_url, **env)
    assert process.stdout is not None and process.stderr is not None
    errors: list[bytes] = []

    async def drain(stream: asyncio.StreamReader) -> None:
        async for line in stream:
            errors.append(line)

    draining = asyncio.create_task(drain(process.stderr))
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        assert line, b"".join(errors).decode()
        yield Service(process, json.loads(line)["admin"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await draining
        process._transport.close()  # type: ignore[attr-defined]  # or its pipes warn when collected


async def stats(bus: Bus) -> StatsReply | Failure:
    reply = await bus.request(STATS.at(), StatsQuery(), timeout_s=15.0)
    assert isinstance(reply, StatsReply | Failure)
    return reply


def holds(bus: Bus, **wanted: int) -> Callable[[], Any]:
    """A condition: the catalog's totals are these."""
    async def condition() -> bool:
        try:
            reply = await stats(bus)
        except BusError:
            return False
        return isinstance(reply, StatsReply) and all(getattr(reply, name) == value for name, value in wanted.items())
    return condition
