"""How long the catalog remembers, and what follows for its partitions. Pure.

Tables that only grow (ended copies, requests, storage samples) are partitioned by time: a partition is one stretch of
it, made ahead, dropped whole when all of it is too old, or when the table is over its bound in bytes. Dropping is the
only way to forget millions of rows at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HOUR_S = 3_600.0
LENGTHS_S = (24 * HOUR_S, 6 * HOUR_S, HOUR_S)
"""Partitions are a day long; shorter ones where a day would be more than :data:`SHARE` of the table's bound."""
SHARE = 0.125
AHEAD_S = 2 * 24 * HOUR_S
"""Partitions are made this long ahead, so that a store-manager may be away for a weekend."""
AHEAD = 8
"""But never more than these many at once."""
MOST_MOVED = 64 * 2**20
"""Bytes that a new partition takes over from ``<table>_rest`` at most: writers wait meanwhile. With more there, the
first partition begins after now, and what lies in the rest stays until it is too old."""


@dataclass(frozen=True)
class Retention:
    """What the settings say; ages in seconds."""

    requests_s: float = 30 * 24 * HOUR_S
    copies_s: float = 14 * 24 * HOUR_S
    """Copies that ended."""
    blocks_s: float = 30 * 24 * HOUR_S
    """Blocks without a copy, since they were last made or used."""
    samples_s: float = 30 * 24 * HOUR_S
    history_bytes: int = 16 * 2**30
    """Of each partitioned table, with its indexes."""
    blocks: int = 50_000_000
    """Rows of kv_block: above it the oldest without a copy go, however young they are."""
    sample_s: float = 300.0
    """Pause between two storage samples."""


@dataclass(frozen=True)
class Partition:
    """One stretch of a table: [start, stop) in Unix seconds; ``nbytes`` on disk with indexes."""

    name: str
    start_s: float
    stop_s: float
    nbytes: int = 0


@dataclass(frozen=True)
class Plan:
    """What to do about one table."""

    drop: tuple[Partition, ...] = ()
    """Oldest first."""
    make: tuple[Partition, ...] = ()
    """Earliest first."""


def plan(table: str, partitions: Sequence[Partition], *, now_s: float, keep_s: float, max_bytes: int,
         rest_bytes: int = 0) -> Plan:
    """The partitions of ``table`` that should go and come; ``rest_bytes`` lie outside of all.

    What is being written to (the partition of now, and later ones) never goes.
    """
    ordered = sorted(partitions, key=lambda partition: partition.start_s)
    past = [partition for partition in ordered if partition.stop_s <= now_s]
    total = sum(partition.nbytes for partition in ordered)
    drop = []
    for partition in past:
        if partition.stop_s > now_s - keep_s and total <= max_bytes:
            break
        drop.append(partition)
        total -= partition.nbytes
    return Plan(tuple(drop), tuple(_ahead(table, ordered, now_s=now_s, max_bytes=max_bytes, rest_bytes=rest_bytes)))


def _ahead(table: str, ordered: Sequence[Partition], *, now_s: float, max_bytes: int,
           rest_bytes: int) -> list[Partition]:
    length_s = _length_s(ordered, now_s=now_s, max_bytes=max_bytes)
    current = [partition for partition in ordered if partition.stop_s > now_s]
    first_s = (now_s // length_s + (rest_bytes > MOST_MOVED)) * length_s
    start_s = max(first_s, *(partition.stop_s for partition in ordered), 0.0)
    made: list[Partition] = []
    while start_s < now_s + AHEAD_S and len(made) + len(current) < AHEAD:
        # Ends where a longer stretch would, so that lengths may change back.
        stop_s = (start_s // length_s + 1) * length_s
        made.append(Partition(name_of(table, start_s), start_s, stop_s))
        start_s = stop_s
    return made


def _length_s(ordered: Sequence[Partition], *, now_s: float, max_bytes: int) -> float:
    """The longest that would stay below its share of the bound, at the rate of the fullest stretch of late."""
    rates = [partition.nbytes / max(60.0, min(partition.stop_s, now_s) - partition.start_s)
             for partition in ordered if partition.start_s < now_s][-3:]
    rate = max(rates, default=0.0)
    return next((length_s for length_s in LENGTHS_S if rate * length_s <= SHARE * max_bytes), LENGTHS_S[-1])


def name_of(table: str, start_s: float) -> str:
    """``kv_evicted_1764374400``: by its start, which no two share."""
    return f"{table}_{int(start_s)}"
