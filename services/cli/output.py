"""Where commands print: ``console`` for results, ``notes`` (stderr) for what goes along with them."""

from __future__ import annotations

from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Column, Table

from shared.units import format_seconds

console = Console()
notes = Console(stderr=True)


def name_column(header: str, width: int) -> Column:
    """A column of names that are useless when cut."""
    return Column(header, no_wrap=True, min_width=width)


def number_column(header: str) -> Column:
    """A column of numbers."""
    return Column(header, justify="right", no_wrap=True)


def compact_table(*columns: str | Column, title: str | None = None) -> Table:
    """A table that shows as much as possible in eighty columns; ``name_column`` keeps one of them whole."""
    return Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


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
