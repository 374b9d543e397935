"""The policy that knows the future: what is used next at the latest moment goes first.

What a block continues is never used later than the block, so of all blocks the one used farthest ahead is always a
leaf, and leaves first costs Belady's rule nothing. Blocks that are never used again are not even taken in, which
spares those that a prompt would displace while it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from load.cachesim.replay import Hits, Prompt, replay
from shared.ids import BlockKey
from shared.messages import StoredBlock
from shared.store.blocks import BlockPool
from shared.store.policies.base import Entry, Ranked
from shared.store.policies.leaves import Rank


def bound(prompts: Sequence[Prompt], blocks: int) -> Hits:
    """What policies are measured against in a pool of ``blocks``."""
    numbered = [replace(prompt, at_s=float(index)) for index, prompt in enumerate(prompts)]
    last = {key: index for index, prompt in enumerate(prompts) for key in prompt.keys}
    # What a block continues is used at least as late: those used again are the leading ones.
    stored = [sum(last[key] > index for key in prompt.keys) for index, prompt in enumerate(prompts)]
    return replay(numbered, BlockPool(blocks, Belady(numbered)), stored=stored)


class Belady(Ranked):
    """For one replay of ``prompts``, whose times differ."""

    name = "belady"

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        super().__init__()
        #: {key: when it is used, next time last}
        self._uses: dict[BlockKey, list[float]] = {}
        for prompt in reversed(prompts):
            for key in prompt.keys:
                self._uses.setdefault(key, []).append(prompt.at_s)

    def stored(self, block: StoredBlock, *, now: float) -> None:
        super().stored(block, now=now)
        self._entries[block.key].used_s = self._next(block.key, now)

    def used(self, key: BlockKey, *, now: float) -> None:
        self._entries[key].used_s = self._next(key, now)

    def rank(self, entry: Entry) -> Rank:
        return -entry.used_s, -entry.depth

    def _next(self, key: BlockKey, now: float) -> float:
        """The first use after ``now``."""
        uses = self._uses[key]
        while uses and uses[-1] <= now:
            uses.pop()
        return uses[-1] if uses else inf
