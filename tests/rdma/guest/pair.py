"""Two machines: the second grants memory, the first pushes into it; run by both under ``vm --pair``."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys

import msgspec
import numpy as np
import uvloop

from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Endpoint, Grant, Range
from shared.transfer import Slice, TransferEngine, TransferSettings

NBYTES = 8 << 20
PORT = 7000
ALL = Range(segment="kv", offset=0, length=NBYTES)
OP = OperationId("op")


def noise() -> bytes:
    return np.random.default_rng(3).bytes(NBYTES)


async def receive() -> None:
    """Tells the other machine how to reach it, and checks what came once it is notified."""
    settings = TransferSettings(host=os.environ["RDMA_ADDRESS"])
    async with TransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"), settings=settings) as engine:
        memory = engine.register("kv", NBYTES).buffer
        grant = engine.grant(OP, [ALL], ttl_s=60)

        async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(msgspec.json.encode((engine.endpoint, grant)) + b"\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(introduce, os.environ["RDMA_ADDRESS"], PORT):
            async for note in engine.notifications():
                assert engine.covered(OP, ALL) and note.data == hashlib.sha256(memory).digest()
                break
    say("all of it arrived")


async def push() -> None:
    """Asks the other machine how it is reached, and pushes."""
    settings = TransferSettings(host=os.environ["RDMA_ADDRESS"])
    async with TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=settings) as engine:
        engine.register("kv", NBYTES).buffer[:] = noise()
        endpoint, grant = msgspec.json.decode(await introduction(), type=tuple[Endpoint, Grant])
        result = await engine.push(endpoint, [Slice("kv", 0, ALL)], grant, timeout_s=60,
                                   notify=hashlib.sha256(noise()).digest())
        assert result.ok and result.path == "rdma", result
    say(f"pushed {result.nbytes} bytes by {result.path}")


async def introduction() -> bytes:
    """The other machine may not have booted yet."""
    async with asyncio.timeout(60):
        while True:
            try:
                reader, writer = await asyncio.open_connection(os.environ["RDMA_PEER"], PORT)
            except OSError:
                await asyncio.sleep(0.2)
                continue
            line = await reader.readline()
            writer.close()
            return line


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    uvloop.run(push() if os.environ["RDMA_MACHINE"] == "0" else receive())
