"""One run, one page: figures, tables and the definitions they rest on, in a single HTML file.

The page needs nothing from the network, follows the reader's light or dark theme, and is made again from the
run's folder at any time with `moonbus load report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import jinja2

from load import plots, slo
from load.record import REPORT_FILE, RunInfo, RunRecord, read_run
from shared.units import format_seconds

_TOLERABLE_LAG_S = 0.5
"""A replay whose slowest tenth leaves later than this is called unpunctual."""

_SAMPLES = 5
"""Messages of failures shown per code."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: a name, its values as text, and what it means."""

    name: str
    values: tuple[str, ...]
    meaning: str = ""


def write_report(directory: Path) -> Path:
    """Reads the run in ``directory`` and writes its page there; returns the page's path."""
    info, records = read_run(directory)
    page = directory / REPORT_FILE
    page.write_text(render(info, records), encoding="utf-8")
    return page


def render(info: RunInfo, records: Sequence[RunRecord]) -> str:
    """The page's HTML; any set of records will do, none included."""
    plots.require()
    bounds = slo.Slo(ttft_s=info.slo_ttft_s, tbt_s=info.slo_tbt_s)
    summary = slo.summarize(records, bounds)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("load", "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        title=f"{info.trace} at {info.rate_scale:g}× on {info.model}",
        state=_state(info, summary),
        headline=_headline(summary),
        facts=_facts(info),
        outcomes=_outcomes(summary),
        latency=_latency(summary),
        objectives=_objectives(summary, bounds),
        cache=_cache(summary.cache),
        problems=_problems(records),
        percentiles=slo.PERCENTILES,
        figures={
            "latency": plots.latency_cdf(records, bounds),
            "goodput": plots.goodput(records, bounds),
            "hits": plots.hit_tokens(records),
            "rejections": plots.rejections(summary),
            "in_flight": plots.in_flight(records),
        },
    )


def headline(info: RunInfo, records: Sequence[RunRecord]) -> list[Row]:
    """The few numbers that the command line shows at the end of a run."""
    return _headline(slo.summarize(records, slo.Slo(ttft_s=info.slo_ttft_s, tbt_s=info.slo_tbt_s)))


def _headline(summary: slo.Summary) -> list[Row]:
    answered = summary.outcomes.get("ok", 0)
    cache = summary.cache
    return [
        Row("answered", (f"{answered} of {summary.offered}",)),
        Row("within both bounds", (_share(summary.good, summary.offered),)),
        Row("goodput", (f"{summary.goodput_rps:.3g} requests/s",)),
        Row("TTFT p50 / p99", (_pair(summary.ttft),)),
        Row("TBT p50 / p99", (_pair(summary.tbt),)),
        Row("prompt tokens from cache", (_share(cache.cached_tokens, cache.prompt_tokens),)),
    ]


def _state(info: RunInfo, summary: slo.Summary) -> list[str]:
    """What a reader must know before the numbers."""
    said = []
    if info.duration_s is None:
        said.append(f"This run was not brought to its end: {summary.offered} of {info.planned} requests have a record, "
                    "those in flight when it stopped have none.")
    elif info.interrupted:
        said.append(f"This run was stopped early: {summary.offered} of {info.planned} requests have a record.")
    if summary.lag is not None and summary.lag.percentiles[90] > _TOLERABLE_LAG_S:
        said.append(f"The client could not keep the schedule: a tenth of the requests left at least "
                    f"{format_seconds(summary.lag.percentiles[90])} late. The load was lower than it says; use a "
                    "faster or less busy machine, or a lower rate.")
    return said


def _facts(info: RunInfo) -> list[Row]:
    started = datetime.fromtimestamp(info.started_at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    duration = "not known" if info.duration_s is None else format_seconds(info.duration_s)
    return [
        Row("trace", (info.trace,)),
        Row("source", ("a live gateway" if info.source == "live" else "simulated",)),
        Row("gateway", (info.url,)),
        Row("model", (info.model,)),
        Row("API", (info.api,)),
        Row("started", (started,)),
        Row("duration", (duration,)),
        Row("rate scale", (f"{info.rate_scale:g}",), "2 sends twice as fast as the trace did"),
        Row("length scale", (f"{info.length_scale:g}{_at_most(info.max_input)}",),
            "prompt tokens sent for each prompt token of the trace"),
        Row("output scale", (f"{info.output_scale:g}{_at_most(info.max_output)}",)),
        Row("in flight at most", (str(info.max_in_flight),), "what is due beyond it is dropped and counted"),
        Row("seed", (str(info.seed),)),
        Row("client", (f"{info.host}, moonbus {info.version}",)),
    ]


_OUTCOME_MEANINGS = {
    "ok": "the stream came to its end with a finish reason",
    "rejected": "429 or 503: the cluster would not take it",
    "failed": "any other end: an error, a broken or silent stream",
    "interrupted": "the replay was stopped first",
    "dropped": "never sent: too many were in flight at the client",
}


def _outcomes(summary: slo.Summary) -> list[Row]:
    return [
        Row("offered", (str(summary.offered), "", f"{summary.offered_rps:.3g}"), "requests the schedule asked for"),
        *(Row(name, (str(summary.outcomes.get(name, 0)), _share(summary.outcomes.get(name, 0), summary.offered),
                     f"{summary.outcomes.get(name, 0) / summary.offered_s:.3g}"), meaning)
          for name, meaning in _OUTCOME_MEANINGS.items()),
    ]


def _latency(summary: slo.Summary) -> list[Row]:
    rows = (
        ("TTFT", summary.ttft, "sending to the first chunk with text"),
        ("TBT", summary.tbt, "mean of the longest tenth of a request's gaps between chunks (one gap at least)"),
        ("mean gap", summary.mean_gap, "mean of all of a request's gaps"),
        ("whole request", summary.total, "sending to the end of the stream"),
        ("schedule lag", summary.lag, "how much later than scheduled requests left; large means a client too slow"),
    )
    return [Row(name, _distribution(distribution), meaning) for name, distribution, meaning in rows]


def _distribution(distribution: slo.Distribution | None) -> tuple[str, ...]:
    if distribution is None:
        return ("0", *("–" for _ in range(2 + len(slo.PERCENTILES))))
    values = (distribution.mean, *distribution.percentiles.values(), distribution.maximum)
    return (str(distribution.count), *(format_seconds(value) for value in values))


def _objectives(summary: slo.Summary, bounds: slo.Slo) -> list[Row]:
    offered = summary.offered
    return [
        Row("TTFT bound", (format_seconds(bounds.ttft_s), str(summary.met_ttft), _share(summary.met_ttft, offered)),
            "finished, first token in time"),
        Row("TBT bound", (format_seconds(bounds.tbt_s), str(summary.met_tbt), _share(summary.met_tbt, offered)),
            "finished, TBT within the bound; an answer in one chunk has no gap"),
        Row("both", ("", str(summary.good), _share(summary.good, offered)), "good requests; shares are of all offered"),
        Row("goodput", (f"{summary.goodput_rps:.3g} requests/s", "", ""),
            f"good requests a second over the {format_seconds(summary.offered_s)} of the schedule"),
        Row("output", (f"{summary.output_tokens / max(summary.duration_s, 1.0):,.0f} tokens/s", "", ""),
            f"{summary.output_tokens:,} tokens generated, first scheduled request to last end"),
    ]


def _cache(cache: slo.CacheUse) -> list[Row]:
    error = "–" if cache.mean_error_tokens is None else f"{cache.mean_error_tokens:.1f} tokens"
    return [
        Row("prompt", (f"{cache.prompt_tokens:,}", ""),
            f"as the server counted them, over {cache.requests} finished requests"),
        Row("possible", (f"{cache.shared_tokens:,}", _share(cache.shared_tokens, cache.prompt_tokens)),
            "shared with an earlier request of the run; whole blocks only can be reused, so a little less is in reach"),
        Row("predicted", ((f"{cache.predicted_tokens:,}", _share(cache.predicted_tokens, cache.prompt_tokens))
                          if cache.predicted_requests else ("–", "–")),
            f"expected by the conductor, over {cache.predicted_requests} requests whose answer told it"),
        Row("actual", (f"{cache.cached_tokens:,}", _share(cache.cached_tokens, cache.prompt_tokens)), "not computed"),
        Row("mean error", (error, ""), "mean of |predicted − actual| a request"),
    ]


def _problems(records: Sequence[RunRecord]) -> list[Row]:
    """A row for each reason, with some of the distinct messages that came with it."""
    reasons: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        if record.outcome in ("rejected", "failed"):
            reasons.setdefault((record.outcome, record.code or "unknown"), []).append(record)
    rows: list[Row] = []
    for (outcome, code), group in sorted(reasons.items(), key=lambda item: -len(item[1])):
        waits = slo.Distribution.of(record.retry_after_s for record in group)
        messages = list(dict.fromkeys(record.message for record in group if record.message))[:_SAMPLES]
        rows.append(Row(code, (outcome, str(len(group)), "–" if waits is None else format_seconds(waits.mean)),
                        " · ".join(messages)))
    return rows


def _pair(distribution: slo.Distribution | None) -> str:
    if distribution is None:
        return "–"
    return f"{format_seconds(distribution.percentiles[50])} / {format_seconds(distribution.percentiles[99])}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _at_most(limit: int | None) -> str:
    return "" if limit is None else f", at most {limit} tokens"
