"""Statements that keep the catalog within its bounds. Each does a bounded piece of work and locks rows by key."""

from __future__ import annotations

from sqlalchemy import text

LOCK = 0x6D6F6F6F
"""Advisory lock of whoever does upkeep: one at a time is enough."""

TRY_LOCK = text(f"SELECT pg_try_advisory_xact_lock({LOCK})")

PATIENCE = text("SET LOCAL lock_timeout = '2s'")
"""Making and dropping partitions needs a moment without readers; better in the next round than everybody waiting
behind us."""

PARTITIONS = text("""
    SELECT relname, pg_total_relation_size(oid) AS nbytes,
        extract(epoch FROM CAST(bounds[1] AS timestamptz))::float8 AS start_s,
        extract(epoch FROM CAST(bounds[2] AS timestamptz))::float8 AS stop_s
    FROM (SELECT c.oid, c.relname,
              regexp_match(pg_get_expr(c.relpartbound, c.oid), $$FROM \\('([^']+)'\\) TO \\('([^']+)'\\)$$) AS bounds
          FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
          WHERE i.inhparent = CAST(CAST(:table AS text) AS regclass)) AS found
    WHERE bounds IS NOT NULL ORDER BY start_s
""")
"""Partitions of ``:table`` but the one for the rest."""

REST_BYTES = text("SELECT pg_total_relation_size(CAST(CAST(:table AS text) || '_rest' AS regclass))")
"""What lies in no partition of ``:table``, with its indexes."""

# Names and times in these are ours: identifiers cannot be binds.
DROP = "DROP TABLE IF EXISTS {name}"
FORGET_HOURS = "DELETE FROM request_hour WHERE hour >= to_timestamp({start}) AND hour < to_timestamp({stop})"
"""The sums over requests that a dropped partition had."""
FORGET_STRAY_HOURS = text("DELETE FROM request_hour WHERE hour < :oldest OR hour > :newest")
"""Those of rows that :data:`TRIM_REST` took."""
MAKE = (
    "LOCK TABLE {table}_rest IN ACCESS EXCLUSIVE MODE",
    "CREATE TABLE IF NOT EXISTS {name} (LIKE {table} INCLUDING ALL)",
    """WITH moved AS (
        DELETE FROM {table}_rest WHERE {column} >= to_timestamp({start}) AND {column} < to_timestamp({stop}) RETURNING *
    ) INSERT INTO {name} SELECT * FROM moved""",
    "ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{start_text}') TO ('{stop_text}')",
)
"""A new partition takes along what lies in the rest because it was made late."""

TRIM_REST = """
    WITH gone AS (
        DELETE FROM {table}_rest WHERE ctid = ANY(ARRAY(
            SELECT ctid FROM {table}_rest WHERE {column} < :oldest OR {column} > :newest LIMIT :most)) RETURNING 1
    ) SELECT count(*) FROM gone"""
"""Of rows whose time is no partition's, those too old or in a far future."""

SWEEP = text("""
    WITH looked AS MATERIALIZED (
        SELECT key, created_at FROM kv_block
        WHERE created_at >= :after AND (created_at, key) > (:after, :after_key) AND created_at < :before
        ORDER BY created_at, key LIMIT :most
    ), doomed AS MATERIALIZED (
        SELECT s.key FROM looked s LEFT JOIN kv_use u ON u.key = s.key
        WHERE (u.last_used_at IS NULL OR u.last_used_at < :before)
            AND NOT EXISTS (SELECT FROM kv_copy c WHERE c.key = s.key)
    ), locked AS MATERIALIZED (
        SELECT b.key FROM kv_block b JOIN doomed d ON d.key = b.key ORDER BY b.key FOR UPDATE OF b
    ), unused AS (
        DELETE FROM kv_use u USING locked l WHERE u.key = l.key
    ), gone AS (
        DELETE FROM kv_block b USING locked l WHERE b.key = l.key RETURNING 1
    )
    SELECT (SELECT count(*) FROM looked) AS looked, (SELECT count(*) FROM gone) AS gone, last.created_at, last.key
    FROM (SELECT 1) AS one LEFT JOIN LATERAL
        (SELECT created_at, key FROM looked ORDER BY created_at DESC, key DESC LIMIT 1) AS last ON true
""")
"""Forgets blocks that nobody holds and nobody used since ``:before``; goes on behind (``:after``, ``:after_key``)."""

END_LIFE = text("""
    WITH over AS MATERIALIZED (
        SELECT l.life, w.left_at, w.why FROM worker w JOIN life l
            ON l.worker = w.worker AND l.incarnation = w.incarnation
        WHERE (w.state = 'left' OR (w.state = 'dead' AND w.left_at < :dead_before))
            AND EXISTS (SELECT FROM kv_copy c WHERE c.life = l.life)
        ORDER BY w.left_at LIMIT 1
    ), held AS MATERIALIZED (
        SELECT l.life FROM life l JOIN over USING (life) FOR UPDATE OF l
    ), gone AS (
        DELETE FROM kv_copy WHERE ctid = ANY(ARRAY(
            SELECT c.ctid FROM kv_copy c JOIN held USING (life) LIMIT :most)) RETURNING *
    ), told AS (
        INSERT INTO kv_evicted
            (evicted_at, key, life, tier, evicted_seq, why, nbytes, stored_at, origin, source, request)
        SELECT coalesce(o.left_at, now()), g.key, g.life, g.tier, 0, o.why, g.nbytes, g.stored_at, g.origin, g.source,
            g.request
        FROM gone g JOIN over o USING (life) RETURNING 1
    )
    SELECT count(*) FROM told
""")
"""Copies of one life that is over become ended ones."""

FORGET_LIVES = text("""
    WITH old AS MATERIALIZED (
        SELECT w.worker, w.incarnation FROM worker w LEFT JOIN life l
            ON l.worker = w.worker AND l.incarnation = w.incarnation
        WHERE w.left_at < :before AND NOT EXISTS (SELECT FROM kv_copy c WHERE c.life = l.life) LIMIT :most
    ), numbers AS (
        DELETE FROM life l USING old o WHERE l.worker = o.worker AND l.incarnation = o.incarnation RETURNING l.life
    ), held AS (
        DELETE FROM kv_held h USING numbers n WHERE h.life = n.life
    ), gone AS (
        DELETE FROM worker w USING old o WHERE w.worker = o.worker AND w.incarnation = o.incarnation RETURNING 1
    )
    SELECT count(*) FROM gone
""")
"""Lives that ended before anything the catalog still tells of."""

LAST_SAMPLE = text("SELECT at FROM storage_sample ORDER BY at DESC LIMIT 1")

SAMPLE = text("""
    INSERT INTO storage_sample (at, worker, tier, blocks, nbytes)
    SELECT :at, u.worker, h.tier, sum(h.blocks), sum(h.nbytes)
    FROM kv_held h JOIN life u USING (life)
    LEFT JOIN worker w ON w.worker = u.worker AND w.incarnation = u.incarnation
    WHERE h.blocks > 0 AND w.left_at IS NULL GROUP BY u.worker, h.tier
    ON CONFLICT DO NOTHING
""")
"""What each worker holds now."""
