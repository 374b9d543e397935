"""What an engine has done, in numbers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from prometheus_client import Counter as CounterMetric
from prometheus_client import Histogram

from shared.telemetry import metrics
from shared.transfer.plan import Routes
from shared.transfer.types import PushResult


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters since the engine was opened; ``connections`` is of now."""

    pushes: Mapping[str, int]
    """{path: pushes that it carried, or a part of}"""
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
    """The sending side's counters."""

    pushes: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    failovers: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def chose(self, routes: Routes) -> None:
        """A push starts by the first of these, if there is one."""
        if not routes.choices:
            _choice_counter("none", "no way", ()).inc()
            return
        best = routes.choices[0]
        # Paused ones stand last, so this one looks at them only when there are any.
        paused = tuple(choice.path for choice in routes.choices if choice.paused) if routes.choices[-1].paused else ()
        _choice_counter(best.path, best.reason, paused).inc()

    def ended(self, result: PushResult) -> None:
        """A push has its result. Any thread."""
        paths = result.path.split("+") if result.path else []
        for path in paths:
            nbytes = result.nbytes if len(paths) == 1 else sum(
                status.nbytes for status in result.slices if status.path == path)
            with self._lock:
                self.pushes[path] += 1
                self.sent_bytes[path] += nbytes
            histogram, counter = _sent_metrics(path)
            histogram.observe(result.seconds)
            counter.inc(nbytes)
        if result.error is None:
            return
        for status in result.slices:
            if status.error is not None:
                with self._lock:
                    self.failures[status.error.code] += 1
                metrics.TRANSFER_FAILURES.labels(status.path or "none", status.error.code).inc()

    def failed_over(self, before: str, after: str) -> None:
        """A push goes on by another path."""
        self.failovers[before, after] += 1
        metrics.TRANSFER_FAILOVERS.labels(before, after).inc()


@cache
def _choice_counter(path: str, reason: str, paused: tuple[str, ...]) -> CounterMetric:
    """Choices of ``path``; looked up once."""
    return metrics.TRANSFER_PATH_CHOICES.labels(path, f"{reason}; paused: {', '.join(paused)}" if paused else reason)


@cache
def _sent_metrics(path: str) -> tuple[Histogram, CounterMetric]:
    """Seconds of pushes and bytes sent by ``path``; looked up once."""
    return metrics.TRANSFER_SECONDS.labels(path), metrics.TRANSFER_BYTES.labels(path, "sent")
