"""`moonbus load`: replay a trace against a gateway, make the page again; benchmarks of single parts.

``app`` is mounted by the `moonbus` command, which prints a ``UserError`` as one line; commands are plain functions
registered on it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from load import plots, report
from load.bench import cli as bench
from load.bench.conductor_command import bench_conductor
from load.cachesim.cli import cache_sim
from load.client import is_loopback
from load.live import ReplayOptions
from load.record import REPORT_FILE, read_run
from load.runner import PromptKind, RunOptions, run
from load.workload.prompts import Scaling
from shared.errors import UserError
from shared.settings import load as load_settings
from shared.stack_state import StackSettings, find_stack
from shared.units import parse_seconds

DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(help="Replay traces against a gateway and report how it did; benchmarks of single parts.",
                  no_args_is_help=True, epilog=(
                      "Example: moonbus load run --trace conversation_trace.jsonl --rate-scale 0.1 --limit 100"))
app.command("bench-transfer")(bench.bench_transfer)
app.command("bench-store")(bench.bench_store)
app.command("bench-restart")(bench.bench_restart)
app.command("bench-catalog")(bench.bench_catalog)
app.command("bench-conductor")(bench_conductor)
app.command("soak-transfer")(bench.soak_transfer)
app.command("cache-sim")(cache_sim)


class ApiKind(StrEnum):
    """Which endpoint gets the prompts."""

    COMPLETIONS = "completions"
    CHAT = "chat"


@app.command("run")
def run_command(
    trace: Annotated[Path, typer.Option(help="Mooncake JSON-lines trace, or an Azure LLM inference CSV.")],
    url: Annotated[str, typer.Option(help=f"Gateway; the running stack's, else {DEFAULT_URL}.")] = "",
    model: Annotated[str, typer.Option(help="Model to ask for; the first one served unless given.")] = "",
    rate_scale: Annotated[float, typer.Option(help="2 sends twice as fast as the trace did.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    length_scale: Annotated[float, typer.Option(help="Prompt tokens sent for each one of the trace.")] = 0.05,
    max_input: Annotated[int | None, typer.Option(
        min=1, help="Cut longer prompts; what fits the model's context unless given.")] = None,
    output_scale: Annotated[float, typer.Option(help="Answer tokens asked for each one of the trace.")] = 1.0,
    max_output: Annotated[int, typer.Option(min=1, help="Cut longer answers.")] = 64,
    slo_ttft: Annotated[str, typer.Option(help="TTFT bound, like 500ms or 10s.")] = "10s",
    slo_tbt: Annotated[str, typer.Option(help="TBT bound, like 100ms.")] = "100ms",
    ask_slo: Annotated[bool, typer.Option(
        "--ask-slo", help="Tell the gateway the bounds, so that it rejects what it cannot serve within them.")] = False,
    out: Annotated[Path | None, typer.Option(
        help="Folder for the run's files; load/results/<trace>-<time> unless given.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that --out already holds.")] = False,
    seed: Annotated[int, typer.Option(help="Sets the prompts' contents; prompts of two seeds share nothing.")] = 0,
    api: Annotated[ApiKind, typer.Option(help="Endpoint.")] = ApiKind.COMPLETIONS,
    prompt: Annotated[PromptKind, typer.Option(
        help="tokens: ids, exact in length and sharing (completions only). text: words, about as long.",
    )] = PromptKind.AUTO,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Requests due beyond this are dropped, counted.")] = 1024,
    timeout: Annotated[str, typer.Option(help="Longest silence in a stream before it counts as failed.")] = "10min",
    grace: Annotated[str, typer.Option(help="After Ctrl-C, time for requests in flight.")] = "10s",
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens a hash id of the trace stands for.")] = 512,
    stop_at_eos: Annotated[bool, typer.Option(
        "--stop-at-eos", help="Let the model end answers early; else the trace's lengths are asked for.")] = False,
    allow_remote: Annotated[bool, typer.Option(
        "--allow-remote", help="Allow a gateway that is not on this machine.")] = False,
) -> None:
    """Replay TRACE open-loop and write records and a report.

    Example: moonbus load run --trace conversation_trace.jsonl --rate-scale 0.1 --limit 100

    Ctrl-C stops sending and gives requests in flight --grace to end; a second Ctrl-C cancels them. Either way
    everything so far is written.
    """
    scales = {"--rate-scale": rate_scale, "--length-scale": length_scale, "--output-scale": output_scale}
    for name, value in scales.items():
        if not value > 0:
            raise UserError(f"{name} is {value:g}; expected a number above 0")
    if api is ApiKind.CHAT and prompt is PromptKind.TOKENS:
        raise UserError("--prompt tokens cannot go to --api chat: messages are text; use --prompt text")
    target = url or _running_gateway() or DEFAULT_URL
    if not target.startswith(("http://", "https://")):
        raise UserError(f"--url is {target}; expected an address like {DEFAULT_URL}")
    if not allow_remote and not is_loopback(target):
        raise UserError(f"{target} is not on this machine; add --allow-remote if you may put load on it")
    options = RunOptions(
        trace=trace, url=target.rstrip("/"), overwrite=overwrite, limit=limit,
        out=out or Path("load/results") / f"{trace.stem}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}",
        block_tokens=block_tokens,
        scaling=Scaling(length_scale=length_scale, max_input=max_input, output_scale=output_scale,
                        max_output=max_output),
        prompt_kind=prompt,
        replay=ReplayOptions(
            api="chat" if api is ApiKind.CHAT else "completions", model=model, rate_scale=rate_scale,
            max_in_flight=max_in_flight, grace_s=_seconds("--grace", grace), exact_output=not stop_at_eos,
            seed=seed),
        slo_ttft_s=_seconds("--slo-ttft", slo_ttft), slo_tbt_s=_seconds("--slo-tbt", slo_tbt),
        timeout_s=_seconds("--timeout", timeout), ask_slo=ask_slo,
    )
    plots.require()  # now, not after an hour of load
    uvloop.run(run(options, Console(stderr=True)))
    _show_end(options.out)


@app.command("report")
def report_command(directory: Annotated[Path, typer.Argument(help="Folder that `moonbus load run` wrote.")]) -> None:
    """Make a run's page again from its records.

    Example: moonbus load report load/results/conversation_trace-20260101-120000
    """
    report.write_report(directory)
    _show_end(directory)


def _running_gateway() -> str:
    """The gateway of the stack that runs in the data directory; empty when none does."""
    running = find_stack(load_settings(StackSettings, "load").data_path())
    return running.gateway_url if running is not None else ""


def _seconds(name: str, text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def _show_end(directory: Path) -> None:
    """The headline numbers and where the rest is, on stdout."""
    info, records = read_run(directory)
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in report.headline(info, records):
        table.add_row(row.name, *row.values)
    console = Console()
    console.print(table)
    console.print(f"report: {directory / REPORT_FILE}", soft_wrap=True)
