"""People's orders, on a record that somebody else may have written."""

from __future__ import annotations

import msgspec
import pytest

from services.store_manager.core.planner import Planner
from services.store_manager.core.policy import PlannerPolicy
from services.store_manager.desk import RECORD, Desk, OrdersDamaged
from shared.bus.bus import Delivery
from shared.bus.memory import MemoryBus
from shared.bus.subjects import QUOTA
from shared.clock import SystemClock
from shared.messages import Failure, QuotaAsk, QuotaReply
from tests.support.pool_cluster import Addresses


def desk(bus: MemoryBus) -> Desk:
    return Desk(bus, SystemClock(), Planner("m1", Addresses(), PlannerPolicy()), lambda: "m1")


def asked(message: QuotaAsk) -> Delivery:
    return Delivery(QUOTA.at().text, {}, message)


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
