"""RDMA and memory of devices: staged where no card reaches it, and written straight into where one does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Range
from shared.transfer import (
    ChecksumMismatch,
    PushResult,
    Segment,
    Slice,
    TransferEngine,
    TransferSettings,
    TransferTimeout,
    frames,
)
from shared.transfer.channel import Closed
from shared.transfer.device import Way
from shared.transfer.verbs import Status
from tests.rdma.guest.test_rdma_faults import RawSender, blocks, cable_pulled
from tests.support.device_memory import OpenMemory, VeiledMemory
from tests.support.eventually import eventually
from tests.support.transfer_peer import PATIENCE_S, noise

MIB = 1 << 20
NBYTES = 8 * MIB
OP = OperationId("op")
ALL = Range(segment="kv", offset=0, length=NBYTES)


@dataclass
class Pair:
    """Two engines of this process; a device's memory is ``None`` where the segment is of the host."""

    sender: TransferEngine
    receiver: TransferEngine
    source: VeiledMemory | None
    target: VeiledMemory | None

    async def push(self, slices: list[Slice], *, timeout_s: float = PATIENCE_S,
                   notify: bytes | None = None) -> PushResult:
        return await self.sender.push(self.receiver.endpoint, slices, self.grant, timeout_s=timeout_s, notify=notify)

    def __post_init__(self) -> None:
        self.grant = self.receiver.grant(OP, [ALL], ttl_s=600)

    def content(self) -> bytes:
        return self.target.content() if self.target is not None else bytes(self.segment(self.receiver).buffer)

    def segment(self, engine: TransferEngine) -> Segment:
        return engine._segments["kv"]

    def fill(self, seed: int) -> bytes:
        data = noise(NBYTES, seed)
        if self.source is not None:
            self.source.put(data)
        else:
            self.segment(self.sender).buffer[:] = data
        return data

    def registered(self, engine: TransferEngine) -> bool:
        """Has a card the segment itself?"""
        assert engine._fabric is not None
        return engine._fabric.knows(0, self.segment(engine))


Make = Callable[[int], VeiledMemory] | None


@asynccontextmanager
async def opened(source: Make, target: Make, **more: Any) -> AsyncIterator[Pair]:
    settings = TransferSettings(paths=("rdma",), **{"silence_s": 0.2, "connect_timeout_s": PATIENCE_S, **more})
    async with (
        TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=settings) as sender,
        TransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"),
                            settings=TransferSettings(paths=("rdma",))) as receiver,
    ):
        memories = [make(NBYTES) if make is not None else None for make in (source, target)]
        for engine, memory in zip((sender, receiver), memories, strict=True):
            engine.register("kv", 0 if memory is not None else NBYTES, memory=memory)
        yield Pair(sender, receiver, *memories)


@pytest.mark.parametrize(("source", "target", "checksums"), [
    (VeiledMemory, VeiledMemory, "off"), (VeiledMemory, None, "on"), (None, VeiledMemory, "on")])
async def test_what_no_card_reaches_is_staged_and_committed_before_it_is_told(
        source: Make, target: Make, checksums: str) -> None:
    async with opened(source, target, checksums=checksums) as pair:
        data = pair.fill(1)

        async def noted() -> tuple[bool, bool]:
            async for note in pair.receiver.notifications():
                assert note.data == b"all"
                return pair.receiver.covered(OP, ALL), pair.content() == data
            raise AssertionError

        listening = asyncio.create_task(noted())
        result = await pair.push(blocks(), notify=b"all")
        assert result.ok and result.path == "rdma" and result.nbytes == NBYTES, result.error
        assert await asyncio.wait_for(listening, PATIENCE_S) == (True, True)
        assert (pair.registered(pair.sender), pair.registered(pair.receiver)) == (source is None, target is None)
        data = pair.fill(2)
        assert (await pair.push([Slice("kv", 0, ALL)])).ok, "one large slice, cut into what can be staged"
        assert pair.content() == data


async def test_a_flipped_byte_is_found_on_its_way_through_the_stage() -> None:
    async with opened(VeiledMemory, VeiledMemory, corrupt_every=3) as pair:
        pair.fill(1)
        result = await pair.push(blocks())
        assert sum(isinstance(status.error, ChecksumMismatch) for status in result.slices) == len(result.slices) // 3


async def test_a_card_that_reaches_a_devices_memory_is_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    """By its address: Soft-RoCE takes no dma-buf, and says so when it is offered one."""
    caplog.set_level(logging.INFO, "shared.transfer.fabric")
    async with opened(lambda nbytes: OpenMemory(nbytes, exports=True), OpenMemory) as pair:
        data = pair.fill(1)
        assert pair.segment(pair.sender).way is pair.segment(pair.receiver).way is Way.PEER
        result = await pair.push(blocks())
        assert result.ok and pair.content() == data
        assert pair.source is not None and pair.target is not None
        assert pair.source.copies == pair.target.copies == 0, "nothing passed through the host"
        said = [record.getMessage() for record in caplog.records if "device_memory_exposed" in record.getMessage()]
        assert "no dma-buf: registering 8388608 bytes of a dma-buf" in said[0], said
        assert "no dma-buf: this device exports none" in said[1], said
        await pair.sender.unregister("kv")


async def test_pushes_that_want_more_room_to_land_than_there_is_take_turns() -> None:
    async with opened(None, VeiledMemory, max_inflight=64 * MIB) as pair:
        data = pair.fill(1)
        assert pair.target is not None
        pair.target.gate.clear()
        pushes = [asyncio.create_task(pair.push([Slice("kv", 0, ALL)])) for _ in range(4)]
        await asyncio.wait(pushes, timeout=0.5)
        assert not any(push.done() for push in pushes)
        pair.target.gate.set()
        for push in pushes:
            assert (await asyncio.wait_for(push, PATIENCE_S)).ok
        assert pair.content() == data


async def test_a_sender_that_does_not_wait_for_room_to_land_loses_its_connection() -> None:
    async with opened(None, VeiledMemory) as pair:
        raw = await asyncio.to_thread(RawSender, pair.receiver.endpoint)
        try:
            whole = frames.Span("kv", 0, NBYTES)
            keys, go = await asyncio.to_thread(raw.claim, pair.grant, whole, number=1)
            assert isinstance(keys, frames.Keys) and keys.segment == frames.LANDING
            assert isinstance(go, frames.Go) and go.landing == [0]
            go, = await asyncio.to_thread(raw.claim, pair.grant, whole, number=2)
            assert isinstance(go, frames.Go) and go.landing == [NBYTES]
            raw.begin(pair.grant, whole, number=3)  # there is no room: nothing is answered
            assert await asyncio.to_thread(raw.write, keys.address, keys.key, 1, immediate=3) is Status.SUCCESS
            with pytest.raises((Closed, ConnectionError)):
                await asyncio.to_thread(raw.connection.receive)
            assert pair.receiver.statistics().dropped_connections == {"protocol": 1}
            assert pair.content() == bytes(NBYTES), "nothing was put in its place"
            await asyncio.wait_for(pair.receiver.release(OP), PATIENCE_S)
        finally:
            raw.close()


@pytest.mark.parametrize("slow", ["sender's", "receiver's"])
async def test_a_device_that_stands_still_costs_the_deadline_and_no_slot(slow: str) -> None:
    async with opened(VeiledMemory, VeiledMemory) as pair:
        pair.fill(1)
        assert (await pair.push(blocks(1))).ok
        memory = pair.source if slow == "sender's" else pair.target
        assert memory is not None
        memory.gate.clear()
        result = await pair.push(blocks(), timeout_s=1.0)
        assert isinstance(result.error, TransferTimeout)
        memory.gate.set()
        data = pair.fill(2)

        async def well_again() -> bool:
            return (await pair.push(blocks())).ok  # the receiver may have cut the connection for being overdue

        await eventually(well_again, timeout_s=PATIENCE_S)
        assert pair.content() == data


@pytest.mark.usefixtures("second_card")
async def test_a_card_that_fails_costs_nothing_of_what_is_staged() -> None:
    async with opened(VeiledMemory, VeiledMemory, max_inflight=64 * MIB) as pair:
        data = pair.fill(1)
        push = asyncio.create_task(pair.push(blocks(rounds=6)))
        await eventually(lambda: pair.receiver.received_bytes(OP), timeout_s=PATIENCE_S)
        assert not push.done()
        with cable_pulled("roce1"):
            result = await asyncio.wait_for(push, PATIENCE_S)
        assert result.ok and result.path == "rdma", result.error
        assert pair.content() == data
