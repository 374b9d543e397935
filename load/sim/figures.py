"""Figures of simulated runs as PNG bytes. matplotlib is imported when the first one is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from load.sim.experiment import Result

_SIZE_IN = (7.2, 3.2)
_DPI = 130
_FEWEST_TICKS = 4
_LEADING = ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7), tuple(range(1, 10)), tuple(i / 10 for i in range(10, 100, 2)),
            tuple(i / 10 for i in range(10, 100)))
"""Leading digits of the numbers on a logarithmic axis, from the fewest on."""

_Array = npt.NDArray[np.float64]


def distributions(runs: Mapping[str, tuple[Sequence[float] | _Array, Sequence[float] | _Array]]) -> bytes:
    """TTFT and TBT: share of requests at or below each value, one line a run, logarithmic in time.

    Of each run all values or their quantiles, in any order; nan is nobody.
    """
    figure, axes = _figure(columns=2)
    for name, samples in runs.items():
        for one, sample in zip(axes, samples, strict=True):
            values = np.sort(np.asarray(sample, dtype=float))
            values = values[~np.isnan(values)]
            if len(values):
                shares = np.arange(1, len(values) + 1) / len(values)
                one.step(np.maximum(values, 1e-3), shares, where="post", label=name)
    for one, title in zip(axes, ("TTFT, s", "TBT, s"), strict=True):
        one.set_xscale("log")
        _label(one.xaxis)
        one.set_xlabel(title)
        one.set_ylim(0, 1.02)
    axes[0].set_ylabel("share of requests")
    lines, names = axes[0].get_legend_handles_labels()  # all with a TBT have a TTFT too
    if lines:
        axes[1].legend(lines, names, frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _png(figure)


def over_rate(rates: Sequence[float], series: Mapping[str, Sequence[float | None]]) -> bytes:
    """Mean TTFT over the rate, a line a policy, logarithmic in seconds; a gap where there is none."""
    figure, (axes,) = _figure()
    for name, values in series.items():
        axes.plot(rates, np.array(values, dtype=float), marker="o", markersize=3, linewidth=1.2, label=name)
    axes.set_yscale("log")
    _label(axes.yaxis)
    axes.set_xticks(rates, [f"{rate:g}x" for rate in rates])
    axes.set_xlabel("times the trace's rate")
    axes.set_ylabel("mean TTFT, s")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _png(figure)


def load_curve(result: Result) -> bytes:
    """Prompt tokens waiting and requests decoding over time, and what was turned away."""
    figure, (left, right) = _figure(columns=2)
    curve = np.array(result.curve) if result.curve else np.zeros((1, 5))
    left.plot(curve[:, 0], curve[:, 1] / 1e3)
    left.set_ylabel("prompt tokens waiting, thousands")
    right.plot(curve[:, 0], curve[:, 2], color="C1", label="decoding")
    turned_away = [row[6] for row in result.outcomes.table() if int(row[0]) in result.outcomes.reasons]
    if turned_away:
        counts, edges = np.histogram(turned_away, bins=60, range=(0, max(curve[-1, 0], 1)))
        right.stairs(counts, edges, color="C3", label=f"turned away per {edges[1]:.0f} s")
    right.set_ylabel("requests")
    right.legend(frameon=False, fontsize=7, loc="upper right")
    for axes in (left, right):
        axes.set_xlabel("time, s")
        axes.set_ylim(bottom=0)
    return _png(figure)


def pool_loads(results: Mapping[str, Result], *, until_s: float) -> bytes:
    """Load of the prefill nodes and of the decode nodes over time, one panel a run; 1 is what the bounds allow."""
    figure, panels = _figure(columns=len(results), size_in=(3.1 * len(results), 2.7), share_y=True)
    for axes, (name, result) in zip(panels, results.items(), strict=True):
        curve = np.array([sample for sample in result.curve if sample.at_s <= until_s])
        axes.plot(curve[:, 0] / 60, curve[:, 3], linewidth=1, label="prefill")
        axes.plot(curve[:, 0] / 60, curve[:, 4], linewidth=1, label="decode")
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("time, min")
    panels[0].set_ylim(bottom=0)  # of all: set before the last is drawn, it would cut what is higher there
    panels[0].set_ylabel("load")
    panels[0].legend(frameon=False, fontsize=7, loc="lower right")
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
    _label(axes.xaxis)
    _label(axes.yaxis)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("TTFT, s")
    axes.legend(frameon=False, fontsize=7, loc="upper left")
    return _png(figure)


def bars(groups: Sequence[str], series: Mapping[str, Sequence[float | None]], *, unit: str) -> bytes:
    """Bars side by side: a group on the axis, a colour a series."""
    figure, (axes,) = _figure()
    width = min(0.8 / max(len(series), 1), 0.25)
    for i, (name, values) in enumerate(series.items()):
        at = [group + (i - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = axes.bar(at, [value or 0.0 for value in values], width=width, label=name)
        axes.bar_label(drawn, labels=[f"{value:.3g}" if value is not None else "" for value in values], fontsize=6)
    axes.set_xticks(range(len(groups)), groups, fontsize=7)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylabel(unit)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _png(figure)


def _figure(*, columns: int = 1, size_in: tuple[float, float] = _SIZE_IN,
            share_y: bool = False) -> tuple[Any, tuple[Any, ...]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_in, layout="constrained")
    axes = tuple(figure.subplots(1, columns, squeeze=False, sharey=share_y)[0])
    for one in axes:
        one.grid(alpha=0.3, linewidth=0.6)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=7)
    return figure, axes


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between ``low`` and ``high`` for a logarithmic axis: as few as can be, but four where there
    are so many of two digits."""
    ticks: list[float] = []
    for digits in _LEADING:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [value for decade in decades for digit in digits
                 if low <= (value := float(f"{digit}e{decade}")) <= high]
        if len(ticks) >= _FEWEST_TICKS:
            break
    return ticks


def _label(axis: Any) -> None:
    """Plain numbers on a logarithmic axis, when all is drawn. (By itself it labels powers of ten only.)"""
    low, high = axis.get_view_interval()
    ticks = log_ticks(low, high)
    axis.set_ticks(ticks, [f"{value:g}" if value < 1e3 else f"{value / 1e3:g}k" for value in ticks])
    axis.set_ticks([], minor=True)


def _png(figure: Any) -> bytes:
    for axes in figure.axes:
        axes.xaxis.label.set_size(8)
        axes.yaxis.label.set_size(8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()
