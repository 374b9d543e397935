"""Evictable blocks in order of rank, of all tenants and of any one of them."""

from __future__ import annotations

import heapq
from collections.abc import Set

from shared.ids import BlockKey

Rank = tuple[float, float]
"""What goes first has the lowest; equal ranks go in the order of their keys."""

_Item = tuple[Rank, BlockKey, str]

_SLACK = 64
"""Stale entries that a heap may hold beyond one for each live entry."""

_TENANTS = 256
"""Tenants that have a heap of their own; one more takes the place of the first."""


class Leaves:
    """A set of keys with ranks. ``add`` and ``pop`` take O(log n), ``discard`` O(1).

    Discarded entries stay in the heaps until they come up or outnumber the live ones. A tenant gets a heap of its own
    when it is first asked for: quotas concern few tenants, and everybody else should not pay for them.
    """

    def __init__(self) -> None:
        #: {key: its entry in the heaps}; an entry that is not here is stale
        self._live: dict[BlockKey, _Item] = {}
        self._all: list[_Item] = []
        #: {tenant: heap of its entries}
        self._of: dict[str, list[_Item]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._live

    def keys(self) -> Set[BlockKey]:
        """What is in it."""
        return self._live.keys()

    @property
    def entries(self) -> int:
        """Heap entries, stale ones too: what the memory is spent on."""
        return len(self._all) + sum(map(len, self._of.values()))

    def add(self, key: BlockKey, tenant: str, rank: Rank) -> None:
        """Adds ``key`` or gives it another rank."""
        item = (rank, key, tenant)
        self._live[key] = item
        heapq.heappush(self._all, item)
        if len(self._all) > 2 * len(self._live) + _SLACK:
            self._all = self._sorted(self._all)
        if self._of:
            own = self._of.get(tenant)
            if own is not None:
                heapq.heappush(own, item)
                if len(own) > 2 * len(self._live) + _SLACK:
                    self._of[tenant] = self._sorted(own)

    def discard(self, key: BlockKey) -> None:
        """Removes ``key`` if it is there."""
        self._live.pop(key, None)

    def first(self, tenant: str | None = None) -> tuple[Rank, BlockKey] | None:
        """What :meth:`pop` would remove, and its rank."""
        heap = self._all if tenant is None else self._heap_of(tenant)
        while heap:
            rank, key, _ = heap[0]
            if self._live.get(key) is heap[0]:
                return rank, key
            heapq.heappop(heap)
        return None

    def pop(self, tenant: str | None = None) -> BlockKey | None:
        """Removes what has the lowest rank (of ``tenant``); ``None`` when there is nothing."""
        found = self.first(tenant)
        if found is None:
            return None
        del self._live[found[1]]
        return found[1]

    def _heap_of(self, tenant: str) -> list[_Item]:
        heap = self._of.get(tenant)
        if heap is None:
            if len(self._of) >= _TENANTS:
                del self._of[next(iter(self._of))]
            heap = self._of[tenant] = sorted(item for item in self._live.values() if item[2] == tenant)
        return heap

    def _sorted(self, heap: list[_Item]) -> list[_Item]:
        """The live entries of ``heap``; a sorted list is a heap."""
        return sorted(item for item in heap if self._live.get(item[1]) is item)
