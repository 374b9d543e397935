"""A grid for people: tables, a plot, a page, JSON."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from rich.table import Table

from load import plots
from load.cachesim.grid import BELADY, INFINITE, LRU, Grid, Result
from load.workload.traces import Source
from shared.store.policies import DEFAULT
from shared.version import product_version

_STAND_IN = "toolagent_like"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` writes."""

    version: str
    command: str
    at: datetime
    results: list[Result]


def make_report(grid: Grid, *, arguments: Sequence[str], at: datetime) -> Report:
    """With how it was made."""
    return Report(version=product_version(), command=shlex.join(["moonbus", *arguments]), at=at, results=grid.results)


def title_of(source: Source) -> str:
    """The trace's name; the stand-in says that it is one."""
    return f"{source.name} (synthetic)" if source.name == _STAND_IN else source.name


def rows_of(grid: Grid, source: Source, capacities: Sequence[int], names: Sequence[str]) -> list[list[str]]:
    """One row a policy: its name and, by capacity, hit share, points over LRU, share of Belady's."""
    rows = []
    for name in names:
        cells = [name]
        for blocks in capacities:
            share, lru = grid.share(source, blocks, name), grid.share(source, blocks, LRU)
            belady = grid.share(source, blocks, BELADY)
            cells.append(f"{share:.4f} {100 * (share - lru):+6.2f} {_share_of(share, belady)}")
        rows.append(cells)
    rows.append([INFINITE, *[f"{grid.share(source, blocks, INFINITE):.4f}" for blocks in capacities]])
    return rows


def table_of(grid: Grid, source: Source, capacities: Sequence[int], names: Sequence[str]) -> Table:
    """For a terminal."""
    table = Table(title=f"{title_of(source)}: hit tokens, points over LRU, share of Belady",
                  title_justify="left")
    table.add_column("policy")
    for blocks in capacities:
        table.add_column(f"{blocks:,} blocks", justify="right")
    for row in rows_of(grid, source, capacities, names):
        table.add_row(*row, style="bold" if row[0] == DEFAULT else None)
    return table


def plot(grid: Grid, sources: Sequence[Source], capacities: Sequence[int], names: Sequence[str]) -> bytes:
    """A PNG: for each trace, hit share over capacity of every policy, between nothing and Belady and infinite."""
    plots.require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(sources), 3.6), dpi=130, layout="constrained")
    ordered = sorted(capacities)
    for axes, source in zip(figure.subplots(1, len(sources), squeeze=False)[0], sources, strict=True):
        _draw(axes, grid, source, ordered, names)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def page(report: Report, grid: Grid, sources: Sequence[Source], capacities: Sequence[int], names: Sequence[str],
         figure: bytes) -> str:
    """One HTML file that needs nothing else."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("load", "templates"), autoescape=True,
                                     undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("cachesim.html.j2").render(
        report=report, figure=base64.b64encode(figure).decode(), capacities=capacities, default=DEFAULT,
        tables=[(title_of(source), rows_of(grid, source, capacities, names)) for source in sources])


def _share_of(part: float, whole: float) -> str:
    """In six columns; a dash of nothing."""
    return f"{part / whole:6.1%}" if whole else f"{'-':>6}"


def _draw(axes: Any, grid: Grid, source: Source, capacities: Sequence[int], names: Sequence[str]) -> None:
    limit = grid.share(source, capacities[-1], INFINITE)
    axes.axhline(limit, color="0.6", linestyle=":", linewidth=1.2, label=INFINITE)
    rivals = [name for name in names if name not in (DEFAULT, BELADY)]
    styles: dict[str, dict[str, Any]] = {BELADY: {"color": "0.35", "linestyle": "--", "linewidth": 1.2}}
    styles |= {name: {"color": f"C{index + 1}", "linewidth": 1.2} for index, name in enumerate(rivals)}
    styles[DEFAULT] = {"color": "C0", "linewidth": 2.4, "zorder": 3}
    for name in names:
        axes.plot(capacities, [grid.share(source, blocks, name) for blocks in capacities], label=name, marker="o",
                  markersize=3.5, **styles[name])
    axes.set_xscale("log")
    axes.set_xticks(capacities, [f"{blocks:,}" for blocks in capacities], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(0, limit * 1.08 or 1)
    axes.set_title(title_of(source), fontsize=10)
    axes.set_xlabel(f"blocks of {source.block_tokens} tokens")
    axes.set_ylabel("hit tokens / prompt tokens")
    axes.grid(color="0.9", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7.5)
