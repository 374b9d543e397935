"""Which tokens of which prompts the next forward pass computes.

A pass takes up to ``chunk_tokens`` new tokens from the prompts that are first in the order (:mod:`shared.order`), by
what each of them has left. So whoever comes and has less may take over at the next pass, and what was computed of the
other one stays. Every chunk but a prompt's last ends on a block boundary, so each block is computed, and sent, exactly
once.

No block is computed for two prompts: one whose next block is in the pass already, or on its way from elsewhere, waits
until it is there and then goes on behind it (:meth:`PrefillQueue.reuse`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from shared.errors import Bug
from shared.ids import BlockKey, OperationId
from shared.messages import Profile
from shared.order import Order


@dataclass
class Prompt:
    """A prompt in the queue: tokens ``[0, done)`` have their KV, ``[done, total)`` are to be computed."""

    operation: OperationId
    total: int
    done: int
    since_s: float
    """When it became ready, as far as the order is concerned; monotonic seconds."""
    keys: Sequence[BlockKey]
    """Of its full blocks."""
    rank: float = 0.0
    """Its number in the order."""

    @property
    def remain_len(self) -> int:
        """Tokens still to be computed."""
        return self.total - self.done


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, start + length)`` of a prompt; ``last`` when they are its end."""

    operation: OperationId
    start: int
    length: int
    last: bool


class PrefillQueue:
    """The prompts to compute. What they cost is known from the profile of the engine that computes them."""

    def __init__(self, order: Order, profile: Profile, *, chunk_tokens: int, block_tokens: int) -> None:
        self._order, self._profile = order, profile
        self._chunk_tokens, self._block_tokens = chunk_tokens, block_tokens
        self._prompts: dict[OperationId, Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def remaining_tokens(self) -> int:
        """Tokens to be computed, all prompts together."""
        return sum(prompt.remain_len for prompt in self._prompts.values())

    def add(self, operation: OperationId, *, total: int, done: int, now: float, head_start_s: float = 0.0,
            lead_s: float | None = None, keys: Sequence[BlockKey] = ()) -> None:
        """A prompt is ready to be computed from token ``done`` (a block boundary) on; it counts as ready since
        ``head_start_s`` before ``now``, or so that others go first that come up to ``lead_s`` later. ``keys`` are those
        of its full blocks."""
        prompt = self._prompts[operation] = Prompt(operation, total, done, now - head_start_s, keys)
        if lead_s is not None:
            prompt.since_s = now + lead_s - self._order.lead_s(self._left_s(prompt))
        self._place(prompt)

    def reuse(self, operation: OperationId, done: int) -> None:
        """Tokens up to ``done`` (a block boundary, not its end) need not be computed any more."""
        prompt = self._prompts[operation]
        if not prompt.done <= done < prompt.total or done % self._block_tokens:
            raise Bug(f"{operation} is at {prompt.done} of {prompt.total} tokens and reuses up to {done}")
        prompt.done = done
        self._place(prompt)

    def remove(self, operation: OperationId) -> None:
        """Forgets a prompt. Idempotent."""
        self._prompts.pop(operation, None)

    def plan(self, coming: Container[BlockKey] = ()) -> list[Chunk]:
        """The next pass, while the blocks ``coming`` are on their way.

        Changes nothing; call :meth:`advance` with each chunk once it is computed.
        """
        chunks: list[Chunk] = []
        computing: set[BlockKey] = set()
        room = self._chunk_tokens
        for prompt in sorted(self._prompts.values(), key=_rank):
            block = prompt.done // self._block_tokens
            if prompt.keys and block < (prompt.total - 1) // self._block_tokens:  # its last token it computes itself
                following = prompt.keys[block]
                if following in computing or following in coming:
                    continue
            length = min(prompt.remain_len, room)
            if length < prompt.remain_len:
                length -= length % self._block_tokens
            if length <= 0:
                break
            chunks.append(Chunk(prompt.operation, prompt.done, length, last=length == prompt.remain_len))
            computing.update(prompt.keys[block:(prompt.done + length) // self._block_tokens])
            room -= length
        return chunks

    def advance(self, chunk: Chunk) -> None:
        """``chunk`` is computed; a prompt that is complete leaves the queue."""
        prompt = self._prompts.get(chunk.operation)
        if prompt is None:
            return
        prompt.done += chunk.length
        if prompt.remain_len == 0:
            del self._prompts[chunk.operation]
        elif self._order.is_preemptive:
            self._place(prompt)

    def _place(self, prompt: Prompt) -> None:
        prompt.rank = self._order.rank(prompt.since_s, self._left_s(prompt))

    def _left_s(self, prompt: Prompt) -> float:
        profile = self._profile
        return prompt.remain_len * (
            profile.prefill_per_token_s + profile.prefill_per_token2_s * (prompt.total + prompt.done))


def _rank(prompt: Prompt) -> float:
    return prompt.rank
