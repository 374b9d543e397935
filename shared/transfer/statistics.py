"""What an engine has done, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from prometheus_client import Counter as CounterMetric
from prometheus_client import Histogram

from shared.telemetry import metrics
from shared.transfer.plan import Choice


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters since the engine was opened; ``connections`` is of now."""

    pushes: Mapping[str, int]
    """{path: pushes tried by it}"""
    sent_bytes: Mapping[str, int]
    """{path: bytes that receivers acknowledged}"""
    received_bytes: Mapping[str, int]
    """{path: bytes verified in our segments}"""
    failures: Mapping[str, int]
    """{code of a TransferError: slices that ended with it}"""
    failovers: Mapping[tuple[str, str], int]
    """{(path that failed, path tried next): pushes}"""
    refused_claims: int
    """Claims of senders that no grant of ours covered."""
    corrupt_spans: int
    """Spans whose bytes did not fit their checksum on arrival."""
    dropped_connections: Mapping[str, int]
    """{protocol, deadline, full, accept, internal: inbound connections ended by us}"""
    connections: int
    """Inbound connections."""


@dataclass(slots=True)
class Counts:
    """The sending side's counters; kept by the event loop."""

    pushes: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    failovers: Counter[tuple[str, str]] = field(default_factory=Counter)

    def chose(self, choice: Choice) -> None:
        """A push starts by this path."""

    def pushed(self, path: str, nbytes: int, *, seconds: float) -> None:
        """A push was tried by ``path``; ``nbytes`` of it were acknowledged."""
        self.pushes[path] += 1
        self.sent_bytes[path] += nbytes
        histogram, counter = _sent_metrics(path)
        histogram.observe(seconds)
        counter.inc(nbytes)

    def failed(self, path: str, codes: Iterable[str]) -> None:
        """Slices ended with these codes; ``path`` was tried last."""
        for code in codes:
            self.failures[code] += 1
            metrics.TRANSFER_FAILURES.labels(path, code).inc()

    def failed_over(self, before: str, after: str) -> None:
        """A push goes on by another path."""
        self.failovers[before, after] += 1
        metrics.TRANSFER_FAILOVERS.labels(before, after).inc()


@cache
def _sent_metrics(path: str) -> tuple[Histogram, CounterMetric]:
    """Seconds of pushes and bytes sent by ``path``; looked up once."""
    return metrics.TRANSFER_SECONDS.labels(path), metrics.TRANSFER_BYTES.labels(path, "sent")
