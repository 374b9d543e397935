"""The compiled table against a dictionary."""

from __future__ import annotations

import random
import sys
from itertools import chain

import numpy as np
import pytest

from services.conductor.core import native
from services.conductor.core.table import DictTable, Table, make_table

TABLES = [DictTable] if native.WHY_NOT else [DictTable, make_table]
KINDS = ["anywhere", "in a row", "together", "at the end"]
_BACK = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
"""Times this: a fingerprint whose place follows from the leading bits of the product."""


def prints_of(rng: random.Random, kind: str) -> int:
    """Few, so that they meet again: anywhere, one after the other, or all with one home in a small table, the last
    place of it among them."""
    match kind:
        case "anywhere":
            return random.Random(rng.randrange(500)).getrandbits(60)
        case "in a row":
            return rng.randrange(300)
        case "at the end":
            return (2**64 - 1 - rng.randrange(60)) * _BACK % 2**64
        case _:
            return rng.randrange(40) << 58


@pytest.mark.parametrize("make", TABLES)
@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_against_a_dictionary(make: type[Table], kind: str) -> None:
    rng, table, model = random.Random(kind), make(), dict[int, int]()
    for _ in range(3000):
        blocks = [prints_of(rng, kind) for _ in range(rng.choice((1, 1, 5, 40)))]
        match rng.randrange(5):
            case 0 | 1:
                row = rng.randint(1, 5)
                table.put(rng.choice((list, tuple, dict.fromkeys))(blocks), row)
                model |= dict.fromkeys(blocks, row)
            case 2:
                table.drop(blocks)
                for block in blocks:
                    model.pop(block, None)
            case 3:
                assert table.rows(blocks) == [model.get(block) for block in blocks]
            case _:
                rows = [model.get(block, 0) for block in blocks]
                rows = rows[:rows.index(0) + 1] if 0 in rows else rows
                assert table.stretches(np.array(blocks, dtype=np.uint64)) == [
                    (place, row) for place, row in enumerate(rows) if not place or row != rows[place - 1]]
        assert len(table) == len(model)
        if not rng.randrange(40):
            assert sorted(chain.from_iterable(table.sweep(rng.choice((1, 7, 10_000))))) == sorted(model)


@pytest.mark.parametrize("make", TABLES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_meets_everybody_once_whatever_comes_and_goes(make: type[Table], kind: str) -> None:
    for seed in range(60):
        rng, table = random.Random(f"{kind}{seed}"), make()
        start = {prints_of(rng, kind) for _ in range(rng.choice((0, 5, 300)))}
        table.put(start, 1)
        stay, ever, met = set(start), set(start), list[int]()
        comes = rng.choice((0, 3, 30))
        for blocks in table.sweep(rng.choice((1, 2, 9, 100))):
            met += blocks
            goes = {prints_of(rng, kind) for _ in range(rng.choice((0, 1, 4)))}
            if rng.random() < 0.5:
                goes |= set(rng.sample(blocks, len(blocks) // 2))  # as who tidies does
            table.drop(goes)
            stay -= goes
            came = [prints_of(rng, kind) for _ in range(comes)] if len(ever) < 4000 else []
            table.put(came, 2)
            ever.update(came)
        assert len(met) == len(set(met)) and stay <= set(met) <= ever


@pytest.mark.parametrize("make", TABLES)
def test_an_empty_one(make: type[Table]) -> None:
    table = make()
    assert not table and table.rows([]) == [] and not list(chain.from_iterable(table.sweep(3)))
    assert table.stretches(np.empty(0, dtype=np.uint64)) == []


@pytest.mark.skipif(bool(native.WHY_NOT), reason=f"there is no compiled part: {native.WHY_NOT}")
def test_it_refuses_what_is_no_fingerprint_and_takes_few_bytes() -> None:
    table = make_table()
    for wrong in (-1, 1 << 64, (1 << 64) - 1, "block", None):
        with pytest.raises((OverflowError, TypeError, ValueError)):
            table.put([1, wrong], 7)  # type: ignore[list-item]
        with pytest.raises((OverflowError, TypeError, ValueError)):
            table.rows([wrong])  # type: ignore[list-item]
    for count in (0, -1, 1 << 64):
        with pytest.raises((OverflowError, ValueError)):
            table.sweep(count)
    assert not table
    rng = random.Random(1)
    table.put([rng.getrandbits(60) for _ in range(100_000)], 3)
    assert sys.getsizeof(table) < 50 * len(table)
