"""The chain of a KV block as a table."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.table import Table

from shared.messages import BlockRow, LineageReply, ReplicaRow

KEY_DIGITS = 12
"""Hex digits of a key that a table shows; enough to ask for the block."""


def lineage_table(reply: LineageReply, *, most_rows: int | None = None) -> Table:
    """The chain, root first; with ``most_rows`` the middle of a long one is left out."""
    table = Table("depth", "key", "made by", "when", "for request", "hits", "copies now",
                  title=f"Lineage of {reply.blocks[-1].key.hex()[:KEY_DIGITS]}" if reply.blocks else "Lineage",
                  caption=f"{reply.descendants} blocks continue it", title_justify="left", caption_justify="left")
    rows: list[BlockRow | None] = list(reply.blocks)
    if most_rows is not None and len(rows) > most_rows:
        head = (most_rows + 1) // 2
        rows = [*rows[:head], None, *rows[len(rows) - (most_rows - head):]]
    for block in rows:
        if block is None:
            table.add_row("⋮", f"{len(reply.blocks) - (most_rows or 0)} more", "", "", "", "", "")
            continue
        table.add_row(
            str(block.depth), block.key.hex()[:KEY_DIGITS], block.created_by, _clock(block.created_at_s),
            block.request, str(block.hits), copies(block.replicas))
    return table


def copies(replicas: Sequence[ReplicaRow]) -> str:
    """``prefill-1 dram, prefill-2 dram ← prefill-1``: live copies, and whom a received one came from."""
    live = [replica for replica in replicas if replica.evicted_at_s is None]
    return ", ".join(
        f"{replica.worker} {replica.tier}" + (f" ← {replica.source}" if replica.source else "") for replica in live)


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
