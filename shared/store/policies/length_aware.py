"""Long chains' ends first, as they grow cold."""

from __future__ import annotations

from math import log2

from shared.store.policies.base import Entry, Ranked
from shared.store.policies.leaves import Rank

DOUBLING_S = 15.0
"""Twice as deep in its chain counts as this many seconds longer unused: in conversation_trace new prompts of 64 blocks
and more are continued 0.6 times as often as those below 16, and 100 s later, over some five doublings."""


class LengthAware(Ranked):
    """LRU in which depth is age: the end of a long chain goes before that of a short one used a little earlier.

    A long chain occupies what many short ones would share, and is continued less often and later.
    """

    name = "length_aware"

    def rank(self, entry: Entry) -> Rank:
        return entry.used_s - DOUBLING_S * log2(entry.depth + 1), -entry.depth
