"""Seeing it work: ``tracing`` (OpenTelemetry), ``metrics`` (every Prometheus instrument), ``logs`` (records on one line)."""
