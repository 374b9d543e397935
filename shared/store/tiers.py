"""Which blocks move between DRAM and SSD, and when the SSD is left alone. Pure.

Theory of operation. Each tier is a :class:`~shared.store.blocks.BlockPool` of its own, and so in each of them every
block's parent is there too: whichever tier loses blocks, and when, no prefix gets a hole. A block may lie in both.

*Demotion* copies a block to the SSD while it is still in DRAM, ahead of need: of the blocks that would be evicted
next, so many are copied that, with the free ones, a given share of the pool can be handed out and nothing is lost.
Eviction itself never waits for a disk: what was not copied by then is gone. Ancestors are copied before their
descendants. A block that the policy expects to see no more is not worth a write.

*Promotion* reads a block back into DRAM when a request wants it.

The *breaker* watches the disk: after several failures in a row, or one call that takes far too long, it leaves the
disk alone for a while, twice as long each time until a call succeeds. Meanwhile blocks on the SSD are misses.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from shared.ids import BlockKey
from shared.messages import StoredBlock
from shared.store.blocks import BlockPool

LOOK_BLOCKS = 2048
"""The next blocks to be evicted are looked at only so far: a look is a matter of milliseconds."""


def plan_demotion(pool: BlockPool, *, held: Callable[[BlockKey], bool], fits: Callable[[StoredBlock], bool],
                  ahead: float, capacity: int, least_odds: float, limit: int, now: float) -> list[StoredBlock]:
    """The up to ``limit`` blocks of ``pool`` to copy next, parents before children; changes nothing.

    ``held``: is it on the SSD? ``fits``: may it be written at all? ``ahead``: the share of the pool's slots that shall
    be free or copied. ``capacity``: blocks that the SSD holds at most; more are never wanted there, or copies would
    push each other out for ever. ``least_odds``: blocks less likely to be used again are left out, unless others need
    them.
    """
    statistics = pool.statistics()
    count = min(int(statistics.total * ahead) - statistics.free, LOOK_BLOCKS)
    if count <= 0:
        return []
    wanted: set[BlockKey] = set()
    chosen: list[StoredBlock] = []
    for block in pool.coldest(count, now=now):
        if len(chosen) >= limit:
            break
        if block.key in wanted or pool.policy.reuse_odds(block.key) < least_odds:
            continue
        chain: list[StoredBlock] = []
        above: StoredBlock | None = block
        while above is not None and above.key not in wanted:
            chain.append(above)
            above = pool.block(above.parent) if above.depth else None
        if len(wanted) + len(chain) > capacity:
            break
        missing = [each for each in reversed(chain) if not held(each.key)]
        if all(map(fits, missing)):
            wanted.update(each.key for each in chain)
            chosen += missing
    return chosen[:limit]


class Breaker:
    """Says whether a device may be used now. All times are the caller's monotonic seconds."""

    def __init__(self, *, failures: int = 3, pause_s: float = 5.0, max_pause_s: float = 60.0) -> None:
        self._limit, self._pause_s, self._max_pause_s = failures, pause_s, max_pause_s
        self._failures = 0
        """In a row."""
        self._next_pause_s = pause_s
        self._open_until_s = -inf
        self.trips = 0
        """How often it has paused the device."""

    def allows(self, now: float) -> bool:
        """May the device be used?"""
        return now >= self._open_until_s

    def pause_left_s(self, now: float) -> float:
        """Seconds until it may; 0 when it may."""
        return max(0.0, self._open_until_s - now)

    def succeeded(self) -> None:
        """A call came back in time and was good."""
        self._failures, self._next_pause_s = 0, self._pause_s

    def failed(self, now: float) -> None:
        """A call failed."""
        self._failures += 1
        if self._failures >= self._limit:
            self._trip(now)

    def stalled(self, now: float) -> None:
        """A call did not come back in time."""
        self._failures = self._limit
        self._trip(now)

    def _trip(self, now: float) -> None:
        if not self.allows(now):
            return  # calls that were under way already
        self.trips += 1
        self._failures = self._limit - 1  # after the pause one more failure is enough
        self._open_until_s = now + self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, self._max_pause_s)
