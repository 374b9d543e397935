"""Asking a worker what it holds."""

from __future__ import annotations

from collections.abc import Sequence

from shared.bus.bus import Bus
from shared.bus.subjects import KV_SYNC
from shared.catalog.repository import Inventory
from shared.errors import BusError
from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.kv import Tier, unpack_keys
from shared.messages import KvEvent, Since, SnapshotPage, Stored, StoredBlock, SyncEvents

NOTHING_SEEN = -1
"""Asks for the whole state: no batch has this number, so an owner cannot answer with what came after it."""
RESTARTS = 3
"""An owner may forget a snapshot between two pages and begin another; after so many we give up for now."""


class InventoryFailed(BusError):
    """The worker did not tell what it holds."""


async def ask_inventory(bus: Bus, worker: WorkerId, incarnation: Incarnation, *, timeout_s: float) -> Inventory:
    """All that ``worker`` holds, of one moment; ``timeout_s`` is for each page.

    Raises ``BusError``: ``NoResponders`` when nobody answers for the worker, :class:`InventoryFailed` when what
    answers is another life of it or does not get to an end.
    """
    address = KV_SYNC.at(worker=worker)
    pages: list[SnapshotPage] = []
    for _ in range(RESTARTS):
        pages.clear()
        while True:
            ask = Since(incarnation=incarnation, seq=NOTHING_SEEN,
                        snapshot=pages[0].snapshot if pages else "", page=len(pages))
            reply = await bus.request(address, ask, timeout_s=timeout_s)
            if reply.incarnation != incarnation:
                raise InventoryFailed(f"{worker} lives again as {reply.incarnation}, asked was {incarnation}")
            if isinstance(reply, SyncEvents):
                return replay(worker, incarnation, reply.events)
            if reply.page != len(pages) or (pages and reply.snapshot != pages[0].snapshot):
                break
            pages.append(reply)
            if len(pages) == reply.pages:
                blocks = tuple(block for page in pages for block in page.blocks)
                return Inventory(worker, incarnation, reply.seq, reply.spec, blocks)
    raise InventoryFailed(f"{worker} began another snapshot {RESTARTS} times before the last page")


def replay(worker: WorkerId, incarnation: Incarnation, events: Sequence[KvEvent]) -> Inventory:
    """What is left after ``events``, which must be a life's whole history."""
    held: dict[tuple[BlockKey, Tier], StoredBlock] = {}
    spec = SpecDigest("")
    for number, event in enumerate(sorted(events, key=lambda event: event.seq), start=1):
        if event.seq != number:
            raise InventoryFailed(f"{worker} told its history without number {number}")
        if isinstance(event, Stored):
            spec = event.spec
            held.update({(block.key, block.tier): block for block in event.blocks})
        else:
            for key in unpack_keys(event.keys):
                held.pop((key, event.tier), None)
    return Inventory(worker, incarnation, len(events), spec, tuple(held.values()))
