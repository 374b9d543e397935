"""What every bus promises: one body over the bus in memory and a real NATS server."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats
import pytest
import pytest_asyncio
import uvloop
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from services.launcher.embedded import nats_server as run_nats_server
from services.launcher.ports import free_port
from shared import messages as m
from shared.bus.bus import Bus, Delivery
from shared.bus.memory import MemoryBus
from shared.bus.nats import NatsBus
from shared.bus.streams import Consumer, Stream
from shared.bus.subjects import CANCEL, DONE, STATS, WORKERS, Subject
from shared.errors import BusError, DecodeError, NoResponders, PayloadTooLarge, RequestTimeout, Unavailable
from shared.ids import GatewayId, RequestId, SpecDigest
from tests.support.eventually import eventually

ECHO = Subject("test.{name}.echo", m.Cancel, m.Cancel, about="for these tests only")
STREAM = Stream(name="KV", subjects=(DONE.any().text,), max_bytes=2**20, max_age_s=3600.0)
READER = Consumer(name="reader", stream="KV", ack_wait_s=0.5, max_ack_pending=100)

Connect = Callable[[], Awaitable[Bus]]


def cancel(number: int = 0, *, padding: int = 0) -> m.Cancel:
    return m.Cancel(request=RequestId(f"r{number}"), reason="x" * padding, attempt=number)


def done(number: int) -> m.RequestDone:
    return m.RequestDone(request=RequestId(f"r{number}"), gateway=GatewayId("g"), model="m", spec=SpecDigest("s"),
                         tenant="t", received_at_s=float(number), outcome="ok")


@pytest.fixture(params=["memory", "nats"])
def url(request: pytest.FixtureRequest) -> str:
    """URL of a real server; empty for the bus in memory."""
    return str(request.getfixturevalue("nats_url")) if request.param == "nats" else ""


@pytest_asyncio.fixture
async def connect(url: str) -> AsyncIterator[Connect]:
    """Makes buses that hear each other. In memory that is one and the same."""
    async with AsyncExitStack() as stack:
        if not url:
            shared = await stack.enter_async_context(MemoryBus())

            async def connect_memory() -> Bus:
                return shared

            yield connect_memory
        else:
            async def connect_nats() -> Bus:
                return await stack.enter_async_context(NatsBus.connect(url, name="contract"))

            yield connect_nats


@pytest_asyncio.fixture
async def bus(connect: Connect) -> Bus:
    return await connect()


async def publish_raw(bus: Bus, url: str, subject: str, data: bytes) -> None:
    """Publishes bytes that no bus of ours would."""
    if isinstance(bus, MemoryBus):
        await bus.publish_raw(subject, data)
    else:
        client = await nats.connect(url)
        await client.publish(subject, data)
        await client.close()


class Heard:
    """A handler that keeps what it hears."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []

    @property
    def messages(self) -> list[Any]:
        return [delivery.message for delivery in self.deliveries]

    async def __call__(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    async def wait(self, count: int) -> list[Any]:
        await eventually(lambda: len(self.deliveries) >= count, f"{count} messages")
        return self.messages


async def answer_same(delivery: Delivery) -> Any:
    return delivery.message


# Publish and subscribe.

async def test_messages_arrive_in_order(connect: Connect) -> None:
    speaker, reader = await connect(), await connect()
    heard = Heard()
    await reader.subscribe(CANCEL.at(), heard)
    for number in range(500):
        await speaker.publish(CANCEL.at(), cancel(number))
    assert await heard.wait(500) == [cancel(number) for number in range(500)]
    assert reader.statistics().delivered == 500


async def test_a_handler_gets_one_message_at_a_time(bus: Bus) -> None:
    at_work, most, seen = 0, 0, 0

    async def handler(delivery: Delivery) -> None:
        nonlocal at_work, most, seen
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0)
        at_work -= 1
        seen += 1

    await bus.subscribe(CANCEL.at(), handler)
    for number in range(20):
        await bus.publish(CANCEL.at(), cancel(number))
    await eventually(lambda: seen == 20)
    assert most == 1


async def test_a_pattern_hears_all_addresses_and_tells_them_apart(bus: Bus) -> None:
    heard = Heard()
    await bus.subscribe(ECHO.any(), heard)
    await bus.publish(ECHO.at(name="a"), cancel(1))
    await bus.publish(ECHO.at(name="b"), cancel(2))
    await heard.wait(2)
    assert [delivery.params["name"] for delivery in heard.deliveries] == ["a", "b"]


async def test_every_subscriber_hears(connect: Connect) -> None:
    first, second = Heard(), Heard()
    await (await connect()).subscribe(CANCEL.at(), first)
    await (await connect()).subscribe(CANCEL.at(), second)
    await (await connect()).publish(CANCEL.at(), cancel())
    assert await first.wait(1) == await second.wait(1)


async def test_a_closed_subscription_is_silent(bus: Bus) -> None:
    heard, control = Heard(), Heard()
    subscription = await bus.subscribe(CANCEL.at(), heard)
    await subscription.close()
    await subscription.close()
    await bus.subscribe(CANCEL.at(), control)
    await bus.publish(CANCEL.at(), cancel())
    await control.wait(1)
    assert heard.messages == []


async def test_closing_lets_the_handler_at_work_finish(bus: Bus) -> None:
    started, go_on, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        started.set()
        await go_on.wait()
        finished.set()

    subscription = await bus.subscribe(CANCEL.at(), handler)
    await bus.publish(CANCEL.at(), cancel())
    await started.wait()
    closing = asyncio.create_task(subscription.close())
    await asyncio.sleep(0)
    assert not closing.done()
    go_on.set()
    await closing
    assert finished.is_set()


async def test_a_handler_may_close_its_own_subscription(bus: Bus) -> None:
    closed = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        await subscription.close()
        closed.set()

    subscription = await bus.subscribe(CANCEL.at(), handler)
    await bus.publish(CANCEL.at(), cancel())
    async with asyncio.timeout(2.0):
        await closed.wait()


async def test_a_handler_that_raises_goes_on_with_the_next_message(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    async def handler(delivery: Delivery) -> None:
        heard.append(delivery.message.attempt)
        if delivery.message.attempt == 0:
            raise RuntimeError("boom")

    await bus.subscribe(CANCEL.at(), handler)
    await bus.publish(CANCEL.at(), cancel(0))
    await bus.publish(CANCEL.at(), cancel(1))
    await eventually(lambda: heard == [0, 1])
    assert "boom" in caplog.text


async def test_headers_travel(bus: Bus) -> None:
    heard = Heard()
    await bus.subscribe(CANCEL.at(), heard)
    await bus.publish(CANCEL.at(), cancel(), headers={"x-why": "test"})
    await heard.wait(1)
    assert heard.deliveries[0].headers["x-why"] == "test"


# Bounds.

async def test_a_full_backlog_drops_the_newest_and_counts_them(bus: Bus) -> None:
    heard, begun, go_on = Heard(), asyncio.Event(), asyncio.Event()

    async def slow(delivery: Delivery) -> None:
        begun.set()
        await go_on.wait()
        await heard(delivery)

    await bus.subscribe(CANCEL.at(), slow, backlog=10)
    await bus.publish(CANCEL.at(), cancel(0))
    await begun.wait()  # it is at work, and has left the backlog
    for number in range(1, 30):
        await bus.publish(CANCEL.at(), cancel(number))
    await eventually(lambda: bus.statistics().dropped >= 19, "drops are counted")
    go_on.set()
    assert await heard.wait(11) == [cancel(number) for number in range(11)]
    assert bus.statistics().dropped == 19


async def test_a_message_over_the_limit_is_refused_with_both_numbers(bus: Bus) -> None:
    with pytest.raises(PayloadTooLarge) as refusal:
        await bus.publish(CANCEL.at(), cancel(padding=9 * 2**20))
    assert refusal.value.limit_bytes == 8 * 2**20
    assert refusal.value.size_bytes > 9 * 2**20
    with pytest.raises(PayloadTooLarge):
        await bus.request(ECHO.at(name="a"), cancel(padding=9 * 2**20), timeout_s=1.0)


async def test_a_message_just_below_the_limit_travels(bus: Bus) -> None:
    heard = Heard()
    await bus.subscribe(CANCEL.at(), heard)
    big = cancel(padding=8 * 2**20 - 200)
    await bus.publish(CANCEL.at(), big)
    assert await heard.wait(1) == [big]


async def test_undecodable_bytes_are_counted_and_kill_nothing(
    bus: Bus, url: str, caplog: pytest.LogCaptureFixture,
) -> None:
    heard = Heard()
    await bus.subscribe(CANCEL.at(), heard)
    for data in (b"", b"\xc1 no MessagePack", b"\x81\xa4type\xa7Unknown", b"\x80"):
        await publish_raw(bus, url, CANCEL.at().text, data)
    await eventually(lambda: bus.statistics().undecodable == 4)
    await bus.publish(CANCEL.at(), cancel())
    assert await heard.wait(1) == [cancel()]
    complaints = [record for record in caplog.records if record.message == "undecodable"]
    assert len(complaints) == 1  # said once, not four times
    assert CANCEL.at().text in str(complaints[0].fields)  # type: ignore[attr-defined]


# Requests.

async def test_a_request_is_answered(connect: Connect) -> None:
    server, asker = await connect(), await connect()
    await server.serve(ECHO.any(), answer_same)
    assert await asker.request(ECHO.at(name="a"), cancel(7), timeout_s=5.0) == cancel(7)


async def test_nobody_there_is_known_at_once(bus: Bus) -> None:
    with pytest.raises(NoResponders) as nobody:
        await bus.request(ECHO.at(name="a"), cancel(), timeout_s=5.0)
    assert nobody.value.subject == ECHO.at(name="a").text


async def test_nobody_is_there_after_a_server_closed(bus: Bus) -> None:
    serving = await bus.serve(ECHO.at(name="a"), answer_same)
    await bus.request(ECHO.at(name="a"), cancel(), timeout_s=5.0)
    await serving.close()
    with pytest.raises(NoResponders):
        await bus.request(ECHO.at(name="a"), cancel(), timeout_s=5.0)


async def test_no_answer_is_a_timeout(bus: Bus) -> None:
    never = asyncio.Event()

    async def ponder(delivery: Delivery) -> Any:
        await never.wait()
        return delivery.message

    await bus.serve(ECHO.any(), ponder)
    with pytest.raises(RequestTimeout) as late:
        await bus.request(ECHO.at(name="a"), cancel(), timeout_s=0.05)
    assert late.value.timeout_s == 0.05
    never.set()


async def test_a_server_that_raises_answers_nothing_and_goes_on(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    async def picky(delivery: Delivery) -> Any:
        if delivery.message.attempt == 0:
            raise RuntimeError("boom")
        return delivery.message

    await bus.serve(ECHO.any(), picky)
    with pytest.raises(RequestTimeout):
        await bus.request(ECHO.at(name="a"), cancel(0), timeout_s=0.05)
    assert await bus.request(ECHO.at(name="a"), cancel(1), timeout_s=5.0) == cancel(1)
    assert "boom" in caplog.text


async def test_an_answer_of_the_wrong_kind_is_an_error_for_the_asker(bus: Bus) -> None:
    async def wrong(delivery: Delivery) -> Any:
        return m.StatsQuery()

    await bus.serve(WORKERS.at(), wrong)
    with pytest.raises(DecodeError):
        await bus.request(WORKERS.at(), m.WorkersQuery(), timeout_s=5.0)
    assert bus.statistics().undecodable == 1


async def test_an_undecodable_request_kills_nothing(bus: Bus, url: str) -> None:
    await bus.serve(ECHO.at(name="a"), answer_same)
    await publish_raw(bus, url, ECHO.at(name="a").text, b"\xff")
    assert await bus.request(ECHO.at(name="a"), cancel(1), timeout_s=5.0) == cancel(1)
    await eventually(lambda: bus.statistics().undecodable == 1)


async def test_requests_run_side_by_side_up_to_the_limit(bus: Bus) -> None:
    at_work, most, go_on = 0, 0, asyncio.Event()

    async def slow(delivery: Delivery) -> Any:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await go_on.wait()
        at_work -= 1
        return delivery.message

    await bus.serve(ECHO.any(), slow, concurrency=4)
    asking = [asyncio.create_task(bus.request(ECHO.at(name="a"), cancel(n), timeout_s=5.0)) for n in range(10)]
    await eventually(lambda: at_work == 4)
    go_on.set()
    assert sorted(reply.attempt for reply in await asyncio.gather(*asking)) == list(range(10))
    assert most == 4


async def test_one_of_a_queue_group_gets_each_request(connect: Connect) -> None:
    counts = [0, 0, 0]

    def server(number: int) -> Callable[[Delivery], Awaitable[Any]]:
        async def count(delivery: Delivery) -> Any:
            counts[number] += 1
            return delivery.message

        return count

    for number in range(3):
        await (await connect()).serve(ECHO.any(), server(number), queue="servers")
    asker = await connect()
    for number in range(60):
        await asker.request(ECHO.at(name="a"), cancel(number), timeout_s=5.0)
    assert sum(counts) == 60
    assert all(count > 0 for count in counts)


# Trace context.

async def test_the_trace_goes_along(connect: Connect) -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    seen: dict[str, int] = {}

    async def served(delivery: Delivery) -> Any:
        seen["served"] = trace.get_current_span().get_span_context().trace_id
        return delivery.message

    async def heard(delivery: Delivery) -> None:
        seen["heard"] = trace.get_current_span().get_span_context().trace_id

    server, asker = await connect(), await connect()
    await server.serve(ECHO.any(), served)
    await server.subscribe(CANCEL.at(), heard)
    with tracer.start_as_current_span("root") as root:
        await asker.request(ECHO.at(name="a"), cancel(), timeout_s=5.0)
        await asker.publish(CANCEL.at(), cancel())
    await eventually(lambda: "heard" in seen)
    assert seen == {"served": root.get_span_context().trace_id, "heard": root.get_span_context().trace_id}
    await asker.publish(CANCEL.at(), cancel())
    await eventually(lambda: seen["heard"] == 0, "outside a trace there is none")


# Streams.

async def test_a_stream_keeps_what_was_published_before_its_reader_came(bus: Bus) -> None:
    await bus.ensure((STREAM,), ())
    for number in range(5):
        await bus.publish(DONE.at(), done(number))
    await bus.ensure((STREAM,), (READER,))
    await eventually(lambda: pending_is(bus, 5))
    durables = await bus.pull(READER, batch=100, timeout_s=5.0)
    assert [durable.delivery.message for durable in durables] == [done(number) for number in range(5)]
    assert [durable.stream_seq for durable in durables] == [1, 2, 3, 4, 5]


async def pending_is(bus: Bus, count: int) -> bool:
    return await bus.pending(READER) == count


async def test_what_is_acknowledged_is_no_longer_pending(bus: Bus) -> None:
    await bus.ensure((STREAM,), (READER,))
    for number in range(3):
        await bus.publish(DONE.at(), done(number))
    durables = await bus.pull(READER, batch=2, timeout_s=5.0)
    assert len(durables) in (1, 2)  # a pull returns what is there, up to the batch
    durables += await bus.pull(READER, batch=2, timeout_s=5.0) if len(durables) == 1 else []
    await eventually(lambda: pending_is(bus, 3))  # the stream stores what was published a moment later
    for durable in durables:
        await durable.ack()
    await eventually(lambda: pending_is(bus, 3 - len(durables)))


async def test_what_is_not_acknowledged_comes_again(bus: Bus) -> None:
    await bus.ensure((STREAM,), (READER,))
    await bus.publish(DONE.at(), done(0))
    first = await bus.pull(READER, batch=10, timeout_s=5.0)
    again = await bus.pull(READER, batch=10, timeout_s=5.0)
    assert [durable.delivery.message for durable in again] == [durable.delivery.message for durable in first]
    assert again[0].stream_seq == first[0].stream_seq
    await again[0].ack()
    assert await bus.pull(READER, batch=10, timeout_s=1.0) == []


async def test_a_pull_returns_when_something_comes(bus: Bus) -> None:
    await bus.ensure((STREAM,), (READER,))
    pulling = asyncio.create_task(bus.pull(READER, batch=10, timeout_s=10.0))
    await bus.publish(DONE.at(), done(0))
    async with asyncio.timeout(5.0):
        durables = await pulling
    assert [durable.delivery.message for durable in durables] == [done(0)]


async def test_an_empty_stream_gives_nothing_in_time(bus: Bus) -> None:
    await bus.ensure((STREAM,), (READER,))
    assert await bus.pull(READER, batch=10, timeout_s=0.1) == []


async def test_ensure_may_be_repeated_and_changed(bus: Bus) -> None:
    await bus.ensure((STREAM,), (READER,))
    await bus.publish(DONE.at(), done(0))
    await bus.ensure((STREAM,), (READER,))
    larger = Stream(name="KV", subjects=STREAM.subjects, max_bytes=2**21, max_age_s=60.0)
    slower = Consumer(name="reader", stream="KV", ack_wait_s=2.0, max_ack_pending=7)
    await bus.ensure((larger,), (slower,))
    durables = await bus.pull(slower, batch=10, timeout_s=5.0)
    assert [durable.delivery.message for durable in durables] == [done(0)]


async def test_undecodable_bytes_in_a_stream_are_counted_and_do_not_come_again(
    bus: Bus, url: str,
) -> None:
    await bus.ensure((STREAM,), (READER,))
    await publish_raw(bus, url, DONE.at().text, b"\xff")
    await eventually(lambda: pending_is(bus, 1))
    await bus.publish(DONE.at(), done(1))
    durables = await pull_all(bus, 1)
    assert [durable.delivery.message for durable in durables] == [done(1)]
    assert bus.statistics().undecodable == 1
    await durables[0].ack()
    await eventually(lambda: pending_is(bus, 0))


async def pull_all(bus: Bus, count: int) -> list[Any]:
    """Pulls until ``count`` messages came."""
    durables: list[Any] = []
    while len(durables) < count:
        durables += await bus.pull(READER, batch=count, timeout_s=5.0)
    return durables


async def test_a_record_is_replaced_only_by_who_read_it_last(connect: Connect) -> None:
    one, other = await connect(), await connect()
    assert await one.record_read("r", timeout_s=5.0) is None
    first = await one.record_write("r", b"one", revision=0, timeout_s=5.0)
    assert first is not None
    assert await other.record_write("r", b"other", revision=0, timeout_s=5.0) is None, "it was not there, they thought"
    read = await other.record_read("r", timeout_s=5.0)
    assert read is not None and (read.value, read.revision) == (b"one", first)
    second = await other.record_write("r", b"other", revision=first, timeout_s=5.0)
    assert second is not None and second > first
    assert await one.record_write("r", b"late", revision=first, timeout_s=5.0) is None
    read = await one.record_read("r", timeout_s=5.0)
    assert read is not None and (read.value, read.revision) == (b"other", second)
    assert await one.record_write("s", b"", revision=0, timeout_s=5.0) is not None, "each name on its own"


async def test_a_consumer_of_no_stream_is_an_error(bus: Bus) -> None:
    with pytest.raises((BusError, Unavailable)):
        await bus.ensure((), (Consumer("reader", "NONE", 1.0, 10),))


# A real server that goes and comes back.

async def test_after_a_restart_of_the_server_everything_works_again(tmp_path: Path) -> None:
    async with (
        run_nats_server(tmp_path / "nats") as server,
        NatsBus.connect(server.url, name="reader") as reader,
        NatsBus.connect(server.url, name="speaker") as speaker,
    ):
        heard, back = Heard(), asyncio.Event()

        async def say_back() -> None:
            back.set()

        reader.on_reconnect(say_back)
        await reader.subscribe(CANCEL.at(), heard)
        await reader.serve(ECHO.any(), answer_same)
        await reader.ensure((STREAM,), (READER,))
        await speaker.publish(CANCEL.at(), cancel(1))
        await speaker.publish(DONE.at(), done(1))
        await heard.wait(1)
        await eventually(lambda: pending_is(reader, 1))

        await server.stop(kill=True)
        with pytest.raises(BusError):
            await speaker.request(ECHO.at(name="a"), cancel(), timeout_s=0.1)
        await eventually(lambda: not reader.connected)
        await server.start()
        async with asyncio.timeout(10.0):
            await back.wait()
        assert reader.connected

        await eventually(lambda: speaker.statistics().reconnects == 1)
        assert reader.statistics().reconnects == 1
        await speaker.publish(CANCEL.at(), cancel(2))
        assert (await heard.wait(2))[-1] == cancel(2)
        assert await speaker.request(ECHO.at(name="a"), cancel(3), timeout_s=5.0) == cancel(3)
        durables = await reader.pull(READER, batch=10, timeout_s=5.0)
        assert [durable.delivery.message for durable in durables] == [done(1)]


async def test_a_server_that_stands_still_is_taken_for_gone_and_used_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: its connections stay open, so that only deadlines and pings show that nobody is behind them."""
    monkeypatch.setattr("shared.bus.nats.PING_S", 0.2)
    async with (
        run_nats_server(tmp_path / "nats") as server,
        NatsBus.connect(server.url, name="reader") as reader,
        NatsBus.connect(server.url, name="speaker") as speaker,
    ):
        await reader.serve(ECHO.any(), answer_same)
        await reader.ensure((STREAM,), (READER,))
        revision = await speaker.record_write("lease", b"a", revision=0, timeout_s=5.0)
        assert revision is not None and server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                with pytest.raises(BusError):
                    await speaker.request(ECHO.at(name="a"), cancel(), timeout_s=0.1)
                with pytest.raises(BusError):
                    await speaker.record_write("lease", b"b", revision=revision, timeout_s=0.1)
                with pytest.raises(BusError):
                    await speaker.record_read("lease", timeout_s=0.1)
            await eventually(lambda: not reader.connected and not speaker.connected, "both know that it is gone")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await eventually(lambda: reader.connected and speaker.connected, timeout_s=20.0)
        assert await speaker.request(ECHO.at(name="a"), cancel(3), timeout_s=5.0) == cancel(3)
        await speaker.publish(DONE.at(), done(1))
        assert [durable.delivery.message for durable in await pull_all(reader, 1)] == [done(1)]
        record = await speaker.record_read("lease", timeout_s=5.0)
        assert record is not None  # the write that nobody answered may have been done


async def test_a_server_that_comes_back_with_nothing_is_furnished_again(tmp_path: Path) -> None:
    async with (
        run_nats_server(tmp_path / "nats") as server,
        NatsBus.connect(server.url, name="reader") as reader,
        NatsBus.connect(server.url, name="speaker") as speaker,
    ):
        await reader.serve(ECHO.any(), answer_same)
        await reader.ensure((STREAM,), (READER,))
        assert await speaker.record_write("lease", b"a", revision=0, timeout_s=5.0)
        await speaker.publish(DONE.at(), done(1))
        assert [durable.delivery.message for durable in await pull_all(reader, 1)] == [done(1)]
        await server.stop(kill=True)
        shutil.rmtree(tmp_path / "nats" / "jetstream")
        await server.start()

        async def works() -> bool:
            try:
                await speaker.publish(DONE.at(), done(2))
                return bool(await reader.pull(READER, batch=10, timeout_s=0.2))
            except BusError:
                return False

        async def is_written() -> bool:
            try:
                assert await speaker.record_read("lease", timeout_s=0.5) is None
                return await speaker.record_write("lease", b"b", revision=0, timeout_s=0.5) is not None
            except BusError:
                return False

        await eventually(works, "stream and reader are there again", timeout_s=20.0)
        await eventually(is_written, "records can be used again", timeout_s=20.0)
        assert await speaker.request(ECHO.at(name="a"), cancel(3), timeout_s=5.0) == cancel(3)


async def test_what_is_published_while_the_server_is_away_arrives_when_it_is_back(tmp_path: Path) -> None:
    async with (
        run_nats_server(tmp_path / "nats") as server,
        NatsBus.connect(server.url, name="reader") as reader,
        NatsBus.connect(server.url, name="speaker") as speaker,
    ):
        heard, away, back = Heard(), asyncio.Event(), asyncio.Event()

        async def say_back() -> None:
            back.set()

        reader.on_reconnect(say_back)
        await reader.subscribe(CANCEL.at(), heard)
        await server.stop()
        with pytest.raises(BusError):  # by the time a request has failed, the client knows
            await speaker.request(STATS.at(), m.StatsQuery(), timeout_s=0.2)
        away.set()
        await server.start()
        await speaker.publish(CANCEL.at(), cancel(1))
        async with asyncio.timeout(10.0):
            await back.wait()
        await eventually(lambda: speaker.statistics().reconnects == 1)
        await speaker.publish(CANCEL.at(), cancel(2))
        await eventually(lambda: cancel(2) in heard.messages)


def test_a_bus_whose_connection_is_gone_closes_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before the client has noticed; on the loop of our services, which is strict about what is closed."""
    async def leave_it() -> None:
        async with run_nats_server(tmp_path / "nats") as server, NatsBus.connect(server.url, name="test") as bus:
            assert bus._client._transport is not None
            bus._client._transport.close()
            bus._client._pending, bus._client._pending_data_size = [b"PING\r\n"], 6
            await bus._close()  # now, in the turn of the loop in which it is lost
        assert bus._client.is_closed and bus._client._client_id is None, "all of the closing was done"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(leave_it())
    assert not [record for record in caplog.records if record.exc_info]


async def test_no_server_is_one_clear_line() -> None:
    with pytest.raises(Unavailable, match=r"cannot reach NATS at nats://127\.0\.0\.1:1 .*moonbus up.*MOONBUS_NATS_URL"):
        async with NatsBus.connect("nats://127.0.0.1:1", name="test"):
            pass


async def test_a_server_that_comes_within_the_wait_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port("127.0.0.1")

    async def connect() -> bool:
        async with NatsBus.connect(f"nats://127.0.0.1:{port}", name="test", wait_s=60.0) as bus:
            return bus.connected

    connecting = asyncio.create_task(connect())
    await eventually(lambda: "bus_error" in caplog.text, "it was tried in vain")
    async with run_nats_server(tmp_path / "nats", port=port):
        assert await connecting


async def test_a_bus_that_is_sent_away_for_good_ends_its_service(tmp_path: Path) -> None:
    async with run_nats_server(tmp_path / "nats") as server:
        with pytest.raises(Unavailable, match=r"closed the connection: .*check the credentials"):
            async with NatsBus.connect(server.url, name="test"):
                with (tmp_path / "nats" / "nats.conf").open("a") as config:
                    config.write('authorization { token: "secret" }\n')
                assert server.pid is not None
                os.kill(server.pid, signal.SIGHUP)  # the server reads its configuration again
                async with asyncio.timeout(10.0):
                    await asyncio.Event().wait()
        with pytest.raises(Unavailable, match=r"cannot reach NATS .*credentials"):
            async with NatsBus.connect(server.url, name="test"):
                pass


async def test_a_server_without_jetstream_is_one_clear_line(tmp_path: Path) -> None:
    async with run_nats_server(tmp_path / "nats", jetstream=False) as server, \
            NatsBus.connect(server.url, name="test") as bus:
        with pytest.raises(Unavailable, match="without JetStream"):
            await bus.ensure((STREAM,), (READER,))


async def test_a_stream_that_does_not_fit_is_one_clear_line(nats_bus: NatsBus) -> None:
    with pytest.raises(Unavailable, match="refuses stream or consumer HUGE"):
        await nats_bus.ensure((Stream("HUGE", ("huge.>",), 2**50, 60.0),), ())
