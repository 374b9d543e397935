"""Figures: what stands on their axes."""

from __future__ import annotations

from typing import Any

import pytest

from load.sim import figures


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
