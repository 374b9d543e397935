"""The SSD tier by itself, on real files."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.clock import SystemClock
from shared.errors import SettingError
from shared.ids import BlockKey
from shared.store.settings import SsdSettings
from shared.store.ssd.tier import _WRITES, WRITE_BLOCKS, SsdTier
from tests.support.blocks import SPEC, make_chain, payload
from tests.support.faulty_files import FaultyFiles

SETTINGS = SsdSettings(bytes=4 << 20, timeout_s=20.0)


async def test_a_bound_that_no_block_fits_into_is_said(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="room for a block"):
        async with SsdTier.open(tmp_path, SPEC, SsdSettings(bytes=64), clock=SystemClock()):
            pass


async def fill(tier: SsdTier, chains: int) -> list[BlockKey]:
    blocks = [make_chain(str(number), 1)[0] for number in range(chains)]
    for first in range(0, chains, WRITE_BLOCKS):
        part = blocks[first:first + WRITE_BLOCKS]
        assert await tier.write(part, [memoryview(payload(block.key)) for block in part]) == len(part)
    return [block.key for block in blocks]


async def test_what_is_dropped_one_by_one_while_the_disk_is_busy_stays_away(tmp_path: Path) -> None:
    """More than jobs may wait for the disk; what stayed on it would be back after a restart."""
    files, count = FaultyFiles(), _WRITES + 40
    async with SsdTier.open(tmp_path, SPEC, SETTINGS, clock=SystemClock(), files=files) as tier:
        assert tier is not None
        keys = await fill(tier, count)
        files.gate.clear()
        for key in keys[:-1]:
            assert tier.drop([key], "removed") == [key]
        again = make_chain("again", 1)[0]
        files.gate.set()
        assert await tier.write([again], [memoryview(payload(again.key))]) == 1
    async with SsdTier.open(tmp_path, SPEC, SETTINGS, clock=SystemClock()) as tier:
        assert tier is not None and {block.key for block in tier.blocks()} == {keys[-1], again.key}
        buffer = memoryview(bytearray(SPEC.block_bytes))
        for key in (keys[-1], again.key):
            assert (await tier.read([key], [buffer])).blocks == 1 and buffer == payload(key)
