"""The numbered log of what a worker stored and evicted, and answers to "what did I miss?".

Pure. The log hands out numbers when something happens, not when it is sent: if the bus loses a batch, its number is
missing for everybody, and whoever notices asks. The last ``kept`` batches are at hand; older questions get the whole
state, cut into pages that are all of one moment. Who only wants to know whether it knows everything asks for the
digest, and then for the buckets that differ (:mod:`shared.store.digest`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId, fresh
from shared.kv import Tier, pack_keys
from shared.messages import (
    DigestQuery,
    DigestReply,
    Evicted,
    KvEvent,
    Since,
    SnapshotPage,
    Stored,
    StoredBlock,
    SyncEvents,
    SyncReply,
)
from shared.store.digest import BUCKETS, Inventory

PAGE_BLOCKS = 2_048
"""Blocks of a page: about 0.4 MB on the wire, 2 MB if all names in it are as long as names may be. Who takes it in does
nothing else meanwhile, for some milliseconds."""
EVENT_BYTES = 2 << 20
"""Bytes of the batches of one answer, about; well under the bus's limit. More than a page's, since what is asked
instead is the whole state."""
_BLOCK_BYTES = 128
"""Bytes of a block on the wire, but for its names, about."""

_SNAPSHOT_KEPT_S = 60.0


class Gone(NamedTuple):
    """One evicted block, to be announced."""

    key: BlockKey
    reason: str
    tier: Tier


@dataclass
class _Snapshot:
    """The whole state, or what some buckets held, at one moment."""

    taken_s: float
    seq: int
    blocks: Sequence[StoredBlock]
    is_whole: bool
    readers: int = 1
    """Who began to read it and has not had its last page."""


class EventLog:
    """One per (worker, incarnation). ``state`` returns what is stored now, each block after its parent; times are
    monotonic seconds.

    Without ``digests`` the inventory they are made of is not kept up to date but begun when one is asked for: for
    logs that nobody compares, like the simulator's.
    """

    def __init__(self, worker: WorkerId, incarnation: Incarnation, spec: SpecDigest,
                 state: Callable[[], Iterable[StoredBlock]], *, kept: int = 4_096, digests: bool = True) -> None:
        self._worker, self._incarnation, self._spec, self._state = worker, incarnation, spec, state
        self._kept: deque[KvEvent] = deque(maxlen=kept)
        self._snapshots: dict[str, _Snapshot] = {}
        self._inventory = Inventory() if digests else None
        """What the batches numbered so far add up to."""
        self.seq = 0
        """Number of the last batch."""

    def stored(self, blocks: Sequence[StoredBlock], *, at_s: float) -> Stored:
        """Numbers a batch of newly stored blocks; ``at_s`` is Unix seconds."""
        self.seq += 1
        if self._inventory is not None:
            self._inventory.store(blocks)
        event = Stored(worker=self._worker, incarnation=self._incarnation, seq=self.seq, spec=self._spec, at_s=at_s,
                       blocks=list(blocks))
        self._kept.append(event)
        return event

    def evicted(self, keys: Sequence[BlockKey], *, at_s: float, reason: str, tier: Tier = Tier.DRAM) -> Evicted:
        """Numbers a batch of evicted keys."""
        self.seq += 1
        if self._inventory is not None:
            self._inventory.evict(keys, tier)
        event = Evicted(worker=self._worker, incarnation=self._incarnation, seq=self.seq, at_s=at_s,
                        keys=pack_keys(keys), tier=tier, reason=reason)
        self._kept.append(event)
        return event

    def number(self, news: Iterable[StoredBlock | Gone], *, at_s: float) -> Iterator[KvEvent]:
        """``news``, which are in order, in as few batches as the bus carries: see :func:`_gathered`."""
        for kind, keys, blocks in _gathered(news):
            for first in range(0, len(keys), PAGE_BLOCKS):
                yield self.evicted(keys[first:first + PAGE_BLOCKS], at_s=at_s, reason=kind[0], tier=kind[1])
            for first in range(0, len(blocks), PAGE_BLOCKS):
                yield self.stored(blocks[first:first + PAGE_BLOCKS], at_s=at_s)

    def since(self, asked: Since, *, now: float) -> SyncReply:
        """Everything after ``asked.seq`` when it is at hand, else a page of the whole state."""
        if not asked.snapshot and asked.incarnation == self._incarnation and self._covers(asked.seq):
            missing = [event for event in self._kept if event.seq > asked.seq]
            if _fit(missing, EVENT_BYTES):
                return SyncEvents(worker=self._worker, incarnation=self._incarnation, events=missing)
        return self._page(asked, self._whole, now=now)

    def digest(self, asked: DigestQuery, *, now: float) -> DigestReply | SnapshotPage:
        """The digest of what is stored, or a page of what the asked buckets hold.

        The asker must see by the incarnation in the answer whether it is of the life it means.
        """
        inventory = self._inventory
        if inventory is None:
            inventory = self._inventory = Inventory()
            inventory.store(self._state())
        if not asked.buckets and not asked.snapshot:
            return DigestReply(worker=self._worker, incarnation=self._incarnation, seq=self.seq, spec=self._spec,
                               tiers=inventory.digest.pack())
        buckets = {bucket for bucket in asked.buckets if 0 <= bucket < BUCKETS}
        return self._page(asked, lambda now: self._taken(inventory.blocks(buckets), now), now=now)

    def _covers(self, seq: int) -> bool:
        return seq == self.seq or (bool(self._kept) and self._kept[0].seq <= seq + 1 <= self.seq)

    def _whole(self, now: float) -> str:
        """The name of a snapshot of everything as it is now: many ask at once after a bus came back."""
        for name, snapshot in self._snapshots.items():
            if snapshot.is_whole and snapshot.seq == self.seq:
                snapshot.readers += 1
                return name
        return self._taken(self._state(), now, is_whole=True)

    def _taken(self, blocks: Iterable[StoredBlock], now: float, *, is_whole: bool = False) -> str:
        name = fresh("snapshot")
        self._snapshots[name] = _Snapshot(now, self.seq, list(blocks), is_whole)
        return name

    def _page(self, asked: Since | DigestQuery, take: Callable[[float], str], *, now: float) -> SnapshotPage:
        for old in [n for n, taken in self._snapshots.items() if now - taken.taken_s > _SNAPSHOT_KEPT_S]:
            del self._snapshots[old]
        name, page = asked.snapshot, asked.page
        if name not in self._snapshots:  # a new reader, or one that was away for too long: start over
            name, page = take(now), 0
        snapshot = self._snapshots[name]
        pages = max(1, -(-len(snapshot.blocks) // PAGE_BLOCKS))
        page = min(page, pages - 1)
        if page == pages - 1:
            snapshot.readers -= 1
            if not snapshot.readers:
                del self._snapshots[name]
        return SnapshotPage(
            worker=self._worker, incarnation=self._incarnation, seq=snapshot.seq, spec=self._spec, snapshot=name,
            page=page, pages=pages, blocks=list(snapshot.blocks[page * PAGE_BLOCKS:(page + 1) * PAGE_BLOCKS]),
        )


def _gathered(
    news: Iterable[StoredBlock | Gone],
) -> Iterator[tuple[tuple[str, Tier], list[BlockKey], list[StoredBlock]]]:
    """Evictions of one kind (reason, tier) and, to be told after them, what was stored.

    A full pool evicts a block for each that it stores, so in the order in which things happened every batch would be of
    one block. Only the order of what concerns one block matters, and that of evictions and of stores each among
    themselves, since a chain is stored from its start and evicted from its end: those are kept.
    """
    kind, keys, blocks, told = ("", Tier.DRAM), list[BlockKey](), list[StoredBlock](), set[BlockKey]()
    for item in news:
        its_kind = (item.reason, item.tier) if isinstance(item, Gone) else kind
        if item.key in told or (keys and its_kind != kind):
            yield kind, keys, blocks
            keys, blocks, told = [], [], set()
        told.add(item.key)
        if isinstance(item, Gone):
            kind = its_kind
            keys.append(item.key)
        else:
            blocks.append(item)
    yield kind, keys, blocks


def _fit(events: Iterable[KvEvent], nbytes: int) -> bool:
    """Whether they take no more than so many bytes on the wire, about."""
    for event in events:
        nbytes -= _BLOCK_BYTES
        if isinstance(event, Evicted):
            nbytes -= len(event.keys)
        else:
            for block in event.blocks:
                nbytes -= _BLOCK_BYTES + len(block.tenant) + len(block.request) + len(block.source)
                if nbytes < 0:
                    break
        if nbytes < 0:
            return False
    return True
