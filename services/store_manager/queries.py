"""Answers to what people and tools ask of the catalog. Any store-manager answers; none of it is on a request's path."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from shared.bus.bus import Bus, Delivery, Subscription
from shared.bus.streams import Consumer
from shared.bus.subjects import (
    BLOCKS,
    DESCENDANTS,
    EVICTIONS,
    HOT,
    LINEAGE,
    REQUEST,
    REQUESTS,
    REUSE,
    STATS,
    STORAGE,
    Subject,
)
from shared.catalog.repository import Catalog
from shared.clock import Clock
from shared.errors import MoonbusError
from shared.messages import Failure, StatsReply

QUERIES = 4
"""Most questions answered at a time, of all kinds together; a connection to Postgres for each."""

T = TypeVar("T")


class Queries:
    """The questions of one store-manager; served while the subscriptions that :meth:`serve` gives are open."""

    def __init__(self, bus: Bus, catalog: Catalog, consumer: Consumer, clock: Clock, *, timeout_s: float) -> None:
        self._bus, self._catalog, self._consumer, self._clock = bus, catalog, consumer, clock
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(QUERIES)

    async def serve(self) -> list[Subscription]:
        """Begins to answer; whoever calls closes the subscriptions."""
        catalog, now_s = self._catalog, self._clock.wall
        answers: dict[Subject, Callable[[Any], Awaitable[Any]]] = {
            LINEAGE: lambda query: catalog.lineage(query.key_hex),
            BLOCKS: catalog.blocks,
            STATS: self._stats,
            HOT: catalog.hot,
            DESCENDANTS: catalog.descendants,
            EVICTIONS: lambda query: catalog.evictions(query, now_s=now_s()),
            REUSE: lambda query: catalog.reuse(query, now_s=now_s()),
            REQUESTS: lambda query: catalog.requests(query, now_s=now_s()),
            REQUEST: lambda query: catalog.request(query.request),
            STORAGE: lambda query: catalog.storage(query, now_s=now_s()),
        }
        return [await self._bus.serve(subject.at(), self._handler(answer), queue="store-manager", concurrency=QUERIES)
                for subject, answer in answers.items()]

    def _handler(self, answer: Callable[[Any], Awaitable[T]]) -> Callable[[Delivery], Awaitable[T | Failure]]:
        async def handle(delivery: Delivery) -> T | Failure:
            limit_s = self._timeout_s
            try:
                async with asyncio.timeout(limit_s), self._room:
                    return await answer(delivery.message)
            except TimeoutError:
                return Failure(
                    message=f"the catalog did not answer within {limit_s:g} s; ask for less or try again later")
            except MoonbusError as error:
                return Failure(message=str(error))
        return handle

    async def _stats(self, _query: Any) -> StatsReply:
        return await self._catalog.stats(feed_pending=await self._bus.pending(self._consumer))
