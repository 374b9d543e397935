"""TCP as Python has it: two processes, bare sockets, memory to memory, an answer of one byte. What is left is ours.

``python -m load.bench.plain NBYTES`` is the process that receives; it ends with its stdin. A message is its length in 8
bytes, big-endian, and so many bytes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import uvloop

from load.bench.child import Child
from load.bench.limits import LEAST_REPEATS, figures, mapped_memfd
from load.bench.processes import cpu_seconds
from load.bench.program import hear, say
from load.bench.rounds import Probe
from shared.errors import UserError
from shared.transfer.tcp import LOCAL_QUEUE_BYTES

_HOST = "127.0.0.1"
_LENGTH_BYTES = 8
_PATIENCE_S = 10
"""An answer that takes longer does not come."""


class Greeting(msgspec.Struct, frozen=True):
    """Where it listens, for one connection."""

    port: int


@asynccontextmanager
async def tcp_probes(sizes: Mapping[str, int], seconds: float) -> AsyncIterator[list[Probe]]:
    """One message after another. Raises :class:`ChildLost`."""
    nbytes = max(sizes.values())
    memory = mapped_memfd(nbytes)
    memory[:] = 7
    command = [sys.executable, "-m", __name__, str(nbytes)]
    async with Child.start("python-tcp", command) as child:
        greeting = msgspec.convert(child.greeting, Greeting)
        with socket.create_connection((_HOST, greeting.port)) as sock:
            _tune(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _PATIENCE_S, 0))
            pids = (os.getpid(), child.pid)
            yield [Probe(f"python-tcp/{label}",
                         partial(asyncio.to_thread, _measure, sock, memory.data[:nbytes], seconds, pids))
                   for label, nbytes in sizes.items()]


def _measure(sock: socket.socket, message: memoryview, seconds: float, pids: tuple[int, int]) -> Mapping[str, float]:
    head = len(message).to_bytes(_LENGTH_BYTES, "big")
    taken: list[float] = []
    before_s, until_s = cpu_seconds(pids), time.perf_counter() + seconds
    try:
        while len(taken) < LEAST_REPEATS or time.perf_counter() < until_s:
            started_s = time.perf_counter()
            sent = sock.sendmsg([head, message]) - len(head)
            if sent < len(message):
                sock.sendall(message[sent:])
            if not sock.recv(1):
                raise UserError("the process that receives ended")
            taken.append(time.perf_counter() - started_s)
    except OSError as error:
        raise UserError(f"the process that receives does not answer: {error}") from error
    used_s = cpu_seconds(pids) - before_s
    return {**figures(len(message), taken), "cpu": used_s / (len(message) * len(taken) / 1e9)}


def _tune(sock: socket.socket) -> None:
    """As the engine does within a host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_QUEUE_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_QUEUE_BYTES)


def _fill(sock: socket.socket, view: memoryview) -> bool:
    """False when the stream ends before ``view`` is full."""
    while view:
        received = sock.recv_into(view, len(view), socket.MSG_WAITALL)
        if received == 0:
            return False
        view = view[received:]
    return True


def _serve(listener: socket.socket, nbytes: int) -> None:
    """One connection, until it ends; none if ``listener`` is shut down before."""
    memory = mapped_memfd(nbytes)
    memory[:] = 1
    length = bytearray(_LENGTH_BYTES)
    try:
        sock, _ = listener.accept()
    except OSError:
        return
    with sock:
        _tune(sock)
        while _fill(sock, memoryview(length)) and _fill(sock, memory.data[:int.from_bytes(length, "big")]):
            sock.send(b"k")


async def receive(nbytes: int) -> None:
    """Serves until stdin ends."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        listener.listen(1)
        serving = asyncio.create_task(asyncio.to_thread(_serve, listener, nbytes))
        say(Greeting(listener.getsockname()[1]))
        while await hear():
            pass
        listener.shutdown(socket.SHUT_RDWR)
        await serving


if __name__ == "__main__":
    uvloop.run(receive(int(sys.argv[1])))
