"""One process of a mesh: lets the others write its memory, and writes theirs, many small pushes at a time.

``python -m load.bench.member ORDER``, with :class:`Order` in JSON. It then answers ``grant``, ``run`` and
``release`` until its stdin ends, see :data:`Question`.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import numpy as np
import uvloop

from load.bench.histogram import Histogram
from load.bench.program import hear, say
from shared.ids import Incarnation, OperationId, WorkerId, fresh
from shared.messages import Endpoint, Grant, Range
from shared.transfer import Slice, TransferEngine, TransferSettings

_SOURCE, _LANDING = "source", "landing"


class Order(msgspec.Struct, frozen=True):
    """What to be; ``in_flight`` pushes of ``nbytes`` each at any moment."""

    worker: WorkerId
    others: list[WorkerId]
    settings: TransferSettings
    nbytes: int
    in_flight: int


class AskGrants(msgspec.Struct, frozen=True, tag="grant"):
    """Let every other one write its part of our memory, for this phase. Answer: ``{worker: grant}``."""

    phase: int
    ttl_s: float


class Target(msgspec.Struct, frozen=True):
    """Whom to push to, under its grant."""

    endpoint: Endpoint
    grant: Grant


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Push to ``targets`` in turns for ``seconds``. Answer: :class:`Ran`."""

    targets: list[Target]
    seconds: float


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End the phase's grants. Answer: true."""

    phase: int


Question = AskGrants | Run | Release


class Ran(msgspec.Struct):
    """What became of the pushes of one :class:`Run`; a push lasts from its start to its acknowledgement."""

    seconds: Histogram = msgspec.field(default_factory=Histogram)
    failed: int = 0
    error: str = ""
    """Of the first one that failed."""


class Member:
    """Owns the segments; flight ``i`` reads slot ``i`` of ours and writes slot ``i`` of our part of another's."""

    def __init__(self, engine: TransferEngine, order: Order) -> None:
        self._engine = engine
        self._order = order
        self._part_bytes = order.in_flight * order.nbytes
        for name, nbytes in ((_SOURCE, self._part_bytes), (_LANDING, self._part_bytes * len(order.others))):
            np.frombuffer(engine.register(name, nbytes).buffer, dtype=np.uint8)[:] = 1  # pages exist from now on

    async def answer(self, question: Question) -> object:
        """See the questions."""
        match question:
            case AskGrants(phase, ttl_s):
                return {other: self._grant(i, other, phase, ttl_s) for i, other in enumerate(self._order.others)}
            case Run(targets, seconds):
                return await self._run(targets, seconds)
            case Release(phase):
                for other in self._order.others:
                    await self._engine.release(_operation(other, phase))
                return True

    def _grant(self, index: int, other: WorkerId, phase: int, ttl_s: float) -> Grant:
        part = Range(segment=_LANDING, offset=index * self._part_bytes, length=self._part_bytes)
        return self._engine.grant(_operation(other, phase), [part], ttl_s=ttl_s)

    async def _run(self, targets: list[Target], seconds: float) -> Ran:
        ran = Ran()
        until_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as flights:
            for slot in range(self._order.in_flight):
                flights.create_task(self._fly(slot, targets, until_s, ran), name=f"flight-{slot}")
        return ran

    async def _fly(self, slot: int, targets: list[Target], until_s: float, ran: Ran) -> None:
        turn, nbytes = slot, self._order.nbytes
        while (started_s := time.monotonic()) < until_s:
            target = targets[turn % len(targets)]
            turn += 1
            landing = Range(segment=_LANDING, offset=target.grant.ranges[0].offset + slot * nbytes, length=nbytes)
            result = await self._engine.push(target.endpoint, [Slice(_SOURCE, slot * nbytes, landing)], target.grant)
            if result.error is None:
                ran.seconds.add(time.monotonic() - started_s)
            else:
                ran.failed += 1
                ran.error = ran.error or str(result.error)


def _operation(other: WorkerId, phase: int) -> OperationId:
    return OperationId(f"{phase}-{other}")


async def take_part(order: Order) -> None:
    """Serves until stdin ends."""
    async with TransferEngine.open(worker=order.worker, incarnation=Incarnation(fresh()),
                                   settings=order.settings) as engine:
        member = Member(engine, order)
        say(engine.endpoint)
        while line := await hear():
            say(await member.answer(msgspec.json.decode(line, type=Question)))


if __name__ == "__main__":
    uvloop.run(take_part(msgspec.json.decode(sys.argv[1], type=Order)))
