"""A set of integers kept as sorted, disjoint, non-adjacent half-open intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class IntervalSet:
    """``add``, ``remove``, and questions; each costs a bisection plus the intervals it merges."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Adds ``[start, stop)``; merges what it touches."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
            if last == first + 1:
                self._starts[first], self._stops[first] = start, stop
                return
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Takes ``[start, stop)`` out; splits what it cuts."""
        if start >= stop:
            return
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        if first >= last:
            return
        starts, stops = [], []
        if self._starts[first] < start:
            starts.append(self._starts[first])
            stops.append(start)
        if self._stops[last - 1] > stop:
            starts.append(stop)
            stops.append(self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = starts, stops

    def covers(self, start: int, stop: int) -> bool:
        """Is all of ``[start, stop)`` in the set? The empty interval always is."""
        if start >= stop:
            return True
        i = bisect_right(self._starts, start) - 1
        return i >= 0 and self._stops[i] >= stop

    def overlaps(self, start: int, stop: int) -> bool:
        """Is any of ``[start, stop)`` in the set?"""
        if start >= stop:
            return False
        i = bisect_right(self._stops, start)
        return i < len(self._starts) and self._starts[i] < stop

    @property
    def total(self) -> int:
        """How many integers are in the set."""
        return sum(self._stops) - sum(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)
