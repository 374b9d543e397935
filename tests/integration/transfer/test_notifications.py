"""Commit before notify: whoever hears of bytes finds them."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Grant, Range
from shared.transfer import ChecksumMismatch, GrantRefused, PushResult, Slice, TransferEngine, TransferSettings
from tests.support.eventually import eventually
from tests.support.transfer_peer import Peer, Said, noise, peer

NBYTES = 32 << 20
HALF = 256 << 10
PUSHES = 200
OP = OperationId("op")
PATHS = ["shm", "tcp"]


def cuts(chance: random.Random, start: int, stop: int) -> list[Slice]:
    """``[start, stop)`` in up to six slices, in any order."""
    between = sorted({start, stop, *(chance.randrange(start, stop) for _ in range(chance.randrange(6)))})
    slices = [Slice("kv", low, Range(segment="kv", offset=low, length=high - low))
              for low, high in pairwise(between)]
    chance.shuffle(slices)
    return slices


def parts(chance: random.Random) -> list[tuple[int, int]]:
    """``PUSHES`` ranges that do not overlap; most are small, some take several batches."""
    weights = [chance.choice((1, 1, 1, 10, 100)) * chance.random() for _ in range(PUSHES)]
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + 1 + int(weight / sum(weights) * (NBYTES - PUSHES)))
    return list(pairwise(bounds))


def saying(source: bytes, start: int, stop: int) -> bytes:
    return msgspec.json.encode(Said("kv", start, stop - start, hashlib.sha256(source[start:stop]).hexdigest()))


async def notified(b: Peer, count: int) -> None:
    async def heard() -> bool:
        return len(await b.notes()) >= count

    await eventually(heard, timeout_s=20)
    notes = await b.notes()
    assert len(notes) == count
    assert all(note.covered and note.same for note in notes)
    assert {(note.operation, note.sender) for note in notes} <= {(OP, WorkerId("a"))}


@asynccontextmanager
async def sending(path: str, source: bytes, **more: Any) -> AsyncIterator[TransferEngine]:
    settings = TransferSettings(paths=(path,), **more)
    async with TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("1"), settings=settings) as engine:
        engine.register("kv", NBYTES).buffer[:] = source
        yield engine


@pytest.mark.parametrize("path", PATHS)
async def test_a_receiver_that_is_notified_finds_the_bytes_committed(path: str) -> None:
    chance, source = random.Random(4), noise(NBYTES, 4)
    async with (
        peer("b", TransferSettings(paths=(path,))) as b,
        sending(path, source, lanes=3, max_inflight=4 << 20) as engine,
    ):
        await b.register("kv", NBYTES)
        grant = await b.grant(OP, Range(segment="kv", offset=0, length=NBYTES))

        async def push(start: int, stop: int) -> PushResult:
            return await engine.push(b.endpoint, cuts(chance, start, stop), grant, timeout_s=30,
                                     notify=saying(source, start, stop))

        async def push_layers(start: int, stop: int) -> PushResult:
            stream = engine.stream(b.endpoint, grant, timeout_s=30)
            for item in cuts(chance, start, stop):
                stream.push([item])
            return await stream.close(notify=saying(source, start, stop))

        results = await asyncio.gather(*(
            (push_layers if i % 4 == 0 else push)(start, stop) for i, (start, stop) in enumerate(parts(chance))))
        assert all(result.ok for result in results)
        await notified(b, PUSHES)


@pytest.mark.parametrize("path", PATHS)
async def test_a_push_that_did_not_arrive_whole_notifies_nobody(path: str) -> None:
    source = noise(NBYTES, 4)
    async with (
        peer("b", TransferSettings(paths=(path,))) as b,
        sending(path, source) as sound,
        sending(path, source, checksums="on", corrupt_every=1) as spoiling,
    ):
        await b.register("kv", NBYTES)
        grant = await b.grant(OP, Range(segment="kv", offset=0, length=NBYTES))
        forged = msgspec.structs.replace(grant, token=bytes(32))
        halves = [Slice("kv", start, Range(segment="kv", offset=start, length=HALF)) for start in (0, HALF)]

        async def push(engine: TransferEngine, slices: Sequence[Slice], by: Grant) -> PushResult:
            return await engine.push(b.endpoint, slices, by, timeout_s=30, notify=saying(source, 0, 2 * HALF))

        spoilt = await push(spoiling, halves, grant)
        assert [type(status.error) for status in spoilt.slices] == [ChecksumMismatch] * 2
        assert isinstance((await push(sound, halves, forged)).error, GrantRefused)
        assert isinstance((await push(sound, [], forged)).error, GrantRefused)
        assert (await push(sound, halves, grant)).ok
        await notified(b, 1)  # it has compared the bytes, which the next push spoils
        assert isinstance((await push(spoiling, halves[:1], grant)).error, ChecksumMismatch)
        assert (await push(sound, halves[:1], grant)).ok
        await notified(b, 2)
