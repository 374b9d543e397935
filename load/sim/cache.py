"""A node's KV blocks: DRAM is the store's own block pool, an SSD may lie behind it.

What DRAM evicts goes to the SSD when there is one, least recently used blocks of which go for it. Every change is
numbered and announced as a worker's store agent does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from shared.ids import BlockKey, Incarnation, OperationId, SpecDigest, WorkerId
from shared.kv import Tier
from shared.messages import KvEvent, StoredBlock
from shared.store import policies
from shared.store.blocks import BlockPool
from shared.store.events import EventLog

_ROOT = BlockKey(b"\xff" * 32)
"""No key of a trace: these are 16 bytes of hash id and 16 of the repetition, and neither gets that large."""
_KEPT_BATCHES = 32
"""Batches at hand for those who missed some; older questions get everything."""


class NodeCache:
    """The blocks of one life of one worker."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation, spec: SpecDigest, *, dram_blocks: int,
                 ssd_blocks: int, block_bytes: int, block_tokens: int, announce: Callable[[KvEvent], None],
                 policy: str = policies.DEFAULT) -> None:
        self._pool = BlockPool(dram_blocks, policies.make(policy))
        self._block_bytes, self._block_tokens, self._announce = block_bytes, block_tokens, announce
        #: {key: block} on the SSD, least recently used first
        self._ssd: OrderedDict[BlockKey, StoredBlock] = OrderedDict()
        self._ssd_blocks = ssd_blocks
        #: {key: block} in DRAM, kept only when an SSD will want it
        self._blocks: dict[BlockKey, StoredBlock] = {}
        self.capacity_blocks = dram_blocks
        self.log = EventLog(worker, incarnation, spec, self._state, kept=_KEPT_BATCHES, digests=False)

    @property
    def available_blocks(self) -> int:
        """DRAM blocks that are free or could be."""
        return self._pool.available

    @property
    def cached_blocks(self) -> int:
        """Blocks in DRAM under their key."""
        return self._pool.statistics().cached

    def pin(self, operation: OperationId, keys: Sequence[BlockKey], *, now: float) -> int:
        """Pins the leading ``keys`` that are in DRAM; how many."""
        return len(self._pool.pin(operation, keys, now=now))

    def on_ssd(self, keys: Sequence[BlockKey], start: int) -> int:
        """How far ``keys[start:]`` lies on the SSD without a hole: the end."""
        end = start
        while end < len(keys) and keys[end] in self._ssd:
            end += 1
        return end

    def held(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Leading ``keys`` in either tier, and how many of those are on the SSD only."""
        end = self._pool.match(keys)
        on_ssd = 0
        while end < len(keys) and keys[end] in self._ssd:
            end, on_ssd = end + 1, on_ssd + 1
        return end, on_ssd

    def reserve(self, operation: OperationId, count: int, *, now: float) -> list[int] | None:
        """Room in DRAM for ``count`` new blocks; ``None`` when too much of it is in use."""
        if not count:
            return []
        allocation = self._pool.allocate(operation, count, now=now)
        if allocation is None:
            return None
        if allocation.evicted:
            self._demote(allocation.evicted, now)
        return allocation.slots

    def fill(self, operation: OperationId, slots: Sequence[int], keys: Sequence[BlockKey], first: int, *,
             now: float, source: WorkerId | None = None) -> None:
        """``slots`` now hold blocks ``first ...`` of the chain ``keys``, pinned by ``operation``."""
        stored = []
        parent = keys[first - 1] if first else _ROOT
        for depth, slot in enumerate(slots, start=first):
            key = keys[depth]
            block = StoredBlock(key=key, parent=parent, depth=depth, nbytes=self._block_bytes,
                                tokens=self._block_tokens, origin="computed" if source is None else "received")
            if self._pool.seal(operation, slot, block, now=now):
                stored.append(block)
                if self._ssd_blocks:
                    self._blocks[key] = block
            parent = key
        if stored:
            self._announce(self.log.stored(stored, at_s=now))

    def release(self, operation: OperationId) -> None:
        """``operation`` uses nothing any more. Idempotent."""
        self._pool.release(operation)

    def check_invariants(self) -> None:
        """Raises ``Bug`` when the pool contradicts itself."""
        self._pool.check_invariants()

    def _demote(self, keys: Sequence[BlockKey], now: float) -> None:
        if self._ssd_blocks:
            moved = [self._blocks.pop(key) for key in keys]
            fresh = [block for block in moved if block.key not in self._ssd]
            for block in moved:
                self._ssd[block.key] = block
                self._ssd.move_to_end(block.key)
            gone = [self._ssd.popitem(last=False)[0] for _ in range(len(self._ssd) - self._ssd_blocks)]
            if fresh:
                self._announce(self.log.stored([_on_ssd(block) for block in fresh], at_s=now))
            if gone:
                self._announce(self.log.evicted(gone, at_s=now, reason="capacity", tier=Tier.SSD))
        self._announce(self.log.evicted(keys, at_s=now, reason="capacity"))

    def _state(self) -> list[StoredBlock]:
        return [*self._pool.blocks(), *(_on_ssd(block) for block in self._ssd.values())]


def _on_ssd(block: StoredBlock) -> StoredBlock:
    return StoredBlock(key=block.key, parent=block.parent, depth=block.depth, nbytes=block.nbytes,
                       tokens=block.tokens, origin=block.origin, tier=Tier.SSD)
