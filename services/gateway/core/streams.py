"""Token chunks of one request, put in order.

The bus delivers at most once and a retried attempt may still speak, so chunks can be late, doubled, from a dead
attempt, or missing. ``first`` (the index of a chunk's first token in the answer) decides everything.
"""

from __future__ import annotations

import msgspec

from shared.kv import unpack_tokens
from shared.messages import Finish, TokenChunk


class Fresh(msgspec.Struct, frozen=True):
    """Tokens that continue the answer without a gap."""

    tokens: list[int]
    finish: Finish


class TokenOrder:
    """The tokens of one attempt. Holds at most ``max_early`` chunks that came before their turn."""

    def __init__(self, attempt: int, *, max_early: int = 64) -> None:
        self.attempt = attempt
        self.received = 0
        """Tokens delivered so far: the index of the next one."""
        self._early: dict[int, TokenChunk] = {}
        self._max_early = max_early

    @property
    def gap(self) -> bool:
        """Something after a missing chunk is here already."""
        return bool(self._early)

    @property
    def hopeless(self) -> bool:
        """So much came after a missing chunk that it will not come any more."""
        return len(self._early) > self._max_early

    def push(self, chunk: TokenChunk) -> Fresh | None:
        """What ``chunk`` makes deliverable; ``None`` when that is nothing (another attempt, a double, a gap)."""
        if chunk.attempt != self.attempt:
            return None
        end = chunk.first + len(chunk.tokens) // 4
        if end < self.received or (end == self.received and not chunk.finish):
            return None
        if chunk.first > self.received:
            known = self._early.get(chunk.first)
            if known is None or len(known.tokens) < len(chunk.tokens):
                self._early[chunk.first] = chunk
            return None
        tokens, finish = self._take(chunk), chunk.finish
        while not finish and self._early and min(self._early) <= self.received:
            follower = self._early.pop(min(self._early))
            tokens += self._take(follower)
            finish = follower.finish
        return Fresh(tokens, finish)

    def _take(self, chunk: TokenChunk) -> list[int]:
        tokens: list[int] = unpack_tokens(chunk.tokens).tolist()[self.received - chunk.first:]
        self.received += len(tokens)
        return tokens
