"""Comparing catalog and workers by digest, on a real Postgres: whatever differs, afterwards nothing does."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest_asyncio
from sqlalchemy import text

from services.store_manager.reconcile import BUCKETS_AT_ONCE, Reconciler
from shared.bus.bus import Delivery
from shared.bus.memory import MemoryBus
from shared.bus.subjects import KV_DIGEST
from shared.catalog.migrate import upgrade_database
from shared.catalog.repository import Catalog
from shared.catalog.session import Database, connect
from shared.clock import SystemClock
from shared.ids import BlockKey, Incarnation, WorkerId
from shared.kv import Tier
from shared.messages import DigestQuery, KvEvent, StoredBlock
from shared.store.digest import differing, unpack
from shared.store.events import EventLog
from tests.support.pool_cluster import SPEC, chain

A, LIFE = WorkerId("a"), Incarnation("1")


@pytest_asyncio.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    async with connect(postgres_url) as opened:
        await upgrade_database(opened)
        yield opened


class Owner:
    """A worker's log on a bus in memory; what was asked of it is counted."""

    def __init__(self) -> None:
        self.held: dict[tuple[BlockKey, Tier], StoredBlock] = {}
        self.log = EventLog(A, LIFE, SPEC.digest, lambda: self.held.values())
        self.shipped = 0

    def store(self, *blocks: StoredBlock) -> KvEvent:
        self.held.update({(block.key, block.tier): block for block in blocks})
        return self.log.stored(blocks, at_s=1.0)

    def evict(self, *blocks: StoredBlock) -> KvEvent:
        """All of one tier."""
        for block in blocks:
            del self.held[block.key, block.tier]
        return self.log.evicted([block.key for block in blocks], at_s=2.0, reason="capacity", tier=blocks[0].tier)

    async def answer(self, delivery: Delivery) -> Any:
        reply = self.log.digest(delivery.message, now=0.0)
        self.shipped += len(getattr(reply, "blocks", ()))
        return reply


@asynccontextmanager
async def comparing(database: Database, owner: Owner) -> AsyncIterator[Reconciler]:
    async with MemoryBus() as bus:
        serving = await bus.serve(KV_DIGEST.at(worker=A), owner.answer)
        yield Reconciler(bus, Catalog(database), SystemClock(), timeout_s=5.0, patience_s=0.0)
        await serving.close()


async def live(database: Database) -> set[tuple[bytes, str]]:
    async with database.transaction() as connection:
        rows = await connection.execute(text("SELECT key, tier FROM kv_copy"))
        return {(bytes(key), tier) for key, tier in rows}


async def test_random_divergence_ends_equal(database: Database) -> None:
    chance, catalog, owner = random.Random(7), Catalog(database), Owner()
    blocks = [block for i in range(150) for block in chain(f"c{i}", 20)]
    async with comparing(database, owner) as reconciler:
        await catalog.write([owner.store(*blocks)], now_s=1.0)
        same = await reconciler.compare(A, LIFE)
        assert (same.missing, same.stale, owner.shipped) == (0, 0, 0), "equal ones ship nothing"
        expected = 0
        for turn in range(3):
            told, lost = [], []
            for _ in range(12):
                tier = chance.choice(list(Tier))
                some = [StoredBlock(key=b.key, parent=b.parent, depth=b.depth, nbytes=b.nbytes, tier=tier)
                        for b in chance.sample(blocks, 5)]
                held = [block for block in some if (block.key, tier) in owner.held]
                event = owner.evict(*held) if held else owner.store(*some)
                (told if chance.random() < 0.5 else lost).append(event)
            if told:
                await catalog.write(told, now_s=3.0)  # type: ignore[arg-type]
            owner.shipped = 0
            repaired = await reconciler.compare(A, LIFE)
            expected += repaired.missing + repaired.stale
            assert await live(database) == {(bytes(key), str(tier)) for key, tier in owner.held}, turn
            assert owner.shipped < 200, "only what may differ is shipped"
            await catalog.write(lost, now_s=4.0)  # type: ignore[arg-type]
            assert await live(database) == {(bytes(key), str(tier)) for key, tier in owner.held}, "late news is old"
        assert expected > 20
        reply = owner.log.digest(DigestQuery(incarnation=LIFE), now=0.0)
        ours = await catalog.digest(A, LIFE, seq=owner.log.seq)
        assert ours.complete, "nothing is missed any more"
        assert differing(ours.tiers, {tier.tier: unpack(tier) for tier in reply.tiers}) == []  # type: ignore[union-attr]


async def test_an_empty_catalog_is_filled_a_part_at_a_time(database: Database) -> None:
    owner = Owner()
    blocks = [block for i in range(60) for block in chain(f"c{i}", 50)]
    owner.store(*blocks)
    async with comparing(database, owner) as reconciler:
        repaired = await reconciler.compare(A, LIFE)
        assert (repaired.missing, repaired.stale) == (3_000, 0)
        assert owner.shipped == 3_000 and len({block.key[:2] for block in blocks}) > BUCKETS_AT_ONCE
        owner.evict(*blocks)
        repaired = await reconciler.compare(A, LIFE)
        assert (repaired.missing, repaired.stale) == (0, 3_000)


async def test_a_copy_whose_block_is_lost_gets_it_again(database: Database) -> None:
    catalog, owner = Catalog(database), Owner()
    blocks = chain("x", 5)
    await catalog.write([owner.store(*blocks)], now_s=1.0)
    async with comparing(database, owner) as reconciler:
        async with database.transaction() as connection:
            await connection.execute(text("DELETE FROM kv_block WHERE depth = 3"))
        assert (await reconciler.compare(A, LIFE)).missing == 0
        async with database.transaction() as connection:
            count = (await connection.execute(text("SELECT count(*) FROM kv_block"))).scalar_one()
        assert count == 5
