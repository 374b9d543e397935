"""The block pool of one worker: slots of equal size, some in use, some cached, some free.

Theory of operation. A slot is

* *free*: holds nothing;
* *private*: belongs to one operation that is filling it; has no key yet;
* *cached*: sealed under its block key, reusable by anyone. It may also be pinned by operations.

Operations pin what they use, ancestors included, and end with :meth:`BlockPool.release`; there are no time leases.
Only cached blocks that nobody pins and that no cached block continues (leaves) may be evicted, least recently used
first, deeper ones first among equals: so a cached prefix never has a hole, and what is cached is worth something.

Two operations may compute the same block at the same time; the first to seal wins, the loser's slot stays private
to it, and the loser pins the winner so that its own later blocks keep their parent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.errors import Bug
from shared.ids import BlockKey, OperationId
from shared.messages import StoredBlock


@dataclass(slots=True)
class _Cached:
    """A sealed block."""

    slot: int
    block: StoredBlock
    used_s: float
    #: operations that pin it
    pins: set[OperationId] = field(default_factory=set)
    #: cached blocks whose parent this is
    children: int = 0
    version: int = 0


@dataclass(slots=True)
class _Operation:
    """What one operation holds."""

    private: set[int] = field(default_factory=set)
    pinned: set[BlockKey] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Slots for an operation, and the keys that had to go for them (announce those as evicted)."""

    slots: list[int]
    evicted: list[BlockKey]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts of slots; ``free + private + cached == total``."""

    total: int
    free: int
    private: int
    cached: int
    pinned: int
    """Cached blocks that some operation pins."""


class BlockPool:
    """Slots ``0 .. num_blocks - 1``. All times are monotonic seconds given by the caller."""

    def __init__(self, num_blocks: int) -> None:
        self._total = num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        #: {block key: its cached block}
        self._cached: dict[BlockKey, _Cached] = {}
        #: {operation: what it holds}; an operation without holdings is absent
        self._operations: dict[OperationId, _Operation] = {}
        #: (used_s, -depth, version, key) of every evictable leaf, and stale entries that eviction skips
        self._leaves: list[tuple[float, int, int, BlockKey]] = []
        self._pinned = 0
        self._private = 0

    # --- reading -----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading ``keys`` are cached. Changes nothing; true until the next call that changes state."""
        for i, key in enumerate(keys):
            if key not in self._cached:
                return i
        return len(keys)

    def slot(self, key: BlockKey) -> int:
        """The slot of a cached block; ``KeyError`` when it is not cached."""
        return self._cached[key].slot

    def blocks(self) -> Iterator[StoredBlock]:
        """Every cached block, in no order."""
        return (cached.block for cached in self._cached.values())

    @property
    def available(self) -> int:
        """Slots that :meth:`allocate` can hand out: free ones and unpinned cached ones."""
        return len(self._free) + len(self._cached) - self._pinned

    def statistics(self) -> PoolStatistics:
        """Counts of slots."""
        return PoolStatistics(total=self._total, free=len(self._free), private=self._private,
                              cached=len(self._cached), pinned=self._pinned)

    # --- changing ----------------------------------------------------------------------------------------------

    def pin(self, operation: OperationId, keys: Sequence[BlockKey], *, now: float) -> list[int]:
        """Pins the leading cached ``keys`` for ``operation`` and returns their slots, in order."""
        slots: list[int] = []
        for key in keys[:self.match(keys)]:
            cached = self._cached[key]
            self._pin(operation, cached)
            cached.used_s = now
            slots.append(cached.slot)
        return slots

    def allocate(self, operation: OperationId, count: int, *, now: float) -> Allocation | None:
        """``count`` private slots for ``operation``, evicting if need be; ``None`` when there is no room."""
        if count > self.available:
            return None
        evicted: list[BlockKey] = []
        while len(self._free) < count:
            key = self._pop_leaf()
            if key is None:
                raise Bug(f"{self.available} slots are said to be available, {len(self._free)} are")
            self._evict(key)
            evicted.append(key)
        slots = [self._free.pop() for _ in range(count)]
        self._operation(operation).private.update(slots)
        self._private += count
        return Allocation(slots, evicted)

    def move(self, slots: Sequence[int], source: OperationId, target: OperationId) -> None:
        """Private ``slots`` of ``source`` become private slots of ``target``."""
        if not slots:
            return
        held = self._operations.get(source)
        if held is None or not held.private.issuperset(slots):
            raise Bug(f"operation {source} gives away slots that are not its own")
        held.private.difference_update(slots)
        self._operation(target).private.update(slots)

    def seal(self, operation: OperationId, slot: int, block: StoredBlock, *, now: float) -> bool:
        """Turns a private slot into the cached block ``block``, pinned by ``operation``.

        False when the block is cached already: the slot stays private, and the cached twin is pinned instead.
        """
        holdings = self._operations.get(operation)
        if holdings is None or slot not in holdings.private:
            raise Bug(f"operation {operation} seals slot {slot} that is not its own")
        twin = self._cached.get(block.key)
        if twin is not None:
            self._pin(operation, twin)
            twin.used_s = now
            return False
        parent = self._cached.get(block.parent)
        if parent is None and block.depth > 0:
            raise Bug(f"operation {operation} seals a block of depth {block.depth} whose parent is not cached")
        if parent is not None:
            parent.children += 1
        holdings.private.discard(slot)
        self._private -= 1
        cached = _Cached(slot=slot, block=block, used_s=now)
        self._cached[block.key] = cached
        self._pin(operation, cached)
        return True

    def release(self, operation: OperationId) -> None:
        """Ends ``operation``: its private slots are free, its pins are gone. Idempotent."""
        holdings = self._operations.pop(operation, None)
        if holdings is None:
            return
        self._free.extend(holdings.private)
        self._private -= len(holdings.private)
        for key in holdings.pinned:
            cached = self._cached[key]
            cached.pins.discard(operation)
            if not cached.pins:
                self._pinned -= 1
                self._offer(cached)

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when counts, pins or parents contradict each other."""
        slots = [*self._free, *(c.slot for c in self._cached.values()),
                 *(slot for held in self._operations.values() for slot in held.private)]
        if sorted(slots) != list(range(self._total)):
            raise Bug("slots are lost or held twice")
        children: dict[BlockKey, int] = {}
        for key, cached in self._cached.items():
            if cached.block.depth > 0:
                if cached.block.parent not in self._cached:
                    raise Bug(f"cached block {key.hex()[:12]} has lost its parent")
                children[cached.block.parent] = children.get(cached.block.parent, 0) + 1
            parent = self._cached.get(cached.block.parent)
            if parent is not None and not cached.pins <= parent.pins:
                raise Bug(f"block {key.hex()[:12]} is pinned and its parent is not")
            for operation in cached.pins:
                if key not in self._operations[operation].pinned:
                    raise Bug(f"{operation} pins {key.hex()[:12]} without knowing it")
        for key, cached in self._cached.items():
            if cached.children != children.get(key, 0):
                raise Bug(f"block {key.hex()[:12]} miscounts its children")
        if self._pinned != sum(1 for cached in self._cached.values() if cached.pins):
            raise Bug("pinned blocks are miscounted")
        if self._private != sum(len(held.private) for held in self._operations.values()):
            raise Bug("private slots are miscounted")

    # --- inside ------------------------------------------------------------------------------------------------

    def _operation(self, operation: OperationId) -> _Operation:
        return self._operations.setdefault(operation, _Operation())

    def _pin(self, operation: OperationId, cached: _Cached | None) -> None:
        """Pins a block and what it continues: a pinned block's ancestors are pinned, so ``available`` is exact."""
        while cached is not None and operation not in cached.pins:
            if not cached.pins:
                self._pinned += 1
                cached.version += 1  # whatever the heap says of it is stale now
            cached.pins.add(operation)
            self._operation(operation).pinned.add(cached.block.key)
            cached = self._cached.get(cached.block.parent)

    def _offer(self, cached: _Cached) -> None:
        """Puts a block that may be evicted where eviction finds it."""
        if not cached.pins and not cached.children:
            cached.version += 1
            heapq.heappush(self._leaves, (cached.used_s, -cached.block.depth, cached.version, cached.block.key))
            if len(self._leaves) > 2 * len(self._cached) + 64:  # a pool that never evicts must not grow stale entries
                self._leaves = [leaf for leaf in self._leaves if self._is_leaf(leaf[2], leaf[3])]
                heapq.heapify(self._leaves)

    def _pop_leaf(self) -> BlockKey | None:
        while self._leaves:
            _, _, version, key = heapq.heappop(self._leaves)
            if self._is_leaf(version, key):
                return key
        return None

    def _is_leaf(self, version: int, key: BlockKey) -> bool:
        cached = self._cached.get(key)
        return cached is not None and cached.version == version and not cached.pins and not cached.children

    def _evict(self, key: BlockKey) -> None:
        cached = self._cached.pop(key)
        self._free.append(cached.slot)
        parent = self._cached.get(cached.block.parent)
        if parent is not None:
            parent.children -= 1
            self._offer(parent)
