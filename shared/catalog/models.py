"""The tables. ``migrations/`` creates them; a test holds the two equal.

Two decisions run through all of them:

* **No foreign keys.** Rows come from a feed in which a block may arrive before its parent, a copy before its
  block, an eviction before the storing it ends, and a request before any of them; some may never come. A
  constraint would turn late news into lost news.
* **Identifiers compare as bytes** (collation ``C``), so that Postgres and Python order them alike: which of two
  events wins must not depend on where they are compared.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Boolean, Double, Index, Integer, LargeBinary, MetaData, Text, desc, text
from sqlalchemy.dialects.postgresql import INT8MULTIRANGE, JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Id = Text(collation="C")
"""Identifiers: compared byte by byte."""
Moment = TIMESTAMP(timezone=True)
"""Microseconds, UTC."""
NAMING = {
    "ix": "%(table_name)s_%(column_0_name)s",
    "uq": "%(table_name)s_%(column_0_name)s_key",
    "pk": "%(table_name)s_pkey",
}


class Base(DeclarativeBase):
    """Root of the tables; its metadata is what migrations are compared with."""

    metadata = MetaData(naming_convention=NAMING)


class CacheSpecTable(Base):
    """One cache spec that a worker registered: whoever has the same digest may share KV."""

    __tablename__ = "cache_spec"

    digest: Mapped[str] = mapped_column(Id, primary_key=True)
    model: Mapped[str] = mapped_column(Text)
    weights_digest: Mapped[str] = mapped_column(Text)
    tokenizer_digest: Mapped[str] = mapped_column(Text)
    dtype: Mapped[str] = mapped_column(Text)
    layers: Mapped[int] = mapped_column(Integer)
    kv_heads: Mapped[int] = mapped_column(Integer)
    head_dim: Mapped[int] = mapped_column(Integer)
    block_tokens: Mapped[int] = mapped_column(Integer)
    max_context: Mapped[int] = mapped_column(Integer)
    layout_version: Mapped[int] = mapped_column(Integer)
    adapter_digest: Mapped[str] = mapped_column(Text)


class WorkerTable(Base):
    """One life of a worker.

    ``state`` is ``alive``, ``dead`` (silent: the same life may be heard again) or ``left`` (said bye or was
    replaced by a new incarnation: over for good). ``left_at`` is null exactly while ``alive``. A copy counts as
    live only while its worker's life has no ``left_at``, so a death is one row, not one per block.
    """

    __tablename__ = "worker"

    worker: Mapped[str] = mapped_column(Id, primary_key=True)
    incarnation: Mapped[str] = mapped_column(Id, primary_key=True)
    role: Mapped[str] = mapped_column(Text)
    spec: Mapped[str] = mapped_column(Id)
    host: Mapped[str] = mapped_column(Text)
    device: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(Integer)
    capacity_blocks: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[datetime | None] = mapped_column(Moment)
    """Null while only its bye is known."""
    left_at: Mapped[datetime | None] = mapped_column(Moment)
    state: Mapped[str] = mapped_column(Text)
    why: Mapped[str] = mapped_column(Text, server_default="")


class KvBlockTable(Base):
    """One block that was ever stored, with its place in the prefix tree and who made it first.

    ``created_*`` and ``request`` tell of the earliest storing that computed it; only when no computing was
    announced, of the earliest that received it.
    """

    __tablename__ = "kv_block"

    key: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    parent: Mapped[bytes] = mapped_column(LargeBinary)
    depth: Mapped[int] = mapped_column(Integer)
    spec: Mapped[str] = mapped_column(Id)
    tenant: Mapped[str] = mapped_column(Id)
    tokens: Mapped[int] = mapped_column(Integer)
    nbytes: Mapped[int] = mapped_column(BigInteger)
    computed: Mapped[bool] = mapped_column(Boolean)
    created_by: Mapped[str] = mapped_column(Id)
    incarnation: Mapped[str] = mapped_column(Id)
    created_at: Mapped[datetime] = mapped_column(Moment)
    request: Mapped[str] = mapped_column(Id)
    hits: Mapped[int] = mapped_column(BigInteger, server_default="0")
    last_used_at: Mapped[datetime | None] = mapped_column(Moment)

    __table_args__ = (
        Index("kv_block_parent", "parent"),
        Index("kv_block_created_at", desc("created_at")),
        Index("kv_block_hits", desc("hits"), postgresql_where=text("hits > 0")),
    )


class KvReplicaTable(Base):
    """One copy of a block: in a tier of one life of a worker.

    The row remembers the highest sequence number that stored it and the highest that evicted it (0: none), and it
    is evicted (``evicted_at`` set) unless the storing is the later one. Both only grow, so any order and any
    number of deliveries end in the same row. ``stored_at`` is null when only an eviction has come so far.
    """

    __tablename__ = "kv_replica"

    key: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    worker: Mapped[str] = mapped_column(Id, primary_key=True)
    incarnation: Mapped[str] = mapped_column(Id, primary_key=True)
    tier: Mapped[str] = mapped_column(Id, primary_key=True)
    origin: Mapped[str] = mapped_column(Text)
    source: Mapped[str] = mapped_column(Text)
    request: Mapped[str] = mapped_column(Text)
    stored_seq: Mapped[int] = mapped_column(BigInteger)
    stored_at: Mapped[datetime | None] = mapped_column(Moment)
    evicted_seq: Mapped[int] = mapped_column(BigInteger)
    evicted_at: Mapped[datetime | None] = mapped_column(Moment)
    why: Mapped[str] = mapped_column(Text)

    __table_args__ = (
        Index("kv_replica_live", "worker", "incarnation", postgresql_where=text("evicted_at IS NULL")),
    )


class RequestTable(Base):
    """How one request ended. Times are Unix moments, durations seconds."""

    __tablename__ = "request"

    request: Mapped[str] = mapped_column(Id, primary_key=True)
    gateway: Mapped[str] = mapped_column(Text)
    model: Mapped[str] = mapped_column(Text)
    spec: Mapped[str] = mapped_column(Id)
    tenant: Mapped[str] = mapped_column(Id)
    received_at: Mapped[datetime] = mapped_column(Moment)
    outcome: Mapped[str] = mapped_column(Text)
    code: Mapped[str] = mapped_column(Text)
    finish: Mapped[str] = mapped_column(Text)
    prompt_tokens: Mapped[int] = mapped_column(Integer)
    completion_tokens: Mapped[int] = mapped_column(Integer)
    predicted_hit_tokens: Mapped[int] = mapped_column(Integer)
    hit_tokens: Mapped[int] = mapped_column(Integer)
    predicted_ttft_s: Mapped[float] = mapped_column(Double)
    ttft_s: Mapped[float | None] = mapped_column(Double)
    tbt_s: Mapped[float | None] = mapped_column(Double)
    duration_s: Mapped[float] = mapped_column(Double)
    attempts: Mapped[int] = mapped_column(Integer)
    conductor: Mapped[str] = mapped_column(Text)
    prefill: Mapped[str] = mapped_column(Text)
    decode: Mapped[str] = mapped_column(Text)
    trace: Mapped[str] = mapped_column(Text)
    stages: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    last_key: Mapped[bytes] = mapped_column(LargeBinary)
    recorded_at: Mapped[datetime] = mapped_column(Moment, server_default=text("now()"))
    reuse_counted: Mapped[bool] = mapped_column(Boolean)
    """Its reused blocks have got their hit; false until their whole chain is in the catalog."""

    __table_args__ = (
        Index("request_received_at", desc("received_at")),
        Index("request_uncounted", "recorded_at", postgresql_where=text("NOT reuse_counted")),
    )


class FeedSeenTable(Base):
    """Which sequence numbers of a worker's life the catalog has applied; a hole in ``seen`` is news we lack."""

    __tablename__ = "feed_seen"

    worker: Mapped[str] = mapped_column(Id, primary_key=True)
    incarnation: Mapped[str] = mapped_column(Id, primary_key=True)
    seen: Mapped[Any] = mapped_column(INT8MULTIRANGE)
