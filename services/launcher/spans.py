"""Reading a trace back from the file that services append spans to, and drawing it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text
from rich.tree import Tree

from shared.units import format_seconds

_SHOWN_ATTRIBUTES = 4
_WIDEST = 40
_UNTOLD = frozenset({"request", "attempt", "candidates", "sources", "conductor", "why"})
"""Attributes that say little in a line."""


class Span(msgspec.Struct, frozen=True):
    """One line of the trace file."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    start_s: float
    end_s: float
    attributes: dict[str, Any] = {}


def read_trace(path: Path, trace_id: str) -> list[Span]:
    """The spans of one trace so far, by start; a line that is still being written is left for the next time."""
    spans: list[Span] = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return spans
    wanted = trace_id.encode()
    for line in lines:
        if wanted in line:
            try:
                spans.append(msgspec.json.decode(line, type=Span))
            except msgspec.DecodeError:
                continue
    return sorted((span for span in spans if span.trace_id == trace_id), key=lambda span: span.start_s)


def span_tree(spans: Sequence[Span]) -> Tree:
    """Each span with its service, its start since the trace's, its duration and its first attributes."""
    zero_s = min((span.start_s for span in spans), default=0.0)
    known = {span.span_id for span in spans}
    tree = Tree(Text("trace", style="dim"), guide_style="dim")
    branches: dict[str, Tree] = {}

    def grow(parent: Tree, parent_id: str) -> None:
        for span in spans:
            is_root = span.parent_id not in known
            if span.parent_id == parent_id or (parent_id == "" and is_root):
                branches[span.span_id] = parent.add(_line(span, zero_s))
                grow(branches[span.span_id], span.span_id)

    grow(tree, "")
    return tree


def _line(span: Span, zero_s: float) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(span.name, style="bold")
    line.append(f"  {span.instance or span.service}", style="cyan")
    line.append(f"  +{format_seconds(span.start_s - zero_s)}  {format_seconds(span.end_s - span.start_s)}")
    told = ((name.removeprefix("moonbus."), value) for name, value in span.attributes.items())
    shown = [f"{name}={_short(value)}" for name, value in told if name not in _UNTOLD][:_SHOWN_ATTRIBUTES]
    line.append("  " + " ".join(shown), style="dim")
    return line


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _WIDEST else text[:_WIDEST - 1] + "…"
