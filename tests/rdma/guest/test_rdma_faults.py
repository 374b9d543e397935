"""RDMA between processes: what arrives, and what happens when a peer, a card or a sender misbehaves."""

from __future__ import annotations

import asyncio
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import SettingError
from shared.ids import OperationId
from shared.messages import Endpoint, Grant, Range
from shared.transfer import (
    GrantRefused,
    PeerGone,
    Slice,
    TransferEngine,
    TransferSettings,
    TransferTimeout,
    frames,
    verbs,
)
from shared.transfer.addresses import host_clock_s, split_address
from shared.transfer.channel import Closed
from shared.transfer.rails import choose_gid
from shared.transfer.rdma import TIMING
from shared.transfer.verbs import Remote, Status
from shared.transfer.wire import Connection
from tests.support.eventually import eventually
from tests.support.transfer_peer import PATIENCE_S, Peer, digests, noise, noisy_engine, peer, under_way

MIB = 1 << 20
NBYTES = 8 * MIB
BLOCK = MIB
OP, NEXT = OperationId("op"), OperationId("next")
ALL = Range(segment="kv", offset=0, length=NBYTES)
SEED = 5


def blocks(count: int = NBYTES // BLOCK, *, rounds: int = 1) -> list[Slice]:
    """``count`` blocks of ``kv``, ``rounds`` times, far enough apart that none are joined."""
    order = [i for start in (0, 1) for i in range(start, count, 2)]
    return [Slice("kv", i * BLOCK, Range(segment="kv", offset=i * BLOCK, length=BLOCK)) for i in order] * rounds


@asynccontextmanager
async def own_engine(*paths: str, **more: Any) -> AsyncIterator[TransferEngine]:
    """An engine of this process, with noise in ``kv``."""
    settings = TransferSettings(paths=paths or ("rdma",), **{"silence_s": 0.2, "max_inflight": 4 * MIB,
                                                                      "connect_timeout_s": PATIENCE_S, **more})
    async with noisy_engine(settings, NBYTES, SEED) as engine:
        yield engine


@asynccontextmanager
async def receiving(*paths: str) -> AsyncIterator[tuple[Peer, Grant]]:
    """A peer with an empty ``kv`` that is granted as a whole."""
    async with peer("b", TransferSettings(paths=paths or ("rdma",))) as b:
        await b.register("kv", NBYTES)
        yield b, await b.grant(OP, ALL)


async def assert_all_arrived(b: Peer) -> None:
    assert await b.audit(OP, "kv", BLOCK) == [(True, digest) for digest in digests(noise(NBYTES, SEED), BLOCK)]


def packets(device: str) -> int:
    """What a card has sent so far."""
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts").read_text())


@contextmanager
def cable_pulled(interface: str) -> Iterator[None]:
    """Nothing goes through the interface inside."""
    subprocess.run(["ip", "link", "set", interface, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", interface, "up"], check=True)


# -- all is well ------------------------------------------------------------------------------------------------


async def test_bytes_cross_processes_and_memory_is_registered_once() -> None:
    async with receiving() as (b, grant), own_engine() as engine:
        for _ in range(2):
            result = await engine.push(b.endpoint, blocks(), grant, timeout_s=PATIENCE_S)
            assert result.ok and result.path == "rdma" and result.nbytes == NBYTES
        await assert_all_arrived(b)
        fabric = engine._fabric
        assert fabric is not None and [nic.nic.name for nic in fabric.nics] == ["rxe0"]
        registered, = fabric._registered.values()
        assert list(registered.regions) == [0]


async def test_the_gid_is_chosen_by_the_address_in_use_and_can_be_set() -> None:
    async with own_engine(host="10.77.0.1") as engine:
        assert engine._fabric is not None
        nic, = engine._fabric.nics
        assert nic.gid.raw == bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1])
        assert nic.why == "holds the address in use" and "::ffff:" in str(nic)
    async with own_engine(rdma_gid_index=0) as engine:
        assert engine._fabric is not None
        nic, = engine._fabric.nics
        assert (nic.gid.index, nic.why) == (0, "set")
    with pytest.raises(SettingError, match="no active RDMA device mlx5_0; there is rxe0"):
        async with own_engine(rdma_devices=("mlx5_0",)):
            pass


async def test_two_bindings_understand_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ibverbs")
    pytest.importorskip("pyverbs")
    async with receiving() as (b, grant):
        for name in [name for name in sys.modules if name.split(".")[0] == "pyverbs"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "pyverbs", None)
        async with own_engine() as engine:
            assert engine._fabric is not None and engine._fabric.nics[0].device.binding == "ibverbs"
            result = await engine.push(b.endpoint, blocks(), grant, timeout_s=PATIENCE_S)
            assert result.ok and result.nbytes == NBYTES
            await assert_all_arrived(b)


# -- peers that die or hang -------------------------------------------------------------------------------------


async def test_a_peer_killed_in_the_middle_is_gone_long_before_the_deadline() -> None:
    """How soon is a matter of configuration: see ``tests/unit/transfer/test_patience.py``."""
    async with receiving() as (b, grant), own_engine() as engine:
        async with under_way(engine, b, grant, blocks(rounds=500)) as push:
            b.kill()
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert isinstance(result.error, PeerGone) and result.error.peer == "b"


async def test_what_a_stopped_peer_did_not_take_in_time_is_never_covered() -> None:
    """Its card goes on taking bytes; the source is changed as soon as the push has ended."""
    async with receiving() as (b, grant), own_engine() as engine:
        source = engine.register("other", NBYTES).buffer
        source[:] = noise(NBYTES, SEED)
        slices = [Slice("other", item.offset, item.remote) for item in blocks(rounds=500)]
        assert (await engine.push(b.endpoint, blocks(1), grant, timeout_s=PATIENCE_S)).ok, "connected beforehand"
        async with under_way(engine, b, grant, slices, timeout_s=3.0) as push:
            await b.stop()
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert isinstance(result.error, TransferTimeout)
        source[:] = noise(NBYTES, SEED + 1)
        b.go_on()
        for (covered, found), sent in zip(await b.audit(OP, "kv", BLOCK), digests(noise(NBYTES, SEED), BLOCK),
                                          strict=True):
            assert not covered or found == sent
        await b.release(OP)
        again = await engine.push(b.endpoint, blocks(1), await b.grant(NEXT, ALL), timeout_s=PATIENCE_S)
        assert again.ok, "it came back: it is reached again"


# -- cards that fail --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("second_card")
async def test_both_cards_are_used_and_when_one_fails_the_other_takes_the_rest_until_it_is_back() -> None:
    async with receiving() as (b, grant), own_engine(max_inflight=64 * MIB) as engine:
        before = packets("rxe0"), packets("rxe1")
        assert (await engine.push(b.endpoint, blocks(rounds=3), grant, timeout_s=PATIENCE_S)).ok
        assert packets("rxe0") > before[0] + 100 and packets("rxe1") > before[1] + 100
        async with under_way(engine, b, grant, blocks(rounds=6)) as push:
            with cable_pulled("roce1"):
                result = await asyncio.wait_for(push, PATIENCE_S)
                assert result.ok and result.path == "rdma", result.error
        await assert_all_arrived(b)

        async def second_carries_again() -> bool:
            seen = packets("rxe1")
            assert (await engine.push(b.endpoint, blocks(rounds=3), grant, timeout_s=PATIENCE_S)).ok
            return packets("rxe1") > seen + 100

        await eventually(second_carries_again, timeout_s=PATIENCE_S)


async def test_when_no_card_is_left_the_rest_goes_by_tcp() -> None:
    async with receiving("rdma", "tcp") as (b, grant), own_engine("rdma", "tcp") as engine:
        async with under_way(engine, b, grant, blocks(rounds=4)) as push:
            with cable_pulled("roce0"):
                result = await asyncio.wait_for(push, PATIENCE_S)
                assert result.ok and result.path == "rdma+tcp", result.error
        await assert_all_arrived(b)
        assert engine.statistics().failovers[("rdma", "tcp")] == 1


async def test_memory_unregistered_in_the_middle_ends_the_push() -> None:
    async with receiving() as (b, grant), own_engine() as engine:
        async with under_way(engine, b, grant, blocks(rounds=500)) as push:
            await asyncio.wait_for(b.unregister("kv"), PATIENCE_S)
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert isinstance(result.error, (GrantRefused, PeerGone))
        await b.register("kv", NBYTES)
        assert isinstance((await engine.push(b.endpoint, blocks(1), grant, timeout_s=PATIENCE_S)).error, GrantRefused)
        assert (await engine.push(b.endpoint, blocks(1), await b.grant(NEXT, ALL), timeout_s=PATIENCE_S)).ok


# -- senders that misbehave -------------------------------------------------------------------------------------


class RawSender:
    """Speaks the protocol by hand and has a queue pair of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.connection = Connection(socket.create_connection(split_address(endpoint.rdma), timeout=PATIENCE_S))
        self.connection.send(frames.Hello("raw", endpoint.worker, endpoint.incarnation, endpoint.host, host_clock_s()))
        assert isinstance(self.connection.receive(), frames.Welcome)
        cards = self.connection.receive()
        assert isinstance(cards, frames.Cards)
        nic = next(nic for nic in verbs.nics() if nic.name == "rxe0")
        gid, _ = choose_gid(nic, ())
        self._device = verbs.open_device(nic.name)
        self.memory = np.full(NBYTES, 7, dtype=np.uint8)
        self._region = self._device.register(self.memory.ctypes.data, NBYTES)
        self._pair = self._device.queue_pair()
        self.connection.send(frames.Connect(0, 0, self._pair.number, 1,
                                            frames.Card(gid.raw, self._device.lid, self._device.mtu)))
        answer, card = self.connection.receive(), cards.cards[0]
        assert isinstance(answer, frames.Connected) and not answer.refused
        self._pair.connect(Remote(answer.number, answer.psn, card.gid, card.lid, card.mtu), psn=1, gid_index=gid.index,
                           timing=TIMING)

    def begin(self, grant: Grant, *spans: frames.Span, number: int = 1, timeout_ms: int = 60_000) -> None:
        """Makes a claim."""
        self.connection.send(frames.Begin(number, grant.operation, grant.incarnation, grant.token, timeout_ms,
                                          list(spans), None, [], 0, -1))

    def claim(self, grant: Grant, *spans: frames.Span, number: int = 1, timeout_ms: int = 60_000) -> list[frames.Body]:
        """What is answered, up to GO or ACK."""
        self.begin(grant, *spans, number=number, timeout_ms=timeout_ms)
        answers = [self.connection.receive()]
        while isinstance(answers[-1], frames.Keys):
            answers.append(self.connection.receive())
        return answers

    def write(self, address: int, key: int, length: int, *, immediate: int | None = None) -> Status:
        """Writes sevens; how that ended."""
        self._pair.write(1, (self.memory.ctypes.data, length, self._region.lkey), (address, key), signaled=True,
                         immediate=immediate)
        while True:
            for completion in self._pair.completions():
                if completion.status is not Status.WR_FLUSH_ERR or completion.request == 1:
                    return completion.status
            assert select.select([self._pair.fd], [], [], PATIENCE_S)[0], "no completion"

    def close(self) -> None:
        self.connection.close()
        self._pair.close()
        self._region.close()
        self._device.close()


@asynccontextmanager
async def raw_sender() -> AsyncIterator[tuple[TransferEngine, RawSender]]:
    """A receiver in this process, and a raw sender to it."""
    async with own_engine() as engine:
        engine._segments["kv"].buffer[:] = bytes(NBYTES)
        raw = await asyncio.to_thread(RawSender, engine.endpoint)
        try:
            yield engine, raw
        finally:
            raw.close()


def of(offset: int, length: int) -> Range:
    return Range(segment="kv", offset=offset, length=length)


async def test_no_key_is_handed_out_to_who_is_not_admitted() -> None:
    async with raw_sender() as (engine, raw):
        grant = engine.grant(OP, [of(0, BLOCK)], ttl_s=60)
        answer, = await asyncio.to_thread(raw.claim, grant, frames.Span("kv", 0, BLOCK + 1))
        assert isinstance(answer, frames.Ack) and "outside the grant" in answer.refused
        keys, go = await asyncio.to_thread(raw.claim, grant, frames.Span("kv", 0, BLOCK), number=2)
        assert isinstance(keys, frames.Keys) and isinstance(go, frames.Go)


@pytest.mark.parametrize("wrong", ["key", "address"])
async def test_a_write_that_the_card_refuses_ends_the_writer(wrong: str) -> None:
    async with raw_sender() as (engine, raw):
        grant = engine.grant(OP, [ALL], ttl_s=60)
        keys, _ = await asyncio.to_thread(raw.claim, grant, frames.Span("kv", 0, BLOCK))
        assert isinstance(keys, frames.Keys)
        key = keys.key ^ (0xFF if wrong == "key" else 0)
        address = keys.address + (NBYTES - 1 if wrong == "address" else 0)
        assert await asyncio.to_thread(raw.write, address, key, BLOCK) is Status.REM_ACCESS_ERR
        answer = await asyncio.to_thread(raw.connection.receive)
        assert isinstance(answer, frames.Down) and answer.rail == 0
        await asyncio.wait_for(engine.release(OP), PATIENCE_S)
        assert engine._segments["kv"].buffer == bytes(NBYTES)


async def test_an_event_for_a_claim_that_is_not_in_progress_costs_the_connection() -> None:
    async with raw_sender() as (engine, raw):
        keys, _ = await asyncio.to_thread(raw.claim, engine.grant(OP, [ALL], ttl_s=60), frames.Span("kv", 0, BLOCK))
        assert isinstance(keys, frames.Keys)
        assert await asyncio.to_thread(raw.write, keys.address, keys.key, BLOCK, immediate=9) is Status.SUCCESS
        with pytest.raises((Closed, ConnectionError)):
            await asyncio.to_thread(raw.connection.receive)
        assert engine.statistics().dropped_connections == {"protocol": 1}
        await asyncio.wait_for(engine.release(OP), PATIENCE_S)


@pytest.mark.parametrize("end", ["closed", "deadline"])
async def test_nothing_writes_any_more_once_a_dead_senders_range_is_released(end: str) -> None:
    async with raw_sender() as (engine, raw):
        grant = engine.grant(OP, [ALL], ttl_s=60)
        keys, _ = await asyncio.to_thread(raw.claim, grant, frames.Span("kv", 0, BLOCK),
                                          timeout_ms=100 if end == "deadline" else 60_000)
        assert isinstance(keys, frames.Keys)
        assert await asyncio.to_thread(raw.write, keys.address, keys.key, 1) is Status.SUCCESS
        if end == "closed":
            raw.connection.shutdown()
        await asyncio.wait_for(engine.release(OP), PATIENCE_S)
        assert not engine.covered(OP, of(0, 1))
        memory = engine._segments["kv"].buffer
        memory[:BLOCK] = bytes(BLOCK)
        assert await asyncio.to_thread(raw.write, keys.address, keys.key, BLOCK) is not Status.SUCCESS
        assert memory[:BLOCK] == bytes(BLOCK)
