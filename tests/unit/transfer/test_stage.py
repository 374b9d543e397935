"""Host memory through which bytes pass: slots on their way out, runs on their way in."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Grant
from shared.transfer.frames import Span
from shared.transfer.lane import Transfer
from shared.transfer.ledger import checksum
from shared.transfer.plan import Batch, Piece
from shared.transfer.segment import Segment
from shared.transfer.stage import SLOTS, Landing, Stage
from tests.support.device_memory import VeiledMemory

ROOM = 1000
GRANT = Grant(worker=WorkerId("b"), incarnation=Incarnation("1"), operation=OperationId("op"), ranges=[],
              expires_at_s=0.0, token=b"")


def test_a_slot_holds_the_bytes_of_a_transfer_back_to_back_and_proves_what_was_meant() -> None:
    memory = VeiledMemory(100)
    memory.put(bytes(range(100)))
    segments = {"kv": Segment.adopt("kv", memory)}
    pieces = tuple(Piece((i,), "kv", offset, Span("there", 0, 10)) for i, offset in enumerate((30, 5)))
    transfer = Transfer(Batch(pieces, 20), GRANT, 0.0, None, lambda outcome: None, frozenset({1}))
    stage = Stage(partial(Segment.allocate, "stage"))
    slots = [stage.take_now() for _ in range(SLOTS + 1)]
    assert slots == [*range(SLOTS), None] and stage.memory is None
    staged = stage.fill(1, transfer, segments, proven=True)
    held = [bytes(staged.memory.array[offset:offset + 10]) for offset in staged.offsets]
    assert held == [bytes(range(30, 40)), bytes([5 ^ 0xFF, *range(6, 15)])]
    assert staged.checksums == [checksum(np.arange(start, start + 10, dtype=np.uint8)) for start in (30, 5)]
    assert stage.fill(2, transfer, segments, proven=False).checksums == []
    stage.give_back(3)
    assert stage.take() == 3
    stage.end()
    assert stage.take() is None


@given(st.lists(st.one_of(st.tuples(st.integers(0, 9), st.integers(0, ROOM + 1)), st.integers(0, 9)), max_size=40))
def test_no_two_claims_land_on_the_same_bytes_and_room_that_is_there_is_found(
        steps: list[tuple[int, int] | int]) -> None:
    landing, runs = Landing(Segment.allocate("landing", ROOM)), dict[int, tuple[int, int]]()
    for step in steps:
        if isinstance(step, int):
            landing.give_back(step)
            runs.pop(step, None)
            continue
        claim, nbytes = step
        if landing.holds(claim):
            continue
        start = landing.take(claim, nbytes)
        edges = [(0, 0), *sorted(run for run in runs.values()), (ROOM, ROOM)]
        gap = max(after[0] - before[1] for before, after in pairwise(edges))
        if start is None:
            assert nbytes > gap
        else:
            assert 0 <= start <= start + nbytes <= ROOM
            assert all(start + nbytes <= other or stop <= start for other, stop in runs.values() if stop > other)
            runs[claim] = start, start + nbytes


def test_what_landed_is_copied_to_where_it_belongs() -> None:
    memory, landing = VeiledMemory(100), Landing(Segment.allocate("landing", ROOM))
    target = Segment.adopt("kv", memory)
    assert landing.take(0, 10) == 0 and landing.take(1, 8) == 10
    landing.memory.array[10:18] = range(8)
    landing.empty(1, [Span("kv", 50, 3), Span("kv", 20, 5)], lambda span: target)
    assert memory.content() == bytes(20) + bytes(range(3, 8)) + bytes(25) + bytes(range(3)) + bytes(47)
