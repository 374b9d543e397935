"""The prefix tree as a page: one HTML file that needs nothing from the network, dark where its reader's screen is.

Time runs nowhere in it: to the right is deeper in the prompt. A bar is a stretch of blocks without a branch, as long as
it has blocks, as thick and as warm as it was reused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from services.cli.output import format_age
from shared.files import write_file
from shared.messages import PrefixRow
from shared.units import format_bytes

KEY_DIGITS = 12
MAX_LEAVES = 160
"""Most lines drawn: more would make neighbours out of what nobody can tell apart."""
HEATS = 7
"""Steps of colour."""

_LEFT, _RIGHT, _TOP = 118.0, 250.0, 14.0
_WIDTH = 1120.0
_GAP = 16.0
"""Between a bar and what continues it."""
_LEAST_BAR = 7.0
_LINE = 25.0
_THICK = (3.0, 17.0)


@dataclass
class Bar:
    """A stretch with its place; y is its middle."""

    row: PrefixRow
    saved_tokens: int
    left: float = 0.0
    right: float = 0.0
    y: float = 0.0
    thick: float = 0.0
    heat: int = 0
    below: list[Bar] = field(default_factory=list)
    hidden: int = 0
    """Stretches that continue it and are not drawn."""


@dataclass(frozen=True)
class Drawing:
    """A tree with places, in the units of its SVG."""

    bars: list[Bar]
    """Parents first."""
    roots: list[Bar]
    width: float
    height: float
    hidden: int


def write_page(path: Path, prefixes: Sequence[PrefixRow], *, title: str, said: str) -> None:
    """Writes the page of ``prefixes`` (parents first); ``said`` is a sentence about what they are.

    Raises :class:`UserError` when it cannot be written.
    """
    write_file(path, render(prefixes, title=title, said=said, now_s=time.time()).encode())


def render(prefixes: Sequence[PrefixRow], *, title: str, said: str, now_s: float) -> str:
    """The page; no prefixes will do."""
    drawing = draw(prefixes)
    saved = sum(row.hits * row.tokens for row in prefixes)
    hottest = sorted(prefixes, key=lambda row: -row.hits * row.tokens)[:12]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("services.cli", "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("prefix_tree.html.j2").render(
        title=title, said=said, drawing=drawing, key_digits=KEY_DIGITS, heats=HEATS,
        label_x=_WIDTH - _RIGHT + 14, made=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s)),
        facts=(("tokens not computed", f"{saved:,}"), ("blocks", f"{sum(row.blocks for row in prefixes):,}"),
               ("stretches", f"{len(prefixes):,}"), ("size", format_bytes(sum(row.nbytes for row in prefixes))),
               ("most hits", f"{max((row.hits for row in prefixes), default=0):,}")),
        scale=_scale(max((row.hits for row in prefixes), default=0)),
        hottest=[(row, row.hits * row.tokens, _age(row.last_used_at_s, now_s)) for row in hottest if row.hits],
        age=lambda at_s: _age(at_s, now_s), size=format_bytes, curve=_curve)


def draw(prefixes: Sequence[PrefixRow]) -> Drawing:
    """Places for stretches: lines for leaves from the top, parents beside the middle of what continues them."""
    kept, hidden = _kept(prefixes)
    most = max((row.hits for row in kept), default=0)
    bars: dict[bytes, Bar] = {}
    roots: list[Bar] = []
    for row in kept:
        bar = bars[row.key] = Bar(row, row.hits * row.tokens)
        share = math.log1p(row.hits) / math.log1p(most) if most else 0.0
        bar.thick, bar.heat = _THICK[0] + (_THICK[1] - _THICK[0]) * share, _heat(row.hits, most)
        parent = bars.get(row.parent)
        (parent.below if parent is not None else roots).append(bar)
    for row in prefixes:
        if row.key not in bars and row.parent in bars:
            bars[row.parent].hidden += 1
    ordered = list(bars.values())
    _place_across(ordered, roots)
    lines = _place_down(ordered, roots)
    return Drawing(ordered, roots, _WIDTH, _TOP * 2 + lines * _LINE, hidden)


def _kept(prefixes: Sequence[PrefixRow]) -> tuple[list[PrefixRow], int]:
    """The hottest, with all that they continue: a stretch is never reused less than what continues it."""
    leaves = 0
    parents = {row.key: row for row in prefixes}
    wanted: set[bytes] = set()
    for row in sorted(prefixes, key=lambda row: (-row.hits, -row.tokens)):
        if row.key in wanted:
            continue
        if leaves >= MAX_LEAVES:
            continue
        leaves += 1
        above: PrefixRow | None = row
        while above is not None and above.key not in wanted:
            wanted.add(above.key)
            above = parents.get(above.parent)
    return [row for row in prefixes if row.key in wanted], len(prefixes) - len(wanted)


def _place_across(ordered: Sequence[Bar], roots: Sequence[Bar]) -> None:
    """Left and right; the deepest chain takes the width."""
    links: dict[int, int] = {}
    ends: dict[int, float] = {}
    for bar in roots:
        links[id(bar)], ends[id(bar)] = 0, 0.0
    for bar in ordered:
        ends[id(bar)] += bar.row.blocks
        for child in bar.below:
            links[id(child)], ends[id(child)] = links[id(bar)] + 1, ends[id(bar)]
    room = _WIDTH - _LEFT - _RIGHT
    unit = min(((room - (links[id(bar)] + 1) * (_GAP + _LEAST_BAR)) / ends[id(bar)] for bar in ordered), default=1.0)
    unit = min(max(unit, 0.02), 40.0)
    for bar in roots:
        bar.left = _LEFT
    for bar in ordered:
        bar.right = bar.left + _LEAST_BAR + bar.row.blocks * unit
        for child in bar.below:
            child.left = bar.right + _GAP


def _place_down(ordered: Sequence[Bar], roots: Sequence[Bar]) -> int:
    """Middles; how many lines there are."""
    lines = 0
    waiting = list(reversed(roots))
    while waiting:
        bar = waiting.pop()
        if not bar.below:
            bar.y = _TOP + (lines + 0.5) * _LINE
            lines += 1
        waiting.extend(reversed(bar.below))
    for bar in reversed(ordered):
        if bar.below:
            bar.y = (bar.below[0].y + bar.below[-1].y) / 2
    return max(lines, 1)


def _heat(hits: int, most: int) -> int:
    """0 for none, then by the logarithm up to the last step for the most."""
    if not hits:
        return 0
    return 1 + min(HEATS - 2, int((HEATS - 1) * math.log2(hits) / max(1.0, math.log2(most + 1))))


def _scale(most: int) -> list[tuple[int, str]]:
    """(step, hits) for the legend, only steps that occur."""
    first: dict[int, int] = {}
    hits = 0
    while hits <= most:
        first.setdefault(_heat(hits, most), hits)
        hits = hits + 1 if hits < 64 else hits + max(1, hits // 16)
    steps = sorted(first.items())
    return [(step, f"{start:,}+" if step else "0") for step, start in steps]


def _curve(parent: Bar, child: Bar) -> str:
    middle = (parent.right + child.left) / 2
    return (f"M{parent.right:.1f},{parent.y:.1f} C{middle:.1f},{parent.y:.1f} {middle:.1f},{child.y:.1f} "
            f"{child.left:.1f},{child.y:.1f}")


def _age(at_s: float | None, now_s: float) -> str:
    return "never" if at_s is None else f"{format_age(max(0.0, now_s - at_s))} ago"
