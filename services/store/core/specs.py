"""Which of the cache specs that are in use get a place, and who gives one up."""

from __future__ import annotations

from dataclasses import dataclass

from shared.ids import SpecDigest


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a spec that was heard of."""

    begin: bool
    """Lend for it."""
    end: SpecDigest | None = None
    """Before that, end with this one."""


class Specs:
    """``limit`` places. A spec keeps its own as long as it is heard of now and then, or is kept. Monotonic seconds."""

    def __init__(self, *, limit: int, forget_after_s: float) -> None:
        self._limit, self._forget_after_s = limit, forget_after_s
        #: {spec that has a place: when it was last heard of}
        self._heard_s: dict[SpecDigest, float] = {}
        self._kept: set[SpecDigest] = set()

    def keep(self, spec: SpecDigest) -> None:
        """A spec that always has its place."""
        self._kept.add(spec)

    def heard(self, spec: SpecDigest, *, now: float) -> Decision:
        """Somebody works with ``spec``."""
        if spec in self._heard_s:
            self._heard_s[spec] = now
            return Decision(False)
        if len(self._heard_s) < self._limit:
            self._heard_s[spec] = now
            return Decision(True)
        oldest = min((other for other in self._heard_s if other not in self._kept), key=self._heard_s.__getitem__,
                     default=None)
        if oldest is None or now - self._heard_s[oldest] < self._forget_after_s:
            return Decision(False)
        del self._heard_s[oldest]
        self._heard_s[spec] = now
        return Decision(True, oldest)

    def ended(self, spec: SpecDigest) -> None:
        """Lending for it came to an end by itself: its place is free."""
        self._heard_s.pop(spec, None)
