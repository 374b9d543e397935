"""What one can ask of the catalog, by name; everything returned is a frozen value.

Every operation is one transaction, but for those that say otherwise. What collides with another writer is tried again.
Each raises ``Unavailable`` when Postgres cannot be used now (do the same again later: it changes nothing twice) and
``Unwritable`` when it will never take the data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from shared.catalog import ingest, ingest_sql, queries
from shared.catalog.fold import FeedEvent, Life, moment
from shared.catalog.queries import MAX_LISTED, BlockNotFound, RequestNotFound
from shared.catalog.retention import Retention
from shared.catalog.session import Collided, Database
from shared.catalog.upkeep import Upkeep, Upkeeper
from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.kv import Tier
from shared.messages import (
    BlocksQuery,
    BlocksReply,
    DescendantsQuery,
    DescendantsReply,
    EvictionsQuery,
    EvictionsReply,
    HotQuery,
    HotReply,
    LineageReply,
    RequestReply,
    RequestsQuery,
    RequestsReply,
    ReuseQuery,
    ReuseReply,
    StatsReply,
    StorageQuery,
    StorageReply,
    StoredBlock,
)
from shared.store.digest import Buckets

__all__ = ["MAX_LISTED", "BlockNotFound", "Catalog", "Difference", "Digested", "Inventory", "Repaired",
           "RequestNotFound", "Retention", "Upkeep", "Written"]

COLLISION_TRIES = 5
"""Times an operation is tried while others are in its way. Of two that collide one goes through, so few are needed."""

P = ParamSpec("P")
T = TypeVar("T")


def _again(operation: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """``operation``, tried again when it collides with another writer."""
    @wraps(operation)
    async def patient(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(COLLISION_TRIES - 1):
            try:
                return await operation(*args, **kwargs)
            except Collided:
                continue
        return await operation(*args, **kwargs)
    return patient


@dataclass(frozen=True)
class Written:
    """What one batch brought: rows offered to each table, and the lives of workers whose news has a hole."""

    blocks: int = 0
    replicas: int = 0
    """Copies that came or went."""
    requests: int = 0
    gaps: tuple[Life, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """All that a worker holds as of ``seq``, as it says itself."""

    worker: WorkerId
    incarnation: Incarnation
    seq: int
    spec: SpecDigest
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True)
class Difference:
    """What was found to differ between the catalog's copies of a life and its inventory as of ``seq``."""

    worker: WorkerId
    incarnation: Incarnation
    seq: int
    spec: SpecDigest
    missing: tuple[StoredBlock, ...] = ()
    """In the inventory only."""
    stale: tuple[tuple[BlockKey, Tier], ...] = ()
    """In the catalog only."""


@dataclass(frozen=True)
class Repaired:
    """What a reconciliation changed: copies that the catalog lacked, and copies that were gone."""

    missing: int = 0
    stale: int = 0


@dataclass(frozen=True)
class Digested:
    """What the catalog believes that one life holds."""

    tiers: dict[Tier, Buckets]
    complete: bool
    """All news up to the number that was asked with is in it."""


class Catalog:
    """The named operations on one database."""

    def __init__(self, database: Database, retention: Retention | None = None) -> None:
        self._database = database
        #: Requests wait for blocks of their chains, as far as we know; others' are counted by ``maintain``
        self._reuse_waits = True
        self._upkeeper = Upkeeper(database, retention or Retention())

    # Writing.

    async def write(self, events: Sequence[FeedEvent], *, now_s: float) -> Written:
        """Records a batch of the feed; events may be repeated and in any order (see :mod:`shared.catalog.fold`).

        Blocks and requests are followed by a second transaction, which counts reuse.
        """
        written = await self._write(events, now_s=now_s)
        if written.requests or (written.blocks and self._reuse_waits):
            await self.count_reuse()
        return written

    @_again
    async def _write(self, events: Sequence[FeedEvent], *, now_s: float) -> Written:
        async with self._database.transaction() as connection:
            folded = await ingest.write(connection, events, now_s=now_s)
        return Written(len(folded.blocks), len(folded.copies), len(folded.requests), tuple(folded.gaps))

    async def reconcile(self, inventory: Inventory, *, now_s: float) -> Repaired:
        """Makes the copies of one worker's life equal to its inventory; what happened after it stays as it is."""
        return await self._repair(
            (str(inventory.worker), str(inventory.incarnation)), inventory.seq, str(inventory.spec),
            inventory.blocks, None, now_s)

    async def repair(self, difference: Difference, *, now_s: float) -> Repaired:
        """The same for a difference that was found without shipping the whole inventory: everything else about the
        life's copies as of ``difference.seq`` is taken to be right."""
        return await self._repair(
            (str(difference.worker), str(difference.incarnation)), difference.seq, str(difference.spec),
            difference.missing, [(bytes(key), tier.value) for key, tier in difference.stale], now_s)

    async def _repair(self, life: Life, seq: int, spec: str, held: Sequence[StoredBlock],
                      stale: Sequence[tuple[bytes, str]] | None, now_s: float) -> Repaired:
        repaired, blocks = await self._repair_once(life, seq, spec, held, stale, now_s)
        if blocks and self._reuse_waits:
            await self.count_reuse()
        return repaired

    @_again
    async def _repair_once(self, life: Life, seq: int, spec: str, held: Sequence[StoredBlock],
                           stale: Sequence[tuple[bytes, str]] | None, now_s: float) -> tuple[Repaired, int]:
        async with self._database.transaction() as connection:
            missing, closed, folded = await ingest.repair(
                connection, life, seq=seq, spec=spec, held=held, stale=stale, now_s=now_s)
        return Repaired(missing=missing, stale=closed), len(folded.blocks)

    async def digest(self, worker: WorkerId, incarnation: Incarnation, *, seq: int) -> Digested:
        """What ``shared.store.digest`` makes of a life's copies, computed by Postgres."""
        life = {"worker": worker, "incarnation": incarnation}
        tiers: dict[Tier, dict[int, tuple[int, int]]] = defaultdict(dict)
        async with self._database.transaction() as connection:
            complete = bool((await connection.execute(ingest_sql.SEEN_UP_TO, {**life, "seq": seq})).scalar_one())
            for row in (await connection.execute(ingest_sql.DIGEST, life)).all():
                tiers[Tier(row.tier)][row.bucket] = (row.copies, row.mixed % 2**64)
        return Digested(dict(tiers), complete)

    async def known(self, worker: WorkerId, incarnation: Incarnation,
                    buckets: Sequence[int]) -> set[tuple[BlockKey, Tier]]:
        """The copies of a life in some ``buckets`` of the digest."""
        async with self._database.transaction() as connection:
            rows = (await connection.execute(ingest_sql.KNOWN, {
                "worker": worker, "incarnation": incarnation, "buckets": list(buckets)})).all()
        return {(BlockKey(key), Tier(tier)) for key, tier in rows}

    @_again
    async def mark_workers(self, heard: Sequence[Life], dead: Mapping[Life, str], *, now_s: float,
                           started_before_s: float) -> int:
        """Makes the states of workers' lives follow what is heard: exactly ``heard`` are alive.

        ``dead`` says why, where it is known; lives started after ``started_before_s`` (Unix seconds) are too young
        to be missed. Returns how many lives changed.
        """
        alive = {"workers": [worker for worker, _ in heard], "incarnations": [life for _, life in heard]}
        gone = {"dead_workers": [worker for worker, _ in dead], "dead_incarnations": [life for _, life in dead],
                "dead_why": list(dead.values())}
        async with self._database.transaction() as connection:
            died = await connection.execute(ingest_sql.MARK_DEAD, {
                **alive, **gone, "at": moment(now_s), "started_before": moment(started_before_s)})
            revived = await connection.execute(ingest_sql.MARK_ALIVE, alive)
        return died.rowcount + revived.rowcount

    @_again
    async def count_reuse(self) -> None:
        """Gives the blocks that requests reused their hits, as far as the requests' chains are known by now.

        A writer does it after its own news; what waits for another writer's is counted by ``maintain``.
        """
        async with self._database.transaction() as connection:
            self._reuse_waits = (await connection.execute(ingest_sql.COUNT_REUSE, {
                "wait_s": ingest_sql.REUSE_WAIT_S, "most": ingest_sql.REUSE_AT_A_TIME})).scalar_one()

    @_again
    async def maintain(self, *, now_s: float) -> Upkeep:
        """Keeps the catalog within its :class:`Retention` and samples storage when that is due.

        Many short transactions. To be called every minute or so by one store-manager, and at once again while it
        says that there is ``more``; two at a time do no harm.
        """
        await self.count_reuse()  # also of requests after which nothing was written
        return await self._upkeeper.run(now_s=now_s)

    # Reading.

    async def lineage(self, key_hex: str) -> LineageReply:
        """The chain from root to the one block whose key starts with ``key_hex``.

        Raises :class:`BlockNotFound` when none or several do.
        """
        async with self._database.transaction() as connection:
            return await queries.lineage(connection, key_hex)

    async def descendants(self, query: DescendantsQuery) -> DescendantsReply:
        """What continues a block. Raises :class:`BlockNotFound`."""
        async with self._database.transaction() as connection:
            return await queries.descendants(connection, query)

    async def hot(self, query: HotQuery) -> HotReply:
        """The prefixes reused most, and what they saved."""
        async with self._database.transaction() as connection:
            return await queries.hot(connection, query)

    async def blocks(self, query: BlocksQuery) -> BlocksReply:
        """The blocks that ``query`` asks for, and how many there are without its limit."""
        async with self._database.transaction() as connection:
            return await queries.blocks(connection, query)

    async def stats(self, *, feed_pending: int) -> StatsReply:
        """Totals; ``feed_pending`` is the caller's to know."""
        async with self._database.transaction() as connection:
            return await queries.stats(connection, feed_pending=feed_pending)

    async def evictions(self, query: EvictionsQuery, *, now_s: float) -> EvictionsReply:
        """Who evicted what and why. Raises :class:`BlockNotFound` when it asks for a block that is not known."""
        async with self._database.transaction() as connection:
            return await queries.evictions(connection, query, now_s=now_s)

    async def reuse(self, query: ReuseQuery, *, now_s: float) -> ReuseReply:
        """Prompt tokens that needed no computing."""
        async with self._database.transaction() as connection:
            return await queries.reuse(connection, query, now_s=now_s)

    async def requests(self, query: RequestsQuery, *, now_s: float) -> RequestsReply:
        """Requests of the past."""
        async with self._database.transaction() as connection:
            return await queries.requests(connection, query, now_s=now_s)

    async def request(self, request_id: str) -> RequestReply:
        """One request of the past. Raises :class:`RequestNotFound`."""
        async with self._database.transaction() as connection:
            return await queries.request(connection, request_id)

    async def storage(self, query: StorageQuery, *, now_s: float) -> StorageReply:
        """What workers held over time."""
        async with self._database.transaction() as connection:
            return await queries.storage(connection, query, now_s=now_s)
