"""Runs a :class:`shared.machine.Machine` with asyncio: events in from anywhere, effects out over the bus.

One task, the one in :meth:`Driver.run`, touches the machine. It performs ``Publish`` itself, in order; everything
that waits for somebody (``Request``, a service's own effects) runs in a task that the driver owns, and comes back as
an event. The trace context that was current when an event came in is current again around its effects.

A machine that raises is broken, and so is a service with a broken machine: ``run`` raises :class:`Bug` with the
story of what led there, and so it does when an effect's handler raises, since a failure that matters must come back
as an event.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from opentelemetry import context as trace_context
from opentelemetry.context import Context

from shared.bus.bus import Bus
from shared.clock import Clock
from shared.errors import Bug, BusError, NoResponders, RequestTimeout
from shared.machine import Answered, Asked, Effect, Machine, Publish, Reply, Request, Unanswered, Woke
from shared.telemetry import metrics
from shared.telemetry.logs import Limited

E = TypeVar("E")
EffectHandler = Callable[[Any], Awaitable[Any]]
"""Performs an effect; returns the event to feed, or ``None``."""

BACKLOG = 65_536
"""Most events that wait for the machine."""
STORY = 512
"""Events and effects remembered for the story of a bug."""
_TURN = 64
"""Events handled before the loop may turn to others."""
_SPIN = 1000
"""Consecutive wake-ups without any time passing that prove a machine wants to be woken in the past for ever."""

_log = logging.getLogger(__name__)


class Driver(Generic[E]):
    """Drives ``machine``. Nothing happens before :meth:`run`; events fed earlier wait."""

    def __init__(
        self,
        machine: Machine[Any],
        bus: Bus,
        clock: Clock,
        *,
        effects: Mapping[type[Effect], EffectHandler] | None = None,
        name: str = "machine",
        backlog: int = BACKLOG,
    ) -> None:
        self.machine = machine
        self._bus, self._clock, self._name, self._backlog = bus, clock, name, backlog
        self._handlers = dict(effects or {})
        #: events from outside wait here up to ``backlog``; results of our own effects always find room
        self._events: deque[tuple[Any, Context]] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._tokens = itertools.count(1)
        #: {token of Asked: who waits for its Reply}
        self._askers: dict[int, asyncio.Future[Any]] = {}
        self._story: deque[tuple[float, str, Any]] = deque(maxlen=STORY)
        self._tasks: asyncio.TaskGroup | None = None
        self._ended = False
        self._complaints = Limited(_log)
        self._backlog_gauge = metrics.MACHINE_BACKLOG.labels(machine=name)
        self._handle_seconds = metrics.MACHINE_SECONDS.labels(machine=name)

    # Events in.

    def feed(self, event: E | Asked) -> bool:
        """Gives the machine an event; ``False`` (and counted, and said) when its backlog is full. Never waits.

        To be called in the loop's thread; from another one use ``loop.call_soon_threadsafe(driver.feed, event)``.
        """
        if len(self._events) >= self._backlog:
            metrics.MACHINE_DROPPED.labels(machine=self._name).inc()
            self._complaints.warning("machine_backlog_full", key=type(event).__name__, machine=self._name,
                                     event=type(event).__name__)
            return False
        self._push(event)
        return True

    async def put(self, event: E | Asked) -> None:
        """Gives the machine an event, waiting for room: whoever calls is slowed down instead of losing it."""
        while len(self._events) >= self._backlog:
            self._room.clear()
            await self._room.wait()
        self._push(event)

    async def ask(self, message: Any, *, timeout_s: float = 30.0) -> Any:
        """Feeds ``Asked(message)`` and returns what the machine replies. Made for ``bus.serve``::

            await bus.serve(PLACE.any(), lambda delivery: driver.ask(delivery.message), queue="conductor")

        Raises ``RequestTimeout`` when it does not reply in time, ``BusError`` when the driver ends first.
        """
        if self._ended:
            raise BusError(f"{self._name} has ended")
        token = next(self._tokens)
        reply = self._askers[token] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self.put(Asked(token, message))
                return await reply
        except TimeoutError as error:
            raise RequestTimeout(self._name, timeout_s) from error
        finally:
            del self._askers[token]

    def poke(self) -> None:
        """Makes the driver look at ``next_wake`` again, after a clock was moved by hand."""
        self._changed.set()

    # The one task.

    async def run(self) -> None:
        """Drives until cancelled; raises :class:`Bug` when the machine or an effect's handler fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._turn()
        except BaseExceptionGroup as group:
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from group.exceptions[0].__cause__
        finally:
            self._tasks, self._ended = None, True
            for asker in self._askers.values():
                if not asker.done():
                    asker.set_exception(BusError(f"{self._name} has ended"))

    def story(self) -> list[str]:
        """The last events and effects, oldest first, one line each."""
        return [f"{at_s:.6f} {kind} {what}" for at_s, kind, what in self._story]

    async def _turn(self) -> None:
        handled = spun = 0
        woke_s = float("-inf")
        while True:
            now_s = self._clock.monotonic()
            wake_s = self.machine.next_wake()
            if wake_s is not None and wake_s <= now_s:
                spun = spun + 1 if now_s == woke_s else 0
                woke_s = now_s
                if spun > _SPIN:
                    raise Bug(f"{self._name} wants to be woken at {wake_s:.6f} for ever; now it is {now_s:.6f}"
                              f"{self._told()}")
                await self._handle(Woke(), Context(), now_s)
            elif self._events:
                event, context = self._events.popleft()
                if not self._room.is_set() and len(self._events) < self._backlog:
                    self._room.set()
                await self._handle(event, context, now_s)
            else:
                self._backlog_gauge.set(0)
                await self._wait_until(wake_s)
                handled = 0
                continue
            handled += 1
            if handled % _TURN == 0:
                self._backlog_gauge.set(len(self._events))
                await asyncio.sleep(0)

    async def _wait_until(self, wake_s: float | None) -> None:
        """Returns at ``wake_s`` (monotonic seconds) or earlier, when there is an event."""
        delay_s = None if wake_s is None else max(0.0, wake_s - self._clock.monotonic())
        try:
            async with asyncio.timeout(delay_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    async def _handle(self, event: Any, context: Context, now_s: float) -> None:
        self._story.append((now_s, "event", event))
        began_s = time.perf_counter()
        try:
            effects = self.machine.handle(event, now=now_s)
        except Exception as error:
            raise Bug(f"{self._name} failed on {type(event).__name__}: {error!r}{self._told()}") from error
        self._handle_seconds.observe(time.perf_counter() - began_s)
        token = trace_context.attach(context)
        try:
            for effect in effects:
                self._story.append((now_s, "effect", effect))
                await self._perform(effect)
        finally:
            trace_context.detach(token)

    # Effects out.

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case Publish():
                await self._publish(effect)
            case Reply():
                asker = self._askers.get(effect.token)
                if asker is not None and not asker.done():  # else it gave up at its deadline
                    asker.set_result(effect.message)
            case Request():
                self._own(self._request(effect), f"{self._name} request {effect.address}")
            case _:
                handler = self._handler(effect)
                self._own(self._run(handler, effect), f"{self._name} {type(effect).__name__}")

    def _handler(self, effect: Effect) -> EffectHandler:
        for kind in type(effect).__mro__:
            if kind in self._handlers:
                return self._handlers[kind]
        raise TypeError(f"{self._name} wants {type(effect).__name__} done and nobody here does that; "
                        f"known: {', '.join(kind.__name__ for kind in self._handlers) or 'none'}")

    async def _publish(self, effect: Publish) -> None:
        try:
            await self._bus.publish(effect.address, effect.message)
        except BusError as error:  # at most once, by contract: receivers notice gaps
            template = effect.address.subject.template
            metrics.BUS_PUBLISH_FAILURES.labels(subject=template).inc()
            self._complaints.warning("publish_failed", key=template, subject=effect.address, why=error)

    async def _request(self, effect: Request) -> None:
        try:
            message = await self._bus.request(effect.address, effect.message, timeout_s=effect.timeout_s)
        except NoResponders as error:
            self._push(Unanswered(effect.tag, str(error), gone=True))
        except BusError as error:
            self._push(Unanswered(effect.tag, str(error)))
        else:
            self._push(Answered(effect.tag, message))

    async def _run(self, handler: EffectHandler, effect: Effect) -> None:
        try:
            event = await handler(effect)
        except Exception as error:
            raise Bug(f"{self._name}: doing {type(effect).__name__} failed: {error!r}{self._told()}") from error
        if event is not None:
            self._push(event)

    def _own(self, work: Any, name: str) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work, name=name)

    def _push(self, event: Any) -> None:
        self._events.append((event, trace_context.get_current()))
        self._changed.set()

    def _told(self) -> str:
        return "\n  " + "\n  ".join(self.story()[-40:])
