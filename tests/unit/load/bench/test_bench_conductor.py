"""The conductor's benchmark on a small town: every figure is there and none is impossible."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from load.bench import conductor
from load.bench.conductor import GOALS, UNITS, ConductorOptions, Figure, Goal, Report, write_json

SMALL = ConductorOptions(rounds=1, workers=8, blocks=1024, resync_blocks=9_000, decisions=100)


def test_every_figure_has_a_value() -> None:
    figures = {**conductor.decisions(SMALL), **conductor.ingest(SMALL), **conductor.resync(SMALL)}
    ours = {name for name in figures if not name.startswith("plain ")}
    assert ours == {name for name in UNITS if not name.startswith("memory")}
    assert all(value > 0 for value in figures.values())
    assert figures["decision/p50"] <= figures["decision/p99"]
    assert set(GOALS) <= set(UNITS)


def test_ratios_say_how_many_times_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measures(options: ConductorOptions) -> object:
        return {"all": lambda: {"decision/p50": 200.0, "match/p50": 50.0, "plain match/p50": 100.0,
                                "ingest/events": 3e6, "plain ingest/events": 1e6, "memory/block": 100.0,
                                "plain memory/block": 400.0}}

    monkeypatch.setattr(conductor, "_measures", measures)
    report = conductor.bench(ConductorOptions(rounds=2), lambda text: None)
    assert {figure.name: figure.ratio for figure in report.figures} == {
        "decision/p50": None, "match/p50": 2.0, "ingest/events": 3.0, "memory/block": 4.0}
    assert all(figure.is_met for figure in report.figures if figure.goal)
    path = tmp_path / "report.json"
    write_json(report, path)
    assert msgspec.json.decode(path.read_bytes(), type=Report) == report
    assert isinstance(report.figures[0], Figure) and str(Goal(at_most=300)) == "≤ 300"
