"""`moonbus load cache-sim`."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from load import plots
from load.cachesim import show
from load.cachesim.grid import BELADY, LRU, Cell, Result, cells_of, run
from load.workload.traces import MOONCAKE_BLOCK_TOKENS, Source
from shared.errors import UserError
from shared.files import check_file, write_file
from shared.store.policies import POLICIES


def cache_sim(
    trace: Annotated[list[Path], typer.Option(help="Mooncake JSON-lines trace; again for more.")],
    blocks: Annotated[str, typer.Option(help="Capacities to try, in blocks.")] = "1000,5859,20000,50000",
    policy: Annotated[list[str] | None, typer.Option(
        help=f"One of {', '.join(POLICIES)}; again for more. All unless given; lru and belady always.")] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens a hash id of the trace stands for."
                                              )] = MOONCAKE_BLOCK_TOKENS,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests of each trace.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; one a core if 0.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw hit share over capacity into this PNG file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write figure and tables as one page to this file.")] = None,
) -> None:
    """Replay traces through one cache under every eviction policy and print what each saves.

    Example: moonbus load cache-sim --trace conversation_trace.jsonl --blocks 5859 --policy hit_density --plot hits.png

    A hit is the leading blocks of a prompt that are cached. Belady's policy, which knows the future, and an infinite
    cache bound what is possible. Pool and policies are those that workers run.
    """
    capacities = _capacities(blocks)
    names = list(dict.fromkeys(policy or POLICIES))
    for name in names:
        if name not in POLICIES:
            raise UserError(f"--policy {name} is unknown; expected one of {', '.join(POLICIES)}")
    if len({path.stem for path in trace}) < len(trace):
        raise UserError("two traces have one name; tables could not tell them apart, so rename a file")
    if plot is not None or html is not None:
        plots.require()
    for option, path in (("--json", json), ("--plot", plot), ("--html", html)):
        if path is not None:
            check_file(option, path)
    sources = [Source(str(path), block_tokens, limit) for path in trace]
    for source in sources:
        source.read()  # all must be sound before hours are spent on one

    started = datetime.now(UTC)
    with _progress() as progress:
        cells = cells_of(sources, capacities, names)
        task = progress.add_task("replaying", total=len(cells))

        def on_result(result: Result) -> None:
            progress.update(task, advance=1, description=_label(result.cell))

        grid = run(cells, jobs=jobs or os.cpu_count() or 1, on_result=on_result)

    shown = [*dict.fromkeys([*names, LRU]), BELADY]
    report = show.make_report(grid, arguments=sys.argv[1:], at=started)
    files: dict[Path, bytes] = {}
    if json is not None:
        files[json] = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    if plot is not None or html is not None:
        figure = show.plot(grid, sources, capacities, shown)
        if plot is not None:
            files[plot] = figure
        if html is not None:
            files[html] = show.page(report, grid, sources, capacities, shown, figure).encode()
    console = Console()
    for source in sources:
        console.print(show.table_of(grid, source, capacities, shown))
    for path, content in files.items():
        write_file(path, content)
        console.print(f"wrote {path}", soft_wrap=True)


def _capacities(text: str) -> list[int]:
    try:
        capacities = [int(part) for part in text.split(",")]
    except ValueError:
        capacities = []
    if not capacities or min(capacities) < 1:
        raise UserError(f"--blocks is {text}; expected numbers of blocks above 0, like 1000,5859")
    return list(dict.fromkeys(capacities))


def _label(cell: Cell) -> str:
    return f"{cell.source.name}, {cell.policy}" + (f", {cell.blocks:,} blocks" if cell.blocks else "")


def _progress() -> Progress:
    return Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
                    console=Console(stderr=True))
