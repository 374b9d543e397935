"""Seeing it work: ``tracing`` (OpenTelemetry), ``metrics`` (every Prometheus instrument), ``logs`` (one line a record)."""
