"""What the planner decided and what came of it, for people and metrics."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from shared.ids import WorkerId
from shared.messages import DecisionRow

_DECISIONS = 64
"""Decisions remembered; the oldest go."""


class Notes:
    """One planner's memory of its deeds."""

    def __init__(self) -> None:
        self._decisions: deque[tuple[float, DecisionRow]] = deque(maxlen=_DECISIONS)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """{(what was asked, what came of it): blocks}"""
        self.nbytes_copied = 0

    def decided(self, what: str, worker: WorkerId, blocks: int, nbytes: int, why: str, now: float) -> None:
        """Something was decided, at ``now``, and why."""
        self._decisions.append((now, DecisionRow(age_s=0.0, what=what, worker=worker, blocks=blocks, nbytes=nbytes,
                                                 why=why)))

    def latest(self, now: float) -> list[DecisionRow]:
        """Latest first, with their age."""
        return [msgspec.structs.replace(row, age_s=now - at_s) for at_s, row in reversed(self._decisions)]
