"""The embedded Postgres server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.launcher.embedded.place import Place, find_place, initialise, installed
from services.launcher.embedded.server import (
    HOST,
    READY_S,
    STOP_S,
    Exited,
    Process,
    Server,
    lock_of,
    refuse_taken,
    start_on_some_port,
)
from services.launcher.resources import measure
from shared.errors import Unavailable

# Block keys are hashes: every new one dirties another page of an index, and the first change of a page after a
# checkpoint writes all of it to the log. So checkpoints far apart, and no compression of those pages: this build knows
# only its own, which saves little of a page of hashes and took a third of a processor.
_FOR_THE_CATALOG = (
    "-c", "max_wal_size=8GB", "-c", "checkpoint_timeout=15min", "-c", "wal_compression=off",
    "-c", "maintenance_work_mem=128MB",
)
_BUFFERS_SHARE = 1 / 8
"""Of the free memory, for the pages in use: taken as the catalog grows."""
_BUFFERS_LEAST, _BUFFERS_MOST = 128 * 2**20, 4 * 2**30


class Postgres(Server):
    """A Postgres server that :func:`postgres_server` runs."""

    def __init__(self, data_dir: Path, port: int, *, database: str) -> None:
        self._data_dir, self._port, self._database = data_dir.absolute(), port, database
        self._install = installed()
        self._password = ""

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the default database; stays the same over :meth:`stop` and :meth:`start`."""
        return self.url_of(self._database)

    def url_of(self, database: str) -> str:
        """SQLAlchemy URL of ``database``."""
        return f"postgresql+asyncpg://moonbus:{self._password}@{HOST}:{self._port}/{database}"

    async def start(self) -> None:
        """Starts it and waits until it answers; on the port it had before, if it ran before."""
        if self.running:
            return
        if self._port:
            refuse_taken("Postgres", self._port)
        place = await asyncio.to_thread(find_place, self._data_dir, self._install)
        lock = await lock_of("Postgres", place.directory)
        try:
            self._password = await asyncio.to_thread(initialise, place)
            self._process, self._port = await start_on_some_port(
                self._port, lambda port: self._spawn(place, port, lock))
        except Exited as ended:
            raise Unavailable(f"Postgres did not start in {place.directory}: {ended}") from ended
        finally:
            os.close(lock)
        await self._ensure_database()

    async def stop(self, *, kill: bool = False) -> None:
        """Ends it; with ``kill`` without a checkpoint, as a crash would. The data stays."""
        process, self._process = self._process, None
        if process is not None:  # never SIGKILL: the postmaster's children would live on for a moment
            await process.stop(signal.SIGQUIT if kill else signal.SIGINT)

    async def create_database(self, name: str) -> str:
        """Creates database ``name`` (letters, digits and _) and returns its SQLAlchemy URL."""
        await self._execute(f'CREATE DATABASE "{name}"')
        return self.url_of(name)

    async def drop_database(self, name: str) -> None:
        """Drops database ``name`` and whoever is still connected to it."""
        await self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    async def _spawn(self, place: Place, port: int, lock: int) -> Process:
        process = Process.spawn(
            "Postgres",
            [str(place.bin / "postgres"), "-D", str(place.data), "-p", str(port), "-h", HOST,
             "-c", "unix_socket_directories=", "-c", "max_connections=100",
             "-c", "dynamic_shared_memory_type=mmap", "-c", "synchronous_commit=off", *_FOR_THE_CATALOG,
             "-c", f"shared_buffers={buffers_bytes(measure().memory_bytes) >> 10}kB"],
            log=place.directory / "postgres.log", lock=lock, death_signal=signal.SIGINT, account=place.account,
        )
        pid_file = place.data / "postmaster.pid"

        async def is_ready() -> bool:
            try:
                lines = pid_file.read_text().splitlines()
            except FileNotFoundError:
                return False
            return len(lines) >= 8 and lines[0].strip() == str(process.pid) and lines[7].strip() == "ready"

        try:
            await process.wait_ready(is_ready)
        except BaseException:
            await process.stop(signal.SIGQUIT)
            raise
        return process

    async def _ensure_database(self) -> None:
        if not await self._execute("SELECT 1 FROM pg_database WHERE datname = $1", self._database):
            await self.create_database(self._database)

    async def _execute(self, statement: str, *values: str) -> list[object]:
        import asyncpg

        connection = await asyncpg.connect(host=HOST, port=self._port, user="moonbus", password=self._password,
                                           database="postgres", timeout=READY_S)
        try:
            return list(await connection.fetch(statement, *values, timeout=READY_S))
        finally:
            await connection.close(timeout=STOP_S)


@asynccontextmanager
async def postgres_server(data_dir: Path, *, port: int = 0, database: str = "moonbus") -> AsyncIterator[Postgres]:
    """Runs a Postgres server on loopback with its data in ``data_dir``. ``port`` 0 takes a free one.

    The only account is ``moonbus`` with a random password that lies in ``data_dir``, readable by us alone.
    """
    server = Postgres(data_dir, port, database=database)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def buffers_bytes(memory_bytes: int) -> int:
    """Postgres's own cache on a machine with so much free memory: enough for the indexes of 10 M blocks where there is
    plenty, since each new key touches a random page of each."""
    return min(_BUFFERS_MOST, max(_BUFFERS_LEAST, int(memory_bytes * _BUFFERS_SHARE)))
