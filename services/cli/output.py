"""Where commands print: ``console`` for results, ``notes`` (stderr) for what goes along with them.

Nothing of a result is cut to fit: on a terminal tables fold, and show each row by itself where even that is too wide;
what is piped has as much room as it wants, a row of a table a line.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
from rich.console import Console, ConsoleDimensions

from services.launcher.tables import UNBOUNDED, compact_table, name_column, number_column
from shared.units import format_seconds

__all__ = ["compact_table", "console", "format_age", "name_column", "notes", "number_column", "print_json"]


class _Console(Console):
    """As wide as its terminal, or as COLUMNS says; else without bound."""

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        found, columns = super().size, os.environ.get("COLUMNS", "")
        if columns.isdigit():
            return ConsoleDimensions(int(columns), found.height)
        return found if self.is_terminal else ConsoleDimensions(UNBOUNDED, found.height)


console: Console = _Console()
notes = Console(stderr=True)


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
