"""What the gateway asks silent workers, and what it makes of a bus that is away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.core.problem import ApiError
from services.gateway.roster import Roster
from shared.bus.bus import Delivery
from shared.bus.memory import MemoryBus
from shared.bus.subjects import HELLO, KV_SYNC, LOAD
from shared.clock import SystemClock
from shared.ids import BlockKey, HostId, Incarnation, WorkerId
from shared.kv import CacheSpec
from shared.messages import Endpoint, Hello, Load, StoredBlock, SyncEvents, SyncReply
from shared.store.events import EventLog
from tests.support.eventually import eventually

SPEC = CacheSpec(model="m", weights_digest="w", tokenizer_digest="t", dtype="float32", layers=2, kv_heads=2, head_dim=8,
                 block_tokens=4, max_context=128)
W1, LIFE = WorkerId("w1"), Incarnation("w1.1")
HELLO_OF_W1 = Hello(
    worker=W1, incarnation=LIFE, role="prefill", spec=SPEC, capacity_blocks=8, max_running=1, started_at_s=1.0,
    endpoint=Endpoint(worker=W1, incarnation=LIFE, host=HostId("h")))
SUSPECT_S, DEAD_S = 0.04, 0.4

Open = Callable[[MemoryBus], AbstractAsyncContextManager[Roster]]


class BreakableBus(MemoryBus):
    """Its connection can be away, and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self._back: list[Any] = []

    @property
    def connected(self) -> bool:
        return not self.away and super().connected

    def on_reconnect(self, callback: Any) -> None:
        self._back.append(callback)

    async def come_back(self) -> None:
        self.away = False
        for callback in self._back:
            await callback()


class Owner:
    """A worker with blocks that beats only when told to."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.log = EventLog(W1, LIFE, SPEC.digest, lambda: self.blocks)
        self.blocks = [StoredBlock(key=BlockKey(bytes([i]) * 32), parent=BlockKey(b""), depth=i, nbytes=1)
                       for i in range(5)]
        for block in self.blocks:
            self.log.stored([block], at_s=0.0)
        self.answers: list[SyncReply] = []

    async def start(self) -> None:
        await self._bus.serve(KV_SYNC.at(worker=W1), self._sync)
        await self._bus.publish(HELLO.at(worker=W1), HELLO_OF_W1)

    async def beat(self) -> None:
        await self._bus.publish(LOAD.at(worker=W1), Load(
            worker=W1, incarnation=LIFE, role="prefill", kv_seq=self.log.seq))

    async def _sync(self, delivery: Delivery) -> SyncReply:
        self.answers.append(self.log.since(delivery.message, now=0.0))
        return self.answers[-1]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def opened(bus: MemoryBus) -> AsyncIterator[Roster]:
        with ThreadPoolExecutor(1) as threads:
            roster = Roster(bus, SystemClock(), asker="g", cache=tmp_path, models=(), suspect_after_s=SUSPECT_S,
                            dead_after_s=DEAD_S, threads=threads, on_lost=lambda worker, why: None)
            await roster.start()
            try:
                yield roster
            finally:
                await roster.close()

    return opened


async def test_a_silent_worker_is_asked_for_no_more_than_it_did_since_its_last_heartbeat(opened: Open) -> None:
    async with MemoryBus() as bus, opened(bus) as roster:
        owner = Owner(bus)
        await owner.start()
        await owner.beat()
        late = owner.log.stored([owner.blocks[0]], at_s=1.0)
        await eventually(lambda: owner.answers)
        assert owner.answers[0] == SyncEvents(worker=W1, incarnation=LIFE, events=[late])
        await eventually(lambda: roster.membership.members[W1].state == "dead")


async def test_a_silent_worker_whose_heartbeat_was_never_heard_is_not_asked(opened: Open) -> None:
    async with MemoryBus() as bus, opened(bus) as roster:
        owner = Owner(bus)
        await owner.start()
        await eventually(lambda: W1 in roster.membership.members)
        await eventually(lambda: roster.membership.members[W1].state == "dead")
        assert not owner.answers


async def test_a_store_serves_no_model(opened: Open) -> None:
    """It lends for models that others serve, and for values that are none."""
    spec = CacheSpec.opaque("values", 4096)
    store = msgspec.structs.replace(HELLO_OF_W1, worker=WorkerId("s1"), role="store", spec=spec)
    async with MemoryBus() as bus, opened(bus) as roster:
        await bus.publish(HELLO.at(worker="s1"), store)
        await eventually(lambda: "s1" in roster.membership.members)
        assert roster.served() == {} and roster.why_not_ready() == "no worker has registered any model"
        for name in ("values", "m"):
            with pytest.raises(ApiError, match="no worker has registered any model yet"):
                roster.find(name)
        await Owner(bus).start()
        await eventually(lambda: W1 in roster.membership.members)
        with pytest.raises(ApiError, match="values"):
            roster.find("values")
        await eventually(lambda: "model m" in roster.why_not_ready(), "m is looked for, the values are not")
        assert "values" not in roster.why_not_ready()


async def test_while_the_bus_is_away_and_right_after_nobody_is_lost(opened: Open) -> None:
    async with BreakableBus() as bus, opened(bus) as roster:
        owner = Owner(bus)
        await owner.start()
        await owner.beat()
        await eventually(lambda: W1 in roster.membership.members)
        member = roster.membership.members[W1]
        bus.away = True
        heard_s = member.heard_s
        await eventually(lambda: member.heard_s > heard_s + 2 * DEAD_S)  # given back, look by look
        await bus.come_back()
        roster.nobody_there(W1)  # its connection may be on its way back like ours was
        assert member.state != "dead"
        back_s = member.heard_s
        await owner.beat()
        await eventually(lambda: member.heard_s > back_s)
        roster.nobody_there(W1)
        assert member.state == "dead"  # type: ignore[comparison-overlap]
