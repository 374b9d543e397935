"""A NATS server for one benchmark."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from load.bench.limits import free_port
from load.bench.peers import confine
from shared.bus.binary import nats_server_binary
from shared.errors import UserError

HOST = "127.0.0.1"
_START_S = 10.0
_POLL_S = 0.02


@asynccontextmanager
async def nats_server() -> AsyncIterator[str]:
    """Its URL; it listens on loopback and keeps nothing. Raises :class:`UserError`."""
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        sys.executable, confine.__file__, str(nats_server_binary()), "-a", HOST, "-p", str(port),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True)
    try:
        await _wait_for(port)
        yield f"nats://{HOST}:{port}"
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


async def _wait_for(port: int) -> None:
    until_s = time.monotonic() + _START_S
    while True:
        try:
            _, writer = await asyncio.open_connection(HOST, port)
        except OSError as error:
            if time.monotonic() > until_s:
                raise UserError(f"nats-server does not listen on port {port} after {_START_S:g} s: {error}") from error
            await asyncio.sleep(_POLL_S)
        else:
            writer.close()
            return
