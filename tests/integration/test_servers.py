"""The session's servers work, so that other tests may blame themselves."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from shared.bus.nats import NatsBus


async def test_nats_takes_messages_of_eight_mebibytes(nats_bus: NatsBus) -> None:
    assert nats_bus.max_payload == 8 * 2**20


async def test_postgres_gives_an_empty_database(postgres_url: str) -> None:
    engine = create_async_engine(postgres_url)
    async with engine.connect() as connection:
        tables = await connection.execute(text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"))
        assert tables.scalar_one() == 0
    await engine.dispose()
