"""The receiver's books: what is granted, who is writing, what has arrived and been verified.

Every transport asks here before it lets a byte in, so the rules live once:

* A grant is checked against what *we* noted when we gave it; of the sender's copy only the token counts.
* Ranges of two live operations never overlap; within one operation writers may overlap.
* A range is covered when every byte of it was verified and nobody is writing into it.
* A writer that fails takes back what was covered where it wrote: the bytes may be torn. Who writes there at the same
  time is believed for its checksums alone.
* A shut operation lets no new writer in, so what is covered stays so; a revoked one is shut, and quiet once the last
  writer has ended.

Thread-safe; methods never block on anything but the lock.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from shared.clock import Clock
from shared.errors import Bug
from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Grant, Range
from shared.transfer.frames import MAX_NAME, Claim, Span
from shared.transfer.intervals import IntervalSet
from shared.transfer.segment import Segment

_canonical = msgspec.msgpack.Encoder()
ANYBODY = WorkerId("")
"""Peer of a grant that whoever holds it may use."""


class Refused(Exception):
    """A claim that does not stand; the text is for the sender."""


@dataclass(eq=False, slots=True)
class Writer:
    """One claim in progress. ``condemn`` is called, from any thread, when its deadline has passed."""

    operation: OperationId
    spans: Sequence[Span]
    path: str
    deadline_s: float
    condemn: Callable[[str], None]
    disturbed: bool = False
    """Another writer failed on our spans meanwhile: what we wrote and read there may be gone already."""


@dataclass(slots=True)
class _Granted:
    """One grant: ``{segment: bytes that may be written}`` until ``expires_s`` (monotonic)."""

    token: bytes
    expires_s: float
    ranges: dict[str, IntervalSet]
    peer: WorkerId


@dataclass(slots=True)
class _Entry:
    """One operation."""

    grants: list[_Granted] = field(default_factory=list)
    verified: dict[str, IntervalSet] = field(default_factory=dict)
    writers: set[Writer] = field(default_factory=set)
    shut: bool = False
    revoked: bool = False
    quiet: list[Callable[[], None]] = field(default_factory=list)
    """Called once the operation is revoked and its last writer has ended."""


class Ledger:
    """Books of one engine; ``segments`` is the engine's own map."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation, segments: Mapping[str, Segment], *,
                 clock: Clock) -> None:
        self.worker, self.incarnation = worker, incarnation
        self._segments = segments
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._entries: dict[OperationId, _Entry] = {}
        self._generation = 0
        #: {segment that goes away: who waits for its last writer}
        self._retired: dict[str, Callable[[], None]] = {}
        #: {segment: every byte granted to some operation}
        self._granted: dict[str, IntervalSet] = {}
        #: {path: bytes verified}
        self.received_bytes_by_path: Counter[str] = Counter()
        self.corrupt_spans = 0
        self.refused_claims = 0

    def grant(self, operation: OperationId, ranges: Sequence[Range], *, ttl_s: float,
              peer: WorkerId = ANYBODY) -> Grant:
        """Lets ``peer``, or whoever holds it, write ``ranges`` for ``ttl_s`` seconds.

        An operation may have several grants.

        Raises :class:`Bug` when a range is not of our memory or is still granted to another operation.
        """
        now, wall = self._clock.monotonic(), self._clock.wall()
        if len(operation) > MAX_NAME:
            raise Bug(f"operation id of {len(operation)} characters; at most {MAX_NAME} travel")
        for item in ranges:
            segment = self._segments.get(item.segment)
            if segment is None or item.offset < 0 or item.length < 0 or item.offset + item.length > segment.nbytes:
                raise Bug(f"grant for {operation} names bytes that are not ours: {item}")
        with self._lock:
            entry = self._entries.get(operation)
            if entry is not None and entry.shut:
                raise Bug(f"operation {operation} is being released; it cannot be granted anything")
            for item in ranges:
                self._check_exclusive(operation, item)
            if entry is None:
                entry = self._entries[operation] = _Entry()
            granted: dict[str, IntervalSet] = {}
            for item in ranges:
                stop = item.offset + item.length
                granted.setdefault(item.segment, IntervalSet()).add(item.offset, stop)
                self._granted.setdefault(item.segment, IntervalSet()).add(item.offset, stop)
            self._generation += 1
            grant = Grant(worker=self.worker, incarnation=self.incarnation, operation=operation, ranges=list(ranges),
                          expires_at_s=wall + ttl_s, token=b"", peer=peer, generation=self._generation)
            grant = msgspec.structs.replace(grant, token=self._sign(grant))
            entry.grants.append(_Granted(grant.token, now + ttl_s, granted, peer))
        return grant

    def begin(self, claim: Claim, *, path: str, sender: str, condemn: Callable[[str], None]) -> Writer:
        """Admits a writer, or raises :class:`Refused`; end it with ``verify`` or ``fail``."""
        now = self._clock.monotonic()
        operation = OperationId(claim.operation)
        with self._lock:
            try:
                entry = self._admit(claim, operation, sender, now)
            except Refused:
                self.refused_claims += 1
                raise
            writer = Writer(operation, claim.spans, path, now + claim.timeout_ms / 1e3, condemn)
            entry.writers.add(writer)
        return writer

    def verify(self, writer: Writer, checksums: Sequence[int]) -> list[int]:
        """Ends ``writer`` well: compares its spans with ``checksums``, books them, returns the indexes that differ.

        Without checksums none is right when the writer was disturbed: nobody can tell.
        """
        bad: list[int] = []
        while True:
            if checksums:
                writer.disturbed = False  # by what came before: the bytes are looked at after that
                bad = self._mismatches(writer.spans, checksums)
            with self._lock:
                if writer.disturbed:
                    if checksums:
                        continue
                    bad = list(range(len(writer.spans)))
                quiet = self._book(writer, bad) if bad or len(writer.spans) > 1 else self._book_one(writer)
            break
        for callback in quiet:
            callback()
        if self._retired:
            self._tell_retired()
        return bad

    def _book(self, writer: Writer, bad: Sequence[int]) -> list[Callable[[], None]]:
        """Under the lock."""
        entry = self._entries[writer.operation]
        good_bytes = 0
        for i, span in enumerate(writer.spans):
            verified = entry.verified.get(span.segment)
            if verified is None:
                verified = entry.verified[span.segment] = IntervalSet()
            change = verified.remove if i in bad else verified.add
            if span.count == 1:
                change(span.offset, span.offset + span.length)
            else:
                for start, stop in span.parts():
                    change(start, stop)
            good_bytes += 0 if i in bad else span.length * span.count
        self.received_bytes_by_path[writer.path] += good_bytes
        self.corrupt_spans += len(bad)
        return self._leave(entry, writer)

    def _book_one(self, writer: Writer) -> Sequence[Callable[[], None]]:
        """What :meth:`_book` does for a single span that is good, or none. Under the lock."""
        entry = self._entries[writer.operation]
        for span in writer.spans:
            verified = entry.verified.get(span.segment)
            if verified is None:
                verified = entry.verified[span.segment] = IntervalSet()
            if not verified.covers(span.offset, span.stop if span.count > 1 else span.offset + span.length):
                for start, stop in span.parts():
                    verified.add(start, stop)
            self.received_bytes_by_path[writer.path] += span.length * span.count
        entry.writers.discard(writer)
        return self._close_if_quiet(writer.operation, entry) if entry.revoked else ()

    def fail(self, writer: Writer) -> None:
        """Ends ``writer`` badly. Call it only once nothing can write for it any more."""
        with self._lock:
            entry = self._entries[writer.operation]
            for span in writer.spans:
                verified = entry.verified.get(span.segment)
                if verified is not None:
                    for start, stop in span.parts():
                        verified.remove(start, stop)
            for other in entry.writers:
                other.disturbed |= _overlap(other.spans, writer.spans)
            quiet = self._leave(entry, writer)
        for callback in quiet:
            callback()
        if self._retired:
            self._tell_retired()

    def shut(self, operation: OperationId) -> None:
        """Refuses the operation's writers from now on; what it has stays known until it is revoked."""
        with self._lock:
            entry = self._entries.get(operation)
            if entry is not None:
                entry.shut = True

    def revoke(self, operation: OperationId, on_quiet: Callable[[], None]) -> None:
        """Refuses the operation's writers from now on; calls ``on_quiet`` (from any thread) once none is left.

        An unknown operation is quiet already.
        """
        with self._lock:
            entry = self._entries.get(operation)
            if entry is not None:
                entry.shut = entry.revoked = True
                entry.quiet.append(on_quiet)
                quiet = self._close_if_quiet(operation, entry)
            else:
                quiet = [on_quiet]
        for callback in quiet:
            callback()

    def retire(self, segment: str, on_quiet: Callable[[], None]) -> None:
        """Takes back what was granted of ``segment``, condemns its writers, calls ``on_quiet`` once none is left."""
        with self._lock:
            self._retired[segment] = on_quiet
            self._granted.pop(segment, None)
            for entry in self._entries.values():
                for granted in entry.grants:
                    granted.ranges.pop(segment, None)
            writers = [writer for entry in self._entries.values() for writer in entry.writers
                       if any(span.segment == segment for span in writer.spans)]
        for writer in writers:
            writer.condemn(f"segment {segment} was unregistered")
        self._tell_retired()

    def _tell_retired(self) -> None:
        """Calls back for each retired segment that nobody writes into any more."""
        with self._lock:
            writers = [writer for entry in self._entries.values() for writer in entry.writers]
            busy = {span.segment for writer in writers for span in writer.spans}
            gone = [name for name in self._retired if name not in busy]
            for entry in self._entries.values():
                for name in gone:
                    entry.verified.pop(name, None)
            quiet = [self._retired.pop(name) for name in gone]
        for callback in quiet:
            callback()

    def close(self) -> None:
        """Revokes everything and waits for the writers left: copies within this process, which end by themselves."""
        with self._lock:
            operations = list(self._entries)
        for operation in operations:
            quiet = threading.Event()
            self.revoke(operation, quiet.set)
            quiet.wait()

    def covered(self, operation: OperationId, item: Range) -> bool:
        """Has every byte of ``item`` been verified under ``operation``, with nobody writing into it now?"""
        start, stop = item.offset, item.offset + item.length
        with self._lock:
            entry = self._entries.get(operation)
            if entry is None:
                return False
            if item.length == 0:
                return True
            verified = entry.verified.get(item.segment)
            if verified is None or not verified.covers(start, stop):
                return False
            return not any(
                span.segment == item.segment and span.offset < stop and start < span.stop
                for writer in entry.writers for span in writer.spans)

    def received_bytes(self, operation: OperationId) -> int:
        """Distinct bytes verified under ``operation``."""
        with self._lock:
            entry = self._entries.get(operation)
            return sum(verified.total for verified in entry.verified.values()) if entry else 0

    def overdue(self, now: float) -> list[Writer]:
        """Writers past their deadline."""
        with self._lock:
            return [writer for entry in self._entries.values() for writer in entry.writers if writer.deadline_s <= now]

    def segment_of(self, span: Span) -> Segment:
        """Our memory that ``span`` names a part of; its claim was admitted and has not ended."""
        return self._segments[span.segment]

    def _admit(self, claim: Claim, operation: OperationId, sender: str, now: float) -> _Entry:
        if claim.incarnation != self.incarnation:
            raise Refused(f"grant of incarnation {claim.incarnation}, this is {self.incarnation}")
        entry = self._entries.get(operation)
        if entry is None or entry.shut:
            raise Refused(f"operation {operation} holds no grant here; it was released or never granted")
        for granted in entry.grants:
            if hmac.compare_digest(granted.token, claim.token):
                break
        else:
            raise Refused(f"token does not fit any grant of operation {operation}")
        if granted.expires_s <= now:
            raise Refused(f"grant of operation {operation} expired {now - granted.expires_s:.3f} s ago")
        if granted.peer not in (ANYBODY, sender):
            raise Refused(f"grant of operation {operation} is for {granted.peer}, not for {sender}")
        for span in claim.spans:
            ranges = granted.ranges.get(span.segment)
            stop = span.offset + span.length if span.count == 1 else span.stop
            if ranges is None or not (ranges.covers(span.offset, stop)
                                      or all(ranges.covers(start, stop) for start, stop in span.parts())):
                raise Refused(f"bytes {span.offset}..{span.stop} of segment {span.segment} "
                              f"are outside the grant of operation {operation}")
        return entry

    def _mismatches(self, spans: Sequence[Span], checksums: Sequence[int]) -> list[int]:
        return [
            i for i, (span, expected) in enumerate(zip(spans, checksums, strict=True))
            if checksum(self._segments[span.segment].read_parts(span.offset, span)) != expected
        ]

    def _leave(self, entry: _Entry, writer: Writer) -> list[Callable[[], None]]:
        entry.writers.discard(writer)
        return self._close_if_quiet(writer.operation, entry)

    def _close_if_quiet(self, operation: OperationId, entry: _Entry) -> list[Callable[[], None]]:
        if not entry.revoked or entry.writers:
            return []
        del self._entries[operation]
        for granted in entry.grants:
            for segment, ranges in granted.ranges.items():
                for start, stop in ranges:
                    self._granted[segment].remove(start, stop)
        return entry.quiet

    def _check_exclusive(self, operation: OperationId, item: Range) -> None:
        start, stop = item.offset, item.offset + item.length
        granted = self._granted.get(item.segment)
        if granted is None or not granted.overlaps(start, stop):
            return
        for other, entry in self._entries.items():
            if other == operation:
                continue
            if any(g.ranges[item.segment].overlaps(start, stop) for g in entry.grants if item.segment in g.ranges):
                raise Bug(f"{item} is granted to operation {other}, which has not been released; "
                          f"operation {operation} cannot have it")

    def _sign(self, grant: Grant) -> bytes:
        # The generation makes two grants of equal content differ, so a token never outlives its release.
        content: list[Any] = [grant.worker, grant.incarnation, grant.operation, grant.generation, grant.peer,
                              grant.expires_at_s, [(item.segment, item.offset, item.length) for item in grant.ranges]]
        return hmac.new(self._secret, _canonical.encode(content), hashlib.sha256).digest()


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """xxh3-64 of ``data``; other threads run meanwhile."""
    return int(xxhash.xxh3_64_intdigest(data.data))


def _overlap(left: Sequence[Span], right: Sequence[Span]) -> bool:
    return any(
        a.segment == b.segment and a.offset < b.stop and b.offset < a.stop
        for a in left for b in right)
