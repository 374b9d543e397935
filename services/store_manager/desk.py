"""Where people's orders are taken: drains and quotas, on the record that whoever leads acts on.

Every store-manager answers, whether it leads or not, from the record and from its own copy of the cluster's state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from services.store_manager.core.orders import OVER, Drain, Orders, with_drain, with_progress, with_quota
from services.store_manager.core.planner import Planner
from shared.bus.bus import Bus, Delivery
from shared.clock import Clock
from shared.errors import BusError
from shared.ids import WorkerId, tenant_fault
from shared.messages import (
    CopiesReply,
    DrainAsk,
    DrainReply,
    Failure,
    QuotaAsk,
    QuotaReply,
    QuotaRow,
)
from shared.units import format_bytes

RECORD = "store-orders"
RECORD_S = 2.0
"""Longest wait for the record."""
_TRIES = 8
"""Of two that write at once one goes through, so few are needed."""
_KNOWN_S = 3.0
"""A store-manager that started less long ago may not have heard of a worker yet."""
_MOST_LISTED = 200

_log = logging.getLogger(__name__)


class OrdersDamaged(BusError):
    """The record is there and cannot be read. It is left as it is."""


class Desk:
    """Answers people; ``planner`` is only read, ``leader`` says who leads."""

    def __init__(self, bus: Bus, clock: Clock, planner: Planner, leader: Callable[[], str]) -> None:
        self._bus, self._clock, self._planner, self._leader = bus, clock, planner, leader

    async def read(self) -> tuple[Orders, int]:
        """The record and its revision; raises ``BusError``, :class:`OrdersDamaged` when it is nothing of ours."""
        record = await self._bus.record_read(RECORD, timeout_s=RECORD_S)
        if record is None:
            return Orders(), 0
        try:
            return msgspec.msgpack.decode(record.value, type=Orders), record.revision
        except msgspec.DecodeError as error:
            raise OrdersDamaged(
                f"record {RECORD} is not one this version can read ({error}); a newer moonbus may have written it, use "
                "that one, or delete the record and give drains and quotas anew") from error

    async def change(self, change: Callable[[Orders], Orders | None]) -> Orders:
        """Applies ``change`` to the record, again while others write; ``None`` from it leaves the record as it is."""
        for _ in range(_TRIES):
            orders, revision = await self.read()
            changed = change(orders)
            if changed is None or changed == orders:
                return orders
            if await self._bus.record_write(RECORD, msgspec.msgpack.encode(changed), revision=revision,
                                            timeout_s=RECORD_S) is not None:
                return changed
        raise BusError(f"record {RECORD} was written by others {_TRIES} times; try again")

    async def keep(self, progress: Iterable[Drain], term: int) -> Orders:
        """The leader's news of drains written on the record, which is returned."""
        news = tuple(progress)
        if not news:
            return (await self.read())[0]
        return await self.change(lambda orders: with_progress(orders, news, term))

    async def drain(self, delivery: Delivery) -> DrainReply | Failure:
        """Answers :class:`DrainAsk`."""
        ask: DrainAsk = delivery.message
        try:
            match ask.what:
                case "start":
                    return await self._start_drain(ask)
                case "cancel":
                    orders = await self.change(lambda orders: _cancelled(orders, ask.worker))
                    if (over := orders.drain_of(ask.worker)) is not None and over.state == "done":
                        return Failure(message=self._too_late(over))
                case "look":
                    orders, _ = await self.read()
        except (BusError, ValueError) as error:
            return Failure(message=str(error))
        drain = orders.drain_of(ask.worker)
        if drain is None:
            return Failure(message=f"nobody ordered a drain of {ask.worker}; moonbus store drain {ask.worker} does")
        return self._told(drain)

    async def _start_drain(self, ask: DrainAsk) -> DrainReply | Failure:
        await self._wait_for(lambda: self._planner.picture.life(ask.worker))
        if not ask.force:
            await self._wait_for(lambda: not self._ends_service(WorkerId(ask.worker), Orders()))
        incarnation = self._planner.picture.life(ask.worker)
        if incarnation is None:
            known = ", ".join(self._planner.picture.workers()) or "none"
            return Failure(message=f"there is no worker {ask.worker}; those alive: {known}")
        if not 0 < ask.timeout_s < float("inf"):
            return Failure(message=f"a timeout of {ask.timeout_s:g} s is none; give one above 0")
        wanted = Drain(worker=WorkerId(ask.worker), incarnation=incarnation, ordered_at_s=self._clock.wall(),
                       timeout_s=ask.timeout_s, force=ask.force)

        def ordered(orders: Orders) -> Orders | None:
            known = orders.drain_of(ask.worker)
            if known is not None and known.state not in OVER and known.incarnation == incarnation:
                return None
            if not ask.force and (why := self._ends_service(wanted.worker, orders)):
                raise ValueError(f"{why}: without it they all fail; start another one first, or drain it with --force")
            return with_drain(orders, wanted)

        drain = (await self.change(ordered)).drain_of(ask.worker)
        assert drain is not None, "it was just ordered"
        return self._told(drain)

    def _ends_service(self, worker: WorkerId, orders: Orders) -> str:
        """Why a model's requests are served by nobody once ``worker`` is drained; empty if it ends nothing."""
        members = self._planner.picture.membership.members
        leaving = members.get(worker)
        if leaving is None or leaving.draining or leaving.hello.role == "store":
            return ""
        under_way = {(drain.worker, drain.incarnation) for drain in orders.drains if drain.state not in OVER}
        left = [other for name, other in members.items()
                if other.state == "alive" and not other.draining and name != worker and other.hello.role != "store"
                and other.spec == leaving.spec and (name, other.hello.incarnation) not in under_way]
        model = leaving.hello.spec.model
        roles = [role for role in ("prefill", "decode")
                 if leaving.does(role) and not any(other.does(role) for other in left)]
        if roles:
            return f"{worker} is the last {' and '.join(roles)} worker of {model} that takes requests"
        if len(left) == 1 and left[0].hello.elastic:
            return f"{worker} is one of the last two workers of {model}, and nobody prefills what it decodes itself"
        return ""

    def _too_late(self, drain: Drain) -> str:
        if self._planner.picture.life(drain.worker) not in (None, drain.incarnation):
            return f"the drain of {drain.worker} was done, and it was started again since: there is nothing to cancel"
        return f"{drain.worker} is drained already; start it again and it takes requests and copies"

    async def _wait_for(self, is_known: Callable[[], object]) -> None:
        """Until it is known, or all that there is has been heard of."""
        ends_s = self._planner.picture.started_s + _KNOWN_S
        # NOTE: polled, since the planner tells nobody of each worker; a person waits here, once.
        while not is_known() and self._clock.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def _told(self, drain: Drain) -> DrainReply:
        return DrainReply(worker=drain.worker, state=drain.state, blocks=drain.blocks, copied=drain.copied,
                          left=drain.left, nbytes=drain.nbytes, why=drain.why, leader=self._leader())

    async def quota(self, delivery: Delivery) -> QuotaReply | Failure:
        """Answers :class:`QuotaAsk`."""
        ask: QuotaAsk = delivery.message
        try:
            if not ask.tenant:
                orders, _ = await self.read()
            elif not ask.remove and (fault := tenant_fault(ask.tenant)):
                return Failure(message=fault)
            elif ask.nbytes < 0:
                return Failure(message=f"a quota of {ask.nbytes} bytes is none; give 0 or more")
            elif not ask.remove and 0 < ask.nbytes < (least := self._least_block()):
                return Failure(message=f"a quota of {format_bytes(ask.nbytes)} holds nothing: a block takes "
                                       f"{format_bytes(least)}; give that or more, or 0 to keep {ask.tenant} out")
            else:
                orders = await self.change(lambda orders: with_quota(
                    orders, ask.tenant, None if ask.remove else ask.nbytes))
        except (BusError, ValueError) as error:
            return Failure(message=str(error))
        return QuotaReply(quotas=[QuotaRow(tenant=tenant, quota=quota, used=self._planner.picture.usage(tenant))
                                  for tenant, quota in orders.quotas.items()], unseen=self._planner.picture.unseen())

    def _least_block(self) -> int:
        """Bytes of the smallest block that a worker here keeps; 0 when there is none."""
        return min((peer.hello.spec.block_bytes for peer in self._planner.picture.fleet.peers.values()), default=0)

    async def copies(self, delivery: Delivery) -> CopiesReply:
        """Answers :class:`shared.messages.CopiesQuery`."""
        return self._planner.describe(max(0, min(delivery.message.limit, _MOST_LISTED)), leader=self._leader(),
                                      now=self._clock.monotonic())


def _cancelled(orders: Orders, worker: str) -> Orders | None:
    drain = orders.drain_of(worker)
    if drain is None or drain.state in OVER:
        return None
    return with_drain(orders, msgspec.structs.replace(drain, cancel=True))
