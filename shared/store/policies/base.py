"""What a policy is told, and what it answers.

A policy orders the blocks of one :class:`~shared.store.blocks.BlockPool`; the pool keeps the rules that no policy may
break (leaves first, pinned blocks and their ancestors never). The life of a block, as a policy sees it:

``stored`` once; then any number of ``used``, ``offer`` and ``withdraw``; then ``dropped``, after which it is unknown.
``offer`` says that it may be evicted from now on (nobody pins it, nothing continues it), ``withdraw`` that it may not.
``take`` hands out the offered block that should go first; the pool drops it, or offers it again when it only looked.

All times are the pool's monotonic seconds and never go back. A policy knows no clock, no randomness it was not seeded
with and no future; its memory is bounded by a small multiple of the pool's blocks; every event costs O(log n).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from shared.errors import Bug
from shared.ids import BlockKey
from shared.messages import StoredBlock
from shared.store.policies.leaves import Leaves, Rank


class Policy(ABC):
    """Orders the blocks of the one pool that it is given to."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self.num_blocks = 0

    def bind(self, num_blocks: int) -> None:
        """Says how many blocks the pool has. Called once, before any event."""
        self.num_blocks = num_blocks

    @abstractmethod
    def stored(self, block: StoredBlock, *, now: float) -> None:
        """A block is new."""

    @abstractmethod
    def used(self, key: BlockKey, *, now: float) -> None:
        """A request found the block and reuses it."""

    @abstractmethod
    def offer(self, key: BlockKey) -> None:
        """The block may be evicted from now on."""

    @abstractmethod
    def withdraw(self, key: BlockKey) -> None:
        """The block may not be evicted any more (or never could)."""

    @abstractmethod
    def take(self, tenant: str | None = None) -> BlockKey | None:
        """The offered block (of ``tenant``) that should go first, which is not offered any more; ``None``: no such."""

    @abstractmethod
    def dropped(self, key: BlockKey) -> None:
        """The block is gone from the pool."""

    def reuse_odds(self, key: BlockKey) -> float:
        """How likely the stored block is used again, in [0, 1]: is it worth a place in a colder tier?

        1 for a policy that has no opinion.
        """
        return 1.0

    def check_invariants(self, *, stored: Set[BlockKey], offered: Set[BlockKey]) -> None:
        """Raises :class:`Bug` when it knows other blocks than the pool does, or offers others."""
        if self.stored_keys() != stored:
            raise Bug(f"policy {self.name} knows {len(self.stored_keys())} blocks, the pool {len(stored)}")
        if self.offered_keys() != offered:
            raise Bug(f"policy {self.name} would evict other blocks than may be evicted")

    @abstractmethod
    def stored_keys(self) -> Set[BlockKey]:
        """All blocks it knows, for checks."""

    @abstractmethod
    def offered_keys(self) -> Set[BlockKey]:
        """All blocks it may hand out, for checks."""


@dataclass(slots=True)
class Entry:
    """What is known of one block that is stored."""

    parent: BlockKey
    tenant: str
    depth: int
    used_s: float
    """When it was stored or last used."""
    uses: int = 0
    """How often it was used since it was stored."""


class Ranked(Policy):
    """A policy that is an order: what has the lowest :meth:`rank` goes first."""

    def __init__(self) -> None:
        super().__init__()
        #: {key: what is known of it}; all stored blocks
        self._entries: dict[BlockKey, Entry] = {}
        #: all offered blocks
        self._leaves = Leaves()

    @abstractmethod
    def rank(self, entry: Entry) -> Rank:
        """The place of a block that is offered; it keeps it until it is withdrawn."""

    def stored(self, block: StoredBlock, *, now: float) -> None:
        self._entries[block.key] = Entry(block.parent, block.tenant, block.depth, now)

    def used(self, key: BlockKey, *, now: float) -> None:
        entry = self._entries[key]
        entry.used_s = now
        entry.uses += 1

    def offer(self, key: BlockKey) -> None:
        entry = self._entries[key]
        self._leaves.add(key, entry.tenant, self.rank(entry))

    def withdraw(self, key: BlockKey) -> None:
        self._leaves.discard(key)

    def take(self, tenant: str | None = None) -> BlockKey | None:
        return self._leaves.pop(tenant)

    def dropped(self, key: BlockKey) -> None:
        self._leaves.discard(key)
        del self._entries[key]

    def stored_keys(self) -> Set[BlockKey]:
        return self._entries.keys()

    def offered_keys(self) -> Set[BlockKey]:
        return self._leaves.keys()
