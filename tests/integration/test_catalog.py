"""The catalog against a model, against Postgres's planner, and against the clock."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from shared.catalog.fold import FeedEvent
from shared.catalog.migrate import upgrade_database
from shared.catalog.models import Base
from shared.catalog.repository import BlockNotFound, Catalog, Inventory, Repaired
from shared.catalog.session import Database, Unwritable, connect
from shared.errors import SettingError, Unavailable
from shared.ids import BlockKey, HostId, Incarnation, RequestId, SpecDigest, WorkerId
from shared.kv import CacheSpec, Tier, pack_keys
from shared.messages import (
    BlocksQuery,
    Bye,
    Endpoint,
    Evicted,
    Hello,
    RequestDone,
    Stages,
    Stored,
    StoredBlock,
)
from tests.support.eventually import eventually

SPEC = CacheSpec(model="toy", weights_digest="w", tokenizer_digest="t", dtype="float32", layers=2, kv_heads=1,
                 head_dim=4, block_tokens=16, max_context=4096)
ROOT = BlockKey(bytes(32))


def chain(name: str, length: int, *, after: BlockKey = ROOT, depth: int = 0) -> list[StoredBlock]:
    """``length`` blocks that follow ``after``."""
    blocks, parent = [], after
    for i in range(length):
        key = BlockKey(hashlib.sha256(parent + f"{name}{i}".encode()).digest())
        blocks.append(StoredBlock(key=key, parent=parent, depth=depth + i, nbytes=SPEC.block_bytes, tokens=16,
                                  tenant="acme", request=RequestId(f"req-{name}")))
        parent = key
    return blocks


def hello(worker: str, life: str = "1", *, started_at_s: float = 1000.0, role: str = "prefill") -> Hello:
    return Hello(worker=WorkerId(worker), incarnation=Incarnation(life), role=role, spec=SPEC,
                 endpoint=Endpoint(worker=WorkerId(worker), incarnation=Incarnation(life), host=HostId("h")),
                 capacity_blocks=100, max_running=4, started_at_s=started_at_s, pid=7)


def stored(worker: str, seq: int, blocks: list[StoredBlock], *, at_s: float = 0.0, life: str = "1") -> Stored:
    return Stored(worker=WorkerId(worker), incarnation=Incarnation(life), seq=seq, spec=SPEC.digest,
                  at_s=at_s or 1000.0 + seq, blocks=blocks)


def evicted(worker: str, seq: int, blocks: list[StoredBlock], *, life: str = "1", reason: str = "capacity") -> Evicted:
    return Evicted(worker=WorkerId(worker), incarnation=Incarnation(life), seq=seq, at_s=1000.0 + seq,
                   keys=pack_keys([block.key for block in blocks]), reason=reason)


def done(request: str, block: StoredBlock | None, hit_tokens: int, *, tokens: int = 64) -> RequestDone:
    return RequestDone(request=RequestId(request), gateway="g", model="toy", spec=SPEC.digest, tenant="acme",
                       received_at_s=2000.0, duration_s=1.0, outcome="ok", prompt_tokens=tokens, hit_tokens=hit_tokens,
                       ttft_s=0.5, stages=Stages(hit_tokens=hit_tokens), last_key=block.key if block else b"")


@pytest_asyncio.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    async with connect(postgres_url) as opened:
        await upgrade_database(opened)
        yield opened


@pytest.fixture
def catalog(database: Database) -> Catalog:
    return Catalog(database)


async def rows(database: Database, query: str) -> list[tuple]:
    async with database.transaction() as connection:
        return [tuple(row) for row in (await connection.execute(text(query))).all()]


# Order and repetition.

@dataclass
class Model:
    """What the catalog must say after a set of events, computed from the whole set at once."""

    events: list[FeedEvent]
    live: set[tuple[bytes, str, str]] = field(default_factory=set)
    evictions: set[tuple[bytes, str, str, int]] = field(default_factory=set)
    creators: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    hits: dict[bytes, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        news = sorted((event for event in self.events if isinstance(event, Stored | Evicted)),
                      key=lambda event: (event.worker, event.seq))
        claims: dict[bytes, list] = {}
        parents: dict[bytes, tuple[bytes, int]] = {}
        for event in news:
            if isinstance(event, Stored):
                for block in event.blocks:
                    self.live.add((block.key, event.worker, block.tier))
                    claims.setdefault(block.key, []).append(
                        (block.origin != "computed", event.at_s, event.worker, block.request))
                    parents[block.key] = (block.parent, block.depth)
            else:
                for start in range(0, len(event.keys), 32):
                    self.live.discard((event.keys[start:start + 32], event.worker, event.tier))
                    self.evictions.add((event.keys[start:start + 32], event.worker, event.tier, event.seq))
        self.creators = {key: (min(made)[2], min(made)[3]) for key, made in claims.items()}
        self.hits = dict.fromkeys(claims, 0)
        for event in {event.request: event for event in self.events if isinstance(event, RequestDone)}.values():
            path, key = [], event.last_key
            while key in parents:
                path.append(key)
                key = parents[key][0]
            if key == ROOT:
                for key in path:
                    self.hits[key] += (parents[key][1] + 1) * 16 <= event.hit_tokens
        self.gone = {event.worker for event in self.events if isinstance(event, Bye)}


TREE = chain("trunk", 3)
TREE += chain("left", 2, after=TREE[1].key, depth=2) + chain("right", 2, after=TREE[2].key, depth=3)


@st.composite
def histories(draw: st.DrawFn) -> list[FeedEvent]:
    """Any history of two workers over one small tree, in the order it happened."""
    events: list[FeedEvent] = []
    for worker in ("a", "b"):
        events.append(hello(worker))
        for seq in range(1, draw(st.integers(0, 6)) + 1):
            some = draw(st.lists(st.sampled_from(TREE), min_size=1, max_size=4, unique_by=lambda block: block.key))
            if draw(st.booleans()):
                tier = draw(st.sampled_from(list(Tier)[:2]))
                origin = draw(st.sampled_from(["computed", "received"]))
                blocks = [StoredBlock(key=b.key, parent=b.parent, depth=b.depth, nbytes=b.nbytes, tokens=16,
                                      tenant="acme", tier=tier, origin=origin, request=RequestId(f"{worker}{seq}"))
                          for b in some]
                events.append(stored(worker, seq, blocks, at_s=1000.0 + draw(st.integers(0, 3))))
            else:
                events.append(Evicted(
                    worker=WorkerId(worker), incarnation=Incarnation("1"), seq=seq, at_s=1000.0 + seq,
                    keys=pack_keys([b.key for b in some]), tier=draw(st.sampled_from(list(Tier)[:2]))))
        if draw(st.booleans()):
            events.append(Bye(worker=WorkerId(worker), incarnation=Incarnation("1"), at_s=1500.0))
    events.extend(done(f"r{i}", draw(st.sampled_from(TREE)), draw(st.integers(0, 5)) * 16)
                  for i in range(draw(st.integers(0, 3))))
    return events


async def assert_sums_are_kept(database: Database) -> None:
    """What triggers added up is what there is."""
    assert await rows(database, "SELECT * FROM kv_held WHERE (blocks, nbytes) <> (0, 0) ORDER BY 1, 2") == await rows(
        database, "SELECT life, tier, count(*), sum(nbytes) FROM kv_copy GROUP BY 1, 2 ORDER BY 1, 2")
    assert await rows(database, "SELECT * FROM request_hour ORDER BY 1") == await rows(
        database, """SELECT date_trunc('hour', received_at, 'UTC'), count(*), sum(prompt_tokens), sum(hit_tokens)
                     FROM request_done GROUP BY 1 ORDER BY 1""")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories(), seed=st.integers(0, 2**32), repeats=st.integers(0, 8), batches=st.integers(1, 6))
async def test_any_order_any_repetition_and_two_writers_end_the_same(
    postgres_url: str, history: list[FeedEvent], seed: int, repeats: int, batches: int,
) -> None:
    chance = random.Random(seed)
    delivered = history + chance.choices(history, k=repeats)
    chance.shuffle(delivered)
    async with connect(postgres_url) as database:
        if not await rows(database, "SELECT 1 FROM pg_class WHERE relname = 'kv_block'"):
            await upgrade_database(database)
        async with database.transaction() as connection:
            for table in Base.metadata.sorted_tables:  # quicker than to truncate tables of a few rows
                await connection.execute(table.delete())
        catalog = Catalog(database)
        cuts = sorted(chance.choices(range(len(delivered) + 1), k=2 * batches - 1))
        parts = [delivered[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(delivered)], strict=True)]
        other = Catalog(database)
        for mine, theirs in zip(parts[::2], parts[1::2], strict=True):
            await asyncio.gather(catalog.write(mine, now_s=3000.0), other.write(theirs, now_s=3000.0))
        async with database.transaction() as connection:  # requests of the one may wait for blocks of the other
            await connection.execute(text("UPDATE reuse_due SET try_at = now()"))
        await catalog.count_reuse()

        model = Model(history)
        live = await rows(database, "SELECT key, worker, tier FROM kv_copy JOIN life USING (life)")
        assert {(key, worker, Tier(tier)) for key, worker, tier in live} == model.live
        usable = await rows(database, "SELECT key, worker, tier FROM kv_usable")
        assert {(key, worker, Tier(tier)) for key, worker, tier in usable} == {
            copy for copy in model.live if copy[1] not in model.gone}
        blocks = await rows(
            database, "SELECT key, created_by, request, coalesce(hits, 0) FROM kv_block LEFT JOIN kv_use USING (key)")
        assert {key: (by, request) for key, by, request, _ in blocks} == model.creators
        assert {key: hits for key, _, _, hits in blocks} == model.hits
        assert {worker for worker, state in await rows(database, "SELECT worker, state FROM worker")
                if state == "left"} == model.gone
        evictions = await rows(database, "SELECT key, worker, tier, evicted_seq FROM kv_evicted JOIN life USING (life)")
        assert len(evictions) == len(set(evictions))
        assert {(key, worker, Tier(tier), seq) for key, worker, tier, seq in evictions} == model.evictions
        assert await rows(database, "SELECT worker FROM life WHERE seen <> multirange(range_merge(seen))") == []
        assert await rows(database, "SELECT key FROM kv_late") == []
        await assert_sums_are_kept(database)


async def test_an_eviction_that_overtakes_its_storing_wins(catalog: Catalog, database: Database) -> None:
    blocks = chain("x", 2)
    await catalog.write([evicted("a", 2, blocks[:1])], now_s=0.0)
    assert (await catalog.stats(feed_pending=0)).live_replicas == 0
    await catalog.write([stored("a", 1, blocks)], now_s=0.0)
    reply = await catalog.lineage(blocks[1].key.hex())
    assert [(row.replicas[0].evicted_at_s, row.replicas[0].why) for row in reply.blocks] == [
        (1002.0, "capacity"), (None, "")]
    await catalog.write([stored("a", 3, blocks[:1])], now_s=0.0)
    assert (await catalog.stats(feed_pending=0)).live_replicas == 2


async def test_gaps_are_told_until_they_close(catalog: Catalog) -> None:
    blocks = chain("x", 3)
    assert (await catalog.write([hello("a"), stored("a", 1, blocks[:1])], now_s=0.0)).gaps == ()
    assert (await catalog.write([stored("a", 3, blocks[2:])], now_s=0.0)).gaps == (("a", "1"),)
    assert (await catalog.write([stored("a", 2, blocks[1:2])], now_s=0.0)).gaps == ()
    assert (await catalog.write([stored("b", 2, blocks)], now_s=0.0)).gaps == (("b", "1"),)


# Workers.

async def test_lives_of_a_worker(catalog: Catalog, database: Database) -> None:
    blocks = chain("x", 2)
    await catalog.write([hello("a", "2", started_at_s=2000.0), stored("a", 1, blocks, life="2")], now_s=0.0)
    await catalog.write([hello("a", "1", started_at_s=1000.0), stored("a", 1, blocks, life="1")], now_s=0.0)
    states = await rows(
        database, "SELECT incarnation, state, extract(epoch FROM left_at)::int, why FROM worker ORDER BY incarnation")
    assert states == [("1", "left", 2000, "replaced by incarnation 2"), ("2", "alive", None, "")]
    row = (await catalog.lineage(blocks[0].key.hex())).blocks[0]
    assert [(r.incarnation, r.evicted_at_s, r.why) for r in row.replicas] == [
        ("1", 2000.0, "replaced by incarnation 2"), ("2", None, "")]


async def test_the_silent_die_and_may_live_again(catalog: Catalog, database: Database) -> None:
    blocks = chain("x", 2)
    await catalog.write([hello("a"), hello("b"), hello("young", started_at_s=5000.0), stored("a", 1, blocks)],
                        now_s=0.0)
    assert await catalog.mark_workers([("b", "1")], {("a", "1"): "silent for 8.1 s"}, now_s=5000.0,
                                      started_before_s=4990.0) == 1
    assert await rows(database, "SELECT worker, state, why FROM worker ORDER BY 1") == [
        ("a", "dead", "silent for 8.1 s"), ("b", "alive", ""), ("young", "alive", "")]
    stats = await catalog.stats(feed_pending=3)
    assert (stats.live_replicas, stats.live_blocks, stats.live_bytes, stats.feed_pending) == (0, 0, 0, 3)
    assert (await catalog.blocks(BlocksQuery())).total == 0
    assert (await catalog.blocks(BlocksQuery(all=True))).total == 2
    assert await catalog.mark_workers([("a", "1"), ("b", "1")], {}, now_s=5001.0, started_before_s=4990.0) == 1
    stats = await catalog.stats(feed_pending=0)
    assert (stats.live_replicas, stats.live_bytes) == (2, 2 * SPEC.block_bytes)
    held = stats.workers[0]
    assert (held.worker, held.role, held.state, held.blocks) == ("a", "prefill", "alive", 2)


# Lineage and lists.

async def test_lineage_of_branches(catalog: Catalog) -> None:
    trunk = chain("trunk", 3)
    left = chain("left", 2, after=trunk[2].key, depth=3)
    right = chain("right", 4, after=trunk[2].key, depth=3)
    await catalog.write([hello("a"), hello("b"), stored("a", 1, trunk + left)], now_s=0.0)
    received = [StoredBlock(key=b.key, parent=b.parent, depth=b.depth, nbytes=b.nbytes, tokens=16, tenant="acme",
                            origin="received", source=WorkerId("a"), request=RequestId("later")) for b in trunk]
    await catalog.write([stored("b", 1, received), stored("b", 2, right)], now_s=0.0)

    reply = await catalog.lineage(right[3].key.hex())
    assert [row.key for row in reply.blocks] == [b.key for b in trunk + right]
    assert [row.depth for row in reply.blocks] == list(range(7))
    assert [row.created_by for row in reply.blocks] == ["a"] * 3 + ["b"] * 4
    assert reply.descendants == 0
    first = reply.blocks[0]
    assert (first.model, first.tenant, first.tokens, first.request, first.created_at_s) == (
        "toy", "acme", 16, "req-trunk", 1001.0)
    assert [(r.worker, r.origin, r.source) for r in first.replicas] == [("a", "computed", ""), ("b", "received", "a")]
    assert (await catalog.lineage(trunk[2].key.hex()[:20].upper())).descendants == 6
    assert [row.key for row in (await catalog.lineage(left[1].key.hex())).blocks] == [b.key for b in trunk + left]


async def test_lineage_begins_where_knowledge_begins(catalog: Catalog) -> None:
    blocks = chain("x", 4)
    await catalog.write([stored("a", 1, blocks[2:])], now_s=0.0)
    assert [row.depth for row in (await catalog.lineage(blocks[3].key.hex())).blocks] == [2, 3]


async def test_keys_that_name_no_block(catalog: Catalog) -> None:
    twins = [StoredBlock(key=BlockKey(bytes([7]) * 31 + bytes([i])), parent=ROOT, depth=0, nbytes=1) for i in range(2)]
    await catalog.write([stored("a", 1, twins)], now_s=0.0)
    with pytest.raises(BlockNotFound, match="start of several keys"):
        await catalog.lineage("07")
    with pytest.raises(BlockNotFound, match="no block's key starts with 08"):
        await catalog.lineage("08")
    for bad in ("", "xyz", "0" * 65):
        with pytest.raises(BlockNotFound, match="is no block key"):
            await catalog.lineage(bad)
    assert len((await catalog.lineage(twins[1].key.hex())).blocks) == 1


async def test_lists_and_reuse(catalog: Catalog) -> None:
    blocks, other = chain("x", 4), chain("y", 2)
    await catalog.write([hello("a"), hello("b"), stored("a", 1, blocks), stored("b", 1, other, at_s=2000.0)], now_s=0.0)
    again = [done("r1", blocks[3], 48), done("r2", blocks[3], 16), done("r1", blocks[3], 48), done("r3", None, 0)]
    await catalog.write(again, now_s=0.0)
    hot = await catalog.blocks(BlocksQuery(order="hot", limit=3))
    assert [(row.key, row.hits, row.last_used_at_s) for row in hot.blocks] == [
        (blocks[0].key, 2, 2001.0), (blocks[1].key, 1, 2001.0), (blocks[2].key, 1, 2001.0)]
    assert hot.total == 3
    assert (await catalog.blocks(BlocksQuery(order="hot", all=True))).total == 3
    assert (await catalog.blocks(BlocksQuery(all=True, worker="a"))).total == 4
    assert [row.key for row in (await catalog.blocks(BlocksQuery(limit=2))).blocks] == [other[1].key, other[0].key]
    assert (await catalog.blocks(BlocksQuery(order="deep", limit=1))).blocks[0].key == blocks[3].key
    assert {row.created_by for row in (await catalog.blocks(BlocksQuery(worker="b"))).blocks} == {"b"}
    assert (await catalog.blocks(BlocksQuery(tenant="other"))).total == 0
    stats = await catalog.stats(feed_pending=0)
    assert (stats.requests, stats.prompt_tokens, stats.hit_tokens) == (3, 192, 64)


async def test_reuse_waits_for_its_blocks(catalog: Catalog, database: Database) -> None:
    blocks = chain("x", 3)
    await catalog.write([hello("a"), done("r1", blocks[2], 32)], now_s=0.0)
    await catalog.write([stored("a", 2, blocks[1:])], now_s=0.0)
    assert await rows(database, "SELECT count(*)::int FROM kv_use") == [(0,)]
    await catalog.write([stored("a", 1, blocks[:1])], now_s=0.0)
    hits = await rows(database, "SELECT depth, hits FROM kv_block JOIN kv_use USING (key) ORDER BY 1")
    assert hits == [(0, 1), (1, 1)]


# Reconciliation.

async def test_writers_that_count_each_others_blocks_do_not_collide(
        catalog: Catalog, database: Database, postgres_url: str) -> None:
    """Each announces the blocks whose reuse the other one counts: locks taken in two orders would meet."""
    chains = [chain(name, 40) for name in ("one", "other")]
    await catalog.write([hello("a"), *(stored("a", n + 1, blocks) for n, blocks in enumerate(chains))], now_s=1000.0)
    async with connect(postgres_url) as second:
        for turn in range(25):
            await asyncio.gather(*(
                writer.write([stored("a", n + 1, chains[n]), done(f"r{turn}-{n}", chains[1 - n][-1], 16 * 40)],
                             now_s=2000.0)
                for n, writer in enumerate((catalog, Catalog(second)))))
    assert await rows(database, "SELECT DISTINCT hits FROM kv_use") == [(25,)]
    assert await rows(
        database, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == [(0,)]


async def test_a_write_that_collides_is_tried_again(catalog: Catalog, database: Database) -> None:
    blocks = sorted(chain("x", 2), key=lambda block: block.key)
    low, high = (block.key for block in blocks)
    await catalog.write([stored("a", 1, blocks)], now_s=1000.0)
    lock = text("SELECT key FROM kv_copy WHERE key = :key FOR UPDATE")
    async with database.transaction() as other:
        # Postgres undoes whoever finds the deadlock: the writer, who looks after a second.
        await other.execute(text("SET LOCAL deadlock_timeout = '60s'"))
        await other.execute(lock, {"key": high})
        writing = asyncio.create_task(catalog.write([stored("a", 2, blocks)], now_s=1000.0))

        async def waits() -> bool:
            return bool(await rows(database, "SELECT pid FROM pg_locks WHERE NOT granted"))

        await eventually(waits, "the writer has the one and waits for the other")
        await other.execute(lock, {"key": low})
    assert (await writing).blocks == 2
    assert await rows(database, "SELECT DISTINCT stored_seq FROM kv_copy") == [(2,)]


async def test_reconcile_repairs_both_ways(catalog: Catalog, database: Database) -> None:
    blocks = chain("x", 6)
    await catalog.write([hello("a"), stored("a", 1, blocks[:3]), evicted("a", 3, blocks[1:2]),
                         stored("a", 9, blocks[5:])], now_s=0.0)
    # As of 7 the worker holds 0, 1 (stored again at 4), 3 and 4; it has evicted 2; 5 it stored later.
    truth = Inventory(WorkerId("a"), Incarnation("1"), 7, SPEC.digest, (blocks[0], blocks[1], blocks[3], blocks[4]))
    assert await catalog.reconcile(truth, now_s=5000.0) == Repaired(missing=3, stale=1)
    live = {row[0] for row in await rows(database, "SELECT key FROM kv_usable")}
    assert live == {blocks[i].key for i in (0, 1, 3, 4, 5)}
    reply = await catalog.lineage(blocks[2].key.hex())
    assert (reply.blocks[2].replicas[0].why, reply.blocks[2].replicas[0].evicted_at_s) == ("reconcile", 5000.0)
    assert reply.blocks[0].replicas[0].stored_at_s == 1001.0, "what was right stays as it was"
    assert await catalog.reconcile(truth, now_s=5001.0) == Repaired()
    # The news that was missing comes after all: nothing changes, but who made the block first.
    late = [evicted("a", 6, blocks[2:3]), stored("a", 5, blocks[4:5]), stored("a", 4, blocks[1:2]),
            stored("a", 2, blocks[3:4])]
    assert (await catalog.write(late, now_s=0.0)).gaps == (("a", "1"),), "8 is still missing"
    assert {row[0] for row in await rows(database, "SELECT key FROM kv_usable")} == live
    assert (await catalog.lineage(blocks[4].key.hex())).blocks[4].created_at_s == 1005.0
    assert (await catalog.write([evicted("a", 8, blocks[:1])], now_s=0.0)).gaps == ()


async def test_an_older_inventory_undoes_nothing_newer(catalog: Catalog, database: Database) -> None:
    blocks = chain("x", 2)
    await catalog.write([stored("a", 1, blocks), evicted("a", 2, blocks[1:])], now_s=0.0)
    old = Inventory(WorkerId("a"), Incarnation("1"), 1, SPEC.digest, tuple(blocks))
    assert await catalog.reconcile(old, now_s=5000.0) == Repaired()
    empty = Inventory(WorkerId("a"), Incarnation("1"), 0, SpecDigest(""), ())
    assert await catalog.reconcile(empty, now_s=0.0) == Repaired()
    assert await rows(database, "SELECT count(*)::int FROM kv_usable") == [(1,)]


async def test_reconcile_finds_lost_block_rows(catalog: Catalog, database: Database) -> None:
    blocks = chain("x", 3)
    await catalog.write([hello("a"), stored("a", 1, blocks)], now_s=0.0)
    async with database.transaction() as connection:
        await connection.execute(text("DELETE FROM kv_block WHERE depth = 1"))
    truth = Inventory(WorkerId("a"), Incarnation("1"), 1, SPEC.digest, tuple(blocks))
    assert await catalog.reconcile(truth, now_s=5000.0) == Repaired()
    assert len((await catalog.lineage(blocks[2].key.hex())).blocks) == 3


# Bad data and bad places.

async def test_data_that_postgres_never_takes(catalog: Catalog) -> None:
    good, bad = chain("x", 1), chain("y", 1)
    nul = [StoredBlock(key=bad[0].key, parent=ROOT, depth=0, nbytes=1, tenant="a\x00b")]
    with pytest.raises(Unwritable):
        await catalog.write([stored("a", 1, good), stored("a", 2, nul)], now_s=0.0)
    with pytest.raises(Unwritable):
        await catalog.write([stored("a", 2**70, good)], now_s=0.0)
    with pytest.raises(Unwritable):
        await catalog.write([stored("a", 1, good, at_s=1e300)], now_s=0.0)
    assert (await catalog.stats(feed_pending=0)).blocks == 0, "a batch is written whole or not at all"


async def test_postgres_out_of_reach() -> None:
    async with connect("postgresql://someone:secret@127.0.0.1:1/db") as database:
        with pytest.raises(Unavailable) as caught:
            await Catalog(database).lineage("00")
    message = str(caught.value)
    assert "Postgres at 127.0.0.1:1 (user someone, database db)" in message
    assert message.endswith("start it or set MOONBUS_POSTGRES_URL")
    assert "secret" not in message and "\n" not in message


async def test_postgres_that_stands_still_costs_the_deadline_of_a_statement(postgres_url: str) -> None:
    """SIGSTOP: the connection stays open and nobody answers, neither the statement nor its undoing."""
    async with connect(postgres_url) as database:
        await upgrade_database(database)
    async with connect(postgres_url, connections=1, statement_s=0.5, connect_s=5.0) as database:
        catalog, news = Catalog(database), [hello("w"), stored("w", 1, chain("a", 4))]
        async with database.transaction() as connection:
            backend = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
        try:
            os.kill(backend, signal.SIGSTOP)
        except PermissionError:
            pytest.skip("Postgres runs as another user, whose processes only root may stop")
        try:
            async with asyncio.timeout(60):
                with pytest.raises(Unavailable):
                    await catalog.write(news, now_s=1001.0)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it was told to end meanwhile
                os.kill(backend, signal.SIGCONT)
        await catalog.write(news, now_s=1002.0)
        assert (await catalog.stats(feed_pending=0)).live_replicas == 4


async def test_a_wrong_password_or_database(postgres_url: str) -> None:
    for wrong in (postgres_url.replace("moonbus:", "moonbus:x"), postgres_url + "x"):
        async with connect(wrong) as database:
            with pytest.raises(Unavailable, match="start it or set") as caught:
                await Catalog(database).stats(feed_pending=0)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["nonsense", "mysql://u:secret@h/db", "postgresql://h:port/x"])
async def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(SettingError, match="postgres_url") as caught:
        async with connect(url):
            pass
    assert "secret" not in str(caught.value)
