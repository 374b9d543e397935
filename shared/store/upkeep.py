"""What a store agent does for the store-manager: copy, trim, protect, retire, keep to quotas. Advice about memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from shared.bus.bus import Bus, Delivery, Subscription
from shared.bus.subjects import POOL, QUOTAS
from shared.ids import OperationId, RequestId, WorkerId, fresh
from shared.kv import Tier, unpack_keys
from shared.messages import (
    Protect,
    Protected,
    Quotas,
    Replicate,
    Replicated,
    Retire,
    Retired,
    StoredBlock,
    Trim,
    Trimmed,
)
from shared.store.parts import Part

if TYPE_CHECKING:
    from shared.store.agent import StoreAgent

log = logging.getLogger(__name__)

_COPIES = 2
"""Requests of the store-manager that are followed at a time: copying is background work."""
_PART_BLOCKS = 64
"""Blocks fetched at a time: slots are taken only for what is on its way."""


class Upkeep:
    """One per agent; its words come on the subjects POOL and QUOTAS."""

    def __init__(self, agent: StoreAgent, bus: Bus, worker: WorkerId) -> None:
        self._agent, self._bus, self._worker = agent, bus, worker

    async def listen(self) -> list[Subscription]:
        """Follows from now on, until the caller closes what this returns."""
        return [
            await self._bus.serve(POOL.at(worker=self._worker), self._on_pool, concurrency=_COPIES),
            await self._bus.subscribe(QUOTAS.at(worker=self._worker), self._on_quotas),
        ]

    async def _on_quotas(self, delivery: Delivery) -> None:
        quotas: Quotas = delivery.message
        self._agent.set_budgets({budget.tenant: budget.nbytes for budget in quotas.budgets})

    async def _on_pool(self, delivery: Delivery) -> Replicated | Trimmed | Protected | Retired:
        ask: Replicate | Trim | Protect | Retire = delivery.message
        match ask:
            case Replicate():
                return await self._replicate(ask)
            case Trim():
                return Trimmed(blocks=self._agent.trim(unpack_keys(ask.keys), ask.reason))
            case Protect():
                return Protected(blocks=self._agent.protect(unpack_keys(ask.keys), ask.ttl_s))
            case Retire():
                blocks = self._agent.retire(drop=ask.drop)
                log.info("action=retired dropped=%d why=%s", blocks, ask.why)
                return Retired(blocks=blocks)

    async def _replicate(self, ask: Replicate) -> Replicated:
        """Fetches what is missing, stretch after stretch, each as one chain."""
        agent, copied, why = self._agent, 0, ""
        until_s = agent.clock.monotonic() + ask.deadline_s
        for stretch in stretches([block for block in ask.blocks if not agent.holds(block.key)]):
            for first in range(0, len(stretch), _PART_BLOCKS):
                part = stretch[first:first + _PART_BLOCKS]
                left_s = until_s - agent.clock.monotonic()
                came, short = (0, "draining") if agent.is_retired else \
                    (0, "deadline") if left_s <= 0 else await self._copy(ask, part, left_s)
                copied += came
                why = why or short
                if came < len(part):
                    break
        held = sum(agent.holds(block.key) for block in ask.blocks)
        nbytes = copied * agent.block_bytes
        return Replicated(operation=ask.operation, blocks=held, copied=copied, nbytes=nbytes,
                          why=(why or "missing") if held < len(ask.blocks) else "")

    async def _copy(self, ask: Replicate, part: Sequence[StoredBlock], timeout_s: float) -> tuple[int, str]:
        """How many of ``part``, a stretch of a chain, arrived, and why not all."""
        agent, head = self._agent, part[0]
        operation = OperationId(f"{ask.operation}.{fresh('copy', 3)}")
        try:
            if head.depth and not await agent.pin_in_dram(operation, head.parent, timeout_s=timeout_s):
                return 0, "parent"
            slots = agent.allocate(operation, len(part), tenant=head.tenant)
            if slots is None:
                return 0, "capacity"
            blocks = [msgspec.structs.replace(block, tier=Tier.DRAM, origin="received", source=ask.source)
                      for block in part]
            fetched, _ = await agent.fetch(operation, RequestId(""), [Part(ask.source, blocks)], slots,
                                           timeout_s=timeout_s)
            return fetched[0].blocks, fetched[0].why
        finally:
            agent.release(operation)


def stretches(blocks: Sequence[StoredBlock]) -> list[list[StoredBlock]]:
    """``blocks`` cut where one does not continue the one before it."""
    found: list[list[StoredBlock]] = []
    for block in blocks:
        if found and found[-1][-1].key == block.parent:
            found[-1].append(block)
        else:
            found.append([block])
    return found
