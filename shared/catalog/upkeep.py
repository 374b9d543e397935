"""Keeping the catalog within its bounds: partitions made ahead and dropped, old blocks and lives forgotten, storage
sampled. A bounded piece at a time, each in a transaction of its own, so that it never stands in the feed's way."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.catalog import upkeep_sql as sql
from shared.catalog.fold import moment
from shared.catalog.models import PARTITIONED
from shared.catalog.query_sql import ABOUT_BLOCKS
from shared.catalog.retention import HOUR_S, Partition, Retention, plan
from shared.catalog.session import Collided, Database

ROWS_AT_A_TIME = 5_000
"""Rows that one piece of work deletes."""
PIECES = 20
"""Pieces of work of one kind in one call."""
DEAD_S = HOUR_S
"""A silent worker may be heard again; after so long its copies are taken for ended."""
YOUNG_S = HOUR_S
"""Blocks this young stay even when there are too many: their copies may be news still under way."""


@dataclass(frozen=True)
class Upkeep:
    """What one call did."""

    partitions_made: int = 0
    partitions_dropped: int = 0
    rows_trimmed: int = 0
    """Of histories, rows that no partition had."""
    blocks_forgotten: int = 0
    copies_ended: int = 0
    """Of lives that are over."""
    lives_forgotten: int = 0
    sampled: bool = False
    more: bool = False
    """There is more to do now: call again soon."""


_log = logging.getLogger(__name__)

_Piece = Callable[[AsyncConnection, float], Awaitable[tuple[int, bool]]]
"""Does one piece of work in a transaction; how many rows, and whether there is more."""


class Upkeeper:
    """The upkeep of one database; remembers how far it has looked for old blocks."""

    def __init__(self, database: Database, retention: Retention) -> None:
        self._database, self._retention = database, retention
        self._swept: tuple[datetime, bytes] = (moment(0), b"")

    async def run(self, *, now_s: float) -> Upkeep:
        """See the module; nothing when somebody else is at it."""
        keep = self._retention
        made = dropped = trimmed = 0
        ages = {"kv_evicted": keep.copies_s, "request_done": keep.requests_s, "storage_sample": keep.samples_s}
        for table, keep_s in ages.items():
            one, other, rows = await self._partitions(table, keep_s, now_s)
            made, dropped, trimmed = made + one, dropped + other, trimmed + rows
        ended, more_copies = await self._pieces(self._end_lives, now_s)
        forgotten, more_blocks = await self._pieces(self._sweep, now_s)
        async with self._alone() as connection:
            lives = 0 if connection is None else (await connection.execute(sql.FORGET_LIVES, {
                "before": moment(now_s - max(keep.copies_s, keep.blocks_s) - 24 * HOUR_S),
                "most": ROWS_AT_A_TIME})).scalar_one()
        return Upkeep(made, dropped, trimmed, forgotten, ended, lives, await self._sample(now_s),
                      more_copies or more_blocks or trimmed >= ROWS_AT_A_TIME)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[AsyncConnection | None]:
        """A transaction in which nobody else does upkeep; ``None`` while somebody does."""
        async with self._database.transaction() as connection:
            alone = (await connection.execute(sql.TRY_LOCK)).scalar_one()
            yield connection if alone else None

    async def _partitions(self, table: str, keep_s: float, now_s: float) -> tuple[int, int, int]:
        async with self._database.transaction() as connection:
            found = [Partition(row.relname, row.start_s, row.stop_s, row.nbytes)
                     for row in (await connection.execute(sql.PARTITIONS, {"table": table})).all()]
            rest_bytes = (await connection.execute(sql.REST_BYTES, {"table": table})).scalar_one()
        todo = plan(table, found, now_s=now_s, keep_s=keep_s, max_bytes=self._retention.history_bytes,
                    rest_bytes=rest_bytes)
        column = PARTITIONED[table]
        drop = (sql.DROP, sql.FORGET_HOURS) if table == "request_done" else (sql.DROP,)
        changes: list[tuple[str, ...]] = [tuple(statement.format(
            name=partition.name, start=partition.start_s, stop=partition.stop_s) for statement in drop)
            for partition in todo.drop]
        changes += [tuple(statement.format(
            table=table, name=partition.name, column=column, start=partition.start_s, stop=partition.stop_s,
            start_text=_utc(partition.start_s), stop_text=_utc(partition.stop_s)) for statement in sql.MAKE)
            for partition in todo.make]
        done = 0
        for change in changes:
            if not await self._change(*change):
                break
            done += 1
        trimmed, kept = 0, {"oldest": moment(now_s - keep_s), "newest": moment(now_s + keep_s)}
        async with self._alone() as connection:
            if connection is not None:
                trimmed = (await connection.execute(text(sql.TRIM_REST.format(table=table, column=column)),
                                                    {**kept, "most": ROWS_AT_A_TIME})).scalar_one()
                if table == "request_done":
                    await connection.execute(sql.FORGET_STRAY_HOURS, kept)
        dropped = min(done, len(todo.drop))
        return done - dropped, dropped, trimmed

    async def _change(self, *statements: str) -> bool:
        """Whether it could be done: not while somebody else does upkeep, or reads the table (a dump, say)."""
        try:
            async with self._alone() as connection:
                if connection is None:
                    return False
                await connection.execute(sql.PATIENCE)
                for statement in statements:
                    await connection.execute(text(statement))
        except Collided as error:
            _log.info("partition_not_changed", extra={"fields": {"why": error}})
            return False
        return True

    async def _pieces(self, piece: _Piece, now_s: float) -> tuple[int, bool]:
        """Rows, and whether there is more."""
        total = 0
        for _ in range(PIECES):
            async with self._alone() as connection:
                if connection is None:
                    return total, False
                rows, more = await piece(connection, now_s)
            total += rows
            if not more:
                return total, False
        return total, True

    async def _end_lives(self, connection: AsyncConnection, now_s: float) -> tuple[int, bool]:
        rows = (await connection.execute(
            sql.END_LIFE, {"dead_before": moment(now_s - DEAD_S), "most": ROWS_AT_A_TIME})).scalar_one()
        return rows, rows > 0

    async def _sweep(self, connection: AsyncConnection, now_s: float) -> tuple[int, bool]:
        blocks = (await connection.execute(ABOUT_BLOCKS)).scalar_one()
        age_s = YOUNG_S if blocks > self._retention.blocks else self._retention.blocks_s
        after, key = self._swept
        row = (await connection.execute(sql.SWEEP, {
            "after": after, "after_key": key, "before": moment(now_s - age_s), "most": ROWS_AT_A_TIME})).one()
        if row.looked < ROWS_AT_A_TIME:
            self._swept = (moment(0), b"")
            return row.gone, False
        self._swept = (row.created_at, row.key)
        return row.gone, True

    async def _sample(self, now_s: float) -> bool:
        async with self._alone() as connection:
            if connection is None:
                return False
            last = (await connection.execute(sql.LAST_SAMPLE)).scalar_one_or_none()
            if last is not None and last > moment(now_s - self._retention.sample_s):
                return False
            await connection.execute(sql.SAMPLE, {"at": moment(now_s)})
            return True


def _utc(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()
