"""A batch of the durable feed, folded into rows: at most one a primary key, sorted by it.

Pure. What makes the catalog come out the same for any order, repetition and number of store-managers:

* **News of copies** (stored, evicted) is numbered by its worker and applied once: numbers that the life has
  ``seen`` are left out. Within a batch it goes by number; across batches the higher number wins, and
  :class:`Folded` says which evictions overtook news that is still missing (``late``).
* **Claims to have made a block, lives of workers, ends of requests** are elements of a lattice: two rows of one key
  merge into one, whatever their order. They merge here within a batch and in :mod:`shared.catalog.ingest_sql` with
  what Postgres has, so it does no harm that they are folded again when they come again.

One row a key because ``ON CONFLICT DO UPDATE`` may touch a row only once; sorted because two writers that lock rows
in the same order cannot deadlock, and because neighbours in an index are found faster one after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
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
Spans = tuple[tuple[int, int], ...]
"""Sequence numbers as half-open ranges, ascending, apart from each other."""

_KEY = 32
"""Bytes of a block key."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the catalog knew of a life when the batch came."""

    number: int
    """The life's number in the catalog."""
    spans: Spans
    has_late: bool = False
    """Some evictions of it wait in ``kv_late``."""

    def __contains__(self, seq: int) -> bool:
        before = bisect_right(self.spans, seq, key=lambda span: span[0]) - 1
        return before >= 0 and seq < self.spans[before][1]


@dataclass(slots=True)
class _Copy:
    """The last that a batch says of one copy."""

    seq: int
    """Of the storing; 0: it is gone."""
    row: Row
    """nbytes, stored_seq, stored_at, origin, source, request"""


@dataclass
class Folded:
    """The rows of one batch, by table; :func:`fold` makes it."""

    #: {digest: row of cache_spec}
    specs: dict[str, Row] = field(default_factory=dict)
    #: {life: row of worker}
    workers: dict[Life, Row] = field(default_factory=dict)
    #: {key: row of kv_block}
    blocks: dict[bytes, Row] = field(default_factory=dict)
    #: {(key, life's number, tier): copy that is held at the end of the batch}
    copies: dict[tuple[bytes, int, str], _Copy] = field(default_factory=dict)
    #: rows of kv_evicted, each once; the last six are null where the batch does not know the storing
    evictions: list[Row] = field(default_factory=list)
    #: {request id: row of request_done}
    requests: dict[str, Row] = field(default_factory=dict)
    #: {life: its spans with this batch}; only lives that this batch adds numbers to
    seen: dict[Life, Spans] = field(default_factory=dict)
    #: lives of this batch that have a hole, sorted
    gaps: list[Life] = field(default_factory=list)
    #: {life's number: its lowest missing number}; lives that had a hole before the batch, or have one after it, or
    #: whose evictions wait for storings
    broken: dict[int, int] = field(default_factory=dict)

    def spec_rows(self) -> list[Row]:
        """Rows of ``cache_spec``."""
        return [row for _, row in sorted(self.specs.items())]

    def worker_rows(self) -> list[Row]:
        """Rows of ``worker``."""
        return [row for _, row in sorted(self.workers.items())]

    def block_rows(self) -> list[Row]:
        """Rows of ``kv_block``."""
        return [row for _, row in sorted(self.blocks.items())]

    def copy_rows(self) -> list[Row]:
        """Rows of ``kv_copy``."""
        return [(*name, *copy.row) for name, copy in sorted(self.copies.items()) if copy.seq]

    def eviction_rows(self) -> list[Row]:
        """Rows of ``kv_evicted``, by key."""
        return sorted(self.evictions, key=lambda row: row[1:5])

    def late_rows(self) -> list[Row]:
        """Rows of ``kv_late``: evictions above a number that is still missing."""
        last = {(row[1], row[2], row[3]): row for row in sorted(self.evictions, key=lambda row: row[4])
                if row[4] > self.broken.get(row[2], row[4])}
        return [(key, life, tier, row[4], row[0]) for (key, life, tier), row in sorted(last.items())]

    def request_rows(self) -> list[Row]:
        """Rows of ``request_done``."""
        return [row for _, row in sorted(self.requests.items())]


def lives(events: Iterable[FeedEvent]) -> list[Life]:
    """The lives whose copies ``events`` tell of, sorted."""
    return sorted({(str(event.worker), str(event.incarnation)) for event in events
                   if isinstance(event, Stored | Evicted)})


def fold(events: Iterable[FeedEvent], seen: Mapping[Life, Seen], *, now_s: float) -> Folded:
    """Rows of ``events``; ``seen`` has every one of their :func:`lives`; ``now_s`` (Unix seconds) stands in where an
    event carries no time.

    Raises ``ValueError`` or ``OverflowError`` for a time that is none.
    """
    folded = Folded()
    news: dict[Life, dict[int, Stored | Evicted]] = {}
    for event in events:
        match event:
            case Stored() | Evicted():
                if isinstance(event, Stored):
                    _claim(folded, event)
                life = (str(event.worker), str(event.incarnation))
                if event.seq not in seen[life]:
                    news.setdefault(life, {})[event.seq] = event
            case Hello():
                _hello(folded, event)
            case Bye():
                _bye(folded, event, now_s)
            case RequestDone():
                folded.requests.setdefault(event.request, _request(event))
    for life, known in seen.items():
        numbered = news.get(life, {})
        spans = join(known.spans, numbered)
        if has_hole(spans):
            folded.gaps.append(life)
        if not numbered:
            continue
        folded.seen[life] = spans
        if known.has_late or has_hole(spans) or has_hole(known.spans):
            folded.broken[known.number] = first_missing(spans)
        for _, event in sorted(numbered.items()):
            if isinstance(event, Stored):
                _stored(folded, event, known.number)
            else:
                _evicted(folded, event, known.number)
    return folded


def moment(at_s: float) -> datetime:
    """Unix seconds as Postgres keeps them."""
    return datetime.fromtimestamp(at_s, UTC)


def join(spans: Spans, seqs: Iterable[int]) -> Spans:
    """``spans`` and single numbers together."""
    parts = sorted([*spans, *((seq, seq + 1) for seq in seqs)])
    joined: list[tuple[int, int]] = []
    for start, stop in parts:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def first_missing(spans: Spans) -> int:
    """The lowest number from 1 that ``spans`` lack."""
    return spans[0][1] if spans and spans[0][0] <= 1 else 1


def has_hole(spans: Spans) -> bool:
    """A number is missing below the highest."""
    return bool(spans) and first_missing(spans) < spans[-1][1]


def multirange(spans: Spans) -> str:
    """``((1, 4), (7, 8))`` → ``"{[1,4),[7,8)}"``, as Postgres writes it."""
    return "{" + ",".join(f"[{start},{stop})" for start, stop in spans) + "}"


def columns(rows: Sequence[Row]) -> list[list[Any]]:
    """Rows (at least one) turned into columns, the form that ``unnest`` takes."""
    return [list(column) for column in zip(*rows, strict=True)]


def _claim(folded: Folded, event: Stored) -> None:
    """Who made the blocks: the best of all claims, whichever comes first."""
    worker, incarnation, at = str(event.worker), str(event.incarnation), moment(event.at_s)
    blocks = folded.blocks
    for block in event.blocks:
        row = (block.key, block.parent, block.depth, event.spec, block.tenant, block.tokens, block.nbytes,
               block.origin == "computed", worker, incarnation, at, block.request)
        known = blocks.setdefault(block.key, row)
        if known is not row and _made(row) < _made(known):
            blocks[block.key] = row


def _made(row: Row) -> Row:
    """What orders the claims to have made a block: computed before received, then time, then who.

    The statement ``MERGE_BLOCKS`` compares the same columns in the same order.
    """
    return (not row[7], row[10], row[8], row[9], row[11])


def _stored(folded: Folded, event: Stored, life: int) -> None:
    seq, at, copies = event.seq, moment(event.at_s), folded.copies
    for block in event.blocks:
        copies[block.key, life, block.tier.value] = _Copy(
            seq, (block.nbytes, seq, at, block.origin, block.source, block.request))


_UNKNOWN: Row = (None, None, "", "", "")


def _evicted(folded: Folded, event: Evicted, life: int) -> None:
    seq, at, tier, why, copies = event.seq, moment(event.at_s), event.tier.value, event.reason, folded.copies
    for start in range(0, len(event.keys), _KEY):
        key = event.keys[start:start + _KEY]
        copy = copies.get((key, life, tier))
        story = _UNKNOWN
        if copy is not None and copy.seq:
            nbytes, _, *rest = copy.row
            story = (nbytes, *rest)
        folded.evictions.append((at, key, life, tier, seq, why, *story))
        copies[key, life, tier] = _Copy(0, ())


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
    decisions = msgspec.json.encode(done.decisions).decode() if done.decisions else None
    return (
        done.request, done.gateway, done.model, done.spec, done.tenant, moment(done.received_at_s), done.outcome,
        done.code, done.finish, done.prompt_tokens, done.completion_tokens, done.predicted_hit_tokens,
        done.hit_tokens, done.predicted_ttft_s, done.ttft_s, done.tbt_s, done.duration_s, done.attempts,
        done.conductor, done.prefill, done.decode, done.trace, stages, bytes(done.last_key),
        decisions, done.client_id or None)
