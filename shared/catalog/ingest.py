"""Bringing news into the catalog: batches of the feed, inventories, who is alive. Each in the transaction of a
connection that the caller opened."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.catalog import ingest_sql as sql
from shared.catalog.fold import (
    FeedEvent,
    Folded,
    Life,
    Row,
    Seen,
    Spans,
    columns,
    first_missing,
    fold,
    join,
    lives,
    moment,
    multirange,
)
from shared.catalog.session import Unwritable
from shared.ids import Incarnation, SpecDigest, WorkerId
from shared.messages import Stored, StoredBlock


async def write(connection: AsyncConnection, events: Sequence[FeedEvent], *, now_s: float) -> Folded:
    """Merges a batch; what it made of the events."""
    seen = await lock_lives(connection, lives(events))
    try:
        folded = fold(events, seen, now_s=now_s)
    except (ValueError, OverflowError) as error:
        raise Unwritable(str(error)) from error
    await _execute(connection, sql.UPSERT_SPECS, folded.spec_rows())
    if folded.workers:
        await _execute(connection, sql.UPSERT_WORKERS, folded.worker_rows())
        await connection.execute(sql.REPLACE_WORKERS, {"workers": sorted({worker for worker, _ in folded.workers})})
    if folded.blocks or folded.seen:
        await _merge(connection, folded)
    await _execute(connection, sql.INSERT_REQUESTS, folded.request_rows())
    await _see(connection, folded.seen)
    return folded


async def lock_lives(connection: AsyncConnection, named: Sequence[Life]) -> dict[Life, Seen]:
    """The rows of these lives, locked in order until the transaction ends; those not known yet are made."""
    if not named:
        return {}
    binds = {"workers": [worker for worker, _ in named], "incarnations": [life for _, life in named]}
    known = await _locked(connection, binds)
    if len(known) < len(named):
        await connection.execute(sql.ADD_LIVES, binds)
        known = await _locked(connection, binds)
    return known


async def _locked(connection: AsyncConnection, binds: Mapping[str, Any]) -> dict[Life, Seen]:
    return {(row.worker, row.incarnation): Seen(
                row.life, tuple((part.lower, part.upper) for part in row.seen), row.has_late)
            for row in (await connection.execute(sql.LOCK_LIVES, binds)).all()}


async def repair(connection: AsyncConnection, life: Life, *, seq: int, spec: str, held: Sequence[StoredBlock],
                 stale: Sequence[tuple[bytes, str]] | None, now_s: float) -> tuple[int, int, Folded]:
    """Makes the copies of one life what its inventory as of ``seq`` says; what happened later stays.

    ``held`` are blocks of the inventory: all of them when ``stale`` is ``None``, else those that may be missing, and
    ``stale`` are (key, tier) of copies that the inventory does not have. Returns how many copies were missing and
    stale.
    """
    seen = (await lock_lives(connection, [life]))[life]
    driver = await _copy(connection, sql.IN_HELD, [(block.key, block.tier.value, n) for n, block in enumerate(held)])
    await driver.execute(f"ANALYZE {sql.IN_HELD.name}")
    rows = (await connection.execute(sql.MISSING, {"life": seen.number})).all()
    missing = {n for n, copy in rows if copy}
    if missing and seen.spans and seen.spans[-1][1] > seq + 1:  # news from after the inventory is here already
        missing -= set((await connection.execute(
            sql.ENDED_SINCE, {"life": seen.number, "seq": seq, "missing": sorted(missing)})).scalars())
    closing = {"life": seen.number, "seq": seq, "at": moment(now_s)}
    if stale is None:
        closed = await connection.execute(sql.CLOSE_UNHELD, closing)
    else:
        closed = await connection.execute(sql.CLOSE_STALE, {
            **closing, "keys": [key for key, _ in stale], "tiers": [tier for _, tier in stale]})
    # An inventory does not say when a block was stored: now stands in, under the inventory's own number. News that
    # still comes with a number up to that one is seen: it only adds to who made the blocks.
    worker, incarnation = life
    folded = fold([Stored(worker=WorkerId(worker), incarnation=Incarnation(incarnation), seq=seq, spec=SpecDigest(spec),
                          at_s=now_s, blocks=[held[n] for n, _ in rows])], {life: Seen(seen.number, ())}, now_s=now_s)
    wanted = {(block.key, seen.number, block.tier.value) for n, block in enumerate(held) if n in missing}
    folded.copies = {name: copy for name, copy in folded.copies.items() if name in wanted}
    spans = join((*seen.spans, (1, seq + 1)), ()) if seq > 0 else seen.spans
    folded.seen, folded.broken = {life: spans}, {seen.number: first_missing(spans)}
    await _merge(connection, folded)
    await _see(connection, folded.seen)
    return len(missing), closed.rowcount, folded


async def _merge(connection: AsyncConnection, folded: Folded) -> None:
    """Blocks, then copies: in one fixed order, so that writers meet their locks in the same order."""
    _, (evictions, copies) = await asyncio.gather(  # sorted while Postgres is at work
        _bring(connection, sql.MERGE_BLOCKS, folded.block_rows()),
        asyncio.to_thread(lambda: (folded.eviction_rows(), folded.copy_rows())))
    await _bring(connection, sql.END_COPIES, evictions)
    await _bring(connection, sql.MERGE_COPIES, copies)
    if folded.broken:
        late = folded.late_rows()
        if late:
            await connection.execute(sql.ADD_LATE, dict(zip(
                ("keys", "lives", "tiers", "evicted_seqs", "evicted_ats"), columns(late), strict=True)))
        numbers = list(folded.broken)
        await connection.execute(sql.END_LATE, {"lives": numbers})
        await connection.execute(sql.FORGET_LATE, {"lives": numbers, "missing": list(folded.broken.values())})


async def _see(connection: AsyncConnection, seen: Mapping[Life, Spans]) -> None:
    if seen:
        await connection.execute(sql.SEE, {
            "workers": [worker for worker, _ in seen], "incarnations": [life for _, life in seen],
            "seen": [multirange(spans) for spans in seen.values()]})


async def _bring(connection: AsyncConnection, merge: sql.Merge, rows: Sequence[Row]) -> None:
    if len(rows) > sql.DIRECT_ROWS:
        await _copy(connection, merge.landing, rows)
        await connection.execute(sql.BY_INDEX)
        await connection.execute(merge.copied)
    elif rows:
        await connection.execute(merge.direct, dict(zip(merge.landing.columns, columns(rows), strict=True)))


async def _copy(connection: AsyncConnection, landing: sql.Landing, rows: Sequence[Row]) -> asyncpg.Connection[Any]:
    """Fills the landing's table. SQLAlchemy has no word for ``COPY``: the driver's connection, in the transaction that
    must have begun, has."""
    raw = await connection.get_raw_connection()
    driver: asyncpg.Connection[Any] = raw.driver_connection
    await driver.execute(landing.table())
    try:
        await driver.copy_records_to_table(landing.name, records=rows)
    except (ValueError, OverflowError, TypeError) as error:  # a value that has no place in its column's type
        raise Unwritable(str(error)) from error
    return driver


async def _execute(connection: AsyncConnection, upsert: sql.Upsert, rows: Sequence[Row]) -> None:
    if rows:
        await connection.execute(upsert.statement, dict(zip(upsert.names, columns(rows), strict=True)))
