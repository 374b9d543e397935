"""Moving the schema: what ``moonbus migrate`` and the launcher run, and what the store-manager checks at start."""

from __future__ import annotations

import asyncio
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

import migrations
from shared.catalog.session import Database, connect
from shared.errors import UserError


class SchemaMismatch(UserError):
    """The schema in Postgres is not the one this version works with."""


def head() -> str:
    """The newest revision this version knows."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None, "the distribution ships at least one migration"
    return revision


def needed() -> str:
    """The newest revision that has to be there before this version runs: ``pre`` steps come before the code that needs
    them, ``post`` steps after it."""
    revision = next((script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()
                     if Path(script.path).name.startswith(f"{script.revision}_pre_")), None)
    assert revision is not None, "the first step is a pre step"
    return revision


def upgrade(url: str, revision: str = "head") -> str:
    """Moves the schema up to ``revision`` and returns the one it is at; for callers without a running loop.

    Raises ``Unavailable`` or ``SettingError``. Several processes at once are safe: they take turns. A schema that is
    past ``revision`` already stays where it is.
    """
    return asyncio.run(_with_database(url, revision))


def current(url: str) -> str | None:
    """The revision the schema is at; ``None`` when there is no schema yet. For callers without a running loop."""
    return asyncio.run(_with_database(url, None)) or None


async def upgrade_database(database: Database, revision: str = "head") -> str:
    """:func:`upgrade` on an open database, for callers with a running loop; one at a time in a process."""
    async with database.transaction() as connection:
        await connection.run_sync(_upgrade, revision)
    return await current_revision(database) or ""


async def downgrade_database(database: Database, revision: str) -> None:
    """Moves the schema down to ``revision``; ``base`` removes every table and all that is in them."""
    async with database.transaction() as connection:
        await connection.run_sync(_downgrade, revision)


async def current_revision(database: Database) -> str | None:
    """:func:`current` on an open database."""
    async with database.transaction() as connection:
        return await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())


async def require_schema(database: Database) -> None:
    """Raises :class:`SchemaMismatch` unless the schema is the one this version needs, or a later one.

    A later one is fine: its ``pre`` steps are made to work with the code before them.
    """
    revision, least = await current_revision(database), needed()
    known = [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]  # newest first
    if revision is None or revision in known[known.index(least) + 1:]:
        at = f"is at revision {revision}" if revision else "has no tables yet"
        raise SchemaMismatch(f"the catalog at {database.name} {at}; this version needs {least}: run moonbus migrate")


async def _with_database(url: str, revision: str | None) -> str:
    async with connect(url, statement_s=None) as database:  # a step may rewrite a large table
        if revision is not None:
            return await upgrade_database(database, revision)
        return await current_revision(database) or ""


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection, revision: str) -> None:
    try:
        command.upgrade(_config(connection), revision)
    except CommandError as error:
        raise SchemaMismatch(f"cannot migrate the catalog to {revision}: {error}; a newer moonbus may have "
                             "migrated it, use that one") from error


def _downgrade(connection: Connection, revision: str) -> None:
    command.downgrade(_config(connection), revision)
