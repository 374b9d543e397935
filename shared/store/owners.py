"""Which owners are asked for blocks: those that let us wait for nothing are left alone for a while. Pure.

The index says that an owner holds a block; only a push shows whether it can send it. Without this every request whose
prefix lies at a worker that is stopped, or cannot be reached, would wait for it once more before it computes.
"""

from __future__ import annotations

from shared.ids import WorkerId
from shared.store.tiers import Breaker

PATIENCE_S = 1.0
"""Whoever was given so long and sent nothing has stalled; less may be too little for anybody."""
FAILURES = 3
"""Pushes in a row that failed at once."""
PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
MAX_OWNERS = 256
"""Owners remembered as failing."""
_THEIRS = frozenset({"deadline", "peer", "path", "checksum"})
"""Why nothing came, when that tells of the owner or the way to it."""


class Owners:
    """One worker's experience with others. Times are the caller's monotonic seconds."""

    def __init__(self) -> None:
        #: {owner: whether it is left alone}; only of those that have failed since they last sent something
        self._breakers: dict[WorkerId, Breaker] = {}

    def allows(self, owner: WorkerId, now: float) -> bool:
        """May it be asked?"""
        breaker = self._breakers.get(owner)
        return breaker is None or breaker.allows(now)

    def heard(self, owner: WorkerId, *, blocks: int, why: str, waited_s: float, now: float) -> None:
        """It sent so many blocks; ``why`` not all of them, empty if it did; how long we waited."""
        if blocks or not why:
            self._breakers.pop(owner, None)
        elif why in _THEIRS:
            if owner not in self._breakers and len(self._breakers) >= MAX_OWNERS:
                del self._breakers[next(iter(self._breakers))]
            breaker = self._breakers.setdefault(
                owner, Breaker(failures=FAILURES, pause_s=PAUSE_S, max_pause_s=MAX_PAUSE_S))
            if why == "deadline" and waited_s >= PATIENCE_S:
                breaker.stalled(now)
            elif why != "deadline":
                breaker.failed(now)
