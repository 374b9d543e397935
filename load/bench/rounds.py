"""Figures measured side by side: every probe once a round, medians over the rounds, ratios within a round.

A machine that others use gets faster and slower from minute to minute. Two figures are comparable when they were taken
seconds apart, so a ratio is the median of the rounds' ratios, not the ratio of two medians; odd rounds run backwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from statistics import median

import msgspec

from shared.errors import UserError

UNITS = {"p50": "ms", "p99": "ms", "rate": "GB/s", "cpu": "s/GB", "pushes": "1/s", "streamed": "ms", "whole": "ms",
         "ready": "s", "told": "s", "served": "s",
         "events": "1/s", "messages": "", "cores": "cores", "size": "MB"}
"""{last part of a row's name: its unit}; a GB is 10^9 bytes, ``cpu`` counts user and system time of both ends."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Measures the rows ``name/<figure>`` once each time it is called."""

    name: str
    measure: Callable[[], Awaitable[Mapping[str, float]]]
    """Answers ``{figure of UNITS: value}``; a :class:`UserError` ends the probe, and its rows, with that reason."""


@dataclass(frozen=True, slots=True)
class Target:
    """``row`` has to be ``at_least`` or ``at_most`` so many times ``against``, or that number when that is empty.

    With neither bound it is a comparison that nothing depends on.
    """

    row: str
    against: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def text(self) -> str:
        """As people write it; empty without a bound."""
        if self.at_least is None and self.at_most is None:
            return ""
        bound = f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"
        return f"{bound} × {self.against}" if self.against else f"{bound} {unit_of(self.row)}"

    def is_met(self, value: float) -> bool:
        """``value``: the ratio, or the figure itself when there is nothing to compare with."""
        return ((self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, once for each thing it is compared with."""

    name: str
    value: float
    """Median over the rounds."""
    unit: str
    against: str | None = None
    against_value: float | None = None
    ratio: float | None = None
    """Median over the rounds of this row's value over the other's in the same round."""
    rounds: list[float]
    target: str | None = None
    met: bool | None = None


@dataclass(slots=True)
class Outcome:
    """What was measured, and what could not be."""

    values: dict[str, list[float]] = field(default_factory=dict)
    """{row: a value a round}"""
    lost: dict[str, str] = field(default_factory=dict)
    """{probe: why it has no figures}"""
    rounds: int = 0
    """So many were complete; every row has a value of each."""
    is_interrupted: bool = False


def unit_of(row: str) -> str:
    """By the last part of its name."""
    return UNITS[row.rpartition("/")[2]]


def is_wanted(name: str, patterns: Sequence[str]) -> bool:
    """Does one of ``patterns`` (shell style) name the probe, or what stands before its slash? No pattern wants all."""
    return not patterns or any(fnmatch(name, pattern) or fnmatch(name, f"{pattern}/*") for pattern in patterns)


async def measure_rounds(probes: Sequence[Probe], *, rounds: int, deadline_s: float,
                         progress: Callable[[int], None]) -> Outcome:
    """Asks every probe ``rounds`` times, in turns. One that fails, or takes longer than ``deadline_s``, is left out
    from then on and loses its rows; the others go on.

    ``progress`` hears of each round, from 0, before it begins. A cancellation, like that of Ctrl-C, is taken for the
    wish to end here: it returns what the complete rounds gave, with ``is_interrupted``.
    """
    outcome = Outcome()
    for number in range(rounds):
        progress(number)
        try:
            await _measure_round(probes if number % 2 == 0 else probes[::-1], deadline_s, outcome)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None:
                task.uncancel()  # it ends here, so that whoever opened the probes can close them
            outcome.is_interrupted = True
            break
        outcome.rounds += 1
    # A median over fewer rounds than the others', or over more of them, is not comparable.
    outcome.values = {row: taken[:outcome.rounds] for row, taken in outcome.values.items()
                      if outcome.rounds and row.rpartition("/")[0] not in outcome.lost}
    return outcome


async def _measure_round(probes: Sequence[Probe], deadline_s: float, outcome: Outcome) -> None:
    for probe in probes:
        if probe.name in outcome.lost:
            continue
        try:
            async with asyncio.timeout(deadline_s):
                figures = await probe.measure()
        except TimeoutError:
            outcome.lost[probe.name] = f"no figures within {deadline_s:g} s"
        except UserError as error:
            outcome.lost[probe.name] = str(error)
        else:
            for figure, value in figures.items():
                outcome.values.setdefault(f"{probe.name}/{figure}", []).append(value)


def make_rows(values: Mapping[str, Sequence[float]], targets: Sequence[Target]) -> list[Row]:
    """A row for every comparison in ``targets`` whose two sides were measured, and one for every other figure."""
    rows: list[Row] = []
    for name, taken in values.items():
        base = Row(name=name, value=median(taken), unit=unit_of(name), rounds=list(taken))
        compared = [_compare(base, target, values) for target in targets
                    if target.row == name and (not target.against or target.against in values)]
        rows += compared or [base]
    return rows


def _compare(row: Row, target: Target, values: Mapping[str, Sequence[float]]) -> Row:
    if not target.against:
        return msgspec.structs.replace(row, target=target.text(), met=target.is_met(row.value))
    other = values[target.against]
    ratio = median(mine / theirs for mine, theirs in zip(row.rounds, other, strict=True))
    return msgspec.structs.replace(row, against=target.against, against_value=median(other), ratio=ratio,
                                   target=target.text() or None, met=target.is_met(ratio) if target.text() else None)
