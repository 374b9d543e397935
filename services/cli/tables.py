"""``moonbus workers`` and ``moonbus kv``: questions to conductor and store-manager as tables."""

from __future__ import annotations

import time
from typing import cast

from rich.table import Table

from services.cli.find import ask, settings
from services.cli.output import compact_table, console, name_column
from services.launcher.lineage import KEY_DIGITS, copies, lineage_table
from shared.bus.subjects import BLOCKS, LINEAGE, STATS, WORKERS
from shared.errors import SettingError
from shared.messages import (
    BlocksQuery,
    BlocksReply,
    LineageQuery,
    LineageReply,
    StatsQuery,
    StatsReply,
    WorkersQuery,
    WorkersReply,
)
from shared.units import format_bytes, format_seconds

_ORDERS = ("recent", "hot", "deep")
_STATE_COLOURS = {"alive": "green", "suspect": "yellow", "dead": "red"}


def workers(nats_url: str | None, data_dir: str | None) -> None:
    """Prints the cluster as a conductor sees it."""
    reply = cast(WorkersReply, ask(settings(nats_url, data_dir), WORKERS.at(), WorkersQuery(), who="conductor"))
    width = max((len(worker.hello.worker) for worker in reply.workers), default=0)
    table = compact_table(name_column("worker", width), "state", "model", "device", "queued", "running", "free blocks",
                          "indexed", "wait",
                          title=f"Workers, as {reply.conductor} sees them")
    for worker in reply.workers:
        hello, load = worker.hello, worker.load
        colour = _STATE_COLOURS[worker.state]
        table.add_row(
            hello.worker, f"[{colour}]{worker.state}[/]", hello.spec.model, hello.device,
            str(load.queued) if load else "?", str(load.running) if load else "?",
            f"{load.free_blocks if load else '?'}/{hello.capacity_blocks}", str(worker.indexed_blocks),
            format_seconds(worker.waiting_s) if hello.role == "prefill" else "",
        )
    console.print(table)


def blocks(nats_url: str | None, data_dir: str | None, *, limit: int, worker: str, tenant: str, order: str,
           everything: bool) -> None:
    """Prints blocks of the catalog."""
    if order not in _ORDERS:
        raise SettingError("--order", order, " or ".join(_ORDERS))
    query = BlocksQuery(limit=limit, worker=worker, tenant=tenant, order=order, all=everything)  # type: ignore[arg-type]
    reply = cast(BlocksReply, ask(settings(nats_url, data_dir), BLOCKS.at(), query, who="store-manager"))
    table = compact_table(name_column("key", KEY_DIGITS), "depth", "model", "tenant", "hits", "last used", "made by",
                          "copies now", title=f"{len(reply.blocks)} of {reply.total} blocks")
    for block in reply.blocks:
        table.add_row(
            block.key.hex()[:KEY_DIGITS], str(block.depth), block.model, block.tenant, str(block.hits),
            _age(block.last_used_at_s), block.created_by, copies(block.replicas, separator="\n", sources=False))
    console.print(table)


def stats(nats_url: str | None, data_dir: str | None) -> None:
    """Prints the catalog's totals."""
    reply = cast(StatsReply, ask(settings(nats_url, data_dir), STATS.at(), StatsQuery(), who="store-manager"))
    hit_rate = f" ({reply.hit_tokens / reply.prompt_tokens:.0%})" if reply.prompt_tokens else ""
    totals = Table.grid(padding=(0, 2))
    for name, value in (
        ("blocks known", f"{reply.blocks:,}"),
        ("blocks with a live copy", f"{reply.live_blocks:,}"),
        ("live copies", f"{reply.live_replicas:,} ({format_bytes(reply.live_bytes)})"),
        ("requests", f"{reply.requests:,}"),
        ("prompt tokens", f"{reply.prompt_tokens:,}"),
        ("of them not computed", f"{reply.hit_tokens:,}{hit_rate}"),
        ("feed still to write", f"{reply.feed_pending:,} messages"),
    ):
        totals.add_row(name, value)
    console.print(totals)
    table = compact_table("worker", "role", "state", "blocks", "size")
    for worker in reply.workers:
        table.add_row(worker.worker, worker.role, worker.state, f"{worker.blocks:,}", format_bytes(worker.nbytes))
    console.print(table)


def lineage(key: str, nats_url: str | None, data_dir: str | None) -> None:
    """Prints a block's chain from the root."""
    question = LineageQuery(key_hex=key.strip().lower().removeprefix("0x"))
    reply = cast(LineageReply, ask(settings(nats_url, data_dir), LINEAGE.at(), question, who="store-manager"))
    console.print(lineage_table(reply))


def _age(at_s: float | None) -> str:
    return "never" if at_s is None else f"{format_seconds(max(0.0, time.time() - at_s))} ago"
