"""Answers to what people and tools ask of the catalog. Any store-manager answers; none of it is on a request's path."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from shared.bus.bus import Bus, Delivery, Subscription
from shared.bus.streams import Consumer
from shared.bus.subjects import BLOCKS, LINEAGE, STATS, Subject
from shared.catalog.repository import Catalog
from shared.errors import BusError, MoonbusError
from shared.messages import BlocksReply, Failure, LineageReply, StatsReply

QUERIES = 4
"""Most questions answered at a time, of all kinds together; a connection to Postgres for each."""

T = TypeVar("T")


class Queries:
    """The questions of one store-manager; served while the subscriptions that :meth:`serve` gives are open."""

    def __init__(self, bus: Bus, catalog: Catalog, consumer: Consumer, *, timeout_s: float) -> None:
        self._bus, self._catalog, self._consumer, self._timeout_s = bus, catalog, consumer, timeout_s
        self._room = asyncio.Semaphore(QUERIES)

    async def serve(self) -> list[Subscription]:
        """Begins to answer; whoever calls closes the subscriptions."""
        handlers: dict[Subject, Callable[[Delivery], Awaitable[Any]]] = {
            LINEAGE: self._lineage, BLOCKS: self._blocks, STATS: self._stats}
        return [await self._bus.serve(subject.at(), handler, queue="store-manager", concurrency=QUERIES)
                for subject, handler in handlers.items()]

    async def _lineage(self, delivery: Delivery) -> LineageReply | Failure:
        return await self._answer(lambda: self._catalog.lineage(delivery.message.key_hex))

    async def _blocks(self, delivery: Delivery) -> BlocksReply | Failure:
        return await self._answer(lambda: self._catalog.blocks(delivery.message))

    async def _stats(self, delivery: Delivery) -> StatsReply | Failure:
        try:
            pending = await self._bus.pending(self._consumer)
        except BusError as error:
            return Failure(message=str(error))
        return await self._answer(lambda: self._catalog.stats(feed_pending=pending))

    async def _answer(self, query: Callable[[], Awaitable[T]]) -> T | Failure:
        limit_s = self._timeout_s
        try:
            async with asyncio.timeout(limit_s), self._room:
                return await query()
        except TimeoutError:
            return Failure(message=f"the catalog did not answer within {limit_s:g} s; ask for less or try again later")
        except MoonbusError as error:
            return Failure(message=str(error))
