"""A trace through one block pool: requests one after another, each over before the next.

A request pins the leading blocks of its prompt that are cached (its *hit*), stores the rest as far as the pool has
room beside what it pins, and ends. All of a prompt's ids are cached, the partial block at its end too. Hit tokens are
those of the hit blocks, so a share of hit tokens is a share of all prompt tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from load.workload.traces import Trace
from shared.errors import Bug
from shared.ids import BlockKey, OperationId
from shared.messages import StoredBlock
from shared.store.blocks import BlockPool

_ROOT = BlockKey(bytes(32))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request as the pool sees it."""

    at_s: float
    tokens: int
    blocks: Sequence[StoredBlock]
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class Hits:
    """What a cache was worth to a trace."""

    prompt_tokens: int
    hit_tokens: int
    evicted_blocks: int

    @property
    def share(self) -> float:
        """Of all prompt tokens."""
        return self.hit_tokens / self.prompt_tokens


def prompts_of(trace: Trace) -> list[Prompt]:
    """The trace with block keys for ids; the same block is the same object everywhere."""
    blocks: dict[int, StoredBlock] = {}
    prompts = []
    for arrival in trace.arrivals:
        chain: list[StoredBlock] = []
        for depth, hash_id in enumerate(arrival.hash_ids):
            block = blocks.get(hash_id)
            if block is None:
                block = blocks[hash_id] = StoredBlock(
                    key=BlockKey(hashlib.sha256(hash_id.to_bytes(8, "little")).digest()),
                    parent=chain[-1].key if chain else _ROOT, depth=depth, nbytes=0,
                    tokens=min(trace.block_tokens, arrival.input_tokens - depth * trace.block_tokens))
            chain.append(block)
        prompts.append(Prompt(arrival.at_s, arrival.input_tokens, chain, [block.key for block in chain]))
    return prompts


def replay(prompts: Sequence[Prompt], pool: BlockPool, *, stored: Sequence[int] | None = None) -> Hits:
    """Puts ``prompts`` through ``pool``, which should be fresh.

    ``stored`` says of each prompt how many leading blocks the cache shall take in at most; all unless given.
    """
    hit_tokens = evicted = 0
    for index, prompt in enumerate(prompts):
        operation, now = OperationId(str(index)), prompt.at_s
        hit = len(pool.pin(operation, prompt.keys, now=now))
        hit_tokens += sum(block.tokens for block in prompt.blocks[:hit])
        most = len(prompt.blocks) if stored is None else stored[index]
        missing = prompt.blocks[hit:min(most, hit + pool.available)]
        allocation = pool.allocate(operation, len(missing), now=now)
        if allocation is None:
            raise Bug(f"{len(missing)} of {pool.available} available slots were refused")
        evicted += len(allocation.evicted)
        for slot, block in zip(allocation.slots, missing, strict=True):
            pool.seal(operation, slot, block, now=now)
        pool.release(operation)
    return Hits(sum(prompt.tokens for prompt in prompts), hit_tokens, evicted)


def infinite(prompts: Sequence[Prompt]) -> Hits:
    """A cache that keeps everything."""
    stored: set[BlockKey] = set()
    hit_tokens = 0
    for prompt in prompts:
        for block in prompt.blocks:
            if block.key not in stored:
                break
            hit_tokens += block.tokens
        stored.update(prompt.keys)
    return Hits(sum(prompt.tokens for prompt in prompts), hit_tokens, 0)
