"""The driver: one task owns the machine, effects come back as events, failures are loud."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from shared import messages as m
from shared.bus.bus import Delivery
from shared.bus.memory import MemoryBus
from shared.bus.subjects import CANCEL, Subject
from shared.clock import ManualClock, SystemClock
from shared.driver import Driver
from shared.errors import Bug, BusError, RequestTimeout
from shared.ids import RequestId
from shared.machine import Answered, Asked, Effect, Publish, Reply, Request, Unanswered, Woke
from tests.support.eventually import eventually

ECHO = Subject("test.{name}.echo", m.Cancel, m.Cancel, about="for these tests only")
A = ECHO.at(name="a")


def cancel(number: int = 0) -> m.Cancel:
    return m.Cancel(request=RequestId(f"r{number}"), reason="", attempt=number)


class Scripted:
    """A machine that remembers its events and answers each with what ``script`` says."""

    def __init__(self, script: Callable[[Any], Sequence[Effect]] = lambda event: ()) -> None:
        self.script = script
        self.events: list[Any] = []
        self.wake_s: float | None = None

    def handle(self, event: Any, *, now: float) -> Sequence[Effect]:
        self.events.append(event)
        if isinstance(event, Woke):
            self.wake_s = None
        return self.script(event)

    def next_wake(self) -> float | None:
        return self.wake_s

    def check_invariants(self) -> None:
        """It has none."""


class Work(Effect, frozen=True):
    """An effect of a service's own."""

    number: int


class Worked(Effect, frozen=True):
    """Its result."""

    number: int


@asynccontextmanager
async def driven(driver: Driver[Any]) -> AsyncIterator[None]:
    """Runs ``driver`` for the length of the block."""
    running = asyncio.create_task(driver.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()


async def test_events_are_handled_in_order() -> None:
    machine = Scripted()
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, SystemClock())
        for number in range(200):
            assert driver.feed(number)
        async with driven(driver):
            await eventually(lambda: len(machine.events) == 200)
    assert machine.events == list(range(200))


async def test_publish_reaches_the_bus_in_order() -> None:
    heard: list[int] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery.message.attempt)

    machine = Scripted(lambda event: [Publish(CANCEL.at(), cancel(event)), Publish(CANCEL.at(), cancel(event + 100))])
    async with MemoryBus() as bus:
        await bus.subscribe(CANCEL.at(), hear)
        driver: Driver[Any] = Driver(machine, bus, SystemClock())
        async with driven(driver):
            driver.feed(1)
            driver.feed(2)
            await eventually(lambda: len(heard) == 4)
    assert heard == [1, 101, 2, 102]


async def test_a_publish_the_bus_does_not_take_is_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    big = m.Cancel(request=RequestId("r"), reason="x" * 100)
    machine = Scripted(lambda event: [Publish(CANCEL.at(), big)])
    async with MemoryBus(max_payload=50) as bus:
        driver: Driver[Any] = Driver(machine, bus, SystemClock())
        async with driven(driver):
            driver.feed(1)
            driver.feed(2)
            await eventually(lambda: len(machine.events) == 2)
            await eventually(lambda: "publish_failed" in caplog.text)


async def test_a_request_comes_back_answered() -> None:
    async def same(delivery: Delivery) -> Any:
        return delivery.message

    machine = Scripted(lambda event: [Request(A, cancel(event), tag=event, timeout_s=5.0)] if event == 7 else [])
    async with MemoryBus() as bus:
        await bus.serve(A, same)
        driver: Driver[Any] = Driver(machine, bus, SystemClock())
        async with driven(driver):
            driver.feed(7)
            await eventually(lambda: len(machine.events) == 2)
    assert machine.events[1] == Answered(7, cancel(7))


async def test_a_request_nobody_answers_comes_back_too() -> None:
    never = asyncio.Event()

    async def silent(delivery: Delivery) -> Any:
        await never.wait()
        return delivery.message

    def script(event: Any) -> Sequence[Effect]:
        return [Request(ECHO.at(name=event), cancel(), tag=event, timeout_s=0.02)] if isinstance(event, str) else []

    machine = Scripted(script)
    async with MemoryBus() as bus:
        await bus.serve(A, silent)
        driver: Driver[Any] = Driver(machine, bus, SystemClock())
        async with driven(driver):
            driver.feed("a")
            driver.feed("b")
            await eventually(lambda: len(machine.events) == 4)
        never.set()
    failures = {event.tag: event.gone for event in machine.events if isinstance(event, Unanswered)}
    assert failures == {"a": False, "b": True}


async def test_an_effect_of_the_service_runs_beside_the_machine() -> None:
    go_on = asyncio.Event()

    async def work(effect: Work) -> Worked | None:
        if effect.number == 1:
            await go_on.wait()
        return Worked(effect.number) if effect.number else None

    machine = Scripted(lambda event: [Work(event)] if isinstance(event, int) else [])
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, SystemClock(), effects={Work: work})
        async with driven(driver):
            for number in (1, 2, 0):
                driver.feed(number)
            await eventually(lambda: Worked(2) in machine.events, "the slow effect does not stall the machine")
            assert Worked(1) not in machine.events
            go_on.set()
            await eventually(lambda: Worked(1) in machine.events)
    assert len(machine.events) == 5  # 0 gave no event


async def test_ask_returns_what_the_machine_replies_now_or_later() -> None:
    kept: list[int] = []

    def script(event: Any) -> Sequence[Effect]:
        if isinstance(event, Asked):
            if event.message == "later":
                kept.append(event.token)
                return []
            return [Reply(event.token, f"re: {event.message}")]
        return [Reply(token, "at last") for token in kept]

    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(Scripted(script), bus, SystemClock())
        async with driven(driver):
            assert await driver.ask("now") == "re: now"
            asking = asyncio.create_task(driver.ask("later"))
            await eventually(lambda: kept)
            driver.feed("go")
            assert await asking == "at last"
            driver.feed("a second reply to the same token is late, not an error")
            assert await driver.ask("still there") == "re: still there"


async def test_ask_serves_the_bus() -> None:
    machine = Scripted(lambda event: [Reply(event.token, event.message)])
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, SystemClock())
        await bus.serve(A, lambda delivery: driver.ask(delivery.message))
        async with driven(driver):
            assert await bus.request(A, cancel(3), timeout_s=5.0) == cancel(3)


async def test_ask_has_a_deadline_and_does_not_outlive_the_driver() -> None:
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(Scripted(), bus, SystemClock(), name="silent")
        async with driven(driver):
            with pytest.raises(RequestTimeout):
                await driver.ask("?", timeout_s=0.01)
            asking = asyncio.create_task(driver.ask("?"))
            await eventually(lambda: len(driver.machine.events) == 2)  # type: ignore[attr-defined]
        with pytest.raises(BusError, match="silent has ended"):
            await asking
        with pytest.raises(BusError, match="silent has ended"):
            await driver.ask("?")


async def test_it_wakes_when_the_machine_wants() -> None:
    clock = ManualClock(start_s=100.0)
    machine = Scripted()
    machine.wake_s = 105.0
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, clock)
        async with driven(driver):
            driver.feed("early")
            await eventually(lambda: machine.events == ["early"])
            clock.advance(5.0)
            driver.poke()
            await eventually(lambda: machine.events == ["early", Woke()])


async def test_it_wakes_by_the_real_clock_and_before_waiting_events() -> None:
    clock = SystemClock()
    machine = Scripted()
    machine.wake_s = clock.monotonic() + 0.02
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, clock)
        async with driven(driver):
            await eventually(lambda: machine.events == [Woke()])
        machine.wake_s = clock.monotonic()
        driver.feed("late")
        async with driven(driver):
            await eventually(lambda: machine.events == [Woke(), Woke(), "late"])


async def test_a_full_backlog_refuses_and_put_waits(caplog: pytest.LogCaptureFixture) -> None:
    machine = Scripted()
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, SystemClock(), backlog=2)
        assert driver.feed(1) and driver.feed(2)
        assert not driver.feed(3)
        assert "machine_backlog_full" in caplog.text
        putting = asyncio.create_task(driver.put(4))
        await asyncio.sleep(0)
        assert not putting.done()
        async with driven(driver):
            await putting
            await eventually(lambda: machine.events == [1, 2, 4])


async def test_a_machine_that_raises_ends_the_driver_with_its_story() -> None:
    def script(event: Any) -> Sequence[Effect]:
        if event == "poison":
            raise KeyError("missing")
        return [Publish(CANCEL.at(), cancel(5))]

    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(Scripted(script), bus, SystemClock(), name="conductor")
        driver.feed("first")
        driver.feed("poison")
        with pytest.raises(Bug, match=r"conductor failed on str: KeyError\('missing'\)") as bug:
            await driver.run()
    assert isinstance(bug.value.__cause__, KeyError)
    assert "event first" in str(bug.value) and "effect Publish" in str(bug.value)


async def test_an_effect_handler_that_raises_ends_the_driver() -> None:
    async def fail(effect: Work) -> None:
        raise OSError("disk gone")

    machine = Scripted(lambda event: [Work(1)])
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, SystemClock(), effects={Work: fail})
        driver.feed("go")
        with pytest.raises(Bug, match=r"doing Work failed.*disk gone"):
            await driver.run()


async def test_an_effect_nobody_performs_is_a_type_error() -> None:
    machine = Scripted(lambda event: [Work(1)])
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, SystemClock())
        driver.feed("go")
        with pytest.raises(TypeError, match="Work"):
            await driver.run()


async def test_a_machine_that_wants_the_past_for_ever_is_a_bug() -> None:
    class Insomniac(Scripted):
        def next_wake(self) -> float | None:
            return 0.0

    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(Insomniac(), bus, ManualClock(start_s=1.0))
        with pytest.raises(Bug, match="for ever"):
            await driver.run()


async def test_cancelling_ends_the_effects_under_way() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(effect: Work) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    machine = Scripted(lambda event: [Work(1)])
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, SystemClock(), effects={Work: hang})
        driver.feed("go")
        async with driven(driver):
            await started.wait()
    assert cancelled.is_set()


async def test_effects_run_in_the_trace_of_the_event_that_caused_them() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    seen: dict[Any, int] = {}

    async def look(effect: Work) -> Worked:
        seen[effect.number] = trace.get_current_span().get_span_context().trace_id
        return Worked(effect.number)

    def script(event: Any) -> Sequence[Effect]:
        if isinstance(event, Worked):
            return [Work(event.number + 10)] if event.number < 10 else []
        return [Work(event)]

    machine = Scripted(script)
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, SystemClock(), effects={Work: look})
        async with driven(driver):
            with tracer.start_as_current_span("root") as root:
                driver.feed(1)
            driver.feed(2)
            await eventually(lambda: set(seen) == {1, 2, 11, 12})
    traced = root.get_span_context().trace_id
    assert seen == {1: traced, 11: traced, 2: 0, 12: 0}


async def test_the_story_is_capped() -> None:
    machine = Scripted()
    async with MemoryBus() as bus:
        driver: Driver[Any] = Driver(machine, bus, SystemClock())
        async with driven(driver):
            for number in range(2000):
                driver.feed(number)
            await eventually(lambda: len(machine.events) == 2000)
    assert len(driver.story()) == 512
    assert driver.story()[-1].endswith("event 1999")
