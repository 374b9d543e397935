"""The catalog's statements, named and described. ``:name`` is a bind; arrays are columns for ``unnest``.

The upserts merge the batch's rows with the stored ones (see :mod:`shared.catalog.fold`); their ``WHERE`` keeps a
delivery that brings nothing new from writing at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Dialect, TextClause, text
from sqlalchemy.dialects import registry

from shared.catalog.models import (
    Base,
    CacheSpecTable,
    FeedSeenTable,
    KvBlockTable,
    KvReplicaTable,
    RequestTable,
    WorkerTable,
)

MAX_DESCENDANTS = 100_000
"""Counting stops here: the block of a common system prompt may have millions."""

REUSE_WAIT_S = 600.0
"""How long a request waits for the blocks of its chain before its reuse is given up."""

_AS_TEXT = ("JSONB", "INT8MULTIRANGE")
"""Types whose values travel as text and are parsed by Postgres."""


_DIALECT: Dialect = registry.load("postgresql.asyncpg")()


@dataclass(frozen=True)
class Upsert:
    """One statement that merges rows given as columns, one array bind for each of ``names``."""

    names: tuple[str, ...]
    statement: TextClause


def _upsert(table: type[Base], names: str, conflict: str) -> Upsert:
    kinds = {column.name: column.type.compile(dialect=_DIALECT).partition(" COLLATE")[0]
             for column in table.__table__.columns}
    listed = tuple(names.split())
    arrays = ", ".join(f"CAST(:{name} AS {'TEXT' if kinds[name] in _AS_TEXT else kinds[name]}[])" for name in listed)
    values = ", ".join(f"CAST({name} AS {kinds[name]})" if kinds[name] in _AS_TEXT else name for name in listed)
    return Upsert(listed, text(
        f"INSERT INTO {table.__tablename__} AS old ({', '.join(listed)}) "
        f"SELECT {values} FROM unnest({arrays}) AS new ({', '.join(listed)}) {conflict}"))


UPSERT_SPECS = _upsert(
    CacheSpecTable,
    "digest model weights_digest tokenizer_digest dtype layers kv_heads head_dim block_tokens max_context "
    "layout_version adapter_digest",
    "ON CONFLICT DO NOTHING")

# A life that has left never comes back, whatever arrives later; a hello fills in what a bye alone did not know.
UPSERT_WORKERS = _upsert(
    WorkerTable,
    "worker incarnation role spec host device pid capacity_blocks started_at left_at state why",
    """
    ON CONFLICT (worker, incarnation) DO UPDATE SET
        role = CASE WHEN old.started_at IS NULL THEN excluded.role ELSE old.role END,
        spec = CASE WHEN old.started_at IS NULL THEN excluded.spec ELSE old.spec END,
        host = CASE WHEN old.started_at IS NULL THEN excluded.host ELSE old.host END,
        device = CASE WHEN old.started_at IS NULL THEN excluded.device ELSE old.device END,
        pid = CASE WHEN old.started_at IS NULL THEN excluded.pid ELSE old.pid END,
        capacity_blocks = CASE WHEN old.started_at IS NULL THEN excluded.capacity_blocks ELSE old.capacity_blocks END,
        started_at = coalesce(old.started_at, excluded.started_at),
        left_at = CASE WHEN old.state <> 'left' AND excluded.state = 'left' THEN excluded.left_at ELSE old.left_at END,
        why = CASE WHEN old.state <> 'left' AND excluded.state = 'left' THEN excluded.why ELSE old.why END,
        state = CASE WHEN excluded.state = 'left' THEN 'left' ELSE old.state END
    WHERE old.started_at IS NULL OR (old.state <> 'left' AND excluded.state = 'left')
    """)

REPLACE_WORKERS = text("""
    UPDATE worker AS old SET
        state = 'left',
        left_at = coalesce(old.left_at, new.started_at),
        why = CASE WHEN old.state = 'dead' THEN old.why ELSE 'replaced by incarnation ' || new.incarnation END
    FROM worker AS new
    WHERE old.worker = ANY(CAST(:workers AS text[])) AND old.state <> 'left'
      AND new.worker = old.worker AND new.started_at = (
        SELECT min(later.started_at) FROM worker AS later
        WHERE later.worker = old.worker AND later.started_at > old.started_at)
""")
"""Ends the earlier lives of ``:workers``."""

UPSERT_BLOCKS = _upsert(
    KvBlockTable,
    "key parent depth spec tenant tokens nbytes computed created_by incarnation created_at request",
    """
    ON CONFLICT (key) DO UPDATE SET
        computed = excluded.computed, created_by = excluded.created_by, incarnation = excluded.incarnation,
        created_at = excluded.created_at, request = excluded.request
    WHERE (NOT excluded.computed, excluded.created_at, excluded.created_by, excluded.incarnation, excluded.request)
        < (NOT old.computed, old.created_at, old.created_by, old.incarnation, old.request)
    """)

UPSERT_REPLICAS = _upsert(
    KvReplicaTable,
    "key worker incarnation tier origin source request stored_seq stored_at evicted_seq evicted_at why",
    """
    ON CONFLICT (key, worker, incarnation, tier) DO UPDATE SET
        origin = CASE WHEN excluded.stored_seq > old.stored_seq THEN excluded.origin ELSE old.origin END,
        source = CASE WHEN excluded.stored_seq > old.stored_seq THEN excluded.source ELSE old.source END,
        request = CASE WHEN excluded.stored_seq > old.stored_seq THEN excluded.request ELSE old.request END,
        stored_at = CASE WHEN excluded.stored_seq > old.stored_seq THEN excluded.stored_at ELSE old.stored_at END,
        evicted_at = CASE
            WHEN greatest(excluded.stored_seq, old.stored_seq) > greatest(excluded.evicted_seq, old.evicted_seq)
                THEN NULL
            WHEN excluded.evicted_seq > old.evicted_seq THEN excluded.evicted_at
            ELSE old.evicted_at END,
        why = CASE
            WHEN greatest(excluded.stored_seq, old.stored_seq) > greatest(excluded.evicted_seq, old.evicted_seq)
                THEN ''
            WHEN excluded.evicted_seq > old.evicted_seq THEN excluded.why
            ELSE old.why END,
        stored_seq = greatest(excluded.stored_seq, old.stored_seq),
        evicted_seq = greatest(excluded.evicted_seq, old.evicted_seq)
    WHERE excluded.stored_seq > old.stored_seq OR excluded.evicted_seq > old.evicted_seq
    """)

INSERT_REQUESTS = _upsert(
    RequestTable,
    "request gateway model spec tenant received_at outcome code finish prompt_tokens completion_tokens "
    "predicted_hit_tokens hit_tokens predicted_ttft_s ttft_s tbt_s duration_s attempts conductor prefill decode trace "
    "stages last_key reuse_counted",
    "ON CONFLICT DO NOTHING")

# A sequence number seen twice changes nothing; what is returned are the lives with a hole.
UPSERT_SEEN = _upsert(
    FeedSeenTable,
    "worker incarnation seen",
    """
    ON CONFLICT (worker, incarnation) DO UPDATE SET seen = old.seen + excluded.seen
    RETURNING worker, incarnation, lower(seen) > 1 OR seen <> multirange(range_merge(seen)) AS gap
    """)

COUNT_REUSE = text("""
    WITH RECURSIVE waiting AS (
        SELECT request, last_key, hit_tokens, received_at + duration_s * interval '1 second' AS used_at, recorded_at
        FROM request WHERE NOT reuse_counted
        ORDER BY recorded_at LIMIT 1000 FOR UPDATE SKIP LOCKED
    ), chain AS (
        SELECT w.request, w.hit_tokens, w.used_at, b.key, b.parent, b.depth, b.spec
        FROM waiting w JOIN kv_block b ON b.key = w.last_key
        UNION ALL
        SELECT c.request, c.hit_tokens, c.used_at, b.key, b.parent, b.depth, b.spec
        FROM chain c JOIN kv_block b ON b.key = c.parent AND b.depth = c.depth - 1
    ), whole AS (
        SELECT c.request FROM chain c JOIN cache_spec s ON s.digest = c.spec WHERE c.depth = 0
    ), used AS (
        SELECT c.key, count(*) AS times, max(c.used_at) AS used_at
        FROM chain c JOIN whole USING (request) JOIN cache_spec s ON s.digest = c.spec
        WHERE (c.depth + 1) * s.block_tokens <= c.hit_tokens
        GROUP BY c.key
    ), locked AS (
        SELECT u.key, u.times, u.used_at FROM used u JOIN kv_block b ON b.key = u.key ORDER BY b.key FOR UPDATE OF b
    ), counted AS (
        UPDATE kv_block b SET hits = b.hits + u.times, last_used_at = greatest(b.last_used_at, u.used_at)
        FROM locked u WHERE b.key = u.key
    )
    UPDATE request r SET reuse_counted = true FROM waiting w
    WHERE r.request = w.request
      AND (w.request IN (SELECT request FROM whole) OR w.recorded_at < now() - :wait_s * interval '1 second')
""")
"""Gives every block that a newly recorded request reused its hit, once the request's whole chain is known.

To be a transaction of its own: it locks blocks in order of their keys, as the upsert does, and both in one
transaction would lock in no order at all.
"""

MARK_DEAD = text("""
    UPDATE worker SET state = 'dead', left_at = :at, why = coalesce(
        (SELECT d.why FROM unnest(CAST(:dead_workers AS text[]), CAST(:dead_incarnations AS text[]),
                                  CAST(:dead_why AS text[])) AS d (worker, incarnation, why)
         WHERE d.worker = worker.worker AND d.incarnation = worker.incarnation), 'not heard of')
    WHERE state = 'alive' AND started_at < :started_before AND (worker, incarnation) NOT IN (
        SELECT * FROM unnest(CAST(:workers AS text[]), CAST(:incarnations AS text[])))
""")
"""Ends the lives that are not among those heard."""

MARK_ALIVE = text("""
    UPDATE worker SET state = 'alive', left_at = NULL, why = ''
    WHERE state = 'dead' AND (worker, incarnation) IN (
        SELECT * FROM unnest(CAST(:workers AS text[]), CAST(:incarnations AS text[])))
""")
"""Takes a death back: the worker was only silent."""

MISSING = text("""
    SELECT i.n, r.key IS NULL OR r.evicted_at IS NOT NULL AS replica
    FROM unnest(CAST(:keys AS bytea[]), CAST(:tiers AS text[])) WITH ORDINALITY AS i (key, tier, n)
    LEFT JOIN kv_replica r ON r.key = i.key AND r.worker = :worker AND r.incarnation = :incarnation AND r.tier = i.tier
    LEFT JOIN kv_block b ON b.key = i.key
    WHERE (r.key IS NULL OR r.evicted_at IS NOT NULL OR b.key IS NULL) AND coalesce(r.evicted_seq, 0) < :seq
""")
"""Blocks of an inventory as of ``:seq`` whose row or live copy the catalog lacks, by position from 1."""

CLOSE_STALE = text("""
    UPDATE kv_replica AS r SET evicted_seq = :seq, evicted_at = :at, why = 'reconcile'
    WHERE r.worker = :worker AND r.incarnation = :incarnation AND r.evicted_at IS NULL AND r.stored_seq <= :seq
      AND NOT EXISTS (
        SELECT FROM unnest(CAST(:keys AS bytea[]), CAST(:tiers AS text[])) AS i (key, tier)
        WHERE i.key = r.key AND i.tier = r.tier)
""")
"""Ends the live copies that an inventory as of ``:seq`` does not have."""

FIND_KEYS = text("SELECT key FROM kv_block WHERE key >= :low AND key <= :high ORDER BY key LIMIT 2")
"""Keys with a prefix; two are enough to know that it is not unique."""

_BLOCK = """b.key, b.parent, b.depth, coalesce(s.model, '') AS model, b.tenant, b.tokens, b.nbytes, b.created_by,
    b.created_at, b.request, b.hits, b.last_used_at"""

LINEAGE = text(f"""
    WITH RECURSIVE chain AS (
        SELECT * FROM kv_block WHERE key = :key
        UNION ALL
        SELECT b.* FROM chain c JOIN kv_block b ON b.key = c.parent AND b.depth = c.depth - 1
    )
    SELECT {_BLOCK} FROM chain b LEFT JOIN cache_spec s ON s.digest = b.spec ORDER BY b.depth
""")
"""The chain of ``:key``, root first. Depths fall at each step, so no data can make it run for ever."""

DESCENDANTS = text(f"""
    WITH RECURSIVE below AS (
        SELECT key, depth FROM kv_block WHERE parent = :key
        UNION ALL
        SELECT b.key, b.depth FROM below p JOIN kv_block b ON b.parent = p.key AND b.depth = p.depth + 1
    )
    SELECT count(*) FROM (SELECT FROM below LIMIT {MAX_DESCENDANTS}) AS counted
""")
"""How many blocks continue ``:key``, directly or not; at most ``MAX_DESCENDANTS``."""

REPLICAS = text("""
    SELECT r.key, r.worker, r.incarnation, r.tier, r.stored_at, r.origin, r.source,
        coalesce(r.evicted_at, w.left_at) AS evicted_at,
        CASE WHEN r.evicted_at IS NULL THEN coalesce(w.why, '') ELSE r.why END AS why
    FROM kv_replica r LEFT JOIN worker w ON w.worker = r.worker AND w.incarnation = r.incarnation
    WHERE r.key = ANY(CAST(:keys AS bytea[])) AND r.stored_at IS NOT NULL
    ORDER BY r.stored_at, r.worker, r.tier
""")
"""Copies of ``:keys``, past ones too; the end of a worker's life ends its copies."""

# A subquery with a limit is never turned into a join: blocks are walked in the order asked for, and the walk ends
# with the limit, whatever the planner believes about the tables.
_LIVE = """(SELECT true FROM kv_live r
    WHERE r.key = b.key AND (CAST(:worker AS text) = '' OR r.worker = :worker) LIMIT 1)"""
_EVER = """(CAST(:worker AS text) = '' OR (SELECT true FROM kv_replica r
    WHERE r.key = b.key AND r.worker = :worker AND r.stored_at IS NOT NULL LIMIT 1))"""
_TENANT = "(CAST(:tenant AS text) = '' OR b.tenant = :tenant)"
_WHICH = {"recent": _TENANT, "hot": f"{_TENANT} AND b.hits > 0", "deep": _TENANT}
_ORDERS = {
    "recent": "b.created_at DESC, b.depth DESC, b.key",
    "hot": "b.hits DESC, b.last_used_at DESC NULLS LAST, b.depth, b.key",
    "deep": "b.depth DESC, b.created_at DESC, b.key",
}

BLOCKS = {
    (order, everything): text(f"""
        SELECT {_BLOCK} FROM kv_block b LEFT JOIN cache_spec s ON s.digest = b.spec
        WHERE {_WHICH[order]} AND {_EVER if everything else _LIVE} ORDER BY {by} LIMIT :limit""")
    for order, by in _ORDERS.items() for everything in (False, True)
}
"""Blocks by (order, whether also those without a live copy); the hot ones are those reused at all."""

COUNT_BLOCKS = {
    **{(order, True): text(f"SELECT count(*) FROM kv_block b WHERE {_WHICH[order]} AND {_EVER}") for order in _ORDERS},
    **{(order, False): text(f"""
        SELECT count(DISTINCT r.key) FROM kv_live r JOIN kv_block b ON b.key = r.key
        WHERE {_WHICH[order]} AND (CAST(:worker AS text) = '' OR r.worker = :worker)""") for order in _ORDERS},
}
"""How many blocks :data:`BLOCKS` would list without its limit."""

TOTALS = text("""
    SELECT (SELECT count(*) FROM kv_block) AS blocks,
        live.blocks AS live_blocks, live.replicas AS live_replicas, live.nbytes AS live_bytes,
        asked.requests, asked.prompt_tokens, asked.hit_tokens
    FROM (SELECT count(DISTINCT r.key) AS blocks, count(*) AS replicas, coalesce(sum(b.nbytes), 0) AS nbytes
          FROM kv_live r LEFT JOIN kv_block b ON b.key = r.key) AS live,
         (SELECT count(*) AS requests, coalesce(sum(prompt_tokens), 0) AS prompt_tokens,
                 coalesce(sum(hit_tokens), 0) AS hit_tokens FROM request) AS asked
""")

WORKER_TOTALS = text("""
    WITH held AS MATERIALIZED (
        SELECT r.worker, r.incarnation, count(*) AS blocks, coalesce(sum(b.nbytes), 0) AS nbytes
        FROM kv_live r LEFT JOIN kv_block b ON b.key = r.key GROUP BY r.worker, r.incarnation
    ), latest AS (
        SELECT DISTINCT ON (worker) * FROM worker ORDER BY worker, started_at DESC NULLS LAST
    )
    SELECT w.worker, w.role, w.state, coalesce(h.blocks, 0) AS blocks, coalesce(h.nbytes, 0) AS nbytes
    FROM latest w LEFT JOIN held h ON h.worker = w.worker AND h.incarnation = w.incarnation ORDER BY w.worker
""")
"""What the latest life of each worker holds."""
