"""``moonbus``: every verb, in the order of its help. Imports nothing heavy: a command loads what it needs.

A :class:`UserError` becomes one line on stderr and exit code 1, a command line that cannot be understood one with 2;
Ctrl-C becomes 130; anything else is a bug of ours: one line, and the stack trace in a file that the line names.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import kv
from services.cli.serving import ServeCommand
from services.launcher.settings import Settings
from shared.errors import BusError, UserError
from shared.settings import describe

_STACK, _ASK, _TOOLS = "Run a stack", "Ask a running stack", "Tools"

app = typer.Typer(
    name="moonbus", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    add_completion=False, context_settings={"help_option_names": ["-h", "--help"]},
    help="LLM serving that schedules around the KV cache.",
    epilog="Start with [bold]moonbus demo[/], or [bold]moonbus up[/] and then [bold]moonbus chat[/].",
)
serve_app = typer.Typer(no_args_is_help=True, help="Run one service in the foreground, as containers do.", epilog=(
    "Example: moonbus serve prefill --set model=smollm2-135m --set nats_url=nats://10.0.0.1:4222"))
store_app = typer.Typer(no_args_is_help=True, help="Steer the cluster-wide pool of KV blocks.", epilog=(
    "Examples:\n\n  moonbus store replicas --hot\n\n  moonbus store drain prefill-1\n\n"
    "  moonbus store quota set acme 64GiB"))
quota_app = typer.Typer(no_args_is_help=True, help="How many bytes of the pool each tenant may take.", epilog=(
    "Examples:\n\n  moonbus store quota ls\n\n  moonbus store quota set acme 64GiB\n\n  moonbus store quota rm acme"))
models_app = typer.Typer(no_args_is_help=True, help="Fetch models and list what is here.", epilog=(
    "Examples:\n\n  moonbus models pull smollm2-135m\n\n  moonbus models ls"))
app.add_typer(serve_app, name="serve", rich_help_panel=_STACK)
app.add_typer(kv.app, name="kv", rich_help_panel=_ASK)
app.add_typer(store_app, name="store", rich_help_panel=_ASK)
store_app.add_typer(quota_app, name="quota")
app.add_typer(models_app, name="models", rich_help_panel=_TOOLS)

_LAUNCHER = {field.name: field for field in describe(Settings, "launcher")}


def _setting(name: str, flag: str = "") -> Any:
    """An option that sets the launcher's setting ``name``; help and default are the setting's own."""
    field = _LAUNCHER[name]
    default = f" [dim]\\[default: {field.default}][/]" if field.default not in ("", 0) else ""
    return typer.Option(flag or "--" + name.replace("_", "-"), help=field.description + default, show_default=False)


Model = Annotated[str | None, _setting("model")]
Prefill = Annotated[int | None, _setting("prefill")]
Decode = Annotated[int | None, _setting("decode")]
Store = Annotated[int | None, _setting("store")]
Elastic = Annotated[bool | None, _setting("elastic", "--elastic")]
Host = Annotated[str | None, _setting("host")]
Port = Annotated[int | None, _setting("port")]
DataDir = Annotated[str | None, _setting("data_dir")]
CacheDir = Annotated[str | None, _setting("cache_dir")]
Threads = Annotated[int | None, _setting("threads")]
PoolBytes = Annotated[str | None, _setting("pool_bytes")]
NatsUrl = Annotated[str | None, typer.Option(
    help="NATS of the stack to ask; without it the stack that runs in the data directory.", show_default=False)]
GatewayUrl = Annotated[str | None, typer.Option(
    "--url", help="The gateway's URL; without it the stack that runs in the data directory.", show_default=False)]
Sets = Annotated[list[str] | None, typer.Option(
    "--set", metavar="NAME=VALUE", help="Any setting of the service; may be repeated.", show_default=False)]


@app.command(rich_help_panel=_STACK, epilog=(
    "Examples:\n\n  moonbus up\n\n  moonbus up --model ./my-model --prefill 1 --decode 1 --port 9000\n\n"
    "  moonbus up --prefill 1 --decode 3 --elastic\n\n"
    "Any setting of a service can be given in its environment: MOONBUS_PREFILL_CHUNK_TOKENS=128 moonbus up"))
def up(model: Model = None, prefill: Prefill = None, decode: Decode = None, store: Store = None,
       elastic: Elastic = None, host: Host = None, port: Port = None, data_dir: DataDir = None,
       cache_dir: CacheDir = None, threads: Threads = None, pool_bytes: PoolBytes = None) -> None:
    """Run a whole stack in the foreground: NATS, Postgres and the five services. Ctrl-C drains and stops it."""
    from services.launcher.status import up as run

    raise typer.Exit(run(_launcher_settings(
        model=model, prefill=prefill, decode=decode, store=store, elastic=elastic, host=host, port=port,
        data_dir=data_dir, cache_dir=cache_dir, threads=threads, pool_bytes=pool_bytes)))


@app.command(rich_help_panel=_STACK, epilog="Examples:\n\n  moonbus demo\n\n  moonbus demo --model tiny-random")
def demo(model: Model = None, port: Port = None, data_dir: DataDir = None, cache_dir: CacheDir = None,
         threads: Threads = None, pool_bytes: PoolBytes = None) -> None:
    """Show a prefix computed on one worker being reused on another, on a fresh stack. Exit code 1 if answers differ."""
    from services.launcher.demo import demo as run

    raise typer.Exit(run(_launcher_settings(
        model=model, port=0 if port is None else port, data_dir=data_dir, cache_dir=cache_dir, threads=threads,
        pool_bytes=pool_bytes)))


def _add_service(service: str, about: str, example: str) -> None:
    @serve_app.command(service, cls=ServeCommand, help=about, epilog=f"Example: {example}")
    def serve(sets: Sets = None) -> None:
        from services.cli.serving import serve as run

        raise typer.Exit(run(service, sets or []))


def _add_worker(service: str, about: str, example: str) -> None:
    @serve_app.command(service, cls=ServeCommand, help=about, epilog=f"Example: {example}")
    def serve(sets: Sets = None, elastic: Annotated[bool, typer.Option(
            "--elastic", help="Also take jobs of the other role, as load asks for.")] = False) -> None:
        from services.cli.serving import serve as run

        raise typer.Exit(run(service, [*(sets or []), *(["elastic=true"] if elastic else [])]))


_add_service("gateway", "HTTP in, token streams out: the OpenAI API.",
             "moonbus serve gateway --set port=8000 --set nats_url=nats://10.0.0.1:4222")
_add_service("conductor", "Knows where every KV block lies and places each request.",
             "moonbus serve conductor --set nats_url=nats://10.0.0.1:4222")
_add_worker("prefill", "Computes prompts' KV and writes it into the decode worker's memory.",
             "moonbus serve prefill --set model=smollm2-135m --set pool_bytes=8GiB")
_add_worker("decode", "Generates tokens in a continuous batch.",
             "moonbus serve decode --set model=smollm2-135m --set pool_bytes=8GiB")
_add_service("store", "Lends memory and disk to the cluster's pool of KV blocks, without an engine.",
             "moonbus serve store --set worker_id=store-1 --set pool_bytes=64GiB --set ssd_dir=/data/kv")
_add_service("store-manager", "Archives the lineage of every KV block in Postgres.",
             "moonbus serve store-manager --set postgres_url=postgresql://moonbus@10.0.0.2/moonbus")


@app.command(rich_help_panel=_STACK, epilog=(
    "Example: MOONBUS_POSTGRES_URL=postgresql://moonbus:secret@10.0.0.2/moonbus moonbus migrate"))
def migrate(sets: Sets = None, pre: Annotated[bool, typer.Option(
        "--pre", help="Only the steps before the new version's code, while the old one still runs.")] = False) -> None:
    """Bring the catalog's schema up to date; repeating it changes nothing."""
    from services.cli.serving import migrate as run

    run(sets or [], pre=pre)


@app.command(rich_help_panel=_ASK, epilog=(
    "Examples:\n\n  moonbus chat\n\n  moonbus chat --system 'Be brief.'\n\n  echo 'What is RDMA?' | moonbus chat"))
def chat(url: GatewayUrl = None, data_dir: DataDir = None,
         model: Annotated[str | None, typer.Option(help="Model to talk to; the gateway's first without it.")] = None,
         system: Annotated[str, typer.Option(help="System message.")] = "",
         max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 256,
         temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0, max=2)] = 0.0) -> None:
    """Chat in the terminal: /exit or Ctrl-D ends it, /clear forgets what was said. Reads questions from a pipe too."""
    from services.cli.chat import chat as run

    run(url=url, data_dir=data_dir, model=model, system=system, max_tokens=max_tokens, temperature=temperature)


@app.command(rich_help_panel=_ASK, epilog="Examples:\n\n  moonbus advise\n\n  moonbus advise --json")
def advise(json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False, nats_url: NatsUrl = None,
           data_dir: DataDir = None) -> None:
    """Say whether the ratio of prefill to decode workers fits the load, and what it should be."""
    from services.cli.advise import advise as run

    run(nats_url, data_dir, json=json)


@app.command(rich_help_panel=_ASK, epilog="Example: moonbus workers --nats-url nats://10.0.0.1:4222")
def workers(nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """List the workers as a conductor sees them."""
    from services.cli.workers import workers as run

    run(nats_url, data_dir)


@app.command(rich_help_panel=_ASK, epilog=(
    "Example: moonbus explain req-4f1c   (from the answer's header x-moonbus-request-id, or `moonbus kv requests`)"))
def explain(name: Annotated[str, typer.Argument(metavar="ID", help=(
                "The id of the request or of its answer, or what its client sent as x-request-id."))],
            json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
            nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Show why a request ran where it did, or why it was turned away: what was weighed, predicted and actual."""
    from services.cli.explain import explain as run

    run(name, nats_url, data_dir, json=json)


@store_app.command("drain", epilog=(
    "Examples:\n\n  moonbus store drain prefill-1\n\n  moonbus store drain prefill-1 --timeout 10min\n\n"
    "Exit code 0 when all that only this worker held has a copy elsewhere, 1 when some of it stays behind or the drain "
    "fails. Ctrl-C stops looking, not the drain: --cancel does."))
def store_drain(worker: Annotated[str, typer.Argument(help="Worker to empty; see `moonbus workers`.")],
                timeout: Annotated[str, typer.Option(help="A drain that takes longer fails.")] = "300s",
                cancel: Annotated[bool, typer.Option("--cancel", help="Stop the drain of this worker.")] = False,
                force: Annotated[bool, typer.Option(
                    "--force", help="Also the last prefill or decode worker of a model, which then ends; and what "
                                    "no other worker can have is dropped instead of served on.")] = False,
                nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Copy the blocks that only this worker holds to others, then let it go; shows how far it is."""
    from services.cli.store import drain as run

    raise typer.Exit(run(worker, nats_url, data_dir, timeout=timeout, cancel=cancel, force=force))


@store_app.command("replicas", epilog="Examples:\n\n  moonbus store replicas\n\n  moonbus store replicas --hot")
def store_replicas(hot: Annotated[bool, typer.Option("--hot", help="Only the hot prefixes.")] = False,
                   limit: Annotated[int, typer.Option(help="Most rows of each table.", min=1, max=200)] = 20,
                   nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Show hot prefixes and where their copies are, what each worker holds, and what was decided lately and why."""
    from services.cli.store import replicas as run

    run(nats_url, data_dir, limit=limit, hot=hot)


@quota_app.command("ls", epilog="Example: moonbus store quota ls")
def quota_ls(nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """List the tenants with a quota and what they use."""
    from services.cli.store import quotas as run

    run(nats_url, data_dir)


@quota_app.command("set", epilog="Example: moonbus store quota set acme 64GiB")
def quota_set(tenant: Annotated[str, typer.Argument(help="Tenant.")],
              size: Annotated[str, typer.Argument(metavar="BYTES", help="Bytes in the whole cluster, as 64GiB.")],
              nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Limit a tenant's share of the pool; what is above it is evicted, its own blocks only."""
    from services.cli.store import set_quota as run

    run(tenant, size, nats_url, data_dir)


@quota_app.command("rm", epilog="Example: moonbus store quota rm acme")
def quota_rm(tenant: Annotated[str, typer.Argument(help="Tenant.")],
             nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Take a tenant's quota away: nothing limits it any more."""
    from services.cli.store import remove_quota as run

    run(tenant, nats_url, data_dir)


@app.command(rich_help_panel=_TOOLS, epilog="Examples:\n\n  moonbus doctor\n\n  moonbus doctor --port 9000")
def doctor(model: Model = None, port: Port = None, host: Host = None, data_dir: DataDir = None,
           cache_dir: CacheDir = None) -> None:
    """Check what a stack needs and say what to do about it. Exit code 1 if something is missing."""
    from services.cli.doctor import doctor as run

    raise typer.Exit(run(_launcher_settings(model=model, port=port, host=host, data_dir=data_dir, cache_dir=cache_dir)))


@models_app.command("pull", epilog="Examples:\n\n  moonbus models pull smollm2-135m\n\n  moonbus models pull org/name")
def models_pull(name: Annotated[str, typer.Argument(help="smollm2-135m, tiny-random or a hub id.")],
                cache_dir: CacheDir = None) -> None:
    """Fetch a model into the cache directory, converted and hashed; repeating it changes nothing."""
    from services.cli.models import pull as run

    run(name, _launcher_settings(cache_dir=cache_dir).cache_path())


@models_app.command("ls", epilog="Example: moonbus models ls")
def models_ls(cache_dir: CacheDir = None) -> None:
    """List the models in the cache directory."""
    from services.cli.models import ls as run

    run(_launcher_settings(cache_dir=cache_dir).cache_path())


@app.command(rich_help_panel=_TOOLS, add_help_option=False, context_settings={
    "ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def load(context: typer.Context) -> None:
    """Replay request traces against a gateway and report latencies (see: moonbus load --help)."""
    _run(importlib.import_module("load.cli").app, context.args or ["--help"], "moonbus load")


@app.command(rich_help_panel=_TOOLS, add_help_option=False, context_settings={
    "ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def sim(context: typer.Context) -> None:
    """Simulate a cluster on a trace, with the conductor that runs in production (see: moonbus sim --help)."""
    _run(importlib.import_module("load.sim.cli").app, context.args or ["--help"], "moonbus sim")


@app.command(rich_help_panel=_TOOLS, epilog="Example: moonbus docs --to docs")
def docs(to: Annotated[Path, typer.Option(help="Directory to write into.")] = Path("docs")) -> None:
    """Generate configuration.md and messages.md from the code."""
    from services.cli.output import console
    from services.docgen import write

    for path in write(to):
        console.print(f"wrote {path}")


@app.command(rich_help_panel=_TOOLS)
def version() -> None:
    """Print the version."""
    from services.cli.output import console
    from shared.version import product_version

    console.print(f"moonbus {product_version()}", highlight=False)


def main(arguments: list[str] | None = None) -> None:
    """The console script; ends the process."""
    # What libraries log is for services, which set their logs up; a command says itself what went wrong.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        _run(app, arguments, "moonbus")
    except UserError as error:
        _fail(str(error))
    except BusError as error:
        _fail(f"{error}; is the stack running?")
    except OSError as error:
        if error.filename is None:
            _fail(f"this is a bug: {type(error).__name__}: {error} (stack trace: {_save_trace()})")
        _fail(f"{error.filename}: {error.strerror}; choose another place or give this user access to it")
    except Exception as error:
        _fail(f"this is a bug: {type(error).__name__}: {error} (stack trace: {_save_trace()})")


def _run(commands: typer.Typer, arguments: list[str] | None, name: str) -> None:
    """Runs one of ``commands`` and ends the process; what is wrong with ``arguments`` is said in one line."""
    try:
        code = commands(args=arguments, prog_name=name, standalone_mode=False)
    except typer.Abort:
        raise SystemExit(130) from None
    except Exception as error:
        # NOTE: known by what they can do, since typer, as it grew, had them from one place and another.
        context, told = getattr(error, "ctx", None), getattr(error, "format_message", None)
        if told is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # has printed the help
            raise SystemExit(2) from None
        line = " ".join(told().split()).rstrip(".")
        _fail(f"{line}; see: {context.command_path if context is not None else name} --help", code=2)
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(line: str, *, code: int = 1) -> None:
    sys.stderr.write(f"moonbus: {line}\n")
    raise SystemExit(code)


def _save_trace() -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="moonbus-bug-", suffix=".txt", delete=False) as file:
        file.write(traceback.format_exc())
    return Path(file.name)


def _launcher_settings(**flags: Any) -> Settings:
    from shared.settings import load as load_settings

    return load_settings(Settings, "launcher", overrides={k: v for k, v in flags.items() if v is not None})
