"""Pushes between two processes, one of which is killed, stopped or replaced. Run as a program, this is the peer."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Endpoint, Grant, Range
from shared.transfer import (
    GrantRefused,
    PeerGone,
    PushResult,
    Slice,
    TransferEngine,
    TransferSettings,
    TransferTimeout,
)
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]
NBYTES = 32 << 20
OP = OperationId("op")
ALL = Range(segment="kv", offset=0, length=NBYTES)
PATHS = ["shm", "tcp"]


@dataclass
class Peer:
    """A receiving process, and what it told us."""

    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    grant: Grant

    def ask(self, question: str) -> str:
        """One line out, one line back."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(question.encode() + b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().decode().strip()


@contextmanager
def peer_process(path: str, role: str = "receive", incarnation: str = "1") -> Iterator[Peer]:
    program = [sys.executable, "-m", "tests.integration.test_transfer_processes", role, path, incarnation]
    process = subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        endpoint, grant = msgspec.json.decode(process.stdout.readline(), type=tuple[Endpoint, Grant])
        yield Peer(process, endpoint, grant)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def engine_of(worker: str, settings: TransferSettings,
              incarnation: str = "1") -> AbstractAsyncContextManager[TransferEngine]:
    return TransferEngine.open(worker=WorkerId(worker), incarnation=Incarnation(incarnation), settings=settings)


@asynccontextmanager
async def own_engine(path: str) -> AsyncIterator[TransferEngine]:
    async with engine_of("a", TransferSettings(paths=(path,), silence_s=0.2)) as engine:
        buffer = engine.register("kv", NBYTES).buffer
        buffer[:] = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8).data
        yield engine


def blocks(size: int) -> list[Slice]:
    return [Slice("kv", offset, Range(segment="kv", offset=offset, length=size)) for offset in range(0, NBYTES, size)]


@pytest.mark.parametrize("path", PATHS)
async def test_bytes_cross_processes(path: str) -> None:
    with peer_process(path) as peer:
        async with own_engine(path) as engine:
            result = await engine.push(peer.endpoint, blocks(100_000)[:-1], peer.grant, timeout_s=30)
            assert result.ok and result.path == path
            sent = result.nbytes
            digest = hash_of(engine._segments["kv"].buffer[:sent])
            assert await asyncio.to_thread(peer.ask, f"digest {sent}") == digest
            assert await asyncio.to_thread(peer.ask, f"covered {sent}") == "True"


@pytest.mark.parametrize("path", PATHS)
async def test_a_peer_killed_in_the_middle_is_gone_at_once(path: str) -> None:
    with peer_process(path) as peer:
        async with own_engine(path) as engine:
            arrived = 0

            async def push_until_it_fails() -> PushResult:
                nonlocal arrived
                while True:
                    result = await engine.push(peer.endpoint, blocks(1 << 20), peer.grant, timeout_s=30)
                    if not result.ok:
                        return result
                    arrived += 1

            pushing = asyncio.gather(*(push_until_it_fails() for _ in range(4)))
            await eventually(lambda: arrived, timeout_s=20)
            killed_s = time.monotonic()
            peer.process.kill()
            results = await asyncio.wait_for(pushing, 10)
            assert time.monotonic() - killed_s < 1.0
            assert all(isinstance(result.error, PeerGone) for result in results)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stopped_peer_costs_the_deadline_and_not_more(path: str) -> None:
    with peer_process(path) as peer:
        async with own_engine(path) as engine:
            assert (await engine.push(peer.endpoint, blocks(1 << 20)[:1], peer.grant)).ok
            peer.process.send_signal(signal.SIGSTOP)
            started_s = time.monotonic()
            result = await engine.push(peer.endpoint, blocks(1 << 20), peer.grant, timeout_s=0.5)
            assert time.monotonic() - started_s < 1.5
            assert isinstance(result.error, TransferTimeout)
            peer.process.send_signal(signal.SIGCONT)
            result = await engine.push(peer.endpoint, blocks(1 << 20), peer.grant, timeout_s=30)
            assert result.ok, "it came back: a new connection reaches it"


@pytest.mark.parametrize("path", PATHS)
async def test_a_peer_restarted_is_reached_again_and_refuses_the_grants_of_its_former_life(path: str) -> None:
    async with own_engine(path) as engine:
        former = None
        for life in range(3):
            with peer_process(path, incarnation=str(life)) as peer:
                if former is not None:
                    refused = await engine.push(peer.endpoint, blocks(1 << 20)[:1], former)
                    assert isinstance(refused.error, GrantRefused)
                assert (await engine.push(peer.endpoint, blocks(1 << 20)[:4], peer.grant)).ok
                former, endpoint = peer.grant, peer.endpoint
            gone = await engine.push(endpoint, blocks(1 << 20)[:1], former)
            assert isinstance(gone.error, PeerGone)


@pytest.mark.parametrize("path", PATHS)
async def test_release_outlives_a_sender_that_is_stopped_in_the_middle(path: str) -> None:
    """The receiver is here, the sender over there; TCP cuts it off, shared memory waits until it is dead."""
    with peer_process(path, role="send") as peer:
        async with engine_of("b", TransferSettings(paths=(path,))) as engine:
            engine.register("kv", NBYTES)
            grant = engine.grant(OP, [ALL], ttl_s=60)
            assert peer.process.stdin is not None
            peer.process.stdin.write(msgspec.json.encode((engine.endpoint, grant)) + b"\n")
            peer.process.stdin.flush()

            def caught_writing() -> bool:
                """Stops the sender; lets it go on when no claim was in progress just then."""
                os.kill(peer.process.pid, signal.SIGSTOP)
                if engine._ledger.overdue(float("inf")):
                    return True
                os.kill(peer.process.pid, signal.SIGCONT)
                return False

            await eventually(lambda: engine.received_bytes(OP) > 0, timeout_s=20)
            await eventually(caught_writing, timeout_s=20)
            release = asyncio.create_task(engine.release(OP))
            await eventually(lambda: release.done() or engine.statistics().dropped_connections.get("deadline", 0))
            if path == "shm" and not release.done():
                assert engine._ledger.overdue(float("inf")), "a stopped sender may still hold the pen"
                peer.process.kill()
            await asyncio.wait_for(release, 5)
            engine.grant(OperationId("next"), [ALL], ttl_s=1)


async def test_two_hosts_on_one_machine_use_tcp() -> None:
    with peer_process("tcp") as peer:
        elsewhere = TransferSettings(host_id="elsewhere")
        async with engine_of("a", elsewhere) as engine:
            engine.register("kv", NBYTES)
            result = await engine.push(peer.endpoint, blocks(1 << 20)[:2], peer.grant)
            assert result.ok and result.path == "tcp"


def hash_of(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


async def receive(path: str, incarnation: str) -> None:
    """Grants everything, tells how to reach it, answers questions until its input ends."""
    async with engine_of("b", TransferSettings(paths=(path,)), incarnation) as engine:
        buffer = engine.register("kv", NBYTES).buffer
        say(msgspec.json.encode((engine.endpoint, engine.grant(OP, [ALL], ttl_s=600))))
        while line := await asyncio.to_thread(sys.stdin.readline):
            question, size = line.split()
            if question == "digest":
                say(hash_of(buffer[:int(size)]).encode())
            else:
                say(str(engine.covered(OP, Range(segment="kv", offset=0, length=int(size)))).encode())


async def send(path: str) -> None:
    """Pushes to whoever is named on the input, again and again, with a short deadline."""
    async with own_engine(path) as engine:
        say(msgspec.json.encode((engine.endpoint, engine.grant(OP, [ALL], ttl_s=1))))
        line = await asyncio.to_thread(sys.stdin.buffer.readline)
        endpoint, grant = msgspec.json.decode(line, type=tuple[Endpoint, Grant])
        while True:
            await engine.push(endpoint, blocks(8 << 20), grant, timeout_s=0.5)


def say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _, role, path, incarnation = sys.argv
    # Whatever happens to the test, its peer does not outlive it for long.
    threading.Timer(120, os._exit, [1]).start()
    asyncio.run(receive(path, incarnation) if role == "receive" else send(path))
