"""The commands `bench-*` and `soak-*` of `moonbus load`; each loads what it measures when it is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop
from rich.console import Console

from shared.errors import UserError
from shared.settings import CommonSettings
from shared.settings import load as load_settings
from shared.units import format_bytes, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from load.bench.rounds import Outcome, Row


_INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class Against(StrEnum):
    """What to measure beside us."""

    IPERF3 = "iperf3"
    MOONCAKE = "mooncake"
    NOTHING = "nothing"


class StoreAgainst(StrEnum):
    """What `bench-store` measures beside us."""

    MOONCAKE = "mooncake"
    NOTHING = "nothing"


class SoakPath(StrEnum):
    """Which path carries the soak."""

    SHM = "shm"
    TCP = "tcp"


def bench_transfer(
    rounds: Annotated[int, typer.Option(min=1, help="Every figure is taken so many times, in turns.")] = 7,
    seconds: Annotated[float, typer.Option(min=0.05, help="Of each figure in each round.")] = 1.0,
    size: Annotated[list[str] | None, typer.Option(
        help="Bytes of a push, like 2MiB; again for more. 64KiB, 2MiB and 64MiB unless given.")] = None,
    only: Annotated[list[str] | None, typer.Option(
        help="Only these lines, like shm, 'tcp*' or '*/2MiB'; again for more.")] = None,
    against: Annotated[list[Against] | None, typer.Option(
        help="What to measure beside us; again for more. iperf3 always is, unless nothing is.")] = None,
    mooncake_python: Annotated[Path | None, typer.Option(
        help="Interpreter that imports Mooncake; an environment is made once in the cache unless given.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all rows to this file.")] = None,
) -> None:
    """Measure the transfer engine beside the machine's limits, and other software, all in one run.

    Example: moonbus load bench-transfer --against iperf3 --against mooncake --json transfer.json

    Two processes on this host push to each other over TCP and in shared memory; nothing is reachable from outside.
    What cannot be measured is left out, with the reason; exit code 1 says that it was something of ours. Ctrl-C ends it
    with the figures of the complete rounds, and exit code 130. Use a machine that does nothing else.
    """
    from load.bench import transfer
    from load.bench.rounds import make_rows

    chosen = set(against or [])
    if Against.NOTHING in chosen and len(chosen) > 1:
        other = min(chosen - {Against.NOTHING})
        raise UserError(f"--against nothing and --against {other} contradict each other; give one of them")
    sizes = dict(_size(text) for text in size) if size else transfer.SIZES
    options = transfer.BenchOptions(
        rounds=rounds, seconds=seconds, sizes=sizes, only=only or (),
        against=frozenset() if Against.NOTHING in chosen else frozenset({Against.IPERF3.value, *chosen}),
        mooncake_python=mooncake_python, cache=load_settings(CommonSettings, "load").cache_path())
    _check_only(options.only, [name for source in transfer.sources(options) for name in source.probes])
    _run(partial(transfer.bench, options), lambda values: make_rows(values, transfer.targets(sizes)), rounds=rounds,
         seconds=seconds, json=json, others=transfer.OTHERS)


def bench_restart(
    directory: Annotated[Path, typer.Option("--dir", help="Directory on the SSD; what is written there is removed.")],
    gib: Annotated[float, typer.Option(min=0.2, help="GiB of blocks on the SSD.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="So many restarts.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Write all rows to this file.")] = None,
) -> None:
    """Measure how soon a worker that was killed serves the blocks on its SSD again, from a cold page cache.

    Example: moonbus load bench-restart --gib 10 --dir /data/bench
    """
    from load.bench import restart
    from load.bench.rounds import make_rows

    options = restart.RestartOptions(nbytes=int(gib * (1 << 30)), directory=directory.absolute(), rounds=rounds)
    _run(partial(restart.bench, options), lambda values: make_rows(values, restart.targets()), rounds=rounds,
         seconds=0.0, json=json, others=())


def _run(bench: Callable[[Console], Coroutine[Any, Any, Outcome]],
         rows_of: Callable[[Mapping[str, Sequence[float]]], list[Row]], *, rounds: int, seconds: float,
         json: Path | None, others: tuple[str, ...]) -> None:
    """Measures, shows, writes ``json``. Probes whose names begin with one of ``others`` are not ours to fail for."""
    from load.bench import show

    progress = Console(stderr=True, highlight=False)
    with ExitStack() as stack:
        file = stack.enter_context(show.open_json(json)) if json is not None else None
        started_at_s = time.time()
        try:
            outcome = uvloop.run(bench(progress))
        except KeyboardInterrupt:
            progress.print("interrupted before the first round")
            raise typer.Exit(_INTERRUPTED) from None
        if outcome.is_interrupted:
            progress.print(f"interrupted in round {outcome.rounds + 1} of {rounds}; complete: {outcome.rounds}")
        rows = rows_of(outcome.values)
        _show(outcome, rows)
        if file is not None and outcome.rounds:  # last: a full disk costs the file and no figures
            file.write(show.make_report(outcome, rows, started_at_s=started_at_s, seconds=seconds))
    if outcome.is_interrupted:
        raise typer.Exit(_INTERRUPTED)
    if not rows or any(not name.startswith(others) for name in outcome.lost):
        raise typer.Exit(1)


def _check_only(only: Sequence[str], names: Sequence[str]) -> None:
    """Each word of ``--only`` names something; nothing is started for one that does not."""
    from load.bench.rounds import is_wanted

    for pattern in only:
        if not any(is_wanted(name, [pattern]) for name in names):
            raise UserError(f"--only {pattern} matches nothing that would be measured; there are {', '.join(names)}")


def _show(outcome: Outcome, rows: Sequence[Row]) -> None:
    """On stdout."""
    from load.bench import show

    console = Console()
    if rows:
        console.print(f"Medians of {outcome.rounds} values; a ratio is the median of the rounds' ratios.\n",
                      highlight=False)
    for table in (*show.figures_tables(rows), show.comparisons_table(rows)):
        if table.row_count:
            console.print(table)
    for name, why in outcome.lost.items():
        console.print(f"no figures for {name}: {why}", markup=False, highlight=False, soft_wrap=True)


def bench_store(
    rounds: Annotated[int, typer.Option(min=1, help="Every figure is taken so many times, in turns.")] = 7,
    seconds: Annotated[float, typer.Option(min=0.05, help="Of each figure in each round.")] = 0.5,
    size: Annotated[list[str] | None, typer.Option(
        help="Bytes of a value, like 2MiB; again for more. 256KiB, 2MiB and 16MiB unless given.")] = None,
    only: Annotated[list[str] | None, typer.Option(
        help="Only these lines, like shm-get, 'tcp*' or '*/2MiB'; again for more.")] = None,
    against: Annotated[StoreAgainst, typer.Option(help="What to measure beside us.")] = StoreAgainst.NOTHING,
    mooncake_python: Annotated[Path | None, typer.Option(
        help="Interpreter that imports Mooncake; an environment is made once in the cache unless given.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all rows to this file.")] = None,
) -> None:
    """Measure put and get of the store's client beside memory's speed, and Mooncake's store, all in one run.

    Example: moonbus load bench-store --against mooncake --json store.json

    A worker that lends memory runs in another process on this host; nothing is reachable from outside. Every put is of
    a new key, every get of another key than the last; a batch is 32 MiB. What was got is compared with what was put.
    Exit code 1 says that something of ours could not be measured. Use a machine that does nothing else.
    """
    from load.bench import store
    from load.bench.rounds import make_rows

    sizes = dict(_size(text) for text in size) if size else store.SIZES
    for label, nbytes in sizes.items():
        if not 0 < nbytes <= store.BATCH_BYTES // 2 or store.REGION_BYTES % nbytes:
            raise UserError(f"--size is {label}; expected a power of two up to {format_bytes(store.BATCH_BYTES // 2)}")
    python = store.python_for(mooncake_python, load_settings(CommonSettings, "load").cache_path())
    options = store.StoreOptions(rounds=rounds, seconds=seconds, sizes=sizes, only=tuple(only or ()),
                                 mooncake=python if against is StoreAgainst.MOONCAKE else None)
    _check_only(options.only, [name for source in store.sources(options) for name in source.probes])
    _run(partial(store.bench, options), lambda values: make_rows(values, store.targets(sizes)),
         rounds=rounds, seconds=seconds, json=json, others=("mooncake",))


def bench_catalog(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long events are published.")] = 5.0,
    rate: Annotated[float, typer.Option(min=1, help="Block events a second.")] = 20_000,
    blocks: Annotated[int, typer.Option(min=0, help="Blocks in the table before; 0 measures no lineage.")] = 10_000_000,
    json: Annotated[Path | None, typer.Option(help="Write all rows to this file.")] = None,
) -> None:
    """Measure whether the catalog keeps up with a cluster's news, and how long the lineage of a block takes.

    Example: moonbus load bench-catalog --minutes 0.5 --blocks 1000000

    NATS, Postgres and a store-manager run as processes of their own on this machine, and the news is made up. The
    events of a second are those that were written a second until the last was; exit code 1 says that a target is
    missed. Use a machine that does nothing else.
    """
    from load.bench import catalog, show
    from load.bench.rounds import Outcome, make_rows

    options = catalog.Options(seconds=minutes * 60, rate=rate, blocks=blocks)
    progress = Console(stderr=True, highlight=False)
    with ExitStack() as stack:
        file = stack.enter_context(show.open_json(json)) if json is not None else None
        started_at_s = time.time()
        try:
            values = uvloop.run(catalog.bench(options, progress.print))
        except KeyboardInterrupt:
            progress.print("interrupted")
            raise typer.Exit(_INTERRUPTED) from None
        rows = make_rows(values, catalog.targets(options))
        Console().print(show.rows_table(rows))
        if file is not None:
            file.write(show.make_report(
                Outcome(values=values, rounds=1), rows, started_at_s=started_at_s, seconds=options.seconds))
    if any(row.met is False for row in rows):
        raise typer.Exit(1)


def soak_transfer(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long.")] = 10.0,
    path: Annotated[SoakPath, typer.Option(help="What carries the bytes.")] = SoakPath.SHM,
    processes: Annotated[int, typer.Option(min=2, max=64, help="They push all to all.")] = 8,
    in_flight: Annotated[int, typer.Option(min=1, help="Pushes at any moment, of all processes.")] = 1000,
    size: Annotated[str, typer.Option(help="Bytes of a push.")] = "16KiB",
    report: Annotated[str, typer.Option(help="Print a line this often.")] = "1min",
) -> None:
    """Push small pieces for a long time; fail when something leaks or starves.

    Example: moonbus load soak-transfer --minutes 10

    Exit code 1 says that a push failed, that a process holds more descriptors, threads or memory at the end than a
    little beyond the start, or that the slowest hundredth of the pushes takes over 20 times as long as the median.
    """
    from load.bench import show, soak

    console = Console(highlight=False)
    options = soak.SoakOptions(
        duration_s=minutes * 60, path=path.value, processes=processes, in_flight=in_flight,
        nbytes=_size(size)[1], report_s=_seconds(report), phase_s=min(soak.PHASE_S, _seconds(report)))

    def line(stretch: soak.Stretch) -> None:
        console.print(f"{format_seconds(stretch.until_s):>9}  {stretch.pushes:>11,} pushes  "
                      f"p50 {format_seconds(stretch.p50_s)}  p99 {format_seconds(stretch.p99_s)}")

    result = uvloop.run(soak.soak(options, line))
    console.print(show.footprints_table(result.footprints))
    problems = result.problems()
    for problem in problems:
        console.print(problem, style="red", markup=False)
    if problems:
        raise typer.Exit(1)
    console.print(f"no push failed, nothing leaked, nothing starved: {result.everything.total:,} pushes of "
                  f"{format_bytes(options.nbytes)}", style="green")


def _size(text: str) -> tuple[str, int]:
    """Label and bytes."""
    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--size: {error}") from error
    if nbytes < 1:
        raise UserError(f"--size is {text}; expected at least a byte")
    return text, nbytes


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UserError(f"--report: {error}") from error
