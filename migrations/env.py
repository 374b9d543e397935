"""Alembic's entry. ``shared.catalog.migrate`` hands over an open connection; Alembic's own command line gets one
from ``MOONBUS_POSTGRES_URL``."""

from __future__ import annotations

import asyncio

from alembic import context
from sqlalchemy import Connection, text

from shared.catalog.models import Base
from shared.catalog.session import connect
from shared.catalog.settings import CatalogSettings
from shared.settings import load

LOCK = 0x6D6F6F6E
"""Two migrations at once would trip over each other: the second waits for the first."""


def run(connection: Connection) -> None:
    """Applies what was asked for in one transaction."""
    context.configure(connection=connection, target_metadata=Base.metadata, compare_type=True)
    with context.begin_transaction():
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        context.run_migrations()


async def run_standalone() -> None:
    """Connects by the settings."""
    async with connect(load(CatalogSettings, "store-manager", whole=False).postgres_url) as database:
        async with database.transaction() as connection:
            await connection.run_sync(run)


handed_over = context.config.attributes.get("connection")
if handed_over is not None:
    run(handed_over)
else:
    asyncio.run(run_standalone())
