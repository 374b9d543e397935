"""What stands behind a door: the worker's pool, its memory, and who it is. All parts of the door work on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from shared.clock import Clock
from shared.ids import BlockKey, HostId, Incarnation, OperationId, WorkerId
from shared.kv import CacheSpec
from shared.messages import StoredBlock
from shared.store import door_frames as frames
from shared.store.agent import StoreAgent
from shared.telemetry import metrics
from shared.transfer import Segment, TransferSettings

if TYPE_CHECKING:
    from shared.store.door_visit import Visit


@dataclass(frozen=True)
class Keep:
    """``segment`` holds block i of ``agent``'s pool at ``i * block_bytes``; the pool has ``num_blocks``."""

    agent: StoreAgent
    spec: CacheSpec
    segment: Segment
    num_blocks: int
    worker: WorkerId
    incarnation: Incarnation
    host: HostId
    clock: Clock
    settings: TransferSettings
    inline_bytes: int
    """Puts of up to so many bytes are copied by the event loop."""
    all_tenants: bool
    """Clients see every tenant's values, not only those of their own."""
    _numbers: count[int] = field(default_factory=lambda: count(1))

    @property
    def block_bytes(self) -> int:
        """Bytes of every value."""
        return self.agent.block_bytes

    def bytes_of(self, slot: int) -> Any:
        """uint8[block_bytes] of our memory."""
        nbytes = self.agent.block_bytes
        return self.segment.array[slot * nbytes:(slot + 1) * nbytes]

    def seen(self, key: BlockKey, tenant: str) -> StoredBlock | None:
        """The block in memory, or else on the SSD, if it is there for a client that acts for ``tenant``."""
        block, ssd = self.agent.pool.block(key), self.agent.ssd
        if block is None and ssd is not None and ssd.holds(key):
            block = ssd.pool.block(key)
        return block if block is None or self.all_tenants or block.tenant == tenant else None

    def new_operation(self, visit: Visit) -> OperationId:
        """A name for something that a visit holds."""
        return OperationId(f"{visit.id}.{next(self._numbers)}")


def tally(kind: str, outcome: str) -> None:
    """Counts what was asked, and what came of it."""
    metrics.STORE_DOOR_REQUESTS.labels(kind=kind, outcome=outcome).inc()


def deny(kind: str, code: str, why: str) -> frames.Denied:
    """The answer that nothing was done, counted."""
    tally(kind, code)
    return frames.Denied(code, why)
