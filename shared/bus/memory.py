"""The bus in one process: same promises, same bytes, no server.

Everybody who shall hear each other shares one :class:`MemoryBus`. Messages travel encoded, so that what would not
survive NATS does not survive here. What a real network does (delays, restarts, lost connections) it does not do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from shared.bus.bus import BusStatistics, Delivery, Durable, Record, Subscription
from shared.bus.listen import Counters, Incoming, Listener, decode, decode_reply
from shared.bus.streams import Consumer, Stream
from shared.bus.subjects import Address, find
from shared.clock import Clock, SystemClock
from shared.errors import BusError, DecodeError, NoResponders, PayloadTooLarge, RequestTimeout
from shared.messages import codec
from shared.telemetry import tracing

MAX_PAYLOAD = 8 * 2**20


@dataclass(frozen=True, eq=False)
class _Ear:
    """One interest in a subject; of those with the same ``queue`` one gets each message."""

    pattern: tuple[str, ...]
    queue: str
    listener: Listener


@dataclass
class _Log:
    """A stream's messages, oldest first."""

    stream: Stream
    messages: deque[_Kept] = field(default_factory=deque)
    nbytes: int = 0
    last_seq: int = 0


@dataclass(frozen=True)
class _Kept:
    seq: int
    at_s: float
    incoming: Incoming


@dataclass
class _Reading:
    """A durable consumer's position. What is in ``unacked`` comes again at its time, monotonic seconds."""

    consumer: Consumer
    delivered_seq: int = 0
    #: {stream seq: when it comes again unless acknowledged}; all and only delivered, unacknowledged messages
    unacked: dict[int, float] = field(default_factory=dict)


class MemoryBus:
    """A bus for one process. Open it with ``async with``."""

    def __init__(self, *, max_payload: int = MAX_PAYLOAD, clock: Clock | None = None) -> None:
        self.max_payload = max_payload
        self._clock = clock or SystemClock()
        self._counters = Counters()
        self._ears: list[_Ear] = []
        self._turns = itertools.count()
        self._logs: dict[str, _Log] = {}
        self._readings: dict[str, _Reading] = {}
        self._records: dict[str, Record] = {}
        self._revisions = itertools.count(1)
        self._stored = asyncio.Condition()
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._open = False
        for ear in list(self._ears):
            await ear.listener.close()

    # Sending.

    async def publish(self, address: Address, message: Any, *, headers: Mapping[str, str] | None = None) -> None:
        await self.publish_raw(address.text, codec.encode(message), headers=headers)

    async def publish_raw(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        """Publishes bytes as they are, as somebody with another idea of the protocol would."""
        incoming = self._incoming(subject, data, headers)
        self._route(incoming)
        await self._keep(incoming)

    async def request(self, address: Address, message: Any, *, timeout_s: float) -> Any:
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def answer(data: bytes) -> None:
            self._check_size(address.text, data)
            if not answered.done():
                answered.set_result(data)

        if not self._route(self._incoming(address.text, codec.encode(message), None, answer)):
            raise NoResponders(address.text)
        try:
            async with asyncio.timeout(timeout_s):
                data = await answered
        except TimeoutError as error:
            raise RequestTimeout(address.text, timeout_s) from error
        return decode_reply(data, address, self._counters)

    def _incoming(self, subject: str, data: bytes, headers: Mapping[str, str] | None,
                  answer: Callable[[bytes], Awaitable[None]] | None = None) -> Incoming:
        if not self._open:
            raise BusError(f"cannot publish on {subject}: the bus is not open")
        self._check_size(subject, data)
        self._counters.published += 1
        return Incoming(subject, data, {**tracing.inject(), **(headers or {})}, answer)

    def _check_size(self, subject: str, data: bytes) -> None:
        if len(data) > self.max_payload:
            raise PayloadTooLarge(subject, len(data), self.max_payload)

    def _route(self, incoming: Incoming) -> int:
        """Offers the message to whoever listens; returns how many do."""
        tokens = tuple(incoming.subject.split("."))
        groups: dict[str, list[_Ear]] = {}
        chosen: list[_Ear] = []
        for ear in self._ears:
            if _matches(ear.pattern, tokens):
                if ear.queue:
                    groups.setdefault(ear.queue, []).append(ear)
                else:
                    chosen.append(ear)
        chosen += [group[next(self._turns) % len(group)] for group in groups.values()]
        for ear in chosen:
            ear.listener.offer(incoming)
        return len(chosen)

    # Listening.

    async def subscribe(self, address: Address, handler: Callable[[Delivery], Awaitable[None]], *,
                        backlog: int = 65_536) -> Subscription:
        return self._listen(address, handler, queue="", backlog=backlog, concurrency=0)

    async def serve(self, address: Address, handler: Callable[[Delivery], Awaitable[Any]], *, queue: str = "",
                    concurrency: int = 256) -> Subscription:
        return self._listen(address, handler, queue=queue, backlog=max(1024, 4 * concurrency), concurrency=concurrency)

    def _listen(self, address: Address, handler: Callable[[Delivery], Awaitable[Any]], *, queue: str, backlog: int,
                concurrency: int) -> Listener:
        if not self._open:
            raise BusError(f"cannot listen on {address.text}: the bus is not open")

        async def stop_hearing() -> None:
            self._ears.remove(ear)

        listener = Listener(address, handler, counters=self._counters, backlog=backlog, concurrency=concurrency,
                            stop_hearing=stop_hearing)
        ear = _Ear(tuple(address.text.split(".")), queue, listener)
        self._ears.append(ear)
        return listener

    # Streams.

    async def ensure(self, streams: tuple[Stream, ...], consumers: tuple[Consumer, ...]) -> None:
        for stream in streams:
            log = self._logs.setdefault(stream.name, _Log(stream))
            log.stream = stream
        for consumer in consumers:
            if consumer.stream not in self._logs:
                raise BusError(f"consumer {consumer.name}: there is no stream {consumer.stream}")
            reading = self._readings.setdefault(_reading_key(consumer), _Reading(consumer))
            reading.consumer = consumer

    async def pull(self, consumer: Consumer, *, batch: int, timeout_s: float) -> list[Durable]:
        deadline_s = self._clock.monotonic() + timeout_s
        reading, log = self._reading(consumer)
        while True:
            durables = self._take(reading, log, batch)
            left_s = deadline_s - self._clock.monotonic()
            if durables or left_s <= 0:
                return durables
            again_s = min(reading.unacked.values(), default=deadline_s) - self._clock.monotonic()
            try:
                async with asyncio.timeout(max(0.0, min(left_s, again_s))), self._stored:
                    await self._stored.wait()
            except TimeoutError:
                continue  # the deadline, or a message that is due again: look once more

    async def pending(self, consumer: Consumer) -> int:
        reading, log = self._reading(consumer)
        return sum(1 for kept in log.messages if kept.seq > reading.delivered_seq or kept.seq in reading.unacked)

    async def record_read(self, name: str, *, timeout_s: float) -> Record | None:
        self._require_open(name)
        return self._records.get(name)

    async def record_write(self, name: str, value: bytes, *, revision: int, timeout_s: float) -> int | None:
        self._require_open(name)
        if revision != getattr(self._records.get(name), "revision", 0):
            return None
        self._records[name] = Record(value, next(self._revisions))
        return self._records[name].revision

    def _require_open(self, name: str) -> None:
        if not self._open:
            raise BusError(f"cannot use record {name}: the bus is not open")

    def _reading(self, consumer: Consumer) -> tuple[_Reading, _Log]:
        reading = self._readings.get(_reading_key(consumer))
        if reading is None:
            raise BusError(f"cannot pull from {_reading_key(consumer)}: there is no such consumer")
        return reading, self._logs[consumer.stream]

    async def _keep(self, incoming: Incoming) -> None:
        tokens = tuple(incoming.subject.split("."))
        for log in self._logs.values():
            if not any(_matches(tuple(pattern.split(".")), tokens) for pattern in log.stream.subjects):
                continue
            log.last_seq += 1
            log.messages.append(_Kept(log.last_seq, self._clock.monotonic(), incoming))
            log.nbytes += len(incoming.data)
            oldest_s = self._clock.monotonic() - log.stream.max_age_s
            while log.messages and (log.nbytes > log.stream.max_bytes or log.messages[0].at_s < oldest_s):
                log.nbytes -= len(log.messages.popleft().incoming.data)
            async with self._stored:
                self._stored.notify_all()

    def _take(self, reading: _Reading, log: _Log, batch: int) -> list[Durable]:
        now_s = self._clock.monotonic()
        taken: list[Durable] = []
        room = reading.consumer.max_ack_pending
        for kept in log.messages:
            if len(taken) == batch:
                break
            due_s = reading.unacked.get(kept.seq)
            if due_s is None and (kept.seq <= reading.delivered_seq or len(reading.unacked) >= room):
                continue
            if due_s is not None and due_s > now_s:
                continue
            reading.delivered_seq = max(reading.delivered_seq, kept.seq)
            durable = self._durable(reading, kept)
            if durable is None:
                reading.unacked.pop(kept.seq, None)
                continue
            reading.unacked[kept.seq] = now_s + reading.consumer.ack_wait_s
            taken.append(durable)
        return taken

    def _durable(self, reading: _Reading, kept: _Kept) -> Durable | None:
        subject = find(kept.incoming.subject)
        try:
            if subject is None:
                raise DecodeError(kept.incoming.subject, "no subject of this version has this form")
            delivery = decode(kept.incoming, subject.any())
        except DecodeError as error:
            self._counters.count_undecodable(
                kept.incoming.subject, subject.template if subject else "unknown", error)
            return None
        return MemoryDurable(reading, kept.seq, delivery)

    # Life.

    @property
    def connected(self) -> bool:
        return self._open

    def statistics(self) -> BusStatistics:
        return self._counters.snapshot()

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Never calls ``callback``: this bus has no connection to lose."""


class MemoryDurable:
    """A message of a stream kept in memory."""

    def __init__(self, reading: _Reading, seq: int, delivery: Delivery) -> None:
        self._reading, self._seq, self._delivery = reading, seq, delivery

    @property
    def delivery(self) -> Delivery:
        return self._delivery

    @property
    def stream_seq(self) -> int:
        return self._seq

    async def ack(self) -> None:
        self._reading.unacked.pop(self._seq, None)


def _matches(pattern: tuple[str, ...], tokens: tuple[str, ...]) -> bool:
    if pattern and pattern[-1] == ">":
        return len(tokens) >= len(pattern) and _matches(pattern[:-1], tokens[:len(pattern) - 1])
    return len(pattern) == len(tokens) and all(a in ("*", b) for a, b in zip(pattern, tokens, strict=True))


def _reading_key(consumer: Consumer) -> str:
    return f"{consumer.stream}/{consumer.name}"
