"""Least frequently used first."""

from __future__ import annotations

from shared.store.policies.base import Entry, Ranked
from shared.store.policies.leaves import Rank


class Lfu(Ranked):
    """What was used least often since it was stored goes first; of equal counts, what was used last longest ago.

    Counts never fade: a block that was popular stays until everything less popular is gone.
    """

    name = "lfu"

    def rank(self, entry: Entry) -> Rank:
        return entry.uses, entry.used_s
