"""One OpenTelemetry trace a request, across all services.

Services use the plain OpenTelemetry API (``trace.get_tracer("moonbus.gateway")``); this module opens the exporters,
carries the context over the bus (:func:`inject`, :func:`extract`) and writes spans after the fact (:func:`record`).
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from shared.errors import SettingError
from shared.settings import CommonSettings

FLUSH_MS = 500
"""Spans reach their exporter within this time."""
EXPORT_S = 3.0
"""Longest time one export may take."""

CLOSE_S = 2.0
"""Longest time that closing the exporters holds up the end of the process."""
QUEUE_SPANS = 16_384
"""Most finished spans that wait for an exporter; beyond it the oldest are dropped."""

_propagator = TraceContextTextMapPropagator()
_log = logging.getLogger(__name__)


def setup(service: str, instance: str, settings: CommonSettings) -> TracerProvider:
    """Opens the exporters that ``settings`` name and makes them this process's. Call once; end with :func:`shut`."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": service, "service.instance.id": instance}),
        shutdown_on_exit=False,
    )
    if settings.trace_file:  # first: it is closed first, and never waits for a network
        _add(provider, FileSpanExporter(Path(settings.trace_file).expanduser(), service, instance))
    if settings.otlp_endpoint:
        # Loaded only where it is used: everybody who imports the bus imports this module.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        _say_export_failures_once()
        _add(provider, OTLPSpanExporter(endpoint=f"{settings.otlp_endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S))
    trace.set_tracer_provider(provider)
    return provider


def shut(provider: TracerProvider) -> None:
    """Writes what is still buffered and closes the exporters; a collector that hangs costs ``CLOSE_S`` at most."""
    closing = threading.Thread(target=provider.shutdown, name="close exporters", daemon=True)
    closing.start()
    closing.join(CLOSE_S)


def inject() -> dict[str, str]:
    """Headers that carry the current trace context; empty when there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier


def extract(headers: Mapping[str, str]) -> Context:
    """The trace context in ``headers``; an empty one when there is none or it is malformed."""
    return _propagator.extract(headers, context=Context())


def record(
    name: str,
    *,
    start_s: float,
    end_s: float,
    parent: Context | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    error: str = "",
) -> Context:
    """Writes a span after the fact. Times are Unix seconds; ``parent`` defaults to the current context.

    Returns the context of the new span, so that spans can be recorded under it.
    """
    span = trace.get_tracer("moonbus").start_span(
        name, context=parent, start_time=int(start_s * 1e9), attributes=attributes)
    if error:
        span.set_status(trace.StatusCode.ERROR, error)
    span.end(int(max(start_s, end_s) * 1e9))
    return trace.set_span_in_context(span, parent)


class FileSpanExporter(SpanExporter):
    """Appends finished spans to a file, one JSON object a line.

    A batch is one ``write`` on a descriptor opened for appending, so the lines of several processes do not mix.
    """

    def __init__(self, path: Path, service: str, instance: str) -> None:
        self._service, self._instance = service, instance
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SettingError("trace_file", str(path), f"a file that can be written ({error})") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(self._line(span)) + "\n" for span in spans).encode()
        try:
            os.write(self._descriptor, lines)
        except OSError:
            _log.exception("trace_file_failed")
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _line(self, span: ReadableSpan) -> dict[str, object]:
        return {
            "trace_id": f"{span.context.trace_id:032x}",
            "span_id": f"{span.context.span_id:016x}",
            "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
            "name": span.name,
            "service": self._service,
            "instance": self._instance,
            "start_s": (span.start_time or 0) / 1e9,
            "end_s": (span.end_time or 0) / 1e9,
            "attributes": dict(span.attributes or {}),
            "status": span.status.status_code.name.lower(),
        }


def _add(provider: TracerProvider, exporter: SpanExporter) -> None:
    provider.add_span_processor(BatchSpanProcessor(
        exporter, max_queue_size=QUEUE_SPANS, schedule_delay_millis=FLUSH_MS,
        export_timeout_millis=int(EXPORT_S * 1000)))


class _Once(logging.Filter):
    """Lets one record through: a trace store that is away must not fill the logs."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        said, self._said = self._said, True
        return not said


def _say_export_failures_once() -> None:
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").addFilter(_Once())
