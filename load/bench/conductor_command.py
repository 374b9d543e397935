"""The command `bench-conductor` of `moonbus load`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from shared.errors import UserError

if TYPE_CHECKING:
    from load.bench.conductor import Figure, Report


def bench_conductor(
    rounds: Annotated[int, typer.Option(min=1, help="Every figure is taken so many times.")] = 3,
    workers: Annotated[int, typer.Option(min=4, help="Workers the conductor knows; a quarter of them decode.")] = 128,
    blocks: Annotated[int, typer.Option(min=256, help="Blocks indexed while it decides.")] = 1_000_000,
    resync_blocks: Annotated[int, typer.Option(min=256, help="Blocks of the worker that tells all anew.")] = 2_300_000,
    big_blocks: Annotated[int, typer.Option(
        min=0, help="Measure memory with so many blocks too, like 10000000; 0 for no.")] = 0,
    decisions: Annotated[int, typer.Option(min=100, help="Decisions of a round.")] = 2000,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure how fast a conductor decides, how fast it learns who holds what, and what that takes of memory.

    Example: moonbus load bench-conductor --big-blocks 10000000 --json conductor.json

    Prompts have 131,072 tokens in blocks of 512, hundreds of requests are in flight. Everything goes through the
    machine, on one core; times are CPU times. Beside our index stands the plain one, {key: {worker: tier}}.
    Exit code 1 says that a goal is missed.
    """
    from load.bench.conductor import ConductorOptions, bench, write_json

    progress = Console(stderr=True, highlight=False)
    if json is not None and not json.parent.is_dir():
        raise UserError(f"--json: there is no folder {json.parent}")
    report = bench(ConductorOptions(rounds=rounds, workers=workers, blocks=blocks, resync_blocks=resync_blocks,
                                    big_blocks=big_blocks, decisions=decisions),
                   lambda text: progress.print(text, style="dim"))
    Console().print(_table(report))
    if json is not None:
        try:
            write_json(report, json)
        except OSError as error:
            raise UserError(f"--json: cannot write {json}: {error.strerror or error}") from error
    if any(figure.is_met is False for figure in report.figures):
        raise typer.Exit(1)


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for header in ("figure", "value", "goal", "", "plain index", "times better"):
        table.add_column(header, justify="left" if header in ("figure", "") else "right", no_wrap=True)
    for figure in report.figures:
        table.add_row(figure.name, f"{_number(figure.value)} {figure.unit}", figure.goal, _verdict(figure),
                      _number(figure.plain) if figure.plain is not None else "",
                      f"{figure.ratio:.1f}" if figure.ratio is not None else "")
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _verdict(figure: Figure) -> str:
    if figure.is_met is None:
        return ""
    return "[green]met[/]" if figure.is_met else "[red]missed[/]"
