"""Time, asked for in one place so that tests and the simulator can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: ``monotonic`` for durations and deadlines, ``wall`` for records people read."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """Stands still until told to move."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        """Moves both readings forward by ``duration_s`` seconds."""
        self._now_s += duration_s
