"""Statements that bring news into the catalog, named and described. ``:name`` is a bind.

Rows of the large tables come by ``COPY`` into temporary tables and are merged from there; few of them, and those of
the other tables, come as columns for ``unnest``. A merge leaves out what brings nothing new before it touches a row:
even an update that changes nothing locks the row, and a lock is a write.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Dialect, TextClause, text
from sqlalchemy.dialects import registry

from shared.catalog.models import Base, CacheSpecTable, RequestDoneTable, WorkerTable
from shared.store.digest import BUCKET_BITS

REUSE_WAIT_S = 600.0
"""How long a request waits for the blocks of its chain before its reuse is given up."""
REUSE_AT_A_TIME = 1_000
"""Requests whose chains are walked in one transaction."""

_DIALECT: Dialect = registry.load("postgresql.asyncpg")()

@dataclass(frozen=True)
class Landing:
    """Rows on their way into a table: in a temporary one, or as columns."""

    name: str
    columns: dict[str, str]
    """{column: type}"""

    def table(self) -> str:
        """Makes the temporary table unless this connection has it; it is empty when a transaction begins."""
        columns = ", ".join(f"{name} {kind}" for name, kind in self.columns.items())
        return f"CREATE TEMPORARY TABLE IF NOT EXISTS {self.name} ({columns}) ON COMMIT DELETE ROWS"

    def arrays(self, alias: str) -> str:
        """The same rows from one array bind a column."""
        binds = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in self.columns.items())
        return f"unnest({binds}) AS {alias} ({', '.join(self.columns)})"


@dataclass(frozen=True)
class Merge:
    """One statement in two forms: ``copied`` reads the landing's table, ``direct`` its arrays.

    A temporary table costs some milliseconds to fill and to empty, whatever the number of rows; arrays cost more a row.
    """

    landing: Landing
    copied: TextClause
    direct: TextClause


BUCKET = f"((get_byte(c.key, 0) << 8 | get_byte(c.key, 1)) >> {16 - BUCKET_BITS})"
"""The bucket of ``shared.store.digest`` that a copy is in."""

DIRECT_ROWS = 512
"""Up to so many rows travel as arrays."""

IN_BLOCK = Landing("in_block", {
    "key": "bytea", "parent": "bytea", "depth": "int", "spec": "text", "tenant": "text", "tokens": "int",
    "nbytes": "bigint", "computed": "boolean", "created_by": "text", "incarnation": "text",
    "created_at": "timestamptz", "request": "text"})
IN_COPY = Landing("in_copy", {
    "key": "bytea", "life": "int", "tier": "text", "nbytes": "bigint", "stored_seq": "bigint",
    "stored_at": "timestamptz", "origin": "text", "source": "text", "request": "text"})
IN_EVICTED = Landing("in_evicted", {
    "evicted_at": "timestamptz", "key": "bytea", "life": "int", "tier": "text", "evicted_seq": "bigint", "why": "text",
    "nbytes": "bigint", "stored_at": "timestamptz", "origin": "text", "source": "text", "request": "text"})
IN_HELD = Landing("in_held", {"key": "bytea", "tier": "text", "n": "int"})


def _merge(landing: Landing, template: str) -> Merge:
    """``{i}`` in the template stands for the rows, called ``i``."""
    return Merge(landing, text(template.format(i=f"{landing.name} AS i")),
                 text(template.format(i=landing.arrays("i"))))


BY_INDEX = text("SELECT set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true)")
"""A batch is joined by the large tables' indexes, a row at a time. Of temporary tables the planner knows nothing, and
now and then it would rather read all of a large one."""


@dataclass(frozen=True)
class Upsert:
    """One statement that merges rows given as columns, one array bind for each of ``names``."""

    names: tuple[str, ...]
    statement: TextClause


def _upsert(table: type[Base], names: str, conflict: str, *, then: str = "") -> Upsert:
    """``then`` may use what was inserted as ``fresh``."""
    kinds = {column.name: column.type.compile(dialect=_DIALECT).partition(" COLLATE")[0]
             for column in table.__table__.columns}
    listed = tuple(names.split())
    arrays = ", ".join(f"CAST(:{name} AS {'TEXT' if kinds[name] == 'JSONB' else kinds[name]}[])" for name in listed)
    values = ", ".join(f"CAST({name} AS {kinds[name]})" if kinds[name] == "JSONB" else name for name in listed)
    insert = (f"INSERT INTO {table.__tablename__} AS old ({', '.join(listed)}) "
              f"SELECT {values} FROM unnest({arrays}) AS new ({', '.join(listed)}) {conflict}")
    return Upsert(listed, text(f"WITH fresh AS ({insert} RETURNING *) {then}" if then else insert))


ADD_LIVES = text("""
    INSERT INTO life (worker, incarnation) SELECT * FROM unnest(CAST(:workers AS text[]), CAST(:incarnations AS text[]))
    ON CONFLICT DO NOTHING
""")

LOCK_LIVES = text("""
    SELECT worker, incarnation, life, seen, EXISTS (SELECT FROM kv_late k WHERE k.life = life.life) AS has_late
    FROM life WHERE (worker, incarnation) IN (
        SELECT * FROM unnest(CAST(:workers AS text[]), CAST(:incarnations AS text[])))
    ORDER BY worker, incarnation FOR UPDATE
""")
"""From here on nobody else changes the copies of these lives until we commit."""

SEE = text("""
    UPDATE life SET seen = CAST(new.seen AS int8multirange)
    FROM unnest(CAST(:workers AS text[]), CAST(:incarnations AS text[]), CAST(:seen AS text[]))
        AS new (worker, incarnation, seen)
    WHERE life.worker = new.worker AND life.incarnation = new.incarnation
""")

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

MERGE_BLOCKS = _merge(IN_BLOCK, """
    INSERT INTO kv_block AS old (key, parent, depth, spec, tenant, tokens, nbytes, computed, created_by, incarnation,
        created_at, request)
    SELECT i.* FROM {i} LEFT JOIN kv_block b ON b.key = i.key
    WHERE b.key IS NULL OR (NOT i.computed, i.created_at, i.created_by, i.incarnation, i.request)
        < (NOT b.computed, b.created_at, b.created_by, b.incarnation, b.request)
    ON CONFLICT (key) DO UPDATE SET
        computed = excluded.computed, created_by = excluded.created_by, incarnation = excluded.incarnation,
        created_at = excluded.created_at, request = excluded.request
    WHERE (NOT excluded.computed, excluded.created_at, excluded.created_by, excluded.incarnation, excluded.request)
        < (NOT old.computed, old.created_at, old.created_by, old.incarnation, old.request)
""")

END_COPIES = _merge(IN_EVICTED, """
    WITH ended AS MATERIALIZED (
        SELECT i.evicted_at, i.key, i.life, i.tier, i.evicted_seq, i.why, coalesce(i.nbytes, c.nbytes) AS nbytes,
            coalesce(i.stored_at, c.stored_at) AS stored_at, coalesce(nullif(i.origin, ''), c.origin, '') AS origin,
            coalesce(nullif(i.source, ''), c.source, '') AS source,
            coalesce(nullif(i.request, ''), c.request, '') AS request, c.ctid AS place
        FROM {i} LEFT JOIN kv_copy c
            ON c.key = i.key AND c.life = i.life AND c.tier = i.tier AND c.stored_seq < i.evicted_seq
    ), gone AS (
        DELETE FROM kv_copy WHERE ctid = ANY(ARRAY(SELECT place FROM ended WHERE place IS NOT NULL))
    )
    INSERT INTO kv_evicted (evicted_at, key, life, tier, evicted_seq, why, nbytes, stored_at, origin, source, request)
    SELECT evicted_at, key, life, tier, evicted_seq, why, nbytes, stored_at, origin, source, request FROM ended
""")
"""Evictions take their copy along, unless it was stored after them, and tell its story. Rows are deleted by their
place: nobody else touches them, since we hold the locks of their lives."""

MERGE_COPIES = _merge(IN_COPY, """
    INSERT INTO kv_copy AS old (key, life, tier, nbytes, stored_seq, stored_at, origin, source, request)
    SELECT i.* FROM {i}
    ON CONFLICT (key, life, tier) DO UPDATE SET
        nbytes = excluded.nbytes, stored_seq = excluded.stored_seq, stored_at = excluded.stored_at,
        origin = excluded.origin, source = excluded.source, request = excluded.request
    WHERE excluded.stored_seq > old.stored_seq
""")

ADD_LATE = text("""
    INSERT INTO kv_late AS old (key, life, tier, evicted_seq, evicted_at)
    SELECT * FROM unnest(CAST(:keys AS bytea[]), CAST(:lives AS int[]), CAST(:tiers AS text[]),
        CAST(:evicted_seqs AS bigint[]), CAST(:evicted_ats AS timestamptz[]))
    ON CONFLICT (life, key, tier) DO UPDATE SET evicted_seq = excluded.evicted_seq, evicted_at = excluded.evicted_at
    WHERE excluded.evicted_seq > old.evicted_seq
""")

END_LATE = text("""
    WITH gone AS (
        DELETE FROM kv_copy c USING kv_late l
        WHERE l.life = ANY(CAST(:lives AS int[])) AND c.life = l.life AND c.key = l.key AND c.tier = l.tier
            AND c.stored_seq < l.evicted_seq
        RETURNING c.*, l.evicted_seq, l.evicted_at
    )
    UPDATE kv_evicted e SET nbytes = g.nbytes, stored_at = g.stored_at, origin = g.origin, source = g.source,
        request = g.request
    FROM gone g
    WHERE substring(e.key, 1, 8) = substring(g.key, 1, 8) AND e.key = g.key AND e.evicted_at = g.evicted_at
        AND e.life = g.life AND e.tier = g.tier AND e.evicted_seq = g.evicted_seq AND e.stored_at IS NULL
""")
"""Storings whose end was written before them: no copies, but their story is told."""

FORGET_LATE = text("""
    DELETE FROM kv_late l USING unnest(CAST(:lives AS int[]), CAST(:missing AS bigint[])) AS w (life, missing)
    WHERE l.life = w.life AND l.evicted_seq < w.missing
""")
"""Evictions that no storing can be late for any more."""

INSERT_REQUESTS = _upsert(
    RequestDoneTable,
    "request gateway model spec tenant received_at outcome code finish prompt_tokens completion_tokens "
    "predicted_hit_tokens hit_tokens predicted_ttft_s ttft_s tbt_s duration_s attempts conductor prefill decode trace "
    "stages last_key decisions client_id",
    "ON CONFLICT DO NOTHING",
    then="""
    INSERT INTO reuse_due (request, last_key, hit_tokens, used_at)
    SELECT request, last_key, hit_tokens, received_at + duration_s * interval '1 second' FROM fresh
    WHERE hit_tokens > 0 AND last_key <> '' ON CONFLICT DO NOTHING""")

COUNT_REUSE = text("""
    WITH RECURSIVE due AS (
        SELECT request, last_key, hit_tokens, used_at, recorded_at FROM reuse_due
        WHERE try_at <= now() ORDER BY try_at LIMIT :most FOR UPDATE SKIP LOCKED
    ), chain AS (
        SELECT w.request, w.hit_tokens, w.used_at, b.key, b.parent, b.depth, b.spec
        FROM due w JOIN kv_block b ON b.key = w.last_key
        UNION ALL
        SELECT c.request, c.hit_tokens, c.used_at, b.key, b.parent, b.depth, b.spec
        FROM chain c JOIN kv_block b ON b.key = c.parent AND b.depth = c.depth - 1
    ), whole AS (
        SELECT c.request FROM chain c JOIN cache_spec s ON s.digest = c.spec WHERE c.depth = 0
    ), used AS (
        SELECT c.key, count(*) AS times, max(c.used_at) AS used_at
        FROM chain c JOIN whole USING (request) JOIN cache_spec s ON s.digest = c.spec
        WHERE (c.depth + 1::bigint) * s.block_tokens <= c.hit_tokens
        GROUP BY c.key
    ), counted AS (
        INSERT INTO kv_use AS old (key, hits, heat, last_used_at)
        SELECT key, times, floor(log(2, times)), used_at FROM used ORDER BY key
        ON CONFLICT (key) DO UPDATE SET hits = old.hits + excluded.hits,
            heat = floor(log(2, old.hits + excluded.hits)),
            last_used_at = greatest(old.last_used_at, excluded.last_used_at)
    ), over AS (
        DELETE FROM reuse_due r USING due w
        WHERE r.request = w.request
          AND (w.request IN (SELECT request FROM whole) OR w.recorded_at < now() - :wait_s * interval '1 second')
        RETURNING r.request
    ), later AS (
        UPDATE reuse_due r SET try_at = now() + greatest(interval '0', now() - w.recorded_at - interval '1 second') / 2
        FROM due w WHERE r.request = w.request AND r.request NOT IN (SELECT request FROM whole)
          AND w.recorded_at >= now() - :wait_s * interval '1 second'
    )
    SELECT (SELECT count(*) FROM over) < (SELECT count(*) FROM reuse_due)
""")
"""Gives every block that a newly recorded request reused its hit, once the request's whole chain is known.

Those whose chain is not are looked at again after a while, ever less often; returns whether any are left. To be a
transaction of its own: it locks rows in order of their keys, as the merge of a batch does, and both in one would lock
in no order at all.
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
    SELECT i.n, c.key IS NULL AS copy FROM in_held i
    LEFT JOIN kv_copy c ON c.key = i.key AND c.life = :life AND c.tier = i.tier
    LEFT JOIN kv_block b ON b.key = i.key
    WHERE c.key IS NULL OR b.key IS NULL
""")
"""Blocks of an inventory whose row or copy the catalog lacks."""

ENDED_SINCE = text("""
    SELECT DISTINCT h.n FROM in_held h JOIN kv_evicted e
        ON substring(e.key, 1, 8) = substring(h.key, 1, 8) AND e.key = h.key AND e.tier = h.tier
    WHERE h.n = ANY(CAST(:missing AS int[])) AND e.life = :life AND e.evicted_seq > :seq
""")
"""Which of those were evicted after the inventory."""

_LIFE = "(SELECT life FROM life WHERE worker = :worker AND incarnation = :incarnation)"

_CLOSE = """
    WITH gone AS (
        DELETE FROM kv_copy c WHERE c.life = :life AND c.stored_seq <= :seq AND {which}
        RETURNING c.*
    )
    INSERT INTO kv_evicted (evicted_at, key, life, tier, evicted_seq, why, nbytes, stored_at, origin, source, request)
    SELECT CAST(:at AS timestamptz), key, life, tier, :seq, 'reconcile', nbytes, stored_at, origin, source, request
    FROM gone
"""

CLOSE_UNHELD = text(_CLOSE.format(
    which="NOT EXISTS (SELECT FROM in_held h WHERE h.key = c.key AND h.tier = c.tier)"))
"""Ends the copies that a whole inventory as of ``:seq`` does not have."""

CLOSE_STALE = text(_CLOSE.format(
    which="(c.key, c.tier) IN (SELECT * FROM unnest(CAST(:keys AS bytea[]), CAST(:tiers AS text[])))"))
"""Ends the copies named, which an inventory as of ``:seq`` does not have."""

DIGEST = text(f"""
    SELECT c.tier, {BUCKET} AS bucket, count(*) AS copies,
        bit_xor(('x' || encode(substr(sha256(c.key), 1, 8), 'hex'))::bit(64)::bigint) AS mixed
    FROM kv_copy c JOIN kv_block b ON b.key = c.key WHERE c.life = {_LIFE} AND octet_length(c.key) >= 2
    GROUP BY 1, 2
""")
"""The buckets of one life's copies; a copy whose block is not known counts as missing. SHA-256, which every supported
Postgres has built in, so that both sides mix keys alike."""

KNOWN = text(f"""
    SELECT c.key, c.tier FROM kv_copy c JOIN kv_block b ON b.key = c.key
    WHERE c.life = {_LIFE} AND octet_length(c.key) >= 2 AND {BUCKET} = ANY(CAST(:buckets AS int[]))
""")
"""The copies of some buckets of one life."""

SEEN_UP_TO = text("""
    SELECT :seq = 0 OR coalesce(bool_or(seen @> int8range(1, CAST(:seq AS int8) + 1)), false) FROM life
    WHERE worker = :worker AND incarnation = :incarnation
""")
"""Whether all news up to ``:seq`` has been applied."""
