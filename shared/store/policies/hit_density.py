"""The default: what is expected to earn the fewest hits per second of its slot goes first.

Most blocks of real traces are used once, a chat goes on after a minute or two or never, and a system prompt is used
all the time. So a block's *class* is how often it was used before (dropped blocks are remembered for a while, see
``recall``) and whose it is; a sample of the blocks shows how long each class waits for its next use (``reuse``).
Eviction compares the blocks unused longest of each class and takes the one whose outlook at its age is the poorest.
That resists one-shot blocks when memory is short, since classes that seldom come back are poor from the start; keeps
chats that have gone on before; and is about LRU when memory is plentiful, since then only what is beyond every
reasonable age is poor.

What is observed does not depend on what is cached: sampled keys are watched from use to use whether they are still
stored or not, so a class is not condemned for ever by having been evicted too early to be used again.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar, NamedTuple
from zlib import crc32

from shared.errors import Bug
from shared.ids import BlockKey
from shared.messages import StoredBlock
from shared.store.policies.base import Policy
from shared.store.policies.leaves import Leaves, Rank
from shared.store.policies.recall import MOST_USES, Recall
from shared.store.policies.reuse import UNKNOWN, LifeTable, Outlook, bucket_of, outlooks

_USES = MOST_USES
"""Blocks used more often are of one class: most of them come back, and it hardly matters how often they did before."""

_TENANTS = 16
"""Classes that tenants are dealt into, so that one who only scans does not spoil the outlook of those who chat. A
class leans on all tenants' blocks of as many uses until it has been seen often enough."""

_SAMPLES = 4_096
"""Blocks watched at a time: hundreds a class, and under 3 ms for a look at all of them."""

_WATCHED_CAPACITIES = 8
"""The watched keys stand for this many times the pool's blocks, so that reuse is seen which a pool several times as
large would have caught: less than that, and what pays only when kept long is never learned."""

_RECALLED_CAPACITIES, _RECALLED_LEAST = 8, 1 << 15
"""Dropped blocks remembered, in pools and at least. A block of a small pool comes back after many capacities."""

_RELEARN_EVENTS, _RELEARN_SHARE = 2_048, 8
"""Outlooks are renewed after so many events, or after as many as this part of the pool if that is more."""

_MEMORY_SAMPLES = 4 * _SAMPLES
"""When more lives are counted than this, all counts are halved: what the workload was yesterday fades."""

_LEAST_REUSES = 200
"""Until so many reuses were seen in the sample, the policy is LRU."""

_RESCORE_S = 0.25
"""Scores of classes are this old at most: the width of the first bucket of age."""


class Kind(NamedTuple):
    """A class of blocks."""

    uses: int
    tenant: int
    """Which class of tenants; -1 stands for all."""


_KINDS = [[Kind(uses, tenant) for uses in range(_USES + 1)] for tenant in range(_TENANTS)]


@dataclass(slots=True)
class _Known:
    """A stored block."""

    tenant: str
    depth: int
    kind: Kind
    used_s: float


class _Watched(NamedTuple):
    """A sampled block since its last use."""

    kind: Kind
    used_s: float


class HitDensity(Policy):
    """See the module."""

    name: ClassVar[str] = "hit_density"

    def __init__(self) -> None:
        super().__init__()
        #: {key: what is known of it}; all stored blocks
        self._known: dict[BlockKey, _Known] = {}
        #: {class: its offered blocks, unused longest first}; and where each offered block is
        self._queues: dict[Kind, Leaves] = {}
        self._place: dict[BlockKey, Kind] = {}
        #: {class: how poor its first block is}; all and only classes with offered blocks
        self._scores: dict[Kind, tuple[float, Rank]] = {}
        self._scored_s = float("-inf")
        self._recall = Recall(_RECALLED_LEAST)
        #: {sampled key: since its last use}, last used last
        self._watched: dict[BlockKey, _Watched] = {}
        self._tables: dict[Kind, LifeTable] = {}
        self._counted = 0
        self._outlooks: dict[Kind, Outlook] = {}
        self._sample_mask = 0
        self._events, self._next_learning = 0, _RELEARN_EVENTS
        self._now = 0.0

    def bind(self, num_blocks: int) -> None:
        super().bind(num_blocks)
        self._recall = Recall(max(_RECALLED_LEAST, _RECALLED_CAPACITIES * num_blocks))
        ratio = -(-_WATCHED_CAPACITIES * num_blocks // _SAMPLES)
        self._sample_mask = (1 << max(0, ratio - 1).bit_length()) - 1

    # --- events ------------------------------------------------------------------------------------------------

    def stored(self, block: StoredBlock, *, now: float) -> None:
        before = self._recall.get(block.key)
        uses = 0 if before is None else min(before + 1, _USES)
        entry = _Known(block.tenant, block.depth, _KINDS[crc32(block.tenant.encode()) % _TENANTS][uses], now)
        self._known[block.key] = entry
        self._observe(block.key, entry)

    def used(self, key: BlockKey, *, now: float) -> None:
        entry = self._known[key]
        entry.used_s = now
        uses, tenant = entry.kind
        if uses < _USES:
            entry.kind = _KINDS[tenant][uses + 1]
        self._observe(key, entry)

    def offer(self, key: BlockKey) -> None:
        entry = self._known[key]
        kind = entry.kind
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = Leaves()
        rank = (entry.used_s, -entry.depth)
        queue.add(key, entry.tenant, rank)
        self._place[key] = kind
        score = self._scores.get(kind)
        if score is None or rank < score[1]:  # it is the first of its class now
            self._scores[kind] = self._score(kind, rank)

    def withdraw(self, key: BlockKey) -> None:
        kind = self._place.pop(key, None)
        if kind is not None:
            self._queues[kind].discard(key)
            self._score_first(kind)

    def take(self, tenant: str | None = None) -> BlockKey | None:
        if tenant is None:
            if self._now - self._scored_s >= _RESCORE_S:
                self._scored_s = self._now
                for kind in list(self._scores):
                    self._score_first(kind)
            if not self._scores:
                return None
            kind = min(self._scores, key=self._scores.__getitem__)
        else:
            heads = [(self._score(kind, first[0]), kind) for kind, queue in self._queues.items()
                     if (first := queue.first(tenant)) is not None]
            if not heads:
                return None
            kind = min(heads)[1]
        key = self._queues[kind].pop(tenant)
        if key is None:
            raise Bug(f"class {kind} has a score and no blocks")
        del self._place[key]
        self._score_first(kind)
        return key

    def dropped(self, key: BlockKey) -> None:
        self.withdraw(key)
        entry = self._known.pop(key)
        self._recall.put(key, entry.kind.uses)

    def reuse_odds(self, key: BlockKey) -> float:
        entry = self._known[key]
        outlook = self._outlook(entry.kind)
        return outlook.odds[bucket_of(self._now - entry.used_s)]

    def stored_keys(self) -> Set[BlockKey]:
        return self._known.keys()

    def offered_keys(self) -> Set[BlockKey]:
        return set().union(*(queue.keys() for queue in self._queues.values()))

    # --- choosing ----------------------------------------------------------------------------------------------

    def _score_first(self, kind: Kind) -> None:
        """Scores the block of ``kind`` that goes first."""
        first = self._queues[kind].first()
        if first is None:
            self._scores.pop(kind, None)
        else:
            self._scores[kind] = self._score(kind, first[0])

    def _score(self, kind: Kind, rank: Rank) -> tuple[float, Rank]:
        """Lowest goes first; of equal outlook what was used longest ago."""
        return self._outlook(kind).density[bucket_of(self._now - rank[0])], rank

    def _outlook(self, kind: Kind) -> Outlook:
        return self._outlooks.get(kind) or self._outlooks.get(Kind(kind.uses, -1), UNKNOWN)

    # --- learning ----------------------------------------------------------------------------------------------

    def _observe(self, key: BlockKey, entry: _Known) -> None:
        now = self._now = entry.used_s
        self._events += 1
        if not (key[-1] | key[-2] << 8 | key[-3] << 16) & self._sample_mask:
            watched = self._watched.pop(key, None)
            if watched is not None:
                self._table(watched.kind).reused[bucket_of(now - watched.used_s)] += 1
                self._counted += 1
            elif len(self._watched) >= _SAMPLES:
                watched = self._watched.pop(next(iter(self._watched)))
                self._table(watched.kind).lost[bucket_of(now - watched.used_s)] += 1
                self._counted += 1
            self._watched[key] = _Watched(entry.kind, now)
        if self._events >= self._next_learning:
            self._next_learning = self._events + max(_RELEARN_EVENTS, self.num_blocks // _RELEARN_SHARE)
            self._learn(now)

    def _table(self, kind: Kind) -> LifeTable:
        table = self._tables.get(kind)
        if table is None:
            table = self._tables[kind] = LifeTable()
        return table

    def _learn(self, now: float) -> None:
        if sum(sum(table.reused) for table in self._tables.values()) < _LEAST_REUSES:
            return
        tables: dict[Kind, LifeTable] = {}
        for kind, table in self._tables.items():
            tables[kind] = LifeTable(list(table.reused), list(table.lost))
        for kind, used_s in self._watched.values():  # unused so far counts too, or only the quick would be heard
            if kind not in tables:
                tables[kind] = LifeTable()
            tables[kind].lost[bucket_of(now - used_s)] += 1
        self._outlooks = outlooks((kind, Kind(kind.uses, -1), table) for kind, table in tables.items())
        self._scored_s = float("-inf")
        if self._counted > _MEMORY_SAMPLES:
            self._counted //= 2
            for table in self._tables.values():
                table.scale(0.5)
