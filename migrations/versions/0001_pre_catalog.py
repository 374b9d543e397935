"""The catalog's first tables: cache_spec, worker, kv_block, kv_replica, request, feed_seen; view kv_live."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    identifier = sa.Text(collation="C")
    moment = postgresql.TIMESTAMP(timezone=True)

    op.create_table(
        "cache_spec",
        sa.Column("digest", identifier, nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("weights_digest", sa.Text(), nullable=False),
        sa.Column("tokenizer_digest", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("layers", sa.Integer(), nullable=False),
        sa.Column("kv_heads", sa.Integer(), nullable=False),
        sa.Column("head_dim", sa.Integer(), nullable=False),
        sa.Column("block_tokens", sa.Integer(), nullable=False),
        sa.Column("max_context", sa.Integer(), nullable=False),
        sa.Column("layout_version", sa.Integer(), nullable=False),
        sa.Column("adapter_digest", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="cache_spec_pkey"),
    )
    op.create_table(
        "worker",
        sa.Column("worker", identifier, nullable=False),
        sa.Column("incarnation", identifier, nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("spec", identifier, nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("capacity_blocks", sa.BigInteger(), nullable=False),
        sa.Column("started_at", moment),
        sa.Column("left_at", moment),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False, server_default=""),
        sa.PrimaryKeyConstraint("worker", "incarnation", name="worker_pkey"),
    )
    op.create_table(
        "kv_block",
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("parent", sa.LargeBinary(), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("spec", identifier, nullable=False),
        sa.Column("tenant", identifier, nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("computed", sa.Boolean(), nullable=False),
        sa.Column("created_by", identifier, nullable=False),
        sa.Column("incarnation", identifier, nullable=False),
        sa.Column("created_at", moment, nullable=False),
        sa.Column("request", identifier, nullable=False),
        sa.Column("hits", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("last_used_at", moment),
        sa.PrimaryKeyConstraint("key", name="kv_block_pkey"),
    )
    op.create_index("kv_block_parent", "kv_block", ["parent"])
    op.create_index("kv_block_created_at", "kv_block", [sa.text("created_at DESC")])
    op.create_index("kv_block_hits", "kv_block", [sa.text("hits DESC")], postgresql_where=sa.text("hits > 0"))
    op.create_table(
        "kv_replica",
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("worker", identifier, nullable=False),
        sa.Column("incarnation", identifier, nullable=False),
        sa.Column("tier", identifier, nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("stored_seq", sa.BigInteger(), nullable=False),
        sa.Column("stored_at", moment),
        sa.Column("evicted_seq", sa.BigInteger(), nullable=False),
        sa.Column("evicted_at", moment),
        sa.Column("why", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", "worker", "incarnation", "tier", name="kv_replica_pkey"),
    )
    op.create_index("kv_replica_live", "kv_replica", ["worker", "incarnation"],
                    postgresql_where=sa.text("evicted_at IS NULL"))
    op.create_table(
        "request",
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
        sa.Column("recorded_at", moment, nullable=False, server_default=sa.text("now()")),
        sa.Column("reuse_counted", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("request", name="request_pkey"),
    )
    op.create_index("request_received_at", "request", [sa.text("received_at DESC")])
    op.create_index("request_uncounted", "request", ["recorded_at"], postgresql_where=sa.text("NOT reuse_counted"))
    op.create_table(
        "feed_seen",
        sa.Column("worker", identifier, nullable=False),
        sa.Column("incarnation", identifier, nullable=False),
        sa.Column("seen", postgresql.INT8MULTIRANGE(), nullable=False),
        sa.PrimaryKeyConstraint("worker", "incarnation", name="feed_seen_pkey"),
    )
    # The copies that can be used now: neither evicted nor held by a life that is over. A life never heard of
    # counts as going on, since its hello may be older than the feed reaches back.
    op.execute("""
        CREATE VIEW kv_live AS
        SELECT r.* FROM kv_replica r
        LEFT JOIN worker w ON w.worker = r.worker AND w.incarnation = r.incarnation
        WHERE r.evicted_at IS NULL AND w.left_at IS NULL
    """)


def downgrade() -> None:
    op.execute("DROP VIEW kv_live")
    for table in ("feed_seen", "request", "kv_replica", "kv_block", "worker", "cache_spec"):
        op.drop_table(table)
