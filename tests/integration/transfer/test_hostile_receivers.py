"""Receivers that greet like one and then answer with nonsense: every push ends, and the engine goes on."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Endpoint, Grant, Range
from shared.transfer import Slice, TransferEngine, TransferSettings, frames, host_id
from shared.transfer.addresses import join_address
from shared.transfer.channel import Closed
from shared.transfer.wire import Connection
from tests.support.frame_fuzz import Mutator
from tests.support.transfer_peer import peer

PUSHES = max(100, int(os.environ.get("FUZZ_INPUTS", "50000")) // 100)
NBYTES = 64 << 10
OP = OperationId("op")
PATHS = ["shm", "tcp"]
ALL = Range(segment="kv", offset=0, length=NBYTES)


class Trap:
    """Answers each connection in its own wrong way; all chance is seeded."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._chance = random.Random(6)
        self._mutator = Mutator(self._chance)

    def run(self) -> None:
        """Until the listener is shut down."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(5.0)
            connection = Connection(sock)
            try:
                self._betray(connection, sock)
            except (OSError, Closed, frames.FrameError):
                pass  # the sender had enough
            finally:
                connection.close()

    def _betray(self, connection: Connection, sock: socket.socket) -> None:
        chance = self._chance
        connection.receive()
        welcome = frames.encode(frames.Welcome("t", "1", chance.random() < 0.5))
        if chance.random() < 0.2:
            sock.sendall(self._mutator.spoilt(welcome))
            return
        sock.sendall(welcome)
        claim = connection.receive()
        assert isinstance(claim, frames.Claim)
        answers = [
            frames.encode(frames.Ack(claim.id + chance.choice((0, 0, 1, 2**40)), "no" * chance.randrange(2),
                                     [chance.choice((0, 1, 511, -1))] * chance.randrange(3))),
            self._mutator.frame(),
            self._mutator.spoilt(frames.encode(frames.Ack(claim.id))),
            chance.randbytes(chance.randrange(100)),
            b"",
        ]
        for _ in range(chance.randrange(4)):
            sock.sendall(chance.choice(answers))


@contextmanager
def trap(path: str, directory: Path) -> Iterator[Endpoint]:
    address = str(directory / "trap.sock")
    if path == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
        reached = {"tcp": join_address(*listener.getsockname()[:2])}
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        reached = {"shm": address}
    thread = threading.Thread(target=Trap(listener).run)
    thread.start()
    try:
        yield Endpoint(worker=WorkerId("t"), incarnation=Incarnation("1"), host=host_id(), **reached)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


@pytest.mark.parametrize("path", PATHS)
async def test_whatever_a_receiver_answers_every_push_ends_by_its_deadline(
        path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    settings = TransferSettings(paths=(path,), silence_s=0.05)
    grant = Grant(worker=WorkerId("t"), incarnation=Incarnation("1"), operation=OP, ranges=[ALL], expires_at_s=0.0,
                  token=b"token")
    slices = [Slice("kv", i << 10, Range(segment="kv", offset=i << 10, length=1 << 10)) for i in range(4)]
    async with TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("1"), settings=settings) as engine:
        engine.register("kv", NBYTES)
        ends: Counter[str] = Counter()
        with trap(path, tmp_path) as endpoint:
            for _ in range(PUSHES):
                async with asyncio.timeout(60):
                    result = await engine.push(endpoint, slices, grant, timeout_s=0.1, notify=b"note")
                ends[result.error.code if result.error else "ok"] += 1
        assert {"peer", "grant", "ok"} <= set(ends), "the trap answers in many ways"
        assert [record.getMessage() for record in caplog.records] == [], "nothing that nobody thought of"
        async with peer("b", settings) as b:
            await b.register("kv", NBYTES)
            assert (await engine.push(b.endpoint, slices, await b.grant(OP, ALL), timeout_s=10)).ok
