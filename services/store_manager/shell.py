"""The store-manager's hands: feed, catalog and bus around the machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opentelemetry import trace
from opentelemetry.context import Context

from services.store_manager.core import effects as do
from services.store_manager.core.events import (
    Deaf,
    Draining,
    Entry,
    Fetched,
    FetchFailed,
    Led,
    Maintained,
    MaintainFailed,
    Marked,
    MarkFailed,
    Reconciled,
    ReconcileFailed,
    Reconnected,
    Started,
    Unled,
    WriteFailed,
    Written,
)
from services.store_manager.core.machine import Event, StoreManager
from services.store_manager.queries import QUERIES, Queries
from services.store_manager.reconcile import Reconciler
from services.store_manager.settings import Settings
from shared.bus.bus import Bus, Delivery, Durable
from shared.bus.streams import Consumer
from shared.bus.subjects import BYE, HELLO, LOAD, ROLLCALL
from shared.catalog.repository import Catalog
from shared.catalog.session import Unwritable
from shared.clock import Clock
from shared.driver import Driver
from shared.errors import BusError, NoResponders, Unavailable
from shared.ids import Incarnation, WorkerId
from shared.messages import (
    Bye,
    Evicted,
    Hello,
    RequestDone,
    Rollcall,
    Stored,
)
from shared.telemetry import metrics, tracing

PULL_S = 1.0
"""Longest wait of one fetch; also how long a stop may have to wait for it."""
DATABASE_CONNECTIONS = QUERIES + 3
"""Queries, and one write, one reconciliation and one marking."""
_LOOK_EVERY_S = 0.25
"""Pause between two looks at the connection: shorter than any silence that makes a worker suspect."""
PENDING_EVERY_S = 5.0
"""Least pause between two looks at how far behind the feed we are."""

_log = logging.getLogger(__name__)
_tracer = trace.get_tracer("moonbus.store-manager")


class StoreManagerShell:
    """Open it once the catalog and the stream are there; it keeps the catalog until closed."""

    def __init__(self, settings: Settings, bus: Bus, catalog: Catalog, reconciler: Reconciler, consumer: Consumer,
                 clock: Clock, name: str) -> None:
        self._settings, self._bus, self._catalog, self._consumer = settings, bus, catalog, consumer
        self._reconciler = reconciler
        self._clock, self._name = clock, name
        self._queries = Queries(bus, catalog, consumer, clock, timeout_s=settings.query_timeout_s)
        #: {position in the stream: message}; what the machine holds or is about to be told of, in its latest delivery
        self._held: dict[int, Durable] = {}
        #: {position in the stream: message}; what is over and not yet acknowledged. A position may be in both: the
        #: same message, delivered again
        self._over: dict[int, Durable] = {}
        self._drained = asyncio.Event()
        self._looked_s = float("-inf")
        self._driver: Driver[Event] = Driver(
            StoreManager(settings.policy()), bus, clock, name="store-manager",
            effects={
                do.Fetch: self._fetch, do.Write: self._write, do.Ack: self._ack, do.Discard: self._discard,
                do.Reconcile: self._reconcile, do.Mark: self._mark, do.Maintain: self._maintain,
                do.CallRoll: self._call_roll, do.Report: self._report, do.Drained: self._end_drain,
            })

    @asynccontextmanager
    async def open(self) -> AsyncIterator[asyncio.Task[None]]:
        """Runs until the block ends; the task given ends early only by failing."""
        subscriptions = [
            await self._bus.subscribe(HELLO.any(), self._hear),
            await self._bus.subscribe(LOAD.any(), self._hear),
            await self._bus.subscribe(BYE.any(), self._hear),
            *await self._queries.serve(),
        ]
        self._bus.on_reconnect(self._reconnected)
        self._driver.feed(Started())
        running = asyncio.create_task(self._driver.run(), name="store-manager machine")
        watching = asyncio.create_task(self._watch(), name="store-manager connection")
        try:
            yield running
        finally:
            for subscription in subscriptions:
                await subscription.close()
            running.cancel()
            watching.cancel()
            await asyncio.wait({running, watching})

    async def drain(self) -> None:
        """Takes nothing new and writes what is held, unless Postgres is away: then it will be delivered again."""
        self._driver.feed(Draining())
        await self._drained.wait()

    def lead(self, event: Led | Unled) -> None:
        """Whether what one store-manager does for all is ours to do."""
        self._driver.feed(event)

    # Bus to machine.

    async def _hear(self, delivery: Delivery) -> None:
        await self._driver.put(delivery.message)

    async def _reconnected(self) -> None:
        await self._driver.put(Reconnected())

    async def _watch(self) -> None:
        while True:
            if not self._bus.connected:
                self._driver.feed(Deaf())
            await asyncio.sleep(_LOOK_EVERY_S)

    # Effects.

    async def _fetch(self, effect: do.Fetch) -> Event:
        try:
            await self._look_at_pending()
            durables = await self._bus.pull(self._consumer, batch=effect.limit, timeout_s=PULL_S)
        except BusError as error:
            _log.debug("fetch_failed", extra={"fields": {"why": error}})
            return FetchFailed(str(error))
        self._held.update({durable.stream_seq: durable for durable in durables})
        return Fetched(tuple(Entry(durable.stream_seq, _rows(durable.delivery.message)) for durable in durables))

    async def _write(self, effect: do.Write) -> Event:
        deliveries = [self._held[seq].delivery for seq in effect.seqs]
        began_s = self._clock.wall()
        with _tracer.start_as_current_span("catalog.write", attributes={"moonbus.messages": len(deliveries)}) as span:
            try:
                written = await self._catalog.write([delivery.message for delivery in deliveries], now_s=began_s)
            except (Unavailable, Unwritable) as error:
                span.set_status(trace.StatusCode.ERROR, str(error))
                refused = isinstance(error, Unwritable)
                metrics.STORE_WRITE_FAILURES.labels(why="refused" if refused else "unavailable").inc()
                if refused and len(effect.seqs) == 1:  # the machine will discard it
                    self._end(effect.seqs)
                return WriteFailed(str(error), refused=refused)
            span.set_attributes({"moonbus.blocks": written.blocks, "moonbus.replicas": written.replicas,
                                 "moonbus.requests": written.requests})
        ended_s = self._clock.wall()
        metrics.STORE_WRITE_SECONDS.observe(ended_s - began_s)
        for table, rows in (("kv_block", written.blocks), ("kv_copy", written.replicas),
                            ("request", written.requests)):
            metrics.STORE_ROWS.labels(table=table).inc(rows)
        for delivery in deliveries:
            if isinstance(delivery.message, RequestDone):
                _record(delivery.message, tracing.extract(delivery.headers), began_s, ended_s)
        workers = {delivery.message.worker for delivery in deliveries if isinstance(delivery.message, Hello | Bye)}
        self._end(effect.seqs)
        return Written(written.gaps, len(workers))

    def _end(self, seqs: tuple[int, ...]) -> None:
        """These are over. To be called right before the machine is told so.

        From then on a delivery of the same message is a new one to the machine, and must not be taken for this one.
        """
        self._over.update({seq: self._held.pop(seq) for seq in seqs})

    async def _ack(self, effect: do.Ack) -> None:
        durables = [self._over.pop(seq) for seq in effect.seqs]
        try:
            for durable in durables:
                await durable.ack()
        except BusError as error:  # they come again, and change nothing
            _log.debug("ack_failed", extra={"fields": {"why": error}})

    async def _discard(self, effect: do.Discard) -> None:
        delivery = self._over[effect.seq].delivery
        metrics.STORE_WRITE_FAILURES.labels(why="discarded").inc()
        _log.error("message_discarded", extra={"fields": {
            "subject": delivery.subject, "stream_seq": effect.seq, "why": effect.why}})
        await self._ack(do.Ack((effect.seq,)))

    async def _reconcile(self, effect: do.Reconcile) -> Event:
        worker, incarnation = effect.life
        try:
            repaired = await self._reconciler.compare(WorkerId(worker), Incarnation(incarnation))
        except NoResponders as error:
            return ReconcileFailed(str(error), gone=True)
        except (BusError, Unavailable, Unwritable) as error:
            _log.debug("reconcile_failed", extra={"fields": {"worker": worker, "why": error}})
            return ReconcileFailed(str(error))
        metrics.STORE_REPAIRED.labels(kind="missing").inc(repaired.missing)
        metrics.STORE_REPAIRED.labels(kind="stale").inc(repaired.stale)
        if repaired.missing or repaired.stale:
            _log.warning("catalog_repaired", extra={"fields": {
                "worker": worker, "missing": repaired.missing, "stale": repaired.stale}})
        return Reconciled()

    async def _mark(self, effect: do.Mark) -> Event:
        now_s = self._clock.wall()
        try:
            await self._catalog.mark_workers(effect.heard, dict(effect.dead), now_s=now_s,
                                             started_before_s=now_s - self._settings.dead_after_s)
        except (Unavailable, Unwritable) as error:
            return MarkFailed(str(error))
        return Marked()

    async def _maintain(self, effect: do.Maintain) -> Event:
        try:
            done = await self._catalog.maintain(now_s=self._clock.wall())
        except (Unavailable, Unwritable) as error:
            return MaintainFailed(str(error))
        if done.partitions_made or done.partitions_dropped or done.blocks_forgotten or done.lives_forgotten:
            _log.info("catalog_kept", extra={"fields": {
                "partitions_made": done.partitions_made, "partitions_dropped": done.partitions_dropped,
                "blocks_forgotten": done.blocks_forgotten, "lives_forgotten": done.lives_forgotten}})
        return Maintained(more=done.more)

    async def _call_roll(self, effect: do.CallRoll) -> None:
        try:
            await self._bus.publish(ROLLCALL.at(), Rollcall(asker=self._name))
        except BusError as error:  # the next heartbeat of a stranger asks for another
            _log.debug("rollcall_failed", extra={"fields": {"why": error}})

    async def _report(self, effect: do.Report) -> None:
        if effect.reachable:
            _log.info("postgres_is_back", extra={"fields": {"held": len(self._held)}})
        else:
            _log.error("postgres_is_away", extra={"fields": {"why": effect.why}})

    async def _end_drain(self, effect: do.Drained) -> None:
        self._drained.set()

    async def _look_at_pending(self) -> None:
        if self._clock.monotonic() - self._looked_s >= PENDING_EVERY_S:
            self._looked_s = self._clock.monotonic()
            metrics.STORE_FEED_PENDING.set(await self._bus.pending(self._consumer))


def _rows(message: object) -> int:
    match message:
        case Stored():
            return max(1, len(message.blocks))
        case Evicted():
            return max(1, len(message.keys) // 32)
        case _:
            return 1


def _record(done: RequestDone, parent: Context, began_s: float, ended_s: float) -> None:
    """The store-manager's part in the trace of a request."""
    tracing.record("catalog.record", start_s=began_s, end_s=ended_s, parent=parent, attributes={
        "moonbus.request": done.request, "moonbus.outcome": done.outcome, "moonbus.hit_tokens": done.hit_tokens,
        "moonbus.last_key": done.last_key.hex()})
