"""Connecting to Postgres, and its errors in our words.

::

    MoonbusError
    ├── UserError
    │   └── Unavailable     Postgres cannot be reached or cannot do its work now: try again later
    │       └── Collided    another transaction was in the way: try again at once
    └── Unwritable          Postgres will never take this data: trying again is no use
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from shared.errors import MoonbusError, SettingError, Unavailable

URL_FORM = "a URL like postgresql://user:password@host:5432/database"
_UNWRITABLE_CLASSES = ("22", "23", "54")
"""SQLSTATE classes: bad data, broken constraint, value too large."""

_COLLISIONS = ("40001", "40P01", "55P03")
"""SQLSTATEs of a transaction that was undone for another's sake: serialization failure, deadlock, a lock that was not
to be had in time."""

SESSION = {
    "application_name": "moonbus",
    "client_min_messages": "warning",  # that a temporary table is there already is no news
    "random_page_cost": "1.1",  # disks do not seek any more, and the hot part of the indexes is in memory
    "jit": "off",  # our statements are short: compiling them takes longer than running them
    "synchronous_commit": "on",  # the feed is acknowledged after the commit: it must survive a crash
}


class Unwritable(MoonbusError):
    """Postgres will never take this data."""


class Collided(Unavailable):
    """Postgres undid the transaction to let another one through."""


class Database:
    """One Postgres database and a bounded pool of connections to it. Opened by :func:`connect`."""

    def __init__(self, engine: AsyncEngine, url: URL) -> None:
        self._engine = engine
        self.name = f"{url.host or url.query.get('host', 'localhost')}:{url.port or 5432}"
        self._who = f"user {url.username or 'of this process'}, database {url.database or url.username or 'default'}"

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """A connection in a transaction that commits at the end; raises ``Unavailable`` (``Collided`` where that is
        why) or ``Unwritable``."""
        with self._translated():
            async with self._engine.begin() as connection:
                yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, asyncpg.PostgresError) as error:
            cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
            state = str(getattr(cause, "sqlstate", None) or "")
            if state[:2] in _UNWRITABLE_CLASSES:
                raise Unwritable(_one_line(cause)) from error
            if state in _COLLISIONS:
                raise Collided(f"Postgres at {self.name} undid a transaction: {_one_line(cause)}") from error
            raise self._unavailable(cause) from error
        except (OSError, TimeoutError, asyncpg.InterfaceError, SQLAlchemyError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, cause: BaseException) -> Unavailable:
        return Unavailable(f"cannot reach or use Postgres at {self.name} ({self._who}): {_one_line(cause)}; "
                           "start it or set MOONBUS_POSTGRES_URL")


@asynccontextmanager
async def connect(url: str, *, connections: int = 4, connect_s: float = 5.0,
                  statement_s: float | None = 60.0) -> AsyncIterator[Database]:
    """A :class:`Database`; nothing is opened before its first use, everything is closed at the end.

    At most ``connections`` are open at a time; connecting takes at most ``connect_s`` seconds and a statement
    ``statement_s`` (as long as it likes, if that is ``None``). Raises ``SettingError`` when ``url`` is none.
    """
    parsed = parse_url(url)
    arguments: dict[str, Any] = {"timeout": connect_s, "command_timeout": statement_s,
                                 "server_settings": SESSION}
    query = dict(parsed.query)
    if "sslmode" in query:  # the name that every other Postgres client gives it
        arguments["ssl"] = query.pop("sslmode")
    engine = create_async_engine(parsed.set(query=query), connect_args=arguments, pool_pre_ping=True,
                                 pool_size=connections, max_overflow=0, pool_timeout=connect_s)
    try:
        yield Database(engine, parsed)
    finally:
        await engine.dispose()


def parse_url(url: str) -> URL:
    """``url`` for the asyncpg driver; raises ``SettingError``, which never shows a password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise SettingError("postgres_url", "***", URL_FORM) from None
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise SettingError("postgres_url", parsed.render_as_string(hide_password=True), URL_FORM)
    return parsed.set(drivername="postgresql+asyncpg")


def _one_line(error: BaseException) -> str:
    """The error's first line, without SQLAlchemy's wrapping ``<class '...'>: ``."""
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    return text.partition(">: ")[2] if text.startswith("<class ") else text
