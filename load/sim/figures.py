"""Figures of simulated runs as PNG bytes. matplotlib is imported when the first one is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from load.sim.experiment import Result

_SIZE_IN = (7.2, 3.2)
_DPI = 130


def distributions(results: Mapping[str, Result]) -> bytes:
    """TTFT and TBT: share of requests at or below each value, one line a run; logarithmic in time."""
    figure, (left, right) = _figure(columns=2)
    for name, result in results.items():
        table = result.outcomes.table()
        for axes, column in ((left, 3), (right, 4)):
            values = np.sort(table[:, column][~np.isnan(table[:, column])])
            if len(values):
                shares = np.arange(1, len(values) + 1) / len(values)
                axes.step(np.maximum(values, 1e-3), shares, where="post", label=name)
    for axes, title in ((left, "TTFT, s"), (right, "TBT, s")):
        axes.set_xscale("log")
        axes.set_xlabel(title)
        axes.set_ylim(0, 1.02)
    left.set_ylabel("share of requests")
    left.legend(frameon=False, fontsize=7)
    return _png(figure)


def load_curve(result: Result) -> bytes:
    """Prompt tokens waiting and requests decoding over time, and what was turned away."""
    figure, (left, right) = _figure(columns=2)
    curve = np.array(result.curve) if result.curve else np.zeros((1, 3))
    left.plot(curve[:, 0], curve[:, 1] / 1e3)
    left.set_ylabel("prompt tokens waiting, thousands")
    right.plot(curve[:, 0], curve[:, 2], color="C1", label="decoding")
    turned_away = [row[6] for row in result.outcomes.table() if int(row[0]) in result.outcomes.reasons]
    if turned_away:
        counts, edges = np.histogram(turned_away, bins=60, range=(0, max(curve[-1, 0], 1)))
        right.stairs(counts, edges, color="C3", label=f"turned away per {edges[1]:.0f} s")
    right.set_ylabel("requests")
    right.legend(frameon=False, fontsize=7)
    for axes in (left, right):
        axes.set_xlabel("time, s")
        axes.set_ylim(bottom=0)
    return _png(figure)


def lengths(result: Result) -> bytes:
    """TTFT against prompt length, one point a request, and the bound."""
    figure, (axes,) = _figure()
    table = result.outcomes.table()
    order = np.argsort(table[:, 2])
    axes.scatter(table[:, 2], table[:, 3], s=3, alpha=0.4, linewidths=0)
    axes.plot(table[order, 2], table[order, 5], color="C3", linewidth=1, label="bound")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("TTFT, s")
    axes.legend(frameon=False, fontsize=7)
    return _png(figure)


def bars(groups: Sequence[str], series: Mapping[str, Sequence[float | None]], *, unit: str) -> bytes:
    """Bars side by side: a group on the axis, a colour a series."""
    figure, (axes,) = _figure()
    width = 0.8 / max(len(series), 1)
    for i, (name, values) in enumerate(series.items()):
        at = [group + (i - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = axes.bar(at, [value or 0.0 for value in values], width=width, label=name)
        axes.bar_label(drawn, labels=[f"{value:.3g}" if value is not None else "" for value in values], fontsize=6)
    axes.set_xticks(range(len(groups)), groups, fontsize=7)
    axes.set_ylabel(unit)
    axes.legend(frameon=False, fontsize=7)
    return _png(figure)


def _figure(*, columns: int = 1) -> tuple[Any, tuple[Any, ...]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, layout="constrained")
    axes = tuple(figure.subplots(1, columns, squeeze=False)[0])
    for one in axes:
        one.grid(alpha=0.3, linewidth=0.6)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=7)
    return figure, axes


def _png(figure: Any) -> bytes:
    for axes in figure.axes:
        axes.xaxis.label.set_size(8)
        axes.yaxis.label.set_size(8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()
