"""Records to figures: one function a figure, each returns an ``<svg>`` element to stand inside a page.

Colours are CSS variables of the page (``--series-1`` ...) and text is ``currentColor``, so a figure follows
the reader's light or dark theme. matplotlib is imported when the first figure is drawn: it is in the ``load``
extra.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from load import slo
from load.record import RunRecord
from shared.errors import UserError

# matplotlib wants real colours; these stand in for the page's and are replaced in its output.
_INK = "#0a0b0c"
_FAINT = "#0a0b0d"
_SERIES = tuple(f"#0a0c{i:02x}" for i in range(5))
_VARIABLES = {_INK: "currentColor", _FAINT: "var(--grid)",
              **{stand_in: f"var(--series-{i + 1})" for i, stand_in in enumerate(_SERIES)}}

_MAX_BUCKETS = 60


def latency_cdf(records: Sequence[RunRecord], bounds: slo.Slo) -> str:
    """TTFT and TBT of finished requests: share of requests at or below each value, the bounds as dashed lines."""
    with _figure(columns=2, key="latency") as (figure, (left, right)):
        _cdf(left, [slo.ttft_s(record) for record in records if record.outcome == "ok"], bounds.ttft_s, "TTFT")
        _cdf(right, [slo.tbt_s(record) for record in records if record.outcome == "ok"], bounds.tbt_s, "TBT")
        left.set_ylabel("share of finished requests")
        return _svg(figure, "latency", "Cumulative distribution of TTFT and of TBT")


def goodput(records: Sequence[RunRecord], bounds: slo.Slo) -> str:
    """Offered and good requests a second over the schedule, in equal buckets of time."""
    edges = _edges(records, end=max((record.scheduled_s for record in records), default=0.0))
    width_s = edges[1] - edges[0]
    offered, good = [0] * (len(edges) - 1), [0] * (len(edges) - 1)
    for record in records:
        bucket = _bucket(record.scheduled_s, edges)
        offered[bucket] += 1
        good[bucket] += slo.is_good(record, bounds)
    with _figure(key="goodput") as (figure, (axes,)):
        axes.stairs([count / width_s for count in offered], edges, color=_SERIES[1], linewidth=1.5, label="offered")
        axes.stairs([count / width_s for count in good], edges, color=_SERIES[0], fill=True, alpha=0.55, label="good")
        axes.set_ylabel("requests a second")
        axes.set_xlabel("scheduled time, s")
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(bottom=0)
        _legend(axes)
        return _svg(figure, "goodput", "Offered and good requests a second over time")


def hit_tokens(records: Sequence[RunRecord]) -> str:
    """Prompt tokens not computed: as predicted against as counted, one point a request; and running totals."""
    counted = [record for record in records if record.outcome == "ok" and record.cached_tokens is not None]
    predicted = [record for record in counted if record.predicted_hit_tokens is not None]
    with _figure(columns=2, key="hits") as (figure, (left, right)):
        highest = max([1, *(max(r.cached_tokens or 0, r.predicted_hit_tokens or 0) for r in predicted)])
        left.plot([0, highest], [0, highest], color=_FAINT, linewidth=1)
        left.scatter([r.predicted_hit_tokens for r in predicted], [r.cached_tokens for r in predicted], s=14,
                     color=_SERIES[0], alpha=0.7, linewidths=0)
        left.set_xlabel("predicted hit tokens")
        left.set_ylabel("actual hit tokens")
        if not predicted:
            _note(left, "no request carried both numbers")
        in_order = sorted(counted, key=lambda record: record.sent_s)
        times = [record.sent_s for record in in_order]
        lines = (("prompt", [r.prompt_tokens or 0 for r in in_order], _INK),
                 ("possible", [r.shared_tokens for r in in_order], _SERIES[1]),
                 *([("predicted", [r.predicted_hit_tokens or 0 for r in in_order], _SERIES[2])] if predicted else []),
                 ("actual", [r.cached_tokens or 0 for r in in_order], _SERIES[0]))
        for label, tokens, colour in lines:
            if times:
                right.plot(times, _running_total(tokens), label=label, color=colour, linewidth=1.6,
                           linestyle="--" if label == "predicted" else "-")
        right.set_xlabel("sent at, s")
        right.set_ylabel("tokens so far")
        right.set_ylim(bottom=0)
        right.yaxis.set_major_formatter("{x:,.0f}")
        if times:
            _legend(right)
        else:
            _note(right, "no finished request told its cached tokens")
        return _svg(figure, "hits", "Predicted and actual hit tokens")


def rejections(summary: slo.Summary) -> str:
    """Requests that got no answer, by what the server or the client gave as the reason."""
    bars = [*((f"rejected: {code}", count, _SERIES[3]) for code, count in summary.rejections.items()),
            *((f"failed: {code}", count, _SERIES[4]) for code, count in summary.failures.items()),
            *((name, summary.outcomes[name], _SERIES[1]) for name in ("interrupted", "dropped")
              if name in summary.outcomes)]
    height_in = 0.34 * len(bars) + 0.7
    with _figure(key="rejections", height_in=height_in) as (figure, (axes,)):
        if bars:
            labels, counts, colours = zip(*bars, strict=True)
            drawn = axes.barh(range(len(bars)), counts, color=colours, height=0.62)
            axes.bar_label(drawn, padding=3, color=_INK, fontsize=9)
            axes.set_yticks(range(len(bars)), labels)
            axes.invert_yaxis()
            axes.set_xlabel("requests")
            axes.set_xlim(0, max(counts) * 1.12)
        else:
            axes.set_axis_off()
            _note(axes, "every request was answered")
        return _svg(figure, "rejections", "Requests without an answer, by reason")


def in_flight(records: Sequence[RunRecord]) -> str:
    """Requests sent and not yet ended, over time."""
    steps = sorted([(record.sent_s, 1) for record in records if record.outcome != "dropped"]
                   + [(record.finished_s, -1) for record in records if record.outcome != "dropped"])
    times, levels, level = [0.0], [0], 0
    for at_s, step in steps:
        level += step
        times.append(at_s)
        levels.append(level)
    with _figure(key="inflight") as (figure, (axes,)):
        axes.fill_between(times, levels, step="post", color=_SERIES[0], alpha=0.35, linewidth=0)
        axes.step(times, levels, where="post", color=_SERIES[0], linewidth=1.2)
        axes.set_xlabel("time, s")
        axes.set_ylabel("requests in flight")
        axes.set_xlim(0, max(1e-3, times[-1]))
        axes.set_ylim(bottom=0, top=max(1, *levels) * 1.08)
        axes.yaxis.get_major_locator().set_params(integer=True)
        return _svg(figure, "inflight", "Requests in flight over time")


def require() -> None:
    """Raises the error a person can act on when figures cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("reports need matplotlib, which is not installed; install moonbus with its `load` extra: "
                        "pip install 'moonbus[load]'") from error


def _cdf(axes: Any, values: Sequence[float | None], bound: float, name: str) -> None:
    known = sorted(value for value in values if value is not None)
    unit, factor = ("ms", 1e3) if max([bound, *known[-1:]]) < 1.0 else ("s", 1.0)
    right_s = known[-1] * 1.1 if known else bound * 1.1
    if bound <= right_s:
        axes.axvline(bound * factor, color=_SERIES[3], linestyle="--", linewidth=1.3, label="bound")
    else:  # drawn to scale it would press the curve against the axis
        axes.plot([], [], color=_SERIES[3], linestyle="--", label=f"bound: {bound * factor:g} {unit}, further right")
    if known:
        heights = [(rank + 1) / len(known) for rank in range(len(known))]
        axes.step([known[0] * factor, *(value * factor for value in known)], [0.0, *heights], where="post",
                  color=_SERIES[0], linewidth=1.8, label=name)
        axes.legend(frameon=False, labelcolor=_INK, fontsize=9, loc="best")
    else:
        _note(axes, f"no request with a {name}")
    axes.set_xlim(0, right_s * factor)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"{name}, {unit}")


def _edges(records: Sequence[RunRecord], *, end: float) -> list[float]:
    """Equal buckets over [0, end], their width a round number of seconds."""
    end = max(end, 1.0)
    width_s = 10.0 ** math.floor(math.log10(end / 20))
    while end / width_s > _MAX_BUCKETS:
        width_s *= 2 if end / width_s <= 2 * _MAX_BUCKETS else 5
    if len(records) < 30:
        width_s = max(width_s, end / 10)
    return [i * width_s for i in range(math.floor(end / width_s) + 2)]


def _bucket(at_s: float, edges: Sequence[float]) -> int:
    return min(int(at_s / (edges[1] - edges[0])), len(edges) - 2)


def _running_total(values: Sequence[int]) -> list[int]:
    totals, total = [], 0
    for value in values:
        total += value
        totals.append(total)
    return totals


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, labelcolor=_INK, fontsize=9)


def _note(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_INK, fontsize=10)


@contextmanager
def _figure(*, key: str, columns: int = 1, height_in: float = 2.9) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """A styled figure of ``columns`` axes; ``key`` makes the ids inside its SVG its own and the same in every run."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": key, "font.size": 10.0, "font.family": "sans-serif",
        "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _FAINT, "xtick.color": _INK,
        "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "axes.axisbelow": True, "grid.color": _FAINT, "grid.linewidth": 0.7,
    }
    with rc_context(style):
        figure = Figure(figsize=(9.2, height_in), layout="constrained")
        yield figure, tuple(figure.subplots(1, columns, squeeze=False)[0])


def _svg(figure: Any, key: str, title: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True,
                   metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg"):]
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, variable)
    # Fonts are the page's; the width is the column's.
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = re.sub(r"<svg [^>]*?viewBox=\"([^\"]+)\"[^>]*>",
                  rf'<svg class="figure" role="img" aria-labelledby="{key}-title" viewBox="\1" '
                  r'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
                  rf'<title id="{key}-title">{title}</title>', text, count=1)
    return text.strip()
