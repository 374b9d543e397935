"""The chain of a KV block as a table."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from rich.table import Table

from services.launcher.tables import compact_table, name_column
from shared.messages import BlockRow, LineageReply, ReplicaRow

KEY_DIGITS = 12
"""Hex digits of a key that a table shows; enough to ask for the block."""


def lineage_table(reply: LineageReply, *, merged: bool = False) -> Table:
    """The chain, root first; ``merged`` shows neighbours of the same story as one row."""
    asked = reply.blocks[-1].key.hex()[:KEY_DIGITS] if reply.blocks else "nothing"
    table = compact_table(
        name_column("depth", 5), name_column("key", KEY_DIGITS), name_column("first by", 9), name_column("at", 8),
        name_column("for request", 12), name_column("copies now", 9),
        title=f"Lineage of {asked}", caption=f"blocks that continue it: {reply.descendants}")
    for _, run in itertools.groupby(reply.blocks, key=_story if merged else lambda block: block.key):
        blocks = list(run)
        first, last = blocks[0], blocks[-1]
        table.add_row(
            str(first.depth) if first is last else f"{first.depth}-{last.depth}", last.key.hex()[:KEY_DIGITS],
            first.created_by, _moment(first.created_at_s), first.request,
            copies(first.replicas, separator="\n"))
    return table


def _moment(at_s: float) -> str:
    """The time of day, or the day when it was another one."""
    then, today = time.localtime(at_s), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d", then)


def copies(replicas: Sequence[ReplicaRow], *, separator: str = ", ", sources: bool = True) -> str:
    """Live copies, each with its tier where that is not DRAM, and with whom a received one came from."""
    return separator.join(
        replica.worker
        + (f" ({replica.tier})" if replica.tier != "dram" else "")
        + (f" ← {replica.source}" if replica.source and sources else "")
        for replica in replicas if replica.evicted_at_s is None)


def _story(block: BlockRow) -> object:
    return block.created_by, block.request, copies(block.replicas)
