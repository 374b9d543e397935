"""People's orders, on a record that somebody else may have written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.store_manager.core.orders import with_progress
from services.store_manager.core.planner import Planner
from services.store_manager.core.policy import PlannerPolicy
from services.store_manager.desk import RECORD, Desk, OrdersDamaged
from shared.bus.bus import Delivery
from shared.bus.memory import MemoryBus
from shared.bus.subjects import DRAIN, QUOTA
from shared.clock import ManualClock, SystemClock
from shared.messages import DrainAsk, DrainReply, Failure, QuotaAsk, QuotaReply
from tests.support.pool_cluster import SPEC, Addresses, Cluster, Worker


def desk(bus: MemoryBus) -> Desk:
    return Desk(bus, SystemClock(), Planner("m1", Addresses(), PlannerPolicy()), lambda: "m1")


def desk_of(bus: MemoryBus, *workers: Worker) -> tuple[Desk, Cluster]:
    """A desk whose planner knows these workers; nobody leads, so what is ordered waits."""
    cluster = Cluster()
    for worker in workers:
        cluster.add(worker)
    cluster.run(4.0)
    return Desk(bus, ManualClock(cluster.now), cluster.planner, lambda: "m1"), cluster


def asked(message: QuotaAsk | DrainAsk) -> Delivery:
    return Delivery((QUOTA if isinstance(message, QuotaAsk) else DRAIN).at().text, {}, message)


async def told(desk: Desk, **ask: Any) -> str:
    """What is said to a :class:`DrainAsk`: the drain's state, or why there is none."""
    reply = await desk.drain(asked(DrainAsk(**ask)))
    return reply.state if isinstance(reply, DrainReply) else reply.message


@pytest.mark.parametrize("value", [b"", b"\xc1", msgspec.msgpack.encode({"drains": 3}), msgspec.msgpack.encode([1])])
async def test_a_record_that_cannot_be_read_is_said_and_left_as_it_is(value: bytes) -> None:
    async with MemoryBus() as bus:
        await bus.record_write(RECORD, value, revision=0, timeout_s=1.0)
        with pytest.raises(OrdersDamaged, match="record store-orders is not one this version can read"):
            await desk(bus).read()
        reply = await desk(bus).quota(asked(QuotaAsk(tenant="acme", nbytes=1)))
        assert isinstance(reply, Failure) and "delete the record" in reply.message
        record = await bus.record_read(RECORD, timeout_s=1.0)
        assert record is not None and record.value == value


async def test_orders_written_by_a_newer_version_are_read_as_far_as_they_are_known() -> None:
    async with MemoryBus() as bus:
        value = msgspec.msgpack.encode({"quotas": {"acme": 5}, "term": 7, "something_new": [1, 2]})
        await bus.record_write(RECORD, value, revision=0, timeout_s=1.0)
        reply = await desk(bus).quota(asked(QuotaAsk()))
        assert isinstance(reply, QuotaReply) and [(row.tenant, row.quota) for row in reply.quotas] == [("acme", 5)]


async def test_a_quota_below_a_block_is_refused_with_both_sizes() -> None:
    async with MemoryBus() as bus:
        desk, _ = desk_of(bus, Worker("a"))
        for nbytes, works in ((1000, False), (SPEC.block_bytes, True), (0, True)):
            reply = await desk.quota(asked(QuotaAsk(tenant="acme", nbytes=nbytes)))
            assert isinstance(reply, QuotaReply if works else Failure), nbytes
            if isinstance(reply, Failure):
                assert reply.message == ("a quota of 1000 B holds nothing: a block takes 1.0 KiB; give that or more, "
                                         "or 0 to keep acme out")


async def test_the_last_worker_that_serves_is_drained_only_by_force() -> None:
    async with MemoryBus() as bus:
        desk, _ = desk_of(bus, Worker("p1"), Worker("p2", draining=True), Worker("d1", role="decode"),
                          Worker("d2", role="decode"), Worker("s1", role="store"))
        for worker, last in (("p1", "prefill"), ("d1", ""), ("d2", "decode"), ("s1", ""), ("p2", ""), ("d1", "")):
            said = await told(desk, worker=worker)
            assert said == (f"{worker} is the last {last} worker of toy that takes requests: without it they all fail; "
                            "start another one first, or drain it with --force" if last else "waiting"), worker
        assert await told(desk, worker="d2", force=True) == "waiting"
        assert await told(desk, worker="d2") == "waiting", "the same drain, which needs no force again"


LAST = "{} is the last {} worker of toy that takes requests: without it"
PAIR = "{} is one of the last two workers of toy, and nobody prefills what it decodes itself: without it"


@pytest.mark.parametrize(("fleet", "drained", "why"), [
    ("p D", "p", PAIR.format("p0", "")),  # the one that is left cannot do both
    ("P D", "D", PAIR.format("D1", "")), ("P D", "P", PAIR.format("P0", "")),
    ("p D D", "p", ""), ("P P d", "d", ""),  # an elastic one takes its part
    ("P P", "P", PAIR.format("P0", "")), ("P P P", "P", ""), ("d D D", "D", ""),
    ("p d", "p", LAST.format("p0", "prefill")), ("P d", "d", PAIR.format("d1", "")),
    ("P d", "P", LAST.format("P0", "prefill")), ("P", "P", LAST.format("P0", "prefill and decode")),
    ("p p D", "D", LAST.format("D2", "decode")), ("p p D s", "D", LAST.format("D2", "decode")),
    ("P P s", "s", ""),
])
async def test_who_serves_last_goes_by_what_workers_can_do(fleet: str, drained: str, why: str) -> None:
    """Capitals are elastic, p are at home in prefill, d in decode, s are stores; the first one of its letter goes."""
    roles: dict[str, Any] = {"p": "prefill", "d": "decode", "s": "store"}
    kinds = fleet.split()
    workers = [Worker(f"{kind}{i}", role=roles[kind.lower()], elastic=kind.isupper()) for i, kind in enumerate(kinds)]
    async with MemoryBus() as bus:
        desk, _ = desk_of(bus, *workers)
        said = await told(desk, worker=workers[kinds.index(drained)].name)
        assert said.startswith(why or "waiting"), said


async def test_two_drains_at_once_do_not_end_service_either() -> None:
    async with MemoryBus() as bus:
        desk, _ = desk_of(bus, *(Worker(name, elastic=True) for name in ("a", "b", "c")))
        assert await told(desk, worker="a") == "waiting"
        assert "b is one of the last two workers" in await told(desk, worker="b")


async def test_a_drain_that_is_done_cannot_be_cancelled() -> None:
    async with MemoryBus() as bus:
        desk, cluster = desk_of(bus, Worker("a"), Worker("b"))
        assert await told(desk, worker="a") == "waiting"
        done = msgspec.structs.replace((await desk.read())[0].drains[0], state="done")
        await desk.change(lambda orders: with_progress(orders, [done], 1))
        assert await told(desk, worker="a", what="cancel") == (
            "a is drained already; start it again and it takes requests and copies")
        cluster.add(Worker("a", life="a-2"))
        cluster.run(1.0)
        assert "it was started again since" in await told(desk, worker="a", what="cancel")
