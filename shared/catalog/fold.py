"""A batch of the durable feed, folded into rows: at most one per primary key, sorted by it.

Pure. Every table's rows are elements of a lattice: two rows of one key merge into one (the higher sequence
number, the earlier making), and the order of merging does not matter. Here they merge within a batch, the upserts
in :mod:`shared.catalog.sql` merge the batch with what Postgres has. So events may come twice, in any order, and
through several store-managers at once, and the catalog still ends up the same.

One row a key because ``ON CONFLICT DO UPDATE`` may touch a row only once; sorted because two writers that lock
rows in the same order cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from shared.messages import Bye, Evicted, Hello, RequestDone, Stored

FeedEvent = Stored | Evicted | Hello | Bye | RequestDone
"""What the catalog's stream carries."""

Row = tuple[Any, ...]
Life = tuple[str, str]
"""(worker, incarnation)"""

NEVER = 0
"""Sequence numbers start at 1."""


@dataclass(slots=True)
class _Replica:
    stored_seq: int = NEVER
    stored_at: datetime | None = None
    origin: str = ""
    source: str = ""
    request: str = ""
    evicted_seq: int = NEVER
    evicted_at: datetime | None = None
    why: str = ""

    def row(self, key: tuple[bytes, str, str, str]) -> Row:
        live = self.stored_seq > self.evicted_seq
        return (*key, self.origin, self.source, self.request, self.stored_seq, self.stored_at, self.evicted_seq,
                None if live else self.evicted_at, "" if live else self.why)


@dataclass
class Folded:
    """The rows of one batch, by table; :func:`fold` makes it."""

    #: {digest: row of cache_spec}
    specs: dict[str, Row] = field(default_factory=dict)
    #: {life: row of worker}
    workers: dict[Life, Row] = field(default_factory=dict)
    #: {key: row of kv_block}
    blocks: dict[bytes, Row] = field(default_factory=dict)
    #: {(key, worker, incarnation, tier): copy}
    replicas: dict[tuple[bytes, str, str, str], _Replica] = field(default_factory=dict)
    #: {request id: row of request}
    requests: dict[str, Row] = field(default_factory=dict)
    #: {life: sequence numbers}
    seen: dict[Life, set[int]] = field(default_factory=dict)

    def spec_rows(self) -> list[Row]:
        """Rows of ``cache_spec``."""
        return [row for _, row in sorted(self.specs.items())]

    def worker_rows(self) -> list[Row]:
        """Rows of ``worker``."""
        return [row for _, row in sorted(self.workers.items())]

    def block_rows(self) -> list[Row]:
        """Rows of ``kv_block``."""
        return [row for _, row in sorted(self.blocks.items())]

    def replica_rows(self) -> list[Row]:
        """Rows of ``kv_replica``."""
        return [self.replicas[key].row(key) for key in sorted(self.replicas)]

    def request_rows(self) -> list[Row]:
        """Rows of ``request``."""
        return [row for _, row in sorted(self.requests.items())]

    def seen_rows(self) -> list[Row]:
        """Rows of ``feed_seen``; the numbers as Postgres writes a multirange."""
        return [(*life, multirange(seqs)) for life, seqs in sorted(self.seen.items())]


def fold(events: Iterable[FeedEvent], *, now_s: float) -> Folded:
    """Rows of ``events``; ``now_s`` (Unix seconds) stands in where an event carries no time.

    Raises ``ValueError`` or ``OverflowError`` for a time that is none.
    """
    folded = Folded()
    for event in events:
        match event:
            case Stored():
                _stored(folded, event)
            case Evicted():
                _evicted(folded, event)
            case Hello():
                _hello(folded, event)
            case Bye():
                _bye(folded, event, now_s)
            case RequestDone():
                folded.requests.setdefault(event.request, _request(event))
    return folded


def moment(at_s: float) -> datetime:
    """Unix seconds as Postgres keeps them."""
    return datetime.fromtimestamp(at_s, UTC)


def multirange(seqs: Iterable[int]) -> str:
    """``{1, 2, 3, 7}`` → ``"{[1,4),[7,8)}"``."""
    parts: list[str] = []
    start = stop = None
    for seq in sorted(seqs):
        if seq == stop:
            stop += 1
            continue
        if start is not None:
            parts.append(f"[{start},{stop})")
        start, stop = seq, seq + 1
    if start is not None:
        parts.append(f"[{start},{stop})")
    return "{" + ",".join(parts) + "}"


def columns(rows: Sequence[Row]) -> list[list[Any]]:
    """Rows (at least one) turned into columns, the form that ``unnest`` takes."""
    return [list(column) for column in zip(*rows, strict=True)]


def _stored(folded: Folded, event: Stored) -> None:
    worker, incarnation, seq, at = str(event.worker), str(event.incarnation), event.seq, moment(event.at_s)
    folded.seen.setdefault((worker, incarnation), set()).add(seq)
    for block in event.blocks:
        key = bytes(block.key)
        computed = block.origin == "computed"
        row = (key, bytes(block.parent), block.depth, event.spec, block.tenant, block.tokens, block.nbytes,
               computed, worker, incarnation, at, block.request)
        known = folded.blocks.get(key)
        if known is None or _made(row) < _made(known):
            folded.blocks[key] = row
        replica = folded.replicas.setdefault((key, worker, incarnation, block.tier.value), _Replica())
        if seq > replica.stored_seq:
            replica.stored_seq, replica.stored_at = seq, at
            replica.origin, replica.source, replica.request = block.origin, block.source, block.request


def _made(row: Row) -> Row:
    """What orders the claims to have made a block: computed before received, then time, then who.

    The statement ``UPSERT_BLOCKS`` compares the same columns in the same order.
    """
    return (not row[7], row[10], row[8], row[9], row[11])


def _evicted(folded: Folded, event: Evicted) -> None:
    life, at = (str(event.worker), str(event.incarnation)), moment(event.at_s)
    folded.seen.setdefault(life, set()).add(event.seq)
    for start in range(0, len(event.keys), 32):
        replica = folded.replicas.setdefault((event.keys[start:start + 32], *life, event.tier.value), _Replica())
        if event.seq > replica.evicted_seq:
            replica.evicted_seq, replica.evicted_at, replica.why = event.seq, at, event.reason


def _hello(folded: Folded, event: Hello) -> None:
    spec = event.spec
    folded.specs[spec.digest] = (
        spec.digest, spec.model, spec.weights_digest, spec.tokenizer_digest, spec.dtype, spec.layers, spec.kv_heads,
        spec.head_dim, spec.block_tokens, spec.max_context, spec.layout_version, spec.adapter_digest)
    life = (str(event.worker), str(event.incarnation))
    known = folded.workers.get(life)
    end: Row = known[9:] if known is not None else (None, "alive", "")
    folded.workers[life] = (*life, event.role, spec.digest, str(event.endpoint.host), event.device, event.pid,
                            event.capacity_blocks, moment(event.started_at_s), *end)


def _bye(folded: Folded, event: Bye, now_s: float) -> None:
    life = (str(event.worker), str(event.incarnation))
    known = folded.workers.get(life, (*life, "", "", "", "", 0, 0, None, None, "alive", ""))
    if known[10] != "left":
        folded.workers[life] = (*known[:9], moment(event.at_s or now_s), "left", event.reason or "said bye")


def _request(done: RequestDone) -> Row:
    stages = msgspec.json.encode(done.stages).decode() if done.stages is not None else None
    return (
        done.request, done.gateway, done.model, done.spec, done.tenant, moment(done.received_at_s), done.outcome,
        done.code, done.finish, done.prompt_tokens, done.completion_tokens, done.predicted_hit_tokens,
        done.hit_tokens, done.predicted_ttft_s, done.ttft_s, done.tbt_s, done.duration_s, done.attempts,
        done.conductor, done.prefill, done.decode, done.trace, stages, bytes(done.last_key),
        not (done.hit_tokens and done.last_key))
