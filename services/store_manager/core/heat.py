"""How hot blocks are: uses that fade away, each block's own number.

A use counts 1, or its ``weight``, at once and half of that after ``half_life_s``; so steady use at r per second settles
at about 1.44 r half_life_s, and what nobody uses any more is cold after a few half-lives, whatever it was before.

Bounded: when ``max_keys`` are known, the coldest half is forgotten, which is to say cold.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from shared.ids import BlockKey

_LEVELS = 8
"""Levels of heat to a doubling."""
_LANDMARK_LIMIT = 500.0
"""Half-lives after which the scale is moved: 2 ** 500 is still far from what a float can take."""


@dataclass
class Heat:
    """See the module. Times are monotonic seconds."""

    half_life_s: float
    max_keys: int
    hot_uses: float
    """A block is hot from this heat on, and until it falls below half of it."""
    #: {block key: heat times 2 ** ((now - landmark) / half-life)}: one number that never needs refreshing
    _scaled: dict[BlockKey, float] = field(default_factory=dict)
    #: keys that crossed ``hot_uses`` and were not seen below half of it since; in order, so that the same news always
    #: leads to the same decisions
    _hot: dict[BlockKey, None] = field(default_factory=dict)
    _landmark_s: float | None = None
    forgotten: int = 0
    """Keys dropped because too many were known."""

    def __len__(self) -> int:
        return len(self._scaled)

    def use(self, keys: Iterable[BlockKey], *, now: float, weight: float = 1.0) -> None:
        """Each of ``keys`` was used once more."""
        scale = self._scale(now)
        added, hot = weight * scale, self.hot_uses * scale
        for key in keys:
            scaled = self._scaled.get(key, 0.0) + added
            self._scaled[key] = scaled
            if scaled >= hot:
                self._hot[key] = None
        if len(self._scaled) > self.max_keys:
            self._forget()

    def of(self, key: BlockKey, *, now: float) -> float:
        """The block's heat now; 0.0 for one that is not known."""
        scaled = self._scaled.get(key)
        return 0.0 if scaled is None else scaled / self._scale(now)

    def levels(self, keys: Iterable[BlockKey], *, now: float) -> list[float]:
        """The heat of each of ``keys``."""
        scale, scaled = self._scale(now), self._scaled
        return [scaled.get(key, 0.0) / scale for key in keys]

    def hot_keys(self) -> list[BlockKey]:
        """The hot blocks, those included that cooled since anybody looked; for :meth:`still_hot`, part by part."""
        return list(self._hot)

    def still_hot(self, keys: Iterable[BlockKey], *, now: float) -> list[tuple[float, BlockKey]]:
        """Those of ``keys``, all of them hot once, that did not cool below half the limit, each after its heat; the
        others are hot no more."""
        scale = self._scale(now)
        limit = self.hot_uses / 2 * scale
        found = []
        for key in keys:
            scaled = self._scaled.get(key, 0.0)
            if scaled >= limit:
                found.append((scaled / scale, key))
            else:
                self._hot.pop(key, None)
        return found

    @property
    def hot_count(self) -> int:
        """How many blocks are hot, about."""
        return len(self._hot)

    def is_hot(self, key: BlockKey) -> bool:
        """Whether it got hot, and nobody saw since that it cooled."""
        return key in self._hot

    def _scale(self, now: float) -> float:
        if self._landmark_s is None:
            self._landmark_s = now
        age = (now - self._landmark_s) / self.half_life_s
        if age > _LANDMARK_LIMIT:
            shrink = 2.0 ** -min(age, 1000.0)
            self._scaled = {key: left for key, scaled in self._scaled.items() if (left := scaled * shrink) > 1e-12}
            self._hot = {key: None for key in self._hot if key in self._scaled}
            self._landmark_s, age = now, 0.0
        return float(2.0 ** age)

    def _forget(self) -> None:
        keep = heapq.nlargest(self.max_keys // 2, self._scaled.items(), key=lambda item: (item[1], item[0]))
        self.forgotten += len(self._scaled) - len(keep)
        self._scaled = dict(keep)
        self._hot = {key: None for key in self._hot if key in self._scaled}


class ByHeat:
    """Blocks in order of heat, to an eighth of a doubling. Nothing is sorted: there may be hundreds of thousands."""

    def __init__(self) -> None:
        #: {level: blocks of that heat, in the order in which they came}
        self._levels: dict[int, list[BlockKey]] = {}

    def add(self, key: BlockKey, heat: float) -> None:
        """``heat`` is above 0."""
        self._levels.setdefault(math.floor(_LEVELS * math.log2(heat)), []).append(key)

    def __iter__(self) -> Iterator[BlockKey]:
        """The hottest first."""
        for level in sorted(self._levels, reverse=True):
            yield from self._levels[level]


class HotEnds:
    """The ends of hot prefixes, found in one look at all hot blocks, part by part."""

    def __init__(self, heat: Heat, parent: Callable[[BlockKey], BlockKey | None]) -> None:
        """``parent`` of a block; ``None`` for one that nobody holds."""
        self._heat, self._parent = heat, parent
        self._left: list[BlockKey] | None = None
        self._seen = ByHeat()
        #: what some hot block continues
        self._inner: set[BlockKey] = set()
        self.found: list[BlockKey] = []
        """Hottest first, as of the last look that was over."""

    def look(self, most: int, *, now: float) -> bool:
        """Looks at ``most`` more blocks; whether some are left. Else ``found`` is new, and the next look will be."""
        if self._left is None:
            self._left, self._seen, self._inner = self._heat.hot_keys(), ByHeat(), set()
        some, self._left = self._left[-most:], self._left[:-most]
        for heat, key in self._heat.still_hot(some, now=now):
            self._seen.add(key, heat)
            parent = self._parent(key)
            if parent is not None:
                self._inner.add(parent)
        if self._left:
            return True
        self.found, self._left = [key for key in self._seen if key not in self._inner], None
        return False
