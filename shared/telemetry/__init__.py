"""Seeing it work: ``tracing`` (OpenTelemetry), ``metrics`` (Prometheus instruments), ``logs`` (one line a record)."""
