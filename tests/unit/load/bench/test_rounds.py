"""Rounds, ratios and targets, with probes that answer what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from load.bench.rounds import Outcome, Probe, Target, is_wanted, make_rows, measure_rounds
from shared.errors import UserError


def probe(name: str, answers: Iterator[Mapping[str, float] | Exception], asked: list[str]) -> Probe:
    async def measure() -> Mapping[str, float]:
        asked.append(name)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer
    return Probe(name, measure)


async def measured(*probes: Probe, rounds: int, deadline_s: float = 5.0) -> Outcome:
    return await measure_rounds(probes, rounds=rounds, deadline_s=deadline_s, progress=lambda number: None)


async def test_odd_rounds_run_backwards() -> None:
    asked: list[str] = []
    a, b = (probe(name, iter([{"rate": 1.0}, {"rate": 3.0}]), asked) for name in ("a", "b"))
    outcome = await measured(a, b, rounds=2)
    assert asked == ["a", "b", "b", "a"]
    assert outcome == Outcome(values={"a/rate": [1.0, 3.0], "b/rate": [1.0, 3.0]}, lost={}, rounds=2)


async def test_a_probe_that_fails_loses_its_rows_and_no_others() -> None:
    asked: list[str] = []
    good = probe("good", iter([{"rate": 1.0}] * 3), asked)
    bad = probe("bad", iter([{"rate": 1.0}, UserError("it broke")]), asked)
    outcome = await measured(good, bad, rounds=3)
    assert outcome.lost == {"bad": "it broke"} and outcome.values == {"good/rate": [1.0] * 3}
    assert asked.count("bad") == 2


async def test_a_probe_that_hangs_costs_the_deadline() -> None:
    async def hang() -> Mapping[str, float]:
        await asyncio.Event().wait()
        raise AssertionError
    good = probe("good", iter([{"p50": 1.0}] * 2), [])
    outcome = await measured(Probe("hangs", hang), good, rounds=2, deadline_s=0.05)
    assert outcome.lost == {"hangs": "no figures within 0.05 s"} and list(outcome.values) == ["good/p50"]


async def interrupted(*probes: Probe, reached: asyncio.Event) -> Outcome:
    task = asyncio.create_task(measured(*probes, rounds=7))
    await reached.wait()
    task.cancel()
    return await task


@pytest.mark.parametrize(("complete", "values"), [
    (2, {"good/rate": [1.0, 2.0], "stops/p50": [1.0, 2.0]}), (0, {})])
async def test_an_interruption_leaves_the_complete_rounds(complete: int, values: dict[str, list[float]]) -> None:
    reached = asyncio.Event()
    asked: list[str] = []

    async def stop() -> Mapping[str, float]:
        asked.append("stops")
        if asked.count("stops") > complete:
            reached.set()
            await asyncio.Event().wait()
        return {"p50": float(asked.count("stops"))}

    good = probe("good", iter([{"rate": 1.0}, {"rate": 2.0}, {"rate": 3.0}]), asked)
    bad = probe("bad", iter([UserError("it broke")]), [])
    outcome = await interrupted(bad, good, Probe("stops", stop), reached=reached)
    assert outcome.is_interrupted and outcome.rounds == complete
    assert asked.count("good") == complete + 1, "an even round asks it before the one that stops"
    assert outcome.values == values and outcome.lost == {"bad": "it broke"}


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine was ten times slower in the second round, for both.
    rows = make_rows({"ours/rate": [2.0, 0.2, 3.0], "theirs/rate": [1.0, 0.1, 1.0]},
                     [Target("ours/rate", "theirs/rate", at_least=1.5)])
    ours, theirs = rows
    assert (ours.value, ours.against, ours.against_value, ours.ratio, ours.met) == (2.0, "theirs/rate", 1.0, 2.0, True)
    assert ours.unit == "GB/s" and ours.target == "≥ 1.5 × theirs/rate"
    assert theirs.against is None and theirs.met is None


def test_a_figure_has_a_row_for_each_comparison() -> None:
    values = {"ours/p50": [1.0], "a/p50": [2.0], "b/p50": [0.5]}
    rows = make_rows(values, [Target("ours/p50", "a/p50", at_most=1.0), Target("ours/p50", "b/p50", at_most=1.0),
                              Target("ours/p50", at_most=0.9), Target("ours/p50", "absent/p50", at_most=1.0)])
    assert [(row.name, row.against, row.ratio, row.met) for row in rows] == [
        ("ours/p50", "a/p50", 0.5, True), ("ours/p50", "b/p50", 2.0, False), ("ours/p50", None, None, False),
        ("a/p50", None, None, None), ("b/p50", None, None, None)]


def test_a_comparison_without_a_bound_is_neither_met_nor_missed() -> None:
    row = make_rows({"a/cpu": [1.0], "b/cpu": [4.0]}, [Target("a/cpu", "b/cpu")])[0]
    assert (row.ratio, row.target, row.met) == (0.25, None, None)


@pytest.mark.parametrize(("name", "patterns", "wanted"), [
    ("shm/2MiB", [], True), ("shm/2MiB", ["shm"], True), ("shm/2MiB", ["*/2MiB"], True), ("shm/2MiB", ["tcp"], False),
    ("shm+xxh3/2MiB", ["shm"], False), ("layers/shm", ["layers"], True),
    ("mooncake-put/2MiB", ["mooncake-*"], True),
])
def test_patterns_choose_probes(name: str, patterns: list[str], wanted: bool) -> None:
    assert is_wanted(name, patterns) is wanted


