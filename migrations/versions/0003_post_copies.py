"""Takes over what the version before wrote into kv_replica, feed_seen, request and kv_block's counters; drops those.

To run once no store-manager of the version before is left. What the new version already knows of a life is newer
and stays as it is: only lives that it has not met bring their copies along.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

UP = (
    "DROP VIEW kv_live",
    """CREATE TEMPORARY TABLE moved ON COMMIT DROP AS
        WITH made AS (
            INSERT INTO life (worker, incarnation, seen)
            SELECT worker, incarnation, coalesce(f.seen, '{}') FROM feed_seen f
            FULL JOIN (SELECT DISTINCT worker, incarnation FROM kv_replica) r USING (worker, incarnation)
            ON CONFLICT DO NOTHING RETURNING life, worker, incarnation, seen)
        SELECT life, worker, incarnation,
            CASE WHEN lower(seen) = 1
                 THEN (SELECT min(upper(part)) - 1 FROM unnest(seen) AS part WHERE lower(part) = 1) ELSE 0 END AS whole
        FROM made""",
    """INSERT INTO kv_copy (key, life, tier, nbytes, stored_seq, stored_at, origin, source, request)
        SELECT r.key, m.life, r.tier, coalesce(b.nbytes, 0), r.stored_seq, r.stored_at, r.origin, r.source, r.request
        FROM kv_replica r JOIN moved m USING (worker, incarnation) LEFT JOIN kv_block b ON b.key = r.key
        WHERE r.evicted_at IS NULL ORDER BY r.key""",
    """INSERT INTO kv_evicted
            (evicted_at, key, life, tier, evicted_seq, why, nbytes, stored_at, origin, source, request)
        SELECT r.evicted_at, r.key, m.life, r.tier, r.evicted_seq, r.why, b.nbytes, r.stored_at, r.origin, r.source,
            r.request
        FROM kv_replica r JOIN moved m USING (worker, incarnation) LEFT JOIN kv_block b ON b.key = r.key
        WHERE r.evicted_at IS NOT NULL""",
    """INSERT INTO kv_late (key, life, tier, evicted_seq, evicted_at)
        SELECT r.key, m.life, r.tier, r.evicted_seq, r.evicted_at
        FROM kv_replica r JOIN moved m USING (worker, incarnation)
        WHERE r.evicted_at IS NOT NULL AND r.evicted_seq > m.whole""",
    """INSERT INTO kv_use AS u (key, hits, heat, last_used_at)
        SELECT key, hits, floor(log(2, hits))::smallint, coalesce(last_used_at, created_at)
        FROM kv_block WHERE hits > 0
        ON CONFLICT (key) DO UPDATE SET hits = u.hits + excluded.hits,
            heat = floor(log(2, u.hits + excluded.hits))::smallint,
            last_used_at = greatest(u.last_used_at, excluded.last_used_at)""",
    """INSERT INTO reuse_due (request, last_key, hit_tokens, used_at, recorded_at)
        SELECT request, last_key, hit_tokens, received_at + duration_s * interval '1 second', recorded_at
        FROM request r WHERE NOT reuse_counted AND hit_tokens > 0 AND last_key <> ''
            AND NOT EXISTS (SELECT FROM request_done d WHERE d.request = r.request)
        ON CONFLICT DO NOTHING""",
    """INSERT INTO request_done (request, gateway, model, spec, tenant, received_at, outcome, code, finish,
            prompt_tokens, completion_tokens, predicted_hit_tokens, hit_tokens, predicted_ttft_s, ttft_s, tbt_s,
            duration_s, attempts, conductor, prefill, decode, trace, stages, last_key)
        SELECT request, gateway, model, spec, tenant, received_at, outcome, code, finish,
            prompt_tokens, completion_tokens, predicted_hit_tokens, hit_tokens, predicted_ttft_s, ttft_s, tbt_s,
            duration_s, attempts, conductor, prefill, decode, trace, stages, last_key FROM request
        ON CONFLICT DO NOTHING""",
    "DROP TABLE kv_replica, feed_seen, request",
    "ALTER TABLE kv_block DROP COLUMN hits, DROP COLUMN last_used_at",
    "DROP INDEX kv_block_parent, kv_block_created_at",
    "CREATE INDEX kv_block_parent ON kv_block (substring(parent, 1, 8))",
    "CREATE INDEX kv_block_created_at ON kv_block (created_at)",
    "ALTER TABLE kv_block SET (autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_analyze_scale_factor = 0.2)",
)

# What the version before would write comes again from the owners of the blocks; ended copies and requests stay
# behind in tables that it does not read.
DOWN = (
    "ALTER TABLE kv_block RESET (autovacuum_vacuum_insert_scale_factor, autovacuum_analyze_scale_factor)",
    "DROP INDEX kv_block_parent, kv_block_created_at",
    "CREATE INDEX kv_block_parent ON kv_block (parent)",
    "CREATE INDEX kv_block_created_at ON kv_block (created_at DESC)",
    "ALTER TABLE kv_block ADD COLUMN hits bigint NOT NULL DEFAULT 0, ADD COLUMN last_used_at timestamptz",
    "CREATE INDEX kv_block_hits ON kv_block (hits DESC) WHERE hits > 0",
    "UPDATE kv_block b SET hits = u.hits, last_used_at = u.last_used_at FROM kv_use u WHERE u.key = b.key",
    """CREATE TABLE kv_replica (
        key bytea NOT NULL, worker text COLLATE "C" NOT NULL, incarnation text COLLATE "C" NOT NULL,
        tier text COLLATE "C" NOT NULL, origin text NOT NULL, source text NOT NULL, request text NOT NULL,
        stored_seq bigint NOT NULL, stored_at timestamptz, evicted_seq bigint NOT NULL, evicted_at timestamptz,
        why text NOT NULL, CONSTRAINT kv_replica_pkey PRIMARY KEY (key, worker, incarnation, tier))""",
    "CREATE INDEX kv_replica_live ON kv_replica (worker, incarnation) WHERE evicted_at IS NULL",
    """INSERT INTO kv_replica
        SELECT c.key, l.worker, l.incarnation, c.tier, c.origin, c.source, c.request, c.stored_seq, c.stored_at, 0,
            NULL, '' FROM kv_copy c JOIN life l USING (life)""",
    """CREATE TABLE request (LIKE request_done,
        recorded_at timestamptz NOT NULL DEFAULT now(), reuse_counted boolean NOT NULL,
        CONSTRAINT request_pkey PRIMARY KEY (request))""",
    "CREATE INDEX request_received_at ON request (received_at DESC)",
    "CREATE INDEX request_uncounted ON request (recorded_at) WHERE NOT reuse_counted",
    "INSERT INTO request SELECT DISTINCT ON (request) r.*, now(), true FROM request_done r ORDER BY request",
    """CREATE TABLE feed_seen (worker text COLLATE "C" NOT NULL, incarnation text COLLATE "C" NOT NULL,
        seen int8multirange NOT NULL, CONSTRAINT feed_seen_pkey PRIMARY KEY (worker, incarnation))""",
    "INSERT INTO feed_seen SELECT worker, incarnation, seen FROM life",
    "TRUNCATE life, kv_copy, kv_late, kv_evicted, kv_use, request_done, reuse_due, storage_sample",
    """CREATE VIEW kv_live AS
        SELECT r.* FROM kv_replica r
        LEFT JOIN worker w ON w.worker = r.worker AND w.incarnation = r.incarnation
        WHERE r.evicted_at IS NULL AND w.left_at IS NULL""",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
