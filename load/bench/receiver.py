"""A process whose memory is written: opens an engine, tells where it is, and lives until its stdin ends.

``python -m load.bench.receiver ORDER``, with :class:`Order` in JSON.
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import uvloop

from load.bench.program import hear, say
from shared.ids import Incarnation, OperationId, WorkerId, fresh
from shared.messages import Endpoint, Grant, Range
from shared.transfer import TransferEngine, TransferSettings

SEGMENT = "kv"
_TTL_S = 24 * 3600.0


class Order(msgspec.Struct, frozen=True):
    """What to be."""

    settings: TransferSettings
    nbytes: int


class Greeting(msgspec.Struct, frozen=True):
    """Where to push, under a grant of all ``nbytes``."""

    endpoint: Endpoint
    grant: Grant


async def receive(order: Order) -> None:
    """Serves until stdin ends."""
    async with TransferEngine.open(worker=WorkerId("receiver"), incarnation=Incarnation(fresh()),
                                   settings=order.settings) as engine:
        np.frombuffer(engine.register(SEGMENT, order.nbytes).buffer, dtype=np.uint8)[:] = 0  # pages exist from now on
        everything = Range(segment=SEGMENT, offset=0, length=order.nbytes)
        grant = engine.grant(OperationId("bench"), [everything], ttl_s=_TTL_S)
        say(Greeting(engine.endpoint, grant))
        while await hear():
            pass


if __name__ == "__main__":
    uvloop.run(receive(msgspec.json.decode(sys.argv[1], type=Order)))
