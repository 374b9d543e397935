"""The store-manager as a machine: it decides what is fetched, written and acknowledged, and when owners are asked.

Theory of operation
-------------------

**Feed.** Messages are known by their position in the stream. A position is *held* from ``Fetched`` until its write
is durable, then it is acknowledged; nothing is acknowledged before. Held rows are bounded: when Postgres is slow or
away the machine stops fetching, and the stream keeps the rest. Whatever is lost on the way, with us or with the
acknowledgement, comes again, and the catalog takes repetition in any order.

::

    stream ──Fetch──► waiting ──Write──► writing ──Written──► Ack
                         ▲                  │ cannot be written now: the same batch again, after a pause
                         └── first in line ─┤ will never be taken: its halves; a single one is discarded
                                            ▼

Splitting finds the one message that Postgres refuses among a thousand good ones, so that it cannot stop the feed.

**Workers.** ``Membership`` says who is alive; while the bus is away, nobody's silence counts. States of lives in the
catalog are *levels*, not edges: ``Mark`` carries everybody who is heard, so a lost or failed one is repaired by the
next.

**Inventories.** A worker's copies are compared with what it says it holds: soon after it joins or is heard again,
soon after its news showed a hole, and every ``reconcile_s``. One worker at a time, and not while Postgres is away.

**Who does what.** The feed is shared: every store-manager takes its part of it, and whoever finds a hole in a worker's
news compares that worker. What would only be done twice follows the lease (``Led``): the regular comparisons, marking
lives, and the catalog's upkeep.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.store_manager.core import effects as do
from services.store_manager.core.events import (
    Deaf,
    Draining,
    Entry,
    Fetched,
    FetchFailed,
    Led,
    Life,
    Maintained,
    MaintainFailed,
    Marked,
    MarkFailed,
    Reconciled,
    ReconcileFailed,
    Reconnected,
    Started,
    Unled,
    WriteFailed,
    Written,
)
from shared.errors import Bug
from shared.ids import Incarnation, WorkerId
from shared.machine import Effect, Woke
from shared.membership import Change, Changed, Conflict, Joined, Membership, Unknown
from shared.messages import Bye, Hello, Load

Event = (
    Started | Deaf | Reconnected | Draining | Fetched | FetchFailed | Written | WriteFailed | Reconciled
    | ReconcileFailed | Marked | MarkFailed | Maintained | MaintainFailed | Led | Unled | Hello | Load | Bye | Woke
)

ROLL_PAUSE_S = 1.0
"""Least pause between two rollcalls."""


@dataclass(frozen=True)
class Policy:
    """Numbers the machine goes by."""

    fetch_messages: int = 512
    """Most messages of one fetch."""
    batch_rows: int = 4_096
    """A batch is closed once it has this many rows."""
    held_rows: int = 65_536
    """No fetching while this many rows are held."""
    retry_first_s: float = 0.2
    """First pause after a failure; doubles with each."""
    retry_limit_s: float = 5.0
    """Longest pause."""
    reconcile_s: float = 120.0
    """Pause between two comparisons with the same worker."""
    join_delay_s: float = 2.0
    """From a worker's joining to the comparison: lets its first news arrive by the feed."""
    gap_delay_s: float = 3.0
    """From a hole in a worker's news to the comparison: most holes are news still under way."""
    suspect_after_s: float = 2.0
    dead_after_s: float = 8.0
    maintain_s: float = 60.0
    """Pause between two rounds of the catalog's upkeep."""


@dataclass
class StoreManager:
    """See the module. ``handle`` is the only door."""

    policy: Policy
    _waiting: deque[Entry] = field(default_factory=deque)
    #: batches to write before anything that waits: failed ones and their halves
    _again: deque[tuple[Entry, ...]] = field(default_factory=deque)
    _writing: tuple[Entry, ...] = ()
    #: positions in ``_waiting``, ``_again`` and ``_writing``, each in exactly one of them
    _held: set[int] = field(default_factory=set)
    _held_rows: int = 0
    _fetching: bool = False
    _fetch_failures: int = 0
    _fetch_at_s: float = 0.0
    _write_failures: int = 0
    _write_at_s: float = 0.0
    _reachable: bool = True
    _draining: bool = False
    _drained: bool = False
    _term: int = 0
    _led_until_s: float = float("-inf")
    _led: bool = False
    """We led when last looked."""
    _started_s: float = float("inf")
    _maintaining: bool = False
    _maintain_at_s: float = float("-inf")
    #: {worker: when its inventory is to be compared}; only workers that are not dead, all of them while we lead
    _due_s: dict[WorkerId, float] = field(default_factory=dict)
    _reconciling: Life | None = None
    #: {life: why it is dead}, until the worker lives again or is forgotten
    _dead: dict[Life, str] = field(default_factory=dict)
    _marking: bool = False
    _mark_wanted: bool = False
    _mark_not_before_s: float = float("inf")
    _mark_again_s: float = float("inf")
    _mark_failures: int = 0
    _rolled_s: float = float("-inf")
    _tick_at_s: float = 0.0
    _now_s: float = 0.0
    _membership: Membership = field(init=False)

    def __post_init__(self) -> None:
        self._membership = Membership(self.policy.suspect_after_s, self.policy.dead_after_s)

    def handle(self, event: Event, *, now: float) -> Sequence[Effect]:
        """Applies ``event``; see the module."""
        out: list[Effect] = []
        match event:
            case Started():
                self._started_s = now
                self._call_roll(out, now)
            case Led():
                self._lead(event, now)
            case Unled():
                self._led_until_s = float("-inf")
            case Deaf():
                self._membership.deaf(now=now)
            case Reconnected():
                self._membership.deaf(now=now)
                self._call_roll(out, now)
            case Draining():
                self._draining = True
            case Fetched():
                self._fetched(event)
            case FetchFailed():
                self._fetching = False
                self._fetch_at_s = now + self._pause_s(self._fetch_failures)
                self._fetch_failures += 1
            case Written():
                self._written(event, out, now)
            case WriteFailed():
                self._write_failed(event, out, now)
            case Reconciled():
                self._end_comparison(now + self.policy.reconcile_s if self.leads(now) else None)
            case ReconcileFailed():
                life = self._end_comparison(now + self.policy.retry_limit_s)
                if event.gone:
                    self._follow(self._membership.gone(WorkerId(life[0]), Incarnation(life[1])), out, now)
            case Marked():
                self._marking, self._mark_failures = False, 0
                self._became(True, "", out)
            case MarkFailed():
                self._marking, self._mark_wanted = False, True
                self._mark_not_before_s = now + self._pause_s(self._mark_failures)
                self._mark_failures += 1
                self._became(False, event.why, out)
            case Maintained() | MaintainFailed():
                self._maintaining = False
                if isinstance(event, Maintained) and event.more:
                    self._maintain_at_s = now + self.policy.retry_limit_s  # soon, and the feed has Postgres meanwhile
                self._became(isinstance(event, Maintained), getattr(event, "why", ""), out)
            case Hello():
                self._follow(self._membership.hello(event, now=now), out, now)
            case Load():
                self._follow(self._membership.load(event, now=now), out, now)
            case Bye():
                self._follow(self._membership.bye(event), out, now)
            case Woke():
                pass  # what is due shows below
            case _:
                raise Bug(f"the store-manager knows no event {event!r}")
        self._now_s = now
        if self._led and not self.leads(now):  # what is due is the next leader's
            self._due_s = {worker: at_s for worker, at_s in self._due_s.items() if math.isinf(at_s)}
        self._led = self.leads(now)
        if now >= self._tick_at_s:
            self._follow(self._membership.tick(now=now), out, now)
            self._tick_at_s = self._membership.next_wake(now=now)
        self._fetch(out, now)
        self._write(out, now)
        self._reconcile(out, now)
        self._mark(out, now)
        self._maintain(out, now)
        self._drain(out)
        return out

    def next_wake(self) -> float | None:
        """The next tick of membership, retry, comparison or marking."""
        times = [self._tick_at_s]
        if not self._fetching:
            times.append(self._fetch_at_s)
        if not self._writing:
            times.append(self._write_at_s)
        if self._reconciling is None and self._reachable:
            times.extend(self._due_s.values())
        if self.leads(self._now_s):
            times.append(self._led_until_s)
            if not self._maintaining and self._reachable:
                times.append(self._maintain_at_s)
        if not self._marking and self.leads(self._now_s):
            times.append(max(self._mark_not_before_s, 0.0 if self._mark_wanted else self._mark_again_s))
        return min((at_s for at_s in times if at_s > self._now_s), default=None)

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when a position is held nowhere or twice, or a dead worker would be asked."""
        places = [entry for batch in (*self._again, self._writing) for entry in batch]
        places.extend(self._waiting)
        positions = [entry.seq for entry in places]
        if len(positions) != len(set(positions)) or set(positions) != self._held:
            raise Bug(f"held {sorted(self._held)} but kept {sorted(positions)}")
        if self._held_rows != sum(entry.rows for entry in places):
            raise Bug(f"{self._held_rows} rows counted, {sum(entry.rows for entry in places)} held")
        strangers = [worker for worker in self._due_s if self._membership.get(worker) is None]
        if strangers:
            raise Bug(f"inventories of dead workers are due: {strangers}")

    # The lease.

    def leads(self, now: float) -> bool:
        """Whether what one does for all is ours to do."""
        return now < self._led_until_s

    def _lead(self, led: Led, now: float) -> None:
        began = not self.leads(now) or led.term != self._term
        self._term, self._led_until_s = led.term, led.until_s
        if not began:
            return
        # Nobody is taken for dead before everybody had the time to be heard.
        self._mark_wanted = True
        self._mark_not_before_s = max(now, self._started_s + self.policy.dead_after_s)
        self._maintain_at_s = now
        for worker, member in self._membership.members.items():
            if member.state != "dead":
                self._compare_soon(worker, now + self.policy.join_delay_s)

    def _maintain(self, out: list[Effect], now: float) -> None:
        if (self.leads(now) and not self._maintaining and self._reachable and not self._draining
                and now >= self._maintain_at_s):
            self._maintaining, self._maintain_at_s = True, now + self.policy.maintain_s
            out.append(do.Maintain())

    # Feed.

    def _fetched(self, event: Fetched) -> None:
        self._fetching, self._fetch_failures = False, 0
        for entry in event.entries:
            if entry.seq not in self._held:  # else it was delivered again while we hold it
                self._held.add(entry.seq)
                self._held_rows += entry.rows
                self._waiting.append(entry)

    def _written(self, event: Written, out: list[Effect], now: float) -> None:
        out.append(do.Ack(tuple(entry.seq for entry in self._writing)))
        self._release()
        self._write_failures = 0
        self._became(True, "", out)
        for worker, incarnation in event.gaps:
            self._compare_soon(WorkerId(worker), now + self.policy.gap_delay_s, incarnation)
        if event.workers:  # a life just entered may be over already
            self._mark_wanted = True

    def _write_failed(self, event: WriteFailed, out: list[Effect], now: float) -> None:
        batch = self._writing
        if not event.refused:
            self._again.appendleft(batch)
            self._writing = ()
            self._write_at_s = now + self._pause_s(self._write_failures)
            self._write_failures += 1
            self._became(False, event.why, out)
        elif len(batch) > 1:
            self._again.extendleft((batch[len(batch) // 2:], batch[:len(batch) // 2]))
            self._writing = ()
        else:
            out.append(do.Discard(batch[0].seq, event.why))
            self._release()

    def _release(self) -> None:
        for entry in self._writing:
            self._held.remove(entry.seq)
            self._held_rows -= entry.rows
        self._writing = ()

    def _fetch(self, out: list[Effect], now: float) -> None:
        if (not self._fetching and not self._draining and now >= self._fetch_at_s
                and self._held_rows < self.policy.held_rows):
            self._fetching = True
            out.append(do.Fetch(self.policy.fetch_messages))

    def _write(self, out: list[Effect], now: float) -> None:
        if self._writing or now < self._write_at_s:
            return
        if self._again:
            self._writing = self._again.popleft()
        else:
            batch, rows = [], 0
            while self._waiting and rows < self.policy.batch_rows:
                entry = self._waiting.popleft()
                batch.append(entry)
                rows += entry.rows
            self._writing = tuple(batch)
        if self._writing:
            out.append(do.Write(tuple(entry.seq for entry in self._writing)))

    def _drain(self, out: list[Effect]) -> None:
        idle = not self._writing and not self._fetching
        if self._draining and not self._drained and idle and not (self._held and self._reachable):
            self._drained = True
            out.append(do.Drained())

    def _became(self, reachable: bool, why: str, out: list[Effect]) -> None:
        if reachable != self._reachable:
            self._reachable = reachable
            out.append(do.Report(reachable, why))

    def _pause_s(self, failures: int) -> float:
        return min(self.policy.retry_limit_s, self.policy.retry_first_s * 2.0 ** min(failures, 30))

    # Workers.

    def _follow(self, changes: list[Change], out: list[Effect], now: float) -> None:
        for change in changes:
            match change:
                case Joined(hello):
                    self._due_s.pop(hello.worker, None)
                    if self.leads(now):
                        self._compare_soon(hello.worker, now + self.policy.join_delay_s)
                    self._mark_wanted = True
                case Changed(worker, incarnation, before, after, why):
                    life = (str(worker), str(incarnation))
                    if after == "dead":
                        self._due_s.pop(worker, None)
                        self._dead[life] = why
                        self._mark_wanted = True
                    elif before == "dead":
                        self._dead.pop(life, None)
                        if self.leads(now):
                            self._compare_soon(worker, now)
                        self._mark_wanted = True
                case Unknown():
                    self._call_roll(out, now)
                case Conflict():
                    pass  # a worker with a conflicting cache spec is the conductor's to refuse
                case _:
                    raise Bug(f"the store-manager knows no change {change!r}")

    def _call_roll(self, out: list[Effect], now: float) -> None:
        if now - self._rolled_s >= ROLL_PAUSE_S:
            self._rolled_s = now
            out.append(do.CallRoll())

    def _mark(self, out: list[Effect], now: float) -> None:
        if not self.leads(now):
            return
        if self._marking or now < self._mark_not_before_s or not (self._mark_wanted or now >= self._mark_again_s):
            return
        members = self._membership.members
        self._dead = {life: why for life, why in self._dead.items() if WorkerId(life[0]) in members}
        heard = tuple((str(worker), str(member.hello.incarnation)) for worker, member in sorted(members.items())
                      if member.state != "dead")
        self._marking, self._mark_wanted, self._mark_again_s = True, False, now + self.policy.reconcile_s
        out.append(do.Mark(heard, tuple(sorted(self._dead.items()))))

    # Inventories.

    def _compare_soon(self, worker: WorkerId, at_s: float, incarnation: str = "") -> None:
        member = self._membership.get(worker)
        if member is not None and incarnation in ("", member.hello.incarnation):
            self._due_s[worker] = min(at_s, self._due_s.get(worker, at_s))

    def _end_comparison(self, next_s: float | None) -> Life:
        """The comparison under way is over; the next one is at ``next_s``, or somebody else's."""
        assert self._reconciling is not None, "only one that was asked for comes back"
        life, self._reconciling = self._reconciling, None
        member = self._membership.get(WorkerId(life[0]))
        if member is not None and member.hello.incarnation == life[1]:  # else its next life has its own time
            if next_s is not None:
                self._compare_soon(member.hello.worker, next_s)
            elif math.isinf(self._due_s.get(member.hello.worker, 0.0)):
                del self._due_s[member.hello.worker]
        return life

    def _reconcile(self, out: list[Effect], now: float) -> None:
        if self._reconciling is not None or not self._reachable or self._draining or not self._due_s:
            return
        at_s, worker = min((at_s, worker) for worker, at_s in self._due_s.items())
        member = self._membership.get(worker)
        if at_s <= now and member is not None:
            self._reconciling = (str(worker), str(member.hello.incarnation))
            self._due_s[worker] = float("inf")  # until it is over, or something new asks for another
            out.append(do.Reconcile(self._reconciling))
