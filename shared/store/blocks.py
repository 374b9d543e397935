"""The block pool of one worker: slots of equal size, some in use, some cached, some free.

Theory of operation. A slot is

* *free*: holds nothing;
* *private*: belongs to one operation that is filling it; has no key yet;
* *cached*: sealed under its block key, reusable by anyone. It may also be pinned by operations.

Operations pin what they use, ancestors included, and end with :meth:`BlockPool.release`; there are no time leases.
Only cached blocks that nobody pins and that no cached block continues (leaves) may be evicted, so a cached prefix
never has a hole. Which leaf goes first is the :class:`~shared.store.policies.Policy`'s word, except that protected
ones (somebody said they are the last copies of something hot) go after all others, the first to lose its protection
first.

Two operations may compute the same block at the same time; the first to seal wins, the loser's slot stays private
to it, and the loser pins the winner so that its own later blocks keep their parent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from shared.errors import Bug
from shared.ids import BlockKey, OperationId
from shared.messages import StoredBlock
from shared.store.policies import Policy
from shared.store.policies.leaves import Leaves
from shared.store.policies.lru import Lru


@dataclass(slots=True, eq=False)
class _Cached:
    """A sealed block."""

    slot: int
    block: StoredBlock
    #: operations that pin it
    pins: set[OperationId] = field(default_factory=set)
    #: cached blocks whose parent this is; without those that a look at the coldest has passed
    children: int = 0
    #: one of them, and its neighbours among them: a list without an object of its own
    child: _Cached | None = None
    before: _Cached | None = None
    after: _Cached | None = None
    #: evicted last until then
    protected_until_s: float = -inf


@dataclass(slots=True)
class _Operation:
    """What one operation holds."""

    private: set[int] = field(default_factory=set)
    #: in the order in which they were pinned, so that the same calls always lead to the same evictions
    pinned: dict[BlockKey, None] = field(default_factory=dict)


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
    """Slots ``0 .. num_blocks - 1``. All times are monotonic seconds given by the caller.

    ``policy`` is the pool's own from now on. Unless given, what was used longest ago goes first: for small pools and
    models; workers give the policy that their settings name.
    """

    def __init__(self, num_blocks: int, policy: Policy | None = None) -> None:
        self._total = num_blocks
        self._policy = Lru() if policy is None else policy
        self._policy.bind(num_blocks)
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        #: {block key: its cached block}
        self._cached: dict[BlockKey, _Cached] = {}
        #: {operation: what it holds}; an operation without holdings is absent
        self._operations: dict[OperationId, _Operation] = {}
        #: evictable leaves that eviction met and passed over because they were protected, by the end of protection
        self._protected = Leaves()
        #: {tenant: its cached blocks}; never 0
        self._tenants: Counter[str] = Counter()
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
        """Every cached block, each after its parent; good until the next change."""
        return (cached.block for cached in self._cached.values())

    def block(self, key: BlockKey) -> StoredBlock | None:
        """A cached block, or ``None``."""
        cached = self._cached.get(key)
        return None if cached is None else cached.block

    def continuing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that are cached and all that continues them, each once."""
        found: dict[BlockKey, None] = {}
        waiting = [cached for key in keys if (cached := self._cached.get(key)) is not None]
        while waiting:
            cached = waiting.pop()
            if cached.block.key in found:
                continue
            found[cached.block.key] = None
            child = cached.child
            while child is not None:
                waiting.append(child)
                child = child.after
        return list(found)

    def tenant_blocks(self, tenant: str) -> int:
        """How many cached blocks are ``tenant``'s."""
        return self._tenants[tenant]

    def pinned_by(self, operation: OperationId) -> int:
        """How many cached blocks the operation pins, those included that its own continue."""
        held = self._operations.get(operation)
        return 0 if held is None else len(held.pinned)

    @property
    def policy(self) -> Policy:
        """The policy, to be asked for its name and its odds; its events come from the pool alone."""
        return self._policy

    @property
    def available(self) -> int:
        """Slots that :meth:`allocate` can hand out: free ones and unpinned cached ones."""
        return len(self._free) + len(self._cached) - self._pinned

    def statistics(self) -> PoolStatistics:
        """Counts of slots."""
        return PoolStatistics(total=self._total, free=len(self._free), private=self._private,
                              cached=len(self._cached), pinned=self._pinned)

    def largest_hole(self) -> int:
        """The longest run of free slots. Any slot serves any block, but neighbours travel as one. Sorts: ask rarely."""
        longest = run = 0
        last = -1
        for slot in sorted(self._free):
            run = run + 1 if slot == last + 1 else 1
            longest, last = max(longest, run), slot
        return longest

    # --- changing ----------------------------------------------------------------------------------------------

    def pin(self, operation: OperationId, keys: Sequence[BlockKey], *, now: float, use: bool = True) -> list[int]:
        """Pins the leading cached ``keys`` for ``operation`` and returns their slots, in order.

        The first pin of an operation counts as a use of the block. ``use=False``: it does not, because the block is
        only moved about, or has just been stored for this very request under another operation.
        """
        slots: list[int] = []
        for key in keys:
            cached = self._cached.get(key)
            if cached is None:
                break
            if operation not in cached.pins:
                self._pin(operation, cached)
                if use:
                    self._policy.used(key, now=now)
            slots.append(cached.slot)
        return slots

    def allocate(self, operation: OperationId, count: int, *, now: float) -> Allocation | None:
        """``count`` private slots for ``operation``, evicting if need be; ``None`` when there is no room."""
        if count > self.available:
            return None
        evicted = self._evict(count - len(self._free), now=now)
        if len(self._free) < count:
            raise Bug(f"{self.available} slots are said to be available, {len(self._free)} are")
        slots = [self._free.pop() for _ in range(count)]
        self._operation(operation).private.update(slots)
        self._private += count
        return Allocation(slots, evicted)

    def evict_tenant(self, tenant: str, count: int, *, now: float) -> list[tuple[BlockKey, int]]:
        """Evicts up to ``count`` of ``tenant``'s blocks, coldest leaves first; fewer when pins or others' blocks
        that continue them keep the rest. Announce the returned keys as evicted; the slots they had are free."""
        gone: list[tuple[BlockKey, int]] = []
        while len(gone) < count and (key := self._take(now, tenant)) is not None:
            gone.append((key, self._cached[key].slot))
            self._forget(key)
        return gone

    def coldest(self, count: int, *, now: float) -> list[StoredBlock]:
        """The up to ``count`` blocks that would go first if as many were evicted now, in that order.

        Nothing is evicted. Protected blocks come last, as in eviction.
        """
        found: list[_Cached] = []
        while len(found) < count and (key := self._take(now)) is not None:
            found.append(self._cached[key])
            parent = self._parent(found[-1].block)
            if parent is not None:
                self._leave(parent)
        for cached in reversed(found):
            parent = self._parent(cached.block)
            if parent is not None:
                parent.children += 1
                self._withdraw(cached.block.parent)  # the look may have passed it over as protected
            self._offer(cached)
        return [cached.block for cached in found]

    def protect(self, keys: Sequence[BlockKey], until_s: float) -> int:
        """Evicts these blocks last until ``until_s``; a newer word replaces an older one. How many are cached."""
        held = 0
        for key in keys:
            cached = self._cached.get(key)
            if cached is not None:
                cached.protected_until_s = until_s
                held += 1
                if key in self._protected:
                    self._protected.discard(key)
                    self._offer(cached)
        return held

    def drop(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Drops those of ``keys`` that nobody pins and nothing continues, protected or not; returns them.

        Given a whole chain in any order, all of it goes. Announce the returned keys as evicted.
        """
        wanted = {key: cached for key in keys if (cached := self._cached.get(key)) is not None}
        dropped = []
        for key, cached in sorted(wanted.items(), key=lambda item: -item[1].block.depth):
            if not cached.pins and not cached.children:
                self._forget(key)
                dropped.append(key)
        return dropped

    def move(self, slots: Sequence[int], source: OperationId, target: OperationId) -> None:
        """Private ``slots`` of ``source`` become private slots of ``target``."""
        if not slots:
            return
        held = self._operations.get(source)
        if held is None or not held.private.issuperset(slots):
            raise Bug(f"operation {source} gives away slots that are not its own")
        held.private.difference_update(slots)
        self._operation(target).private.update(slots)

    def seal(self, operation: OperationId, slot: int, block: StoredBlock, *, now: float, pin: bool = True) -> bool:
        """Turns a private slot into the cached block ``block``, pinned by ``operation`` unless ``pin`` is false.

        False when the block is cached already: the slot stays private, and the cached twin is pinned instead.
        """
        holdings = self._operations.get(operation)
        if holdings is None or slot not in holdings.private:
            raise Bug(f"operation {operation} seals slot {slot} that is not its own")
        twin = self._cached.get(block.key)
        if twin is not None:
            if pin and operation not in twin.pins:
                self._pin(operation, twin)
                self._policy.used(block.key, now=now)
            return False
        parent = self._parent(block)
        if parent is None and block.depth > 0:
            raise Bug(f"operation {operation} seals a block of depth {block.depth} whose parent is not cached")
        if parent is not None:
            parent.children += 1  # no leaf any more, whoever offered it
            self._withdraw(block.parent)
        holdings.private.discard(slot)
        self._private -= 1
        cached = _Cached(slot=slot, block=block)
        if parent is not None:
            _link(parent, cached)
        self._cached[block.key] = cached
        self._tenants[block.tenant] += 1
        self._policy.stored(block, now=now)
        if pin:
            self._pin(operation, cached)
        else:
            self._offer(cached)
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
            parent = self._parent(cached.block)
            if parent is not None and not cached.pins <= parent.pins:
                raise Bug(f"block {key.hex()[:12]} is pinned and its parent is not")
            for operation in cached.pins:
                if key not in self._operations[operation].pinned:
                    raise Bug(f"{operation} pins {key.hex()[:12]} without knowing it")
        for key, cached in self._cached.items():
            if cached.children != children.get(key, 0):
                raise Bug(f"block {key.hex()[:12]} miscounts its children")
            child, listed = cached.child, 0
            while child is not None:
                if child.block.parent != key or self._cached.get(child.block.key) is not child:
                    raise Bug(f"block {key.hex()[:12]} lists a child that is none")
                child, listed = child.after, listed + 1
            if listed != cached.children:
                raise Bug(f"block {key.hex()[:12]} lists {listed} of its {cached.children} children")
            if key in self._protected and not self._is_leaf(cached):
                raise Bug(f"block {key.hex()[:12]} waits for eviction and is no leaf")
        if Counter(cached.block.tenant for cached in self._cached.values()) != +self._tenants:
            raise Bug("blocks of tenants are miscounted")
        self._policy.check_invariants(
            stored=self._cached.keys(),
            offered={key for key, cached in self._cached.items()
                     if self._is_leaf(cached) and key not in self._protected})
        if self._pinned != sum(1 for cached in self._cached.values() if cached.pins):
            raise Bug("pinned blocks are miscounted")
        if self._private != sum(len(held.private) for held in self._operations.values()):
            raise Bug("private slots are miscounted")

    # --- inside ------------------------------------------------------------------------------------------------

    def _operation(self, operation: OperationId) -> _Operation:
        held = self._operations.get(operation)
        if held is None:
            held = self._operations[operation] = _Operation()
        return held

    def _pin(self, operation: OperationId, cached: _Cached | None) -> None:
        """Pins a block and what it continues: a pinned block's ancestors are pinned, so ``available`` is exact."""
        pinned = self._operation(operation).pinned
        while cached is not None and operation not in cached.pins:
            if not cached.pins:
                self._pinned += 1
                if not cached.children:
                    self._withdraw(cached.block.key)
            cached.pins.add(operation)
            pinned[cached.block.key] = None
            cached = self._parent(cached.block)

    def _parent(self, block: StoredBlock) -> _Cached | None:
        """What the block continues. The first of a chain continues nothing, whatever it names as its parent: that may
        be a block which came after it and does not count it as a child."""
        return self._cached.get(block.parent) if block.depth else None

    @staticmethod
    def _is_leaf(cached: _Cached) -> bool:
        return not cached.pins and not cached.children

    def _offer(self, cached: _Cached) -> None:
        """Lets eviction find a block, if it may be evicted."""
        if self._is_leaf(cached):
            self._policy.offer(cached.block.key)

    def _withdraw(self, key: BlockKey) -> None:
        self._policy.withdraw(key)
        self._protected.discard(key)

    def _take(self, now: float, tenant: str | None = None) -> BlockKey | None:
        """The leaf that goes first, out of the order of leaves."""
        while (first := self._protected.first()) is not None and first[0][0] <= now:
            self._protected.discard(first[1])
            self._offer(self._cached[first[1]])
        while (key := self._policy.take(tenant)) is not None:
            cached = self._cached[key]
            if cached.protected_until_s <= now:
                return key
            self._protected.add(key, cached.block.tenant, (cached.protected_until_s, -cached.block.depth))
        return self._protected.pop(tenant)

    def _evict(self, count: int, *, now: float) -> list[BlockKey]:
        evicted: list[BlockKey] = []
        while len(evicted) < count and (key := self._take(now)) is not None:
            self._forget(key)
            evicted.append(key)
        return evicted

    def _forget(self, key: BlockKey) -> None:
        """A leaf is gone: its slot is free, and its parent may be a leaf now."""
        cached = self._cached.pop(key)
        self._free.append(cached.slot)
        self._tenants[cached.block.tenant] -= 1
        if not self._tenants[cached.block.tenant]:
            del self._tenants[cached.block.tenant]
        self._protected.discard(key)
        self._policy.dropped(key)
        parent = self._parent(cached.block)
        if parent is not None:
            _unlink(parent, cached)
            self._leave(parent)

    def _leave(self, parent: _Cached) -> None:
        parent.children -= 1
        self._offer(parent)


def _link(parent: _Cached, cached: _Cached) -> None:
    cached.after, parent.child = parent.child, cached
    if cached.after is not None:
        cached.after.before = cached


def _unlink(parent: _Cached, cached: _Cached) -> None:
    if cached.before is not None:
        cached.before.after = cached.after
    else:
        parent.child = cached.after
    if cached.after is not None:
        cached.after.before = cached.before
