"""``moonbus advise``: whether the ratio of prefill to decode workers fits the load, and what it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.cli.find import ask, settings
from services.cli.output import compact_table, console, number_column, print_json
from shared.bus.subjects import WORKERS
from shared.messages import RoleAdvice, WorkersQuery, WorkersReply
from shared.units import format_seconds

_HELD_S = 90.0
"""For how long after the load was too much a conductor says so: ``Rules.window_s`` of ``conductor/core/roles.py``."""
NOTHING = "nothing to advise on: no request was placed yet, or a model has one worker only"


def advise(nats_url: str | None, data_dir: str | None, *, json: bool) -> None:
    """Prints what a conductor advises."""
    reply = cast(WorkersReply, ask(settings(nats_url, data_dir), WORKERS.at(), WorkersQuery(), who="conductor"))
    if json:
        print_json(reply.advice)
    else:
        console.print(report(reply.advice))


def report(advice: Sequence[RoleAdvice]) -> RenderableType:
    """The verdict on each model, with the terms it comes from."""
    if not advice:
        return Text(NOTHING)
    parts: list[RenderableType] = []
    for one in advice:
        style = "yellow" if one.is_wrong or one.is_short else "green"
        parts += ["", Text(f"{one.model}: {verdict(one)}", style=style), _workers(one), _terms(one)]
    return Group(*parts[1:])


def verdict(one: RoleAdvice) -> str:
    """In words for whoever runs the cluster."""
    now = f"{one.prefill} prefill and {one.decode} decode workers"
    said = []
    if one.is_wrong:
        said.append(f"the ratio is wrong: {one.best_prefill} prefill and {one.best_decode} decode workers would serve "
                    f"this load better than {one.prefill} and {one.decode}; start some with the other role, or with "
                    "--elastic, and they change sides by themselves")
    if one.is_short:
        said.append(f"there are, or were within the last {_HELD_S:g} s, too few workers, whatever they do: {now}")
    return "; and ".join(said) or f"{now} fit the load"


def _workers(one: RoleAdvice) -> Table:
    table = compact_table("workers", *map(number_column, ("now", "load needs", "advised")))
    table.add_row("prefill", str(one.prefill), f"{one.needed_prefill:.2f}", str(one.best_prefill))
    table.add_row("decode", str(one.decode), f"{one.needed_decode:.2f}", str(one.best_decode))
    return table


def _terms(one: RoleAdvice) -> Table:
    """Where the needs come from."""
    table = Table.grid(padding=(0, 2))
    answers = (("answers to all of these", f"{one.answers:.2f} decode workers"),) if one.answers else ()
    for name, value in (
        ("prompts that arrive", f"{one.prefill_rate:.3g} s of prefill a second"),
        ("prompts that wait", f"{format_seconds(one.queued_s)} of prefill"),
        *answers,  # a conductor of an earlier version says nothing of them
        ("answers that arrive", f"{one.decode_rate:.3g} s of decode steps a second"),
        ("a decode step", f"{format_seconds(one.step_s)} if empty, may take {format_seconds(one.step_limit_s)}"),
        ("answers now", f"{one.batch:,} with {one.context_tokens:,} tokens of context"),
        ("their memory", f"that of {one.memory:.2f} decode workers"),
    ):
        table.add_row(Text(name, style="dim"), value)
    return table
