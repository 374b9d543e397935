"""Where commands print: ``console`` for results, ``notes`` (stderr) for what goes along with them."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Column, Table

console = Console()
notes = Console(stderr=True)


def name_column(header: str, width: int) -> Column:
    """A column of names that are useless when cut."""
    return Column(header, no_wrap=True, min_width=width)


def compact_table(*columns: str | Column, title: str | None = None) -> Table:
    """A table that shows as much as possible in eighty columns; ``name_column`` keeps one of them whole."""
    return Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
