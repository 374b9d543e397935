"""Logs on one line, spans in a file, context in headers, instruments with proper names."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from prometheus_client import REGISTRY

from shared.errors import SettingError
from shared.telemetry import logs, metrics, tracing
from shared.telemetry.logs import Limited, LineFormatter


def line_of(message: str, **fields: object) -> str:
    record = logging.LogRecord("x", logging.WARNING, "f", 1, message, None, None)
    record.created, record.msecs = 1_700_000_000.25, 250.0
    record.fields = fields
    return LineFormatter("gateway", "g-1").format(record)


def test_a_record_is_one_line_with_time_level_who_action_and_values() -> None:
    assert line_of("placed", request="r1", ttft_s=0.123456789, why="two words", empty="") == (
        '2023-11-14T22:13:20.250Z warning gateway/g-1 placed request=r1 ttft_s=0.123457 why="two words" empty=""')


def test_nothing_in_a_value_makes_a_second_line() -> None:
    assert "\n" not in line_of("said", text='line 1\nline 2 "quoted"')


def test_a_stack_trace_follows(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("gateway", "g-1"))
    log = logging.Logger("own")
    log.addHandler(handler)
    try:
        raise KeyError("k")
    except KeyError:
        log.exception("failed")
    assert stream.getvalue().splitlines()[0].endswith("error gateway/g-1 failed")
    assert "KeyError: 'k'" in stream.getvalue()


def test_an_unknown_level_is_one_line() -> None:
    with pytest.raises(SettingError, match="setting log_level is 'loud'; expected debug or info"):
        logs.setup("x", "y", "loud")


def test_a_complaint_is_said_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("test.limited")
    quiet, chatty = Limited(log, every_s=3600.0), Limited(log, every_s=0.0)
    for _ in range(5):
        quiet.warning("odd", key="a")
    quiet.warning("odd", key="b")
    assert len(caplog.records) == 2
    for _ in range(3):
        chatty.warning("odd", key="a")
    assert len(caplog.records) == 5


def test_context_survives_the_headers() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    assert tracing.inject() == {}
    with tracer.start_as_current_span("root") as span:
        headers = tracing.inject()
    carried = trace.get_current_span(tracing.extract(headers)).get_span_context()
    assert carried.trace_id == span.get_span_context().trace_id
    assert carried.span_id == span.get_span_context().span_id


@pytest.mark.parametrize("headers", [{}, {"traceparent": ""}, {"traceparent": "00-zz-1-1"}, {"traceparent": "x" * 500}])
def test_malformed_headers_are_no_context(headers: dict[str, str]) -> None:
    assert not trace.get_current_span(tracing.extract(headers)).get_span_context().is_valid


def test_spans_are_appended_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "spans.jsonl"
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(tracing.FileSpanExporter(path, "gateway", "g-1")))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("request") as root:
        with tracer.start_as_current_span("place", attributes={"hit_tokens": 64}) as child:
            child.set_status(trace.StatusCode.ERROR, "no worker")
    provider.shutdown()
    place, request = (json.loads(line) for line in path.read_text().splitlines())
    assert request["name"] == "request" and request["parent_id"] == ""
    assert place["parent_id"] == request["span_id"] == f"{root.get_span_context().span_id:016x}"
    assert place["trace_id"] == request["trace_id"]
    assert place["attributes"] == {"hit_tokens": 64} and place["status"] == "error"
    assert request["start_s"] <= place["start_s"] <= place["end_s"] <= request["end_s"]


def test_a_trace_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"setting trace_file is .*; expected a file that can be written"):
        tracing.FileSpanExporter(tmp_path / "file" / "spans.jsonl", "gateway", "g-1")


def test_a_span_after_the_fact_without_a_provider_costs_nothing() -> None:
    assert isinstance(tracing.record("late", start_s=1.0, end_s=2.0, parent=Context()), Context)


def test_instruments_follow_the_conventions() -> None:
    ours = [metric for metric in REGISTRY.collect() if metric.name.startswith("moonbus_")]
    declared = [value for name, value in vars(metrics).items() if name.isupper() and not name.startswith("_")]
    assert len(ours) == len(declared) > 40
    units = ("_seconds", "_bytes", "_requests", "_tokens", "_blocks", "_events", "_messages", "_workers", "_attempts",
             "_error")
    for metric in ours:
        assert re.fullmatch(r"moonbus_[a-z0-9_]+", metric.name)
        assert metric.documentation.endswith("."), f"{metric.name} has no meaning"
        if metric.type != "counter":  # counters get _total from the library
            assert metric.name.endswith(units), f"{metric.name} has no unit"
