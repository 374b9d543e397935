"""What the store's clients promise, both of them, over shared memory and over TCP."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import REGISTRY

from load.bench.store_owner import Owner, open_owner
from shared.bus.nats import NatsBus
from shared.bus.subjects import DOOR, tenant_token
from shared.errors import Unavailable
from shared.ids import BlockKey, Incarnation, OperationId, WorkerId
from shared.kv import CacheSpec, pack_keys, root_key
from shared.messages import DoorOpened, OpenDoor
from shared.store import Client, SyncClient
from shared.store import door_frames as frames
from shared.store.client_errors import (
    BadCall,
    BadKey,
    BadMemory,
    BadTenant,
    BadUrl,
    BatchTooLarge,
    BusAway,
    ForeignSpec,
    MissingParent,
    NoStore,
    StoreDraining,
    StoreError,
    StoreFull,
    StoreTimeout,
    WrongSize,
)
from shared.store.door_line import Line
from shared.store.settings import SsdSettings
from shared.transfer import host_id
from shared.transfer.addresses import host_clock_s, split_address
from shared.transfer.channel import Closed
from shared.transfer.shm import connect_unix
from tests.support.eventually import Eventually
from tests.support.store_clients import KINDS, NBYTES, open_client, order, owner_process

ROOT = Path(__file__).parents[2]
SPEC = CacheSpec.opaque("values", NBYTES)
KV = CacheSpec(model="tiny", weights_digest="", tokenizer_digest="", dtype="float32", layers=2, kv_heads=2, head_dim=16,
               block_tokens=4, max_context=512)
PATHS = ("shm", "tcp")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_path = pytest.mark.parametrize("path", PATHS)
every_client = pytest.mark.parametrize("store", KINDS, indirect=True)
"""Both clients over both paths. Other tests take one client for each path: what differs between the clients is not how
they talk to a worker."""
at_the_door = pytest.mark.parametrize("path", ["shm"])
"""Of what the door does alike whatever the path."""


def value(seed: int, nbytes: int = NBYTES) -> bytes:
    """Noise."""
    return np.random.default_rng(seed).bytes(nbytes)


def counted(kind: str, outcome: str) -> float:
    """How often the door in this process counted that."""
    labels = {"kind": kind, "outcome": outcome}
    return REGISTRY.get_sample_value("moonbus_store_door_requests_total", labels) or 0.0


def refused(code: str) -> float:
    """How many calls of clients in this process ended with that error."""
    return REGISTRY.get_sample_value("moonbus_store_client_errors_total", {"code": code}) or 0.0


@pytest.fixture(autouse=True)
def _settle_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that find nobody open soon."""
    monkeypatch.setattr("shared.store.client_directory.SETTLE_S", 0.2)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def owner(nats_url: str, path: str) -> AsyncIterator[Owner]:
    async with open_owner(order(nats_url, SPEC, path=path)) as opened:
        yield opened
        opened.agent.pool.check_invariants()


@pytest.fixture
async def store(request: pytest.FixtureRequest, owner: Owner, nats_url: str, path: str) -> AsyncIterator[Any]:
    kind = getattr(request, "param", "sync" if path == "shm" else "async")
    async with open_client(kind, nats_url, SPEC, name="reader") as client:
        yield client


# -- what it is for -------------------------------------------------------------------------------------------------


@every_client
async def test_what_was_put_is_got_and_gone_once_removed(store: Any) -> None:
    assert await store.get("a") is None
    assert not await store.exists("a")
    assert await store.put("a", value(1))
    assert await store.get("a") == value(1)
    assert await store.exists("a")
    assert not await store.put("a", value(2)), "values never change"
    assert await store.get("a") == value(1)
    assert await store.put(b"a\x00", value(3)), "bytes are keys too"
    assert await store.remove("a")
    assert not await store.remove("a")
    assert await store.get("a") is None
    assert await store.get(b"a\x00") == value(3)


async def test_registered_memory_of_every_kind_is_put_from_and_got_into(store: Any) -> None:
    own = store.buffer(2 * NBYTES)
    numbers = np.zeros(NBYTES // 8, dtype=np.float64)
    plain = bytearray(2 * NBYTES)
    own.array[NBYTES:] = np.frombuffer(value(1), dtype=np.uint8)
    assert await store.put_from("a", own[NBYTES:])
    for memory, there in ((numbers, slice(0, NBYTES)), (plain, slice(NBYTES, 2 * NBYTES)),
                          (memoryview(bytearray(NBYTES)), slice(0, NBYTES))):
        buffer = store.register(memory)
        assert await store.get_into("a", buffer[there])
        assert bytes(memoryview(memory).cast("B")[there]) == value(1)
        assert await store.put_from(f"from {type(memory).__name__}", buffer[there])
        assert await store.get(f"from {type(memory).__name__}") == value(1)
        store.unregister(buffer)
    with pytest.raises(BadMemory, match="not registered"):
        store.unregister(buffer)
    part = own[:NBYTES]
    store.unregister(own)
    for gone in (own, part):
        with pytest.raises(BadMemory, match="was unregistered"):
            await store.put_from("gone", gone)


@every_client
async def test_batches_say_which_are_there(store: Any, owner: Owner) -> None:
    source, landing = store.buffer(8 * NBYTES), store.buffer(8 * NBYTES)
    source.array[:] = np.frombuffer(value(1, 8 * NBYTES), dtype=np.uint8)
    parts = [source[i * NBYTES:(i + 1) * NBYTES] for i in range(8)]
    assert await store.put("key 3", bytes(parts[3].array))
    keys = [f"key {i}" for i in range(8)]
    assert await store.batch_put(keys, parts) == [i != 3 for i in range(8)]
    places = [landing[i * NBYTES:(i + 1) * NBYTES] for i in range(8)]
    asked = [f"key {i}" if i % 2 else f"missing {i}" for i in range(8)]
    assert await store.batch_get_into(asked, places) == [bool(i % 2) for i in range(8)]
    assert all(np.array_equal(places[i].array, parts[i].array) for i in range(1, 8, 2))
    assert not any(places[i].array.any() for i in range(0, 8, 2)), "nobody touches the place of what is not there"
    assert await store.batch_exists(asked) == [bool(i % 2) for i in range(8)]
    assert await store.batch_put([], []) == []


async def test_what_is_pinned_stays(store: Any, owner: Owner, eventually: Eventually) -> None:
    await store.put("pinned", value(1))
    pin = await store.pin(["pinned", "missing"])
    assert pin.kept == [True, False]
    for i in range(20):
        await store.put(f"more {i}", value(i))
    assert not await store.exists("more 0"), "the pool went round"
    assert not await store.remove("pinned"), "in use"
    assert await store.get("pinned") == value(1)
    pin.end()
    pin.end()
    assert not pin.is_held
    await eventually(lambda: owner.agent.pool.statistics().pinned == 0)
    for i in range(20):
        await store.put(f"again {i}", value(i))
    assert await store.get("pinned") is None


@at_the_door
async def test_a_pin_is_renewed_while_its_client_lives_and_ends_with_it(
        owner: Owner, nats_url: str, eventually: Eventually) -> None:
    def pinned() -> int:
        return owner.agent.pool.statistics().pinned

    async with open_client("async", nats_url, SPEC) as store:
        await store.put("a", value(1))
        async with await store.pin(["a"], ttl_s=0.3) as pin:
            until_s = time.monotonic() + 0.9
            await eventually(lambda: time.monotonic() > until_s)
            assert pin.is_held and pinned() == 1
        await eventually(lambda: pinned() == 0)
        await store.pin(["a"], ttl_s=60)
        assert pinned() == 1
    await eventually(lambda: pinned() == 0)


async def test_of_two_who_put_the_same_key_the_first_wins(owner: Owner, nats_url: str) -> None:
    async with open_client("async", nats_url, SPEC) as one, open_client("sync", nats_url, SPEC) as other:
        for i in range(10):
            won = await asyncio.gather(one.put(f"key {i}", value(1)), other.put(f"key {i}", value(2)))
            assert sorted(won) == [False, True]
            assert await one.get(f"key {i}") == await other.get(f"key {i}") == value(1 if won[0] else 2)


async def test_calls_run_side_by_side(store: Any) -> None:
    assert all(await asyncio.gather(*(store.put(f"key {i}", value(i)) for i in range(12))))
    assert await asyncio.gather(*(store.get(f"key {i}") for i in range(12))) == [value(i) for i in range(12)]


@at_the_door
async def test_tenants_do_not_see_each_other(owner: Owner, nats_url: str) -> None:
    async with (open_client("async", nats_url, SPEC, tenant="one") as one,
                open_client("async", nats_url, SPEC, tenant="two") as two):
        await one.put("a", value(1))
        assert await two.get("a") is None
        assert await two.put("a", value(2))
        assert await one.get("a") == value(1)
        assert {block.tenant for block in owner.agent.pool.blocks()} == {"one", "two"}


@every_path
async def test_blocks_of_kv_are_chains(nats_url: str, path: str) -> None:
    async with open_owner(order(nats_url, KV, path=path)) as owner, open_client("async", nats_url, KV) as store:
        chain = store.chain(list(range(14)))
        assert [block.depth for block in chain] == [0, 1, 2] and chain[0].parent == root_key(KV, "")
        memory = store.register(np.arange(3 * KV.block_bytes, dtype=np.uint8))
        parts = [memory[i * KV.block_bytes:(i + 1) * KV.block_bytes] for i in range(3)]
        with pytest.raises(MissingParent, match="start") as caught:
            await store.batch_put(chain[1:], parts[1:])
        assert caught.value.done == [False, False]
        assert await store.batch_put(chain, parts) == [True] * 3
        assert await store.get(chain[2].key) == bytes(parts[2].array), "to look for it, its key is enough"
        assert [block.depth for block in owner.agent.pool.blocks()] == [0, 1, 2]
        with pytest.raises(BadKey):
            await store.put("text", value(1, KV.block_bytes))
        with pytest.raises(BadKey):
            await store.get("text")


async def test_what_left_the_memory_is_read_back_from_the_disk(nats_url: str, path: str, tmp_path: Path,
                                                               eventually: Eventually) -> None:
    ssd = SsdSettings(dir=str(tmp_path), ahead=1.0, timeout_s=20.0)
    wanted = msgspec.structs.replace(order(nats_url, SPEC, path=path), ssd=ssd)
    async with open_owner(wanted) as owner, open_client("async", nats_url, SPEC) as store:
        disk = owner.agent.ssd
        assert disk is not None
        for done in (8, 16, 24):
            for i in range(done - 8, done):
                await store.put(f"key {i}", value(i))
            await eventually(lambda done=done: len(list(disk.blocks())) == done, "copied ahead of need")
        assert len(list(owner.agent.pool.blocks())) <= 16
        assert await store.batch_exists([f"key {i}" for i in range(24)]) == [True] * 24
        memory = store.buffer(24 * NBYTES)
        parts = [memory[i * NBYTES:(i + 1) * NBYTES] for i in range(24)]
        assert all(await store.batch_get_into([f"key {i}" for i in range(24)], parts))
        assert [bytes(part.array) for part in parts] == [value(i) for i in range(24)]
        async with await store.pin(["key 0"]) as pin:
            assert pin.kept == [True]
        await eventually(lambda: owner.agent.pool.statistics().pinned == 0)
        assert await store.remove("key 0") and not await store.exists("key 0")
        owner.agent.pool.check_invariants()


# -- bad input ------------------------------------------------------------------------------------------------------


async def test_wrong_sizes_and_batches_are_refused(store: Any, owner: Owner) -> None:
    for short in (b"", value(1)[1:], value(1) + b"x"):
        with pytest.raises(WrongSize, match=str(len(short))):
            await store.put("a", short)
    buffer = store.buffer(NBYTES + 1)
    with pytest.raises(WrongSize):
        await store.get_into("a", buffer)
    with pytest.raises(BatchTooLarge, match="4096"):
        await store.batch_exists(["a"] * 4097)
    before = refused("call"), refused("memory"), refused("size"), refused("key")
    with pytest.raises(BadCall, match="2 keys for 1 values"):
        await store.batch_put(["a", "b"], [buffer[:NBYTES]])
    with pytest.raises(BadCall, match="not a number"):
        await store.get("a", timeout_s=float("nan"))
    for unusable in (bytes(NBYTES), np.zeros((4, 4))[:, ::2], np.zeros(0, dtype=np.uint8), object()):
        with pytest.raises(BadMemory, match=type(unusable).__name__):
            store.register(unusable)
    with pytest.raises(BadMemory, match="ndarray is no registered memory"):
        await store.put_from("a", np.zeros(NBYTES, dtype=np.uint8))
    with pytest.raises(BadMemory, match="str is no value"):
        await store.put("a", "text")
    for no_list in ("abc", b"abc", None, 7):
        with pytest.raises(BadKey, match="no list of keys"):
            await store.batch_exists(no_list)
    with pytest.raises(BadKey, match="lone surrogates"):
        await store.get("\ud800")
    for wrong in (7, None, ("a",)):
        with pytest.raises(BadKey, match="any text or bytes"):
            await store.put(wrong, value(1))
    assert (refused("call"), refused("memory"), refused("size"), refused("key")) == (
        before[0] + 2, before[1] + 6, before[2], before[3] + 8)
    with pytest.raises(BadKey):
        await store.put(frames.Block(bytes(32), bytes(32)), value(1))
    assert not list(owner.agent.pool.blocks())


@every_kind
async def test_another_spec_is_refused_with_the_difference(nats_url: str, kind: str, eventually: Eventually) -> None:
    other = CacheSpec.opaque("values", 2 * NBYTES)
    async with open_owner(order(nats_url, SPEC)), open_client(kind, nats_url, other) as store:
        await eventually(lambda: store._directory.map.foreign, "the worker has said hello")
        with pytest.raises(ForeignSpec, match="values of 8192 bytes here, 4096 there"):
            await store.put("a", value(1, 2 * NBYTES))
        with pytest.raises(ForeignSpec):
            await store.get("a")


@every_kind
async def test_without_a_worker_that_is_said(nats_url: str, kind: str) -> None:
    async with open_client(kind, nats_url, SPEC) as store:
        with pytest.raises(NoStore, match="moonbus serve store"):
            await store.put("a", value(1))
        with pytest.raises(NoStore):
            await store.exists("a")


async def ask_for_door(nats_url: str, **changes: Any) -> tuple[DoorOpened, frames.Enter]:
    """What a client gets over the bus, and how it would enter."""
    ask = OpenDoor(client="c", incarnation=Incarnation("1"), host=host_id(), spec=SPEC.digest, tenant="")
    async with NatsBus.connect(nats_url, name="test") as bus:
        opened = await bus.request(DOOR.at(worker="store-1", tenant="x-"), ask, timeout_s=5)
    assert isinstance(opened, DoorOpened)
    enter = frames.Enter(frames.VERSION, "c", "1", SPEC.digest, "", opened.expires_at_s, opened.token, 1, host_id(),
                         host_clock_s())
    return opened, msgspec.structs.replace(enter, **changes)


def connect(opened: DoorOpened) -> Line:
    """To whichever path there is."""
    if opened.shm:
        sock = connect_unix(opened.shm, 5)
    else:
        sock = socket.create_connection(split_address(opened.tcp), timeout=5)
    sock.settimeout(5)
    return Line(sock, frames.decode_reply)


@at_the_door
@pytest.mark.parametrize(("changes", "why"), [
    ({"token": bytes(32)}, "not of this door"),
    ({"tenant": "another"}, "not of this door"),
    ({"client": "another"}, "not of this door"),
    ({"expires_at_s": 1e12}, "not of this door"),
    ({"version": 99}, "version"),
])
async def test_who_has_no_token_stays_outside(owner: Owner, nats_url: str, changes: dict[str, Any], why: str) -> None:
    opened, enter = await ask_for_door(nats_url, **changes)
    code = "version" if "version" in changes else "token"
    before = counted("enter", code)
    line = connect(opened)
    try:
        await asyncio.to_thread(line.send, enter)
        reply = await asyncio.to_thread(line.receive)
        assert isinstance(reply, frames.Denied) and reply.code == code and why in reply.why
        with pytest.raises((Closed, OSError)):
            await asyncio.to_thread(line.receive)
    finally:
        line.close()
    assert counted("enter", code) == before + 1


@at_the_door
@every_kind
async def test_a_closed_client_says_so(owner: Owner, nats_url: str, kind: str) -> None:
    async with open_client(kind, nats_url, SPEC) as store:
        assert await store.put("a", value(1))
    for call in (lambda: store.get("a"), lambda: store.put("a", value(1)), lambda: store.pin(["a"]),
                 lambda: store.remove("a"), lambda: store.batch_exists(["a"])):
        with pytest.raises(BadCall, match="was closed"):
            await call()
    with pytest.raises(BadCall, match="was closed"):
        store.buffer(NBYTES)
    with pytest.raises(BadCall, match="was closed"):
        store.register(bytearray(NBYTES))


@every_kind
@pytest.mark.parametrize("tenant", ["x" * 5000, "ä" * 65, "a\0b", "a\nb", "\x1b[2J", "\ud800"])
async def test_a_tenant_that_cannot_be_opens_nothing(kind: str, tenant: str) -> None:
    with pytest.raises(BadTenant, match="is no tenant's name"):
        async with open_client(kind, "nats://127.0.0.1:1", SPEC, tenant=tenant):
            pass


@every_kind
@pytest.mark.parametrize("url", ["", " ", ","])
async def test_no_address_opens_nothing(kind: str, url: str) -> None:
    with pytest.raises(BadUrl, match="no address of NATS"):
        async with open_client(kind, url, SPEC):
            pass


@at_the_door
async def test_a_door_refuses_a_tenant_that_cannot_be(owner: Owner, nats_url: str) -> None:
    """Clients need not be ours."""
    async with NatsBus.connect(nats_url, name="stranger") as bus:
        asked = OpenDoor(client="c", incarnation=Incarnation("i"), host=host_id(), spec=SPEC.digest, tenant="a\nb")
        reply = await bus.request(DOOR.at(worker="store-1", tenant=tenant_token("a\nb")), asked, timeout_s=5.0)
        assert (reply.code, "cannot be printed" in reply.message) == ("tenant", True)


@at_the_door
async def test_a_token_expires(owner: Owner, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.store.door_entry.TOKEN_S", -1.0)
    opened, enter = await ask_for_door(nats_url)
    line = connect(opened)
    try:
        await asyncio.to_thread(line.send, enter)
        reply = await asyncio.to_thread(line.receive)
        assert isinstance(reply, frames.Denied) and "expired" in reply.why
    finally:
        line.close()


@at_the_door
async def test_a_client_whose_token_expired_gets_another(owner: Owner, nats_url: str,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_client("async", nats_url, SPEC) as store:
        with monkeypatch.context() as patched:
            patched.setattr("shared.store.door_entry.TOKEN_S", -1.0)
            with pytest.raises(StoreError, match="expired"):
                await store.put("a", value(1))
        assert await store.put("a", value(1))


async def test_bytes_that_are_no_request_end_the_visit_and_nothing_else(store: Any, owner: Owner, nats_url: str,
                                                                        eventually: Eventually) -> None:
    opened, _ = await ask_for_door(nats_url)
    before = counted("frame", "protocol")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", frames.MAGIC + b"\xff" * 4, frames.MAGIC + b"\x00\x00\x00\x01\xc1"):
        line = connect(opened)
        line._sock.sendall(noise)
        with pytest.raises((Closed, OSError)):
            await asyncio.to_thread(line.receive)
        line.close()
    assert counted("frame", "protocol") == before + 3
    assert await store.put("a", value(1))


# -- pressure, deaths, restarts -------------------------------------------------------------------------------------


async def test_a_full_pool_is_back_pressure(store: Any, owner: Owner) -> None:
    busy = OperationId("busy")
    assert owner.agent.allocate(busy, 16) is not None
    with pytest.raises(StoreFull, match="in use"):
        await store.put("a", value(1), timeout_s=0.4)
    waiting = asyncio.create_task(store.put("b", value(2), timeout_s=10.0))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    owner.agent.release(busy)
    assert await waiting
    assert await store.get("b") == value(2)
    assert await store.get("a") is None


async def test_a_drained_worker_refuses_values_and_another_takes_them(
        store: Any, owner: Owner, nats_url: str, path: str, eventually: Eventually) -> None:
    """What it accepted now, it would drop at once: an answer that promises nothing is worse than a refusal."""
    refused = counted("put", "draining")
    assert await store.put("a", value(1))
    busy = OperationId("busy")
    assert owner.agent.allocate(busy, 14) is not None
    memory = store.buffer(4 * NBYTES)
    parts = [memory[i * NBYTES:(i + 1) * NBYTES] for i in range(4)]
    waiting = asyncio.create_task(store.batch_put([f"key {i}" for i in range(4)], parts, timeout_s=10.0))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    owner.agent.retire()
    owner.agent.release(busy)
    with pytest.raises(StoreDraining, match="store-1 refuses: it is being drained"):
        await waiting
    with pytest.raises(StoreDraining):
        await store.put("b", value(2))
    assert counted("put", "draining") >= refused + 2
    await eventually(lambda: owner.agent.pool.statistics().free == 16, "it keeps nothing, not even slots for the next")
    async with open_owner(order(nats_url, SPEC, path=path, worker="store-2")) as other:
        await eventually(lambda: _put(store))
        assert len(list(other.agent.pool.blocks())) == 1


@at_the_door
async def test_clients_keep_at_most_half_of_the_pool(owner: Owner, nats_url: str) -> None:
    async with open_client("async", nats_url, SPEC) as store:
        for i in range(16):
            await store.put(f"key {i}", value(i))
        held = await store.pin([f"key {i}" for i in range(8)])
        assert held.is_held
        with pytest.raises(StoreFull, match="8 of 16"):
            await store.pin(["key 9"])
        assert owner.agent.allocate(OperationId("engine"), 8) is not None, "the worker has room for its own work"
        owner.agent.release(OperationId("engine"))
        held.end()


async def test_a_cancelled_call_ends_at_once(owner: Owner, nats_url: str, eventually: Eventually) -> None:
    busy = OperationId("busy")
    async with open_client("async", nats_url, SPEC) as store:
        await store.put("there", value(1))
        await eventually(lambda: owner.agent.pool.statistics().private == 0)
        assert owner.agent.allocate(busy, 16) is not None
        waiting = asyncio.create_task(store.put("a", value(1), timeout_s=60.0))
        await asyncio.wait([waiting], timeout=0.2)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=30)
        assert waiting.cancelled(), "it does not wait for its own deadline"
        owner.agent.release(busy)
        assert await store.put("b", value(1))


async def test_a_client_that_dies_in_the_middle_of_a_put_leaves_nothing(owner: Owner, nats_url: str,
                                                                      eventually: Eventually) -> None:
    opened, enter = await ask_for_door(nats_url)
    line = connect(opened)
    await asyncio.to_thread(line.send, enter)
    assert isinstance(await asyncio.to_thread(line.receive), frames.Entered)
    key = BlockKey(bytes(range(32)))
    half = frames.encode(frames.Put([frames.Block(key, bytes(32))], [], [], [], 0, 5000, 0.0)) + value(1)[:NBYTES // 2]
    line._sock.sendall(half)
    await eventually(lambda: owner.agent.pool.statistics().private > 0)
    line.close()
    await eventually(lambda: owner.agent.pool.statistics().private == 0)
    assert not owner.agent.holds(key)
    await eventually(lambda: owner.door.visits == 0)


async def test_a_put_that_says_nothing_more_ends_by_its_deadline(owner: Owner, nats_url: str,
                                                                 eventually: Eventually) -> None:
    opened, enter = await ask_for_door(nats_url)
    line = connect(opened)
    await asyncio.to_thread(line.send, enter)
    await asyncio.to_thread(line.receive)
    line._sock.sendall(frames.encode(frames.Put([frames.Block(bytes(32), bytes(32))], [], [], [], 0, 300, 0.0)))
    await eventually(lambda: owner.agent.pool.statistics().private > 0)
    await eventually(lambda: owner.agent.pool.statistics().private == 0)
    line.close()


async def test_memory_that_was_not_handed_over_is_not_read(owner: Owner, nats_url: str) -> None:
    opened, enter = await ask_for_door(nats_url)
    line = connect(opened)
    try:
        await asyncio.to_thread(line.send, enter)
        await asyncio.to_thread(line.receive)
        put = frames.Put([frames.Block(bytes(32), bytes(32))], [frames.Source(7, 0)], [], [], 0, 1000,
                         host_clock_s() + 1)
        await asyncio.to_thread(line.send, put)
        with pytest.raises((Closed, OSError)):
            await asyncio.to_thread(line.receive)
    finally:
        line.close()
    assert not list(owner.agent.pool.blocks())


async def test_nothing_is_believed_that_was_copied_after_the_loan(owner: Owner, nats_url: str, path: str,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    if path != "shm":
        pytest.skip("over TCP the owner sends")
    async with open_client("async", nats_url, SPEC) as store:
        await store.put("a", value(1))
        with monkeypatch.context() as patched:
            patched.setattr("shared.store.door_holds.LOAN_S", -1.0)
            with pytest.raises(StoreError):
                await asyncio.wait_for(_get_or_raise(store), 5)
        assert await store.get("a") == value(1)


async def _get_or_raise(store: Any) -> None:
    if await store.get("a", timeout_s=2.0) is None:
        raise StoreError("a miss: the loan was over")


@pytest.mark.parametrize(("kind", "path"), [("async", "shm"), ("sync", "tcp")])
async def test_an_owner_that_stands_still_and_dies_is_a_deadline_and_a_miss(
        nats_url: str, kind: str, path: str, eventually: Eventually) -> None:
    wanted = order(nats_url, SPEC, path=path)
    async with open_client(kind, nats_url, SPEC) as store:
        async with owner_process(wanted) as child:
            async def stored() -> bool:
                try:
                    return bool(await store.put("a", value(1)) or await store.exists("a"))
                except NoStore:
                    return False
            await eventually(stored)
            os.kill(child.pid, signal.SIGSTOP)
            with pytest.raises(StoreTimeout):
                await store.get("a", timeout_s=0.5)
            with pytest.raises(StoreTimeout):
                await store.put("b", value(2), timeout_s=0.5)
            os.kill(child.pid, signal.SIGCONT)
            assert await store.get("a") == value(1)
            asked = asyncio.create_task(store.get("a", timeout_s=5.0))
            os.kill(child.pid, signal.SIGKILL)
            assert await asked in (value(1), None)
            assert await store.get("a", timeout_s=2.0) is None
            with pytest.raises(NoStore):
                await store.put("c", value(3), timeout_s=2.0)
        async with open_owner(wanted):  # under the same name, in another life
            await eventually(stored)
            assert await store.get("a") == value(1)


async def test_an_owner_that_comes_back_has_nothing_and_takes_again(nats_url: str, path: str,
                                                                    eventually: Eventually) -> None:
    wanted = order(nats_url, SPEC, path=path)
    async with open_client("async", nats_url, SPEC) as store:
        async with open_owner(wanted):
            await eventually(lambda: _put(store))
        async with open_owner(wanted) as owner:
            await eventually(lambda: _put(store))
            assert len(list(owner.agent.pool.blocks())) == 1
            assert await store.get("a") == value(1)


async def _put(store: Any) -> bool:
    try:
        return bool(await store.put("a", value(1), timeout_s=2.0))
    except (NoStore, StoreDraining):
        return False


async def test_values_go_where_they_belong_and_are_found_by_everybody(nats_url: str, eventually: Eventually) -> None:
    async with (open_owner(order(nats_url, SPEC, worker="store-1", num_blocks=64)) as first,
                open_owner(order(nats_url, SPEC, worker="store-2", num_blocks=64)) as second,
                open_client("async", nats_url, SPEC) as writer):
        await eventually(lambda: len(writer._directory.map.seats) == 2)
        memory = writer.register(np.frombuffer(bytearray(value(1, 32 * NBYTES)), dtype=np.uint8))
        keys = [f"key {i}" for i in range(32)]
        assert all(await writer.batch_put(keys, [memory[i * NBYTES:(i + 1) * NBYTES] for i in range(32)]))
        held = [len(list(owner.agent.pool.blocks())) for owner in (first, second)]
        assert sum(held) == 32 and min(held) >= 4, f"spread over both: {held}"
        async with open_client("sync", nats_url, SPEC) as reader:
            assert await reader.batch_exists(keys) == [True] * 32
            gone = [block.key for block in first.agent.pool.blocks()]
            first.agent.announce_evicted(first.agent.pool.drop(gone), "capacity")
            assert sum(await reader.batch_exists(keys)) == held[1], "what the owner says counts, not what was heard"
            for key in keys:
                await reader.put(key, value(9))
            assert await reader.batch_exists(keys) == [True] * 32


async def test_a_chain_goes_on_where_it_is_although_it_was_not_known(nats_url: str, eventually: Eventually) -> None:
    value_bytes = KV.block_bytes
    async with (open_owner(order(nats_url, KV, worker="store-1", num_blocks=64)) as first,
                open_client("sync", nats_url, KV) as store):
        chains = [store.chain([i] * 3 * KV.block_tokens) for i in range(12)]
        for blocks in chains:
            for block in blocks[:2]:
                assert await store.put(block, value(1, value_bytes))
        async with open_owner(order(nats_url, KV, worker="store-2", num_blocks=64)):
            whereabouts = store._directory.map
            await eventually(lambda: all(whereabouts.owners(blocks[1].key) for blocks in chains))
            elsewhere = [blocks for blocks in chains if whereabouts.ranked(blocks[2].key)[0].worker == "store-2"]
            assert elsewhere, "some would belong to the other worker"
            for blocks in elsewhere:
                whereabouts.forget(blocks[1].key, WorkerId("store-1"))
                assert await store.put(blocks[2], value(2, value_bytes))
                assert first.agent.holds(blocks[2].key)
            with pytest.raises(MissingParent):
                await store.put(store.chain([99] * 2 * KV.block_tokens)[1], value(2, value_bytes))


async def test_checksums_go_both_ways_where_they_are_wanted(nats_url: str, path: str) -> None:
    wanted = order(nats_url, SPEC, path=path)
    settings = msgspec.structs.replace(wanted.settings, checksums="on")
    async with (open_owner(msgspec.structs.replace(wanted, settings=settings)) as owner,
                open_client("async", nats_url, SPEC) as store):
        assert await store.put("a", value(1))
        memory = store.buffer(NBYTES)
        memory.array[:] = np.frombuffer(value(2), dtype=np.uint8)
        assert await store.put_from("b", memory)
        assert await store.get("a") == value(1) and await store.get("b") == value(2)
        slot = owner.agent.pool.slot(next(block.key for block in owner.agent.pool.blocks()))
        assert owner.agent.buffer(slot)[0] == value(1)[0]


@at_the_door
async def test_a_stock_goes_back_to_the_pool(owner: Owner, nats_url: str, eventually: Eventually) -> None:
    async with open_client("async", nats_url, SPEC) as store:
        await store.put("a", value(1))  # plain bytes go to a thread, which keeps a slot ready for the next
        await eventually(lambda: owner.agent.pool.statistics().private == 0)


# -- for strangers --------------------------------------------------------------------------------------------------


def test_importing_the_client_loads_no_torch() -> None:
    code = ("import sys; from shared.store import Client, SyncClient; "
            "assert not {'torch', 'transformers'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


async def test_without_a_bus_it_is_an_error_of_the_store() -> None:
    url = "nats://127.0.0.1:9"

    def in_threads() -> None:
        with SyncClient.open(url, SPEC):
            pass

    async def on_a_loop() -> None:
        async with Client.open(url, SPEC):
            pass

    for error in await asyncio.gather(asyncio.to_thread(in_threads), on_a_loop(), return_exceptions=True):
        assert isinstance(error, BusAway) and isinstance(error, StoreError) and isinstance(error, Unavailable)
        assert error.code == "bus" and f"cannot reach NATS at {url}" in str(error)


async def test_the_example_of_the_docs_runs(nats_url: str) -> None:
    text = (ROOT / "docs/store-client.md").read_text()
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    example = found[1].replace("nats://127.0.0.1:4222", nats_url)
    async with open_owner(order(nats_url, CacheSpec.opaque("demo", 2 << 20))):
        done = await asyncio.create_subprocess_exec(sys.executable, "-c", example, cwd=ROOT,
                                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        said, errors = await asyncio.wait_for(done.communicate(), 60)
    assert (said, errors, done.returncode) == (b"True\n", b"", 0)


async def test_a_batch_larger_than_a_question(nats_url: str, path: str) -> None:
    small = CacheSpec.opaque("small", 64)
    async with (open_owner(order(nats_url, small, path=path, num_blocks=4096)),
                open_client("sync", nats_url, small) as store):
        source, landing = store.buffer(1200 * 64), store.buffer(1200 * 64)
        source.array[:] = np.frombuffer(value(1, 1200 * 64), dtype=np.uint8)
        keys = [f"key {i}" for i in range(1200)]
        assert all(await store.batch_put(keys, [source[i * 64:(i + 1) * 64] for i in range(1200)]))
        assert all(await store.batch_get_into(keys, [landing[i * 64:(i + 1) * 64] for i in range(1200)]))
        assert np.array_equal(source.array, landing.array)


@at_the_door
async def test_many_pins_of_a_dead_client_end_by_their_ttl(owner: Owner, nats_url: str, eventually: Eventually) -> None:
    async with open_client("async", nats_url, SPEC) as store:
        await store.put("a", value(1))
        key = next(block.key for block in owner.agent.pool.blocks())
        opened, enter = await ask_for_door(nats_url, serves=0)
        line = connect(opened)
        await asyncio.to_thread(line.send, enter)
        await asyncio.to_thread(line.receive)
        await asyncio.to_thread(line.send, frames.Pin("mine", pack_keys([key]), 300))
        assert await asyncio.to_thread(line.receive) == frames.Marks([1])
        assert owner.agent.pool.statistics().pinned == 1
        await eventually(lambda: owner.agent.pool.statistics().pinned == 0)  # it never says another word
        line.close()
