"""Questions to a filled catalog, the plans of their statements, and its upkeep. One database for the whole module."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from sqlalchemy import TextClause, text

from load.bench.catalog_feed import PREFIX_BLOCKS, SPEC, Feed, Holder
from services.launcher import embedded
from shared.catalog import ingest_sql, queries, query_sql, upkeep_sql
from shared.catalog.migrate import upgrade_database
from shared.catalog.repository import BlockNotFound, Catalog, RequestNotFound, Retention
from shared.catalog.retention import HOUR_S
from shared.catalog.session import Database, connect
from shared.ids import Incarnation
from shared.messages import (
    BlocksQuery,
    Bye,
    DescendantsQuery,
    EvictionsQuery,
    HotQuery,
    RequestDone,
    RequestsQuery,
    ReuseQuery,
    StorageQuery,
    Stored,
)
from shared.store.digest import BUCKETS, Digest, unpack

pytestmark = pytest.mark.asyncio(loop_scope="module")

DAY_S = 24 * HOUR_S
NOW_S = time.time() // DAY_S * DAY_S + DAY_S / 2
"""Noon of today, so that all that is told lies in one day, whenever the tests run."""
REQUESTS = 400


class Filled:
    """A catalog that was told a feed, and what it was told."""

    def __init__(self, database: Database, feed: Feed, events: list[object]) -> None:
        self.database, self.catalog, self.feed = database, Catalog(database), feed
        self.stored = [event for event in events if isinstance(event, Stored)]
        self.requests = [event for event in events if isinstance(event, RequestDone)]

    async def rows(self, query: str | TextClause, **binds: object) -> list[tuple]:
        async with self.database.transaction() as connection:
            statement = text(query) if isinstance(query, str) else query
            return [tuple(row) for row in (await connection.execute(statement, binds)).all()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def filled(postgres_server: embedded.Postgres) -> AsyncIterator[Filled]:
    url = await postgres_server.create_database("test_catalog_queries")
    feed = Feed(seed=4, room=2_000)
    events: list[object] = list(feed.begin(at_s=NOW_S - 1800.0))
    for n in range(REQUESTS):
        events.extend(feed.request(at_s=NOW_S - 1700.0 + n))
    async with connect(url) as database:
        await upgrade_database(database)
        catalog = Catalog(database)
        for start in range(0, len(events), 500):
            await catalog.write(events[start:start + 500], now_s=NOW_S)  # type: ignore[arg-type]
        async with database.transaction() as connection:
            await connection.execute(text("ANALYZE"))
        yield Filled(database, feed, events)
    await postgres_server.drop_database("test_catalog_queries")


async def test_copies_are_what_workers_hold(filled: Filled) -> None:
    for holder in (*filled.feed.prefill, *filled.feed.decode):
        known = await filled.catalog.known(_worker(holder), holder.incarnation, range(BUCKETS))
        assert {key for key, _ in known} == set(holder.held)
        digest = await filled.catalog.digest(_worker(holder), holder.incarnation, seq=holder.seq)
        assert digest.complete
        own = Digest()
        for key, tier in known:
            own.add(key, tier)
        assert digest.tiers == {tier.tier: unpack(tier) for tier in own.pack()}
        assert not (await filled.catalog.digest(_worker(holder), holder.incarnation, seq=holder.seq + 1)).complete


async def test_hot_prefixes_and_what_they_saved(filled: Filled) -> None:
    prefixes = (await filled.catalog.hot(HotQuery())).prefixes
    saved = sum(row.hits * row.tokens for row in prefixes)
    assert saved == sum(done.hit_tokens for done in filled.requests)
    assert {row.blocks for row in prefixes} == {PREFIX_BLOCKS}, "a shared prefix is one stretch"
    assert [row.hits for row in prefixes] == sorted((row.hits for row in prefixes), reverse=True)
    tenant = prefixes[0].tenant
    assert {row.tenant for row in (await filled.catalog.hot(HotQuery(tenant=tenant))).prefixes} == {tenant}
    assert (await filled.catalog.hot(HotQuery(model="other"))).prefixes == []
    assert len((await filled.catalog.hot(HotQuery(limit=1))).prefixes) == 1
    listed = (await filled.catalog.blocks(BlocksQuery(order="hot", all=True, limit=3))).blocks
    assert {block.hits for block in listed} == {prefixes[0].hits}


async def test_descendants_hang_together(filled: Filled) -> None:
    top = (await filled.catalog.hot(HotQuery())).prefixes[0]
    reply = await filled.catalog.descendants(DescendantsQuery(key_hex=top.key.hex(), limit=10_000))
    assert (reply.prefixes[0].key, reply.prefixes[0].hits) == (top.key, top.hits)
    assert sum(row.blocks for row in reply.prefixes) == reply.descendants + 1
    ends = {row.key for row in reply.prefixes}
    assert all(row.parent in ends for row in reply.prefixes[1:]), "parents first, nothing apart"
    few = await filled.catalog.descendants(DescendantsQuery(key_hex=top.key.hex(), limit=5))
    assert sum(row.blocks for row in few.prefixes) == 6
    assert few.descendants == reply.descendants
    with pytest.raises(BlockNotFound):
        await filled.catalog.descendants(DescendantsQuery(key_hex="zz"))


async def test_who_evicted_what_and_why(filled: Filled) -> None:
    reply = await filled.catalog.evictions(EvictionsQuery(limit=5), now_s=NOW_S)
    told = sum(row.blocks for row in reply.groups)
    assert [(told,)] == await filled.rows("SELECT count(*) FROM kv_evicted")
    assert {row.why for row in reply.groups} == {"capacity"}
    assert {row.worker for row in reply.groups} == {
        holder.name for holder in (*filled.feed.prefill, *filled.feed.decode)}
    assert len(reply.evictions) == 5
    assert all(row.held_s is not None and row.held_s > 0 and row.nbytes == SPEC.block_bytes for row in reply.evictions)
    one = reply.evictions[0]
    story = await filled.catalog.evictions(EvictionsQuery(key_hex=one.key.hex()), now_s=NOW_S)
    assert {row.key for row in story.evictions} == {one.key}
    mine = await filled.catalog.evictions(EvictionsQuery(worker=one.worker, tenant=one.tenant), now_s=NOW_S)
    assert {(row.worker, row.tenant) for row in mine.evictions} == {(one.worker, one.tenant)}
    assert (await filled.catalog.evictions(EvictionsQuery(why="drain"), now_s=NOW_S)).evictions == []
    assert (await filled.catalog.evictions(EvictionsQuery(window_s=1.0), now_s=NOW_S)).groups == []
    ended = (await filled.catalog.lineage(one.key.hex())).blocks[-1].replicas
    assert any(copy.why == "capacity" and copy.evicted_at_s == one.at_s for copy in ended)


async def test_reuse_and_requests(filled: Filled) -> None:
    for by, names in (("tenant", {done.tenant for done in filled.requests}), ("model", {SPEC.model})):
        rows = (await filled.catalog.reuse(ReuseQuery(by=by), now_s=NOW_S)).rows  # type: ignore[arg-type]
        assert {row.name for row in rows} == names
        assert sum(row.requests for row in rows) == REQUESTS
        assert sum(row.hit_tokens for row in rows) == sum(done.hit_tokens for done in filled.requests)
    days = (await filled.catalog.reuse(ReuseQuery(by="day"), now_s=NOW_S)).rows
    assert days[0].name == time.strftime("%Y-%m-%d", time.gmtime(NOW_S))
    assert days[0].ttft_s == pytest.approx(0.28)

    latest = filled.requests[-1]
    listed = (await filled.catalog.requests(RequestsQuery(limit=3), now_s=NOW_S)).requests
    assert [row.request for row in listed] == [done.request for done in filled.requests[:-4:-1]]
    assert listed[0].stages == latest.stages
    some = await filled.catalog.requests(
        RequestsQuery(tenant=latest.tenant, worker=latest.decode, outcome="ok", limit=1000), now_s=NOW_S)
    assert {(row.tenant, row.decode) for row in some.requests} == {(latest.tenant, latest.decode)}
    assert (await filled.catalog.requests(RequestsQuery(outcome="ttft"), now_s=NOW_S)).requests == []
    assert (await filled.catalog.request(latest.request)).request == listed[0]
    for wrong, said in (("", "no request id"), ("nobody", "no request's id starts"), ("4-", "start of several")):
        with pytest.raises(RequestNotFound, match=said):
            await filled.catalog.request(wrong)


async def test_a_large_catalog_is_estimated(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = await filled.catalog.stats(feed_pending=0)
    assert not exact.is_about
    blocks, live = (await filled.rows("SELECT (SELECT count(*) FROM kv_block), count(DISTINCT key) FROM kv_usable"))[0]
    assert (exact.blocks, exact.live_blocks, exact.requests) == (blocks, live, REQUESTS)
    assert exact.live_replicas == sum(worker.blocks for worker in exact.workers) > live
    monkeypatch.setattr(queries, "MAX_COUNTED", 0)
    about = await filled.catalog.stats(feed_pending=0)
    assert about.is_about and about.live_replicas == exact.live_replicas
    assert blocks / 2 < about.blocks < blocks * 2 and live * 0.8 < about.live_blocks < live * 1.25
    monkeypatch.setattr(query_sql, "MAX_LOOKED_AT", 100)
    listed = await filled.catalog.blocks(BlocksQuery(order="deep", limit=5))
    assert (listed.is_about, listed.looked_at, listed.total) == (True, 100, about.blocks)
    deepest = [depth for depth, in await filled.rows("SELECT depth FROM kv_block ORDER BY depth DESC LIMIT 200")]
    assert listed.blocks[0].depth in deepest


# Plans.

ANY = {"worker": "", "tenant": "", "model": "", "why": "", "outcome": ""}


async def test_every_question_finds_its_rows_by_an_index(filled: Filled) -> None:
    """Whatever the planner thinks of small tables: sequential scans are made dear, and none may be left."""
    key = filled.stored[0].blocks[0].key
    since = (await filled.rows("SELECT now() - interval '1 hour'"))[0][0]
    lists = {**ANY, "since": since, "limit": 5, "key": key, "low": "4-", "high": "4.", "step_s": 60.0}
    questions: list[tuple[TextClause, dict[str, object], set[str]]] = [
        (query_sql.FIND_KEYS, {"low": key, "high": key}, {"kv_block_pkey"}),
        (query_sql.LINEAGE, {"key": key}, {"kv_block_pkey"}),
        (query_sql.COUNT_DESCENDANTS, {"key": key}, {"kv_block_parent"}),
        (query_sql.DESCENDANTS, {"key": key, "limit": 10}, {"kv_block_parent"}),
        (query_sql.COPIES, {"keys": [key]}, {"kv_copy_pkey"}),
        (query_sql.USABLE, {"keys": [key]}, {"kv_copy_pkey"}),
        (query_sql.ENDED_COPIES, {"keys": [key], "heads": [key[:8]], "limit": 9}, {"kv_evicted_rest_substring_idx"}),
        (query_sql.BLOCKS["recent", True], {**ANY, "limit": 5}, {"kv_block_created_at"}),
        (query_sql.BLOCKS["recent", False], {**ANY, "limit": 5}, {"kv_block_created_at"}),
        (query_sql.BLOCKS["hot", False], {**ANY, "limit": 5}, {"kv_use_heat"}),
        (query_sql.BLOCKS["deep", False], {**ANY, "limit": 5}, {"kv_block_depth"}),
        (query_sql.TOTALS, {}, {"kv_held"}),
        (query_sql.WORKER_TOTALS, {}, {"kv_held"}),
        (upkeep_sql.SAMPLE, {"at": since}, {"kv_held"}),
        (query_sql.HOT, {**ANY, "limit": 5}, {"kv_use_heat", "kv_block_pkey"}),
        (query_sql.EVICTIONS, lists, {"kv_evicted_rest_evicted_at_idx"}),
        (query_sql.EVICTION_GROUPS, lists, {"kv_evicted_rest_evicted_at_idx"}),
        (query_sql.KEY_EVICTIONS, lists, {"kv_evicted_rest_substring_idx"}),
        *((query_sql.REUSE[by], lists, {"request_done_rest_received_at_idx"}) for by in query_sql.REUSE),
        (query_sql.REQUESTS, lists, {"request_done_rest_received_at_idx"}),
        (query_sql.REQUEST, lists, {"request_done_rest_pkey"}),
        (query_sql.CLIENTS_REQUEST, {"client_id": "c", "limit": 2}, {"request_done_rest_client_id_idx"}),
        (query_sql.STORAGE, lists, {"storage_sample_rest_pkey"}),
        (ingest_sql.KNOWN, {"worker": "prefill-1", "incarnation": "x", "buckets": [1]}, {"kv_copy_life"}),
        (ingest_sql.LOCK_LIVES, {"workers": ["a"], "incarnations": ["1"]}, {"kv_late_pkey"}),
        (upkeep_sql.SWEEP, {"after": since, "after_key": b"", "before": since, "most": 10}, {"kv_block_created_at"}),
        (upkeep_sql.LAST_SAMPLE, {}, {"storage_sample_rest_pkey"}),
    ]
    async with filled.database.transaction() as connection:
        await connection.execute(text("SET LOCAL enable_seqscan = off"))
        for statement, binds, indexes in questions:
            names = set(statement._bindparams)
            explained = "\n".join((await connection.execute(
                text(f"EXPLAIN {statement.text}"), {name: binds[name] for name in names})).scalars())
            assert all(index in explained for index in indexes), explained
            for table in ("kv_block", "kv_copy", "kv_evicted", "kv_use", "request_done", "storage_sample"):
                assert f"Seq Scan on {table}" not in explained, explained


async def test_a_batch_is_merged_by_index(filled: Filled) -> None:
    async with filled.database.transaction() as connection:
        await connection.execute(ingest_sql.BY_INDEX)
        for landing in (ingest_sql.IN_BLOCK, ingest_sql.IN_COPY, ingest_sql.IN_EVICTED):
            await connection.execute(text(landing.table()))
        for merge, index in ((ingest_sql.MERGE_BLOCKS, "kv_block_pkey"), (ingest_sql.END_COPIES, "kv_copy_pkey")):
            explained = "\n".join((await connection.execute(text(f"EXPLAIN {merge.copied.text}"))).scalars())
            assert index in explained, explained


# Upkeep.

async def test_partitions_come_take_over_and_go(filled: Filled) -> None:
    before = await filled.rows("SELECT count(*) FROM kv_evicted")
    keeper = Catalog(filled.database, Retention(sample_s=60.0))
    async with filled.database.transaction() as reader:  # a dump, say
        await reader.execute(text("SELECT count(*) FROM kv_evicted"))
        done = await keeper.maintain(now_s=NOW_S)
    assert (done.partitions_made, done.sampled) == (6, True), "three days of two tables, and everything else"
    done = await keeper.maintain(now_s=NOW_S)
    assert (done.partitions_made, done.sampled) == (3, False), "and of the third, now that nobody reads it"
    assert await filled.rows("SELECT count(*) FROM kv_evicted") == before
    assert (await filled.rows("SELECT count(*) FROM kv_evicted_rest"))[0][0] < before[0][0], (
        "today's rows moved into today's partition")
    again = await keeper.maintain(now_s=NOW_S)
    assert (again.partitions_made, again.partitions_dropped, again.sampled, again.more) == (0, 0, False, False)

    storage = await filled.catalog.storage(StorageQuery(steps=4), now_s=NOW_S + 1.0)
    held = {holder.name: len(holder.held) for holder in (*filled.feed.prefill, *filled.feed.decode)}
    assert {(row.worker, row.tier, row.blocks) for row in storage.rows} == {
        (name, "dram", blocks) for name, blocks in held.items()}

    async with filled.database.transaction() as connection:
        await connection.execute(text("CREATE TABLE kept AS SELECT * FROM request_done"))
    later = await keeper.maintain(now_s=NOW_S + 40 * DAY_S)
    assert later.partitions_dropped >= 9
    assert await filled.rows("SELECT count(*) FROM request_done") == [(0,)]
    assert (await filled.rows("SELECT count(*) FROM kept"))[0][0] == REQUESTS
    assert await filled.rows("SELECT count(*) FROM request_hour") == [(0,)]


async def test_what_nobody_holds_is_forgotten(filled: Filled) -> None:
    """To be the last one: it forgets."""
    held = {key for holder in (*filled.feed.prefill, *filled.feed.decode) for key in holder.held}
    future_s = NOW_S + 40 * DAY_S
    keeper = Catalog(filled.database)
    while (await keeper.maintain(now_s=future_s)).more:
        pass
    assert {key for key, in await filled.rows("SELECT key FROM kv_block")} == held
    assert await filled.rows("SELECT count(*) FROM kv_use u WHERE NOT EXISTS "
                             "(SELECT FROM kv_block b WHERE b.key = u.key)") == [(0,)]

    gone = filled.feed.decode[0]
    await keeper.write([Bye(worker=_worker(gone), incarnation=gone.incarnation, at_s=future_s, reason="drained")],
                       now_s=future_s)
    done = await keeper.maintain(now_s=future_s + 1.0)
    assert done.copies_ended == len(gone.held)
    assert await keeper.known(_worker(gone), gone.incarnation, range(BUCKETS)) == set()
    story = await keeper.evictions(EvictionsQuery(worker=gone.name), now_s=future_s + 1.0)
    assert [(row.why, row.blocks) for row in story.groups] == [("drained", len(gone.held))]
    assert (await keeper.maintain(now_s=future_s + 60 * DAY_S)).lives_forgotten >= 1


def _worker(holder: Holder):
    return holder.hello(at_s=0.0).worker


async def test_another_life_is_empty(filled: Filled) -> None:
    holder = filled.feed.prefill[0]
    assert await filled.catalog.known(_worker(holder), Incarnation("another"), range(BUCKETS)) == set()
