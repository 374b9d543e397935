"""One body over every path: copy, shm, tcp. Two engines in this process; the path is forced by settings."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.clock import Clock, ManualClock
from shared.errors import Bug, SettingError
from shared.ids import HostId, Incarnation, OperationId, WorkerId
from shared.messages import Endpoint, Grant, Range
from shared.transfer import (
    ChecksumMismatch,
    GrantRefused,
    Notification,
    PathFailed,
    PeerGone,
    Slice,
    TransferCancelled,
    TransferEngine,
    TransferSettings,
    TransferTimeout,
    frames,
    host_id,
)
from shared.transfer.addresses import host_clock_s, join_address, split_address
from shared.transfer.channel import Closed
from shared.transfer.verbs import nics
from shared.transfer.wire import Connection
from tests.support.eventually import eventually

NBYTES = 1 << 20
OP = OperationId("op")
RDMA = ["rdma"] if nics() else []
"""Where there is a device; ``tests/rdma`` runs this file where there is one."""
PATHS = ["copy", "shm", "tcp", *RDMA]
STREAMS = ["shm", "tcp", *RDMA]


@dataclass
class Pair:
    """A sender and a receiver with a segment ``kv`` each; the sender's is filled with noise."""

    sender: TransferEngine
    receiver: TransferEngine
    source: memoryview
    target: memoryview

    async def push(self, grant: Grant, *slices: tuple[int, int, int], timeout_s: float = 60.0) -> Any:
        """``slices``: (local offset, remote offset, length)."""
        return await self.sender.push(
            self.receiver.endpoint, [Slice("kv", local, of(remote, length)) for local, remote, length in slices],
            grant, timeout_s=timeout_s)

    def grant(self, *ranges: tuple[int, int], ttl_s: float = 60.0) -> Grant:
        """``ranges``: (offset, length)."""
        return self.receiver.grant(OP, [of(offset, length) for offset, length in ranges], ttl_s=ttl_s)

    def covered(self, offset: int, length: int) -> bool:
        return self.receiver.covered(OP, of(offset, length))


def of(offset: int, length: int) -> Range:
    return Range(segment="kv", offset=offset, length=length)


@asynccontextmanager
async def opened(path: str, *, nbytes: int = NBYTES, clock: Clock | None = None,
                 **sender_settings: Any) -> AsyncIterator[Pair]:
    """Two engines that can only use ``path``; a busy machine has time for what is not given a deadline."""
    patient = {"checksums": "on", "connect_timeout_s": 60.0, "min_timeout_s": 60.0}
    only = TransferSettings(paths=(path,), **{**patient, **sender_settings})
    receiving = TransferSettings(paths=(path,))
    async with (
        TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=only) as sender,
        TransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"), settings=receiving,
                            clock=clock) as receiver,
    ):
        source, target = sender.register("kv", nbytes).buffer, receiver.register("kv", nbytes).buffer
        source[:] = np.random.default_rng(7).integers(1, 256, nbytes, dtype=np.uint8).data
        yield Pair(sender, receiver, source, target)


class RawSender:
    """Speaks the protocol by hand, so that a test can stop in the middle of it."""

    def __init__(self, pair: Pair, path: str) -> None:
        self.endpoint = pair.receiver.endpoint
        self.path = path
        self.connection = Connection(dial(self.endpoint, path), takes_descriptors=path == "shm")
        self.connection.set_timeout(5.0)
        self.connection.send(frames.Hello("raw", self.endpoint.worker, self.endpoint.incarnation, self.endpoint.host,
                                          host_clock_s()))
        assert isinstance(self.read(), frames.Welcome)

    def begin(self, grant: Grant, length: int, *, timeout_ms: int = 60_000) -> None:
        """Becomes a writer of ``[0, length)`` over TCP and stalls in the middle of the payload."""
        half = np.full(length // 2, 9, dtype=np.uint8)
        self.connection.send(frames.Write(1, grant.operation, grant.incarnation, grant.token, timeout_ms,
                                          [frames.Span("kv", 0, length)], None, [0]), [half])

    def read(self) -> frames.Body:
        return self.connection.receive()

    def close(self) -> None:
        self.connection.close()


def dial(endpoint: Endpoint, path: str) -> socket.socket:
    if path in ("tcp", "rdma"):
        return socket.create_connection(split_address(getattr(endpoint, path)), timeout=5)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect(endpoint.shm)
    return sock


@contextmanager
def raw_sender(pair: Pair, path: str) -> Iterator[RawSender]:
    raw = RawSender(pair, path)
    try:
        yield raw
    finally:
        raw.close()


# -- what arrives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_bytes_arrive_where_they_were_sent_and_nowhere_else(path: str) -> None:
    async with opened(path) as pair:
        result = await pair.push(pair.grant((1000, 5000)), (0, 1000, 3000), (10_000, 4000, 2000))
        assert result.ok and result.path == path and result.nbytes == 5000 and result.arrived == 2
        expected = bytearray(NBYTES)
        expected[1000:4000], expected[4000:6000] = pair.source[:3000], pair.source[10_000:12_000]
        assert pair.target == expected
        assert pair.covered(1000, 5000) and not pair.covered(999, 2)
        assert pair.receiver.received_bytes(OP) == 5000
        assert pair.sender.statistics().sent_bytes == {path: 5000}
        assert pair.receiver.statistics().received_bytes == {path: 5000}


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
async def test_any_slices_arrive(path: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 20_000), max_size=30))
    gaps = data.draw(st.lists(st.sampled_from([0, 0, 7, 4096]), min_size=len(lengths), max_size=len(lengths)))
    slices, local, remote = [], 0, 0
    for length, gap in zip(lengths, gaps, strict=True):
        slices.append((local, remote + gap, length))
        local, remote = local + length, remote + gap + length
    order = data.draw(st.permutations(slices))
    async with opened(path) as pair:
        result = await pair.push(pair.grant((0, NBYTES)), *order)
        assert result.ok and result.nbytes == sum(lengths)
        expected = bytearray(NBYTES)
        for start, stop, length in slices:
            expected[stop:stop + length] = pair.source[start:start + length]
        assert pair.target == expected
        assert pair.receiver.received_bytes(OP) == sum(lengths)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("proven", ["on", "off"])
async def test_parts_of_a_slice_arrive_and_nothing_between_them(path: str, proven: str) -> None:
    async with opened(path, checksums=proven) as pair:
        layer = Slice("kv", 100, of(5000, 1000), count=9, stride=4096)
        expected = bytearray(NBYTES)
        for i in range(9):
            expected[5000 + i * 4096:6000 + i * 4096] = pair.source[100 + i * 4096:1100 + i * 4096]
        grant = pair.grant(*((5000 + i * 4096, 1000) for i in range(9)))
        result = await pair.sender.push(pair.receiver.endpoint, [layer], grant)
        assert result.ok and result.nbytes == 9000 and pair.target == expected
        assert pair.receiver.received_bytes(OP) == 9000
        assert all(pair.covered(5000 + i * 4096, 1000) for i in range(9)) and not pair.covered(5000, 1001)
        wider = Slice("kv", 100, of(5000, 1000), count=10, stride=4096)
        assert isinstance((await pair.sender.push(pair.receiver.endpoint, [wider], grant)).error, GrantRefused)


async def test_parts_that_overlap_or_leave_our_memory_are_a_bug() -> None:
    async with opened("copy") as pair:
        for bad in (Slice("kv", 0, of(0, 100), 2, 99), Slice("kv", 0, of(0, 100), 0, 100),
                    Slice("kv", 0, of(0, 100), 3, NBYTES // 2)):
            with pytest.raises(Bug):
                pair.sender.push(pair.receiver.endpoint, [bad], pair.grant((0, 100)))


@pytest.mark.parametrize("path", PATHS)
async def test_a_push_larger_than_a_batch_and_than_what_may_be_on_its_way(path: str) -> None:
    nbytes = 40 << 20
    async with opened(path, nbytes=nbytes, max_inflight=1 << 20) as pair:
        result = await pair.push(pair.grant((0, nbytes)), (0, 0, nbytes), timeout_s=60)
        assert result.ok and result.nbytes == nbytes
        assert pair.source == pair.target and pair.covered(0, nbytes)


@pytest.mark.parametrize("path", PATHS)
async def test_many_pushes_at_once_share_a_connection(path: str) -> None:
    async with opened(path) as pair:
        grant = pair.grant((0, NBYTES))
        results = await asyncio.gather(*(
            pair.push(grant, (i * 1024, i * 1024, 512), (i * 1024 + 512, i * 1024 + 512, 512)) for i in range(1024)))
        assert all(result.ok for result in results)
        assert pair.source == pair.target
        assert pair.receiver.statistics().connections == (0 if path == "copy" else 1)


@pytest.mark.parametrize("path", PATHS)
async def test_a_push_of_nothing_is_fine(path: str) -> None:
    async with opened(path) as pair:
        grant = pair.grant((0, 10))
        assert (await pair.push(grant)).ok
        assert (await pair.push(grant, (0, 0, 0))).ok


@pytest.mark.parametrize("path", PATHS)
async def test_covered_follows_what_has_arrived(path: str) -> None:
    async with opened(path) as pair:
        grant = pair.grant((0, 300))
        await pair.push(grant, (0, 0, 100), (200, 200, 100))
        assert pair.covered(0, 100) and pair.covered(250, 50) and not pair.covered(0, 300)
        assert pair.receiver.received_bytes(OP) == 200
        await pair.push(grant, (100, 100, 100))
        assert pair.covered(0, 300)
        await pair.receiver.release(OP)
        assert not pair.covered(0, 100) and pair.receiver.received_bytes(OP) == 0


# -- what must not arrive ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_a_flipped_byte_fails_its_slice_and_no_other(path: str) -> None:
    async with opened(path, corrupt_every=3, checksums="auto") as pair:
        result = await pair.push(pair.grant((0, 5000)), *((i * 1000, i * 1000, 1000) for i in range(5)))
        assert [type(status.error) for status in result.slices] == [
            type(None), type(None), ChecksumMismatch, type(None), type(None)]
        assert result.arrived == 2 and result.nbytes == 4000
        assert pair.covered(0, 2000) and not pair.covered(2000, 1) and pair.covered(3000, 2000)
        assert pair.receiver.statistics().corrupt_spans == 1
        assert pair.sender.statistics().failures == {"checksum": 1}


def forged(grant: Grant) -> Grant:
    return msgspec.structs.replace(grant, token=b"\0" * 32)


def of_a_former_life(grant: Grant) -> Grant:
    return msgspec.structs.replace(grant, incarnation=Incarnation("b0"))


def of_another_operation(grant: Grant) -> Grant:
    return msgspec.structs.replace(grant, operation=OperationId("other"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("spoil", [forged, of_a_former_life, of_another_operation])
async def test_a_spoilt_grant_is_refused_and_memory_untouched(path: str, spoil: Callable[[Grant], Grant]) -> None:
    async with opened(path) as pair:
        grant = pair.grant((0, 1000))
        result = await pair.push(spoil(grant), (0, 0, 500), (500, 500, 500))
        assert [type(status.error) for status in result.slices] == [GrantRefused] * 2
        assert pair.target == bytes(NBYTES) and not pair.covered(0, 1)
        assert pair.receiver.statistics().refused_claims == 1
        assert (await pair.push(grant, (0, 0, 500))).ok, "a refusal must not spoil the connection"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("span", [(0, 2000), (999, 2), (1000, 1), (NBYTES - 1, 1), (NBYTES, 1), (2**40, 10)])
async def test_bytes_outside_the_grant_are_refused(path: str, span: tuple[int, int]) -> None:
    async with opened(path) as pair:
        wider = msgspec.structs.replace(pair.grant((0, 1000)), ranges=[of(*span)])
        result = await pair.push(wider, (0, *span))
        assert isinstance(result.error, GrantRefused) and result.nbytes == 0
        assert pair.target == bytes(NBYTES)


@pytest.mark.parametrize("path", PATHS)
async def test_an_expired_grant_is_refused(path: str) -> None:
    clock = ManualClock()
    async with opened(path, clock=clock) as pair:
        grant = pair.grant((0, 1000), ttl_s=5)
        clock.advance(4.9)
        assert (await pair.push(grant, (0, 0, 10))).ok
        clock.advance(0.1)
        result = await pair.push(msgspec.structs.replace(grant, expires_at_s=1e12), (0, 0, 20))
        assert isinstance(result.error, GrantRefused) and "expired" in str(result.error)


@pytest.mark.parametrize("path", PATHS)
async def test_a_released_grant_stays_refused_even_when_the_same_is_granted_again(path: str) -> None:
    async with opened(path) as pair:
        former = pair.grant((0, 1000))
        assert (await pair.push(former, (0, 0, 10))).ok
        await pair.receiver.release(OP)
        assert isinstance((await pair.push(former, (0, 0, 10))).error, GrantRefused)
        current = pair.grant((0, 1000))
        assert isinstance((await pair.push(former, (0, 0, 10))).error, GrantRefused)
        assert (await pair.push(current, (0, 0, 10))).ok


async def test_slices_of_memory_that_is_not_ours_are_a_bug() -> None:
    async with opened("copy") as pair:
        grant = pair.grant((0, 1000))
        for bad in [(-1, 0, 10), (NBYTES - 5, 0, 10)]:
            with pytest.raises(Bug):
                await pair.push(grant, bad)


# -- release ----------------------------------------------------------------------------------------------------


async def test_release_waits_for_a_writer_in_flight() -> None:
    async with opened("tcp") as pair:
        grant = pair.grant((0, 1000))
        with raw_sender(pair, "tcp") as raw:
            raw.begin(grant, 1000)
            await eventually(lambda: pair.receiver._ledger.overdue(float("inf")))
            release = asyncio.create_task(pair.receiver.release(OP))
            assert isinstance((await pair.push(grant, (0, 0, 10))).error, GrantRefused), "no new writer"
            assert not release.done()
        await asyncio.wait_for(release, 30)
        pair.receiver.grant(OperationId("next"), [of(0, 1000)], ttl_s=1)


async def test_a_writer_past_its_deadline_is_cut_off() -> None:
    async with opened("tcp") as pair:
        grant = pair.grant((0, 1000))
        with raw_sender(pair, "tcp") as raw:
            raw.begin(grant, 1000, timeout_ms=50)
            await eventually(lambda: pair.receiver.statistics().dropped_connections == {"deadline": 1})
            await asyncio.wait_for(pair.receiver.release(OP), 30)
            with pytest.raises((Closed, ConnectionError)):
                raw.read()


async def test_a_writer_that_dies_leaves_nothing_covered() -> None:
    async with opened("tcp") as pair:
        grant = pair.grant((0, 1000))
        assert (await pair.push(grant, (0, 0, 1000))).ok and pair.covered(0, 1000)
        with raw_sender(pair, "tcp") as raw:
            raw.begin(grant, 500)
            await eventually(lambda: not pair.covered(0, 500))
            assert pair.covered(500, 500)
        await eventually(lambda: not pair.receiver._ledger.overdue(float("inf")))
        assert not pair.covered(0, 500) and pair.covered(500, 500)


# -- shared memory: the receiver copies, and believes nobody -------------------------------------------------------


def copy_claim(grant: Grant, *, attached: list[int], deadline_s: float, offset: int = 0) -> frames.Copy:
    return frames.Copy(1, grant.operation, grant.incarnation, grant.token, 60_000, [frames.Span("kv", 0, 100)], None,
                       [], [frames.Source(5, offset)], attached, deadline_s)


async def test_what_was_copied_after_the_senders_deadline_does_not_count() -> None:
    async with opened("shm") as pair:
        grant, memory = pair.grant((0, 100)), pair.sender._segments["kv"]
        with raw_sender(pair, "shm") as raw:
            late = copy_claim(grant, attached=[5], deadline_s=host_clock_s() - 1e-3)
            raw.connection.send(late, descriptors=[memory.fd])
            answer = await asyncio.to_thread(raw.read)
            assert isinstance(answer, frames.Ack) and "deadline" in answer.refused
            assert not pair.covered(0, 1)
            raw.connection.send(copy_claim(grant, attached=[], deadline_s=host_clock_s() + 60))
            assert await asyncio.to_thread(raw.read) == frames.Ack(1)
            assert pair.covered(0, 100) and pair.target[:100] == pair.source[:100]


@pytest.mark.parametrize("wrong", ["no descriptor", "unknown memory", "beyond its end", "could shrink"])
async def test_memory_that_was_not_handed_over_costs_the_connection(wrong: str) -> None:
    async with opened("shm") as pair:
        grant, memory = pair.grant((0, 100)), pair.sender._segments["kv"]
        loose = os.memfd_create("loose")
        os.ftruncate(loose, NBYTES)
        with raw_sender(pair, "shm") as raw:
            raw.connection.send(
                copy_claim(grant, attached=[] if wrong == "unknown memory" else [5], deadline_s=host_clock_s() + 60,
                           offset=NBYTES - 99 if wrong == "beyond its end" else 0),
                descriptors={"beyond its end": [memory.fd], "could shrink": [loose]}.get(wrong, []))
            with pytest.raises((Closed, ConnectionError)):
                await asyncio.to_thread(raw.read)
        os.close(loose)
        await eventually(lambda: not pair.receiver._ledger.overdue(float("inf")))
        assert pair.target == bytes(NBYTES) and not pair.covered(0, 1)
        assert (await pair.push(grant, (0, 0, 100))).ok


async def test_the_receivers_memory_is_never_handed_out() -> None:
    async with opened("shm") as pair:
        with raw_sender(pair, "shm") as raw:
            raw.connection.send(copy_claim(forged(pair.grant((0, 100))), attached=[], deadline_s=host_clock_s() + 60))
            assert isinstance(await asyncio.to_thread(raw.read), frames.Ack)
            assert not raw.connection.descriptors


async def test_a_sender_with_another_clock_is_sent_away_and_reached_by_tcp() -> None:
    async with opened("shm") as pair:
        connection = Connection(dial(pair.receiver.endpoint, "shm"))
        connection.send(frames.Hello("raw", "b", "b1", pair.receiver.endpoint.host, host_clock_s() - 3600))
        with pytest.raises((Closed, ConnectionError)):
            await asyncio.to_thread(connection.receive)
        connection.close()
        assert pair.receiver.statistics().dropped_connections == {"protocol": 1}


# -- peers that are not what they seem ----------------------------------------------------------------------------


HELLO = frames.encode(frames.Hello("x", "b", "b1", host_id(), host_clock_s()))
GARBAGE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "huge length": struct.pack("!4sBBHI", b"MBTX", frames.VERSION, 1, 0, 2**32 - 1),
    "huge length after hello": HELLO + struct.pack("!4sBBHI", b"MBTX", frames.VERSION, 3, 0, 2**31),
    "former version": struct.pack("!4sBBHI", b"MBTX", 1, 1, 0, 4),
    "write before hello": frames.encode(frames.Write(1, "op", "b1", b"t", 10, [frames.Span("kv", 0, 1)], None, [])),
    "hello of nonsense": struct.pack("!4sBBHI", b"MBTX", frames.VERSION, 1, 0, 4) + b"\xff\xff\xff\xff",
    "answer instead of question": HELLO + frames.encode(frames.Ack(1)),
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_costs_its_sender_the_connection_and_hurts_nobody(path: str, garbage: bytes) -> None:
    async with opened(path) as pair:
        grant = pair.grant((0, 1000))
        assert (await pair.push(grant, (0, 0, 100))).ok
        with dial(pair.receiver.endpoint, path) as sock:
            sock.sendall(garbage)
            await eventually(lambda: pair.receiver.statistics().dropped_connections == {"protocol": 1})
            await asyncio.to_thread(drained, sock)
        assert (await pair.push(grant, (0, 100, 100))).ok
        await eventually(lambda: pair.receiver.statistics().connections == 1)


def drained(sock: socket.socket) -> None:
    """Reads to the end of the stream; a reset is one, too."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass


@pytest.mark.parametrize("path", STREAMS)
async def test_a_connection_that_says_nothing_is_dropped(path: str) -> None:
    clock = ManualClock()
    async with opened(path, clock=clock) as pair:
        with dial(pair.receiver.endpoint, path) as sock:
            await eventually(lambda: pair.receiver.statistics().connections == 1)
            clock.advance(5.0)
            await asyncio.to_thread(drained, sock)
        assert pair.receiver.statistics().dropped_connections == {"deadline": 1}


@pytest.mark.parametrize("path", STREAMS)
async def test_connections_are_bounded(path: str) -> None:
    async with opened(path) as pair:
        pair.receiver._receiver._max_connections = 1
        assert (await pair.push(pair.grant((0, 10)), (0, 0, 10))).ok
        with dial(pair.receiver.endpoint, path) as sock:
            await asyncio.to_thread(drained, sock)
        assert pair.receiver.statistics().dropped_connections == {"full": 1}


@pytest.mark.parametrize("path", PATHS)
async def test_a_closed_peer_is_gone(path: str) -> None:
    async with opened(path) as pair:
        only = TransferSettings(paths=(path,))
        async with TransferEngine.open(worker=WorkerId("c"), incarnation=Incarnation("c1"), settings=only) as other:
            other.register("kv", 100)
            endpoint, grant = other.endpoint, other.grant(OP, [of(0, 100)], ttl_s=60)
            slices = [Slice("kv", 0, of(0, 100))]
            assert (await pair.sender.push(endpoint, slices, grant)).ok
        result = await pair.sender.push(endpoint, slices, grant)
        expected = PathFailed if path == "copy" else PeerGone
        assert isinstance(result.error, expected) and result.error.peer == "c" and result.error.nbytes == 100


@pytest.mark.parametrize("path", STREAMS)
async def test_a_peer_that_came_back_is_reached_again_and_old_grants_are_void(path: str) -> None:
    only = TransferSettings(paths=(path,))
    async with opened(path) as pair:
        former = None
        for life in range(3):
            async with TransferEngine.open(worker=WorkerId("c"), incarnation=Incarnation(f"c{life}"),
                                           settings=only) as other:
                other.register("kv", 100)
                grant = other.grant(OP, [of(0, 100)], ttl_s=60)
                slices = [Slice("kv", 0, of(0, 100))]
                assert (await pair.sender.push(other.endpoint, slices, grant)).ok
                if former is not None:
                    result = await pair.sender.push(other.endpoint, slices, former)
                    assert isinstance(result.error, GrantRefused) and "incarnation" in str(result.error)
                former = grant
        assert len(pair.sender.router._links) == 1


@pytest.mark.parametrize("path", STREAMS)
async def test_another_process_on_the_address_is_noticed_before_anything_is_sent(path: str) -> None:
    async with opened(path) as pair:
        stranger = msgspec.structs.replace(pair.receiver.endpoint, worker=WorkerId("c"))
        grant = pair.grant((0, 100))
        result = await pair.sender.push(stranger, [Slice("kv", 0, of(0, 100))], grant)
        assert isinstance(result.error, PeerGone) and "b (incarnation b1) answers there" in str(result.error)


@pytest.mark.parametrize("path", STREAMS)
async def test_a_peer_that_never_answers_times_out_and_loses_its_connection(path: str) -> None:
    if path == "shm":
        address = f"/tmp/moonbus-silent-{os.getpid()}.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        address = join_address(*listener.getsockname()[:2])
    threads: list[socket.socket] = []

    def greet() -> None:
        sock, _ = listener.accept()
        threads.append(sock)
        connection = Connection(sock)
        connection.receive()
        connection.send(frames.Welcome("c", "c1"))

    thread = threading.Thread(target=greet)
    thread.start()
    try:
        async with opened(path, silence_s=0.1) as pair:
            silent = Endpoint(worker=WorkerId("c"), incarnation=Incarnation("c1"), host=host_id(), **{path: address})
            result = await pair.sender.push(silent, [Slice("kv", 0, of(0, NBYTES))], pair.grant((0, 10)),
                                            timeout_s=0.3)
            assert isinstance(result.error, TransferTimeout)
            link, = pair.sender.router._links.values()
            assert not link.connected
    finally:
        thread.join()
        for sock in [*threads, listener]:
            sock.close()
        if path == "shm":
            os.unlink(address)


# -- notifications, streams, cancelling ---------------------------------------------------------------------------


async def next_notification(engine: TransferEngine) -> Notification:
    async for notification in engine.notifications():
        return notification
    raise AssertionError("notifications never end")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("nbytes", [0, 100, 20 << 20], ids=["nothing else", "one batch", "many batches"])
async def test_a_notification_comes_when_everything_is_there(path: str, nbytes: int) -> None:
    async with opened(path, nbytes=max(nbytes, 1)) as pair:
        push = pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, nbytes))], pair.grant((0, nbytes)),
                                notify=b"layer 3")
        note = await asyncio.wait_for(next_notification(pair.receiver), 30)
        assert pair.covered(0, nbytes), "commit before notify"
        assert note == Notification(OP, WorkerId("a"), b"layer 3")
        assert (await push).ok


@pytest.mark.parametrize("path", PATHS)
async def test_a_push_that_fails_in_part_notifies_nobody(path: str) -> None:
    async with opened(path) as pair:
        grant = pair.grant((0, 100))
        result = await pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(50, 100))], grant, notify=b"no")
        assert isinstance(result.error, GrantRefused)
        assert (await pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, 10))], grant, notify=b"yes")).ok
        assert (await asyncio.wait_for(next_notification(pair.receiver), 30)).data == b"yes"


@pytest.mark.parametrize("path", PATHS)
async def test_notifications_that_nobody_takes_are_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.transfer.engine.MAX_NOTIFICATIONS", 2)
    async with opened(path) as pair:
        grant = pair.grant((0, 10))
        results = [await pair.sender.push(pair.receiver.endpoint, (), grant, notify=b"n") for _ in range(3)]
        assert [result.ok for result in results] == [True, True, False]
        assert isinstance(results[2].note_error, GrantRefused) and "nobody takes" in str(results[2].error)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_of_layers_has_one_completion(path: str) -> None:
    async with opened(path) as pair:
        stream = pair.sender.stream(pair.receiver.endpoint, pair.grant((0, 30_000)), timeout_s=10)
        for layer in range(30):
            stream.push([Slice("kv", layer * 1000, of(layer * 1000, 1000))])
        result = await stream.close(notify=b"all layers")
        assert result.ok and result.nbytes == 30_000 and result.path == path and len(result.slices) == 30
        assert (await asyncio.wait_for(next_notification(pair.receiver), 30)).data == b"all layers"
        assert pair.covered(0, 30_000)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_with_a_bad_layer_says_which_and_notifies_nobody(path: str) -> None:
    async with opened(path) as pair:
        stream = pair.sender.stream(pair.receiver.endpoint, pair.grant((0, 2000)), timeout_s=10)
        for layer in range(3):
            stream.push([Slice("kv", layer * 1000, of(layer * 1000, 1000))])
            await asyncio.sleep(0)  # the next layer becomes ready in a later turn of the loop
        assert isinstance(await asyncio.wait_for(stream.broken, 30), GrantRefused)
        stream.push([Slice("kv", 0, of(0, 1000))])
        result = await stream.close(notify=b"no")
        assert [type(status.error) for status in result.slices] == [type(None), type(None), GrantRefused, GrantRefused]
        assert result.note_error is None and not pair.receiver._notifications


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_sends_damaged_slices_again(path: str) -> None:
    async with opened(path, corrupt_every=4) as pair:
        stream = pair.sender.stream(pair.receiver.endpoint, pair.grant((0, 10_000)))
        for layer in range(10):
            stream.push([Slice("kv", layer * 1000, of(layer * 1000, 1000))])
        result = await stream.close()
        assert result.ok and result.nbytes == 10_000 and pair.covered(0, 10_000)
        assert pair.sender.statistics().failures["checksum"] > 0


async def test_a_stream_that_is_damaged_again_and_again_gives_up() -> None:
    async with opened("tcp", corrupt_every=1) as pair:
        stream = pair.sender.stream(pair.receiver.endpoint, pair.grant((0, 1000)))
        stream.push([Slice("kv", 0, of(0, 1000))])
        assert isinstance((await stream.close()).error, ChecksumMismatch)
        assert pair.sender.statistics().failures == {"checksum": 3}


async def test_a_stopped_stream_sends_nothing_more() -> None:
    async with opened("tcp", nbytes=16 << 20) as pair:
        stream = pair.sender.stream(pair.receiver.endpoint, pair.grant((0, 16 << 20)))
        for i in range(8):
            stream.push([Slice("kv", i << 21, of(i << 21, 2 << 20))])
        await stream.stop()
        arrived = pair.receiver.received_bytes(OP)
        assert arrived < 16 << 20 and not pair.receiver._ledger.overdue(float("inf"))


@pytest.mark.parametrize("path", PATHS)
async def test_a_push_tells_what_became_of_each_slice(path: str) -> None:
    async with opened(path) as pair:
        push = pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, 10)), Slice("kv", 0, of(500, 10))],
                                pair.grant((0, 100)))
        result = await push
        assert push.done and push.result is result and await push is result
        assert all(status.path == path and 0 < status.seconds <= result.seconds for status in result.slices)
        refused = result.slices[1].error
        assert isinstance(refused, GrantRefused) and (refused.peer, refused.segment, refused.nbytes) == ("b", "kv", 10)


@pytest.mark.parametrize("path", PATHS)
async def test_a_cancelled_push_ends_once_nothing_of_it_is_on_its_way(path: str) -> None:
    nbytes = 64 << 20
    async with opened(path, nbytes=nbytes, max_inflight=1 << 20, checksums="off") as pair:
        push = pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, nbytes))], pair.grant((0, nbytes)))
        await eventually(lambda: pair.receiver.received_bytes(OP) or push.done)
        push.cancel()
        result = await asyncio.wait_for(push, 30)
        pair.source[:] = bytes(nbytes)
        assert result.ok or isinstance(result.error, TransferCancelled)
        assert not pair.receiver._ledger.overdue(float("inf")), "nobody writes any more"
        assert pair.receiver.received_bytes(OP) == nbytes - bytes(pair.target).count(0)


# -- memory of every kind -----------------------------------------------------------------------------------------


def memory_of(kind: str, nbytes: int) -> Any:
    match kind:
        case "numpy":
            return np.zeros((nbytes // 8,), dtype=np.float64)
        case "bytearray":
            return bytearray(nbytes)
        case "memoryview":
            return memoryview(bytearray(nbytes))
        case "tensor":
            torch = pytest.importorskip("torch")
            return torch.zeros(nbytes // 2, dtype=torch.bfloat16)
    fd = os.memfd_create("caller")
    os.ftruncate(fd, nbytes)
    return fd


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["numpy", "bytearray", "memoryview", "tensor", "memfd"])
async def test_memory_of_every_kind_is_pushed_from_and_into(path: str, kind: str) -> None:
    nbytes = 6 << 20
    async with opened(path) as pair:
        here, there = memory_of(kind, nbytes), memory_of(kind, nbytes)
        source = pair.sender.register("mine", memory=here)
        target = pair.receiver.register("mine", memory=there)
        source.array[:] = np.random.default_rng(3).integers(0, 256, nbytes, dtype=np.uint8)
        span = Range(segment="mine", offset=8, length=nbytes - 8)
        grant = pair.receiver.grant(OP, [span], ttl_s=60)
        result = await pair.sender.push(pair.receiver.endpoint, [Slice("mine", 8, span)], grant)
        assert result.ok and result.path == path
        assert not target.array[:8].any() and bytes(target.array[8:]) == bytes(source.array[8:])
        for memory in (here, there):
            if isinstance(memory, int):
                os.close(memory)


@pytest.mark.parametrize("memory", [b"read only", np.zeros((4, 4))[:, 1], bytearray(), "text", 1 << 20],
                         ids=["read-only", "strided", "empty", "text", "no descriptor"])
async def test_memory_that_cannot_serve_is_a_bug(memory: Any) -> None:
    async with opened("copy") as pair:
        with pytest.raises(Bug, match="memory of segment mine"):
            pair.sender.register("mine", memory=memory)
        with pytest.raises(Bug, match="as many as it has"):
            pair.sender.register("mine", 20, memory=bytearray(10))


async def test_a_closed_engine_takes_nothing_more() -> None:
    async with opened("copy") as pair:
        pass
    with pytest.raises(Bug, match="closed"):
        pair.sender.register("mine", 10)
    with pytest.raises(Bug, match="closed"):
        pair.grant((0, 10))


@pytest.mark.parametrize("path", PATHS)
async def test_unregistered_memory_is_let_go_and_its_name_means_something_new(path: str) -> None:
    async with opened(path) as pair:
        former = pair.grant((0, 1000))
        assert (await pair.push(former, (0, 0, 1000))).ok
        await pair.receiver.unregister("kv")
        assert isinstance((await pair.push(former, (0, 0, 1000))).error, GrantRefused)
        assert not pair.covered(0, 10)
        fresh = pair.receiver.register("kv", 2000)
        assert isinstance((await pair.push(former, (0, 0, 1000))).error, GrantRefused), "a grant of the former memory"
        await pair.sender.unregister("kv")
        pair.sender.register("kv", 2000).array[:] = 5
        await pair.receiver.release(OP)
        assert (await pair.push(pair.grant((0, 2000)), (0, 0, 2000))).ok
        assert bytes(fresh.array) == bytes([5]) * 2000, "bytes of the sender's new memory, not of the old one"


async def test_unregistering_memory_cuts_off_who_writes_into_it() -> None:
    async with opened("tcp") as pair:
        with raw_sender(pair, "tcp") as raw:
            raw.begin(pair.grant((0, 1000)), 1000)
            await eventually(lambda: pair.receiver._ledger.overdue(float("inf")))
            await asyncio.wait_for(pair.receiver.unregister("kv"), 30)


async def test_huge_pages_are_used_or_done_without() -> None:
    wanted = TransferSettings(paths=("shm",), huge_pages=True)
    async with (
        TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=wanted) as sender,
        TransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"), settings=wanted) as receiver,
    ):
        sender.register("kv", 5000).array[:] = 7
        target = receiver.register("kv", 5000)
        assert target.nbytes == len(target.array) == 5000
        result = await sender.push(receiver.endpoint, [Slice("kv", 0, of(0, 5000))],
                                   receiver.grant(OP, [of(0, 5000)], ttl_s=60))
        assert result.ok and target.array.all()


async def test_an_engine_closes_without_waiting_for_a_peer_that_does_not_greet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mute = Endpoint(worker=WorkerId("c"), incarnation=Incarnation("c1"), host=HostId("far"),
                        tcp=join_address(*listener.getsockname()[:2]))
        async with asyncio.timeout(60), opened("tcp", connect_timeout_s=600.0) as pair:
            push = pair.sender.push(mute, [Slice("kv", 0, of(0, 10))], pair.grant((0, 10)), timeout_s=600)
            sock, _ = await asyncio.to_thread(listener.accept)
        assert isinstance((await push).error, PeerGone)
        sock.close()


async def test_what_follows_a_refused_batch_is_not_sent() -> None:
    nbytes = 64 << 20
    async with opened("tcp", nbytes=nbytes, max_inflight=1 << 20, checksums="off") as pair:
        result = await pair.push(forged(pair.grant((0, nbytes))), (0, 0, nbytes))
        assert all(isinstance(status.error, GrantRefused) for status in result.slices)
        assert pair.receiver.statistics().refused_claims < 8


async def test_a_connection_that_breaks_after_it_was_made_is_made_again() -> None:
    """The first one to the peer, not one that had stood idle."""
    nbytes = 64 << 20
    async with opened("tcp", nbytes=nbytes, max_inflight=1 << 20, checksums="off") as pair:
        push = pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, nbytes))], pair.grant((0, nbytes)))
        await eventually(lambda: pair.receiver.received_bytes(OP))
        for session in pair.receiver._receiver._sessions:
            session.end()
        assert (await push).ok and pair.source == pair.target


# -- choice of path ---------------------------------------------------------------------------------------------


async def test_the_best_path_is_taken_and_a_broken_one_is_left_in_the_same_push() -> None:
    any_path = TransferSettings(paths=("shm", "tcp"))
    async with (
        TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=any_path) as sender,
        TransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"), settings=any_path) as receiver,
    ):
        sender.register("kv", 100)
        receiver.register("kv", 100)
        grant, slices = receiver.grant(OP, [of(0, 100)], ttl_s=60), [Slice("kv", 0, of(0, 100))]
        broken = msgspec.structs.replace(receiver.endpoint, shm=receiver.endpoint.shm + ".gone")
        result = await sender.push(broken, slices, grant)
        assert result.ok and result.path == "tcp"
        result = await sender.push(broken, slices, grant)
        assert result.ok and result.path == "tcp"
        statistics = sender.statistics()
        assert statistics.failovers == {("shm", "tcp"): 1}, "the broken path is avoided for a while"
        assert statistics.sent_bytes["tcp"] == 200
        assert (await sender.push(receiver.endpoint, slices, grant)).ok


async def test_another_host_is_reached_by_tcp() -> None:
    here, there = TransferSettings(host_id="here"), TransferSettings(host_id="there", paths=("shm", "tcp"))
    async with (
        TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=here) as sender,
        TransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"), settings=there) as receiver,
    ):
        assert (sender.endpoint.host, receiver.endpoint.host) == (HostId("here"), HostId("there"))
        sender.register("kv", 100)
        receiver.register("kv", 100)
        result = await sender.push(receiver.endpoint, [Slice("kv", 0, of(0, 100))],
                                   receiver.grant(OP, [of(0, 100)], ttl_s=60))
        assert result.ok and result.path == "tcp"


async def test_no_common_path_says_why_for_each() -> None:
    async with opened("copy") as pair:
        far = Endpoint(worker=WorkerId("c"), incarnation=Incarnation("c1"), host=HostId("far"), tcp="h:1")
        result = await pair.sender.push(far, [Slice("kv", 0, of(0, 10))], pair.grant((0, 10)))
        assert isinstance(result.error, PathFailed) and "copy: another process" in str(result.error)


@pytest.mark.parametrize(("wrong", "name"), [
    ({"paths": ("pigeon",)}, "transfer_paths"),
    ({"host": "203.0.113.7"}, "transfer_host"),
    ({"socket_dir": "/tmp/" + "x" * 120}, "transfer_socket_dir"),
    ({"socket_dir": "/nowhere"}, "transfer_socket_dir"),
    ({"lanes": 0}, "transfer_lanes is '0'; expected `int` >= 1"),
    ({"checksums": "maybe"}, "transfer_checksums is 'maybe'; expected another one"),
])
async def test_wrong_settings_are_named(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingError, match=name):
        async with TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"),
                                       settings=TransferSettings(**wrong)):
            pass


# -- life -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_is_left_behind(path: str) -> None:
    async def once() -> None:
        async with opened(path) as pair:
            directory = Path(pair.receiver.endpoint.shm).parent if path == "shm" else None
            assert (await pair.push(pair.grant((0, NBYTES)), (0, 0, NBYTES))).ok
            await pair.push(forged(pair.grant((0, 10))), (0, 0, 10))
            del pair
        assert directory is None or not directory.exists()

    await once()
    gc.collect()  # what earlier tests left to be collected is not ours to count
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-")] == []


@pytest.mark.parametrize("path", PATHS)
async def test_closing_the_sender_ends_its_pushes(path: str) -> None:
    async with opened(path) as outer:
        only = TransferSettings(paths=(path,))
        async with TransferEngine.open(worker=WorkerId("c"), incarnation=Incarnation("c1"), settings=only) as closing:
            closing.register("kv", NBYTES)
            grant = outer.grant((0, NBYTES))
            pushes = [closing.push(outer.receiver.endpoint, [Slice("kv", 0, of(0, NBYTES))], grant) for _ in range(50)]
            await eventually(lambda: any(push.done for push in pushes))
        results = await asyncio.wait_for(asyncio.gather(*pushes), 30)
        assert all(result.ok or isinstance(result.error, PeerGone) for result in results)


@pytest.mark.parametrize("path", PATHS)
async def test_closing_the_receiver_ends_the_pushes_to_it(path: str) -> None:
    async with opened(path) as outer:
        only = TransferSettings(paths=(path,))
        async with TransferEngine.open(worker=WorkerId("c"), incarnation=Incarnation("c1"), settings=only) as closing:
            closing.register("kv", NBYTES)
            grant = closing.grant(OP, [of(0, NBYTES)], ttl_s=60)
            pushes = [outer.sender.push(closing.endpoint, [Slice("kv", 0, of(0, NBYTES))], grant) for _ in range(50)]
            await eventually(lambda: any(push.done for push in pushes))
            release = asyncio.create_task(closing.release(OP))
        results = await asyncio.wait_for(asyncio.gather(*pushes), 30)
        assert all(result.ok or isinstance(result.error, (PeerGone, PathFailed, GrantRefused)) for result in results)
        await asyncio.wait_for(release, 30)


async def test_a_cancelled_push_ends_at_once_and_the_next_one_works() -> None:
    async with opened("shm", nbytes=64 << 20) as pair:
        grant = pair.grant((0, 64 << 20))
        push = asyncio.create_task(pair.push(grant, (0, 0, 64 << 20)))
        await eventually(lambda: pair.receiver.statistics().connections or push.done())
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        assert (await pair.push(grant, (0, 0, 1000))).ok
        await asyncio.wait_for(pair.receiver.release(OP), 30)


def test_importing_the_engine_loads_no_torch() -> None:
    program = "import sys, shared.transfer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[2]).returncode == 0


def test_a_host_has_one_id() -> None:
    assert host_id() == host_id() != ""


@pytest.mark.parametrize("address", [("127.0.0.1", 80), ("::1", 8080), ("node-7.example", 1)])
def test_addresses_round_trip(address: tuple[str, int]) -> None:
    assert split_address(join_address(*address)) == address


def test_the_example_of_the_docs_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "transfer.md").read_text()
    example = text.split("```python\n", 1)[1].split("```", 1)[0]
    done = subprocess.run([sys.executable, "-c", example], check=False, capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (0, "shm b'hello'\n"), done.stderr
