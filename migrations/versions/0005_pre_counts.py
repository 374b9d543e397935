"""Counts that are kept instead of being counted: kv_held, request_hour; and the deepest blocks by an index.

Triggers keep them, whichever version writes: before the code. Copies of one life change under the lock of its row,
so nobody waits for a row of kv_held; of request_hour each batch adds to one row at the end of its transaction. Taking
over what is there holds up the feed, for some ten seconds at ten million blocks.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

UP = (
    "LOCK TABLE kv_block, kv_copy, request_done IN SHARE ROW EXCLUSIVE MODE",  # in the order in which batches do
    """CREATE TABLE kv_held (life integer NOT NULL, tier text COLLATE "C" NOT NULL, blocks bigint NOT NULL,
        nbytes bigint NOT NULL, CONSTRAINT kv_held_pkey PRIMARY KEY (life, tier)) WITH (fillfactor = 50)""",
    """CREATE TABLE request_hour (hour timestamptz NOT NULL, requests bigint NOT NULL, prompt_tokens bigint NOT NULL,
        hit_tokens bigint NOT NULL, CONSTRAINT request_hour_pkey PRIMARY KEY (hour)) WITH (fillfactor = 50)""",
    "INSERT INTO kv_held SELECT life, tier, count(*), sum(nbytes) FROM kv_copy GROUP BY life, tier",
    """INSERT INTO request_hour SELECT date_trunc('hour', received_at, 'UTC'), count(*), sum(prompt_tokens),
        sum(hit_tokens) FROM request_done GROUP BY 1""",
    """CREATE FUNCTION kv_held_follows() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'INSERT' THEN
            INSERT INTO kv_held AS h SELECT life, tier, count(*), sum(nbytes) FROM came GROUP BY life, tier
            ON CONFLICT (life, tier) DO UPDATE SET blocks = h.blocks + excluded.blocks,
                nbytes = h.nbytes + excluded.nbytes;
        ELSIF TG_OP = 'DELETE' THEN
            UPDATE kv_held h SET blocks = h.blocks - g.blocks, nbytes = h.nbytes - g.nbytes
            FROM (SELECT life, tier, count(*) AS blocks, sum(nbytes) AS nbytes FROM went GROUP BY life, tier) AS g
            WHERE h.life = g.life AND h.tier = g.tier;
        ELSE
            UPDATE kv_held h SET nbytes = h.nbytes + g.nbytes
            FROM (SELECT life, tier, sum(nbytes) AS nbytes
                  FROM (SELECT life, tier, nbytes FROM came UNION ALL SELECT life, tier, -nbytes FROM went) AS both_
                  GROUP BY life, tier HAVING sum(nbytes) <> 0) AS g
            WHERE h.life = g.life AND h.tier = g.tier;
        END IF;
        RETURN NULL;
    END $$""",
    """CREATE TRIGGER kv_held_came AFTER INSERT ON kv_copy REFERENCING NEW TABLE AS came
        FOR EACH STATEMENT EXECUTE FUNCTION kv_held_follows()""",
    """CREATE TRIGGER kv_held_went AFTER DELETE ON kv_copy REFERENCING OLD TABLE AS went
        FOR EACH STATEMENT EXECUTE FUNCTION kv_held_follows()""",
    """CREATE TRIGGER kv_held_changed AFTER UPDATE ON kv_copy REFERENCING OLD TABLE AS went NEW TABLE AS came
        FOR EACH STATEMENT EXECUTE FUNCTION kv_held_follows()""",
    """CREATE FUNCTION request_hour_follows() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO request_hour AS h SELECT date_trunc('hour', received_at, 'UTC') AS hour, count(*),
            sum(prompt_tokens), sum(hit_tokens) FROM came GROUP BY 1 ORDER BY 1
        ON CONFLICT (hour) DO UPDATE SET requests = h.requests + excluded.requests,
            prompt_tokens = h.prompt_tokens + excluded.prompt_tokens, hit_tokens = h.hit_tokens + excluded.hit_tokens;
        RETURN NULL;
    END $$""",
    """CREATE TRIGGER request_hour_came AFTER INSERT ON request_done REFERENCING NEW TABLE AS came
        FOR EACH STATEMENT EXECUTE FUNCTION request_hour_follows()""",
    "CREATE INDEX kv_block_depth ON kv_block (depth)",
)

DOWN = (
    "DROP INDEX kv_block_depth",
    "DROP TRIGGER request_hour_came ON request_done",
    "DROP FUNCTION request_hour_follows()",
    "DROP TRIGGER kv_held_came ON kv_copy",
    "DROP TRIGGER kv_held_went ON kv_copy",
    "DROP TRIGGER kv_held_changed ON kv_copy",
    "DROP FUNCTION kv_held_follows()",
    "DROP TABLE request_hour, kv_held",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
