"""Virtual time: a heap of calls, earliest first, those of one moment in the order they were made."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any


class Loop:
    """The only clock of a simulation. Nothing is cancelled: who may have changed its mind checks when called."""

    __slots__ = ("_calls", "_order", "handled", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the simulation's start."""
        self.handled = 0
        """Calls made so far."""
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, at_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Calls at ``at_s``, or now when that is past."""
        heapq.heappush(self._calls, (max(at_s, self.now), next(self._order), call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Calls in ``delay_s`` seconds."""
        heapq.heappush(self._calls, (self.now + delay_s, next(self._order), call, arguments))

    def run(self, *, is_over: Callable[[], bool], until_s: float = math.inf) -> None:
        """Runs until ``is_over``, nothing is left to do, or ``until_s`` has come."""
        calls = self._calls
        while calls and not is_over():
            if calls[0][0] > until_s:
                self.now = until_s
                return
            self.now, _, call, arguments = heapq.heappop(calls)
            self.handled += 1
            call(*arguments)
