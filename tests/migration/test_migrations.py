"""The schema goes up, down and up again, and is what the models say."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from shared.catalog import migrate
from shared.catalog.models import Base
from shared.catalog.session import connect


async def _tables(database) -> set[str]:
    async with database.transaction() as connection:
        return set((await connection.execute(text(
            "SELECT relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE nspname = 'public' AND relkind IN ('r', 'v')"))).scalars())


async def test_up_down_up(postgres_url: str) -> None:
    async with connect(postgres_url) as database:
        assert await migrate.current_revision(database) is None
        assert await migrate.upgrade_database(database) == migrate.head()
        up = await _tables(database)
        assert up == {table.name for table in Base.metadata.sorted_tables} | {"kv_live", "alembic_version"}
        await migrate.downgrade_database(database, "base")
        assert await _tables(database) == {"alembic_version"}
        assert await migrate.upgrade_database(database) == migrate.head()
        assert await _tables(database) == up


async def test_models_are_what_the_migrations_make(postgres_url: str) -> None:
    async with connect(postgres_url) as database:
        await migrate.upgrade_database(database)
        async with database.transaction() as connection:
            difference = await connection.run_sync(lambda sync: compare_metadata(
                MigrationContext.configure(sync, opts={"compare_type": True}), Base.metadata))
    assert difference == []


async def test_two_processes_at_once_take_turns(postgres_url: str) -> None:
    code = "import sys; from shared.catalog import migrate; sys.stdout.write(migrate.upgrade(sys.argv[1]))"
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-c", code, postgres_url, stdout=PIPE)
                 for _ in range(2)]
    outputs = [await process.communicate() for process in processes]
    assert [(process.returncode, output.decode()) for process, (output, _) in zip(processes, outputs, strict=True)] == [
        (0, migrate.head())] * 2


async def test_without_a_loop(postgres_url: str) -> None:
    assert await asyncio.to_thread(migrate.current, postgres_url) is None
    assert await asyncio.to_thread(migrate.upgrade, postgres_url) == migrate.head()
    assert await asyncio.to_thread(migrate.current, postgres_url) == migrate.head()


async def test_schema_is_required(postgres_url: str) -> None:
    async with connect(postgres_url) as database:
        with pytest.raises(migrate.SchemaMismatch, match=r"has no tables yet.*run moonbus migrate"):
            await migrate.require_schema(database)
        await migrate.upgrade_database(database)
        await migrate.require_schema(database)


async def test_a_newer_schema_serves_but_is_not_migrated(postgres_url: str) -> None:
    async with connect(postgres_url) as database:
        await migrate.upgrade_database(database)
        async with database.transaction() as connection:
            await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        await migrate.require_schema(database)
        with pytest.raises(migrate.SchemaMismatch, match="newer moonbus"):
            await migrate.upgrade_database(database)
