"""``moonbus workers``: the cluster as a table."""

from __future__ import annotations

from typing import cast

from services.cli.find import ask, settings
from services.cli.output import compact_table, console, name_column
from shared.bus.subjects import WORKERS
from shared.messages import (
    WorkersQuery,
    WorkersReply,
)
from shared.units import format_seconds

_STATE_COLOURS = {"alive": "green", "draining": "cyan", "suspect": "yellow", "dead": "red"}


def workers(nats_url: str | None, data_dir: str | None) -> None:
    """Prints the cluster as a conductor sees it."""
    reply = cast(WorkersReply, ask(settings(nats_url, data_dir), WORKERS.at(), WorkersQuery(), who="conductor"))
    width = max((len(worker.hello.worker) for worker in reply.workers), default=0)
    table = compact_table(name_column("worker", width), "state", "model", "device", "queued", "running", "free blocks",
                          "indexed", "wait",
                          title=f"Workers, as {reply.conductor} sees them")
    for worker in reply.workers:
        hello, load = worker.hello, worker.load
        # It is heard and takes nothing new; what is not heard may do anything.
        state = "draining" if worker.state == "alive" and load is not None and load.draining else worker.state
        table.add_row(
            hello.worker, f"[{_STATE_COLOURS[state]}]{state}[/]", hello.spec.model, hello.device,
            str(load.queued) if load else "?", str(load.running) if load else "?",
            f"{load.free_blocks if load else '?'}/{hello.capacity_blocks}", str(worker.indexed_blocks),
            format_seconds(worker.waiting_s) if hello.role == "prefill" else "",
        )
    console.print(table)
