"""Rows of a batch: the parts that need no Postgres."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store_manager.inventory import InventoryFailed, replay
from shared.catalog.fold import fold, multirange
from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.kv import Tier, pack_keys
from shared.messages import Bye, Evicted, Stored, StoredBlock


def block(number: int, tier: Tier = Tier.DRAM) -> StoredBlock:
    return StoredBlock(key=BlockKey(bytes([number]) * 32), parent=BlockKey(bytes(32)), depth=0, nbytes=1, tier=tier)


def stored(seq: int, *numbers: int) -> Stored:
    return Stored(worker=WorkerId("a"), incarnation=Incarnation("1"), seq=seq, spec=SpecDigest("s"), at_s=float(seq),
                  blocks=[block(number) for number in numbers])


def evicted(seq: int, *numbers: int) -> Evicted:
    return Evicted(worker=WorkerId("a"), incarnation=Incarnation("1"), seq=seq, at_s=float(seq),
                   keys=pack_keys([block(number).key for number in numbers]))


@given(st.sets(st.integers(1, 60)))
def test_multirange_is_the_set(seqs: set[int]) -> None:
    written = multirange(seqs)
    ranges = [part.strip("[)").split(",") for part in written.strip("{}").replace("),[", ") [").split()]
    assert {seq for start, stop in ranges for seq in range(int(start), int(stop))} == seqs
    assert all(int(stop) < int(start) for (_, stop), (start, _) in pairwise(ranges)), "joined up"


def test_a_row_a_key_in_order_of_keys() -> None:
    folded = fold([stored(1, 3, 1), evicted(2, 3), stored(3, 3, 2), stored(1, 3, 1)], now_s=0.0)
    rows = folded.replica_rows()
    assert [row[0][0] for row in rows] == [1, 2, 3]
    assert [(row[7], row[9], row[10]) for row in rows] == [(1, 0, None), (3, 0, None), (3, 2, None)]
    assert [row[0][0] for row in folded.block_rows()] == [1, 2, 3]
    assert folded.seen_rows() == [("a", "1", "{[1,4)}")]


def test_a_bye_without_a_time_takes_now() -> None:
    bye = Bye(worker=WorkerId("a"), incarnation=Incarnation("1"))
    assert fold([bye], now_s=7.0).worker_rows()[0][9].timestamp() == 7.0


def test_times_that_are_none() -> None:
    for at_s in (float("nan"), float("inf"), 1e300):
        with pytest.raises((ValueError, OverflowError)):
            fold([Stored(worker=WorkerId("a"), incarnation=Incarnation("1"), seq=1, spec=SpecDigest("s"), at_s=at_s,
                         blocks=[])], now_s=0.0)


def test_a_whole_history_is_an_inventory() -> None:
    worker, life = WorkerId("a"), Incarnation("1")
    inventory = replay(worker, life, [evicted(2, 1), stored(1, 1, 2), stored(3, 3)])
    assert (inventory.seq, inventory.spec, [b.key[0] for b in inventory.blocks]) == (3, "s", [2, 3])
    assert replay(worker, life, []).blocks == ()
    with pytest.raises(InventoryFailed, match="without number 2"):
        replay(worker, life, [stored(1, 1), stored(3, 2)])
