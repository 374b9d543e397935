"""Blocks that decisions made, and nobody announced yet: siblings of one burst arrive before the first is computed.

A promise ends when its request is prefilled and some seconds have passed (the announcement is under way), when the
request ends otherwise, or when it has become too old to be believed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from services.conductor.core.prefix_index import PrefixIndex
from shared.ids import BlockKey, RequestId, WorkerId


class Promises:
    """{request: (worker, keys)}, counted into the index; bounded by ``max_keys``."""

    def __init__(self, index: PrefixIndex, *, max_keys: int) -> None:
        self._index, self._max_keys = index, max_keys
        self._made: dict[RequestId, tuple[WorkerId, Sequence[BlockKey], float]] = {}
        #: {(worker, key): promises}; all and only pairs promised in the index
        self._counts: Counter[tuple[WorkerId, BlockKey]] = Counter()
        #: (when, request): entries whose time is not the promise's any more are skipped
        self._ends: list[tuple[float, RequestId]] = []

    def __len__(self) -> int:
        """Promised (worker, block) pairs."""
        return len(self._counts)

    def make(self, request: RequestId, worker: WorkerId, keys: Sequence[BlockKey], *, until_s: float) -> None:
        """``worker`` will hold ``keys`` once ``request`` is computed there. Replaces the request's former promise."""
        self.end(request)
        if not keys or len(self._counts) + len(keys) > self._max_keys:
            return
        self._made[request] = (worker, keys, until_s)
        self._counts.update((worker, key) for key in keys)
        self._index.promise(worker, keys)
        heapq.heappush(self._ends, (until_s, request))

    def end_at(self, request: RequestId, until_s: float) -> None:
        """The promise of ``request`` ends then, be that sooner or later than thought."""
        if (made := self._made.get(request)) is not None:
            self._made[request] = (made[0], made[1], until_s)
            heapq.heappush(self._ends, (until_s, request))

    def end(self, request: RequestId) -> None:
        """The promise of ``request`` is over."""
        made = self._made.pop(request, None)
        if made is not None:
            worker, keys, _ = made
            over = []
            for key in keys:
                self._counts[worker, key] -= 1
                if not self._counts[worker, key]:
                    del self._counts[worker, key]
                    over.append(key)
            self._index.unpromise(worker, over)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone: so are its promises."""
        for request in [request for request, (who, _, _) in self._made.items() if who == worker]:
            self.end(request)

    def tick(self, now: float) -> None:
        """Ends what is due."""
        while self._ends and self._ends[0][0] <= now:
            until_s, request = heapq.heappop(self._ends)
            made = self._made.get(request)
            if made is not None and made[2] == until_s:
                self.end(request)

    def next_wake(self) -> float | None:
        """When :meth:`tick` has something to end."""
        return self._ends[0][0] if self._ends else None
