"""Who comes to a worker's door: tenants, borrowers that do not give back, and connections that say nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial

import pytest
from msgspec import structs
from prometheus_client import REGISTRY

from load.bench.store_owner import Owner, open_owner
from shared.bus.nats import NatsBus
from shared.bus.subjects import DOOR, tenant_token
from shared.ids import Incarnation, WorkerId
from shared.kv import CacheSpec
from shared.messages import DoorOpened, DoorRefused, OpenDoor
from shared.store import door_frames as frames
from shared.store.client_errors import EntryRefused, StoreFull
from shared.store.door_crowd import admit
from shared.store.door_line import Line
from shared.transfer import host_id
from shared.transfer.addresses import host_clock_s, split_address
from shared.transfer.channel import Closed
from shared.transfer.shm import connect_unix
from tests.support.eventually import Eventually
from tests.support.store_clients import NBYTES, open_client, order

KV = CacheSpec(model="tiny", weights_digest="", tokenizer_digest="", dtype="float32", layers=2, kv_heads=2, head_dim=16,
               block_tokens=4, max_context=512)
SPEC = CacheSpec.opaque("values", NBYTES)
WORKER = WorkerId("store-1")


def counted(name: str, **labels: str) -> float:
    """Of the door in this process."""
    return REGISTRY.get_sample_value(f"moonbus_store_door_{name}_total", labels) or 0.0


async def ask(nats_url: str, spec: CacheSpec, *, tenant: str = "", subject: str | None = None,
              client: str = "c") -> DoorOpened | DoorRefused:
    """What ``client`` gets over the bus, by the subject of its tenant unless another is given."""
    question = OpenDoor(client=client, incarnation=Incarnation("1"), host=host_id(), spec=spec.digest, tenant=tenant)
    address = DOOR.at(worker=WORKER, tenant=tenant_token(tenant) if subject is None else subject)
    async with NatsBus.connect(nats_url, name="test") as bus:
        reply = await bus.request(address, question, timeout_s=5)
    assert isinstance(reply, DoorOpened | DoorRefused)
    return reply


class Visitor:
    """A client that is none of ours, with a connection for questions. Blocks; every answer within 10 s."""

    def __init__(self, opened: DoorOpened, spec: CacheSpec, client: str) -> None:
        sock = connect_unix(opened.shm, 5)
        sock.settimeout(None)
        self.line = Line(sock, frames.decode_reply)
        self.line.set_deadline(host_clock_s() + 10)
        self.line.send(frames.Enter(frames.VERSION, client, "1", spec.digest, "", opened.expires_at_s, opened.token, 0,
                                    host_id(), host_clock_s()))
        assert isinstance(self.line.receive(), frames.Entered)

    def borrow(self, keys: list[bytes], timeout_ms: int = 5000) -> object:
        """The answer to one GET."""
        self.line.send(frames.Get(b"".join(keys), timeout_ms))
        return self.line.receive()


async def come(nats_url: str, spec: CacheSpec, client: str) -> Visitor:
    opened = await ask(nats_url, spec, client=client)
    assert isinstance(opened, DoorOpened)
    return await asyncio.to_thread(Visitor, opened, spec, client)


# -- tenants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["shm", "tcp"])
async def test_another_tenants_values_are_a_miss_that_is_counted(nats_url: str, path: str) -> None:
    async with (open_owner(order(nats_url, KV, path=path)) as owner,
                open_client("async", nats_url, KV, tenant="acme") as acme,
                open_client("sync", nats_url, KV, tenant="rival") as rival):
        chain = acme.chain(range(8))
        source = acme.buffer(2 * KV.block_bytes)
        parts = [source[:KV.block_bytes], source[KV.block_bytes:]]
        assert await acme.batch_put(chain, parts) == [True, True]
        key = chain[1].key
        before = counted("values", kind="foreign")
        assert await rival.get(key) is None
        assert not await rival.exists(key)
        assert not await rival.remove(key)
        pin = await rival.pin([key])
        assert pin.kept == [False]
        assert counted("values", kind="foreign") - before == 4
        assert not await rival.put(chain[1], bytes(KV.block_bytes)), "the key is taken, by the first who put it"
        assert await acme.get(key) == bytes(KV.block_bytes)
        assert await acme.remove(key)
        owner.agent.pool.check_invariants()


async def test_where_the_operator_says_so_everybody_sees_everything(nats_url: str) -> None:
    async with (open_owner(structs.replace(order(nats_url, KV), all_tenants=True)),
                open_client("async", nats_url, KV, tenant="acme") as acme,
                open_client("async", nats_url, KV, tenant="rival") as rival):
        block = acme.chain(range(4))[0]
        assert await acme.put(block, b"\x07" * KV.block_bytes)
        assert await rival.get(block.key) == b"\x07" * KV.block_bytes
        assert await rival.remove(block.key)
        assert await acme.get(block.key) is None


async def test_the_subject_says_for_whom_a_client_may_act(nats_url: str) -> None:
    async with open_owner(order(nats_url, SPEC)):
        before = counted("requests", kind="open", outcome="tenant")
        refused = await ask(nats_url, SPEC, tenant="acme", subject="rival")
        assert isinstance(refused, DoorRefused) and refused.code == "tenant" and "acme" in refused.message
        assert counted("requests", kind="open", outcome="tenant") == before + 1
        for tenant in ("acme", "", "x-", "a.b*> c", "ä"):
            assert isinstance(await ask(nats_url, SPEC, tenant=tenant), DoorOpened)
            async with open_client("async", nats_url, SPEC, tenant=tenant) as client:
                assert await client.put("a", bytes(NBYTES))
                assert await client.get("a") == bytes(NBYTES)


async def test_a_token_of_one_tenant_does_not_open_for_another(nats_url: str) -> None:
    async with open_owner(order(nats_url, SPEC)), open_client("sync", nats_url, SPEC, tenant="acme") as client:
        client._client._doors._tenant = "rival"
        with pytest.raises(EntryRefused):
            await client.get("a")


# -- borrowers ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def lender(nats_url: str) -> AsyncIterator[Owner]:
    async with open_owner(order(nats_url, SPEC, num_blocks=64)) as owner, \
            open_client("async", nats_url, SPEC) as client:
        for i in range(40):
            assert await client.put(f"key {i}", bytes(NBYTES))
        yield owner
        owner.agent.pool.check_invariants()


def keys_of(owner: Owner) -> list[bytes]:
    return [bytes(block.key) for block in owner.agent.blocks()]


async def test_who_gives_nothing_back_gets_no_more_and_is_told_why(lender: Owner, nats_url: str) -> None:
    keys = keys_of(lender)
    greedy, other = await come(nats_url, SPEC, "greedy"), await come(nats_url, SPEC, "other")
    try:
        assert isinstance(await asyncio.to_thread(greedy.borrow, keys[:8]), frames.Found)
        before = counted("requests", kind="get", outcome="full")
        denied = await asyncio.to_thread(greedy.borrow, keys[8:9], 200)
        assert isinstance(denied, frames.Denied) and denied.code == "full" and "borrowed 8 of 64" in denied.why
        assert counted("requests", kind="get", outcome="full") == before + 1
        assert lender.agent.pool.statistics().pinned == 8
        assert isinstance(await asyncio.to_thread(other.borrow, keys[:8]), frames.Found), "another client may"
        await asyncio.to_thread(greedy.line.send, frames.Done(1))
        assert isinstance(await asyncio.to_thread(greedy.borrow, keys[8:9]), frames.Found)
    finally:
        greedy.line.close()
        other.line.close()


async def test_what_ends_loans_is_heard_while_a_question_waits_for_that(
        lender: Owner, nats_url: str, eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.store.door_holds.LOAN_S", 60.0)
    keys = keys_of(lender)
    visitor = await come(nats_url, SPEC, "c")
    try:
        assert isinstance(await asyncio.to_thread(visitor.borrow, keys[:8]), frames.Found)
        waiting = asyncio.create_task(asyncio.to_thread(visitor.borrow, keys[8:16], 60_000))
        await eventually(lambda: bool(lender.door._holds._waiting))
        visitor.line.send(frames.Done(1))
        assert isinstance(await waiting, frames.Found)
        pipelined = [frames.Get(b"".join(keys[:8]), 60_000), frames.Get(keys[8], 60_000, done=1)]
        visitor.line._sock.sendall(b"".join(frames.encode(body) for body in pipelined))
        assert isinstance(await asyncio.to_thread(visitor.line.receive), frames.Found), "the second question says done"
        visitor.line.send(frames.Done(1))
        assert isinstance(await asyncio.to_thread(visitor.line.receive), frames.Found)
        visitor.line.send(frames.Get(b"".join(keys[:8]), 60_000))
        await eventually(lambda: bool(lender.door._holds._waiting))
        for _ in range(100):  # more than a client may ask beyond the one that waits
            visitor.line.send(frames.Look(keys[0]))
        with pytest.raises((Closed, OSError)):
            await asyncio.to_thread(visitor.line.receive)
        await eventually(lambda: lender.agent.pool.statistics().pinned == 0)
    finally:
        visitor.line.close()


async def test_a_client_of_ours_meets_it_as_back_pressure(lender: Owner, nats_url: str,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.store.door_holds.LOAN_S", 60.0)
    keys = keys_of(lender)
    visitors = [await come(nats_url, SPEC, f"greedy {i}") for i in range(2)]
    async with open_client("sync", nats_url, SPEC) as client:
        for i, visitor in enumerate(visitors):
            assert isinstance(await asyncio.to_thread(visitor.borrow, keys[8 * i:8 * i + 8]), frames.Found)
        with pytest.raises(StoreFull, match="borrowed 16 of 64"):
            await client.get("key 30", timeout_s=0.5)
        waiting = asyncio.create_task(client.get("key 30", timeout_s=30))
        visitors[0].line.close()
        assert await waiting == bytes(NBYTES)
    visitors[1].line.close()


async def test_many_calls_side_by_side_share_what_may_be_borrowed(lender: Owner, nats_url: str) -> None:
    async with open_client("async", nats_url, SPEC) as client:
        landing = client.buffer(40 * NBYTES)
        parts = [landing[i * NBYTES:(i + 1) * NBYTES] for i in range(40)]
        got = await asyncio.gather(*(
            client.batch_get_into([f"key {i}" for i in range(n, 40)], parts[n:]) for n in range(16)))
        assert all(all(flags) for flags in got)


# -- who says nothing -----------------------------------------------------------------------------------------------


def mute(opened: DoorOpened, source: str) -> socket.socket:
    """Connects from ``source``, an address of the loopback, and waits."""
    return socket.create_connection(split_address(opened.tcp), timeout=10, source_address=(source, 0))


async def test_who_does_not_enter_in_time_is_shown_out(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.store.door.HANDSHAKE_S", 0.05)
    async with open_owner(order(nats_url, SPEC, path="tcp")) as owner:
        opened = await ask(nats_url, SPEC)
        assert isinstance(opened, DoorOpened)
        before = counted("requests", kind="enter", outcome="late")
        sock = await asyncio.to_thread(mute, opened, "127.0.0.1")
        assert await asyncio.to_thread(sock.recv, 1) == b""
        assert counted("requests", kind="enter", outcome="late") == before + 1
        assert owner.door.visits == 0
        sock.close()


async def test_many_that_say_nothing_keep_nobody_out(nats_url: str, monkeypatch: pytest.MonkeyPatch,
                                                     eventually: Eventually) -> None:
    monkeypatch.setattr("shared.store.door.admit", partial(admit, most=6, most_of_one=4))
    async with (open_owner(order(nats_url, SPEC, path="tcp")) as owner,
                open_client("sync", nats_url, SPEC) as client):
        assert await client.put("a", bytes(NBYTES))
        opened = await ask(nats_url, SPEC)
        assert isinstance(opened, DoorOpened)
        before = counted("requests", kind="enter", outcome="displaced")
        flood = [await asyncio.to_thread(mute, opened, f"127.0.0.{2 + i % 3}") for i in range(30)]
        await eventually(lambda: counted("requests", kind="enter", outcome="displaced") >= before + 25)
        assert owner.door.visits <= 6
        assert await client.get("a") == bytes(NBYTES)
        async with open_client("async", nats_url, SPEC) as another:
            assert await another.get("a") == bytes(NBYTES), "who shows a token comes in"
        assert await asyncio.to_thread(flood[0].recv, 1) == b""
        for sock in flood:
            sock.close()
        await eventually(lambda: owner.door.visits <= 2)


def test_every_tenant_has_a_part_of_a_subject_of_its_own() -> None:
    tenants = ["", "a", "x-", "x-61", "A", "a.b", "*", ">", " ", "ä", "a_b-c"]
    tokens = [tenant_token(tenant) for tenant in tenants]
    assert len(set(tokens)) == len(tokens)
    assert [token for token in tokens if not token.startswith("x-")] == ["a", "A", "a_b-c"]
    assert all(DOOR.params(DOOR.at(worker=WORKER, tenant=token).text)["tenant"] == token for token in tokens)
    assert DOOR.any(worker=WORKER).text == "mb.v1.worker.store-1.door.*"
    with pytest.raises(ValueError, match="cannot stand"):
        DOOR.any(worker="*")
