"""Many durations in little memory, so that hours of them can be kept and those of several processes added."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

_LEAST_S = 1e-7
_GROWTH = math.log(1.01)


class Histogram(msgspec.Struct):
    """Counts by bucket; a bucket is 1 % wide, so a percentile is within 1 % of the exact one."""

    counts: dict[int, int] = msgspec.field(default_factory=dict)

    def add(self, duration_s: float) -> None:
        """One more."""
        bucket = int(math.log(max(duration_s, _LEAST_S) / _LEAST_S) / _GROWTH)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def merge(self, other: Histogram) -> None:
        """Takes in all of another one."""
        self.counts = dict(Counter(self.counts) + Counter(other.counts))

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    def percentile_s(self, percent: float) -> float:
        """The least duration that ``percent`` of all do not exceed, in seconds; there must be some."""
        rank = percent / 100 * self.total
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                break
        return _LEAST_S * math.exp((bucket + 0.5) * _GROWTH)
