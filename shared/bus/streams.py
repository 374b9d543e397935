"""JetStream streams and consumers as data; :meth:`shared.bus.bus.Bus.ensure` applies them at start.

Only the catalog reads them: live readers use core NATS and ask the owner for what they missed.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.bus.subjects import ALL


@dataclass(frozen=True)
class Stream:
    """A durable log of some subjects, bounded in bytes and age (oldest go first)."""

    name: str
    subjects: tuple[str, ...]
    max_bytes: int
    max_age_s: float


@dataclass(frozen=True)
class Consumer:
    """A durable reader of a stream: explicit acks, redelivery after ``ack_wait_s``."""

    name: str
    stream: str
    ack_wait_s: float
    max_ack_pending: int


@dataclass(frozen=True)
class Bucket:
    """Where records lie (:meth:`shared.bus.bus.Bus.record_read`): each name's latest value, on disk."""

    bucket: str
    max_bytes: int


KV_STREAM = Stream(
    name="KV",
    subjects=tuple(subject.any().text for subject in ALL if subject.stream == "KV"),
    max_bytes=2 * 2**30,
    max_age_s=7 * 86400.0,
)
CATALOG_CONSUMER = Consumer(name="catalog", stream="KV", ack_wait_s=30.0, max_ack_pending=20_000)

RECORDS = Bucket(bucket="moonbus", max_bytes=64 * 2**20)

STREAMS = (KV_STREAM,)
CONSUMERS = (CATALOG_CONSUMER,)
