"""A store's door and clients that are no clients of ours: what they say is looked at before it is believed."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading

import pytest

from shared.bus.subjects import DOOR
from shared.ids import BlockKey, Incarnation
from shared.messages import DoorOpened, OpenDoor
from shared.store import Client, door_entry
from shared.store import door_frames as frames
from shared.store.client_doors import Call
from shared.store.door_line import Line
from shared.transfer import host_id
from shared.transfer.addresses import host_clock_s, split_address
from shared.transfer.channel import Closed
from tests.support.agents import Holder, open_holder
from tests.support.blocks import SPEC, make_chain, payload
from tests.support.eventually import Eventually


async def ask_for_door(holder: Holder) -> DoorOpened:
    ask = OpenDoor(client="c", incarnation=Incarnation("1"), host=host_id(), spec=SPEC.digest, tenant="")
    opened = await holder.bus.request(DOOR.at(worker=holder.id, tenant="x-"), ask, timeout_s=5)
    assert isinstance(opened, DoorOpened)
    return opened


def enter(opened: DoorOpened) -> Line:
    """Over TCP; raises what a connection raises that the door ends. Blocks."""
    sock = socket.create_connection(split_address(opened.tcp), timeout=5)
    line = Line(sock, frames.decode_reply)
    try:
        line.send(frames.Enter(frames.VERSION, "c", "1", SPEC.digest, "", opened.expires_at_s, opened.token, 1,
                               host_id(), host_clock_s()))
        assert isinstance(line.receive(), frames.Entered)
    except BaseException:
        line.close()
        raise
    return line


def put(line: Line, *blocks: frames.Block) -> list[int]:
    line.send(frames.Put(list(blocks), [], [], [], 0, 5000, 0.0), [memoryview(payload(BlockKey(block.key)))
                                                                   for block in blocks])
    reply = line.receive()
    assert isinstance(reply, frames.Marks)
    return reply.marks


async def test_a_block_that_does_not_continue_its_parent_is_not_stored(nats_url: str) -> None:
    chain = [frames.Block(block.key, block.parent, block.depth) for block in make_chain("a", 3)]
    async with open_holder(nats_url, "w1") as one:
        line = await asyncio.to_thread(enter, await ask_for_door(one))
        assert await asyncio.to_thread(put, line, *chain) == [1, 1, 1]
        stranger, other = make_chain("b", 2)
        for depth in (1, 3, 4, 2**31 - 1):
            wrong = frames.Block(stranger.key, chain[1].key, depth)
            assert await asyncio.to_thread(put, line, wrong) == [frames.Mark.ORPHAN]
        assert await asyncio.to_thread(put, line, frames.Block(other.key, stranger.key, 0)) == [1]
        assert await asyncio.to_thread(put, line, frames.Block(stranger.key, chain[1].key, 2)) == [1]
        assert one.agent.trim([other.key], "test") == 1
        one.agent.pool.check_invariants()
        line.close()


async def test_without_a_descriptor_left_nobody_comes_in_and_the_loop_goes_on(
        nats_url: str, eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, full = 0, True

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal tries
            tries += 1
            if full:
                raise OSError(errno.EMFILE, "injected")
            return super().accept()

    def listen(host: str) -> tuple[socket.socket, int]:
        sock = Listener(socket.AF_INET, socket.SOCK_STREAM)
        sock.bind((host, 0))
        return sock, int(sock.getsockname()[1])

    monkeypatch.setattr(door_entry, "listen_tcp", listen)
    async with open_holder(nats_url, "w1") as one:
        entering = asyncio.create_task(asyncio.to_thread(enter, await ask_for_door(one)))
        await eventually(lambda: tries >= 3)
        looked = 0
        while tries < 5:
            looked += 1
            await asyncio.sleep(0)
        assert looked > 50, "the loop did little else"
        full = False
        (await entering).close()


async def test_without_a_thread_for_it_a_visit_ends(nats_url: str, eventually: Eventually,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("w1-door"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async with open_holder(nats_url, "w1") as one:
        opened = await ask_for_door(one)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            line = await asyncio.to_thread(enter, opened)
            with pytest.raises(Closed):
                await asyncio.to_thread(line.receive)
            line.close()
        line = await asyncio.to_thread(enter, opened)
        block = make_chain("a", 1)[0]
        assert await asyncio.to_thread(put, line, frames.Block(block.key, block.parent)) == [1]
        line.close()


def pin(line: Line, name: str, *keys: BlockKey) -> object:
    line.send(frames.Pin(name, b"".join(keys), 60_000))
    return line.receive()


async def test_a_pin_counts_with_all_that_its_blocks_continue(nats_url: str) -> None:
    chain = make_chain("a", 12)
    async with open_holder(nats_url, "w1", blocks=16) as one:
        one.put(chain)
        line = await asyncio.to_thread(enter, await ask_for_door(one))
        reply = await asyncio.to_thread(pin, line, "deep", chain[-1].key)
        assert isinstance(reply, frames.Denied) and reply.code == "full"
        assert one.agent.pool.statistics().pinned == 0
        assert await asyncio.to_thread(pin, line, "half", chain[7].key) == frames.Marks([1])
        assert await asyncio.to_thread(pin, line, "half", chain[7].key) == frames.Marks([1]), "renewed"
        assert isinstance(await asyncio.to_thread(pin, line, "more", chain[0].key), frames.Denied)
        assert one.agent.pool.statistics().pinned == 8
        line.close()


async def test_a_call_that_is_cancelled_twice_is_over_when_it_says_so(
        nats_url: str, eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def move(call: Call) -> None:
        begun.set()
        gate.wait(10)
        ended.set()

    monkeypatch.setattr("shared.store.client_directory.SETTLE_S", 0.05)
    async with Client.open(nats_url, SPEC) as client:
        call = asyncio.create_task(client._do(move, 0, 60.0))
        await eventually(begun.is_set)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0.01)
        assert not call.done(), "its thread may still copy into the caller's memory"
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ended.is_set()
