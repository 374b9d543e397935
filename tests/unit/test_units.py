"""Quantities as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.units import format_bytes, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(("text", "size_bytes"), [
    ("0", 0), ("512", 512), ("512B", 512), ("1k", 1000), ("1kB", 1000), ("1KiB", 1024), ("1.5 MiB", 1572864),
    ("16GiB", 16 * 2**30), ("2 tb", 2 * 10**12), (" 3GB ", 3 * 10**9),
])
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(("text", "duration_s"), [
    ("3", 3.0), ("250ms", 0.25), ("30s", 30.0), ("1.5m", 90.0), ("2min", 120.0), ("1h", 3600.0), ("10us", 1e-5),
])
def test_durations(text: str, duration_s: float) -> None:
    assert parse_seconds(text) == pytest.approx(duration_s)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 GiB extra", "1e3", "1,5s", "5 parsecs"])
def test_what_is_no_quantity_is_said_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 512MiB"):
        parse_bytes(text)
    with pytest.raises(ValueError, match="write it like 250ms"):
        parse_seconds(text)


def test_how_they_are_shown() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 17179869184, 2**45)] == [
        "0 B", "1023 B", "1.0 KiB", "16.0 GiB", "32.0 TiB"]
    assert [format_seconds(duration) for duration in (0.0123, 3.2, 0.0)] == ["12.3 ms", "3.20 s", "0.0 ms"]


@given(st.integers(min_value=0, max_value=2**50))
def test_a_shown_size_is_read_as_nearly_the_same(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.06)
