"""The store-manager's hands, between a scripted feed and a scripted catalog, where the order of two events matters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.store_manager.core.events import Led
from services.store_manager.reconcile import Reconciler
from services.store_manager.settings import Settings
from services.store_manager.shell import StoreManagerShell
from shared.bus.bus import Delivery, Durable
from shared.bus.memory import MemoryBus
from shared.bus.streams import CATALOG_CONSUMER, Consumer
from shared.bus.subjects import DONE
from shared.catalog.fold import FeedEvent
from shared.catalog.repository import Catalog, Written
from shared.catalog.session import Unwritable
from shared.catalog.upkeep import Upkeep
from shared.clock import SystemClock
from shared.ids import GatewayId, RequestId, SpecDigest
from shared.messages import RequestDone
from tests.support.eventually import eventually

MESSAGE = RequestDone(request=RequestId("r"), gateway=GatewayId("g"), model="m", spec=SpecDigest("s"), tenant="t",
                      received_at_s=0.0, outcome="ok")


@dataclass
class Copy:
    """One delivery of the message at position 7."""

    acked: bool = False
    stream_seq: int = 7
    delivery: Delivery = field(default_factory=lambda: Delivery(str(DONE.at()), {}, MESSAGE))

    async def ack(self) -> None:
        self.acked = True


class TwiceBus(MemoryBus):
    """Its stream delivers one message, and once more just when ``again`` is set."""

    def __init__(self, again: asyncio.Event) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self._again = again

    async def pull(self, consumer: Consumer, *, batch: int, timeout_s: float) -> list[Durable]:
        if len(self.copies) == 1:
            await self._again.wait()
        elif self.copies:
            await asyncio.Event().wait()
        self.copies.append(Copy())
        return [self.copies[-1]]

    async def pending(self, consumer: Consumer) -> int:
        return 0


class SlowCatalog(Catalog):
    """Its first write ends when ``end`` is set; it takes every message, or none."""

    def __init__(self, end: asyncio.Event, refuses: bool) -> None:
        self.writes = 0
        self._end, self._refuses = end, refuses

    async def write(self, events: Sequence[FeedEvent], *, now_s: float) -> Written:
        self.writes += 1
        await self._end.wait()
        if self._refuses:
            raise Unwritable("never")
        return Written(requests=1)


class NeverDoneCatalog(Catalog):
    """Its upkeep always leaves something to do."""

    def __init__(self) -> None:
        self.rounds = 0

    async def maintain(self, *, now_s: float) -> Upkeep:
        self.rounds += 1
        return Upkeep(more=True)

    async def write(self, events: Sequence[FeedEvent], *, now_s: float) -> Written:
        return Written(requests=1)


async def deliver_again_as_the_write_ends(*, refuses: bool) -> None:
    end, again = asyncio.Event(), asyncio.Event()
    async with TwiceBus(again) as bus:
        catalog, clock = SlowCatalog(end, refuses), SystemClock()
        reconciler = Reconciler(bus, catalog, clock, timeout_s=1.0, patience_s=1.0)
        shell = StoreManagerShell(Settings(), bus, catalog, reconciler, CATALOG_CONSUMER, clock, "s")
        async with shell.open() as running:
            await eventually(lambda: catalog.writes == 1 and len(bus.copies) == 1)
            end.set()
            again.set()  # before the machine, now told of the write, has seen to its acknowledgement
            await eventually(lambda: running.done() or [copy.acked for copy in bus.copies] == [True, True])
            assert not running.done(), running.exception()
            assert catalog.writes == 2


async def test_what_comes_again_just_as_it_is_written_is_written_again() -> None:
    await deliver_again_as_the_write_ends(refuses=False)


async def test_upkeep_that_is_not_done_goes_on_before_its_next_time() -> None:
    async with TwiceBus(asyncio.Event()) as bus:
        catalog, clock = NeverDoneCatalog(), SystemClock()
        reconciler = Reconciler(bus, catalog, clock, timeout_s=1.0, patience_s=1.0)
        settings = Settings(maintain_s=3600.0, retry_limit_s=0.01)
        shell = StoreManagerShell(settings, bus, catalog, reconciler, CATALOG_CONSUMER, clock, "s")
        async with shell.open():
            shell.lead(Led(1, clock.monotonic() + 60.0))
            await eventually(lambda: catalog.rounds >= 3)


async def test_what_comes_again_just_as_it_is_refused_is_refused_again() -> None:
    await deliver_again_as_the_write_ends(refuses=True)
