"""What a start does before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launcher import stack


def test_spans_of_earlier_stacks_are_moved_aside_once_they_are_many(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "TRACE_BYTES", 10)
    trace, aside = tmp_path / "trace.jsonl", tmp_path / "trace.1.jsonl"
    stack.rotate(trace)
    assert not aside.exists(), "there was none"
    trace.write_text("0123456789")
    stack.rotate(trace)
    assert trace.exists() and not aside.exists()
    aside.write_text("older")
    trace.write_text("0123456789+")
    stack.rotate(trace)
    assert not trace.exists() and aside.read_text() == "0123456789+"
