"""Answering questions, each in the transaction of a connection that the caller opened; answers are wire messages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.catalog import query_sql as sql
from shared.catalog.fold import moment
from shared.catalog.prefixes import gather
from shared.errors import UserError
from shared.ids import BlockKey
from shared.messages import (
    BlockRow,
    BlocksQuery,
    BlocksReply,
    Decision,
    DescendantsQuery,
    DescendantsReply,
    EvictionGroup,
    EvictionRow,
    EvictionsQuery,
    EvictionsReply,
    HotQuery,
    HotReply,
    LineageReply,
    PrefixRow,
    ReplicaRow,
    RequestReply,
    RequestRow,
    RequestsQuery,
    RequestsReply,
    ReuseQuery,
    ReuseReply,
    ReuseRow,
    Stages,
    StatsReply,
    StorageQuery,
    StorageReply,
    StorageRow,
    WorkerStats,
)

MAX_LISTED = 1_000
"""Most rows of a list: the answer must fit in a message."""
MAX_TREE = 10_000
"""Most blocks of a tree, before it is gathered."""
MAX_COUNTED = 200_000
"""More blocks, or copies, are not counted for the totals but estimated."""
SAMPLED = 4_000
"""Copies that an estimate looks at, about."""
MAX_ENDED = 2_000
"""Most copies of the past shown of a chain."""
MAX_STEPS = 500

T = TypeVar("T")

_ANSWER_IDS = ("chatcmpl-", "cmpl-")
"""What the id of an OpenAI answer has before the request's."""
_CALLED_ALIKE = 4
"""One less are named of requests that clients call the same."""

_HEX = re.compile(r"[0-9a-f]{1,64}")
_HEAD = 8
"""Bytes of a key that its indexes keep."""


class BlockNotFound(UserError):
    """No block, or more than one, answers to the key that was asked."""


class RequestNotFound(UserError):
    """No request, or more than one, answers to the id that was asked."""


async def find_block(connection: AsyncConnection, key_hex: str) -> BlockKey:
    """The one block whose key starts with ``key_hex``. Raises :class:`BlockNotFound`."""
    prefix = key_hex.strip().lower()
    if not _HEX.fullmatch(prefix):
        raise BlockNotFound(f"{key_hex!r} is no block key: give 1 to 64 hexadecimal digits")
    bounds = {"low": bytes.fromhex(prefix.ljust(64, "0")), "high": bytes.fromhex(prefix.ljust(64, "f"))}
    found = (await connection.execute(sql.FIND_KEYS, bounds)).scalars().all()
    if not found:
        raise BlockNotFound(f"no block's key starts with {prefix}; moonbus kv ls --all lists the known ones")
    if len(found) > 1:
        raise BlockNotFound(f"{prefix} is the start of several keys, {found[0].hex()} and {found[1].hex()} "
                            "among them; give more digits")
    return BlockKey(found[0])


async def lineage(connection: AsyncConnection, key_hex: str) -> LineageReply:
    """The chain from root to the block, and how many blocks continue it."""
    key = await find_block(connection, key_hex)
    blocks = await _with_copies(connection, (await connection.execute(sql.LINEAGE, {"key": key})).all(), ended=True)
    descendants = (await connection.execute(sql.COUNT_DESCENDANTS, {"key": key})).scalar_one()
    return LineageReply(blocks=blocks, descendants=descendants)


async def descendants(connection: AsyncConnection, query: DescendantsQuery) -> DescendantsReply:
    """The block and what continues it."""
    key = await find_block(connection, query.key_hex)
    below = (await connection.execute(
        sql.DESCENDANTS, {"key": key, "limit": _at_most(query.limit, MAX_TREE)})).all()
    chain = (await connection.execute(sql.LINEAGE, {"key": key})).all()
    count = (await connection.execute(sql.COUNT_DESCENDANTS, {"key": key})).scalar_one()
    return DescendantsReply(prefixes=await _gathered(connection, [chain[-1], *below]), descendants=count)


async def hot(connection: AsyncConnection, query: HotQuery) -> HotReply:
    """The tree of the prefixes reused most."""
    rows = (await connection.execute(sql.HOT, {
        "tenant": query.tenant, "model": query.model, "limit": _at_most(query.limit, MAX_TREE)})).all()
    return HotReply(prefixes=await _gathered(connection, rows))


async def blocks(connection: AsyncConnection, query: BlocksQuery) -> BlocksReply:
    """The blocks that ``query`` asks for, and how many there are without its limit; in a large catalog, of which
    counting would read all, about how many it has."""
    which = {"worker": query.worker, "tenant": query.tenant}
    rows = (await connection.execute(
        sql.BLOCKS[query.order, query.all], {**which, "limit": _at_most(query.limit, MAX_LISTED)})).all()
    found = await _with_copies(connection, rows, ended=query.all)
    total = (await connection.execute(sql.ABOUT_BLOCKS)).scalar_one()
    is_about = total > sql.MAX_LOOKED_AT
    if not is_about:
        total = (await connection.execute(sql.COUNT_BLOCKS[query.order, query.all], which)).scalar_one()
    return BlocksReply(blocks=found, total=total, is_about=is_about,
                       looked_at=sql.MAX_LOOKED_AT if is_about else 0)


async def stats(connection: AsyncConnection, *, feed_pending: int) -> StatsReply:
    """Totals; ``feed_pending`` is the caller's to know."""
    totals = (await connection.execute(sql.TOTALS)).one()
    workers = (await connection.execute(sql.WORKER_TOTALS)).all()
    blocks = (await connection.execute(sql.ABOUT_BLOCKS)).scalar_one()
    is_about = max(blocks, totals.live_replicas) > MAX_COUNTED
    if is_about:
        share = (await connection.execute(
            sql.SAMPLE_LIVE, {"percent": min(100.0, 100.0 * SAMPLED / max(1, totals.live_replicas))})).scalar_one()
        live = round(totals.live_replicas * (1.0 if share is None else share))
    else:
        blocks = (await connection.execute(sql.COUNT_ALL)).scalar_one()
        live = (await connection.execute(sql.COUNT_LIVE)).scalar_one()
    return StatsReply(
        blocks=max(blocks, live), live_blocks=live, live_replicas=totals.live_replicas,
        live_bytes=int(totals.live_bytes), requests=totals.requests, prompt_tokens=totals.prompt_tokens,
        hit_tokens=totals.hit_tokens, feed_pending=feed_pending, is_about=is_about,
        workers=[WorkerStats(worker=row.worker, role=row.role, state=row.state, blocks=row.blocks,
                             nbytes=int(row.nbytes)) for row in workers])


async def evictions(connection: AsyncConnection, query: EvictionsQuery, *, now_s: float) -> EvictionsReply:
    """Ended copies; the sums are of all of them in the window, unless one block is asked for."""
    which = {"since": moment(now_s - query.window_s), "worker": query.worker, "tenant": query.tenant,
             "why": query.why, "limit": _at_most(query.limit, MAX_LISTED)}
    if query.key_hex:
        key = await find_block(connection, query.key_hex)
        rows = (await connection.execute(sql.KEY_EVICTIONS, {**which, "key": key})).all()
        groups: Sequence[Any] = ()
    else:
        rows = (await connection.execute(sql.EVICTIONS, which)).all()
        groups = (await connection.execute(sql.EVICTION_GROUPS, {**which, "limit": MAX_LISTED})).all()
    return EvictionsReply(
        evictions=[EvictionRow(
            at_s=row.evicted_at.timestamp(), key=BlockKey(row.key), depth=row.depth, tenant=row.tenant,
            worker=row.worker, incarnation=row.incarnation, tier=row.tier, why=row.why, nbytes=row.nbytes,
            held_s=None if row.stored_at is None else max(0.0, (row.evicted_at - row.stored_at).total_seconds()),
            origin=row.origin, request=row.request) for row in rows],
        groups=[EvictionGroup(worker=row.worker, tier=row.tier, why=row.why, blocks=row.blocks,
                              nbytes=int(row.nbytes), held_s=row.held_s) for row in groups])


async def reuse(connection: AsyncConnection, query: ReuseQuery, *, now_s: float) -> ReuseReply:
    """Prompt tokens and how many of them were not computed."""
    rows = (await connection.execute(
        sql.REUSE[query.by], {"since": moment(now_s - query.window_s), "limit": MAX_LISTED})).all()
    return ReuseReply(rows=[ReuseRow(**row._mapping) for row in rows])


async def requests(connection: AsyncConnection, query: RequestsQuery, *, now_s: float) -> RequestsReply:
    """The latest requests that fit."""
    rows = (await connection.execute(sql.REQUESTS, {
        "since": moment(now_s - query.window_s), "tenant": query.tenant, "model": query.model,
        "outcome": query.outcome, "worker": query.worker, "limit": _at_most(query.limit, MAX_LISTED)})).all()
    return RequestsReply(requests=[_request(row) for row in rows])


async def request(connection: AsyncConnection, request_id: str) -> RequestReply:
    """The one request whose id, or whose answer's, starts with ``request_id``, or that its client calls exactly so; the
    latter where there is one of either, the former where clients call several so. Raises :class:`RequestNotFound`."""
    given = request_id.strip()
    start = given
    for kind in _ANSWER_IDS:
        start = start.removeprefix(kind)
    if not start or "\x00" in start:
        raise RequestNotFound(f"{request_id!r} is no request id; moonbus kv requests lists the latest")
    rows = (await connection.execute(sql.REQUEST, {"low": start, "high": start + "\U0010ffff"})).all()
    exact = [row for row in rows if row.request == start]
    if not exact:
        called = (await connection.execute(sql.CLIENTS_REQUEST, {"client_id": given, "limit": _CALLED_ALIKE})).all()
        if len(called) > 1 and len(rows) != 1:
            listed = ", ".join(row.request for row in called[:_CALLED_ALIKE - 1])
            raise RequestNotFound(f"{given} is what clients call several requests; the latest are {listed}")
        exact = list(called) if len(called) == 1 else []
    if not rows and not exact:
        raise RequestNotFound(f"no request's id starts with {start}, and no client's is {given}; "
                              "moonbus kv requests lists the latest")
    if len(rows) > 1 and not exact:
        raise RequestNotFound(f"{start} is the start of several ids, {rows[0].request} and {rows[1].request} among "
                              "them; give more of it")
    return RequestReply(request=_request((exact or rows)[0]))


async def storage(connection: AsyncConnection, query: StorageQuery, *, now_s: float) -> StorageReply:
    """What workers held over time."""
    step_s = max(1.0, query.window_s / _at_most(query.steps, MAX_STEPS, least=1))
    rows = (await connection.execute(sql.STORAGE, {
        "since": moment(now_s - query.window_s), "step_s": step_s, "worker": query.worker, "limit": 100_000})).all()
    return StorageReply(step_s=step_s, rows=[StorageRow(
        at_s=row.at.timestamp(), worker=row.worker, tier=row.tier, blocks=row.blocks, nbytes=row.nbytes)
        for row in rows])


async def _gathered(connection: AsyncConnection, rows: Sequence[Any]) -> list[PrefixRow]:
    holders: dict[bytes, list[str]] = defaultdict(list)
    for copy in (await connection.execute(sql.USABLE, {"keys": [row.key for row in rows]})).all():
        holders[copy.key].append(copy.worker + (f" ({copy.tier})" if copy.tier != "dram" else ""))
    return gather([_block(row, []) for row in rows], {key: sorted(workers) for key, workers in holders.items()})


async def _with_copies(connection: AsyncConnection, rows: Sequence[Any], *, ended: bool) -> list[BlockRow]:
    """``ended``: past copies too."""
    keys = [row.key for row in rows]
    copies = list((await connection.execute(sql.COPIES, {"keys": keys})).all())
    if ended:
        copies += (await connection.execute(sql.ENDED_COPIES, {
            "keys": keys, "heads": [key[:_HEAD] for key in keys], "limit": MAX_ENDED})).all()
        copies.sort(key=lambda copy: (copy.stored_at, copy.worker, copy.incarnation, copy.tier))
    of: dict[bytes, list[ReplicaRow]] = defaultdict(list)
    for copy in copies:
        of[copy.key].append(ReplicaRow(
            worker=copy.worker, incarnation=copy.incarnation, tier=copy.tier, stored_at_s=copy.stored_at.timestamp(),
            origin=copy.origin, source=copy.source, evicted_at_s=_seconds(copy.evicted_at), why=copy.why))
    return [_block(row, of[row.key]) for row in rows]


def _block(row: Any, replicas: list[ReplicaRow]) -> BlockRow:
    return BlockRow(key=BlockKey(row.key), parent=BlockKey(row.parent), depth=row.depth, model=row.model,
                    tenant=row.tenant, tokens=row.tokens, nbytes=row.nbytes, created_by=row.created_by,
                    created_at_s=row.created_at.timestamp(), request=row.request, hits=row.hits,
                    last_used_at_s=_seconds(row.last_used_at), replicas=replicas)


def _request(row: Any) -> RequestRow:
    return RequestRow(
        request=row.request, gateway=row.gateway, model=row.model, tenant=row.tenant,
        received_at_s=row.received_at.timestamp(), outcome=row.outcome, code=row.code, finish=row.finish,
        prompt_tokens=row.prompt_tokens, completion_tokens=row.completion_tokens,
        predicted_hit_tokens=row.predicted_hit_tokens, hit_tokens=row.hit_tokens,
        predicted_ttft_s=row.predicted_ttft_s, ttft_s=row.ttft_s, tbt_s=row.tbt_s, duration_s=row.duration_s,
        attempts=row.attempts, conductor=row.conductor, prefill=row.prefill, decode=row.decode, trace=row.trace,
        last_key=row.last_key, client_id=row.client_id or "", stages=_part(row.stages, Stages),
        decisions=_part(getattr(row, "decisions", None), list[Decision]) or [])


def _part(value: Any, kind: type[T]) -> T | None:
    """A part of a row that is JSON, however the driver gives it."""
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=kind) if isinstance(value, str | bytes) else msgspec.convert(value, kind)
    except msgspec.MsgspecError as error:
        raise UserError(f"the catalog has what this version cannot read: {error}") from error


def _seconds(at: datetime | None) -> float | None:
    return at.timestamp() if at is not None else None


def _at_most(asked: int, limit: int, *, least: int = 0) -> int:
    return max(least, min(asked, limit))
