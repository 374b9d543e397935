"""Where commands print: ``console`` for results, ``notes`` (stderr) for what goes along with them.

Nothing of a result is cut to fit: on a terminal tables fold, and show each row by itself where even that is too wide;
what is piped has as much room as it wants, a row of a table a line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

from shared.units import format_seconds

_UNBOUNDED = 10_000
"""Characters of a line that nobody looks at in a terminal."""
_WHOLE = 8
"""Words up to this length are not folded."""


class _Console(Console):
    """As wide as its terminal, or as COLUMNS says; else without bound."""

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        found = super().size
        if self.is_terminal or os.environ.get("COLUMNS", "").isdigit():
            return found
        return ConsoleDimensions(_UNBOUNDED, found.height)


console: Console = _Console()
notes = Console(stderr=True)


class _Folding(Table):
    """A table that shows all of its cells in whatever room there is."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=_UNBOUNDED)
        least, most = [], []
        for column in self.columns:
            cells = [Measurement.get(console, unbounded, cell) for cell in (column.header, *column.cells)]
            most.append(max(column.min_width or 0, *(cell.maximum for cell in cells)))
            words = most[-1] if column.no_wrap else max(min(cell.minimum, _WHOLE) for cell in cells)
            least.append(column.min_width or words)
        for self.padding, self.show_edge in (((0, 1, 0, 0), True), ((0, 0, 0, 0), False)):
            for column, width in zip(self.columns, most, strict=True):
                column.width = width
            room = options.max_width - (Measurement.get(console, unbounded, self).maximum - sum(most))
            if sum(least) <= room:
                for column, width in zip(self.columns, _shared_out(room, least, most), strict=True):
                    column.width = width
                yield from super().__rich_console__(console, options)
                return
        yield from self._records()

    def _records(self) -> RenderResult:
        """Each row by itself, a line for a column."""
        if self.title:
            yield self.title
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            record = Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, 2, 0, 0))
            for column, cell in zip(self.columns, cells, strict=True):
                record.add_row(column.header, cell)
            yield from (record, "")


def _shared_out(room: int, least: Sequence[int], most: Sequence[int]) -> list[int]:
    """Widths from ``least`` to ``most`` that fit into ``room``: who lacks most is given first."""
    widths = list(least)
    for _ in range(min(room, sum(most)) - sum(least)):
        neediest = max(range(len(widths)), key=lambda i: most[i] - widths[i])
        widths[neediest] += 1
    return widths


def name_column(header: str, width: int) -> Column:
    """A column of names of which so many characters stand side by side, whatever else has to fold."""
    return Column(header, min_width=width)


def number_column(header: str) -> Column:
    """A column of numbers."""
    return Column(header, justify="right", no_wrap=True)


def compact_table(*columns: str | Column, title: str | None = None) -> Table:
    """A table for narrow terminals; what is in a ``number_column`` is never folded."""
    table = _Folding(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                     pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    return table


def format_age(duration_s: float) -> str:
    """A duration of any length in few letters: ``12.3 ms``, ``41 s``, ``17 min``, ``5.2 h``, ``3.1 d``."""
    if duration_s < 10:
        return format_seconds(duration_s)
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min")):
        if duration_s < limit_s:
            return f"{duration_s / unit_s:.0f} {unit}"
    return f"{duration_s / 3600:.1f} h" if duration_s < 172_800 else f"{duration_s / 86_400:.1f} d"


def print_json(value: Any) -> None:
    """On one line per nesting, bytes in hex: what a program can use without knowing MessagePack."""
    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    text = msgspec.json.format(msgspec.json.encode(_hexed(plain)), indent=2).decode()
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _hexed(value: Any) -> Any:
    match value:
        case bytes():
            return value.hex()
        case dict():
            return {name: _hexed(item) for name, item in value.items()}
        case list() | tuple():
            return [_hexed(item) for item in value]
        case _:
            return value
