"""Figures for people and for programs."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import msgspec
from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from load.bench.processes import Footprint
from load.bench.rounds import UNITS, Outcome, Row
from shared.errors import UserError
from shared.units import format_bytes
from shared.version import product_version

_TABLES = {"One push after another": ("p50", "rate", "cpu"), "A prompt, layer after layer": ("streamed", "whole"),
           "Many small pushes": ("p50", "p99", "pushes"), "A worker comes back": ("ready", "told", "served", "rate")}
"""{title: its figures}; a probe is in the first table that has all of its own."""
_COMPARED: dict[str, JustifyMethod] = {"figure": "left", "value": "right", "ratio": "right", "against": "left",
                                       "target": "left"}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` writes."""

    version: str
    host: str
    cpus: int
    started_at_s: float
    """Unix seconds."""
    rounds: int
    seconds: float
    """Of each probe in each round."""
    rows: list[Row]
    lost: dict[str, str]
    """{what has no figures: why}"""


def make_report(outcome: Outcome, rows: list[Row], *, started_at_s: float, seconds: float) -> Report:
    """With what is known of the machine."""
    return Report(version=product_version(), host=f"{platform.system()} {platform.release()} {platform.machine()}",
                  cpus=len(os.sched_getaffinity(0)), started_at_s=started_at_s, rounds=outcome.rounds, seconds=seconds,
                  rows=rows, lost=outcome.lost)


class JsonFile:
    """Made by :func:`open_json`."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path = path
        self._file = file
        self.is_written = False

    def write(self, report: Report) -> None:
        """Instead of what was in it. Raises :class:`UserError` when it cannot be written."""
        left = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.truncate(0)
            while left:
                left = left[self._file.write(left):]
        except OSError as error:
            raise _unwritable(self._path, error) from error
        self.is_written = True


@contextmanager
def open_json(path: Path) -> Iterator[JsonFile]:
    """Opened now, so that nobody measures for a place that does not exist; what is in it stays until it is written.

    A new file that nothing was written to is removed. Raises :class:`UserError`.
    """
    is_new = not path.exists()
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise _unwritable(path, error) from error
    opened = JsonFile(path, file)
    try:
        with file:
            yield opened
    finally:
        if is_new and not opened.is_written:
            path.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"--json: cannot write {path}: {error.strerror or error}")


def figures_tables(rows: Sequence[Row]) -> list[Table]:
    """A line a probe, a column a figure: medians over the rounds. Probes of the same figures share a table."""
    probes: dict[str, dict[str, Row]] = {}
    for row in rows:
        name, _, kind = row.name.rpartition("/")
        probes.setdefault(name, {})[kind] = row
    tables = []
    for title, kinds in _TABLES.items():
        table = _table(title)
        table.add_column("", no_wrap=True)
        for kind in kinds:
            table.add_column(f"{kind} {UNITS[kind]}", justify="right", no_wrap=True)
        for name in [name for name, taken in probes.items() if set(taken) <= set(kinds)]:
            taken = probes.pop(name)
            table.add_row(name, *(figure(taken[kind].value) if kind in taken else "" for kind in kinds))
        tables += [table] if table.row_count else []
    return tables


def rows_table(rows: Sequence[Row]) -> Table:
    """A line a figure, for what has nothing beside it."""
    table = _table("")
    for header in ("", "value", "target"):
        table.add_column(header, justify="right" if header == "value" else "left", no_wrap=True)
    for row in rows:
        table.add_row(row.name, f"{figure(row.value)} {row.unit}", _verdict(row))
    return table


def comparisons_table(rows: Sequence[Row]) -> Table:
    """A line a comparison, those with a target first."""
    table = _table("Compared")
    for header, justify in _COMPARED.items():
        table.add_column(header, justify=justify, no_wrap=header == "figure")
    for row in sorted((row for row in rows if row.against or row.target), key=lambda row: row.met is None):
        other = f"{figure(row.against_value)} {_short(row)}" if row.against_value is not None else ""
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
        table.add_row(row.name, f"{figure(row.value)} {row.unit}", ratio, other, _verdict(row))
    return table


def footprints_table(footprints: Mapping[int, tuple[Footprint, Footprint]]) -> Table:
    """A line a process: what it held at the start and at the end."""
    table = _table("Held at the start and at the end, with nothing in flight")
    for header in ("process", "descriptors", "threads", "memory"):
        table.add_column(header, justify="right")
    for pid, (start, end) in footprints.items():
        table.add_row(str(pid), f"{start.descriptors} {end.descriptors}", f"{start.threads} {end.threads}",
                      f"{format_bytes(start.rss_bytes)} {format_bytes(end.rss_bytes)}")
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def figure(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.{max(0, 3 - len(str(int(abs(value)))))}f}" if abs(value) >= 1 else f"{value:.3f}"


def _short(row: Row) -> str:
    """What it is compared with; the figure only where it is another one."""
    name, _, kind = (row.against or "").rpartition("/")
    return name if row.name.endswith(f"/{kind}") else f"{name}/{kind}"


def _verdict(row: Row) -> str:
    if row.met is None:
        return ""
    bound = " ".join((row.target or "").split()[:2])
    return f"[green]{bound} met[/]" if row.met else f"[red]{bound} missed[/]"
