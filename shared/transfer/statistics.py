"""What an engine has done, in numbers."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Counter as Counted
from prometheus_client import Histogram

from shared.telemetry import metrics
from shared.transfer.plan import Routes
from shared.transfer.types import PushResult

MAX_FRESH = 4096
"""Notes that are kept before they are counted in any case."""


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


class Counts:
    """An engine's counters, and its part of the process's metrics.

    What happens at each push is only noted; :meth:`flush` does the counting, beside the path of any push.
    Any thread may note.
    """

    def __init__(self, received_bytes: Mapping[str, int]) -> None:
        self._received_bytes = received_bytes
        self._reported: Counter[str] = Counter()
        self._fresh: deque[Routes | PushResult | tuple[str, str]] = deque()
        self._meters: dict[str, tuple[Histogram, Counted]] = {}
        """{path: of seconds, of bytes}"""
        self._lock = threading.Lock()
        self.pushes: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.failovers: Counter[tuple[str, str]] = Counter()

    def chose(self, routes: Routes) -> None:
        """A push starts by the first of these, if there is one."""
        self._fresh.append(routes)

    def ended(self, result: PushResult) -> None:
        """A push has its result."""
        self._fresh.append(result)
        if len(self._fresh) > MAX_FRESH:
            self.flush()

    def failed_over(self, before: str, after: str) -> None:
        """A push goes on by another path."""
        self._fresh.append((before, after))

    def flush(self) -> None:
        """Counts what was noted. To be called a few times a second, and before the counters are read."""
        with self._lock:
            chosen: dict[int, tuple[Routes, int]] = {}
            while self._fresh:
                match self._fresh.popleft():
                    case Routes() as routes:  # mostly the same ones again and again
                        chosen[id(routes)] = routes, chosen.get(id(routes), (routes, 0))[1] + 1
                    case PushResult() as result:
                        self._count_result(result)
                    case (before, after):
                        self.failovers[before, after] += 1
                        metrics.TRANSFER_FAILOVERS.labels(before, after).inc()
            for routes, times in chosen.values():
                _count_choice(routes, times)
            for path, nbytes in list(self._received_bytes.items()):
                metrics.TRANSFER_BYTES.labels(path, "received").inc(nbytes - self._reported[path])
                self._reported[path] = nbytes

    def _count_result(self, result: PushResult) -> None:
        paths = result.path.split("+") if result.path else []
        for path in paths:
            nbytes = result.nbytes if len(paths) == 1 else sum(
                status.nbytes for status in result.slices if status.path == path)
            self.pushes[path] += 1
            self.sent_bytes[path] += nbytes
            meters = self._meters.get(path)
            if meters is None:
                meters = self._meters[path] = (metrics.TRANSFER_SECONDS.labels(path),
                                               metrics.TRANSFER_BYTES.labels(path, "sent"))
            meters[0].observe(result.seconds)
            meters[1].inc(nbytes)
        if result.error is None:
            return
        for status in result.slices:
            if status.error is not None:
                self.failures[status.error.code] += 1
                metrics.TRANSFER_FAILURES.labels(status.path or "none", status.error.code).inc()


def _count_choice(routes: Routes, times: int) -> None:
    if not routes.choices:
        metrics.TRANSFER_PATH_CHOICES.labels("none", "no way").inc(times)
        return
    best = routes.choices[0]
    paused = ", ".join(choice.path for choice in routes.choices if choice.paused)
    reason = f"{best.reason}; paused: {paused}" if paused else best.reason
    metrics.TRANSFER_PATH_CHOICES.labels(best.path, reason).inc(times)
