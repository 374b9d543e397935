"""The chain of a KV block as a table."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from rich import box
from rich.table import Column, Table

from shared.messages import BlockRow, LineageReply, ReplicaRow

KEY_DIGITS = 12
"""Hex digits of a key that a table shows; enough to ask for the block."""


def lineage_table(reply: LineageReply, *, merged: bool = False) -> Table:
    """The chain, root first; ``merged`` shows neighbours of the same story as one row."""
    asked = reply.blocks[-1].key.hex()[:KEY_DIGITS] if reply.blocks else "nothing"
    table = Table(
        Column("depth", no_wrap=True, min_width=5),
        Column("key", no_wrap=True, min_width=KEY_DIGITS), Column("first by", no_wrap=True, min_width=9),
        Column("at", no_wrap=True, min_width=8),
        Column("for request", no_wrap=True, max_width=12), Column("copies now", no_wrap=True),
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=f"Lineage of {asked}", title_justify="left",
        caption=f"blocks that continue it: {reply.descendants}", caption_justify="left")
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
