"""What the accelerator lacks is copied to it before it is read, and only that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from shared.engine.thread import EngineThread, Work

BLOCK = 4


class Device:
    """Stands for model and pool: records what is copied, before which pass."""

    def __init__(self) -> None:
        self.copied: list[list[int]] = []
        self.passes = 0
        self.is_broken = False
        self.now_s = 0.0
        """Passes take 3 s, 4 s, 5 s .. of this clock."""

    def to_device(self, slots: Sequence[int]) -> None:
        self.copied.append(list(slots))

    def forward(self, rows: Sequence[Any], on_layer: Any) -> None:
        if self.is_broken:
            raise RuntimeError("out of memory")
        self.now_s += 3 + self.passes
        self.passes += 1


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[tuple[EngineThread, Device]]:
    with ThreadPoolExecutor(1) as executor:
        thread, device = EngineThread(executor), Device()
        thread._on_device, thread._block_tokens = True, BLOCK
        thread._engine = thread._pool = device  # type: ignore[assignment]
        yield thread, device


def work(start: int, length: int, *slots: int) -> Work:
    return Work(np.zeros(length, dtype=np.uint32), start, list(slots))


async def test_what_others_filled_is_copied_once(engine: tuple[EngineThread, Device]) -> None:
    thread, device = engine
    thread.handed_out([3, 4, 5, 9])
    await thread.step([work(8, 4, 3, 4, 5), work(0, 2, 7)])
    assert device.copied == [[3, 4]], "5 is written in the pass, 7 was never behind, 9 is not read"
    await thread.step([work(12, 1, 3, 4, 5, 6)])
    assert device.copied == [[3, 4]]
    thread.handed_out([4])  # evicted, and filled again by somebody
    await thread.step([work(12, 1, 3, 4, 5, 6)])
    assert device.copied == [[3, 4], [4]]


async def test_a_block_that_begins_elsewhere_and_goes_on_here_is_copied(engine: tuple[EngineThread, Device]) -> None:
    thread, device = engine
    thread.handed_out([1, 2])
    await thread.step([work(6, 1, 1, 2)])
    assert device.copied == [[1, 2]]


async def test_a_pass_that_failed_copies_again(engine: tuple[EngineThread, Device]) -> None:
    thread, device = engine
    thread.handed_out([1])
    device.is_broken = True
    with pytest.raises(RuntimeError):
        await thread.step([work(4, 1, 1, 2)])
    device.is_broken = False
    await thread.step([work(4, 1, 1, 2)])
    assert device.copied == [[1], [1]]


async def test_the_seconds_of_a_step_are_its_own(
        engine: tuple[EngineThread, Device], monkeypatch: pytest.MonkeyPatch) -> None:
    thread, device = engine
    monkeypatch.setattr("shared.engine.thread.time", SimpleNamespace(perf_counter=lambda: device.now_s))
    steps = await asyncio.gather(*(thread.step([work(4, 1, 1, 2)]) for _ in range(3)))
    assert [step.seconds for step in steps] == [3, 4, 5], "each but the first waited for those before it"
