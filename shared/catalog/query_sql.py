"""The questions' statements, named and described. ``:name`` is a bind; an empty text asks for any.

Every one of them finds its rows by an index, whatever is in the tables: ``tests/integration/test_catalog_queries.py``
explains each. Sums over many rows are bounded by the time they reach back, or kept as the rows come; lists look at so
many rows at most.
"""

from __future__ import annotations

from sqlalchemy import text

MAX_LOOKED_AT = 20_000
"""Blocks that one list looks at, the first ones in its order: few of them may be what was asked for. In a larger
catalog what there is of them is not counted either."""
MAX_DESCENDANTS = 100_000
"""Counting stops here: the block of a common system prompt may have millions."""

FIND_KEYS = text("SELECT key FROM kv_block WHERE key >= :low AND key <= :high ORDER BY key LIMIT 2")
"""Keys with a prefix; two are enough to know that it is not unique."""

_BLOCK = """b.key, b.parent, b.depth, coalesce(s.model, '') AS model, b.tenant, b.tokens, b.nbytes, b.created_by,
    b.created_at, b.request, coalesce(u.hits, 0) AS hits, u.last_used_at"""
_STORY = "LEFT JOIN cache_spec s ON s.digest = b.spec LEFT JOIN kv_use u ON u.key = b.key"

LINEAGE = text(f"""
    WITH RECURSIVE chain AS (
        SELECT * FROM kv_block WHERE key = :key
        UNION ALL
        SELECT b.* FROM chain c JOIN kv_block b ON b.key = c.parent AND b.depth = c.depth - 1
    )
    SELECT {_BLOCK} FROM chain b {_STORY} ORDER BY b.depth
""")
"""The chain of ``:key``, root first. Depths fall at each step, so no data can make it run for ever."""

_BELOW = """
    WITH RECURSIVE below AS (
        SELECT key, depth FROM kv_block
        WHERE substring(parent, 1, 8) = substring(CAST(:key AS bytea), 1, 8) AND parent = :key
        UNION ALL
        SELECT b.key, b.depth FROM below p JOIN kv_block b
            ON substring(b.parent, 1, 8) = substring(p.key, 1, 8) AND b.parent = p.key AND b.depth = p.depth + 1
    )"""

COUNT_DESCENDANTS = text(f"{_BELOW} SELECT count(*) FROM (SELECT FROM below LIMIT {MAX_DESCENDANTS}) AS counted")
"""How many blocks continue ``:key``, directly or not; at most ``MAX_DESCENDANTS``."""

DESCENDANTS = text(f"""{_BELOW}, nearest AS (SELECT key FROM below LIMIT :limit)
    SELECT {_BLOCK} FROM nearest JOIN kv_block b USING (key) {_STORY} ORDER BY b.depth""")
"""The blocks that continue ``:key``, nearest first."""

COPIES = text("""
    SELECT c.key, c.worker, c.incarnation, c.tier, c.stored_at, c.origin, c.source, c.left_at AS evicted_at,
        coalesce(c.left_why, '') AS why
    FROM (SELECT c.*, l.worker, l.incarnation, w.left_at, w.why AS left_why FROM kv_copy c JOIN life l USING (life)
          LEFT JOIN worker w ON w.worker = l.worker AND w.incarnation = l.incarnation) AS c
    WHERE c.key = ANY(CAST(:keys AS bytea[]))
    ORDER BY c.stored_at, c.worker, c.incarnation, c.tier
""")
"""Copies of ``:keys`` that were not evicted; the end of a worker's life ends its copies."""

ENDED_COPIES = text("""
    SELECT e.key, l.worker, l.incarnation, e.tier, e.stored_at, e.origin, e.source, e.evicted_at, e.why
    FROM kv_evicted e JOIN life l USING (life)
    WHERE substring(e.key, 1, 8) = ANY(CAST(:heads AS bytea[])) AND e.key = ANY(CAST(:keys AS bytea[]))
        AND e.stored_at IS NOT NULL
    ORDER BY e.stored_at, l.worker, l.incarnation, e.tier LIMIT :limit
""")
"""Copies of ``:keys`` that were; ``:heads`` are the keys' first eight bytes."""

USABLE = text("SELECT key, worker, tier FROM kv_usable WHERE key = ANY(CAST(:keys AS bytea[]))")
"""Where ``:keys`` are now."""

# A subquery with a limit is never turned into a join: blocks are walked in the order asked for, and the walk ends
# with the limit, whatever the planner believes about the tables.
_USABLE = """WITH usable AS MATERIALIZED (
        SELECT l.life FROM life l LEFT JOIN worker w ON w.worker = l.worker AND w.incarnation = l.incarnation
        WHERE w.left_at IS NULL AND (CAST(:worker AS text) = '' OR l.worker = :worker))"""
_LIVE = """(SELECT true FROM kv_copy c WHERE c.key = b.key AND c.life IN (SELECT life FROM usable) LIMIT 1)"""
_EVER = f"""(CAST(:worker AS text) = '' OR {_LIVE} OR (SELECT true FROM kv_evicted e JOIN life l USING (life)
    WHERE substring(e.key, 1, 8) = substring(b.key, 1, 8) AND e.key = b.key AND l.worker = :worker LIMIT 1))"""
_TENANT = "(CAST(:tenant AS text) = '' OR b.tenant = :tenant)"


def _first(table: str, column: str) -> str:
    return f"(SELECT * FROM {table} ORDER BY {column} DESC LIMIT {MAX_LOOKED_AT})"


_FROM = {
    "recent": f"{_first('kv_block', 'created_at')} AS b LEFT JOIN kv_use u ON u.key = b.key",
    "hot": f"{_first('kv_use', 'heat')} AS u JOIN kv_block b ON b.key = u.key",
    "deep": f"{_first('kv_block', 'depth')} AS b LEFT JOIN kv_use u ON u.key = b.key",
}
_ORDERS = {
    "recent": "b.created_at DESC, b.depth DESC, b.key",
    "hot": "u.heat DESC, u.hits DESC, u.last_used_at DESC, b.depth, b.key",
    "deep": "b.depth DESC",  # of one depth there may be a million: not to be sorted
}

BLOCKS = {
    (order, everything): text(f"""{_USABLE}
        SELECT {_BLOCK} FROM {_FROM[order]} LEFT JOIN cache_spec s ON s.digest = b.spec
        WHERE {_TENANT} AND {_EVER if everything else _LIVE} ORDER BY {by} LIMIT :limit""")
    for order, by in _ORDERS.items() for everything in (False, True)
}
"""Blocks by (order, whether also those without a live copy); the hot ones are those reused at all."""

COUNT_BLOCKS = {
    (order, everything): text(
        f"{_USABLE} SELECT count(*) FROM {_FROM[order]} WHERE {_TENANT} AND {_EVER if everything else _LIVE}")
    for order in _ORDERS for everything in (False, True)
}
"""How many blocks :data:`BLOCKS` would list without its limit."""

ABOUT_BLOCKS = text("""
    SELECT (pg_relation_size(oid) / current_setting('block_size')::int
        * CASE WHEN reltuples > 0 AND relpages > 0 THEN reltuples / relpages ELSE 40 END)::bigint
    FROM pg_class WHERE oid = 'kv_block'::regclass
""")
"""About how many blocks there are, from the table's size; costs nothing."""

HOT = text(f"""
    WITH RECURSIVE hot AS MATERIALIZED (
        SELECT b.key, b.parent, b.depth FROM kv_use u JOIN kv_block b ON b.key = u.key
        LEFT JOIN cache_spec s ON s.digest = b.spec
        WHERE {_TENANT} AND (CAST(:model AS text) = '' OR s.model = :model)
        ORDER BY u.heat DESC, u.hits DESC, b.depth, b.key LIMIT :limit
    ), tree AS (
        SELECT key, parent, depth FROM hot
        UNION
        SELECT b.key, b.parent, b.depth FROM tree t JOIN kv_block b ON b.key = t.parent AND b.depth = t.depth - 1
    )
    SELECT {_BLOCK} FROM tree JOIN kv_block b USING (key) {_STORY} ORDER BY b.depth
""")
"""The blocks reused most, with all that they continue."""

_OF_LIFE = "LEFT JOIN worker w ON w.worker = l.worker AND w.incarnation = l.incarnation"

TOTALS = text(f"""
    SELECT held.replicas AS live_replicas, held.nbytes AS live_bytes, asked.requests, asked.prompt_tokens,
        asked.hit_tokens
    FROM (SELECT coalesce(sum(h.blocks), 0)::bigint AS replicas, coalesce(sum(h.nbytes), 0) AS nbytes
          FROM kv_held h JOIN life l USING (life) {_OF_LIFE} WHERE w.left_at IS NULL) AS held,
         (SELECT coalesce(sum(requests), 0)::bigint AS requests,
              coalesce(sum(prompt_tokens), 0)::bigint AS prompt_tokens,
              coalesce(sum(hit_tokens), 0)::bigint AS hit_tokens FROM request_hour) AS asked
""")
"""From sums that are kept."""

COUNT_ALL = text("SELECT count(*) FROM kv_block")
COUNT_LIVE = text("SELECT count(DISTINCT key) FROM kv_usable")
"""Blocks that somebody holds: reads all copies."""

SAMPLE_LIVE = text(f"""
    SELECT avg(1.0 / (SELECT count(*) FROM kv_usable u WHERE u.key = c.key))::float8
    FROM kv_copy c TABLESAMPLE SYSTEM (:percent) JOIN life l USING (life) {_OF_LIFE} WHERE w.left_at IS NULL
""")
"""Blocks for each copy, on average over a sample of the copies; null if none was met."""

WORKER_TOTALS = text("""
    WITH latest AS (
        SELECT DISTINCT ON (worker) * FROM worker ORDER BY worker, started_at DESC NULLS LAST
    )
    SELECT w.worker, w.role, w.state, coalesce(sum(h.blocks), 0)::bigint AS blocks, coalesce(sum(h.nbytes), 0) AS nbytes
    FROM latest w LEFT JOIN life l ON l.worker = w.worker AND l.incarnation = w.incarnation AND w.left_at IS NULL
    LEFT JOIN kv_held h ON h.life = l.life GROUP BY w.worker, w.role, w.state ORDER BY w.worker
""")
"""What the latest life of each worker holds."""

_EVICTED = f"""
    FROM kv_evicted e JOIN life l ON l.life = e.life LEFT JOIN kv_block b ON b.key = e.key
    WHERE e.evicted_at >= :since AND (CAST(:worker AS text) = '' OR l.worker = :worker)
        AND (CAST(:why AS text) = '' OR e.why = :why) AND {_TENANT}"""

EVICTIONS = text(f"""
    SELECT e.evicted_at, e.key, coalesce(b.depth, -1) AS depth, coalesce(b.tenant, '') AS tenant, l.worker,
        l.incarnation, e.tier, e.why, coalesce(e.nbytes, b.nbytes, 0) AS nbytes, e.stored_at, e.origin, e.request
    {_EVICTED} ORDER BY e.evicted_at DESC, e.key LIMIT :limit
""")
"""Ended copies, the latest first."""

KEY_EVICTIONS = text(EVICTIONS.text.replace(
    "WHERE e.evicted_at", "WHERE substring(e.key, 1, 8) = substring(CAST(:key AS bytea), 1, 8) AND e.key = :key "
                          "AND e.evicted_at"))
"""The same of one block."""

EVICTION_GROUPS = text(f"""
    SELECT l.worker, e.tier, e.why, count(*) AS blocks, coalesce(sum(e.nbytes), 0) AS nbytes,
        extract(epoch FROM avg(e.evicted_at - e.stored_at))::float8 AS held_s
    {_EVICTED} GROUP BY l.worker, e.tier, e.why ORDER BY blocks DESC, l.worker, e.tier, e.why LIMIT :limit
""")
"""Who evicted how much and why, since ``:since``."""

_SINCE = "r.received_at >= :since"

_REUSE_BY = {
    "tenant": "r.tenant", "model": "r.model", "day": "to_char(r.received_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')"}

REUSE = {by: text(f"""
    SELECT {name} AS name, count(*) AS requests, sum(r.prompt_tokens) AS prompt_tokens,
        sum(r.hit_tokens) AS hit_tokens, sum(r.predicted_hit_tokens) AS predicted_hit_tokens,
        sum(r.completion_tokens) AS completion_tokens, avg(r.ttft_s) AS ttft_s
    FROM request_done r WHERE {_SINCE} GROUP BY 1
    ORDER BY {"1 DESC" if by == "day" else "sum(r.hit_tokens) DESC, 1"} LIMIT :limit""")
    for by, name in _REUSE_BY.items()}
"""Prompt tokens and how many of them were not computed, since ``:since``."""

_REQUEST = """
    SELECT r.request, r.gateway, r.model, r.tenant, r.received_at, r.outcome, r.code, r.finish, r.prompt_tokens,
        r.completion_tokens, r.predicted_hit_tokens, r.hit_tokens, r.predicted_ttft_s, r.ttft_s, r.tbt_s, r.duration_s,
        r.attempts, r.conductor, r.prefill, r.decode, r.trace, r.stages, r.last_key, r.client_id"""

REQUESTS = text(f"""
    {_REQUEST} FROM request_done r WHERE {_SINCE} AND (CAST(:tenant AS text) = '' OR r.tenant = :tenant)
        AND (CAST(:model AS text) = '' OR r.model = :model)
        AND (CAST(:outcome AS text) = '' OR r.outcome = :outcome OR r.code = :outcome)
        AND (CAST(:worker AS text) = '' OR r.prefill = :worker OR r.decode = :worker)
    ORDER BY r.received_at DESC, r.request LIMIT :limit
""")
"""Requests, the latest first."""

REQUEST = text(f"""
    {_REQUEST}, r.decisions
    FROM request_done r WHERE r.request >= :low AND r.request < :high ORDER BY r.request LIMIT 2
""")
"""Requests with a prefix; two are enough to know that it is not unique."""

CLIENTS_REQUEST = text(f"""
    {_REQUEST}, r.decisions
    FROM request_done r WHERE r.client_id = :client_id ORDER BY r.received_at DESC, r.request LIMIT :limit
""")
"""Requests that their client calls so, the latest first."""

STORAGE = text("""
    SELECT date_bin(make_interval(secs => :step_s), at, '2000-01-01Z') AS at, worker, tier,
        round(avg(blocks))::bigint AS blocks, round(avg(nbytes))::bigint AS nbytes
    FROM storage_sample WHERE at >= :since AND (CAST(:worker AS text) = '' OR worker = :worker)
    GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 LIMIT :limit
""")
"""What workers held, averaged over steps of time."""
