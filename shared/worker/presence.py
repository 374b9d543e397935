"""A worker's presence: it says hello, beats, and says goodbye.

The heartbeat has a thread, a loop and a bus connection of its own, so that data work never makes a healthy worker
look dead. It beats with the latest load the worker's own loop has set, and stops when that loop has not turned for
``_STALLED_S``: a worker that cannot work must not look alive either.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvloop

from shared.bus.bus import Bus, Delivery
from shared.bus.nats import NatsBus
from shared.bus.subjects import BYE, HELLO, LOAD, REFUSE, ROLLCALL
from shared.errors import BusError, UserError
from shared.messages import Bye, Hello, Load
from shared.settings import CommonSettings

log = logging.getLogger(__name__)

_STALLED_S = 10.0


class Refused(UserError):
    """A conductor will not have this worker."""


class Presence:
    """Open it once the worker can work; :attr:`refused` ends with an error when a conductor refuses it.

    A heartbeat is one message for each of ``loads``: those of an elastic worker are two.
    """

    def __init__(self, bus: Bus, settings: CommonSettings, hello: Hello, *loads: Callable[[], Load]) -> None:
        self._bus, self._settings, self._hello, self._loads = bus, settings, hello, loads
        self._latest = self._measure()
        self._turned_s = time.monotonic()
        self._stop = threading.Event()
        self.refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Presence]:
        """Says hello and beats; says goodbye at the end."""
        subscriptions = [
            await self._bus.subscribe(ROLLCALL.at(), self._on_rollcall),
            await self._bus.subscribe(REFUSE.at(worker=self._hello.worker), self._on_refuse),
        ]
        self._bus.on_reconnect(self._say_hello)
        beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        await self._say_hello()
        beating.start()
        try:
            async with asyncio.TaskGroup() as group:
                turning = group.create_task(self._turn(), name="presence-turn")
                try:
                    yield self
                finally:
                    turning.cancel()
        finally:
            self._stop.set()
            for subscription in subscriptions:
                await subscription.close()
            await asyncio.to_thread(beating.join, 5.0)
            self.refused.cancel()
            try:
                bye = Bye(worker=self._hello.worker, incarnation=self._hello.incarnation, reason="stopped",
                          at_s=time.time())
                await self._bus.publish(BYE.at(worker=self._hello.worker), bye)
            except BusError as error:
                log.warning("action=bye_lost error=%s", error)

    async def changed(self) -> None:
        """Tells the new load at once, without waiting for the next beat."""
        self._latest = self._measure()
        try:
            for load in self._latest:
                await self._bus.publish(LOAD.at(worker=self._hello.worker), load)
        except BusError as error:
            log.debug("action=load_lost error=%s", error)

    def _measure(self) -> list[Load]:
        return [load() for load in self._loads]

    async def _say_hello(self) -> None:
        await self._bus.publish(HELLO.at(worker=self._hello.worker), self._hello)
        await self.changed()

    async def _on_rollcall(self, delivery: Delivery) -> None:
        await self._say_hello()

    async def _on_refuse(self, delivery: Delivery) -> None:
        if delivery.message.incarnation == self._hello.incarnation and not self.refused.done():
            self.refused.set_exception(Refused(delivery.message.message))

    async def _turn(self) -> None:
        while True:
            self._latest, self._turned_s = self._measure(), time.monotonic()
            await asyncio.sleep(self._settings.heartbeat_s / 2)

    def _beat(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            while not self._stop.is_set():
                try:
                    runner.run(self._beat_connected())
                except Exception as error:  # the beat must outlive whatever the bus does
                    log.warning("action=heartbeat_retry error=%s", error)
                    self._stop.wait(self._settings.heartbeat_s)

    async def _beat_connected(self) -> None:
        address = LOAD.at(worker=self._hello.worker)
        async with NatsBus.connect(self._settings.nats_url, name=f"{self._hello.worker}-heartbeat",
                                   credentials=self._settings.nats_credentials) as bus:
            while not self._stop.is_set():
                if time.monotonic() - self._turned_s < _STALLED_S:
                    for load in self._latest:
                        await bus.publish(address, load)
                await asyncio.sleep(self._settings.heartbeat_s)
