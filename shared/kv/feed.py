"""Following the KV events of many workers: lossy, reordered streams in, exact sets out.

Theory of operation
-------------------

Each life (incarnation) of a worker numbers its batches from 1. Per worker the tracker keeps a *cursor*, the number
of the last batch it passed on, and the highest number it has *heard of* (from a batch or from a heartbeat).

* The next batch in line is passed on at once (:class:`Apply`); an old one is dropped; one of another life is dropped.
* A batch that comes early is held: ``stored`` and ``evicted`` travel on two subjects and may overtake each other.
  If the hole is still there after ``hold_s``, the owner is asked once (:class:`Ask`).
* While an answer is under way live batches are held too, up to ``max_held``; what does not fit is forgotten, but
  its number is not, so the hole shows and leads to another question.
* The answer is either the missing batches or a snapshot in pages; a snapshot replaces the worker's whole set
  (:class:`Reset`), the cursor becomes the snapshot's number, and held batches after it apply. A reader whose sets are
  too large to be replaced in one go takes each page as it comes (:class:`Gather`), and the last one ends with
  :class:`Swap` instead.
* A question that failed, or whose answer did not reach the number known when it was asked, is repeated after a
  growing pause: never a tight loop.

Every worker that joins is asked from 0, so a reader that starts late or again ends with the same set as one that
heard everything. Not imported by ``shared.kv`` itself: messages are built on that package, this module on messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from shared.ids import Incarnation, SpecDigest, WorkerId
from shared.messages import KvEvent, Since, SnapshotPage, StoredBlock, SyncEvents, SyncReply


@dataclass(frozen=True, slots=True)
class Apply:
    """Pass this batch on to the copy of the worker's set; batches of one life come in order, each once."""

    event: KvEvent


@dataclass(frozen=True, slots=True)
class Reset:
    """Replace all that is known of the worker by ``blocks``; without ``spec`` the set is just emptied."""

    worker: WorkerId
    incarnation: Incarnation
    spec: SpecDigest | None
    blocks: Sequence[StoredBlock]


@dataclass(frozen=True, slots=True)
class Gather:
    """One page of a snapshot, to be put aside: it shows nothing before :class:`Swap`."""

    worker: WorkerId
    incarnation: Incarnation
    spec: SpecDigest
    blocks: Sequence[StoredBlock]
    is_first: bool
    """What was put aside of the worker before is void: that snapshot was never completed."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Replace all that is known of the worker by what was put aside."""

    worker: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Ask:
    """Send ``since`` to the worker; then call ``synced`` with the reply, or ``sync_failed``."""

    worker: WorkerId
    since: Since
    why: Literal["joined", "gap", "retry", "page"]
    """Its first question; a hole that stayed; again after a failure; the next page of a snapshot."""


Action = Apply | Reset | Gather | Swap | Ask


@dataclass
class FeedStatistics:
    """Counters since the tracker was made."""

    applied: int = 0
    """Batches passed on."""
    dropped: int = 0
    """Batches thrown away: seen before, of another life, of an unknown worker, or over ``max_held``."""
    gaps: int = 0
    """Holes that outlived ``hold_s``."""
    syncs: int = 0
    """Questions asked, pages of a snapshot not counted."""
    failed_syncs: int = 0
    """Questions without an answer, or with one that did not help."""
    snapshots: int = 0
    """Whole sets replaced."""


@dataclass
class _Feed:
    """One life of one worker."""

    incarnation: Incarnation
    cursor: int = 0
    heard_of: int = 0
    #: {seq: batch}; all seqs are above ``cursor`` and not the next in line, unless a question is open
    held: dict[int, KvEvent] = field(default_factory=dict)
    #: the open question, and ``heard_of`` when it was asked
    asked: Since | None = None
    asked_at_heard: int = 0
    #: pages of the snapshot being collected
    snapshot: str = ""
    blocks: list[StoredBlock] = field(default_factory=list)
    failures: int = 0
    converged: bool = False


class FeedTracker:
    """Turns what is heard of KV events into actions on a copy. Pure; all times are the caller's monotonic seconds."""

    def __init__(self, *, hold_s: float = 0.1, max_held: int = 4096, retry_s: float = 0.2,
                 max_retry_s: float = 10.0, by_page: bool = False) -> None:
        """``by_page`` hands snapshots on page by page (:class:`Gather`, :class:`Swap`) instead of whole."""
        self._hold_s, self._max_held, self._by_page = hold_s, max_held, by_page
        self._retry_s, self._max_retry_s = retry_s, max_retry_s
        self._feeds: dict[WorkerId, _Feed] = {}
        #: {worker: when its hole gets old or its question is repeated}; never a worker with an open question
        self._due: dict[WorkerId, float] = {}
        self.statistics = FeedStatistics()

    def joined(self, worker: WorkerId, incarnation: Incarnation, now: float) -> list[Action]:
        """A worker is new, came back with a new life, or was thought dead: ask for all it has."""
        had = self._feeds.get(worker)
        feed = self._feeds[worker] = _Feed(incarnation)
        actions: list[Action] = [Reset(worker, incarnation, None, ())] if had is not None else []
        return [*actions, self._ask(worker, feed, "joined")]

    def left(self, worker: WorkerId) -> None:
        """A worker is gone; the caller drops its copy."""
        self._feeds.pop(worker, None)
        self._due.pop(worker, None)

    def offer(self, event: KvEvent, now: float) -> list[Action]:
        """A batch arrived."""
        feed = self._feeds.get(event.worker)
        if feed is None or feed.incarnation != event.incarnation or event.seq <= feed.cursor or event.seq in feed.held:
            self.statistics.dropped += 1
            return []
        feed.heard_of = max(feed.heard_of, event.seq)
        if len(feed.held) >= self._max_held and (feed.asked is not None or event.seq != feed.cursor + 1):
            self.statistics.dropped += 1
        else:
            feed.held[event.seq] = event
        if feed.asked is not None:
            return []
        actions = self._apply_held(feed)
        if actions and feed.failures == 0:
            self._due.pop(event.worker, None)  # the hole that was waited for is filled; another one is a new wait
        self._watch(event.worker, feed, now)
        return actions

    def heartbeat(self, worker: WorkerId, incarnation: Incarnation, kv_seq: int, now: float) -> list[Action]:
        """A worker told the number of its last batch; shows a loss after which nothing else came."""
        feed = self._feeds.get(worker)
        if feed is not None and feed.incarnation == incarnation and kv_seq > feed.heard_of:
            feed.heard_of = kv_seq
            if feed.asked is None:
                self._watch(worker, feed, now)
        return []

    def synced(self, worker: WorkerId, reply: SyncReply, now: float) -> list[Action]:
        """The owner answered. A reply nobody waits for any more, or from another life, changes nothing."""
        feed = self._feeds.get(worker)
        if feed is None or feed.asked is None or reply.incarnation != feed.incarnation:
            return []
        match reply:
            case SyncEvents():
                return self._caught_up(worker, feed, reply, now)
            case SnapshotPage():
                return self._page(worker, feed, reply, now)

    def sync_failed(self, worker: WorkerId, now: float, incarnation: Incarnation | None = None) -> list[Action]:
        """No answer came; asks again later. ``incarnation`` is the asked one: of another life it does not matter."""
        feed = self._feeds.get(worker)
        if feed is not None and feed.asked is not None and incarnation in (None, feed.incarnation):
            self._retry_later(worker, feed, now)
        return []

    def tick(self, now: float) -> list[Action]:
        """Time has passed: holes may have got old, questions may be due again."""
        actions: list[Action] = []
        for worker in [worker for worker, due_s in self._due.items() if due_s <= now]:
            feed = self._feeds[worker]
            gap = feed.failures == 0
            self.statistics.gaps += gap
            actions.append(self._ask(worker, feed, "gap" if gap else "retry"))
        return actions

    def next_wake(self) -> float | None:
        """When to call :meth:`tick`; ``None`` when nothing is due."""
        return min(self._due.values(), default=None)

    def is_converged(self, worker: WorkerId) -> bool:
        """Whether the worker's first question has been answered: the copy is a true one, if an old one."""
        feed = self._feeds.get(worker)
        return feed is not None and feed.converged

    def _ask(self, worker: WorkerId, feed: _Feed, why: Literal["joined", "gap", "retry"]) -> Ask:
        self._due.pop(worker, None)
        feed.snapshot, feed.blocks = "", []
        feed.asked = Since(incarnation=feed.incarnation, seq=feed.cursor)
        feed.asked_at_heard = feed.heard_of
        self.statistics.syncs += 1
        return Ask(worker, feed.asked, why)

    def _caught_up(self, worker: WorkerId, feed: _Feed, reply: SyncEvents, now: float) -> list[Action]:
        actions: list[Action] = []
        for event in reply.events:
            if event.seq == feed.cursor + 1:
                feed.cursor = event.seq
                self.statistics.applied += 1
                actions.append(Apply(event))
                continue
            feed.asked_at_heard = max(feed.asked_at_heard, event.seq)  # a hole in the answer: it did not help
        self._answered(worker, feed, now, actions)
        return actions

    def _page(self, worker: WorkerId, feed: _Feed, reply: SnapshotPage, now: float) -> list[Action]:
        assert feed.asked is not None
        if reply.page != feed.asked.page or (reply.page > 0 and reply.snapshot != feed.snapshot):
            self._retry_later(worker, feed, now)  # the owner has made another snapshot: collect that from its start
            return []
        feed.snapshot = reply.snapshot
        actions: list[Action] = []
        if self._by_page:
            actions.append(Gather(worker, feed.incarnation, reply.spec, reply.blocks, reply.page == 0))
        else:
            feed.blocks.extend(reply.blocks)
        if reply.page + 1 < reply.pages:
            feed.asked = Since(
                incarnation=feed.incarnation, seq=feed.cursor, snapshot=reply.snapshot, page=reply.page + 1)
            return [*actions, Ask(worker, feed.asked, "page")]
        actions.append(Swap(worker, feed.incarnation) if self._by_page
                       else Reset(worker, feed.incarnation, reply.spec, feed.blocks))
        feed.cursor = reply.seq
        feed.snapshot, feed.blocks = "", []
        self.statistics.snapshots += 1
        self._answered(worker, feed, now, actions)
        return actions

    def _answered(self, worker: WorkerId, feed: _Feed, now: float, actions: list[Action]) -> None:
        """A question is over: held batches follow, and a hole that stayed is looked at."""
        actions.extend(self._apply_held(feed))
        if feed.cursor < feed.asked_at_heard:
            self._retry_later(worker, feed, now)
            return
        feed.asked, feed.failures, feed.converged = None, 0, True
        feed.heard_of = max(feed.heard_of, feed.cursor)
        self._watch(worker, feed, now)

    def _apply_held(self, feed: _Feed) -> list[Action]:
        actions: list[Action] = []
        while (event := feed.held.pop(feed.cursor + 1, None)) is not None:
            feed.cursor = event.seq
            self.statistics.applied += 1
            actions.append(Apply(event))
        if feed.held and min(feed.held) <= feed.cursor:
            feed.held = {seq: event for seq, event in feed.held.items() if seq > feed.cursor}
        return actions

    def _watch(self, worker: WorkerId, feed: _Feed, now: float) -> None:
        """Starts or stops waiting for what is missing."""
        if feed.converged and feed.cursor >= feed.heard_of:
            feed.failures = 0
            self._due.pop(worker, None)
        else:
            self._due.setdefault(worker, now + self._hold_s)

    def _retry_later(self, worker: WorkerId, feed: _Feed, now: float) -> None:
        feed.asked, feed.snapshot, feed.blocks = None, "", []
        pause_s = min(self._retry_s * 2.0 ** min(feed.failures, 16), self._max_retry_s)
        feed.failures += 1
        self.statistics.failed_syncs += 1
        self._due[worker] = now + pause_s
