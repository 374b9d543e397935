"""Least recently used first."""

from __future__ import annotations

from shared.store.policies.base import Entry, Ranked
from shared.store.policies.leaves import Rank


class Lru(Ranked):
    """What was used last longest ago goes first; of one use, the end of the chain."""

    name = "lru"

    def rank(self, entry: Entry) -> Rank:
        return entry.used_s, -entry.depth
