"""Store agents without an engine, on a real bus: workers as others see them, for blocks of ``tests.support.blocks``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shared.bus.bus import Delivery
from shared.bus.nats import NatsBus
from shared.bus.subjects import KV_EVICTED, KV_STORED
from shared.clock import SystemClock
from shared.ids import BlockKey, Incarnation, OperationId, RequestId, WorkerId, fresh
from shared.kv import CacheSpec, Tier, unpack_keys
from shared.messages import Endpoint, Evicted, KvEvent, StoredBlock
from shared.store.agent import StoreAgent
from shared.store.parts import Fetched, Part
from shared.store.ssd.files import Files
from shared.transfer import TransferEngine
from shared.worker.runtime import SEGMENT, open_agent
from shared.worker.settings import StoreSettings
from tests.support.blocks import SPEC, payload


@dataclass
class Holder:
    """An agent, and what is needed to use it as a worker's shell would."""

    id: WorkerId
    incarnation: Incarnation
    bus: NatsBus
    spec: CacheSpec
    endpoint: Endpoint
    agent: StoreAgent = field(init=False)
    #: {(key, tier) announced as stored and not as evicted}, as whoever listens from the start knows it
    announced: set[tuple[BlockKey, Tier]] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    """Of every eviction that was announced."""
    _early: dict[int, KvEvent] = field(default_factory=dict)
    _seq: int = 0

    def put(self, blocks: Sequence[StoredBlock]) -> None:
        """Stores the blocks as if they had been computed."""
        operation = OperationId(fresh("put", 4))
        slots = self.agent.allocate(operation, len(blocks), tenant=blocks[0].tenant)
        assert slots is not None, "no room"
        for slot, block in zip(slots, blocks, strict=True):
            self.agent.buffer(slot)[:] = payload(block.key, self.spec)
            self.agent.seal(operation, slot, block)
        self.agent.release(operation)

    def put_rest(self, blocks: Sequence[StoredBlock]) -> None:
        """Stores what is not in memory of the blocks, as a request does that reuses the others."""
        operation = OperationId(fresh("put", 4))
        cached = len(self.agent.pin(operation, [block.key for block in blocks]))
        slots = self.agent.allocate(operation, len(blocks) - cached, tenant=blocks[0].tenant) or []
        for slot, block in zip(slots, blocks[cached:], strict=False):
            self.agent.buffer(slot)[:] = payload(block.key, self.spec)
            self.agent.seal(operation, slot, block)
        self.agent.release(operation)

    def right(self, keys: Sequence[BlockKey]) -> bool:
        """Do the blocks in memory have the bytes that they should?"""
        return all(self.agent.buffer(self.agent.pool.slot(key)) == payload(key, self.spec) for key in keys)

    async def recall(self, blocks: Sequence[StoredBlock], *, timeout_s: float = 5.0) -> int:
        """How many leading blocks a request here could reuse."""
        operation, keys = OperationId(fresh("recall", 4)), [block.key for block in blocks]
        cached = len(self.agent.pin(operation, keys))
        slots = self.agent.allocate(operation, len(keys) - cached)
        assert slots is not None, "no room"
        came, _ = await self.agent.promote(operation, keys[cached:], slots, timeout_s=timeout_s)
        assert self.right(keys[:cached + came])
        self.agent.release(operation)
        return cached + came

    async def fetch(self, owner: WorkerId, blocks: Sequence[StoredBlock], *, timeout_s: float = 5.0) -> Fetched:
        """Asks ``owner`` for the blocks."""
        operation = OperationId(fresh("fetch", 4))
        slots = self.agent.allocate(operation, len(blocks))
        assert slots is not None, "no room"
        (fetched,), _ = await self.agent.fetch(operation, RequestId("r"), [Part(owner, blocks)], slots,
                                               timeout_s=timeout_s)
        assert self.right([block.key for block in blocks[:fetched.blocks]])
        self.agent.release(operation)
        return fetched

    @property
    def held(self) -> set[tuple[BlockKey, Tier]]:
        """What it holds, by its own word."""
        return {(block.key, block.tier) for block in self.agent.blocks()}

    async def on_news(self, delivery: Delivery) -> None:
        """The two kinds of news may overtake each other."""
        self._early[delivery.message.seq] = delivery.message
        while (event := self._early.pop(self._seq + 1, None)) is not None:
            self._seq += 1
            self._apply(event)

    def _apply(self, event: KvEvent) -> None:
        if isinstance(event, Evicted):
            self.reasons.append(event.reason)
            self.announced.difference_update((key, event.tier) for key in unpack_keys(event.keys))
            return
        for block in event.blocks:
            parent = block.depth == 0 or any((block.parent, tier) in self.announced for tier in Tier)
            assert parent, "a block is told before its parent"
            self.announced.add((block.key, block.tier))


@asynccontextmanager
async def open_holder(nats_url: str, worker: str, *, blocks: int = 32, spec: CacheSpec = SPEC,
                      files: Files | None = None, **settings: Any) -> AsyncIterator[Holder]:
    """A fresh life of ``worker`` with room for so many blocks."""
    values = StoreSettings(nats_url=nats_url, worker_id=worker, **settings)
    name, incarnation, clock = WorkerId(worker), Incarnation(fresh()), SystemClock()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(NatsBus.connect(nats_url, name=worker))
        transfer = await stack.enter_async_context(TransferEngine.open(worker=name, incarnation=incarnation))
        segment = transfer.register(SEGMENT, blocks * spec.block_bytes)
        holder = Holder(name, incarnation, bus, spec, transfer.endpoint)
        listening = [await bus.subscribe(subject.at(worker=name), holder.on_news)
                     for subject in (KV_STORED, KV_EVICTED)]
        agent = holder.agent = await stack.enter_async_context(open_agent(
            values, worker=name, incarnation=incarnation, spec=spec, num_blocks=blocks, segment=segment,
            transfer=transfer, bus=bus, clock=clock, files=files))
        try:
            yield holder
            agent.pool.check_invariants()
            if agent.ssd is not None:
                agent.ssd.pool.check_invariants()
        finally:
            for subscription in listening:
                await subscription.close()
