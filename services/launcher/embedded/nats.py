"""The embedded NATS server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.launcher.embedded.server import HOST, Exited, Process, Server, lock_of, refuse_taken, start_on_some_port
from shared.bus.binary import nats_server_binary
from shared.errors import Unavailable

NATS_MAX_PAYLOAD = 8 * 2**20
"""Bytes of the largest message that moonbus sends."""


class NatsServer(Server):
    """A NATS server that :func:`nats_server` runs."""

    def __init__(self, data_dir: Path, port: int, *, max_payload: int, jetstream: bool) -> None:
        self._data_dir, self._port = data_dir.absolute(), port
        self._max_payload, self._jetstream = max_payload, jetstream
        self._binary = nats_server_binary()

    @property
    def url(self) -> str:
        """What clients connect to; stays the same over :meth:`stop` and :meth:`start`."""
        return f"nats://{HOST}:{self._port}"

    async def start(self) -> None:
        """Starts it and waits until it answers; on the port it had before, if it ran before."""
        if self.running:
            return
        self._data_dir.mkdir(parents=True, exist_ok=True)
        if self._port:
            refuse_taken("NATS", self._port)
        lock = await lock_of("NATS", self._data_dir)
        try:
            self._process, self._port = await start_on_some_port(self._port, lambda port: self._spawn(port, lock))
        except Exited as ended:
            raise Unavailable(f"NATS did not start in {self._data_dir}: {ended}") from ended
        finally:
            os.close(lock)

    async def stop(self, *, kill: bool = False) -> None:
        """Ends it; with ``kill`` at once, as a crash would. The data stays."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop(signal.SIGKILL if kill else signal.SIGTERM)

    async def _spawn(self, port: int, lock: int) -> Process:
        config = self._data_dir / "nats.conf"
        config.write_text(self._config(port), encoding="utf-8")
        process = Process.spawn("NATS", [str(self._binary), "-c", str(config)], log=self._data_dir / "nats.log",
                                 lock=lock, death_signal=signal.SIGTERM)
        try:
            await process.wait_ready(lambda: _greets(port))
        except BaseException:
            await process.stop(signal.SIGKILL)
            raise
        return process

    def _config(self, port: int) -> str:
        lines = [
            "# Written by moonbus at each start.",
            f"listen: {json.dumps(f'{HOST}:{port}')}",
            "server_name: moonbus",
            f"max_payload: {self._max_payload}",
            f"max_pending: {max(64 * 2**20, 2 * self._max_payload)}",
            "write_deadline: \"10s\"",
        ]
        if self._jetstream:
            # Its parser knows no \u escapes, which JSON has for what is not ASCII.
            store_dir = json.dumps(str(self._data_dir), ensure_ascii=False)
            # A limit of our own: the default depends on the free disk, and a stream that does not fit is refused.
            lines.append(f"jetstream {{ store_dir: {store_dir}, max_mem: 64M, max_file: 8G }}")
        return "\n".join(lines) + "\n"


@asynccontextmanager
async def nats_server(data_dir: Path, *, port: int = 0, max_payload: int = NATS_MAX_PAYLOAD,
                      jetstream: bool = True) -> AsyncIterator[NatsServer]:
    """Runs a NATS server on loopback with its data in ``data_dir``. ``port`` 0 takes a free one."""
    server = NatsServer(data_dir, port, max_payload=max_payload, jetstream=jetstream)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def _greets(port: int) -> bool:
    """A NATS server greets whoever connects with its INFO line."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                return (await reader.readline()).startswith(b"INFO ")
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
