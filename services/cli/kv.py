"""``moonbus kv``: what the catalog knows, a command a question. A command loads what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.launcher.settings import Settings
from shared.settings import describe

app = typer.Typer(no_args_is_help=True, help="Ask the catalog what happened to KV blocks and requests.", epilog=(
    "Examples:\n\n  moonbus kv ls\n\n  moonbus kv hot --html hot.html\n\n  moonbus kv evictions --since 1h"))

_DATA_DIR = next(field for field in describe(Settings, "launcher") if field.name == "data_dir")

NatsUrl = Annotated[str | None, typer.Option(
    help="NATS of the stack to ask; without it the stack that runs in the data directory.", show_default=False)]
DataDir = Annotated[str | None, typer.Option(
    help=_DATA_DIR.description + f" [dim]\\[default: {_DATA_DIR.default}][/]", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Html = Annotated[Path | None, typer.Option(
    help="Draw the prefix tree into this file, with heat.", show_default=False, dir_okay=False)]
Worker = Annotated[str, typer.Option(help="Only of that worker.")]
Tenant = Annotated[str, typer.Option(help="Only of that tenant.")]
Model = Annotated[str, typer.Option(help="Only of that model.")]
Since = Annotated[str, typer.Option(help="How far to look back, like 90s, 2h or 7d.")]
Limit = Annotated[int, typer.Option(help="Most rows to show.", min=1, max=1000)]
BlockLimit = Annotated[int, typer.Option(help="Most blocks to look at.", min=1, max=10_000)]


@app.command("ls", epilog="Examples:\n\n  moonbus kv ls\n\n  moonbus kv ls --order hot --worker prefill-1")
def ls(limit: Limit = 20,
       worker: Annotated[str, typer.Option(help="Only blocks with a copy there.")] = "", tenant: Tenant = "",
       order: Annotated[str, typer.Option(help="recent, hot or deep.")] = "recent",
       everything: Annotated[bool, typer.Option("--all", help="Blocks without a live copy too.")] = False,
       json: Json = False, nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """List blocks."""
    from services.cli.kv_show import blocks as run

    run(nats_url, data_dir, json, limit=limit, worker=worker, tenant=tenant, order=order, everything=everything)


@app.command("stats", epilog="Example: moonbus kv stats")
def stats(json: Json = False, nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Show the totals and what each worker holds."""
    from services.cli.kv_show import stats as run

    run(nats_url, data_dir, json)


@app.command("lineage", epilog=(
    "Examples:\n\n  moonbus kv lineage 9f86d081   (digits from `moonbus kv ls`)\n\n"
    "  moonbus kv lineage 9f86d081 --down --html tree.html"))
def lineage(key: Annotated[str, typer.Argument(help="Block key in hex, or its first digits.")],
            down: Annotated[bool, typer.Option("--down", help="What continues it instead, as a tree.")] = False,
            limit: BlockLimit = 1000, html: Html = None, json: Json = False, nats_url: NatsUrl = None,
            data_dir: DataDir = None) -> None:
    """Show a block's chain from the root: who computed each block, when, for which request, where its copies are."""
    if down:
        from services.cli.kv_show import descendants as run
    else:
        from services.cli.kv_show import lineage as run

    run(key, nats_url, data_dir, json, limit=limit, html=html)


@app.command("descendants", epilog="Example: moonbus kv descendants 9f86d081 --html tree.html")
def descendants(key: Annotated[str, typer.Argument(help="Block key in hex, or its first digits.")],
                limit: BlockLimit = 1000, html: Html = None, json: Json = False, nats_url: NatsUrl = None,
                data_dir: DataDir = None) -> None:
    """Show what continues a block, as a tree of stretches without a branch."""
    from services.cli.kv_show import descendants as run

    run(key, nats_url, data_dir, json, limit=limit, html=html)


@app.command("hot", epilog="Examples:\n\n  moonbus kv hot\n\n  moonbus kv hot --tenant acme --html hot.html")
def hot(limit: Limit = 20,
        blocks: Annotated[int, typer.Option(
            help="Most blocks to look at, the hottest first.", min=1, max=10_000)] = 2000,
        tenant: Tenant = "", model: Model = "", html: Html = None, json: Json = False, nats_url: NatsUrl = None,
        data_dir: DataDir = None) -> None:
    """Show the prefixes reused most and the prompt tokens that they saved."""
    from services.cli.kv_show import hot as run

    run(nats_url, data_dir, json, limit=limit, blocks=blocks, tenant=tenant, model=model, html=html)


@app.command("evictions", epilog=(
    "Examples:\n\n  moonbus kv evictions\n\n  moonbus kv evictions --worker prefill-1 --why capacity --since 1h"))
def evictions(since: Since = "24h", limit: Limit = 20, worker: Worker = "", tenant: Tenant = "",
              why: Annotated[str, typer.Option(help="Only for that reason, like capacity, trim or drain.")] = "",
              key: Annotated[str, typer.Option(help="Only of that block: its key in hex, or its first digits.")] = "",
              json: Json = False, nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Show who evicted what and why: sums, then the latest."""
    from services.cli.kv_show import evictions as run

    run(nats_url, data_dir, json, since=since, limit=limit, worker=worker, tenant=tenant, why=why, key=key)


@app.command("reuse", epilog="Examples:\n\n  moonbus kv reuse\n\n  moonbus kv reuse --by day --since 30d")
def reuse(by: Annotated[str, typer.Option(help="tenant, model or day.")] = "tenant", since: Since = "7d",
          json: Json = False, nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Show how many prompt tokens needed no computing."""
    from services.cli.kv_show import reuse as run

    run(nats_url, data_dir, json, by=by, since=since)


@app.command("requests", epilog=(
    "Examples:\n\n  moonbus kv requests\n\n  moonbus kv requests --outcome failed --since 1h --limit 100"))
def requests(since: Since = "24h", limit: Limit = 20, tenant: Tenant = "", model: Model = "",
             outcome: Annotated[str, typer.Option(
                 help="ok, cancelled, rejected or failed; or a code such as ttft or capacity.")] = "",
             worker: Annotated[str, typer.Option(help="Only those that it prefilled or decoded.")] = "",
             json: Json = False, nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """List requests, the latest first."""
    from services.cli.kv_show import requests as run

    run(nats_url, data_dir, json, since=since, limit=limit, tenant=tenant, model=model, outcome=outcome, worker=worker)


@app.command("request", epilog="Example: moonbus kv request req-4f1c   (from `moonbus kv requests`)")
def request(name: Annotated[str, typer.Argument(metavar="ID", help=(
                "The request's id, or its beginning, or what its client sent as x-request-id."))],
            json: Json = False, nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Show all that is known of one request."""
    from services.cli.kv_show import request as run

    run(name, nats_url, data_dir, json)


@app.command("storage", epilog=(
    "Examples:\n\n  moonbus kv storage\n\n  moonbus kv storage --since 7d --worker prefill-1"))
def storage(since: Since = "24h", steps: Annotated[int, typer.Option(help="Points in time.", min=1, max=500)] = 24,
            worker: Worker = "", json: Json = False, nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Show what workers held in each tier over time."""
    from services.cli.kv_show import storage as run

    run(nats_url, data_dir, json, since=since, steps=steps, worker=worker)
