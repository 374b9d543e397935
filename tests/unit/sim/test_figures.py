"""Figures: what stands on their axes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from load.sim import figures
from load.sim.experiment import Sample


@pytest.mark.parametrize(("low", "high", "ticks"), [
    (0.027, 0.11, [0.03, 0.05, 0.07, 0.1]),
    (0.03, 0.06, [0.03, 0.04, 0.05, 0.06]),
    (0.5, 40.0, [1.0, 3.0, 10.0, 30.0]),
    (0.001, 1000.0, [0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]),
    (1.0, 1.35, [1.0, 1.1, 1.2, 1.3]),
])
def test_a_logarithmic_axis_has_at_least_four_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert figures.log_ticks(low, high) == ticks


def test_both_axes_of_the_latencies_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "_png", lambda figure: drawn.append(figure) or b"")
    figures.distributions({"one": ([1.0, 2.0, 8.0], [0.03, 0.045, 0.1])})
    (figure,) = drawn
    for axes in figure.axes:
        labels = [text.get_text() for text in axes.get_xticklabels()]
        assert len(labels) >= 4 and all(float(label) > 0 for label in labels), labels


def test_loads_that_are_higher_in_a_later_panel_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "_png", lambda figure: drawn.append(figure) or b"")
    runs = {name: SimpleNamespace(curve=[Sample(60.0 * minute, 1, 1, most, 0.5) for minute in range(3)])
            for name, most in (("low", 0.9), ("high", 1.7))}
    figures.pool_loads(runs, until_s=1e9)  # type: ignore[arg-type]
    assert all(axes.get_ylim()[0] == 0 and axes.get_ylim()[1] >= 1.7 for axes in drawn[0].axes)
