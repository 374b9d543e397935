"""A transfer engine in a process of its own, driven by a test: one JSON line in, one JSON line out.

``async with peer("b", settings) as b:`` starts one. It can be killed, stopped and continued like any process, and
it can live in a network namespace. Run as a program, this is that process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import stat
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import psutil
import uvloop

from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Endpoint, Grant, Range
from shared.transfer import Slice, TransferEngine, TransferSettings
from shared.transfer.addresses import join_address
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]
LIFE_S = 150
"""No peer outlives its test for longer, whatever happens to the test."""

T = TypeVar("T")


class Register(msgspec.Struct, tag=True):
    """New memory; full of noise when there is a ``seed``."""

    name: str
    nbytes: int
    seed: int | None = None


class Fill(msgspec.Struct, tag=True):
    """Other noise into a segment."""

    name: str
    seed: int


class MakeGrant(msgspec.Struct, tag=True):
    """Answered by a :class:`Grant`."""

    operation: OperationId
    ranges: list[Range]
    ttl_s: float
    peer: WorkerId = WorkerId("")


class Unregister(msgspec.Struct, tag=True):
    """Answered once nobody uses the memory any more."""

    name: str


class Notes(msgspec.Struct, tag=True):
    """Answered by the :class:`Noted` of the notifications that came so far."""


class Release(msgspec.Struct, tag=True):
    """Answered once the operation is quiet."""

    operation: OperationId


class Received(msgspec.Struct, tag=True):
    """Answered by the bytes that arrived under ``operation``."""

    operation: OperationId


class Audit(msgspec.Struct, tag=True):
    """Answered by ``[[covered, sha256], ...]``, one a block of ``block_bytes`` of the segment."""

    operation: OperationId
    segment: str
    block_bytes: int


class Counters(msgspec.Struct, tag=True):
    """Answered by :class:`Counted`."""


class StartPush(msgspec.Struct, tag=True):
    """Begins a push; answered at once."""

    to: Endpoint
    slices: list[Slice]
    grant: Grant
    timeout_s: float


class EndPush(msgspec.Struct, tag=True):
    """Answered by the :class:`Pushed` of the push begun first of those that were not asked for."""


class Close(msgspec.Struct, tag=True):
    """Closes the engine, not the process."""


class Alive(msgspec.Struct, tag=True):
    """Answered by true."""


Command = (Register | Fill | Unregister | MakeGrant | Release | Received | Audit | Notes | Counters | StartPush
           | EndPush | Close | Alive)


class Said(msgspec.Struct):
    """What a test's notification says: these bytes of ``segment`` are there now."""

    segment: str
    offset: int
    length: int
    sha256: str


class Noted(msgspec.Struct):
    """A notification, and what was true in the moment when it was delivered."""

    operation: OperationId
    sender: WorkerId
    said: Said
    covered: bool
    same: bool
    """Had the memory the digest that the notification spoke of?"""


class Pushed(msgspec.Struct):
    """What became of a push, as far as it can leave a process."""

    error: str
    """Code of the first error; empty when all is well."""
    why: str
    nbytes: int
    seconds: float
    path: str


class Counted(msgspec.Struct):
    """What tests ask of :class:`shared.transfer.Statistics`."""

    refused_claims: int
    corrupt_spans: int
    dropped: dict[str, int]
    connections: int
    received_bytes: dict[str, int]


class Reply(msgspec.Struct):
    """``failure`` is what a command raised."""

    answer: Any = None
    failure: str = ""


class PeerDied(Exception):
    """The process ended, or its engine raised."""


class Peer:
    """The test's side. Its questions are asked one after the other."""

    def __init__(self, process: Process, worker: str) -> None:
        self._process = process
        self._asking = asyncio.Lock()
        self.worker = worker
        self.endpoint = Endpoint(worker=WorkerId(""), incarnation=Incarnation(""), host="")  # type: ignore[arg-type]

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def ask(self, command: Command, of: type[T]) -> T:
        """Raises :class:`PeerDied`."""
        async with self._asking:
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            await self._process.stdin.drain()
            return msgspec.convert(await self._read(), of)

    async def greeted(self) -> None:
        """Reads how to reach it: the first thing it says."""
        self.endpoint = msgspec.convert(await self._read(), Endpoint)

    async def register(self, name: str, nbytes: int, seed: int | None = None) -> None:
        """See :class:`Register`."""
        await self.ask(Register(name, nbytes, seed), type(None))

    async def fill(self, name: str, seed: int) -> None:
        """See :class:`Fill`."""
        await self.ask(Fill(name, seed), type(None))

    async def unregister(self, name: str) -> None:
        """See :class:`Unregister`."""
        await self.ask(Unregister(name), type(None))

    async def grant(self, operation: OperationId, *ranges: Range, ttl_s: float = 600.0, to: str = "") -> Grant:
        """Leave to write ``ranges``."""
        return await self.ask(MakeGrant(operation, list(ranges), ttl_s, WorkerId(to)), Grant)

    async def notes(self) -> list[Noted]:
        """See :class:`Notes`."""
        return await self.ask(Notes(), list[Noted])

    async def release(self, operation: OperationId) -> None:
        """See :class:`Release`."""
        await self.ask(Release(operation), type(None))

    async def received(self, operation: OperationId) -> int:
        """See :class:`Received`."""
        return await self.ask(Received(operation), int)

    async def audit(self, operation: OperationId, segment: str, block_bytes: int) -> list[tuple[bool, str]]:
        """See :class:`Audit`."""
        return await self.ask(Audit(operation, segment, block_bytes), list[tuple[bool, str]])

    async def counters(self) -> Counted:
        """See :class:`Counters`."""
        return await self.ask(Counters(), Counted)

    async def start_push(self, to: Endpoint, slices: Sequence[Slice], grant: Grant, timeout_s: float) -> None:
        """See :class:`StartPush`."""
        await self.ask(StartPush(to, list(slices), grant, timeout_s), type(None))

    async def end_push(self) -> Pushed:
        """See :class:`EndPush`; nothing else can be asked meanwhile."""
        return await self.ask(EndPush(), Pushed)

    async def close_engine(self) -> None:
        """See :class:`Close`."""
        await self.ask(Close(), type(None))

    async def alive(self) -> bool:
        """Does the process answer?"""
        return await self.ask(Alive(), bool)

    async def stop(self) -> None:
        """SIGSTOP; returns once every thread stands still."""
        self._process.send_signal(signal.SIGSTOP)
        await eventually(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    async def buried(self) -> None:
        """Returns once the process is gone."""
        await self._process.wait()

    def memory_bytes(self) -> int:
        """Its private memory; segments are not part of it."""
        usage = psutil.Process(self.pid).memory_info()
        return int(usage.rss - usage.shared)

    def descriptors(self) -> int:
        """How many descriptors it has open."""
        return int(psutil.Process(self.pid).num_fds())

    async def _read(self) -> Any:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise PeerDied(f"peer {self.worker} ended with {await self._process.wait()}")
        reply = msgspec.json.decode(line, type=Reply)
        if reply.failure:
            raise PeerDied(f"peer {self.worker}: {reply.failure}")
        return reply.answer


@asynccontextmanager
async def peer(worker: str, settings: TransferSettings, *, incarnation: str = "1",
               inside: Sequence[str] = ()) -> AsyncIterator[Peer]:
    """A running peer; ``inside`` is a command that runs another one, such as ``ip netns exec NAME``."""
    process = await asyncio.create_subprocess_exec(
        *inside, sys.executable, "-m", "tests.support.transfer_peer", worker, incarnation,
        msgspec.json.encode(settings).decode(), cwd=ROOT, stdin=PIPE, stdout=PIPE, limit=1 << 24)
    try:
        started = Peer(process, worker)
        await started.greeted()
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()


def cut_connections(address: str) -> int:
    """Ends this process's connections to ``address`` as a broken cable would, and says how many there were."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        with sock:
            try:
                reached = sock.getpeername()
                if reached == address or (isinstance(reached, tuple) and join_address(*reached[:2]) == address):
                    sock.shutdown(socket.SHUT_RDWR)
                    cut += 1
            except OSError:  # not connected, or not any more
                continue
    return cut


def digests(data: memoryview | bytes, block_bytes: int) -> list[str]:
    """sha256 of each block, as :class:`Audit` says it."""
    return [hashlib.sha256(data[start:start + block_bytes]).hexdigest() for start in range(0, len(data), block_bytes)]


def noise(nbytes: int, seed: int) -> bytes:
    """The same for the same seed, in every process."""
    return np.random.default_rng(seed).bytes(nbytes)


# -- the process ------------------------------------------------------------------------------------------------


class _Host:
    """Holds the engine and does as it is told."""

    def __init__(self, engine: TransferEngine, stack: AsyncExitStack) -> None:
        self._engine = engine
        self._stack = stack
        self._memory: dict[str, memoryview] = {}
        self._pushes: list[asyncio.Task[Pushed]] = []
        self._notes: list[Noted] = []
        self._listening = asyncio.create_task(self._listen())

    async def obey(self, command: Command) -> Any:
        """The answer."""
        engine = self._engine
        match command:
            case Register(name, nbytes, seed):
                self._memory[name] = engine.register(name, nbytes).buffer
                if seed is not None:
                    self._memory[name][:] = noise(nbytes, seed)
            case Fill(name, seed):
                self._memory[name][:] = noise(len(self._memory[name]), seed)
            case Unregister(name):
                del self._memory[name]
                await engine.unregister(name)
            case MakeGrant(operation, ranges, ttl_s, to):
                return engine.grant(operation, ranges, ttl_s=ttl_s, peer=to)
            case Notes():
                return self._notes
            case Release(operation):
                await engine.release(operation)
            case Received(operation):
                return engine.received_bytes(operation)
            case Audit(operation, segment, block_bytes):
                return self._audit(operation, segment, block_bytes)
            case Counters():
                counts = engine.statistics()
                return Counted(counts.refused_claims, counts.corrupt_spans, dict(counts.dropped_connections),
                               counts.connections, dict(counts.received_bytes))
            case StartPush():
                self._pushes.append(asyncio.create_task(self._push(command)))
            case EndPush():
                return await self._pushes.pop(0)
            case Close():
                self._listening.cancel()
                await self._stack.aclose()
            case Alive():
                return True
        return None

    async def _listen(self) -> None:
        async for note in self._engine.notifications():
            said = msgspec.json.decode(note.data, type=Said)
            covered = engine_covers(self._engine, note.operation, said.segment, said.offset, said.length)
            memory = self._memory[said.segment][said.offset:said.offset + said.length]
            same = hashlib.sha256(memory).hexdigest() == said.sha256
            self._notes.append(Noted(note.operation, note.sender, said, covered, same))

    def _audit(self, operation: OperationId, segment: str, block_bytes: int) -> list[tuple[bool, str]]:
        found = digests(self._memory[segment], block_bytes)
        covered = [engine_covers(self._engine, operation, segment, i * block_bytes, block_bytes)
                   for i in range(len(found))]
        return list(zip(covered, found, strict=True))

    async def _push(self, command: StartPush) -> Pushed:
        result = await self._engine.push(command.to, command.slices, command.grant, timeout_s=command.timeout_s)
        error = result.error
        return Pushed(error.code if error else "", str(error or ""), result.nbytes, result.seconds, result.path)


def engine_covers(engine: TransferEngine, operation: OperationId, segment: str, offset: int, length: int) -> bool:
    """``covered`` of a range that is spelled out."""
    return engine.covered(operation, Range(segment=segment, offset=offset, length=length))


def _say(reply: Reply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


async def _serve(worker: str, incarnation: str, settings: TransferSettings) -> None:
    commands = msgspec.json.Decoder(Command)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(TransferEngine.open(
            worker=WorkerId(worker), incarnation=Incarnation(incarnation), settings=settings))
        host = _Host(engine, stack)
        _say(Reply(engine.endpoint))
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            try:
                _say(Reply(await host.obey(commands.decode(line))))
            except Exception as error:
                _say(Reply(failure=repr(error)))


if __name__ == "__main__":
    _, _worker, _incarnation, _settings = sys.argv
    _timer = threading.Timer(LIFE_S, os._exit, [1])
    _timer.daemon = True
    _timer.start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as _runner:
        _runner.run(_serve(_worker, _incarnation, msgspec.json.decode(_settings, type=TransferSettings)))
