"""A client's ear on the bus: who is there, what they hold, and how to come to their doors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from itertools import chain
from typing import Any

from shared.bus.bus import Bus, Delivery, Subscription
from shared.bus.nats import NatsBus
from shared.bus.subjects import BYE, DOOR, HELLO, KV_EVICTED, KV_STORED, KV_SYNC, LOAD, ROLLCALL, tenant_token
from shared.errors import BusError, NoResponders, RequestTimeout
from shared.ids import HostId, Incarnation, WorkerId
from shared.kv import CacheSpec
from shared.kv.feed import Ask
from shared.messages import DoorOpened, DoorRefused, OpenDoor, Rollcall
from shared.store.client_errors import EntryRefused, ForeignSpec, NoStore, StoreTimeout
from shared.store.client_map import Whereabouts
from shared.transfer.addresses import host_clock_s

log = logging.getLogger(__name__)

TICK_S = 0.25
SYNC_S = 5.0
SETTLE_S = 2.0
"""Longest time that opening waits for the first worker."""
ROLLCALL_S = 1.0
"""Least time between two questions who is there."""


class Directory:
    """Lives on one event loop; :attr:`map` may be read by threads. Run by :meth:`run`."""

    def __init__(self, url: str, spec: CacheSpec, *, client: str, incarnation: Incarnation, host: HostId, tenant: str,
                 credentials: str) -> None:
        self.on_tick: Callable[[], None] = lambda: None
        """Called a few times a second while :meth:`run` runs."""
        self.map = Whereabouts(spec, host)
        self._url, self._credentials = url, credentials
        self._client, self._incarnation, self._host, self._tenant = client, incarnation, host, tenant
        self._spec, self._digest = spec, spec.digest
        self._bus: Bus | None = None
        self._doors: dict[tuple[WorkerId, Incarnation], DoorOpened] = {}
        #: {worker: what listens to its news}
        self._news: dict[WorkerId, list[Subscription]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._heard = asyncio.Event()
        self._rollcall_s = 0.0
        self.stopping = asyncio.Event()
        """Set it to let :meth:`run` end."""

    async def run(self, opened: Callable[[], object]) -> None:
        """Listens until :attr:`stopping`; calls ``opened`` once it knows who is there. Raises what the bus raises."""
        async with NatsBus.connect(self._url, name=self._client, credentials=self._credentials) as bus:
            self._bus = bus
            handlers: list[tuple[Any, Callable[[Delivery], Awaitable[None]]]] = [
                (HELLO, self._on_hello), (LOAD, self._on_load), (BYE, self._on_bye)]
            heard = [await bus.subscribe(subject.any(), handler) for subject, handler in handlers]
            bus.on_reconnect(self._call_roll)
            ticking = asyncio.create_task(self._tick(bus), name="store-client-tick")
            try:
                await self._call_roll()
                try:
                    async with asyncio.timeout(SETTLE_S):
                        await self._heard.wait()
                except TimeoutError:
                    pass  # calls will say that nobody is there, until somebody is
                opened()
                stopping = asyncio.create_task(self.stopping.wait(), name="store-client-stop")
                await asyncio.wait({stopping, ticking}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if ticking.done():
                    ticking.result()
            finally:
                ticking.cancel()
                for task in self._asking:
                    task.cancel()
                await asyncio.gather(ticking, *self._asking, return_exceptions=True)
                for subscription in (*heard, *chain.from_iterable(self._news.values())):
                    await subscription.close()
                self._news.clear()
                self._bus = None

    async def door(self, worker: WorkerId, incarnation: Incarnation, *, timeout_s: float, anew: bool) -> DoorOpened:
        """How to come to a worker's door; ``anew``: what was known of it does not hold any more.

        Raises :class:`NoStore`, :class:`ForeignSpec` or :class:`StoreTimeout`.
        """
        known = self._doors.get((worker, incarnation))
        if known is not None and not anew:
            return known
        if self._bus is None:
            raise NoStore("the client was closed")
        ask = OpenDoor(client=self._client, incarnation=self._incarnation, host=self._host, spec=self._digest,
                       tenant=self._tenant)
        try:
            reply: DoorOpened | DoorRefused = await self._bus.request(
                DOOR.at(worker=worker, tenant=tenant_token(self._tenant)), ask, timeout_s=timeout_s)
        except NoResponders as error:
            raise NoStore(f"worker {worker} has no door for clients of the store") from error
        except RequestTimeout as error:
            raise StoreTimeout(f"worker {worker} did not say within {timeout_s:.3g} s where its door is") from error
        except BusError as error:
            raise NoStore(f"worker {worker} cannot be asked for its door: {error}") from error
        if isinstance(reply, DoorRefused):
            raise (ForeignSpec if reply.code == "spec" else EntryRefused)(reply.message)
        for key in [key for key in self._doors if key[0] == worker]:
            del self._doors[key]
        self._doors[worker, reply.incarnation] = reply
        return reply

    # -- what is heard ------------------------------------------------------------------------------------------

    async def _on_hello(self, delivery: Delivery) -> None:
        self._ask(self.map.hello(delivery.message, host_clock_s()))
        if self.map.seats:
            self._heard.set()

    async def _on_load(self, delivery: Delivery) -> None:
        asks, unknown = self.map.load(delivery.message, host_clock_s())
        self._ask(asks)
        if unknown and not self.map.seats and host_clock_s() - self._rollcall_s > ROLLCALL_S:
            await self._call_roll()

    async def _on_bye(self, delivery: Delivery) -> None:
        self.map.bye(delivery.message, host_clock_s())

    async def _on_event(self, delivery: Delivery) -> None:
        self._ask(self.map.event(delivery.message, host_clock_s()))

    async def _call_roll(self) -> None:
        self._rollcall_s = host_clock_s()
        assert self._bus is not None
        await self._bus.publish(ROLLCALL.at(), Rollcall(asker=self._client))

    async def _tick(self, bus: Bus) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not bus.connected:
                self.map.deaf(host_clock_s())
            self._ask(self.map.tick(host_clock_s()))
            for worker in [worker for worker in self._news if not self.map.follows(worker)]:
                for subscription in self._news.pop(worker):
                    await subscription.close()
            self.on_tick()

    # -- questions to owners ------------------------------------------------------------------------------------

    def _ask(self, asks: list[Ask]) -> None:
        for ask in asks:
            task = asyncio.create_task(self._sync(ask), name=f"store-client-sync {ask.worker}")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _sync(self, ask: Ask) -> None:
        """Asks for what was missed; first of all, listens to what comes."""
        assert self._bus is not None
        try:
            if ask.worker not in self._news:
                news = self._news[ask.worker] = []
                for subject in (KV_STORED, KV_EVICTED):
                    news.append(await self._bus.subscribe(subject.at(worker=ask.worker), self._on_event))
            reply = await self._bus.request(KV_SYNC.at(worker=ask.worker), ask.since, timeout_s=SYNC_S)
        except BusError as error:
            log.debug("action=sync_failed worker=%s error=%s", ask.worker, error)
            self._ask(self.map.sync_failed(ask.worker, ask.since.incarnation, host_clock_s()))
        else:
            self._ask(self.map.synced(ask.worker, reply, host_clock_s()))


def submit(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], *, timeout_s: float) -> Any:
    """From a thread: what ``work`` returns on ``loop``. Raises :class:`StoreTimeout`."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(timeout_s)
    except TimeoutError:
        future.cancel()
        raise StoreTimeout(f"no answer from the bus within {timeout_s:.3g} s") from None
