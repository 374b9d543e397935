"""How hot blocks are: uses that fade away, each block's own number.

A use counts 1, or its ``weight``, at once and half of that after ``half_life_s``; so steady use at r per second settles
at about 1.44 r half_life_s, and what nobody uses any more is cold after a few half-lives, whatever it was before.

Bounded: when ``max_keys`` are known, the coldest half is forgotten, which is to say cold.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from shared.ids import BlockKey

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
    #: keys that crossed ``hot_uses`` and were not seen below half of it since
    _hot: set[BlockKey] = field(default_factory=set)
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
                self._hot.add(key)
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

    def hot(self, *, now: float) -> Set[BlockKey]:
        """The hot blocks; those that cooled below half the limit leave here. Good until the next change."""
        limit = self.hot_uses / 2 * self._scale(now)
        self._hot = {key for key in self._hot if self._scaled.get(key, 0.0) >= limit}
        return self._hot

    def hot_keys(self) -> list[BlockKey]:
        """The hot blocks, those included that cooled since anybody looked; for :meth:`still_hot`, part by part."""
        return list(self._hot)

    def still_hot(self, keys: Iterable[BlockKey], *, now: float) -> list[tuple[float, BlockKey]]:
        """Those of ``keys``, all of them hot once, that did not cool below half the limit, each after its heat in a
        scale of this moment; the others are hot no more."""
        limit = self.hot_uses / 2 * self._scale(now)
        found = []
        for key in keys:
            scaled = self._scaled.get(key, 0.0)
            if scaled >= limit:
                found.append((scaled, key))
            else:
                self._hot.discard(key)
        return found

    def hottest_first(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """``keys`` in order of heat, equally hot ones in order of their names."""
        ordered, scaled = sorted(keys), self._scaled
        ordered.sort(key=lambda key: scaled.get(key, 0.0), reverse=True)
        return ordered  # twice as fast as by pairs of both: the blocks of a chain are equally hot

    @property
    def hot_count(self) -> int:
        """How many blocks are hot, about."""
        return len(self._hot)

    def is_hot(self, key: BlockKey) -> bool:
        """Whether the last :meth:`hot` had it, or it got hot since."""
        return key in self._hot

    def _scale(self, now: float) -> float:
        if self._landmark_s is None:
            self._landmark_s = now
        age = (now - self._landmark_s) / self.half_life_s
        if age > _LANDMARK_LIMIT:
            shrink = 2.0 ** -min(age, 1000.0)
            self._scaled = {key: left for key, scaled in self._scaled.items() if (left := scaled * shrink) > 1e-12}
            self._hot &= self._scaled.keys()
            self._landmark_s, age = now, 0.0
        return float(2.0 ** age)

    def _forget(self) -> None:
        keep = heapq.nlargest(self.max_keys // 2, self._scaled.items(), key=lambda item: (item[1], item[0]))
        self.forgotten += len(self._scaled) - len(keep)
        self._scaled = dict(keep)
        self._hot &= self._scaled.keys()
