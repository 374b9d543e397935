"""Asking a worker what it holds, over a bus in memory."""

from __future__ import annotations

from typing import Any

import pytest

from services.store_manager.inventory import RESTARTS, InventoryFailed, ask_inventory
from shared.bus.bus import Delivery
from shared.bus.memory import MemoryBus
from shared.bus.subjects import KV_SYNC
from shared.errors import NoResponders
from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.messages import StoredBlock
from shared.store.events import PAGE_BLOCKS, EventLog

A, LIFE = WorkerId("a"), Incarnation("1")


def blocks(count: int) -> list[StoredBlock]:
    return [StoredBlock(key=BlockKey(i.to_bytes(32, "big")), parent=BlockKey(bytes(32)), depth=i, nbytes=1)
            for i in range(count)]


async def test_pages_become_one_inventory() -> None:
    held = blocks(2 * PAGE_BLOCKS + 1)
    log = EventLog(A, LIFE, SpecDigest("s"), lambda: held)
    log.stored(held, at_s=1.0)
    async with MemoryBus() as bus:
        async def sync(delivery: Delivery) -> Any:
            reply = log.since(delivery.message, now=0.0)
            if delivery.message.page == 1:
                log.stored([], at_s=2.0)  # later news is not part of it
            return reply

        serving = await bus.serve(KV_SYNC.at(worker="a"), sync)
        inventory = await ask_inventory(bus, A, LIFE, timeout_s=5.0)
        await serving.close()
    assert (inventory.seq, inventory.spec, len(inventory.blocks)) == (1, "s", len(held))
    assert [block.key for block in inventory.blocks] == [block.key for block in held]


async def test_a_forgotten_snapshot_is_begun_again() -> None:
    held = blocks(PAGE_BLOCKS + 1)
    asked = 0
    async with MemoryBus() as bus:
        logs = [EventLog(A, LIFE, SpecDigest("s"), lambda: held) for _ in range(2 * RESTARTS)]

        async def forgetful(delivery: Delivery) -> Any:
            nonlocal asked
            asked += 1
            return logs[min(asked // 2, last)].since(delivery.message, now=0.0)

        serving = await bus.serve(KV_SYNC.at(worker="a"), forgetful)
        last = 1
        assert len((await ask_inventory(bus, A, LIFE, timeout_s=5.0)).blocks) == len(held)
        last, asked = len(logs), 0
        with pytest.raises(InventoryFailed, match="began another snapshot"):
            await ask_inventory(bus, A, LIFE, timeout_s=5.0)
        await serving.close()


async def test_another_life_or_nobody() -> None:
    async with MemoryBus() as bus:
        with pytest.raises(NoResponders):
            await ask_inventory(bus, A, LIFE, timeout_s=5.0)
        other = EventLog(A, Incarnation("2"), SpecDigest("s"), list)

        async def sync(delivery: Delivery) -> Any:
            return other.since(delivery.message, now=0.0)

        serving = await bus.serve(KV_SYNC.at(worker="a"), sync)
        with pytest.raises(InventoryFailed, match="lives again as 2"):
            await ask_inventory(bus, A, LIFE, timeout_s=5.0)
        await serving.close()
