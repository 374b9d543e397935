"""One drain under way: which blocks of a worker have no other copy, and what became of each."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from services.store_manager.core.orders import Drain, DrainState
from shared.ids import BlockKey


@dataclass
class Draining:
    """Pure bookkeeping; the planner chooses the copies.

    ::

        scanning ──► copying ──► scanning (what came meanwhile) ──► ... ──► retiring ──► done
            └───────────┴───────────────────┴───── worker dead, time over, cancelled ──► failed, cancelled
    """

    order: Drain
    deadline_s: float
    #: what the worker held when the scan began, and how far the scan is
    scan: list[BlockKey] = field(default_factory=list)
    scanned: int = 0
    scanning: bool = True
    is_unsure: bool = False
    """What the worker holds was not all known since the scan began: it is to begin anew."""
    has_asked: bool = False
    """The worker was asked for those of its blocks that had no room in the map."""
    unseen: int = 0
    """Blocks of the worker that had no room in the map even so."""
    #: blocks that have no other copy, and are neither copied nor given up
    last: set[BlockKey] = field(default_factory=set)
    #: ends of chains of such blocks, hottest first: when all of these have a copy, all of ``last`` have
    todo: deque[BlockKey] = field(default_factory=deque)
    #: blocks given up, each with why
    given_up: dict[BlockKey, str] = field(default_factory=dict)
    tries: Counter[BlockKey] = field(default_factory=Counter)
    rounds: int = 0
    nbytes: int = 0
    blocks: int = 0
    copied: int = 0
    retiring: bool = False
    retire_asked: bool = False
    retire_tries: int = 0
    retire_not_before_s: float = float("-inf")

    def begin_scan(self, keys: Iterable[BlockKey]) -> None:
        """Look at all of these."""
        self.scan, self.scanned, self.scanning, self.retiring = list(keys), 0, True, False
        self.rounds += 1

    def next_keys(self, limit: int) -> list[BlockKey]:
        """The next ``limit`` blocks of the scan; empty at its end."""
        keys = self.scan[self.scanned:self.scanned + limit]
        self.scanned += len(keys)
        return keys

    def found_last(self, key: BlockKey) -> None:
        """A block has no other copy."""
        if key not in self.last and key not in self.given_up:
            self.last.add(key)
            self.blocks += 1

    def end_scan(self, parent: Callable[[BlockKey], BlockKey | None], heat: Callable[[BlockKey], float]) -> None:
        """Puts the ends of chains in order: hottest first, then longest to copy first, then by name."""
        inner = {parent(key) for key in self.last}
        ends = [key for key in self.last if key not in inner]
        self.todo = deque(sorted(ends, key=lambda key: (-heat(key), key)))
        self.scan, self.scanned, self.scanning = [], 0, False

    def is_copied(self, keys: Iterable[BlockKey]) -> None:
        """These have another copy now."""
        before = len(self.last)
        self.last.difference_update(keys)
        self.copied += before - len(self.last)

    def is_gone(self, keys: Iterable[BlockKey]) -> None:
        """The worker lost these itself: there is nothing left to copy."""
        for key in keys:
            if key in self.last:
                self.last.remove(key)
                self.blocks -= 1

    def give_up(self, keys: Iterable[BlockKey], why: str) -> None:
        """These stay behind."""
        for key in keys:
            if key in self.last:
                self.last.remove(key)
                self.given_up[key] = why

    def report(self, state: DrainState | None = None, why: str = "") -> Drain:
        """As people see it."""
        now: DrainState = state or ("retiring" if self.retiring else "copying")
        reasons = Counter(self.given_up.values())
        if self.unseen:
            reasons["the map of who holds what has no room, see MOONBUS_STORE_MANAGER_MAP_BLOCKS"] += self.unseen
        if not why and reasons:
            fate = "are dropped" if self.order.force else "stay behind"
            why = "; ".join(f"{count} {fate}: {reason}" for reason, count in sorted(reasons.items()))
            if now == "done" and not self.order.force:
                why += "; the worker serves them until it is ended"
        return msgspec.structs.replace(
            self.order, state=now, blocks=self.blocks, copied=self.copied, left=reasons.total(),
            nbytes=self.nbytes, why=why)
