"""The store's client and a worker on two hosts, as network namespaces: a far one, a cut cable, a dead worker."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import uvloop

from load.bench import store_owner
from load.bench.child import Child
from shared.bus.binary import nats_server_binary
from shared.ids import WorkerId
from shared.kv import CacheSpec
from shared.store import SyncClient
from shared.store.client_errors import NoStore, StoreError, StoreTimeout
from shared.transfer import TransferSettings
from tests.support.eventually import Eventually
from tests.support.netns import Host, TwoHosts, two_hosts, unavailable

NBYTES, COUNT = 64 << 10, 8
SPEC = CacheSpec.opaque("far", NBYTES)
NATS_PORT = 4222
DEADLINE_S = 0.7
"""Of calls that cannot be done."""
PATIENCE_S = 30.0
"""Until a test gives up waiting, however busy the machine is."""
_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


@pytest.fixture(autouse=True, scope="module")
def _namespaces() -> None:
    if missing := unavailable():
        pytest.skip(missing)


def enter(namespace: str) -> None:
    """Moves this thread, and those that it starts, into another network namespace."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(descriptor)


class Far:
    """A blocking client that lives on a host of its own: all it does happens in one thread there."""

    def __init__(self, host: Host) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=enter, initargs=(host.namespace,))

    async def do(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Runs ``call`` there."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *arguments, **named))
        return await asyncio.wait_for(done, PATIENCE_S)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


@contextmanager
def nats_server(host: Host) -> Iterator[str]:
    """A server on ``host``; its URL."""
    server = subprocess.Popen(["ip", "netns", "exec", host.namespace, str(nats_server_binary()), "-a", host.address,
                               "-p", str(NATS_PORT)], stderr=subprocess.DEVNULL)
    try:
        yield f"nats://{host.address}:{NATS_PORT}"
    finally:
        server.kill()
        server.wait()


def order(host: Host, url: str) -> store_owner.Order:
    """What a worker on ``host`` lends."""
    return store_owner.Order(nats_url=url, spec=SPEC, num_blocks=64, worker=WorkerId("store-1"), heartbeat_s=0.1,
                             settings=TransferSettings(host=host.address, host_id="host of the worker"))


@asynccontextmanager
async def owner(host: Host, url: str) -> AsyncIterator[Child]:
    """A worker in a process that can be killed."""
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", store_owner.__name__,
               msgspec.json.encode(order(host, url)).decode()]
    async with Child.start("owner", command) as child:
        yield child


@asynccontextmanager
async def next_owner(host: Host, url: str) -> AsyncIterator[None]:
    """The same worker's next life, in a thread, which takes less time than a process."""
    ended = threading.Event()

    async def live() -> None:
        async with store_owner.open_owner(order(host, url)):
            await asyncio.to_thread(ended.wait)

    far = Far(host)
    life = asyncio.create_task(far.do(lambda: uvloop.run(live())))
    try:
        yield
    finally:
        ended.set()
        await life
        far.close()


def can_connect(host: Host) -> bool:
    try:
        socket.create_connection((host.address, NATS_PORT), timeout=0.2).close()
    except OSError:
        return False
    return True


@asynccontextmanager
async def far_client(hosts: TwoHosts, url: str) -> AsyncIterator[tuple[Far, SyncClient]]:
    """On the left, with every path allowed: only their hosts' ids keep the two from sharing memory."""
    far = Far(hosts.left)
    context = SyncClient.open(url, SPEC, settings=TransferSettings(host_id="host of the client"))
    try:
        client = await far.do(context.__enter__)
        try:
            yield far, client
        finally:
            await far.do(context.__exit__, None, None, None)
    finally:
        far.close()


async def test_a_client_far_away_puts_and_gets_and_outlives_a_cut_and_its_worker(
        eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    with two_hosts(delay_s=0.01, loss=0.0) as hosts, nats_server(hosts.right) as url:
        probe = Far(hosts.right)
        await eventually(partial(probe.do, can_connect, hosts.right))
        probe.close()
        async with owner(hosts.right, url) as worker, far_client(hosts, url) as (far, client):
            source, landing = client.buffer(COUNT * NBYTES), client.buffer(COUNT * NBYTES)
            source.array[:] = np.frombuffer(np.random.default_rng(3).bytes(COUNT * NBYTES), dtype=np.uint8)
            keys = [f"key {i}" for i in range(COUNT)]
            parts, places = ([buffer[i * NBYTES:(i + 1) * NBYTES] for i in range(COUNT)]
                             for buffer in (source, landing))

            assert await far.do(client.put_from, "key 0", parts[0])
            assert await far.do(client.batch_put, keys, parts) == [False, *[True] * (COUNT - 1)]
            assert await far.do(client.batch_get_into, ["missing", *keys[1:]], places) == [False, *[True] * (COUNT - 1)]
            assert await far.do(client.get_into, "key 0", places[0])
            assert np.array_equal(landing.array, source.array)
            assert not any(visit.local for idle in client._doors._idle.values() for visit in idle), "by TCP"
            with await far.do(client.pin, ["key 0"]) as pin:
                assert pin.kept == [True]
                assert not await far.do(client.remove, "key 0"), "in use"

            hosts.cut()
            landing.array[:] = 0
            with pytest.raises(StoreTimeout):
                await far.do(client.get_into, "key 1", places[1], timeout_s=DEADLINE_S)
            with pytest.raises(StoreTimeout):
                await far.do(client.batch_put, ["new 0", "new 1"], parts[:2], timeout_s=DEADLINE_S)
            assert not landing.array.any(), "nothing came"
            hosts.mend()
            assert await far.do(client.get_into, "key 1", places[1])
            assert np.array_equal(places[1].array, parts[1].array)
            assert await far.do(client.batch_put, ["new 0", "new 1"], parts[:2]) == [True, True], "nothing was stored"

            os.kill(worker.greeting["pid"], signal.SIGKILL)

            async def is_missed() -> bool:
                return not await far.do(client.get_into, "key 1", places[1])

            await eventually(is_missed)
            with pytest.raises(NoStore):
                await far.do(client.put_from, "new 2", parts[2])
            async with next_owner(hosts.right, url):
                async def is_stored() -> bool:
                    try:
                        return await far.do(client.put_from, "new 2", parts[2], timeout_s=5)
                    except StoreError:
                        return False

                await eventually(is_stored)
                assert await far.do(client.get_into, "new 2", places[2])
                assert np.array_equal(places[2].array, parts[2].array)
