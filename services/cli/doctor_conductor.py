"""``moonbus doctor`` on conductors: their compiled part, and what a running one sees: its index, its estimates, the
roles of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from services.cli.advise import verdict
from services.cli.find import ask
from services.cli.findings import Finding
from services.conductor.core import native
from shared.bus.subjects import WORKERS
from shared.errors import MoonbusError
from shared.messages import IndexState, WorkersQuery, WorkersReply
from shared.settings import CommonSettings
from shared.units import format_bytes

FAR_OFF = 0.5
"""Estimates that are off by more than this share of what was observed are no good to decide by."""
_NEARLY_FULL = 0.9
_MOST_NAMED = 6
"""Workers named on a line."""


def compiled() -> Finding:
    """Whether a conductor started here would decide at full speed."""
    if native.WHY_NOT:
        return Finding("absent", "compiled conductor", f"{native.WHY_NOT}; the same decisions take twice as long",
                       "with a C compiler at hand, install moonbus again")
    return Finding("ok", "compiled conductor", "in use")


def examine_conductor(common: CommonSettings) -> Iterator[Finding]:
    """What one of the conductors says; of several, whichever answers."""
    try:
        reply = cast(WorkersReply, ask(common, WORKERS.at(), WorkersQuery(), who="conductor"))
    except MoonbusError as error:
        yield Finding("warn", "conductor", str(error))
        return
    yield from judge(reply)


def judge(reply: WorkersReply) -> Iterator[Finding]:
    """What is wrong with what it sees, or that it is well."""
    if reply.index is not None:
        yield _index(reply.index)
    off = [(error, f"{state.hello.worker} ({kind.replace('_', ' ')}, {error:.0%})") for state in reply.workers
           for kind, error in state.errors.items() if error > FAR_OFF]
    if off:
        named = [name for _, name in sorted(off, reverse=True)]
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        yield Finding("warn", "estimates", f"far off lately: {', '.join(named[:_MOST_NAMED])}{more}",
                      "other programs may take these machines' time; moonbus explain ID shows predicted and actual")
    elif any(state.errors for state in reply.workers):
        worst = max(error for state in reply.workers for error in state.errors.values())
        yield Finding("ok", "estimates", f"off by {worst:.0%} at most lately")
    else:
        yield Finding("ok", "estimates", "too little was observed to judge them")
    elastic = [state for state in reply.workers if state.hello.elastic]
    if elastic:
        away = [f"{state.hello.worker} ({state.now})" for state in elastic if state.now not in (None, state.hello.role)]
        where = f"away from home now: {', '.join(away[:_MOST_NAMED])}" if away else "all at home"
        yield Finding("ok", "elastic", f"{len(elastic)} of {len(reply.workers)} workers, {where}")
    for one in reply.advice:
        yield Finding("warn" if one.is_wrong or one.is_short else "ok", "roles", f"{one.model}: {verdict(one)}",
                      "moonbus advise shows the terms" if one.is_wrong or one.is_short else "")


def _index(index: IndexState) -> Finding:
    taken = f"{index.block_copies:,} of {index.max_block_copies:,} block copies, " \
            f"{format_bytes(index.nbytes)} of {format_bytes(index.max_bytes)}"
    share = max(index.block_copies / index.max_block_copies, index.nbytes / index.max_bytes)
    advice = "give it more with MOONBUS_CONDUCTOR_MAX_BLOCKS and MOONBUS_CONDUCTOR_MAX_INDEX_BYTES"
    if index.dropped:
        return Finding("warn", "prefix index", f"had no room for {index.dropped:,} block copies, which are not reused; "
                                               f"it holds {taken}", advice)
    if share >= _NEARLY_FULL:
        return Finding("warn", "prefix index", f"is nearly full: {taken}", advice)
    return Finding("ok", "prefix index", taken)
