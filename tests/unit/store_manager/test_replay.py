"""An inventory told as a history."""

from __future__ import annotations

import pytest

from services.store_manager.inventory import InventoryFailed, replay
from shared.ids import BlockKey, Incarnation, SpecDigest, WorkerId
from shared.kv import Tier, pack_keys
from shared.messages import Evicted, Stored, StoredBlock


def block(number: int, tier: Tier = Tier.DRAM) -> StoredBlock:
    return StoredBlock(key=BlockKey(bytes([number]) * 32), parent=BlockKey(bytes(32)), depth=0, nbytes=1, tier=tier)


def stored(seq: int, *numbers: int) -> Stored:
    return Stored(worker=WorkerId("a"), incarnation=Incarnation("1"), seq=seq, spec=SpecDigest("s"), at_s=float(seq),
                  blocks=[block(number) for number in numbers])


def evicted(seq: int, *numbers: int) -> Evicted:
    return Evicted(worker=WorkerId("a"), incarnation=Incarnation("1"), seq=seq, at_s=float(seq),
                   keys=pack_keys([block(number).key for number in numbers]))


def test_a_whole_history_is_an_inventory() -> None:
    worker, life = WorkerId("a"), Incarnation("1")
    inventory = replay(worker, life, [evicted(2, 1), stored(1, 1, 2), stored(3, 3)])
    assert (inventory.seq, inventory.spec, [b.key[0] for b in inventory.blocks]) == (3, "s", [2, 3])
    assert replay(worker, life, []).blocks == ()
    with pytest.raises(InventoryFailed, match="without number 2"):
        replay(worker, life, [stored(1, 1), stored(3, 2)])
