"""The calls of a store's client, as they run in the thread of whoever makes them (or in one that waits for them).

A call goes to one worker after another until it is done: those said to have the value first, then those that it would
belong to. Nobody is asked twice in one call, so there are no loops; every wait ends by the call's deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from shared.ids import BlockKey, WorkerId
from shared.kv import CacheSpec
from shared.store import door_frames as frames
from shared.store.client_doors import BROKEN, BYTES, QUESTIONS, Call, Doors, Gone, Visit
from shared.store.client_errors import (
    CorruptValue,
    EntryRefused,
    ForeignSpec,
    MissingParent,
    NoStore,
    StoreDraining,
    StoreError,
    StoreFull,
    StoreTimeout,
)
from shared.store.client_map import Seat, Whereabouts
from shared.store.client_memory import Bytes, Part
from shared.store.door_line import Late
from shared.transfer.addresses import host_clock_s
from shared.transfer.channel import Closed
from shared.transfer.ledger import checksum

CHUNK_BYTES = 8 << 20
"""Values of one question of a batch: while they move, the next question is on its way."""
INLINE_VALUES = 8
"""Of a batch, at least, that go to a connection for questions: for fewer at a time its round trips take longer than
to hand more of them to a thread."""
WINDOW = 3
"""Questions of one batch that are not answered yet."""
MAX_ASKED = 4
"""Workers that are asked for a value which nobody is known to have."""
Copy = Callable[[Bytes, Bytes, int, int, int], None]
"""To, from, length, count, stride: see :attr:`shared.transfer.native.Native.copy`."""


class Core:
    """Thread-safe."""

    def __init__(self, spec: CacheSpec, whereabouts: Whereabouts, doors: Doors, copy: Copy) -> None:
        self._copy = copy
        self._spec, self._map, self._doors = spec, whereabouts, doors
        self._nbytes = spec.block_bytes

    # -- what there is to call ----------------------------------------------------------------------------------

    def put(self, call: Call, blocks: Sequence[frames.Block], parts: Sequence[Part]) -> list[bool]:
        """Whether each value was stored by this call: false for one that was there."""
        stored = [False] * len(blocks)
        todo = list(range(len(blocks)))
        sought: set[bytes] = set()
        while todo:
            seats = self._homes(blocks[todo[0]])
            group = self._together(blocks, todo, seats[0])
            try:
                done = self._put_somewhere(call, seats, [blocks[i] for i in group], [parts[i] for i in group])
            except StoreError as error:
                for i, was_stored in zip(group, error.done, strict=False):
                    stored[i] = was_stored
                error.done = stored
                raise
            for i, mark in zip(group, done, strict=True):
                stored[i] |= mark == frames.Mark.YES
            orphans = [i for i, mark in zip(group, done, strict=True) if mark == frames.Mark.ORPHAN]
            if orphans:
                self._find_parent(call, blocks[orphans[0]], sought, stored)
            taken = set(group)
            todo = orphans + [i for i in todo if i not in taken]
        return stored

    def get(self, call: Call, keys: Sequence[BlockKey], parts: Sequence[Part]) -> list[bool]:
        """Fills the parts of the values that are somewhere; what is in the other parts may have changed."""
        def fetch(seat: Seat, wanted: Sequence[int]) -> list[bool]:
            return self._fetch(call, seat, [keys[i] for i in wanted], [parts[i] for i in wanted])
        return self._seek(call, keys, fetch)

    def exists(self, call: Call, keys: Sequence[BlockKey]) -> list[bool]:
        """Asks owners, not the map: what is true is said by them."""
        def look(seat: Seat, wanted: Sequence[int]) -> list[bool]:
            return [bool(mark) for mark in self._marks(
                call, seat, lambda done: frames.Look(b"".join(keys[i] for i in wanted), done))]
        return self._seek(call, keys, look)

    def remove(self, call: Call, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether a copy of each was dropped; copies that somebody uses or that are continued stay."""
        removed = [False] * len(keys)
        for seat in self._map.seats:
            try:
                marks = self._marks(call, seat, lambda done: frames.Drop(b"".join(keys), done))
            except (Gone, NoStore, StoreTimeout):
                self._check(call, removed)
                continue
            for i, mark in enumerate(marks):
                removed[i] |= bool(mark)
                if mark:
                    self._map.forget(keys[i], seat.worker)
        return removed

    def pin(self, call: Call, name: str, keys: Sequence[BlockKey], ttl_s: float) -> tuple[list[bool], list[Hold]]:
        """Which of them are kept from now on, and the connections by which they are, each with its keys."""
        holds: list[Hold] = []

        def hold(seat: Seat, wanted: Sequence[int]) -> list[bool]:
            packed = b"".join(keys[i] for i in wanted)
            visit = self._doors.take(call, seat, QUESTIONS)
            try:
                marks = self._answer(call, visit, frames.Pin(name, packed, int(ttl_s * 1e3), visit.tell_done()))
            except BaseException:
                self._doors.drop(call, visit)
                raise
            self._doors.let_go(call, visit)
            if any(marks):
                holds.append(Hold(visit, name, packed, ttl_s))
            else:
                visit.line.close()  # with it ends what it pins: nothing
            return [bool(mark) for mark in marks]

        try:
            return self._seek(call, keys, hold), holds
        except BaseException:
            for held in holds:
                held.visit.line.close()
            raise

    # -- whom to ask --------------------------------------------------------------------------------------------

    def _seek(self, call: Call, keys: Sequence[BlockKey],
              ask: Callable[[Seat, Sequence[int]], list[bool]]) -> list[bool]:
        """Asks owners for those of ``keys`` that they are said to have, then others for what is left."""
        found = [False] * len(keys)
        if not self._map.seats:
            raise self._nobody()
        asked: list[set[WorkerId]] = [set() for _ in keys]
        left: Sequence[int] = range(len(keys))
        reached = False
        why: Exception | None = None
        while True:
            groups = self._groups(keys, asked, left)
            if not groups:
                break
            for seat, wanted in groups.items():
                for i in wanted:
                    asked[i].add(seat.worker)
                try:
                    marks = ask(seat, wanted)
                except (Gone, NoStore, EntryRefused, StoreTimeout) as error:
                    self._check(call, found)
                    why = error
                    continue
                except Late:
                    raise self._late(found) from None
                reached = True
                for i, mark in zip(wanted, marks, strict=True):
                    found[i] = mark
                    (self._map.learn if mark else self._map.forget)(keys[i], seat.worker)
            left = [i for i in left if not found[i]]
        if not reached and isinstance(why, StoreError):
            raise why
        return found

    def _groups(self, keys: Sequence[BlockKey], asked: Sequence[set[WorkerId]],
                left: Sequence[int]) -> dict[Seat, Sequence[int]]:
        """Whom to ask now, for what."""
        seats = self._map.seats
        if len(left) == len(keys) and len(seats) == 1:  # all of them, of the only one there is, unless it was asked
            return {} if not left or asked[0] else {seats[0]: left}
        groups: dict[Seat, list[int]] = {}
        for i in left:
            seat = self._next(keys[i], asked[i])
            if seat is not None:
                groups.setdefault(seat, []).append(i)
        return dict(groups)

    def _next(self, key: BlockKey, asked: set[WorkerId]) -> Seat | None:
        for seat in self._map.owners(key):
            if seat.worker not in asked:
                return seat
        if len(asked) < MAX_ASKED:
            for seat in self._map.ranked(key):
                if seat.worker not in asked:
                    return seat
        return None

    def _homes(self, block: frames.Block) -> list[Seat]:
        """Where a value may be put, best first: with its parent, where it belongs, and there where room is."""
        seats = [seat for seat in self._map.ranked(BlockKey(block.key)) if seat.takes]
        if block.depth:
            parents = [seat for seat in self._map.owners(BlockKey(block.parent)) if seat.takes]
            seats = parents + [seat for seat in seats if seat not in parents]
        if not seats:
            seats = [seat for seat in self._map.ranked(BlockKey(block.key))]  # they may have made room since they said
        if not seats:
            raise self._nobody()
        return seats

    def _together(self, blocks: Sequence[frames.Block], todo: Sequence[int], seat: Seat) -> list[int]:
        """Which of ``todo`` go to ``seat`` together: what belongs there, and what continues that."""
        if len(self._map.seats) == 1:  # nowhere else to go
            return list(todo)
        group = [todo[0]]
        keys = {blocks[todo[0]].key}
        for i in todo[1:]:
            block = blocks[i]
            if block.parent in keys or (block.parent not in keys and not block.depth and self._homes(block)[0] == seat):
                group.append(i)
                keys.add(block.key)
        return group

    def _nobody(self) -> StoreError:
        if self._map.foreign:
            return ForeignSpec(f"no worker keeps values of {self._spec.model} as ours; {self._map.foreign}")
        how = f" --set values={self._spec.model}:{self._nbytes}`" if self._spec.is_opaque else "`, with the same spec"
        return NoStore(f"no worker keeps values of {self._spec.model} ({self._nbytes} bytes each); "
                       f"start one with `moonbus serve store{how}")

    # -- put ----------------------------------------------------------------------------------------------------

    def _find_parent(self, call: Call, block: frames.Block, sought: set[bytes], stored: list[bool]) -> None:
        """The parent is not where ``block`` was put. Returns when it is elsewhere, and known to be there: it may have
        been stored before its owner's news were followed."""
        if block.parent not in sought:
            sought.add(block.parent)
            try:
                if self.exists(call, [BlockKey(block.parent)])[0]:
                    return
            except StoreError as error:
                error.done = stored
                raise
        raise MissingParent(f"block {block.key.hex()[:12]} continues {block.parent.hex()[:12]}, which is not there; "
                            "put a chain from its start", stored)

    def _put_somewhere(self, call: Call, seats: Sequence[Seat], blocks: Sequence[frames.Block],
                       parts: Sequence[Part]) -> list[int]:
        """First where there is room at once, then at the best place that is merely full, waiting for it."""
        full: tuple[Seat, StoreFull] | None = None
        gone: Exception | None = None
        for seat in seats:
            try:
                return self._put_at(call, seat, blocks, parts, wait_s=0.0)
            except StoreFull as error:
                full = full or (seat, error)
            except (Gone, NoStore, EntryRefused, StoreDraining, StoreTimeout) as error:
                self._check(call, ())
                gone = error
            except Late:
                raise self._late(()) from None
        if full is None:
            raise gone if isinstance(gone, StoreError) else NoStore(f"the value was not stored: {gone}")
        try:
            return self._put_at(call, full[0], blocks, parts, wait_s=0.8 * call.left_s())
        except Gone as error:
            raise NoStore(f"the value was not stored: {error}") from error
        except Late:
            raise full[1] from None

    def _put_at(self, call: Call, seat: Seat, blocks: Sequence[frames.Block], parts: Sequence[Part], *,
                wait_s: float) -> list[int]:
        visit, most_bytes = self._take_for(call, seat, parts)
        size = self._chunk(visit, 4, most_bytes)
        marks: list[int] = []
        waiting: deque[Sequence[frames.Block]] = deque()
        try:
            if len(blocks) <= size:
                sums = [checksum(part.array) for part in parts] if visit.proofs else []
                marks = self._stored(visit, visit.put_alone(call, list(blocks), parts, sums, wait_s=wait_s), blocks)
                blocks = ()
            for start in range(0, len(blocks), size):
                if len(waiting) == WINDOW:
                    marks += self._stored(visit, visit.line.receive(), waiting.popleft())
                some, their = blocks[start:start + size], parts[start:start + size]
                sums = [checksum(part.array) for part in their] if visit.proofs else []
                visit.put(call, list(some), their, sums, wait_s=wait_s)
                waiting.append(some)
            while waiting:
                marks += self._stored(visit, visit.line.receive(), waiting.popleft())
        except BaseException as error:
            self._doors.drop(call, visit)
            raise self._seen(call, error, [mark == frames.Mark.YES for mark in marks]) from error
        self._doors.give_back(call, visit)
        return marks

    def _take_for(self, call: Call, seat: Seat, parts: Sequence[Part]) -> tuple[Visit, int]:
        """A connection that takes these values, and the bytes of them that it takes at a time."""
        wanted = min(len(parts), INLINE_VALUES) * self._nbytes
        if wanted <= frames.MAX_INLINE_BYTES and all(part.segment is not None for part in parts):
            visit = self._doors.take(call, seat, QUESTIONS)
            if not visit.local:
                return visit, CHUNK_BYTES
            if wanted <= visit.inline_bytes:
                return visit, visit.inline_bytes
            self._doors.give_back(call, visit)
        return self._doors.take(call, seat, BYTES), CHUNK_BYTES

    def _stored(self, visit: Visit, reply: object, blocks: Sequence[frames.Block]) -> list[int]:
        marks = self._marks_of(visit, reply)
        for block, mark in zip(blocks, marks, strict=True):
            if mark != frames.Mark.ORPHAN:
                self._map.learn(BlockKey(block.key), visit.seat.worker)
        return marks

    # -- get ----------------------------------------------------------------------------------------------------

    def _fetch(self, call: Call, seat: Seat, keys: Sequence[BlockKey], parts: Sequence[Part]) -> list[bool]:
        visit = self._doors.take(call, seat, QUESTIONS)
        size = self._chunk(visit, 32)
        starts = deque(range(0, len(keys), size))
        waiting: deque[int] = deque()
        found: list[bool] = []
        try:
            if len(keys) <= size:
                question = frames.Get(b"".join(keys), max(1, int(call.left_s() * 1e3)), visit.tell_done())
                found = self._receive(visit, visit.exchange(call, question), parts)
                starts.clear()
            while starts or waiting:
                while starts and len(waiting) < WINDOW:
                    start = starts.popleft()
                    millis = max(1, int(call.left_s() * 1e3))
                    visit.ask(call, frames.Get(b"".join(keys[start:start + size]), millis, visit.tell_done()))
                    waiting.append(start)
                start = waiting.popleft()
                if visit.done and self._doors.are_many:
                    visit.tell_now()
                found += self._receive(visit, visit.line.receive(), parts[start:start + size])
        except BaseException as error:
            self._doors.drop(call, visit)
            raise self._seen(call, error, found) from error
        self._doors.give_back(call, visit)
        return found

    def _receive(self, visit: Visit, reply: object, parts: Sequence[Part]) -> list[bool]:
        """The answer to one GET, and its values."""
        if isinstance(reply, frames.Denied):
            raise _refusal(visit, reply)
        if not isinstance(reply, frames.Found) or len(reply.slots) != len(parts):
            raise frames.FrameError(f"{type(reply).__name__} is no answer to GET")
        hits = [part for part, slot in zip(parts, reply.slots, strict=True) if slot != frames.MISSING]
        if visit.memory is not None:
            self._copy_all(parts, reply.slots, visit.memory.array)
            # In this order: its owner ends the stream before it takes a loan back.
            if host_clock_s() > reply.until_s or visit.line.hung_up():
                raise Closed
            visit.done += 1
        else:
            for part in hits:
                visit.line.receive_into(part.array.data)
        if reply.checksums:
            for part, sum in zip(hits, reply.checksums, strict=True):
                if checksum(part.array) != sum:
                    raise CorruptValue(f"a value of {self._nbytes} bytes from worker {visit.seat.worker} arrived with "
                                       "other bytes than were sent")
        return [slot != frames.MISSING for slot in reply.slots]

    def _copy_all(self, parts: Sequence[Part], slots: Sequence[int], memory: Bytes) -> None:
        """What was found, out of its owner's ``memory``; values that follow each other here and there at once."""
        nbytes, i = self._nbytes, 0
        while i < len(slots):
            part, slot, count = parts[i], slots[i], 1
            i += 1
            if slot == frames.MISSING:
                continue
            while i < len(slots) and slots[i] == slot + count and part.segment is not None and (
                    parts[i].segment is part.segment and parts[i].offset == part.offset + count * nbytes):
                i, count = i + 1, count + 1
            to = part.array if part.segment is None else part.segment.array[part.offset:part.offset + count * nbytes]
            self._copy(to, memory[slot * nbytes:(slot + count) * nbytes], count * nbytes, 1, 0)

    # -- one question -------------------------------------------------------------------------------------------

    def _marks(self, call: Call, seat: Seat, question: Callable[[int], frames.Request]) -> list[int]:
        visit = self._doors.take(call, seat, QUESTIONS)
        try:
            marks = self._answer(call, visit, question(visit.tell_done()))
        except BaseException:
            self._doors.drop(call, visit)
            raise
        self._doors.give_back(call, visit)
        return marks

    def _answer(self, call: Call, visit: Visit, question: frames.Request) -> list[int]:
        try:
            return self._marks_of(visit, visit.exchange(call, question))
        except BROKEN as error:
            raise Gone(f"worker {visit.seat.worker}: {error or type(error).__name__}") from error

    def _marks_of(self, visit: Visit, reply: object) -> list[int]:
        if isinstance(reply, frames.Denied):
            raise _refusal(visit, reply)
        if not isinstance(reply, frames.Marks):
            raise frames.FrameError(f"{type(reply).__name__} is no answer to this")
        return reply.marks

    def _chunk(self, visit: Visit, share: int, most_bytes: int = CHUNK_BYTES) -> int:
        """Values of one question: no more than the ``share``th part of what the worker has room for."""
        return max(1, min(frames.MAX_KEYS, most_bytes // self._nbytes, visit.door.num_blocks // share))

    def _seen(self, call: Call, error: BaseException, done: list[bool]) -> BaseException:
        """What a broken connection comes to."""
        if isinstance(error, StoreError):
            error.done = done
            return error
        if isinstance(error, BROKEN):
            return Gone(str(error) or type(error).__name__)
        return error

    def _check(self, call: Call, done: Sequence[bool]) -> None:
        if call.left_s() <= 0 or call.cancelled:
            raise self._late(done)

    def _late(self, done: Sequence[bool]) -> StoreTimeout:
        return StoreTimeout("not done by the call's deadline", done)


class Hold:
    """What one worker keeps for a pin."""

    def __init__(self, visit: Visit, name: str, keys: bytes, ttl_s: float) -> None:
        self.visit, self._name, self._keys, self._ttl_s = visit, name, keys, ttl_s
        self._using = threading.Lock()

    def renew(self) -> None:
        """Blocks. Raises what a broken connection raises; the pin has ended then, or will."""
        with self._using:
            self.visit.line.set_deadline(host_clock_s() + self._ttl_s / 3)
            self.visit.line.ask(frames.Pin(self._name, self._keys, int(self._ttl_s * 1e3)))

    def end(self) -> None:
        """The connection's end is the pin's. Idempotent."""
        self.visit.line.shutdown()  # wakes whoever renews it
        with self._using:
            self.visit.line.close()


def _refusal(visit: Visit, denied: frames.Denied) -> StoreError:
    kinds: dict[str, type[StoreError]] = {
        "full": StoreFull, "draining": StoreDraining, "checksum": CorruptValue, "late": StoreTimeout}
    return kinds.get(denied.code, StoreError)(f"worker {visit.seat.worker} refuses: {denied.why}")
