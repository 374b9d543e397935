"""Both clients of the store, and a worker that lends memory, as tests use them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from load.bench import store_owner
from load.bench.child import Child
from shared.ids import WorkerId
from shared.kv import CacheSpec
from shared.store import Client, SyncClient
from shared.transfer import TransferSettings

NBYTES = 4096
KINDS = ("async", "sync")


class Blocking:
    """A blocking client whose calls can be awaited: each runs in a thread."""

    _PLAIN = ("buffer", "register", "unregister", "chain", "value_bytes", "spec", "_directory")

    def __init__(self, client: SyncClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name in self._PLAIN:
            return found

        async def call(*arguments: Any, **named: Any) -> Any:
            return await asyncio.to_thread(found, *arguments, **named)
        return call


@asynccontextmanager
async def open_client(kind: str, url: str, spec: CacheSpec, **named: Any) -> AsyncIterator[Any]:
    """A client of this kind, to be awaited whatever it is."""
    if kind == "async":
        async with Client.open(url, spec, **named) as client:
            yield client
        return
    context = SyncClient.open(url, spec, **named)
    client = await asyncio.to_thread(context.__enter__)
    try:
        yield Blocking(client)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def order(url: str, spec: CacheSpec, *, path: str = "shm", worker: str = "store-1",
          num_blocks: int = 16) -> store_owner.Order:
    """What a worker lends; small enough to be filled."""
    return store_owner.Order(nats_url=url, spec=spec, num_blocks=num_blocks, worker=WorkerId(worker),
                             settings=TransferSettings(paths=(path,)), heartbeat_s=0.1)


@asynccontextmanager
async def owner_process(wanted: store_owner.Order) -> AsyncIterator[Child]:
    """A worker in a process of its own."""
    command = [sys.executable, "-m", store_owner.__name__, msgspec.json.encode(wanted).decode()]
    async with Child.start("owner", command) as child:
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGCONT)
