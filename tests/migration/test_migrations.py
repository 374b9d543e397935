"""The schema goes up, down and up again, and is what the models say."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from shared.catalog import migrate
from shared.catalog.models import PARTITIONED, Base
from shared.catalog.repository import Catalog, Inventory
from shared.catalog.session import Database, connect
from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.messages import Stored, StoredBlock
from shared.store.digest import BUCKETS

TABLES = {table.name for table in Base.metadata.sorted_tables} | {f"{table}_rest" for table in PARTITIONED}


async def _tables(database) -> set[str]:
    async with database.transaction() as connection:
        return set((await connection.execute(text(
            "SELECT relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE nspname = 'public' AND relkind IN ('r', 'p', 'v')"))).scalars())


async def test_up_down_up(postgres_url: str) -> None:
    async with connect(postgres_url) as database:
        assert await migrate.current_revision(database) is None
        assert await migrate.upgrade_database(database) == migrate.head()
        up = await _tables(database)
        assert up == TABLES | {"kv_usable", "alembic_version"}
        await migrate.downgrade_database(database, "base")
        assert await _tables(database) == {"alembic_version"}
        assert await migrate.upgrade_database(database) == migrate.head()
        assert await _tables(database) == up


async def test_models_are_what_the_migrations_make(postgres_url: str) -> None:
    async with connect(postgres_url) as database:
        await migrate.upgrade_database(database)
        async with database.transaction() as connection:
            difference = await connection.run_sync(lambda sync: compare_metadata(
                MigrationContext.configure(sync, opts={
                    "compare_type": True, "include_name": lambda name, kind, parents: not str(name).endswith("_rest")}),
                Base.metadata))
    assert difference == []


async def test_two_processes_at_once_take_turns(postgres_url: str) -> None:
    code = "import sys; from shared.catalog import migrate; sys.stdout.write(migrate.upgrade(sys.argv[1]))"
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-c", code, postgres_url, stdout=PIPE)
                 for _ in range(2)]
    outputs = [await process.communicate() for process in processes]
    assert [(process.returncode, output.decode()) for process, (output, _) in zip(processes, outputs, strict=True)] == [
        (0, migrate.head())] * 2


async def test_a_step_over_large_tables_takes_as_long_as_it_takes(
        postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def connect_as_ever(url: str, **options: Any) -> AbstractAsyncContextManager[Database]:
        limits.append(options)
        return connect(url, **options)

    monkeypatch.setattr(migrate, "connect", connect_as_ever)
    await asyncio.to_thread(migrate.upgrade, postgres_url)
    assert limits == [{"statement_s": None}]
    async with connect(postgres_url, statement_s=None) as database, database.transaction() as connection:
        await connection.execute(text("SELECT pg_sleep(0.1)"))


async def test_without_a_loop(postgres_url: str) -> None:
    assert await asyncio.to_thread(migrate.current, postgres_url) is None
    assert await asyncio.to_thread(migrate.upgrade, postgres_url) == migrate.head()
    assert await asyncio.to_thread(migrate.current, postgres_url) == migrate.head()


async def test_schema_is_required(postgres_url: str) -> None:
    async with connect(postgres_url) as database:
        with pytest.raises(migrate.SchemaMismatch, match=r"has no tables yet.*run moonbus migrate"):
            await migrate.require_schema(database)
        await migrate.upgrade_database(database, migrate.needed())
        await migrate.require_schema(database)


async def test_a_newer_schema_serves_but_is_not_migrated(postgres_url: str) -> None:
    async with connect(postgres_url) as database:
        await migrate.upgrade_database(database)
        async with database.transaction() as connection:
            await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        await migrate.require_schema(database)
        with pytest.raises(migrate.SchemaMismatch, match="newer moonbus"):
            await migrate.upgrade_database(database)


async def test_rows_of_the_first_schema_move(postgres_url: str) -> None:
    """Copies, histories, counters and numbers seen, of a catalog that worked for a while."""
    key = [bytes([i]) * 32 for i in range(6)]
    async with connect(postgres_url) as database:
        await migrate.upgrade_database(database, "0001")
        async with database.transaction() as connection:
            for statement in _FIRST:
                await connection.execute(text(statement), {"k1": key[1], "k2": key[2], "k3": key[3], "k0": key[0]})
        await migrate.upgrade_database(database)
        catalog = Catalog(database)

        chain = (await catalog.lineage(key[2].hex())).blocks
        assert [(block.key, block.hits) for block in chain] == [(key[1], 5), (key[2], 0)]
        assert [(copy.worker, copy.tier, copy.evicted_at_s, copy.why) for copy in chain[1].replicas] == [
            ("a", "dram", 1_000_060.0, "capacity"), ("a", "ssd", None, "")]
        assert await _held(catalog) == [key[1], key[2]]
        assert (await catalog.stats(feed_pending=0)).requests == 2
        async with database.transaction() as connection:
            assert (await connection.execute(text("SELECT request FROM reuse_due"))).scalars().all() == ["r2"]
            late = (await connection.execute(text("SELECT key, evicted_seq FROM kv_late"))).all()
        assert [tuple(row) for row in late] == [(key[3], 7)], "only what news may still be late for"
        # What was written before is not applied again; what was missing is.
        again = [_stored(1, key[1]), _stored(5, key[3]), _stored(6, key[0])]
        assert (await catalog.write(again, now_s=0.0)).gaps == ()
        assert await _held(catalog) == [key[0], key[1], key[2]]


async def test_news_written_between_pre_and_post_stays(postgres_url: str) -> None:
    """The new version runs on the new tables while the old one's rows are not moved yet."""
    key = [bytes([i]) * 32 for i in range(6)]
    async with connect(postgres_url) as database:
        await migrate.upgrade_database(database, "0001")
        async with database.transaction() as connection:
            for statement in _FIRST:
                await connection.execute(text(statement), {"k1": key[1], "k2": key[2], "k3": key[3], "k0": key[0]})
        await migrate.upgrade_database(database, "0002")
        catalog = Catalog(database)
        truth = Inventory(WorkerId("a"), Incarnation("1"), 9, SpecDigest("s"), tuple(_stored(9, key[4]).blocks))
        assert (await catalog.reconcile(truth, now_s=1_000_500.0)).missing == 1
        await migrate.upgrade_database(database)
        assert await _held(catalog) == [key[4]]
        assert (await catalog.lineage(key[1].hex())).blocks[0].hits == 5
        await migrate.downgrade_database(database, "0001")
        await migrate.upgrade_database(database)
        assert await _held(catalog) == [key[4]]


_AT = "to_timestamp(1000000 + {})"
_FIRST = (
    "INSERT INTO cache_spec VALUES ('s', 'toy', '', '', '', 1, 1, 1, 16, 100, 1, '')",
    f"INSERT INTO worker VALUES ('a', '1', 'prefill', 's', 'h', 'cpu', 1, 10, {_AT.format(0)}, NULL, 'alive', '')",
    *(f"""INSERT INTO kv_block VALUES (:k{i}, :k{i - 1}, {i - 1}, 's', 'acme', 16, 8, true, 'a', '1', {_AT.format(i)},
          'r1', {5 if i == 1 else 0}, {_AT.format(9) if i == 1 else "NULL"})""" for i in (1, 2, 3)),
    f"INSERT INTO kv_replica VALUES (:k1, 'a', '1', 'dram', 'computed', '', 'r1', 1, {_AT.format(1)}, 0, NULL, '')",
    f"""INSERT INTO kv_replica VALUES
        (:k2, 'a', '1', 'dram', 'computed', '', 'r1', 2, {_AT.format(2)}, 3, {_AT.format(60)}, 'capacity')""",
    f"INSERT INTO kv_replica VALUES (:k2, 'a', '1', 'ssd', 'computed', '', 'r1', 4, {_AT.format(4)}, 0, NULL, '')",
    f"INSERT INTO kv_replica VALUES (:k3, 'a', '1', 'dram', '', '', '', 0, NULL, 7, {_AT.format(70)}, 'capacity')",
    "INSERT INTO feed_seen VALUES ('a', '1', '{[1,5),[7,8)}')",
    *(f"""INSERT INTO request VALUES ('{name}', 'g', 'toy', 's', 'acme', {_AT.format(5)}, 'ok', '', 'stop', 32, 4, 16,
          16, 0.5, 0.4, 0.01, 1.0, 1, 'c', 'p', 'd', '', '{{}}', :k2, now(), {counted})"""
      for name, counted in (("r1", "true"), ("r2", "false"))),
)


async def _held(catalog: Catalog) -> list[bytes]:
    return sorted(key for key, _ in await catalog.known(WorkerId("a"), Incarnation("1"), range(BUCKETS)))


def _stored(seq: int, key: bytes) -> Stored:
    return Stored(worker=WorkerId("a"), incarnation=Incarnation("1"), seq=seq, spec=SpecDigest("s"), at_s=1_000_000.0,
                  blocks=[StoredBlock(key=BlockKey(key), parent=BlockKey(bytes(32)), depth=0, nbytes=8)])


async def test_sums_begin_with_what_is_there(postgres_url: str) -> None:
    async with connect(postgres_url) as database:
        await migrate.upgrade_database(database, "0004")
        async with database.transaction() as connection:
            for statement in (
                "INSERT INTO life (worker, incarnation) VALUES ('a', '1')",
                "INSERT INTO kv_copy SELECT sha256(n::text::bytea), 1, CASE n % 3 WHEN 0 THEN 'ssd' ELSE 'dram' END, "
                "100, 1, now(), 'computed', '', '' FROM generate_series(1, 30) AS n",
            ):
                await connection.execute(text(statement))
        await migrate.upgrade_database(database)
        async with database.transaction() as connection:
            held = text("SELECT tier, blocks, nbytes FROM kv_held ORDER BY tier")
            assert (await connection.execute(held)).all() == [("dram", 20, 2000), ("ssd", 10, 1000)]
            await connection.execute(text("UPDATE kv_copy SET nbytes = 70 WHERE tier = 'ssd'"))
            await connection.execute(text("DELETE FROM kv_copy WHERE tier = 'dram'"))
            assert (await connection.execute(held)).all() == [("dram", 0, 0), ("ssd", 10, 700)]
