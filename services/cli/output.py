"""Where commands print: ``console`` for results, ``notes`` (stderr) for what goes along with them."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

console = Console()
notes = Console(stderr=True)


def compact_table(*columns: str, title: str | None = None) -> Table:
    """A table that shows as much as possible in eighty columns."""
    return Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
