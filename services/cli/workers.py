"""``moonbus workers``: the cluster as a table."""

from __future__ import annotations

from typing import cast

from rich.table import Table

from services.cli.find import ask, settings
from services.cli.output import compact_table, console, name_column, number_column
from shared.bus.subjects import WORKERS
from shared.messages import WorkersQuery, WorkersReply, WorkerState
from shared.units import format_seconds

_STATE_COLOURS = {"alive": "green", "draining": "cyan", "suspect": "yellow", "dead": "red"}


def workers(nats_url: str | None, data_dir: str | None) -> None:
    """Prints the cluster as a conductor sees it."""
    console.print(report(cast(WorkersReply, ask(
        settings(nats_url, data_dir), WORKERS.at(), WorkersQuery(), who="conductor"))))


def report(reply: WorkersReply) -> Table:
    """A row for each worker."""
    width = max((len(worker.hello.worker) for worker in reply.workers), default=0)
    is_elastic = any(worker.hello.elastic for worker in reply.workers)
    now = [name_column("now", len("prefill"))] if is_elastic else []
    table = compact_table(
        name_column("worker", width), name_column("state", len("alive")), *now, "model", "device",
        *map(number_column, ("queue", "runs", "free blocks", "index", "wait")),
        title=f"Workers, as {reply.conductor} sees them")
    for worker in reply.workers:
        hello, load = worker.hello, worker.load
        loads = [one for one in (load, worker.other_load) if one is not None]
        # It is heard and takes nothing new; what is not heard may do anything.
        state = "draining" if worker.state == "alive" and load is not None and load.draining else worker.state
        table.add_row(
            hello.worker, f"[{_STATE_COLOURS[state]}]{state}[/]", *([_role(worker)] if is_elastic else []),
            hello.spec.model, hello.device,
            str(sum(one.queued for one in loads)) if load else "?",
            str(sum(one.running for one in loads)) if load else "?",
            f"{load.free_blocks if load else '?'}/{hello.capacity_blocks}", str(worker.indexed_blocks),
            format_seconds(worker.waiting_s) if hello.role == "prefill" or hello.elastic else "",
        )
    return table


def _role(worker: WorkerState) -> str:
    """What it is given work for, which stands out where it is not at home."""
    if not worker.hello.elastic:
        return worker.hello.role
    return f"[yellow]{worker.now}[/]" if worker.now and worker.now != worker.hello.role else worker.now or ""
