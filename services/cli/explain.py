"""``moonbus explain``: why a request ran where it did, or why it was turned away. What conductors weighed is shown
beside what became of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from services.cli.find import ask, settings
from services.cli.kv_show import outcome_of
from services.cli.output import compact_table, console, name_column, number_column, print_json
from shared.bus.subjects import REQUEST
from shared.messages import Candidate, Decision, Placement, Rejection, RequestQuery, RequestReply, RequestRow
from shared.units import format_seconds

_CHOSEN = "→"


def explain(name: str, nats_url: str | None, data_dir: str | None, *, json: bool) -> None:
    """Prints the decisions on the request whose id begins with ``name``; its answer's id, and the client's, will do."""
    common = settings(nats_url, data_dir)
    row = cast(RequestReply, ask(common, REQUEST.at(), RequestQuery(request=name), who="store-manager")).request
    if json:
        print_json(row)
    else:
        console.print(explanation(row))


def explanation(row: RequestRow) -> RenderableType:
    """All that is known of why."""
    received = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.received_at_s))
    finish = f", finish {row.finish}" if row.finish else ""
    parts: list[RenderableType] = [
        Text.from_markup(f"[bold]{escape(row.request)}[/]  {escape(row.model)}, "
                         f"tenant {escape(row.tenant or '(none)')}, received {received}"
                         + (f", for its client {escape(row.client_id)}" if row.client_id else "")),
        Text.from_markup(f"{outcome_of(row)}{finish} after {format_seconds(row.duration_s)}: "
                         f"{row.prompt_tokens:,} prompt tokens, {row.completion_tokens:,} answered"),
    ]
    if not row.decisions:
        why = ("no conductor answered" if row.code == "no_conductor" else
               "no decision is recorded: it ended before one was made, or was before decisions were kept")
        return Group(*parts, Text(why))
    for decision in row.decisions:
        parts += ["", *_decision(decision, row)]
    return Group(*parts)


def _decision(decision: Decision, row: RequestRow) -> list[RenderableType]:
    head = f"Attempt {decision.attempt + 1} of {max(row.attempts, 1)}, {format_seconds(decision.at_s)} after arrival"
    answer = decision.answer
    if isinstance(answer, Rejection):
        return [
            Text.from_markup(f"{head}: [yellow]rejected[/]{_policy(answer)} with code [bold]{escape(answer.code)}[/], "
                             f"try again after {format_seconds(answer.retry_after_s)}"),
            Text(answer.message), *_candidates(answer.candidates, None), *_decode(answer)]
    parts: list[RenderableType] = [
        Text.from_markup(f"{head}, by {escape(answer.conductor)}{_policy(answer)}: prefill on "
                         f"[bold]{escape(answer.prefill)}[/], decode on [bold]{escape(answer.decode)}[/]")]
    if decision.code:
        parts.append(Text.from_markup(f"[red]ended early[/] with {escape(decision.code)}: {escape(decision.message)}"))
    parts += _candidates(answer.candidates, answer)
    if answer.sources:
        parts.append(Text("fetched: " + ", ".join(
            f"blocks {source.first_block}-{source.first_block + source.num_blocks - 1} from {source.owner}"
            for source in answer.sources)))
    parts += _decode(answer)
    if answer.reuse_gain_s:
        parts.append(Text(f"more copies of its prefix would have saved {format_seconds(answer.reuse_gain_s)}"))
    if decision is row.decisions[-1]:
        parts.append(_outcome(answer, decision, row))
    return parts


def _policy(answer: Placement | Rejection) -> str:
    """Whose policy decided, where it was not our own."""
    return f" (policy {escape(answer.policy)})" if answer.policy else ""


def _decode(answer: Placement | Rejection) -> list[RenderableType]:
    """The decode workers that were looked at."""
    if not answer.decode_candidates:
        return []
    return [Text("decode, predicted TBT: " + ", ".join(
        f"{one.decode} {format_seconds(one.tbt_s)}" + (f" (has {one.own_blocks} blocks)" if one.own_blocks else "")
        for one in answer.decode_candidates))]


def _candidates(candidates: Sequence[Candidate], chosen: Placement | None) -> list[RenderableType]:
    """The ways that were weighed, the chosen one marked; it stands first when it was not among the best ones kept."""
    ways = [*candidates]
    mark: Candidate | None = None
    if chosen is not None:
        own, fetched = chosen.own_blocks, sum(source.num_blocks for source in chosen.sources)
        mark = next((way for way in ways if (way.prefill, way.own_blocks, way.fetched_blocks)
                     == (chosen.prefill, own, fetched)), None)
        if mark is None:
            mark = Candidate(prefill=chosen.prefill, queue_s=chosen.predicted_queue_s, own_blocks=own,
                             transfer_s=chosen.predicted_transfer_s, prefill_s=chosen.predicted_prefill_s,
                             fetched_blocks=fetched)
            ways.insert(0, mark)
    if not ways:
        return []
    width = max(len(way.prefill) for way in ways)
    table = compact_table("", name_column("prefill", width), *map(number_column, (
        "own", "fetched", "queue", "transfer", "prefill", "TTFT", "delays")))
    for way in ways:
        style = "bold" if way is mark else None
        table.add_row(
            _CHOSEN if way is mark else "", way.prefill, f"{way.own_blocks}", f"{way.fetched_blocks}",
            *map(_short, (way.queue_s, way.transfer_s, way.prefill_s, way.ttft_s, way.delays_s)), style=style)
    said = [Text(f"{way.prefill}: {way.note}", style="dim") for way in ways if way.note]
    return [table, *said]


def _outcome(answer: Placement, decision: Decision, row: RequestRow) -> Table:
    """What was predicted of the last attempt, and what came of it: its first token is counted from the decision on."""
    ttft_s = None if row.ttft_s is None else row.ttft_s - decision.at_s
    table = compact_table("", *map(number_column, ("predicted", "actual", "off by")))
    for name, predicted_s, actual_s in (("TTFT from here", answer.predicted_ttft_s, ttft_s),
                                        ("TBT", answer.predicted_tbt_s, row.tbt_s)):
        table.add_row(name, format_seconds(predicted_s), "?" if actual_s is None else format_seconds(actual_s),
                      "" if actual_s is None else _off(predicted_s, actual_s))
    table.add_row("hit tokens", f"{answer.hit_tokens:,}", f"{row.hit_tokens:,}",
                  f"{row.hit_tokens - answer.hit_tokens:+,}")
    return table


def _off(predicted: float, actual: float) -> str:
    return f"{actual / predicted - 1:+.0%}" if predicted > 0 else ""


def _short(seconds: float) -> str:
    """Few letters, for narrow tables: ``0``, ``12ms``, ``3.4s``."""
    if seconds == 0:
        return "0"
    return f"{seconds * 1e3:.3g}ms" if abs(seconds) < 1 else f"{seconds:.3g}s"
