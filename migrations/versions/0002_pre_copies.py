"""Live copies apart from ended ones, histories by time: life, kv_copy, kv_late, kv_evicted, kv_use, request_done,
reuse_due, storage_sample; view kv_usable.

Adds only: the version before goes on writing its own tables until 0003 takes over what is in them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLES = ("life", "kv_copy", "kv_late", "kv_evicted", "kv_use", "request_done", "reuse_due", "storage_sample")


def upgrade() -> None:
    identifier = sa.Text(collation="C")
    moment = postgresql.TIMESTAMP(timezone=True)

    op.create_table(
        "life",
        sa.Column("life", sa.Integer(), sa.Identity(always=True), nullable=False),
        sa.Column("worker", identifier, nullable=False),
        sa.Column("incarnation", identifier, nullable=False),
        sa.Column("seen", postgresql.INT8MULTIRANGE(), nullable=False, server_default="{}"),
        sa.PrimaryKeyConstraint("life", name="life_pkey"),
        sa.UniqueConstraint("worker", "incarnation", name="life_worker_key"),
        postgresql_with={"fillfactor": 50},
    )
    op.create_table(
        "kv_copy",
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("life", sa.Integer(), nullable=False),
        sa.Column("tier", identifier, nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("stored_seq", sa.BigInteger(), nullable=False),
        sa.Column("stored_at", moment, nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", "life", "tier", name="kv_copy_pkey"),
        postgresql_with={"autovacuum_vacuum_scale_factor": 0.1, "autovacuum_analyze_scale_factor": 0.2},
    )
    op.create_index("kv_copy_life", "kv_copy", ["life"])
    op.create_table(
        "kv_late",
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("life", sa.Integer(), nullable=False),
        sa.Column("tier", identifier, nullable=False),
        sa.Column("evicted_seq", sa.BigInteger(), nullable=False),
        sa.Column("evicted_at", moment, nullable=False),
        sa.PrimaryKeyConstraint("life", "key", "tier", name="kv_late_pkey"),
    )
    _partitioned(
        "kv_evicted", "evicted_at",
        sa.Column("evicted_at", moment, nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("life", sa.Integer(), nullable=False),
        sa.Column("tier", identifier, nullable=False),
        sa.Column("evicted_seq", sa.BigInteger(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("nbytes", sa.BigInteger()),
        sa.Column("stored_at", moment),
        sa.Column("origin", sa.Text(), nullable=False, server_default=""),
        sa.Column("source", sa.Text(), nullable=False, server_default=""),
        sa.Column("request", sa.Text(), nullable=False, server_default=""),
    )
    op.create_index("kv_evicted_key", "kv_evicted", [sa.text("substring(key, 1, 8)")])
    op.create_index("kv_evicted_at", "kv_evicted", ["evicted_at"])
    op.create_table(
        "kv_use",
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("heat", sa.SmallInteger(), nullable=False),
        sa.Column("last_used_at", moment, nullable=False),
        sa.PrimaryKeyConstraint("key", name="kv_use_pkey"),
        postgresql_with={"fillfactor": 70, "autovacuum_vacuum_scale_factor": 0.1},
    )
    op.create_index("kv_use_heat", "kv_use", ["heat"])
    _partitioned(
        "request_done", "received_at",
        sa.Column("request", identifier, nullable=False),
        sa.Column("gateway", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("spec", identifier, nullable=False),
        sa.Column("tenant", identifier, nullable=False),
        sa.Column("received_at", moment, nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("finish", sa.Text(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("predicted_hit_tokens", sa.Integer(), nullable=False),
        sa.Column("hit_tokens", sa.Integer(), nullable=False),
        sa.Column("predicted_ttft_s", sa.Double(), nullable=False),
        sa.Column("ttft_s", sa.Double()),
        sa.Column("tbt_s", sa.Double()),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("conductor", sa.Text(), nullable=False),
        sa.Column("prefill", sa.Text(), nullable=False),
        sa.Column("decode", sa.Text(), nullable=False),
        sa.Column("trace", sa.Text(), nullable=False),
        sa.Column("stages", postgresql.JSONB()),
        sa.Column("last_key", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("request", "received_at", name="request_done_pkey"),
    )
    op.create_index("request_done_received_at", "request_done", ["received_at"])
    op.create_table(
        "reuse_due",
        sa.Column("request", identifier, nullable=False),
        sa.Column("last_key", sa.LargeBinary(), nullable=False),
        sa.Column("hit_tokens", sa.Integer(), nullable=False),
        sa.Column("used_at", moment, nullable=False),
        sa.Column("recorded_at", moment, nullable=False, server_default=sa.text("now()")),
        sa.Column("try_at", moment, nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("request", name="reuse_due_pkey"),
        postgresql_with={"autovacuum_vacuum_scale_factor": 0.0, "autovacuum_vacuum_threshold": 5000},
    )
    op.create_index("reuse_due_try_at", "reuse_due", ["try_at"])
    _partitioned(
        "storage_sample", "at",
        sa.Column("at", moment, nullable=False),
        sa.Column("worker", identifier, nullable=False),
        sa.Column("tier", identifier, nullable=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("at", "worker", "tier", name="storage_sample_pkey"),
    )
    # The copies that can be used now: those of lives that are not over. A life never heard of counts as going on,
    # since its hello may be older than the feed reaches back.
    op.execute("""
        CREATE VIEW kv_usable AS
        SELECT c.*, l.worker, l.incarnation FROM kv_copy c JOIN life l ON l.life = c.life
        LEFT JOIN worker w ON w.worker = l.worker AND w.incarnation = l.incarnation
        WHERE w.left_at IS NULL
    """)


def _partitioned(table: str, by: str, *columns: sa.schema.SchemaItem) -> None:
    """With the partition that takes what no other does; the store-manager makes the others."""
    op.create_table(table, *columns, postgresql_partition_by=f"RANGE ({by})")
    op.execute(f"CREATE TABLE {table}_rest PARTITION OF {table} DEFAULT")


def downgrade() -> None:
    op.execute("DROP VIEW kv_usable")
    for table in reversed(TABLES):
        op.drop_table(table)
