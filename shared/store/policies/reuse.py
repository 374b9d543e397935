"""How long until a block is used again: observed on a sample, kept as hazards, read as hits earned per second.

Blocks are sorted into *classes* by whoever observes. For each class the age at which a block was used again, or at
which it was lost sight of, goes into a life table over exponentially growing buckets of age. From its hazards follows
what a policy wants to know of a block of class c that was last used a seconds ago:

``density``: the most hits per second of its slot that keeping it on for some time can be expected to earn,
max over t of P(used within a..a+t) / E[seconds until that use or a+t]. (The Gittins index of keeping it.) It is low
while nobody can have answered yet and after everybody has, and high in between; memory that is short keeps what is
dense, memory that is plentiful keeps all. No capacity occurs in it.

``odds``: P(used again before the greatest age that was observed).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

_EDGES = [0.25 * 2 ** (i / 2) for i in range(36)]
"""Upper ends of all buckets of age but the last, in seconds: two an octave, from 0.25 s to 13 h. Finer ones hold too
few observations, coarser ones blur the half minute in which nobody replies."""

_BUCKETS = len(_EDGES) + 1
_WIDTHS = [high - low for low, high in zip([0.0, *_EDGES], [*_EDGES, 2 * _EDGES[-1]], strict=True)]

_PRIOR = [0.5] + [0.15] * (_BUCKETS - 1)
"""P(used in a bucket | not before) before anything is known. The same for every bucket is a rate that falls as 1/age,
under which the densest is what was used last: an ignorant policy is LRU. The first one stands for all octaves below."""

_PRIOR_WEIGHT = 20.0
"""Observations that outweigh the prior."""

_GROUP_WEIGHT = 30.0
"""Observations of a class that outweigh those of its group, and of a group those of all: about one chain in a sample,
whose blocks live and die together and count as one."""


def bucket_of(age_s: float) -> int:
    """The bucket of an age."""
    return bisect_right(_EDGES, age_s)


@dataclass(slots=True)
class LifeTable:
    """Counts by bucket of age."""

    reused: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    """Used again at that age."""
    lost: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    """Not used up to that age, and nothing is known beyond."""

    def add(self, other: LifeTable) -> None:
        """Adds the counts of ``other``."""
        self.reused = [a + b for a, b in zip(self.reused, other.reused, strict=True)]
        self.lost = [a + b for a, b in zip(self.lost, other.lost, strict=True)]

    def scale(self, factor: float) -> None:
        """Makes all counts weigh less (or more)."""
        self.reused = [count * factor for count in self.reused]
        self.lost = [count * factor for count in self.lost]

    @property
    def total(self) -> float:
        """Lives counted."""
        return sum(self.reused) + sum(self.lost)

    def hazards(self, prior: list[float], weight: float) -> list[float]:
        """P(used in a bucket | not before), each drawn towards ``prior`` as by ``weight`` observations."""
        hazards = [0.0] * _BUCKETS
        later = 0.0
        for i in range(_BUCKETS - 1, -1, -1):
            reused, lost = self.reused[i], self.lost[i]
            hazards[i] = (reused + weight * prior[i]) / (later + reused + lost / 2 + weight)
            later += reused + lost
        return hazards


@dataclass(frozen=True, slots=True)
class Outlook:
    """What hazards promise, by bucket of the age at which one looks."""

    density: list[float]
    """Expected hits per second of a slot."""
    odds: list[float]
    """P(used again within what was observed)."""

    @classmethod
    def of(cls, hazards: list[float], observed: int = _BUCKETS) -> Outlook:
        """Walks the curve of expected hits over expected seconds, whose points are the bounds of the buckets.

        Only the first ``observed`` buckets rest on more than the prior.
        """
        alive = list(accumulate(hazards, lambda alive, hazard: alive * (1 - hazard), initial=1.0))
        seconds = list(accumulate(
            ((a + b) / 2 * width for a, b, width in zip(alive, alive[1:], _WIDTHS, strict=False)), initial=0.0))
        # The steepest way up from each point leads to the upper hull of the points after it, which grows backwards.
        density = [0.0] * _BUCKETS
        hull = [_BUCKETS]
        for i in range(_BUCKETS - 1, -1, -1):
            x, y = seconds[i], alive[i]
            while len(hull) > 1:
                near, far = hull[-1], hull[-2]
                if (y - alive[near]) * (seconds[far] - x) > (y - alive[far]) * (seconds[near] - x):
                    break
                hull.pop()
            span_s = seconds[hull[-1]] - x
            density[i] = (y - alive[hull[-1]]) / span_s if span_s > 0 else 0.0
            hull.append(i)
        end = alive[observed]
        return cls(density, [1 - end / start if start > end else 0.0 for start in alive[:-1]])


UNKNOWN = Outlook.of(_PRIOR)
"""The outlook of a block of which nothing is known."""


def outlooks(tables: Iterable[tuple[K, K, LifeTable]]) -> dict[K, Outlook]:
    """``{class: outlook}`` and ``{group: outlook}`` in one, from (class, its group, its table).

    A thin class leans on its group and a thin group on all, so that a rare class is neither damned nor praised for
    a single block. Groups and classes must be told apart by their values.
    """
    tables = list(tables)
    everything = LifeTable()
    groups: dict[K, LifeTable] = {}
    for _, group, table in tables:
        groups.setdefault(group, LifeTable()).add(table)
    for table in groups.values():
        everything.add(table)
    observed = max((i + 1 for i in range(_BUCKETS) if everything.reused[i] or everything.lost[i]), default=0)
    base = everything.hazards(_PRIOR, _PRIOR_WEIGHT)
    of_groups = {group: table.hazards(base, _GROUP_WEIGHT) for group, table in groups.items()}
    found: dict[K, Outlook] = {group: Outlook.of(hazards, observed) for group, hazards in of_groups.items()}
    for kind, group, table in tables:
        found[kind] = Outlook.of(table.hazards(of_groups[group], _GROUP_WEIGHT), observed)
    return found
