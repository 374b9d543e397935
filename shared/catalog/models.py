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

from sqlalchemy import (
    BigInteger,
    Boolean,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    UniqueConstraint,
    text,
)
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


class LifeTable(Base):
    """The number of a worker's life, and which of its numbered news are applied; a hole in ``seen`` is news we lack.

    Whoever changes copies of a life holds the lock of its row, so each number is applied once: there is no order or
    repetition of deliveries that shows. What an inventory has told counts as seen.
    """

    __tablename__ = "life"

    life: Mapped[int] = mapped_column(Integer, Identity(always=True), primary_key=True)
    worker: Mapped[str] = mapped_column(Id)
    incarnation: Mapped[str] = mapped_column(Id)
    seen: Mapped[Any] = mapped_column(INT8MULTIRANGE, server_default="{}")

    # Every batch updates it: half a page stays free for the new versions.
    __table_args__ = (UniqueConstraint("worker", "incarnation", name="life_worker_key"),
                      {"postgresql_with": {"fillfactor": 50}})


class KvBlockTable(Base):
    """One block that was ever stored, with its place in the prefix tree and who made it first.

    ``created_*`` and ``request`` tell of the earliest storing that computed it; only when no computing was
    announced, of the earliest that received it. Rows hardly ever change, so that inserting them is all the work.
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

    __table_args__ = (
        # Eight bytes of a hash tell keys apart, and make the index half as large.
        Index("kv_block_parent", text("substring(parent, 1, 8)")),
        # Ascending: Postgres appends to the right end of an index faster than anywhere else.
        Index("kv_block_created_at", "created_at"),
        Index("kv_block_depth", "depth"),
    )


class KvCopyTable(Base):
    """One copy that its worker holds now, in a tier: all and only those, of lives that are over as well.

    ``stored_seq`` numbers the storing that it is from. An eviction deletes the row and leaves one in ``kv_evicted``.
    """

    __tablename__ = "kv_copy"

    key: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    life: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    tier: Mapped[str] = mapped_column(Id, primary_key=True)
    nbytes: Mapped[int] = mapped_column(BigInteger)
    stored_seq: Mapped[int] = mapped_column(BigInteger)
    stored_at: Mapped[datetime] = mapped_column(Moment)
    origin: Mapped[str] = mapped_column(Text)
    source: Mapped[str] = mapped_column(Text)
    request: Mapped[str] = mapped_column(Text)

    # Half of the rows go every few minutes: a tenth of dead ones, not a fifth, is the time to clean up.
    __table_args__ = (Index("kv_copy_life", "life"), {"postgresql_with": {
        "autovacuum_vacuum_scale_factor": 0.1, "autovacuum_analyze_scale_factor": 0.2}})


class KvHeldTable(Base):
    """How many copies a life holds in a tier: sums over ``kv_copy``, kept by triggers of that table.

    Whoever changes copies of a life holds the lock of its row, so nobody waits for another one here.
    """

    __tablename__ = "kv_held"

    life: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    tier: Mapped[str] = mapped_column(Id, primary_key=True)
    blocks: Mapped[int] = mapped_column(BigInteger)
    nbytes: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = {"postgresql_with": {"fillfactor": 50}}


class KvLateTable(Base):
    """An eviction that overtook other news of its life: a storing below ``evicted_seq`` makes no copy any more.

    Gone as soon as nothing below that number is missing; empty on most days.
    """

    __tablename__ = "kv_late"

    life: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    key: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    tier: Mapped[str] = mapped_column(Id, primary_key=True)
    evicted_seq: Mapped[int] = mapped_column(BigInteger)
    evicted_at: Mapped[datetime] = mapped_column(Moment)


class KvEvictedTable(Base):
    """One copy that ended, by the time of its end. Partitioned by it, and only ever added to.

    ``nbytes`` and ``stored_at`` are null when the storing was not known when the eviction was written.
    """

    __tablename__ = "kv_evicted"

    evicted_at: Mapped[datetime] = mapped_column(Moment)
    key: Mapped[bytes] = mapped_column(LargeBinary)
    life: Mapped[int] = mapped_column(Integer)
    tier: Mapped[str] = mapped_column(Id)
    evicted_seq: Mapped[int] = mapped_column(BigInteger)
    why: Mapped[str] = mapped_column(Text)
    nbytes: Mapped[int | None] = mapped_column(BigInteger)
    stored_at: Mapped[datetime | None] = mapped_column(Moment)
    origin: Mapped[str] = mapped_column(Text, server_default="")
    source: Mapped[str] = mapped_column(Text, server_default="")
    request: Mapped[str] = mapped_column(Text, server_default="")

    __mapper_args__ = {"primary_key": [life, key, tier, evicted_seq]}
    __table_args__ = (
        Index("kv_evicted_key", text("substring(key, 1, 8)")),
        Index("kv_evicted_at", "evicted_at"),
        {"postgresql_partition_by": "RANGE (evicted_at)"},
    )


class KvUseTable(Base):
    """How often a block was reused; only blocks that were. ``heat`` is the logarithm of ``hits`` to base 2, rounded
    down.

    Ordered by ``heat`` they are all but ordered by ``hits``, and it hardly ever changes: most updates touch no index.
    """

    __tablename__ = "kv_use"

    key: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    hits: Mapped[int] = mapped_column(BigInteger)
    heat: Mapped[int] = mapped_column(SmallInteger)
    last_used_at: Mapped[datetime] = mapped_column(Moment)

    __table_args__ = (Index("kv_use_heat", "heat"), {"postgresql_with": {
        "fillfactor": 70, "autovacuum_vacuum_scale_factor": 0.1}})


class RequestDoneTable(Base):
    """How one request ended. Times are Unix moments, durations seconds. Partitioned by the time it was received."""

    __tablename__ = "request_done"

    request: Mapped[str] = mapped_column(Id, primary_key=True)
    gateway: Mapped[str] = mapped_column(Text)
    model: Mapped[str] = mapped_column(Text)
    spec: Mapped[str] = mapped_column(Id)
    tenant: Mapped[str] = mapped_column(Id)
    received_at: Mapped[datetime] = mapped_column(Moment, primary_key=True)
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
    decisions: Mapped[list[Any] | None] = mapped_column(JSONB)
    """What conductors answered, with candidates and terms; out of the way of whoever does not ask for it."""
    client_id: Mapped[str | None] = mapped_column(Id)
    """What the client calls it, if it does; not unique."""

    __table_args__ = (
        Index("request_done_received_at", "received_at"),
        Index("request_done_client_id", "client_id", postgresql_where=text("client_id IS NOT NULL")),
        {"postgresql_partition_by": "RANGE (received_at)"},
    )


class RequestHourTable(Base):
    """The requests received in one hour: sums over ``request_done``, kept by a trigger of that table."""

    __tablename__ = "request_hour"

    hour: Mapped[datetime] = mapped_column(Moment, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    hit_tokens: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = {"postgresql_with": {"fillfactor": 50}}


class ReuseDueTable(Base):
    """A request whose reused blocks have not got their hit yet: its chain is not all there."""

    __tablename__ = "reuse_due"

    request: Mapped[str] = mapped_column(Id, primary_key=True)
    last_key: Mapped[bytes] = mapped_column(LargeBinary)
    hit_tokens: Mapped[int] = mapped_column(Integer)
    used_at: Mapped[datetime] = mapped_column(Moment)
    recorded_at: Mapped[datetime] = mapped_column(Moment, server_default=text("now()"))
    try_at: Mapped[datetime] = mapped_column(Moment, server_default=text("now()"))

    # A queue: short, with many dead rows, whatever part of it they are.
    __table_args__ = (Index("reuse_due_try_at", "try_at"), {"postgresql_with": {
        "autovacuum_vacuum_scale_factor": 0.0, "autovacuum_vacuum_threshold": 5000}})


class StorageSampleTable(Base):
    """What a worker held in a tier at one moment. Partitioned by it."""

    __tablename__ = "storage_sample"

    at: Mapped[datetime] = mapped_column(Moment, primary_key=True)
    worker: Mapped[str] = mapped_column(Id, primary_key=True)
    tier: Mapped[str] = mapped_column(Id, primary_key=True)
    blocks: Mapped[int] = mapped_column(BigInteger)
    nbytes: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = {"postgresql_partition_by": "RANGE (at)"}


PARTITIONED = {"kv_evicted": "evicted_at", "request_done": "received_at", "storage_sample": "at"}
"""{table: the column it is partitioned by}; ``<table>_rest`` takes what no other partition does."""
