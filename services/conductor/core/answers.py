"""What is expected of answers: how long they will be, by what those to prompts that begin alike were like lately."""

from __future__ import annotations

import struct
from collections import OrderedDict

from shared.kv import KEY_BYTES

_FIRST_ANSWER_TOKENS = 256.0
"""Length of an answer before any was seen."""
_SHORT_TOKENS = 11
"""Answers up to here have at most ten gaps."""
_MOST_TENANTS = 10_000
"""Tenants whose answers are remembered apart; who was not heard of for longest goes first."""
_MOST_BEGINNINGS = 30_000
"""The same for beginnings of prompts."""
_BEGIN = (0, 1, 3)
"""Blocks of a prompt that tell what it is like; they predict best on the traces (docs/conductor.md)."""
_FIRST_PART = struct.Struct("<Q")
_BELIEF = 0.5
"""What was seen of a beginning so many times weighs as much as what was known without."""


Beginning = tuple[int, ...]
"""First parts of the keys of some leading blocks of a prompt, see ``_BEGIN``; the longer it is, the fewer share it."""


def beginning(keys: bytes) -> Beginning:
    """That of a prompt with these packed keys."""
    last = len(keys) // KEY_BYTES - 1
    return tuple([_FIRST_PART.unpack_from(keys, at * KEY_BYTES)[0] for at in _BEGIN if at <= last])


class Answers:
    """What is expected of an answer, by what those to prompts that begin alike were like lately; of unknown ones, by
    the same tenant's, of unknown ones, by all tenants'."""

    def __init__(self) -> None:
        self.tokens = _FIRST_ANSWER_TOKENS
        """Length of any answer: a smoothed mean."""
        self.short_share = 0.0
        """Share of answers so short that their longest tenth is one gap, the one until they join a batch; smoothed."""
        #: {tenant: (smoothed length, smoothed distance from it)}, whoever was heard of last at the end
        self._of: OrderedDict[str, tuple[float, float]] = OrderedDict()
        #: {block: (smoothed length, smoothed distance from it, how many)}, in the same order
        self._after: OrderedDict[int, tuple[float, float, int]] = OrderedDict()

    def observe(self, tokens: int, tenant: str, begins: Beginning = ()) -> None:
        """One ended by itself after so many."""
        expected, _ = self._expected(tenant, begins)
        for block in begins:
            usual, apart, count = self._after.pop(block, (float(tokens), abs(tokens - expected), 0))
            weight = max(0.1, 1 / (count + 1))
            self._after[block] = (usual + weight * (tokens - usual),
                                  apart + weight * (abs(tokens - usual) - apart) if count else apart, count + 1)
        while len(self._after) > _MOST_BEGINNINGS:
            self._after.popitem(last=False)
        usual, apart = self._of.pop(tenant, (self.tokens, 0.0))
        self._of[tenant] = (0.9 * usual + 0.1 * tokens, 0.9 * apart + 0.1 * abs(tokens - usual))
        self.tokens = 0.95 * self.tokens + 0.05 * tokens
        self.short_share += (float(1 < tokens <= _SHORT_TOKENS) - self.short_share) / 100
        if len(self._of) > _MOST_TENANTS:
            self._of.popitem(last=False)

    def usual(self, tenant: str, begins: Beginning = ()) -> float:
        """Tokens of a usual one."""
        return self._expected(tenant, begins)[0]

    def most(self, tenant: str, begins: Beginning = ()) -> float:
        """Tokens that most of them (about four of five) stay below."""
        usual, apart = self._expected(tenant, begins)
        return usual + apart

    def _expected(self, tenant: str, begins: Beginning) -> tuple[float, float]:
        usual, apart = self._of.get(tenant, (self.tokens, 0.0))
        for block in begins:
            if (known := self._after.get(block)) is None:
                break
            belief = known[2] / (known[2] + _BELIEF)
            usual += belief * (known[0] - usual)
            apart += belief * (known[1] - apart)
        return usual, apart
