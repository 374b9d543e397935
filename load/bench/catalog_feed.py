"""What a cluster tells the durable feed, made up: pure, from a seed, so that two runs tell the same.

A request continues one of a few shared prefixes with blocks of its own. A prefill worker computes them, a decode worker
receives them and adds some, both announce each in batches; and since each holds so many blocks only, both evict as
many of their oldest. Of all block events half are storings, half evictions, and a quarter or so bring a block that
nobody knew.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.ids import BlockKey, ConductorId, GatewayId, HostId, Incarnation, RequestId, WorkerId
from shared.kv import CacheSpec, pack_keys
from shared.messages import Endpoint, Evicted, Hello, RequestDone, Stages, Stored, StoredBlock

SPEC = CacheSpec(model="bench", weights_digest="w", tokenizer_digest="t", dtype="bfloat16", layers=32, kv_heads=8,
                 head_dim=128, block_tokens=512, max_context=131_072)
ROOT = BlockKey(bytes(32))
TENANTS = tuple(f"tenant-{n}" for n in range(8))
PREFIXES, PREFIX_BLOCKS = 16, 4
OWN_BLOCKS, ANSWER_BLOCKS = (8, 32), (0, 2)
"""Blocks a request adds at least and at most: of its prompt, of its answer."""
BATCH = 32
"""Blocks of one message."""


@dataclass
class Holder:
    """One worker, its numbers and what it holds."""

    name: str
    room: int
    incarnation: Incarnation
    seq: int = 0
    held: deque[BlockKey] = field(default_factory=deque)

    def hello(self, *, at_s: float) -> Hello:
        """As it says when it starts."""
        worker = WorkerId(self.name)
        return Hello(worker=worker, incarnation=self.incarnation, spec=SPEC, capacity_blocks=self.room, max_running=64,
                     role="prefill" if self.name.startswith("prefill") else "decode", started_at_s=at_s, pid=1,
                     endpoint=Endpoint(worker=worker, incarnation=self.incarnation, host=HostId("bench")))

    def store(self, blocks: list[StoredBlock], *, at_s: float) -> Iterator[Stored | Evicted]:
        """Storing ``blocks``, and what has to go for them."""
        for start in range(0, len(blocks), BATCH):
            some = blocks[start:start + BATCH]
            self.held.extend(block.key for block in some)
            self.seq += 1
            yield Stored(worker=WorkerId(self.name), incarnation=self.incarnation, seq=self.seq, spec=SPEC.digest,
                         at_s=at_s, blocks=some)
        over = len(self.held) - self.room
        if over >= BATCH:
            self.seq += 1
            yield Evicted(worker=WorkerId(self.name), incarnation=self.incarnation, seq=self.seq, at_s=at_s,
                          keys=pack_keys([self.held.popleft() for _ in range(over)]))


class Feed:
    """An endless stream of news; ``room`` is how many blocks each of the workers holds."""

    def __init__(self, *, seed: int, workers: int = 4, room: int = 4_096) -> None:
        self._chance = random.Random(seed)
        self._requests = 0
        self._label = f"{seed:x}"
        life = Incarnation(self._chance.randbytes(8).hex())
        self.prefill = [Holder(f"prefill-{n}", room, life) for n in range(1, workers // 2 + 1)]
        self.decode = [Holder(f"decode-{n}", room, life) for n in range(1, workers - workers // 2 + 1)]
        self._prefixes = [self._chain(ROOT, 0, PREFIX_BLOCKS, TENANTS[n % len(TENANTS)], "")
                          for n in range(PREFIXES)]

    def begin(self, *, at_s: float) -> Iterator[Hello | Stored | Evicted]:
        """Workers that say hello and have the shared prefixes."""
        for holder in (*self.prefill, *self.decode):
            yield holder.hello(at_s=at_s)
        for n, blocks in enumerate(self._prefixes):
            yield from self.prefill[n % len(self.prefill)].store(blocks, at_s=at_s)

    def request(self, *, at_s: float) -> Iterator[Stored | Evicted | RequestDone]:
        """What one request makes everybody say."""
        chance = self._chance
        self._requests += 1
        name = f"{self._label}-{self._requests:08x}"
        prefix = self._prefixes[min(int(chance.expovariate(0.3)), PREFIXES - 1)]
        tenant = prefix[0].tenant
        own = self._chain(prefix[-1].key, len(prefix), chance.randint(*OWN_BLOCKS), tenant, name)
        answer = self._chain(own[-1].key, len(prefix) + len(own), chance.randint(*ANSWER_BLOCKS), tenant, name)
        prefill, decode = chance.choice(self.prefill), chance.choice(self.decode)
        yield from prefill.store(own, at_s=at_s)
        received = [StoredBlock(key=block.key, parent=block.parent, depth=block.depth, nbytes=block.nbytes,
                                tokens=block.tokens, tenant=tenant, request=block.request, origin="received",
                                source=WorkerId(prefill.name)) for block in own]
        yield from decode.store(received + answer, at_s=at_s)
        tokens = (len(prefix) + len(own)) * SPEC.block_tokens
        hit = len(prefix) * SPEC.block_tokens
        yield RequestDone(
            request=RequestId(name), gateway=GatewayId("gateway-1"), model=SPEC.model, spec=SPEC.digest, tenant=tenant,
            received_at_s=at_s, duration_s=1.5, outcome="ok", finish="stop", prompt_tokens=tokens + 7,
            completion_tokens=len(answer) * SPEC.block_tokens + 40, predicted_hit_tokens=hit, hit_tokens=hit,
            predicted_ttft_s=0.3, ttft_s=0.28, tbt_s=0.02, conductor=ConductorId("conductor-1"),
            prefill=WorkerId(prefill.name), decode=WorkerId(decode.name), last_key=own[-1].key,
            stages=Stages(hit_tokens=hit, prefill_s=0.2))

    def _chain(self, parent: BlockKey, depth: int, length: int, tenant: str, request: str) -> list[StoredBlock]:
        blocks = []
        for n in range(length):
            key = BlockKey(self._chance.randbytes(32))
            blocks.append(StoredBlock(key=key, parent=parent, depth=depth + n, nbytes=SPEC.block_bytes,
                                      tokens=SPEC.block_tokens, tenant=tenant, request=RequestId(request)))
            parent = key
        return blocks


def block_events(message: object) -> int:
    """How many blocks it tells of."""
    match message:
        case Stored():
            return len(message.blocks)
        case Evicted():
            return len(message.keys) // 32
        case _:
            return 0
