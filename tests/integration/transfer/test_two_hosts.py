"""Two hosts, as network namespaces: a far peer, a bad cable, and no cable at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.ids import OperationId
from shared.messages import Range
from shared.transfer import Slice, TransferSettings
from tests.support.eventually import eventually
from tests.support.netns import Host, TwoHosts, two_hosts, unavailable
from tests.support.transfer_peer import Peer, digests, noise, peer

OP, NEXT = OperationId("op"), OperationId("next")
BLOCK = 256 << 10
NBYTES = 64 << 20
FEW = 8
SEED = 3


@pytest.fixture(autouse=True, scope="module")
def _namespaces() -> None:
    if missing := unavailable():
        pytest.skip(missing)


def blocks(first: int, last: int) -> list[Slice]:
    return [Slice("kv", i * BLOCK, Range(segment="kv", offset=i * BLOCK, length=BLOCK)) for i in range(first, last)]


def of(first: int, last: int) -> Range:
    return Range(segment="kv", offset=first * BLOCK, length=(last - first) * BLOCK)


def engine_at(host: Host, worker: str) -> TransferSettings:
    """All paths are allowed; only their hosts' ids keep the two from sharing memory."""
    return TransferSettings(host=host.address, host_id=f"host of {worker}", silence_s=0.5)


@asynccontextmanager
async def far_apart() -> AsyncIterator[tuple[TwoHosts, Peer, Peer]]:
    """A sender and a receiver, 40 ms there and back, one packet in a hundred lost."""
    with two_hosts(delay_s=0.02, loss=0.01) as hosts:
        async with (
            peer("a", engine_at(hosts.left, "a"), namespace=hosts.left.namespace) as a,
            peer("b", engine_at(hosts.right, "b"), namespace=hosts.right.namespace) as b,
        ):
            await a.register("kv", NBYTES, SEED)
            await b.register("kv", NBYTES)
            yield hosts, a, b


async def test_a_push_crosses_a_cable_that_delays_and_loses() -> None:
    async with far_apart() as (_, a, b):
        await a.start_push(b.endpoint, blocks(0, FEW), await b.grant(OP, of(0, FEW)), timeout_s=30)
        pushed = await a.end_push()
        assert (pushed.error, pushed.path, pushed.nbytes) == ("", "tcp", FEW * BLOCK)
        assert pushed.seconds > 0.08, "a handshake and a transfer of 40 ms each"
        arrived = await b.audit(OP, "kv", BLOCK)
        assert arrived[:FEW] == [(True, digest) for digest in digests(noise(NBYTES, SEED)[:FEW * BLOCK], BLOCK)]
        assert not any(covered for covered, _ in arrived[FEW:])


async def test_a_cut_cable_costs_the_deadline_and_a_mended_one_carries_again() -> None:
    async with far_apart() as (hosts, a, b):
        count = NBYTES // BLOCK
        await a.start_push(b.endpoint, blocks(FEW, count), await b.grant(OP, of(FEW, count)), timeout_s=3)
        await eventually(lambda: b.received(OP))
        hosts.cut()
        pushed = await a.end_push()
        assert pushed.error in ("deadline", "peer")
        assert 0 <= pushed.nbytes < (count - FEW) * BLOCK
        hosts.mend()
        await a.start_push(b.endpoint, blocks(0, FEW), await b.grant(NEXT, of(0, FEW)), timeout_s=30)
        pushed = await a.end_push()
        assert (pushed.error, pushed.nbytes) == ("", FEW * BLOCK)
        sent = digests(noise(NBYTES, SEED), BLOCK)
        for (covered, found), digest in zip(await b.audit(OP, "kv", BLOCK), sent, strict=True):
            assert not covered or found == digest


async def test_a_cable_cut_before_the_handshake_costs_its_time_and_no_more() -> None:
    async with far_apart() as (hosts, a, b):
        grant = await b.grant(OP, of(0, FEW))
        hosts.cut()
        await a.start_push(b.endpoint, blocks(0, FEW), grant, timeout_s=1)
        pushed = await a.end_push()
        assert pushed.error == "deadline" and pushed.seconds >= 1.0
        hosts.mend()
        await a.start_push(b.endpoint, blocks(0, FEW), grant, timeout_s=30)
        assert (await a.end_push()).error == ""
