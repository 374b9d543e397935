"""What one can ask of the catalog, by name; everything returned is a frozen value.

Every operation is one transaction; those that bring blocks or requests are followed by another that counts reuse. What
collides with another writer is tried again. Each raises ``Unavailable`` when Postgres cannot be used now (do the same
again later: it changes nothing twice) and ``Unwritable`` when it will never take the data.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from shared.catalog import sql
from shared.catalog.fold import FeedEvent, Folded, Life, Row, columns, fold, moment
from shared.catalog.session import Collided, Database, Unwritable
from shared.errors import UserError
from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.messages import (
    BlockRow,
    BlocksQuery,
    BlocksReply,
    LineageReply,
    ReplicaRow,
    StatsReply,
    Stored,
    StoredBlock,
    WorkerStats,
)

MAX_LISTED = 1_000
"""Most blocks one query lists: the answer must fit in a message."""

COLLISION_TRIES = 5
"""Times an operation is tried while others are in its way. Of two that collide one goes through, so few are needed."""

P = ParamSpec("P")
T = TypeVar("T")

_HEX = re.compile(r"[0-9a-f]{1,64}")


class BlockNotFound(UserError):
    """No block, or more than one, answers to the key that was asked."""


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
class Repaired:
    """What a reconciliation changed: copies that the catalog lacked, and copies that were gone."""

    missing: int = 0
    stale: int = 0


class Catalog:
    """The named operations on one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @_again
    async def write(self, events: Sequence[FeedEvent], *, now_s: float) -> Written:
        """Records a batch of the feed; events may be repeated and in any order (see :mod:`shared.catalog.fold`)."""
        try:
            folded = fold(events, now_s=now_s)
        except (ValueError, OverflowError) as error:
            raise Unwritable(str(error)) from error
        async with self._database.transaction() as connection:
            gaps = await _write(connection, folded)
        await self._count_reuse(folded)
        return Written(len(folded.blocks), len(folded.replicas), len(folded.requests), gaps)

    @_again
    async def reconcile(self, inventory: Inventory, *, now_s: float) -> Repaired:
        """Makes the rows of one worker's life equal to its inventory; what happened after it stays as it is."""
        keys = [bytes(block.key) for block in inventory.blocks]
        tiers = [block.tier.value for block in inventory.blocks]
        held = {"worker": inventory.worker, "incarnation": inventory.incarnation, "seq": inventory.seq,
                "keys": keys, "tiers": tiers}
        async with self._database.transaction() as connection:
            rows = (await connection.execute(sql.MISSING, held)).all()
            stale = await connection.execute(sql.CLOSE_STALE, {**held, "at": moment(now_s)})
            # An inventory does not say when a block was stored: now stands in, under the inventory's own number.
            # The storing's message, should it still come, has a lower one and leaves the copy as it is.
            folded = fold([Stored(worker=inventory.worker, incarnation=inventory.incarnation, seq=inventory.seq,
                                  spec=inventory.spec, at_s=now_s,
                                  blocks=[inventory.blocks[position - 1] for position, _ in rows])], now_s=now_s)
            lacking = {(keys[position - 1], tiers[position - 1]) for position, copy in rows if copy}
            folded.replicas = {name: copy for name, copy in folded.replicas.items() if (name[0], name[3]) in lacking}
            folded.seen.clear()
            await _write(connection, folded)
            await _execute(connection, sql.UPSERT_SEEN, [
                (inventory.worker, inventory.incarnation, f"{{[1,{inventory.seq + 1})}}")])
        await self._count_reuse(folded)
        return Repaired(missing=len(lacking), stale=stale.rowcount)

    @_again
    async def mark_workers(self, heard: Sequence[Life], dead: Mapping[Life, str], *, now_s: float,
                           started_before_s: float) -> int:
        """Makes the states of workers' lives follow what is heard: exactly ``heard`` are alive.

        ``dead`` says why, where it is known; lives started after ``started_before_s`` (Unix seconds) are too young
        to be missed. Returns how many lives changed.
        """
        now = moment(now_s)
        alive = {"workers": [worker for worker, _ in heard], "incarnations": [life for _, life in heard]}
        gone = {"dead_workers": [worker for worker, _ in dead], "dead_incarnations": [life for _, life in dead],
                "dead_why": list(dead.values())}
        async with self._database.transaction() as connection:
            died = await connection.execute(
                sql.MARK_DEAD, {**alive, **gone, "at": now, "started_before": moment(started_before_s)})
            revived = await connection.execute(sql.MARK_ALIVE, alive)
        return died.rowcount + revived.rowcount

    @_again
    async def _count_reuse(self, folded: Folded) -> None:
        """Counts what ``folded`` made countable, its own requests or older ones that waited for its blocks."""
        if folded.requests or folded.blocks:
            async with self._database.transaction() as connection:
                await connection.execute(sql.COUNT_REUSE, {"wait_s": sql.REUSE_WAIT_S})

    async def lineage(self, key_hex: str) -> LineageReply:
        """The chain from root to the one block whose key starts with ``key_hex``.

        Raises :class:`BlockNotFound` when none or several do.
        """
        prefix = key_hex.strip().lower()
        if not _HEX.fullmatch(prefix):
            raise BlockNotFound(f"{key_hex!r} is no block key: give 1 to 64 hexadecimal digits")
        async with self._database.transaction() as connection:
            bounds = {"low": bytes.fromhex(prefix.ljust(64, "0")), "high": bytes.fromhex(prefix.ljust(64, "f"))}
            found = (await connection.execute(sql.FIND_KEYS, bounds)).scalars().all()
            if not found:
                raise BlockNotFound(f"no block's key starts with {prefix}; moonbus kv ls --all lists the known ones")
            if len(found) > 1:
                raise BlockNotFound(f"{prefix} is the start of several keys, {found[0].hex()} and {found[1].hex()} "
                                    "among them; give more digits")
            rows = (await connection.execute(sql.LINEAGE, {"key": found[0]})).all()
            blocks = await _with_replicas(connection, rows)
            descendants = (await connection.execute(sql.DESCENDANTS, {"key": found[0]})).scalar_one()
        return LineageReply(blocks=blocks, descendants=descendants)

    async def blocks(self, query: BlocksQuery) -> BlocksReply:
        """The blocks that ``query`` asks for, and how many there are without its limit."""
        which = {"worker": query.worker, "tenant": query.tenant}
        async with self._database.transaction() as connection:
            rows = (await connection.execute(
                sql.BLOCKS[query.order, query.all], {**which, "limit": max(0, min(query.limit, MAX_LISTED))})).all()
            blocks = await _with_replicas(connection, rows)
            total = (await connection.execute(sql.COUNT_BLOCKS[query.order, query.all], which)).scalar_one()
        return BlocksReply(blocks=blocks, total=total)

    async def stats(self, *, feed_pending: int) -> StatsReply:
        """Totals; ``feed_pending`` is the caller's to know."""
        async with self._database.transaction() as connection:
            totals = (await connection.execute(sql.TOTALS)).one()
            workers = (await connection.execute(sql.WORKER_TOTALS)).all()
        return StatsReply(
            blocks=totals.blocks, live_blocks=totals.live_blocks, live_replicas=totals.live_replicas,
            live_bytes=int(totals.live_bytes), requests=totals.requests, prompt_tokens=totals.prompt_tokens,
            hit_tokens=totals.hit_tokens, feed_pending=feed_pending,
            workers=[WorkerStats(worker=row.worker, role=row.role, state=row.state, blocks=row.blocks,
                                 nbytes=int(row.nbytes)) for row in workers])


async def _write(connection: AsyncConnection, folded: Folded) -> tuple[Life, ...]:
    """All tables in one fixed order, so that writers meet their locks in the same order; returns lives with a gap."""
    await _execute(connection, sql.UPSERT_SPECS, folded.spec_rows())
    if folded.workers:
        await _execute(connection, sql.UPSERT_WORKERS, folded.worker_rows())
        await connection.execute(sql.REPLACE_WORKERS, {"workers": sorted({worker for worker, _ in folded.workers})})
    await _execute(connection, sql.UPSERT_BLOCKS, folded.block_rows())
    await _execute(connection, sql.UPSERT_REPLICAS, folded.replica_rows())
    await _execute(connection, sql.INSERT_REQUESTS, folded.request_rows())
    seen = await _execute(connection, sql.UPSERT_SEEN, folded.seen_rows())
    return tuple((worker, incarnation) for worker, incarnation, gap in seen if gap)


async def _execute(connection: AsyncConnection, upsert: sql.Upsert, rows: Sequence[Row]) -> Sequence[Any]:
    """Merges ``rows``; returns what the statement returns, if it does."""
    if not rows:
        return ()
    result = await connection.execute(upsert.statement, dict(zip(upsert.names, columns(rows), strict=True)))
    return result.all() if result.returns_rows else ()


async def _with_replicas(connection: AsyncConnection, rows: Sequence[Any]) -> list[BlockRow]:
    replicas: dict[bytes, list[ReplicaRow]] = defaultdict(list)
    for copy in (await connection.execute(sql.REPLICAS, {"keys": [row.key for row in rows]})).all():
        replicas[copy.key].append(ReplicaRow(
            worker=copy.worker, incarnation=copy.incarnation, tier=copy.tier, stored_at_s=copy.stored_at.timestamp(),
            origin=copy.origin, source=copy.source, evicted_at_s=_seconds(copy.evicted_at), why=copy.why))
    return [
        BlockRow(key=BlockKey(row.key), parent=BlockKey(row.parent), depth=row.depth, model=row.model,
                 tenant=row.tenant, tokens=row.tokens, nbytes=row.nbytes, created_by=row.created_by,
                 created_at_s=row.created_at.timestamp(), request=row.request, hits=row.hits,
                 last_used_at_s=_seconds(row.last_used_at), replicas=replicas[row.key])
        for row in rows
    ]


def _seconds(at: datetime | None) -> float | None:
    return at.timestamp() if at is not None else None
