"""A live receiver, fed with garbage, halves of frames, and memory that is not what it should be.

``FUZZ_INPUTS`` (an environment variable) scales the number of connections: 1,000 of them without it.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import psutil
import pytest

from shared.ids import OperationId
from shared.messages import Endpoint, Grant, Range
from shared.transfer import Slice, TransferEngine, TransferSettings, frames
from shared.transfer.addresses import split_address
from shared.transfer.frames import MAX_ATTACHED, Source, Span
from tests.support.eventually import eventually
from tests.support.frame_fuzz import Mutator
from tests.support.transfer_peer import Peer, digests, peer

CONNECTIONS = max(100, int(os.environ.get("FUZZ_INPUTS", "50000")) // 50)
NBYTES = 2 << 20
HALF = NBYTES // 2
BLOCK = 64 << 10
OP = OperationId("op")
PATHS = ["shm", "tcp"]
ANSWER_S = 10.0
"""A receiver that takes longer to answer or to hang up hangs."""

Message = tuple[bytes, Sequence[int]]
"""Bytes, and the descriptors that ride along."""


@dataclass
class Attacker:
    """Speaks to a receiver by hand, under a grant for the first half of its memory."""

    path: str
    endpoint: Endpoint
    grant: Grant

    def hello(self) -> bytes:
        return frames.encode(frames.Hello("x", self.endpoint.worker, self.endpoint.incarnation, self.endpoint.host,
                                          time.monotonic()))

    def write(self, spans: Sequence[Span], payload: bytes) -> bytes:
        """A claim by TCP."""
        grant = self.grant
        return frames.encode(frames.Write(1, grant.operation, grant.incarnation, grant.token, 1000, list(spans), None,
                                          [])) + payload

    def copy(self, span: Span, source: Source, attached: Sequence[int], *, token: bytes | None = None) -> bytes:
        """A claim in shared memory."""
        grant = self.grant
        return frames.encode(frames.Copy(
            1, grant.operation, grant.incarnation, grant.token if token is None else token, 1000, [span], None, [],
            [source], list(attached), time.monotonic() + 60))

    def dial(self) -> socket.socket:
        """A connection that has not said anything."""
        if self.path == "tcp":
            return socket.create_connection(split_address(self.endpoint.tcp), timeout=ANSWER_S)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(ANSWER_S)
        sock.connect(self.endpoint.shm)
        return sock

    def talk(self, messages: Sequence[Message]) -> bytes:
        """Says ``messages`` on a connection of their own; what was said until the other side hung up."""
        with self.dial() as sock:
            heard = b""
            try:
                for data, descriptors in messages:
                    send(sock, data, descriptors)
                sock.shutdown(socket.SHUT_WR)
                while part := sock.recv(1 << 16):
                    heard += part
            except OSError as error:
                if isinstance(error, TimeoutError):
                    raise AssertionError("the receiver neither answers nor hangs up") from error
                # hung up on in the middle of a sentence
            return heard


def send(sock: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    if descriptors:
        sent = sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
        data = data[sent:]
    sock.sendall(data)


def answers(heard: bytes) -> list[frames.Body]:
    """The frames in ``heard``; the last one may be cut off."""
    bodies = []
    while len(heard) >= frames.HEADER_BYTES:
        kind, length = frames.parse_header(heard[:frames.HEADER_BYTES])
        heard = heard[frames.HEADER_BYTES:]
        if len(heard) >= length:
            bodies.append(frames.decode(kind, heard[:length]))
        heard = heard[length:]
    return bodies


@asynccontextmanager
async def besieged(path: str) -> AsyncIterator[tuple[Peer, Attacker]]:
    """A receiver; afterwards it must serve as before, hold no more than before, and have kept what was not granted."""
    async with peer("b", TransferSettings(paths=(path,))) as b:
        await b.register("kv", NBYTES)
        await b.register("secret", BLOCK, 5)
        secret = await b.audit(OP, "secret", BLOCK)
        grant = await b.grant(OP, Range(segment="kv", offset=0, length=HALF))
        attacker = Attacker(path, b.endpoint, grant)
        for _ in range(10):  # what it takes once, it may keep
            attacker.talk([(attacker.hello(), ())])
        await eventually(lambda: _is_alone(b))
        descriptors, threads, memory = b.descriptors(), psutil.Process(b.pid).num_threads(), b.memory_bytes()
        yield b, attacker
        await eventually(lambda: _is_alone(b))
        assert b.descriptors() <= descriptors
        assert psutil.Process(b.pid).num_threads() <= threads
        assert b.memory_bytes() - memory < 48 << 20
        assert await b.audit(OP, "secret", BLOCK) == secret
        untouched = [(False, digest) for digest in digests(bytes(HALF), BLOCK)]
        assert (await b.audit(OP, "kv", BLOCK))[HALF // BLOCK:] == untouched
        assert "internal" not in (await b.counters()).dropped, "an exception nobody thought of"
        await _serves(b, path)


async def _is_alone(b: Peer) -> bool:
    return (await b.counters()).connections == 0


async def _serves(b: Peer, path: str) -> None:
    operation = OperationId("after all")
    target = Range(segment="kv", offset=HALF, length=HALF)
    grant = await b.grant(operation, target)
    async with TransferEngine.open(worker="a", incarnation="1",  # type: ignore[arg-type]
                                   settings=TransferSettings(paths=(path,))) as engine:
        engine.register("kv", HALF).buffer[:] = bytes([7]) * HALF
        assert (await engine.push(b.endpoint, [Slice("kv", 0, target)], grant, timeout_s=20)).ok
    sent = [(True, digest) for digest in digests(bytes([7]) * HALF, BLOCK)]
    assert (await b.audit(operation, "kv", BLOCK))[HALF // BLOCK:] == sent


@contextmanager
def memory(nbytes: int, *, sealed: bool = True) -> Iterator[int]:
    """Descriptor of memory as senders hand it over."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        if sealed:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield descriptor
    finally:
        os.close(descriptor)


# -- noise -------------------------------------------------------------------------------------------------------------


def streams(attacker: Attacker, source: int, count: int) -> Iterator[list[Message]]:
    """What ``count`` connections say: sound greetings and claims, spoilt ones, frames of all kinds, and noise."""
    chance = random.Random(2)
    mutator = Mutator(chance)

    def claim() -> Message:
        spans = [Span(chance.choice(("kv", "kv", "kv", "secret")), chance.choice((0, 1, 4096, HALF - 10, HALF, NBYTES)),
                      chance.choice((1, 10, 4096))) for _ in range(chance.randrange(4))]
        if attacker.path == "tcp":
            payload = chance.randbytes(sum(span.length for span in spans))
            return attacker.write(spans, payload), ()
        span = Span("kv", chance.choice((0, 4096, HALF)), chance.choice((1, 4096)))
        serial = chance.randrange(3)
        attached = [serial] if chance.random() < 0.7 else []
        descriptors = [source] * chance.choice((0, 1, 1, 2, MAX_ATTACHED, 3 * MAX_ATTACHED))
        return attacker.copy(span, Source(serial, chance.choice((0, 4096, 2**52))), attached), descriptors

    for _ in range(count):
        if chance.random() < 0.1:
            yield [(chance.randbytes(chance.randrange(3000)), ())]
            continue
        said: list[Message] = [(attacker.hello() if chance.random() < 0.9 else mutator.spoilt(attacker.hello()), ())]
        for _ in range(chance.randrange(1, 7)):
            data, descriptors = claim()
            dice = chance.random()
            if dice < 0.4:
                said.append((mutator.frame(), ()))
            elif dice < 0.8:
                said.append((mutator.spoilt(data), descriptors))
            else:
                said.append((data, descriptors))
        yield said


@pytest.mark.timeout(60 + CONNECTIONS // 20)
@pytest.mark.parametrize("path", PATHS)
async def test_a_siege_of_nonsense_ends_with_a_receiver_that_serves(path: str) -> None:
    async with besieged(path) as (b, attacker):
        with memory(BLOCK) as source:

            def attack() -> None:
                for messages in streams(attacker, source, CONNECTIONS):
                    attacker.talk(messages)

            await asyncio.to_thread(attack)
        counters = await b.counters()
        assert counters.dropped["protocol"] > CONNECTIONS // 4
        assert counters.refused_claims > 0, "some nonsense was good enough to be refused"


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_cut_anywhere_commits_nothing(path: str) -> None:
    async with besieged(path) as (b, attacker):
        with memory(BLOCK) as source:
            if path == "tcp":
                claim, descriptors = attacker.write([Span("kv", 0, 20), Span("kv", 100, 20)], b"x" * 40), []
            else:
                claim, descriptors = attacker.copy(Span("kv", 0, 40), Source(9, 0), [9]), [source]

            def attack() -> None:
                for length in range(1, len(claim)):
                    attacker.talk([(attacker.hello(), ()), (claim[:length], descriptors)])

            await asyncio.to_thread(attack)
            assert await b.received(OP) == 0

            def stay() -> list[frames.Body]:
                """Hangs up only once it has its answers."""
                with attacker.dial() as sock:
                    send(sock, attacker.hello())
                    send(sock, claim, descriptors)
                    heard = b""
                    while len(answers(heard)) < 2 and (part := sock.recv(1 << 16)):
                        heard += part
                    return answers(heard)

            assert (await asyncio.to_thread(stay))[1:] == [frames.Ack(1)]
            assert await b.received(OP) == 40


# -- memory ------------------------------------------------------------------------------------------------------------


@contextmanager
def wrong_memory() -> Iterator[dict[str, int]]:
    """{what is wrong with it: its descriptor}"""
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    nowhere, directory = os.open("/dev/zero", os.O_RDWR), os.open("/", os.O_RDONLY)
    program = os.open(__file__, os.O_RDONLY)
    try:
        with (memory(BLOCK, sealed=False) as unsealed, memory(0) as empty, memory(100) as short,
              memory(2**62) as vast, ours, theirs):
            yield {"could shrink": unsealed, "empty": empty, "too short": short, "vast": vast, "a pipe": reader,
                   "a socket": ours.fileno(), "a device": nowhere, "a directory": directory, "a file": program}
    finally:
        for descriptor in (reader, writer, nowhere, directory, program):
            os.close(descriptor)


async def test_memory_that_is_not_what_it_should_be_costs_its_sender_the_connection() -> None:
    async with besieged("shm") as (b, attacker):
        with wrong_memory() as wrong:
            for what, descriptor in wrong.items():
                offset = 2**61 if what == "vast" else 0
                claim = attacker.copy(Span("kv", 0, 4096), Source(1, offset), [1])
                heard = await asyncio.to_thread(attacker.talk, [(attacker.hello(), ()), (claim, [descriptor])])
                bodies = answers(heard)
                assert isinstance(bodies[0], frames.Welcome), what
                accepted = [body for body in bodies[1:] if isinstance(body, frames.Ack) and not body.refused]
                assert not accepted or what == "vast", what
                assert await b.alive(), what
            claim = attacker.copy(Span("kv", 0, 4096), Source(1, 0), [1])
            heard = await asyncio.to_thread(attacker.talk, [(attacker.hello(), ()), (claim, ())])
            assert len(answers(heard)) == 1, "no descriptor came along"


async def test_descriptors_that_no_frame_speaks_of_do_not_pile_up() -> None:
    count = 200
    async with besieged("shm") as (b, attacker):
        before = b.descriptors()
        with memory(BLOCK) as source, attacker.dial() as sock:

            def attack() -> None:
                """Returns once all is answered, or the receiver has hung up."""
                send(sock, attacker.hello())
                refused = attacker.copy(Span("kv", 0, 1), Source(1, 0), [], token=b"")
                heard = b""
                try:
                    for _ in range(count):
                        send(sock, refused, [source] * MAX_ATTACHED)
                    while len(answers(heard)) < 1 + count and (part := sock.recv(1 << 16)):
                        heard += part
                except ConnectionError:
                    pass

            await asyncio.to_thread(attack)
            assert b.descriptors() - before < 10 * MAX_ATTACHED
