"""The receiving half of a bus: a bounded backlog, one task that empties it, bytes turned into deliveries.

A transport calls :meth:`Listener.offer` for every message it hears; everything that the contract promises about
order, backlogs, undecodable bytes, trace context and closing happens here, once, for every transport.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from opentelemetry import context as trace_context

from shared.bus.bus import BusStatistics, Delivery
from shared.bus.subjects import Address
from shared.errors import DecodeError
from shared.messages import codec
from shared.telemetry import metrics, tracing
from shared.telemetry.logs import Limited

_log = logging.getLogger(__name__)

BACKLOG_BYTES = 256 * 2**20
"""Most bytes one backlog holds, whatever the number of messages."""
CLOSE_S = 5.0
"""Longest time that closing waits for handlers at work; then they are cancelled."""


@dataclass
class Counters:
    """Counts of one bus, shared by its listeners."""

    published: int = 0
    delivered: int = 0
    undecodable: int = 0
    dropped: int = 0
    reconnects: int = 0
    complaints: Limited = field(default_factory=lambda: Limited(_log))

    def snapshot(self) -> BusStatistics:
        """The counts now."""
        return BusStatistics(
            published=self.published, delivered=self.delivered, undecodable=self.undecodable,
            dropped=self.dropped, reconnects=self.reconnects,
        )

    def count_undecodable(self, subject: str, kind: str, why: Exception) -> None:
        """Counts bytes that are not what their subject promises, and says so now and then."""
        self.undecodable += 1
        metrics.BUS_UNDECODABLE.labels(subject=kind).inc()
        self.complaints.warning("undecodable", key=kind, subject=subject, why=why)

    def count_dropped(self, subject: str, kind: str) -> None:
        """Counts a message thrown away because a backlog was full."""
        self.dropped += 1
        metrics.BUS_DROPPED.labels(subject=kind).inc()
        self.complaints.warning("backlog_full", key=kind, subject=subject)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message as the transport heard it; ``answer`` sends bytes back to the asker, ``None`` when nobody asks."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    answer: Callable[[bytes], Awaitable[None]] | None = None


def decode(incoming: Incoming, address: Address) -> Delivery:
    """The delivery in ``incoming``; raises ``DecodeError`` when its bytes are not the subject's payload."""
    try:
        message = codec.decode(incoming.data, address.subject.payload)
        params = address.subject.params(incoming.subject)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise DecodeError(incoming.subject, str(error)) from error
    return Delivery(incoming.subject, params, message, incoming.headers)


def decode_reply(data: bytes, address: Address, counters: Counters) -> Any:
    """The reply in ``data``; counts it and raises ``DecodeError`` when it is not what the subject promises."""
    try:
        return codec.decode(data, address.subject.reply)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        counters.count_undecodable(address.text, address.subject.template, error)
        raise DecodeError(address.text, str(error)) from error


class Listener:
    """Hands what is offered to ``handler``: in turn with ``concurrency`` 0, else up to that many at a time."""

    def __init__(
        self,
        address: Address,
        handler: Callable[[Delivery], Awaitable[Any]],
        *,
        counters: Counters,
        backlog: int,
        concurrency: int = 0,
        stop_hearing: Callable[[], Awaitable[None]],
    ) -> None:
        self.address = address
        self._handler = handler
        self._counters = counters
        self._backlog = backlog
        self._limit = asyncio.Semaphore(concurrency) if concurrency else None
        self._stop_hearing = stop_hearing
        self._waiting: deque[Incoming] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._closing = False
        self._at_work: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name=f"listen {address.text}")

    def offer(self, incoming: Incoming) -> None:
        """Takes a message that was heard; drops and counts it when the backlog is full. Never waits."""
        if self._closing:
            return
        if len(self._waiting) >= self._backlog or self._waiting_bytes + len(incoming.data) > BACKLOG_BYTES:
            self._counters.count_dropped(incoming.subject, self.address.subject.template)
            return
        self._waiting.append(incoming)
        self._waiting_bytes += len(incoming.data)
        self._arrived.set()

    async def close(self) -> None:
        """Stops listening; what is at work may finish within ``CLOSE_S``, what waits is dropped. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._arrived.set()
        await self._stop_hearing()
        self._waiting.clear()
        # A handler may close its own subscription: it must not wait for itself.
        tasks = {self._task, *self._at_work} - {asyncio.current_task()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=CLOSE_S)

    async def _run(self) -> None:
        while not self._closing:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            incoming = self._waiting.popleft()
            self._waiting_bytes -= len(incoming.data)
            if self._limit is None:
                await self._handle(incoming)
            else:
                await self._limit.acquire()
                task = asyncio.create_task(self._serve(incoming, self._limit), name=f"serve {incoming.subject}")
                self._at_work.add(task)
                task.add_done_callback(self._at_work.discard)

    async def _serve(self, incoming: Incoming, limit: asyncio.Semaphore) -> None:
        try:
            await self._handle(incoming)
        finally:
            limit.release()

    async def _handle(self, incoming: Incoming) -> None:
        try:
            delivery = decode(incoming, self.address)
        except DecodeError as error:
            self._counters.count_undecodable(incoming.subject, self.address.subject.template, error)
            return
        self._counters.delivered += 1
        token = trace_context.attach(tracing.extract(incoming.headers))
        try:
            reply = await self._handler(delivery)
            if incoming.answer is not None:
                await incoming.answer(codec.encode(reply))
        except Exception:
            # The handler is somebody else's code: its failure must not silence the subject for everybody else.
            _log.exception("handler_failed", extra={"fields": {"subject": incoming.subject}})
        finally:
            trace_context.detach(token)
