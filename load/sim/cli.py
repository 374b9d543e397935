"""`moonbus sim`: runs of the simulated cluster. Mounted by the `moonbus` command.

A trace that cannot be read ends with exit code 2, before anything is written; other mistakes with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from load import plots
from load.record import read_run
from load.sim import figures, paper
from load.sim.experiment import ORDERS, Result, RunOptions, load_trace, simulate
from load.sim.faults import parse_fault
from load.sim.fit import fit_profile
from load.sim.many import GOOD_SHARE, find_knee
from load.sim.page import PAGE_FILE, Page, Table, write
from load.sim.profile import read_profile
from load.workload.traces import MOONCAKE_BLOCK_TOKENS, TraceError
from services.conductor.core.policies.registry import ADMISSIONS, OURS, POLICIES
from shared.errors import UserError
from shared.files import write_file
from shared.units import format_seconds, parse_seconds

_BAD_TRACE = 2
_STAND_IN = "toolagent_like"

app = typer.Typer(help="Simulate a cluster on a trace, with the conductor that runs in production.",
                  no_args_is_help=True)

Traces = Annotated[list[Path], typer.Option("--trace", help="Mooncake JSON-lines trace, or an Azure CSV (no reuse); "
                                                            "again for more.")]
BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens a hash id of the trace stands for.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")]
PrefillNodes = Annotated[int, typer.Option("--prefill", help="Prefill nodes.")]
DecodeNodes = Annotated[int, typer.Option("--decode", help="Decode nodes.")]
Coupled = Annotated[int, typer.Option(min=0, help="Instances that do both, instead of prefill and decode nodes.")]
PrefixCache = Annotated[bool, typer.Option("--prefix-cache", help="Coupled instances reuse prefixes.")]
ChunkTokens = Annotated[int, typer.Option(min=0, help="Coupled instances prefill in chunks of so many tokens; "
                                                      "0: whole prompts first.")]
Pipeline = Annotated[int, typer.Option(help="Prefill nodes that work as one, each chunk of a prompt passing through "
                                            "all of them.")]
ProfileName = Annotated[str, typer.Option("--profile", help="What a node costs and holds: a name or a .json file.")]
NicGbps = Annotated[float | None, typer.Option(help="Network of a node, each way; the profile's unless given.")]
DramTokens = Annotated[int | None, typer.Option(min=0, help="Tokens of KV a prefill node's DRAM caches; the "
                                                            "profile's unless given.")]
SsdTokens = Annotated[int, typer.Option(min=0, help="Tokens of KV on a prefill node's SSD.")]
PolicyName = Annotated[str, typer.Option("--policy", help=f"One of {', '.join(POLICIES)}.")]
AdmissionName = Annotated[str, typer.Option("--admission", help=(
    f"One of {', '.join(ADMISSIONS)}; {OURS} goes by its own rules unless it is none."))]
Queue = Annotated[str, typer.Option(help=f"Order in prefill queues, one of {', '.join(ORDERS)}; unless given "
                                         f"bounded for {OURS} and fcfs for others; aged:0.1 and "
                                         "bounded:20:40 set what waiting counts and what bounds it.")]
RateScale = Annotated[float, typer.Option(help="2 sends twice as fast as the trace did.")]
TtftSlo = Annotated[str, typer.Option(help="Bound on TTFT: like 30s, or 1s+3x for a second and three times the "
                                           "prompt's own uncached prefill.")]
TbtSlo = Annotated[str, typer.Option(help="Bound on TBT, like 100ms.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn: same seed, same decisions.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file too.")]
Out = Annotated[Path | None, typer.Option(help="Folder for page, figures and numbers; "
                                               "load/results/sim-<what>-<time> unless given.")]

_P = ParamSpec("_P")


def _command(name: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Registers a command whose unreadable traces end with exit code 2."""
    def register(function: Callable[_P, None]) -> Callable[_P, None]:
        @wraps(function)
        def run(*arguments: _P.args, **options: _P.kwargs) -> None:
            try:
                function(*arguments, **options)
            except TraceError as error:
                sys.stderr.write(f"moonbus: {error}\n")
                raise typer.Exit(_BAD_TRACE) from error

        app.command(name)(run)
        return run

    return register


@_command("run")
def run_command(
    trace: Annotated[Path, typer.Option(help="Mooncake JSON-lines trace, or an Azure CSV (no reuse).")],
    block_tokens: BlockTokens = MOONCAKE_BLOCK_TOKENS, limit: Limit = None, prefill: PrefillNodes = 8,
    decode: DecodeNodes = 8, coupled: Coupled = 0, prefix_cache: PrefixCache = False, chunk_tokens: ChunkTokens = 0,
    pipeline: Pipeline = 1, profile: ProfileName = "a800-llama3-70b", nic_gbps: NicGbps = None,
    dram_tokens: DramTokens = None, ssd_tokens: SsdTokens = 0, policy: PolicyName = OURS,
    admission: AdmissionName = "none", queue: Queue = "", rate_scale: RateScale = 1.0,
    ttft_slo: TtftSlo = "30s", tbt_slo: TbtSlo = "100ms",
    repeat: Annotated[int, typer.Option(min=1, help="The trace so many times, each time with fresh ids.")] = 1,
    conductors: Annotated[int, typer.Option(help="Conductors that share the requests.")] = 1,
    message_delay: Annotated[str, typer.Option(help="Time a message takes.")] = "500us",
    fault: Annotated[list[str] | None, typer.Option(
        help="What goes wrong, like crash:prefill-2@100-160, slow:prefill-3@100-400x2.5, cut:decode-1@50-60, "
             "lose:all@100-200x0.02; again for more.")] = None,
    seed: Seed = 0, json: Json = None, out: Out = None,
) -> None:
    """Simulate one run and report it.

    Example: moonbus sim run --trace conversation_trace.jsonl --prefill 8 --decode 8 --policy mooncake_a1
    """
    options = RunOptions(
        profile=profile, prefill=prefill, decode=decode, coupled=coupled, prefix_cache=prefix_cache,
        chunk_tokens=chunk_tokens, pipeline=pipeline, nic_gbps=nic_gbps, dram_tokens=dram_tokens,
        ssd_tokens=ssd_tokens, policy=policy,
        admission=admission, queue=queue, rate_scale=rate_scale, ttft_slo=ttft_slo,
        tbt_slo_s=_seconds("--tbt-slo", tbt_slo), repeat=repeat, conductors=conductors,
        message_delay_s=_seconds("--message-delay", message_delay), seed=seed,
        faults=tuple(parse_fault(text) for text in fault or ()))
    plots.require()
    read = load_trace(trace, limit=limit, block_tokens=block_tokens)
    with _progress() as bar:
        result = simulate(read, options, progress=bar)
    page = Page(title=f"{label(read.name)} at {rate_scale:g}x, {_what(options)}", facts=_facts(options),
                tables=[_summary_table({_what(options): result})])
    page.figures = {
        "latency": ("Time to first token and time between tokens", figures.distributions({_what(options): result})),
        "load": ("Load of the two pools over time", figures.load_curve(result)),
        "lengths": ("Time to first token by prompt length", figures.lengths(result)),
    }
    _finish(out, f"{read.name}-{_what(options)}", page, run_data(result), json)


@_command("compare")
def compare_command(
    trace: Traces,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="Again for more; all unless given.")] = None,
    rate_scale: Annotated[list[float] | None, typer.Option(help="Again for more; 1 unless given.")] = None,
    block_tokens: BlockTokens = MOONCAKE_BLOCK_TOKENS, limit: Limit = None, prefill: PrefillNodes = 8,
    decode: DecodeNodes = 8, profile: ProfileName = "a800-llama3-70b", nic_gbps: NicGbps = None,
    dram_tokens: DramTokens = None, ssd_tokens: SsdTokens = 0, admission: AdmissionName = "none",
    queue: Queue = "", ttft_slo: TtftSlo = "30s", tbt_slo: TbtSlo = "100ms", seed: Seed = 0, json: Json = None,
    out: Out = None,
) -> None:
    """Run policies over traces on the same cluster and set them side by side.

    Example: moonbus sim compare --trace conversation_trace.jsonl --policy moonbus --policy mooncake_a1
    """
    plots.require()
    base = RunOptions(profile=profile, prefill=prefill, decode=decode, nic_gbps=nic_gbps, dram_tokens=dram_tokens,
                      ssd_tokens=ssd_tokens, admission=admission, queue=queue, ttft_slo=ttft_slo,
                      tbt_slo_s=_seconds("--tbt-slo", tbt_slo), seed=seed)
    page, data = Page(title="Policies side by side", facts=_facts(base)), []
    names, columns = policy or list(POLICIES), {}
    for path in trace:
        read = load_trace(path, limit=limit, block_tokens=block_tokens)
        for rate in rate_scale or [1.0]:
            results: dict[str, Result] = {}
            for name in names:
                with _progress(f"{read.name} {rate:g}x {name}") as bar:
                    results[name] = simulate(read, replace(base, policy=name, rate_scale=rate), progress=bar)
            columns[f"{label(read.name)} {rate:g}x"] = results
            page.tables.append(_summary_table(results, title=f"{label(read.name)} at {rate:g}x"))
            page.figures[f"{read.name}-{rate:g}"] = (f"{label(read.name)} at {rate:g}x", figures.distributions(results))
            data += [run_data(result) for result in results.values()]
    page.tables.insert(0, Table("Mean TTFT, s / inside both bounds", ("policy", *columns), [
        (name, *(f"{results[name].summary.ttft_s.mean:.2f} / {results[name].summary.slo_share:.1%}"
                 for results in columns.values())) for name in names]))
    _finish(out, "compare", page, {"runs": data}, json)


@_command("knee")
def knee_command(
    trace: Traces,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="Again for more; ours unless given.")] = None,
    good: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of requests inside both bounds.")] = GOOD_SHARE,
    block_tokens: BlockTokens = MOONCAKE_BLOCK_TOKENS, limit: Limit = None, prefill: PrefillNodes = 8,
    decode: DecodeNodes = 8, coupled: Coupled = 0, prefix_cache: PrefixCache = False, chunk_tokens: ChunkTokens = 0,
    pipeline: Pipeline = 1, profile: ProfileName = "a800-llama3-70b", nic_gbps: NicGbps = None,
    dram_tokens: DramTokens = None, ssd_tokens: SsdTokens = 0, admission: AdmissionName = "none",
    queue: Queue = "", rate_scale: RateScale = 1.5, ttft_slo: TtftSlo = "30s", tbt_slo: TbtSlo = "100ms",
    seed: Seed = 0, json: Json = None, out: Out = None,
) -> None:
    """Find the highest rate at which enough requests are inside both bounds; --rate-scale is the first guess.

    Example: moonbus sim knee --trace conversation_trace.jsonl --policy mooncake_a1 --ttft-slo 1s+3x
    """
    plots.require()
    base = RunOptions(profile=profile, prefill=prefill, decode=decode, coupled=coupled, prefix_cache=prefix_cache,
                      chunk_tokens=chunk_tokens, pipeline=pipeline, nic_gbps=nic_gbps, dram_tokens=dram_tokens,
                      ssd_tokens=ssd_tokens, admission=admission, queue=queue, ttft_slo=ttft_slo, rate_scale=rate_scale,
                      tbt_slo_s=_seconds("--tbt-slo", tbt_slo), seed=seed)
    console = Console(stderr=True, highlight=False)
    rows, data = [], []
    names = policy or [OURS]
    reads = [load_trace(path, limit=limit, block_tokens=block_tokens) for path in trace]
    found: dict[str, list[float | None]] = {name: [] for name in names}
    for read in reads:
        for name in names:
            knee = find_knee(read, replace(base, policy=name), good_share=good, tell=console.print)
            found[name].append(knee.rate_scale)
            rows.append((label(read.name), _what(knee.result.options), f"{knee.rate_scale:.2f}",
                         f"{knee.result.summary.slo_share:.1%}", f"{knee.result.summary.ttft_s.mean:.2f}",
                         f"{knee.result.summary.long_ttft_p99_s:.1f}"))
            data.append({"rate_scale": knee.rate_scale, "tried": knee.tried, **run_data(knee.result)})
    page = Page(title=f"Highest rate with {good:.0%} inside TTFT {ttft_slo} and TBT {tbt_slo}", facts=_facts(base))
    heads = ("trace", "policy", "rate", "inside both", "mean TTFT, s", "long prompts' P99, s")
    page.tables = [Table("Knees", heads, rows)]
    page.figures = {"knees": (page.title, figures.bars([label(read.name) for read in reads], found,
                                                       unit="times the trace's rate"))}
    _finish(out, "knee", page, {"knees": data}, json)


@_command("paper")
def paper_command(
    traces: Annotated[Path, typer.Option(help=f"Folder with {', '.join(f'{name}.jsonl' for name in paper.TRACES)}.")],
    part: Annotated[list[str] | None, typer.Option(
        help=f"One of {', '.join(paper.PARTS)}; again for more, all unless given.")] = None,
    profile: ProfileName = "a800-llama3-70b", seed: Seed = 0, limit: Limit = None, json: Json = None, out: Out = None,
) -> None:
    """Set what the Mooncake papers published beside simulations of their policy and of ours.

    Example: moonbus sim paper --traces traces --part fig5 --part fig10
    """
    plots.require()
    for name in part or ():
        if name not in paper.PARTS:
            raise UserError(f"--part {name}: there are {', '.join(paper.PARTS)}")
    reads = {name: load_trace(traces / f"{name}.jsonl", limit=limit) for name in paper.TRACES}
    console = Console(stderr=True, highlight=False)
    runs = paper.Paper(reads, RunOptions(profile=profile, seed=seed), console.print)
    page = Page(title="Published and simulated")
    data: dict[str, object] = {}
    for name in part or paper.PARTS:
        outcome = runs.run(name)
        page.tables += outcome.tables
        page.figures |= outcome.figures
        data |= outcome.data
    _finish(out, "paper", page, data, json)


@_command("fit")
def fit_command(
    directory: Annotated[Path, typer.Argument(help="Folder that `moonbus load run` wrote.")],
    to: Annotated[Path, typer.Option(help="Profile to write, a .json file; its name is the profile's.")],
    like: Annotated[str, typer.Option(help="Profile for what a run cannot tell: geometry, memory sizes.")] =
    "a800-llama3-70b",
) -> None:
    """Fit a profile to the records of a live run.

    Example: moonbus sim fit load/results/conversation_trace-20260101-120000 --to our-node.json
    """
    info, records = read_run(directory)
    source = f"Fitted to {len(records)} requests of {info.trace} on {info.model}, {directory.name}."
    profile, fits = fit_profile(records, read_profile(like), name=to.stem, source=source)
    to.parent.mkdir(parents=True, exist_ok=True)
    write_file(to, msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    grid = Grid("model", "observations", "median error")
    for one in fits:
        grid.add_row(one.model, str(one.observations), f"{one.median_error:.1%}")
    console = Console()
    console.print(grid)
    console.print(f"profile: {to}; everything else is that of {like}", soft_wrap=True, highlight=False)


def label(name: str) -> str:
    """A trace's name as it is shown; the stand-in says that it is one."""
    return f"{name} (synthetic stand-in)" if name.startswith(_STAND_IN) else name


def run_data(result: Result) -> dict[str, Any]:
    """One run as JSON: the summary's fields, and what was run."""
    options = {name: value for name, value in vars(result.options).items() if name != "faults"}
    options["faults"] = [vars(fault) for fault in result.options.faults]
    return {**msgspec.to_builtins(result.summary), "trace": result.trace, "options": options}


def _what(options: RunOptions) -> str:
    if options.coupled:
        kind = "chunked" if options.chunk_tokens else "prefill first"
        return f"{options.coupled} coupled, {kind}{', prefix cache' if options.prefix_cache else ''}"
    queue = f", {options.queue}" if options.queue else ""
    return f"{options.policy}{queue}"


def _facts(options: RunOptions) -> list[tuple[str, str]]:
    nodes = f"{options.coupled} coupled" if options.coupled else f"{options.prefill} prefill, {options.decode} decode"
    return [("nodes", nodes), ("profile", options.profile), ("admission", options.admission),
            ("bounds", f"TTFT {options.ttft_slo}, TBT {format_seconds(options.tbt_slo_s)}"),
            ("seed", str(options.seed))]


def _summary_table(results: Mapping[str, Result], *, title: str = "Summary") -> Table:
    heads = ("", "completed", "turned away", "TTFT mean", "p50", "p90", "p99", "TBT mean", "p99", "inside both",
             "reused", "prefill, GPU s", "wasted, s", "pulled, TB")
    rows = []
    for name, result in results.items():
        s = result.summary
        rows.append((name, f"{s.completed}", f"{sum(s.rejected.values()) + s.failed}", f"{s.ttft_s.mean:.2f}",
                     f"{s.ttft_s.p50:.2f}", f"{s.ttft_s.p90:.2f}", f"{s.ttft_s.p99:.2f}", f"{s.tbt_s.mean:.3f}",
                     f"{s.tbt_s.p99:.3f}", f"{s.slo_share:.1%}", f"{s.hit_tokens / max(s.prompt_tokens, 1):.1%}",
                     f"{s.prefill_mean_s:.3f}", f"{s.wasted_prefill_s:.0f}", f"{s.pulled_bytes / 1e12:.2f}"))
    return Table(title, heads, rows, note="Seconds. Inside both: completed within both bounds, of all requests.")


def _finish(out: Path | None, what: str, page: Page, data: Mapping[str, Any], json: Path | None) -> None:
    """Writes everything, then shows the tables."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    directory = out or Path("load/results") / f"sim-{what.replace(' ', '_').replace(',', '')}-{stamp}"
    write(directory, page, data, json=json)
    console = Console()
    for table in page.tables:
        if len(table.rows) == 1:  # one run reads better downwards
            grid = Grid("", table.rows[0][0], title=table.title, title_justify="left")
            for head, cell in zip(table.heads[1:], table.rows[0][1:], strict=True):
                grid.add_row(head, cell)
        else:
            grid = Grid(*table.heads, title=table.title, title_justify="left")
            for row in table.rows:
                grid.add_row(*row)
        console.print(grid)
        if table.note:
            console.print(table.note, highlight=False)
    console.print(f"report: {directory / PAGE_FILE}", soft_wrap=True, highlight=False)


@contextmanager
def _progress(what: str = "requests") -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda ended, expected: progress.update(task, completed=ended, total=expected)


def _seconds(name: str, text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
