"""Tables that show all they have in whatever room there is, for commands that show a cluster, help on settings and the
demo. (Benchmarks and simulations have plain ones.)"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

UNBOUNDED = 10_000
"""Characters of a line that nobody looks at in a terminal."""
_WHOLE = 8
"""Words up to this length are not folded."""


class _Folding(Table):
    """A table that shows all of its cells in whatever room there is."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=UNBOUNDED)
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
        if self.caption:
            yield self.caption


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


def compact_table(*columns: str | Column, title: str | None = None, caption: str | None = None) -> Table:
    """A table for narrow terminals; what is in a ``number_column`` is never folded."""
    table = _Folding(*columns, title=title, title_justify="left", caption=caption, caption_justify="left",
                     box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    return table
