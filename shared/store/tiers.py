"""Which blocks move between DRAM and SSD, and when the SSD is left alone. Pure.

Theory of operation. Each tier is a :class:`~shared.store.blocks.BlockPool` of its own, and so in each of them every
block's parent is there too: whichever tier loses blocks, and when, no prefix gets a hole. A block may lie in both.

*Demotion* copies a block to the SSD while it is still in DRAM, ahead of need: the blocks that would be evicted next,
and others as long as the SSD has room, until a given share of the pool is free or copied. Eviction itself never waits
for a disk: what was not copied by then is gone. Ancestors are copied before their descendants. A block that the policy
expects to see no more is not worth a write. What has lain uncopied for a while follows when the disk has nothing else
to do (*write-behind*), and all the rest before an orderly end, so that a restart finds what was in memory.

*Promotion* reads a block back into DRAM when a request wants it.

The *breaker* watches the disk: after several failures in a row, or one call that takes far too long, it leaves the
disk alone for a while, twice as long each time until a call succeeds. Meanwhile blocks on the SSD are misses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from shared.ids import BlockKey
from shared.messages import StoredBlock
from shared.store.blocks import BlockPool

WINDOW_BLOCKS = 64
"""So many of the blocks to be evicted next are looked at: asking a policy for more takes the event loop too long."""


def plan_demotion(pool: BlockPool, *, oldest: Sequence[StoredBlock], uncopied: int, held: Callable[[BlockKey], bool],
                  fits: Callable[[StoredBlock], bool], ahead: float, capacity: int, room: int, least_odds: float,
                 limit: int, now: float, behind: float = 0.0) -> list[StoredBlock]:
    """The up to ``limit`` blocks of ``pool`` to copy next, parents before children; changes nothing.

    First those that would be evicted next; then, while the SSD has ``room`` without losing others, those of ``oldest``
    (the longest cached of the ``uncopied`` blocks), until the share ``ahead`` of the pool's slots, or ``behind`` if
    that is more, is free or copied.

    ``held``: is it on the SSD? ``fits``: may it be written at all? ``capacity``: blocks that the SSD can hold now;
    more are never wanted there, or copies would push each other out for ever. ``least_odds``: blocks less likely to be
    used again are left out, unless others need them.
    """
    statistics = pool.statistics()
    target = int(statistics.total * ahead)
    wanted: set[BlockKey] = set()
    chosen: list[StoredBlock] = []  # parents first: whatever part of it comes first may go without the rest

    def want(block: StoredBlock, most: int) -> bool:
        """Adds the block and what it continues, if they are worth it; false when ``most`` would be exceeded."""
        if block.key in wanted or pool.policy.reuse_odds(block.key) < least_odds:
            return True
        chain: list[StoredBlock] = []
        above: StoredBlock | None = block
        while above is not None and above.key not in wanted:
            chain.append(above)
            above = pool.block(above.parent) if above.depth else None
        if len(wanted) + len(chain) > most:
            return False
        missing = [each for each in reversed(chain) if not held(each.key)]
        if all(map(fits, missing)):
            wanted.update(each.key for each in chain)
            chosen.extend(missing)
        return True

    for block in pool.coldest(min(target - statistics.free, WINDOW_BLOCKS), now=now):
        if len(chosen) >= limit or not want(block, capacity):
            break
    replacing = len(chosen)
    copied, target = statistics.cached - uncopied, int(statistics.total * max(ahead, behind))
    for block in oldest:
        if len(chosen) >= min(limit, room) or statistics.free + copied + len(chosen) >= target:
            break
        want(block, capacity)
    return chosen[:min(limit, max(replacing, room))]


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
