"""The bus as its users see it.

``memory`` and ``nats`` keep the same promises; ``tests/contract/test_bus.py`` holds them to it.

* ``publish`` is at most once, in order per publisher and subscription; it never waits for a reader.
* A subscription's handler gets one message at a time, in order. Its backlog is bounded: when full, the newest
  messages are dropped and counted (``dropped``), so a slow reader must be able to resync.
* ``serve`` answers requests concurrently, up to ``concurrency`` at a time. A handler that raises answers nothing;
  the error is logged and the asker meets its deadline.
* Bytes that are not the subject's payload are counted, logged with the subject and dropped; nothing dies of them.
* The current trace context travels in the headers and is current again around the handler.
* What subjects with a ``stream`` publish is also kept by JetStream; ``pull`` reads it at least once.
* A *record* is a small value under a name that survives restarts of everybody; ``record_write`` takes effect only when
  nobody else wrote since the caller read, so several writers can share one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.bus.streams import Consumer, Stream
from shared.bus.subjects import Address


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as it reached us."""

    subject: str
    params: Mapping[str, str]
    message: Any
    headers: Mapping[str, str] = field(default_factory=dict)


class Durable(Protocol):
    """A message of a stream; acknowledge it once its effect is durable."""

    @property
    def delivery(self) -> Delivery:
        """The message."""
        ...

    @property
    def stream_seq(self) -> int:
        """Its position in the stream."""
        ...

    async def ack(self) -> None:
        """It need not come again."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was read: ``revision`` grows with each write, and is never that of another state."""

    value: bytes
    revision: int


class Subscription(Protocol):
    """Something that listens until closed."""

    async def close(self) -> None:
        """Stops listening; a handler at work finishes first. Idempotent."""
        ...


class Bus(Protocol):
    """Publish, ask, listen, answer. Open it with ``async with``."""

    async def publish(self, address: Address, message: Any, *, headers: Mapping[str, str] | None = None) -> None:
        """Sends ``message``; raises ``PayloadTooLarge`` over the limit, ``BusError`` when closed."""
        ...

    async def request(self, address: Address, message: Any, *, timeout_s: float) -> Any:
        """Asks and returns the reply; raises ``NoResponders``, ``RequestTimeout`` or ``DecodeError``."""
        ...

    async def subscribe(self, address: Address, handler: Callable[[Delivery], Awaitable[None]], *,
                        backlog: int = 65_536) -> Subscription:
        """Calls ``handler`` with each message at ``address`` (which may be a pattern)."""
        ...

    async def serve(self, address: Address, handler: Callable[[Delivery], Awaitable[Any]], *, queue: str = "",
                    concurrency: int = 256) -> Subscription:
        """Answers requests at ``address``; of several servers with the same ``queue`` one gets each request."""
        ...

    async def ensure(self, streams: tuple[Stream, ...], consumers: tuple[Consumer, ...]) -> None:
        """Creates or updates streams and durable consumers to match their declarations. Idempotent."""
        ...

    async def pull(self, consumer: Consumer, *, batch: int, timeout_s: float) -> list[Durable]:
        """Up to ``batch`` messages; empty when none came in ``timeout_s``."""
        ...

    async def pending(self, consumer: Consumer) -> int:
        """Messages of the stream the consumer has not acknowledged."""
        ...

    async def record_read(self, name: str, *, timeout_s: float) -> Record | None:
        """The record under ``name`` (letters, digits, - and _); ``None`` when nobody wrote it yet."""
        ...

    async def record_write(self, name: str, value: bytes, *, revision: int, timeout_s: float) -> int | None:
        """Replaces the record that was read at ``revision`` (0: that was not there); its new revision.

        ``None`` when somebody else wrote first: nothing changed. Raises ``BusError`` when it cannot be known.
        """
        ...

    @property
    def connected(self) -> bool:
        """Messages can reach us; false while the connection is being made again."""
        ...

    def statistics(self) -> BusStatistics:
        """Counters since the bus was opened."""
        ...

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Calls ``callback`` after each time the connection was lost and made again."""
        ...


@dataclass(frozen=True)
class BusStatistics:
    """Counters since the bus was opened."""

    published: int = 0
    delivered: int = 0
    undecodable: int = 0
    dropped: int = 0
    """Messages thrown away because a subscription's backlog was full."""
    reconnects: int = 0
