"""S3-FIFO: a small queue on probation, a main queue, and a memory of what left probation unused.

Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction (SOSP 2023). What differs here: only
leaves can go, so a queue's order is that in which its blocks were stored, and a block that cannot go is passed over;
of one moment the end of a chain goes first, or chains would lose their middle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass

from shared.ids import BlockKey
from shared.messages import StoredBlock
from shared.store.policies.base import Policy
from shared.store.policies.leaves import Leaves

SMALL_SHARE = 0.1
"""Of the pool's blocks; the small queue gives way while it holds more (the paper's value)."""

MOST_USES = 3
"""A block survives this many turns in the main queue at most (the paper's two bits)."""


@dataclass(slots=True)
class _Queued:
    """A stored block."""

    tenant: str
    depth: int
    main: bool
    """In the main queue, not the small one."""
    entered: int
    """Turn at which it entered its queue; blocks stored in one breath share it."""
    credit: int = 0
    """Uses not yet spent on staying."""


class S3Fifo(Policy):
    """See the module."""

    name = "s3fifo"

    def __init__(self) -> None:
        super().__init__()
        #: {key: where it queues}; all stored blocks
        self._queued: dict[BlockKey, _Queued] = {}
        #: offered blocks of each queue
        self._small, self._main = Leaves(), Leaves()
        #: {key: nothing}: left the small queue unused, last one last
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._small_blocks = 0
        self._turn, self._turn_s = 0, float("-inf")

    def stored(self, block: StoredBlock, *, now: float) -> None:
        if now > self._turn_s:
            self._turn, self._turn_s = self._turn + 1, now
        known = block.key in self._ghosts
        if known:
            del self._ghosts[block.key]
        entry = _Queued(block.tenant, block.depth, main=known, entered=self._turn)
        self._queued[block.key] = entry
        self._small_blocks += not known

    def used(self, key: BlockKey, *, now: float) -> None:
        entry = self._queued[key]
        entry.credit = min(entry.credit + 1, MOST_USES)

    def offer(self, key: BlockKey) -> None:
        entry = self._queued[key]
        (self._main if entry.main else self._small).add(key, entry.tenant, (entry.entered, -entry.depth))

    def withdraw(self, key: BlockKey) -> None:
        self._small.discard(key)
        self._main.discard(key)

    def take(self, tenant: str | None = None) -> BlockKey | None:
        while True:
            small, main = self._small.first(tenant), self._main.first(tenant)
            if small is None and main is None:
                return None
            crowded = self._small_blocks > SMALL_SHARE * self.num_blocks
            queue = self._small if main is None or (small is not None and crowded) else self._main
            key = queue.pop(tenant)
            if key is None:
                return None
            entry = self._queued[key]
            if not entry.credit:
                return key
            if entry.main:
                entry.credit -= 1
            else:  # used while on probation
                entry.main, entry.credit = True, 0
                self._small_blocks -= 1
            self._turn += 1
            entry.entered = self._turn
            self.offer(key)

    def dropped(self, key: BlockKey) -> None:
        self.withdraw(key)
        entry = self._queued.pop(key)
        if not entry.main:
            self._small_blocks -= 1
            self._ghosts[key] = None
            if len(self._ghosts) > self.num_blocks:
                self._ghosts.popitem(last=False)

    def stored_keys(self) -> Set[BlockKey]:
        return self._queued.keys()

    def offered_keys(self) -> Set[BlockKey]:
        return self._small.keys() | self._main.keys()
