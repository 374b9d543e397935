"""The bus over NATS.

The only module that knows nats-py: its errors become ours, its reconnecting follows :mod:`shared.backoff` and
never ends, its buffers are bounded. After a reconnect the subscriptions are back, what was declared by ``ensure`` is
declared again, and the ``on_reconnect`` callbacks run.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from nats import errors as nats_errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js import api as js_api
from nats.js import errors as js_errors
from nats.js.kv import KeyValue

from shared import backoff
from shared.bus.bus import BusStatistics, Delivery, Durable, Record, Subscription
from shared.bus.listen import Counters, Incoming, Listener, decode, decode_reply
from shared.bus.streams import RECORDS, Consumer, Stream
from shared.bus.subjects import ALL, Address, find
from shared.errors import BusError, DecodeError, NoResponders, PayloadTooLarge, RequestTimeout, Unavailable
from shared.messages import codec
from shared.telemetry import metrics, tracing

_log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""Longest time the first connection may take unless the caller says otherwise; later ones are tried for ever."""
PING_S = 2.0
"""A server that misses two pings is taken for gone: a broken network shows within three of these."""
OUTBOUND_BYTES = 32 * 2**20
"""Most bytes that wait to be sent while the server is away; beyond it ``publish`` raises ``BusError``."""
ANSWER_S = 5.0
"""Longest time for the server itself to answer: flushes, JetStream administration."""
_FAILED = (nats_errors.Error, OSError, RuntimeError)
"""What the client raises; a ``RuntimeError`` is uvloop's word for a connection that is gone, which the client lets out
until it has noticed."""


class NatsBus:
    """A connection to NATS. Open it with :meth:`connect`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = Client()
        self._counters = Counters()
        self._listeners: set[Listener] = set()
        self._declared: list[tuple[tuple[Stream, ...], tuple[Consumer, ...]]] = []
        self._pulls: dict[str, JetStreamContext.PullSubscription] = {}
        self._pull_locks: dict[str, asyncio.Lock] = {}
        self._records: KeyValue | None = None
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._reconnected = asyncio.Event()
        self._attempt = 0
        self._chance = random.Random()
        self._closing = False
        self._last_error = ""
        self._owner: asyncio.Task[Any] | None = None
        self._lost = False

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, *, name: str, credentials: str = "",
                      wait_s: float = CONNECT_S) -> AsyncIterator[NatsBus]:
        """Opens a bus on the server at ``url`` (several, comma separated), shown there as ``name``.

        Raises ``Unavailable`` when nothing answers within ``wait_s`` seconds, and later, out of the ``async with``,
        when the server sends us away for good (its permission was taken back): a bus that is silently dead is worse
        than a service that stops.
        """
        bus = cls(url)
        bus._owner = asyncio.current_task()
        await bus._open(name, credentials, wait_s)
        callbacks = asyncio.create_task(bus._run_callbacks(), name="bus reconnect callbacks")
        try:
            yield bus
        except asyncio.CancelledError:
            if bus._lost and bus._owner is not None and bus._owner.uncancel() == 0:
                raise Unavailable(f"NATS at {url} closed the connection: {bus._last_error}; check the "
                                  "credentials and permissions of this client") from None
            raise
        finally:
            callbacks.cancel()
            await asyncio.wait({callbacks})
            await bus._close()

    # Sending.

    async def publish(self, address: Address, message: Any, *, headers: Mapping[str, str] | None = None) -> None:
        await self._send(address.text, codec.encode(message), headers=_with_trace(headers))

    async def request(self, address: Address, message: Any, *, timeout_s: float) -> Any:
        data = codec.encode(message)
        self._check_size(address.text, data)
        try:
            with _heeding_cancellation():
                answer = await self._client.request(address.text, data, timeout=timeout_s, headers=_with_trace(None))
        except nats_errors.NoRespondersError as error:
            raise NoResponders(address.text) from error
        except nats_errors.TimeoutError as error:
            away = "" if self._client.is_connected else "NATS"
            raise RequestTimeout(address.text, timeout_s, away=away) from error
        except _FAILED as error:
            raise BusError(f"cannot ask {address.text}: {error}") from error
        self._counters.published += 1
        return decode_reply(answer.data, address, self._counters)

    async def _send(self, subject: str, data: bytes, *, headers: dict[str, str] | None = None) -> None:
        self._check_size(subject, data)
        try:
            with _heeding_cancellation():
                await self._client.publish(subject, data, headers=headers)
        except nats_errors.OutboundBufferLimitError as error:
            raise BusError(f"cannot publish on {subject}: NATS at {self._url} has been away too long, "
                           f"{OUTBOUND_BYTES} bytes wait for it already") from error
        except _FAILED as error:
            raise BusError(f"cannot publish on {subject}: {error}") from error
        self._counters.published += 1

    def _check_size(self, subject: str, data: bytes) -> None:
        if len(data) > self._client.max_payload:
            raise PayloadTooLarge(subject, len(data), self._client.max_payload)

    # Listening.

    async def subscribe(self, address: Address, handler: Callable[[Delivery], Awaitable[None]], *,
                        backlog: int = 65_536) -> Subscription:
        return await self._listen(address, handler, queue="", backlog=backlog, concurrency=0)

    async def serve(self, address: Address, handler: Callable[[Delivery], Awaitable[Any]], *, queue: str = "",
                    concurrency: int = 256) -> Subscription:
        return await self._listen(address, handler, queue=queue, backlog=max(1024, 4 * concurrency),
                                  concurrency=concurrency)

    async def _listen(self, address: Address, handler: Callable[[Delivery], Awaitable[Any]], *, queue: str,
                      backlog: int, concurrency: int) -> Listener:
        async def hear(msg: Msg) -> None:
            answer = (lambda data: self._send(msg.reply, data)) if concurrency and msg.reply else None
            listener.offer(Incoming(msg.subject, msg.data, msg.headers or {}, answer))

        async def stop_hearing() -> None:
            self._listeners.discard(listener)
            if not self._client.is_closed:
                try:
                    await heard.unsubscribe()
                except _FAILED as error:
                    _log.debug("unsubscribe_failed", extra={"fields": {"subject": address.text, "why": error}})

        try:
            heard = await self._client.subscribe(address.text, queue=queue, cb=hear)
        except _FAILED as error:
            raise BusError(f"cannot listen on {address.text}: {error}") from error
        listener = Listener(address, handler, counters=self._counters, backlog=backlog, concurrency=concurrency,
                            stop_hearing=stop_hearing)
        self._listeners.add(listener)
        await self._settle()
        return listener

    async def _settle(self) -> None:
        """Waits until the server has seen what we sent, so that who is told of a subscription can use it."""
        if not self._client.is_connected:
            return  # it will be told as soon as it is back
        try:
            # NOTE: twice, because the client writes a PING past the commands it still holds. The first round trip
            # gives it the time to send those, so the second PING is behind them.
            for _ in range(2):
                await self._client.flush(timeout=ANSWER_S)  # type: ignore[arg-type]
        except _FAILED as error:
            _log.warning("flush_failed", extra={"fields": {"why": error}})

    # Streams.

    async def ensure(self, streams: tuple[Stream, ...], consumers: tuple[Consumer, ...]) -> None:
        await self._ensure(streams, consumers)
        if (streams, consumers) not in self._declared:
            self._declared.append((streams, consumers))

    async def _ensure(self, streams: tuple[Stream, ...], consumers: tuple[Consumer, ...]) -> None:
        jetstream = self._client.jetstream(timeout=ANSWER_S)
        try:
            for stream in streams:
                await _ensure_stream(jetstream, stream)
            for consumer in consumers:
                await jetstream.add_consumer(consumer.stream, js_api.ConsumerConfig(
                    durable_name=consumer.name, ack_policy=js_api.AckPolicy.EXPLICIT, ack_wait=consumer.ack_wait_s,
                    max_ack_pending=consumer.max_ack_pending, deliver_policy=js_api.DeliverPolicy.ALL,
                ))
        except (js_errors.ServiceUnavailableError, nats_errors.NoRespondersError) as error:
            raise Unavailable(f"NATS at {self._url} runs without JetStream; start it with `nats-server -js` "
                              "or use `moonbus up`") from error
        except js_errors.APIError as error:
            names = ", ".join([*(s.name for s in streams), *(f"{c.stream}/{c.name}" for c in consumers)])
            raise Unavailable(f"NATS at {self._url} refuses stream or consumer {names}: {error.description}; "
                              "give JetStream more room or delete the old one") from error
        except nats_errors.TimeoutError as error:
            raise Unavailable(f"NATS at {self._url} did not answer about its streams within {ANSWER_S:g} s") from error
        except nats_errors.Error as error:
            raise BusError(f"cannot declare streams: {error}") from error

    async def pull(self, consumer: Consumer, *, batch: int, timeout_s: float) -> list[Durable]:
        key = f"{consumer.stream}/{consumer.name}"
        async with self._pull_locks.setdefault(key, asyncio.Lock()):
            try:
                pulls = self._pulls.get(key)
                if pulls is None:
                    pulls = self._pulls[key] = await self._client.jetstream(timeout=ANSWER_S).pull_subscribe_bind(
                        durable=consumer.name, stream=consumer.stream)
                heard = await pulls.fetch(batch, timeout=timeout_s)
            except (nats_errors.TimeoutError, TimeoutError):
                return []
            except nats_errors.Error as error:
                raise BusError(f"cannot pull from {key}: {error}") from error
        durables: list[Durable] = []
        for msg in heard:
            durable = await self._durable(msg)
            if durable is not None:
                durables.append(durable)
        return durables

    async def _durable(self, msg: Msg) -> NatsDurable | None:
        subject = find(msg.subject)
        incoming = Incoming(msg.subject, msg.data, msg.headers or {})
        try:
            if subject is None:
                raise DecodeError(msg.subject, f"no subject of this version ({len(ALL)} known) has this form")
            return NatsDurable(self, msg, decode(incoming, subject.any()))
        except DecodeError as error:
            self._counters.count_undecodable(msg.subject, subject.template if subject else "unknown", error)
            await self._send(msg.reply, b"+TERM")  # or it would come back for ever
            return None

    async def pending(self, consumer: Consumer) -> int:
        try:
            info = await self._client.jetstream(timeout=ANSWER_S).consumer_info(consumer.stream, consumer.name)
        except nats_errors.Error as error:
            raise BusError(f"cannot ask about consumer {consumer.stream}/{consumer.name}: {error}") from error
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    # Records.

    async def record_read(self, name: str, *, timeout_s: float) -> Record | None:
        try:
            async with asyncio.timeout(timeout_s):
                entry = await (await self._bucket()).get(name)
        except js_errors.KeyNotFoundError:
            return None
        except (nats_errors.Error, TimeoutError) as error:
            self._records = None  # perhaps it is another server, which has not heard of it
            raise BusError(f"cannot read record {name}: {str(error) or 'no answer'}") from error
        return Record(entry.value or b"", entry.revision or 0)

    async def record_write(self, name: str, value: bytes, *, revision: int, timeout_s: float) -> int | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await (await self._bucket()).update(name, value, last=revision)
        except js_errors.KeyWrongLastSequenceError:
            return None
        except (nats_errors.Error, TimeoutError) as error:
            self._records = None
            raise BusError(f"cannot write record {name}: {str(error) or 'no answer'}") from error

    async def _bucket(self) -> KeyValue:
        if self._records is None:
            self._records = await self._client.jetstream(timeout=ANSWER_S).create_key_value(
                bucket=RECORDS.bucket, history=1, max_bytes=RECORDS.max_bytes, storage=js_api.StorageType.FILE)
        return self._records

    # Life.

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    def statistics(self) -> BusStatistics:
        return self._counters.snapshot()

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._callbacks.append(callback)

    @property
    def max_payload(self) -> int:
        """Most bytes one message may have, as the server says."""
        return self._client.max_payload

    async def _open(self, name: str, credentials: str, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._client.connect(
                    servers=[part.strip() for part in self._url.split(",")],
                    name=name,
                    user_credentials=credentials or None,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.1,  # type: ignore[arg-type]
                    reconnect_to_server_handler=self._next_server,
                    ping_interval=PING_S,  # type: ignore[arg-type]
                    max_outstanding_pings=2,
                    pending_size=OUTBOUND_BYTES,
                    flush_timeout=ANSWER_S,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                )
        except (nats_errors.Error, OSError, ValueError) as error:
            self._closing = True
            await self._client.close()
            why = self._last_error or str(error) or "no answer"
            raise Unavailable(f"cannot reach NATS at {self._url} ({why}); start it with `moonbus up` "
                              "or set MOONBUS_NATS_URL, and credentials where it asks for them") from error
        except BaseException:
            self._closing = True
            await self._client.close()
            raise

    async def _close(self) -> None:
        self._closing = True
        for listener in list(self._listeners):
            await listener.close()
        for pulls in self._pulls.values():
            if not self._client.is_closed:
                try:
                    await pulls.unsubscribe()
                except _FAILED as error:
                    _log.debug("unsubscribe_failed", extra={"fields": {"why": error}})
        if not self._client.is_connected:
            self._drop_pending()
        try:
            await self._client.close()
        except (OSError, RuntimeError) as error:  # it was gone although the client had not noticed, or went meanwhile
            _log.debug("close_failed", extra={"fields": {"why": error}})
            self._drop_pending()
            self._client._status = Client.DISCONNECTED  # or it would leave the other half of the closing undone
            await self._client.close()

    def _drop_pending(self) -> None:
        """What waits cannot be sent any more; the client would try, on the connection that is gone."""
        self._client._pending, self._client._pending_data_size = [], 0

    def _next_server(self, servers: list[Server], info: dict[str, Any]) -> tuple[Server, float]:
        attempt, self._attempt = self._attempt, self._attempt + 1
        return servers[attempt % len(servers)], backoff.delay_s(attempt, chance=self._chance)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats_errors.SlowConsumerError):
            self._counters.count_dropped(error.subject, "client buffer")
            return
        self._last_error = str(error) or type(error).__name__
        self._counters.complaints.warning("bus_error", key=self._last_error, why=self._last_error)

    async def _on_disconnected(self) -> None:
        if not self._closing:
            _log.warning("bus_disconnected", extra={"fields": {"url": self._url}})

    async def _on_reconnected(self) -> None:
        self._attempt = 0
        self._counters.reconnects += 1
        metrics.BUS_RECONNECTS.inc()
        _log.info("bus_reconnected", extra={"fields": {"url": self._url}})
        self._reconnected.set()  # callbacks run in a task of ours: here they would hold up the client

    async def _on_closed(self) -> None:
        if self._closing:
            return
        _log.error("bus_closed", extra={"fields": {"url": self._url, "why": self._client.last_error}})
        self._last_error = str(self._client.last_error or self._last_error)
        self._lost = True
        if self._owner is not None:
            self._owner.cancel()

    async def _run_callbacks(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            for streams, consumers in self._declared:
                await self._guarded(lambda s=streams, c=consumers: self._ensure(s, c))  # type: ignore[misc]
            for callback in list(self._callbacks):
                await self._guarded(callback)

    async def _guarded(self, callback: Callable[[], Awaitable[None]]) -> None:
        try:
            await callback()
        except Exception:
            _log.exception("reconnect_callback_failed")


class NatsDurable:
    """A message of a JetStream stream."""

    def __init__(self, bus: NatsBus, msg: Msg, delivery: Delivery) -> None:
        self._bus, self._msg, self._delivery = bus, msg, delivery

    @property
    def delivery(self) -> Delivery:
        return self._delivery

    @property
    def stream_seq(self) -> int:
        return self._msg.metadata.sequence.stream

    async def ack(self) -> None:
        await self._bus._send(self._msg.reply, b"+ACK")


@contextmanager
def _heeding_cancellation() -> Iterator[None]:
    """Raises the cancellation that the client swallows when it meets it while it flushes."""
    task = asyncio.current_task()
    cancelling = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task and task.cancelling() > cancelling:
            raise asyncio.CancelledError


def _with_trace(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    carried = {**tracing.inject(), **(headers or {})}
    return carried or None


async def _ensure_stream(jetstream: JetStreamContext, stream: Stream) -> None:
    config = js_api.StreamConfig(
        name=stream.name, subjects=list(stream.subjects), max_bytes=stream.max_bytes, max_age=stream.max_age_s,
        discard=js_api.DiscardPolicy.OLD, storage=js_api.StorageType.FILE, retention=js_api.RetentionPolicy.LIMITS,
    )
    try:
        await jetstream.add_stream(config)
    except js_errors.BadRequestError:  # it is there with another configuration
        await jetstream.update_stream(config)


