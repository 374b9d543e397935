"""`moonbus sim`: runs of the simulated cluster. Mounted by the `moonbus` command.

A trace that cannot be read ends with exit code 2, before anything is written; other mistakes with 1.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import msgspec
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as Grid

from load import plots
from load.record import read_run
from load.sim import figures, paper
from load.sim.experiment import ORDERS, Result, RunOptions, check, simulate
from load.sim.faults import parse_fault
from load.sim.fit import fit_profile
from load.sim.many import (
    GOOD_SHARE,
    HIGH,
    LOW,
    Knee,
    Ran,
    Run,
    Search,
    Shelf,
    compare,
    find_all,
    read_source,
)
from load.sim.outcome import Summary
from load.sim.page import PAGE_FILE, Page, Table, cell, write
from load.sim.pool import Tick, usable_cores
from load.sim.profile import read_profile
from load.workload.traces import MOONCAKE_BLOCK_TOKENS, Source, TraceError
from services.conductor.core.policies.registry import ADMISSIONS, OURS, POLICIES
from shared.errors import UserError
from shared.files import check_file, check_folder, make_folder, write_file
from shared.store import policies
from shared.units import format_seconds, parse_seconds
from shared.version import product_version

_BAD_TRACE = 2
_INTERRUPTED = 130
_STAND_IN = "toolagent_like"
_RUNS = "runs"
"""Of a grid's folder: where its finished runs are kept."""
_MOST_COLUMNS = 10
"""Of a table on the terminal."""
_ANY_WIDTH = 10_000
_SEEDS = "Means over the seeds."

app = typer.Typer(help="Simulate a cluster on a trace, with the conductor that runs in production.",
                  no_args_is_help=True)

Traces = Annotated[list[Path], typer.Option("--trace", help="Mooncake JSON-lines trace, or an Azure CSV (no reuse); "
                                                            "again for more.")]
BlockTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens a hash id of the trace stands for.")]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N requests.")]
PrefillNodes = Annotated[int, typer.Option("--prefill", help="Prefill nodes.")]
DecodeNodes = Annotated[int, typer.Option("--decode", help="Decode nodes.")]
Coupled = Annotated[int, typer.Option(min=0, metavar="N", help="Instances that do both, instead of prefill and decode "
                                                               "nodes.")]
PrefixCache = Annotated[bool, typer.Option("--prefix-cache", help="Coupled instances reuse prefixes.")]
ChunkTokens = Annotated[int, typer.Option(min=0, metavar="N", help="Coupled instances prefill in chunks of so many "
                                                                   "tokens; 0: whole prompts first.")]
Pipeline = Annotated[int, typer.Option(help="Prefill nodes that work as one, each chunk of a prompt passing through "
                                            "all of them.")]
Elastic = Annotated[bool | None, typer.Option("--elastic/--no-elastic", help=(
    f"Nodes prefill or decode as the load needs; on for {OURS}, which alone can."), show_default=False)]
ProfileName = Annotated[str, typer.Option("--profile", help="What a node costs and holds: a name or a .json file.")]
NicGbps = Annotated[float | None, typer.Option(help="Network of a node, each way; the profile's unless given.")]
DramTokens = Annotated[int | None, typer.Option(min=0, metavar="N", help="Tokens of KV a prefill node's DRAM caches; "
                                                                         "the profile's unless given.")]
SsdTokens = Annotated[int, typer.Option(min=0, metavar="N", help="Tokens of KV on a prefill node's SSD.")]
CachePolicy = Annotated[str, typer.Option(help=f"What leaves a full cache first: {', '.join(policies.POLICIES)}.")]
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
Conductors = Annotated[int, typer.Option(help="Conductors that share the requests.")]
MessageDelay = Annotated[str, typer.Option(help="Time a message takes.")]
Jobs = Annotated[int, typer.Option(min=0, metavar="N", help="Processes; one a core if 0.")]
Resume = Annotated[bool, typer.Option("--resume", help=(
    "Take the runs that an interrupted command of this version left in --out, and make those that are missing."))]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn: same seed, same decisions.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", help="Of everything that is drawn; again for more, 0 unless "
                                                                "given.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file too.")]
Out = Annotated[Path | None, typer.Option(help="Folder for page, figures and numbers; unless given "
                                               "sim-<what>-<time> in load/results.")]

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
    pipeline: Pipeline = 1, elastic: Elastic = None, profile: ProfileName = "a800-llama3-70b", nic_gbps: NicGbps = None,
    dram_tokens: DramTokens = None, ssd_tokens: SsdTokens = 0, cache_policy: CachePolicy = policies.DEFAULT,
    policy: PolicyName = OURS, admission: AdmissionName = "none", queue: Queue = "", rate_scale: RateScale = 1.0,
    ttft_slo: TtftSlo = "30s", tbt_slo: TbtSlo = "100ms",
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="The trace so many times, each time with fresh "
                                                                 "ids.")] = 1,
    conductors: Conductors = 1, message_delay: MessageDelay = "500us",
    fault: Annotated[list[str] | None, typer.Option(
        metavar="FAULT", help="What goes wrong, like crash:prefill-2@100-160, slow:prefill-3@100-400x2.5, "
                              "cut:decode-1@50-60, lose:all@100-200x0.02; again for more.")] = None,
    seed: Seed = 0, json: Json = None, out: Out = None,
) -> None:
    """Simulate one run and report it.

    Example: moonbus sim run --trace conversation_trace.jsonl --prefill 8 --decode 8 --policy mooncake_a1
    """
    options = RunOptions(
        profile=profile, prefill=prefill, decode=decode, coupled=coupled, prefix_cache=prefix_cache,
        chunk_tokens=chunk_tokens, pipeline=pipeline, elastic=elastic, nic_gbps=nic_gbps, dram_tokens=dram_tokens,
        ssd_tokens=ssd_tokens, cache_policy=cache_policy, policy=policy,
        admission=admission, queue=queue, rate_scale=rate_scale, ttft_slo=ttft_slo,
        tbt_slo_s=_seconds("--tbt-slo", tbt_slo), repeat=repeat, conductors=conductors,
        message_delay_s=_seconds("--message-delay", message_delay), seed=seed,
        faults=tuple(parse_fault(text) for text in fault or ()))
    plots.require()
    source = Source(str(trace), block_tokens, limit)
    read = source.read()
    check(options, read)
    directory = _directory(out, f"{read.name}-{_what(options)}", json)
    with _progress() as bar:
        result = simulate(read, options, progress=bar)
    table = result.outcomes.table()
    page = Page(title=f"{label(read.name)} at {rate_scale:g}x, {_what(options)}",
                facts=_facts(options, limit=limit, block_tokens=block_tokens),
                tables=[_summary_table({_what(options): result.summary})])
    page.figures = {
        "latency": ("Time to first token and time between tokens", figures.distributions(
            {_what(options): (table[:, 3], table[:, 4])})),
        "load": ("Load of the two pools over time", figures.load_curve(result)),
        "lengths": ("Time to first token by prompt length", figures.lengths(result)),
    }
    _finish(directory, page, run_data(result, source), json)


@_command("compare")
def compare_command(
    trace: Traces,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="Again for more; all unless given.")] = None,
    rate_scale: Annotated[list[float] | None, typer.Option(help="Again for more; 1 unless given.")] = None,
    block_tokens: BlockTokens = MOONCAKE_BLOCK_TOKENS, limit: Limit = None, prefill: PrefillNodes = 8,
    decode: DecodeNodes = 8, pipeline: Pipeline = 1, elastic: Elastic = None, profile: ProfileName = "a800-llama3-70b",
    nic_gbps: NicGbps = None, dram_tokens: DramTokens = None, ssd_tokens: SsdTokens = 0,
    cache_policy: CachePolicy = policies.DEFAULT, admission: AdmissionName = "none", queue: Queue = "",
    ttft_slo: TtftSlo = "30s", tbt_slo: TbtSlo = "100ms",
    conductors: Conductors = 1, message_delay: MessageDelay = "500us", seed: Seeds = None, jobs: Jobs = 0,
    resume: Resume = False, json: Json = None, out: Out = None,
) -> None:
    """Run policies over traces on the same cluster and set them side by side.

    Example: moonbus sim compare --trace conversation_trace.jsonl --policy moonbus --policy mooncake_a1
    """
    plots.require()
    base = RunOptions(profile=profile, prefill=prefill, decode=decode, pipeline=pipeline, elastic=elastic,
                      nic_gbps=nic_gbps, dram_tokens=dram_tokens, ssd_tokens=ssd_tokens,
                      cache_policy=cache_policy, admission=admission,
                      queue=queue, ttft_slo=ttft_slo, tbt_slo_s=_seconds("--tbt-slo", tbt_slo), conductors=conductors,
                      message_delay_s=_seconds("--message-delay", message_delay))
    names, rates, seeds = policy or list(POLICIES), rate_scale or [1.0], seed or [0]
    directory = _directory(out, "compare", json, resume=resume)
    bases = [replace(base, policy=name, rate_scale=rate) for name in names for rate in rates]
    places = [(source, rate, name, one_seed) for source in _sources(trace, limit, block_tokens, bases)
              for rate in rates for name in names for one_seed in seeds]
    runs = [Run(source, replace(base, policy=name, rate_scale=rate, seed=one_seed))
            for source, rate, name, one_seed in places]
    with _grid(directory, "runs", len(runs), resume=resume) as (shelf, ended, tick):
        made = {}
        for position, ran in compare(runs, shelf, jobs=jobs or usable_cores(), tick=tick):
            made[places[position]] = ran
            source, rate, name, one_seed = places[position]
            ended(f"{source.name} {rate:g}x {name} seed {one_seed}: mean TTFT "
                  f"{cell(ran.summary.ttft_s.mean, '.2f')} s")
    page = Page(title="Policies side by side", facts=_facts(
        base, seeds, names, limit=limit, block_tokens=block_tokens))
    columns: dict[str, dict[str, list[Ran]]] = {}
    for place in places:
        source, rate, name, _ = place
        columns.setdefault(f"{label(source.name)} {rate:g}x", {}).setdefault(name, []).append(made[place])
    page.tables = [Table("Mean TTFT, s / inside both bounds", ("policy", *columns), [
        (name, *(f"{cell(_mean(rans[name], lambda s: s.ttft_s.mean), '.2f')} / "
                 f"{cell(_mean(rans[name], lambda s: s.slo_share), '.1%')}"
                 for rans in columns.values())) for name in names], note=_SEEDS if len(seeds) > 1 else "")]
    for title, rans in columns.items():
        page.tables.append(_summary_table({f"{name}{f', seed {seeds[i]}' if len(seeds) > 1 else ''}": ran.summary
                                           for name, each in rans.items() for i, ran in enumerate(each)}, title=title))
        page.figures[title.split()[0] + "-" + title.split()[-1]] = (
            title, figures.distributions({name: (each[0].ttft_s, each[0].tbt_s) for name, each in rans.items()}))
    if len(rates) > 1:
        for path in dict.fromkeys(trace):
            means = {name: [_mean(columns[f"{label(path.stem)} {rate:g}x"][name], lambda s: s.ttft_s.mean)
                            for rate in rates] for name in names}
            page.figures[f"{path.stem}-rates"] = (f"{label(path.stem)}: mean TTFT over the rate",
                                                  figures.over_rate(rates, means))
    _finish(directory, page, {"runs": [ran_data(made[place]) for place in places]}, json)


@_command("knee")
def knee_command(
    trace: Traces,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="Again for more; ours unless given.")] = None,
    good: Annotated[float, typer.Option(min=0.01, max=1.0, metavar="SHARE", help=(
        "Share of requests inside both bounds."))] = GOOD_SHARE,
    block_tokens: BlockTokens = MOONCAKE_BLOCK_TOKENS, limit: Limit = None, prefill: PrefillNodes = 8,
    decode: DecodeNodes = 8, coupled: Coupled = 0, prefix_cache: PrefixCache = False, chunk_tokens: ChunkTokens = 0,
    pipeline: Pipeline = 1, elastic: Elastic = None, profile: ProfileName = "a800-llama3-70b",
    nic_gbps: NicGbps = None, dram_tokens: DramTokens = None, ssd_tokens: SsdTokens = 0,
    cache_policy: CachePolicy = policies.DEFAULT, admission: AdmissionName = "none", queue: Queue = "",
    rate_scale: RateScale = 1.5,
    ttft_slo: Annotated[list[str] | None, typer.Option(help="Bound on TTFT: like 30s, or 1s+3x for a second and three "
                                                            "times the prompt's own uncached prefill; again for more, "
                                                            "30s unless given.")] = None,
    tbt_slo: TbtSlo = "100ms", conductors: Conductors = 1, message_delay: MessageDelay = "500us", seed: Seeds = None,
    jobs: Jobs = 0, resume: Resume = False, json: Json = None, out: Out = None,
) -> None:
    """Find the highest rate at which enough requests are inside both bounds; --rate-scale is the first guess.

    Example: moonbus sim knee --trace conversation_trace.jsonl --policy mooncake_a1 --ttft-slo 30s --ttft-slo 1s+3x
    """
    plots.require()
    bounds = tuple(dict.fromkeys(ttft_slo or ["30s"]))
    base = RunOptions(profile=profile, prefill=prefill, decode=decode, coupled=coupled, prefix_cache=prefix_cache,
                      chunk_tokens=chunk_tokens, pipeline=pipeline, elastic=elastic, nic_gbps=nic_gbps,
                      dram_tokens=dram_tokens, ssd_tokens=ssd_tokens, cache_policy=cache_policy,
                      admission=admission, queue=queue,
                      rate_scale=rate_scale, ttft_slo=bounds[0], tbt_slo_s=_seconds("--tbt-slo", tbt_slo),
                      conductors=conductors, message_delay_s=_seconds("--message-delay", message_delay))
    names, seeds = policy or [OURS], seed or [0]
    directory = _directory(out, "knee", json, resume=resume)
    bases = [replace(base, policy=name, ttft_slo=bound) for name in names for bound in bounds]
    places = [(source, name, one_seed) for source in _sources(trace, limit, block_tokens, bases)
              for name in names for one_seed in seeds]
    searches = [Search(source, replace(base, policy=name, seed=one_seed), bounds, good_share=good)
                for source, name, one_seed in places]
    with _grid(directory, "searches", len(searches), resume=resume) as (shelf, ended, tick):
        brought: dict[int, list[Knee]] = {}
        for position, knees in find_all(searches, shelf, jobs=jobs or usable_cores(), tick=tick):
            brought[position] = knees
            source, name, one_seed = places[position]
            told = ", ".join(f"{_rate([knee])}x for {knee.bound}" for knee in knees)
            ended(f"{source.name} {name} seed {one_seed}: {told}")
    found: dict[tuple[str, str, str], list[Knee]] = {}
    for position, (source, name, _) in enumerate(places):
        for knee in brought[position]:
            found.setdefault((source.name, name, knee.bound), []).append(knee)
    page = Page(title=f"Highest rate with {good:.0%} inside TTFT {' or '.join(bounds)} and TBT {tbt_slo}",
                facts=[(name, f"TTFT {' or '.join(bounds)}, TBT {tbt_slo}" if name == "bounds" else value)
                       for name, value in _facts(replace(base, rate_scale=1.0), seeds, names, limit=limit,
                                                     block_tokens=block_tokens)])
    stems = list(dict.fromkeys(path.stem for path in trace))
    for bound in bounds:
        rows = []
        for stem, name in itertools.product(stems, names):
            first = found[stem, name, bound][0]
            ran, is_there = first.ran, first.rate_scale is not None
            each = sorted(found[stem, name, bound], key=lambda knee: knee.rate_scale or 0.0)
            rows.append((label(stem), _what(ran.run.options), _rate(each),
                         f"{_rate(each[:1])} to {_rate(each[-1:])}" if len(each) > 1 else "",
                         *((f"{ran.shares[bound]:.1%}", cell(ran.summary.ttft_s.mean, ".2f"),
                            cell(ran.summary.long_ttft_p99_s, ".1f")) if is_there else ("–", "–", "–"))))
        heads = ("trace", "policy", "rate", "over the seeds", "inside both", "mean TTFT, s", "long prompts' P99, s")
        page.tables.append(Table(f"TTFT {bound}", heads, rows, note=(
            "Times the trace's rate, to 2 %. The last three columns are of the first seed's run at its knee. "
            f"Searched from {LOW:g} to {HIGH:g}: below {LOW:g} not even that rate leaves {good:.0%} inside, "
            f"with ≥ the highest still does.")))
        means: dict[str, list[float | None]] = {name: [_mean_rate(found[stem, name, bound]) for stem in stems]
                                                for name in names}
        page.figures[f"knees-{bound.replace('+', '-')}"] = (f"Knees under TTFT {bound}, TBT {tbt_slo}", figures.bars(
            [label(stem) for stem in stems], means, unit="times the trace's rate"))
    _finish(directory, page, {"knees": [
        {"bound": knee.bound, "rate_scale": knee.rate_scale, "share": knee.ran.shares[knee.bound],
         "is_open": knee.is_open, "tried": knee.tried, **ran_data(knee.ran)}
        for each in found.values() for knee in each]}, json)


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
    reads = {name: Source(str(traces / f"{name}.jsonl"), limit=limit).read() for name in paper.TRACES}
    directory = _directory(out, "paper", json)
    console = Console(stderr=True, highlight=False)
    runs = paper.Paper(reads, RunOptions(profile=profile, seed=seed), console.print)
    page = Page(title="Published and simulated", facts=[("profile", profile), ("seed", str(seed))])
    if limit is not None:
        page.title = f"{page.title}, of the first {limit} requests"
        page.facts.append(("limit", f"the first {limit} requests of each trace; published is what whole ones brought"))
    page.facts.append(_made())
    data: dict[str, object] = {"options": {"profile": profile, "seed": seed, "limit": limit}}
    for name in part or paper.PARTS:
        outcome = runs.run(name).told(paper.unusual(name, runs.base, limit))
        page.tables += outcome.tables
        page.figures |= outcome.figures
        data |= outcome.data
    _finish(directory, page, data, json)


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
    model = read_profile(like)
    profile, fits = fit_profile(records, model, name=to.stem, source=source)
    make_folder(to.parent)
    write_file(to, msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    grid = Grid("model", "observations", "median error")
    for one in fits:
        grid.add_row(one.model, str(one.observations), f"{one.median_error:.1%}")
    console = Console()
    console.print(grid)
    for warning in (text for one in fits for text in one.warnings()):
        console.print(f"warning: {warning}", soft_wrap=True, highlight=False)
    taken = [f"{name} {value}" for name, value in msgspec.structs.asdict(profile).items()
             if value == getattr(model, name)]
    console.print(f"taken from {like}, since the run does not tell: {', '.join(taken)}", soft_wrap=True,
                  highlight=False)
    console.print(f"profile: {to}", soft_wrap=True, highlight=False)


def label(name: str) -> str:
    """A trace's name as it is shown; the stand-in says that it is one."""
    return f"{name} (synthetic stand-in)" if name.startswith(_STAND_IN) else name


def run_data(result: Result, source: Source) -> dict[str, Any]:
    """One run as JSON: the summary's fields, and what was run."""
    return _data(result.summary, source, result.options)


def ran_data(ran: Ran) -> dict[str, Any]:
    """The same of a run that was kept."""
    return _data(ran.summary, ran.run.source, ran.run.options)


def _data(summary: Summary, source: Source, options: RunOptions) -> dict[str, Any]:
    return {**msgspec.to_builtins(summary), "trace": source.name, "limit": source.limit,
            "block_tokens": source.block_tokens, "options": msgspec.to_builtins(options)}


def _mean(rans: Sequence[Ran], value: Callable[[Summary], float | None]) -> float | None:
    """Over the runs that have one."""
    values = [one for ran in rans if (one := value(ran.summary)) is not None]
    return sum(values) / len(values) if values else None


def _mean_rate(knees: Sequence[Knee]) -> float | None:
    """Over the seeds; ``None`` when one has no knee."""
    rates = [knee.rate_scale for knee in knees if knee.rate_scale is not None]
    return sum(rates) / len(rates) if len(rates) == len(knees) else None


def _rate(knees: Sequence[Knee]) -> str:
    """The mean of the knees, as it is shown; a dash when only some of them are there."""
    mean = _mean_rate(knees)
    if mean is None:
        return f"below {LOW:g}" if all(knee.rate_scale is None for knee in knees) else "–"
    return f"{'≥ ' if any(knee.is_open for knee in knees) else ''}{mean:.2f}"


def _what(options: RunOptions) -> str:
    if options.coupled:
        kind = "chunked" if options.chunk_tokens else "prefill first"
        return f"{options.coupled} coupled, {kind}{', prefix cache' if options.prefix_cache else ''}"
    queue = f", {options.queue}" if options.queue else ""
    return f"{options.policy}{queue}"


def _facts(options: RunOptions, seeds: Sequence[int] = (), names: Sequence[str] = (), *, limit: int | None,
           block_tokens: int) -> list[tuple[str, str]]:
    """What was run: what always matters, and every other option that is not the usual one.

    ``names`` are the policies that ``options`` were run with, when they are several.
    """
    each = [replace(options, policy=name) for name in names or (options.policy,)]
    if options.coupled:
        facts = [("nodes", f"{options.coupled} coupled"), ("profile", options.profile)]
    else:
        facts = [("nodes", f"{options.prefill} prefill, {options.decode} decode"), ("profile", options.profile),
                 ("policy", ", ".join(one.policy for one in each)), ("admission", options.admission),
                 ("order in prefill queues", _by_policy(each, lambda one: one.queue_name)),
                 ("roles", _by_policy(each, lambda one: "by need (elastic)" if one.is_elastic else "fixed"))]
    facts += [("bounds", f"TTFT {options.ttft_slo}, TBT {format_seconds(options.tbt_slo_s)}"),
              ("seed", ", ".join(map(str, seeds or (options.seed,))))]
    usual = RunOptions()
    facts += [(name.removesuffix("_s").replace("_", " "), form(getattr(options, name)))
              for name, form in _TOLD.items() if getattr(options, name) != getattr(usual, name)]
    if limit is not None:
        facts.append(("limit", f"the first {limit} requests"))
    if block_tokens != MOONCAKE_BLOCK_TOKENS:
        facts.append(("block tokens", str(block_tokens)))
    return [*facts, _made()]


_TOLD: dict[str, Callable[[Any], str]] = {
    "prefix_cache": lambda is_on: "on" if is_on else "off", "chunk_tokens": str, "pipeline": str,
    "nic_gbps": "{:g}".format, "dram_tokens": "{:,}".format, "ssd_tokens": "{:,}".format, "cache_policy": str,
    "rate_scale": "{:g}x".format, "output_tokens": str, "repeat": "{} times".format, "conductors": str,
    "message_delay_s": format_seconds, "faults": lambda faults: ", ".join(map(str, faults))}
"""{option that a page names where it is not the usual one: its form}."""


def _by_policy(each: Sequence[RunOptions], value: Callable[[RunOptions], str]) -> str:
    found: dict[str, list[str]] = {}
    for options in each:
        found.setdefault(value(options), []).append(options.policy)
    return next(iter(found)) if len(found) == 1 else "; ".join(
        f"{one} for {', '.join(those)}" for one, those in found.items())


def _made() -> tuple[str, str]:
    return "made", f"{datetime.now(UTC):%Y-%m-%d}, moonbus {product_version()}"


def _summary_table(results: Mapping[str, Summary], *, title: str = "Summary") -> Table:
    heads = ("", "completed", "turned away", "TTFT mean", "p50", "p90", "p99", "TBT mean", "p99", "inside both",
             "reused", "prefill, GPU s", "wasted, s", "pulled, TB")
    rows = []
    for name, s in results.items():
        rows.append((name, f"{s.completed}", f"{sum(s.rejected.values()) + s.failed}",
                     *(cell(value, ".2f") for value in (s.ttft_s.mean, s.ttft_s.p50, s.ttft_s.p90, s.ttft_s.p99)),
                     cell(s.tbt_s.mean, ".3f"), cell(s.tbt_s.p99, ".3f"), f"{s.slo_share:.1%}",
                     cell(s.hit_tokens / s.prompt_tokens if s.prompt_tokens else None, ".1%"),
                     f"{s.prefill_mean_s:.3f}", f"{s.wasted_prefill_s:.0f}", f"{s.pulled_bytes / 1e12:.2f}"))
    return Table(title, heads, rows, note="Seconds. Inside both: completed within both bounds, of all requests.")


def _sources(traces: Sequence[Path], limit: int | None, block_tokens: int,
             wanted: Sequence[RunOptions]) -> list[Source]:
    """The traces; raises for those that cannot be read and for options that cannot be, before anything runs."""
    sources = [Source(str(path), block_tokens, limit) for path in dict.fromkeys(traces)]
    for source, options in itertools.product(sources, wanted):
        check(options, read_source(source))
    return sources


def _directory(out: Path | None, what: str, json: Path | None, *, resume: bool = False) -> Path:
    """Where everything goes; raises :class:`UserError` when that or ``json`` cannot be written, before anything runs.

    So it does when there is nothing there to resume.
    """
    if resume and out is None:
        raise UserError("--resume: say with --out FOLDER which folder's runs to go on with")
    if resume and out is not None and not (out / _RUNS).is_dir():
        raise UserError(f"--resume: {out / _RUNS} is no folder, so there is nothing to go on with; leave --resume out "
                        "to begin anew")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    directory = out or Path("load/results") / f"sim-{what.replace(' ', '_').replace(',', '')}-{stamp}"
    check_folder("--out", directory)
    if json is not None and json.parent.absolute() != directory.absolute():  # that one is made when it is written
        check_file("--json", json)
    return directory


def _finish(directory: Path, page: Page, data: Mapping[str, Any], json: Path | None) -> None:
    """Shows the tables and writes everything; what was computed is shown also where it cannot be written."""
    console = Console()
    for table in page.tables:
        if len(table.rows) > 1 and len(table.heads) > _MOST_COLUMNS:
            continue  # only readable on the page
        _show(console, table)
        if table.note:
            console.print(table.note, highlight=False)
    write(directory, page, data, json=json)
    console.print(f"report: {directory / PAGE_FILE}", soft_wrap=True, highlight=False)


def _show(console: Console, table: Table) -> None:
    """As wide as it is where there is room, else with rows and columns exchanged, else a paragraph a row."""
    lines = [table.heads, *table.rows]
    turned = list(zip(*lines, strict=True))
    for first, *others in ((turned,) if len(table.rows) == 1 else (lines, turned)):  # one run reads better downwards
        grid = Grid(*first, title=table.title, title_justify="left")
        for row in others:
            grid.add_row(*row)
        if Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), grid).maximum <= console.width:
            console.print(grid)
            return
    console.print(table.title, style="italic")
    for name, *cells in table.rows:
        told = [f"{head} {text or '–'}" for head, text in zip(table.heads[1:], cells, strict=True)]
        console.print(f"{name}: {', '.join(told)}", highlight=False)


@contextmanager
def _grid(directory: Path, what: str, count: int, *,
          resume: bool) -> Iterator[tuple[Shelf, Callable[[str], None], Tick]]:
    """Where finished runs are kept, whom to tell of each that ended, and of simulated requests; a bar meanwhile."""
    folder = directory / _RUNS
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[requests]:,} requests"))
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=count, requests=0)

        def ended(text: str) -> None:
            progress.console.print(text, soft_wrap=True)
            progress.advance(task)

        def tick(requests: int) -> None:
            progress.update(task, requests=progress.tasks[0].fields["requests"] + requests)

        try:
            yield Shelf(str(folder)), ended, tick
        except KeyboardInterrupt:
            console.print(f"interrupted; the finished runs are in {folder}: --out {directory} --resume goes on",
                          soft_wrap=True)
            raise typer.Exit(_INTERRUPTED) from None


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
