"""A transfer engine in a process of its own, driven by a test: one JSON line in, one JSON line out.

``async with peer("b", settings) as b:`` starts one. It can be killed, stopped and continued like any process, and
it can live in a network namespace. Peers are forked by a nursery, a process that has imported everything (run as a
program, this is it): to start an interpreter for each would take most of the tests' time.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import psutil
import uvloop

from shared.ids import HostId, Incarnation, OperationId, WorkerId
from shared.messages import Endpoint, Grant, Range
from shared.transfer import PushResult, Segment, Slice, TransferEngine, TransferSettings, TransferTimeout
from shared.transfer.addresses import join_address
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]
LIFE_S = 150
"""No peer outlives its test for longer, whatever happens to the test."""
PATIENCE_S = 60.0
"""Until a test gives up waiting. What it waits for takes far less, but the machine may be busy, or emulated."""
FAR_S = 600.0
"""A deadline that nothing here waits for: a push that ends before it has another reason."""

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


class Birth(msgspec.Struct):
    """What the nursery is asked for; the peer's end of a socket pair rides along."""

    worker: str
    incarnation: str
    settings: TransferSettings
    namespace: str
    """Name of the network namespace to live in; empty for the nursery's own."""


_nurseries: list[socket.socket] = []
"""The connection to the nursery, while there is one."""


@contextmanager
def nursery() -> Iterator[None]:
    """Peers can be started inside."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.transfer_peer", str(theirs.fileno())], cwd=ROOT,
                pass_fds=[theirs.fileno()], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})  # a fork has one thread
        _nurseries.append(ours)
        try:
            yield
        finally:
            _nurseries.remove(ours)
            process.kill()
            process.wait()


class Peer:
    """The test's side. Its questions are asked one after the other."""

    def __init__(self, worker: str, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.worker, self.pid = worker, pid
        self._reader, self._writer = reader, writer
        self._descriptor = os.pidfd_open(pid)
        self._asking = asyncio.Lock()
        self.endpoint = Endpoint(worker=WorkerId(""), incarnation=Incarnation(""), host=HostId(""))

    async def ask(self, command: Command, of: type[T]) -> T:
        """Raises :class:`PeerDied`."""
        async with self._asking:
            self._writer.write(msgspec.json.encode(command) + b"\n")
            await self._writer.drain()
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
        self._signal(signal.SIGSTOP)
        await eventually(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    async def buried(self) -> None:
        """Returns once the process is gone."""
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._descriptor, gone.set)
        await gone.wait()
        loop.remove_reader(self._descriptor)

    async def end(self) -> None:
        """Kills it if it lives, and lets go of it."""
        self.kill()
        await self.buried()
        os.close(self._descriptor)
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    def memory_bytes(self) -> int:
        """Its private memory; segments are not part of it."""
        usage = psutil.Process(self.pid).memory_info()
        return int(usage.rss - usage.shared)

    def descriptors(self) -> int:
        """How many descriptors it has open."""
        return int(psutil.Process(self.pid).num_fds())

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    async def _read(self) -> Any:
        line = await self._reader.readline()
        if not line:
            raise PeerDied(f"peer {self.worker} has ended")
        reply = msgspec.json.decode(line, type=Reply)
        if reply.failure:
            raise PeerDied(f"peer {self.worker}: {reply.failure}")
        return reply.answer


@asynccontextmanager
async def peer(worker: str, settings: TransferSettings, *, incarnation: str = "1",
               namespace: str = "") -> AsyncIterator[Peer]:
    """A running peer, in a :func:`nursery`."""
    ours, theirs = socket.socketpair()
    with theirs:
        birth = msgspec.json.encode(Birth(worker, incarnation, settings, namespace))
        socket.send_fds(_nurseries[-1], [birth], [theirs.fileno()])
    pid = int(_nurseries[-1].recv(32))
    started = Peer(worker, pid, *await asyncio.open_unix_connection(sock=ours, limit=1 << 24))
    try:
        await started.greeted()
        yield started
    finally:
        await started.end()


class Pusher(Protocol):
    """What a test needs of either engine."""

    def register(self, name: str, nbytes: int = 0, *, memory: Any = None) -> Segment: ...

    def push(self, peer: Endpoint, slices: Sequence[Slice], grant: Grant, *,
             timeout_s: float | None = None) -> Awaitable[PushResult]: ...


@asynccontextmanager
async def noisy_engine(settings: TransferSettings, nbytes: int, seed: int) -> AsyncIterator[TransferEngine]:
    """An engine of this process, ``a``, with noise in ``kv``."""
    async with TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=settings) as engine:
        engine.register("kv", nbytes).buffer[:] = noise(nbytes, seed)
        yield engine


@asynccontextmanager
async def under_way(engine: Pusher, b: Peer, grant: Grant, slices: Sequence[Slice], *, beyond: int = 0,
                    timeout_s: float = FAR_S) -> AsyncIterator[asyncio.Task[PushResult]]:
    """A push of which more than ``beyond`` bytes have arrived and much was not sent yet.

    One that a slow machine did not bring so far by its deadline is begun again, with more time.
    """

    async def push() -> PushResult:
        return await engine.push(b.endpoint, slices, grant, timeout_s=timeout_s)

    async def arrived() -> int:
        return sum((await b.counters()).received_bytes.values())

    async def far_enough_or_over() -> bool:
        return task.done() or await arrived() > before + beyond

    while True:
        before = await arrived()
        task = asyncio.create_task(push())
        try:
            await eventually(far_enough_or_over, timeout_s=PATIENCE_S)
            if task.done() and isinstance(task.result().error, TransferTimeout) and timeout_s < PATIENCE_S:
                timeout_s *= 4
                continue
            assert not task.done(), task.result().error
            yield task
            return
        finally:
            task.cancel()
            await asyncio.wait([task])


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


async def _serve(birth: Birth, sock: socket.socket) -> None:
    commands = msgspec.json.Decoder(Command)
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=1 << 24)

    def say(reply: Reply) -> None:
        writer.write(msgspec.json.encode(reply) + b"\n")

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(TransferEngine.open(
            worker=WorkerId(birth.worker), incarnation=Incarnation(birth.incarnation), settings=birth.settings))
        host = _Host(engine, stack)
        say(Reply(engine.endpoint))
        while line := await reader.readline():
            try:
                say(Reply(await host.obey(commands.decode(line))))
            except Exception as error:
                say(Reply(failure=repr(error)))


def _live(birth: Birth, sock: socket.socket) -> None:
    """What a forked process does with its life."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    timer = threading.Timer(LIFE_S, os._exit, [1])
    timer.daemon = True
    timer.start()
    if birth.namespace:
        with open(f"/run/netns/{birth.namespace}") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter namespace {birth.namespace}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(birth, sock))


def _keep_nursery(requests: socket.socket) -> None:
    """Forks a peer for each request; ends when the test session does."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the peers
    while True:
        asked, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 1)
        if not asked:
            return
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                requests.close()
                _live(msgspec.json.decode(asked, type=Birth), socket.socket(fileno=descriptors[0]))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(descriptors[0])
        requests.send(str(pid).encode())


if __name__ == "__main__":
    _keep_nursery(socket.socket(fileno=int(sys.argv[1])))
