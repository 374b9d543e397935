"""How network cards get at a device's memory: the choice, and the calls into CUDA's driver, with a library of ours."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.transfer.cuda import Driver, card_facts
from shared.transfer.device import Access, CardFacts, DmaBuf, Way, plan_access
from shared.transfer.fabric import Fabric, OpenNic
from shared.transfer.rails import Gid, Load, Nic, Topology
from shared.transfer.segment import DeviceSegment
from shared.transfer.verbs import Device, VerbsError
from tests.support.device_memory import OpenMemory, VeiledMemory


@pytest.mark.parametrize(("facts", "binding", "ways"), [
    (CardFacts(), "", [Way.DMA_BUF, Way.PEER, Way.STAGED]),
    (CardFacts(no_dma_buf="old driver"), "", [Way.PEER, Way.STAGED]),
    (CardFacts(), "old binding", [Way.PEER, Way.STAGED]),
    (CardFacts(no_peer="not loaded"), "", [Way.DMA_BUF, Way.STAGED]),
    (CardFacts("old driver", "not loaded"), "old binding", [Way.STAGED]),
])
def test_the_best_way_comes_first_and_staging_always_works(facts: CardFacts, binding: str, ways: list[Way]) -> None:
    assert list(plan_access(facts, no_dma_buf=binding).ways) == ways


def test_what_speaks_against_the_better_ways_is_said() -> None:
    access = plan_access(CardFacts("the driver exports none", "nvidia_peermem is not loaded"))
    assert access.reason(Way.DMA_BUF) == ""
    assert access.reason(Way.PEER) == "no dma-buf: the driver exports none"
    assert access.reason(Way.STAGED) == (
        "no dma-buf: the driver exports none; no peer memory: nvidia_peermem is not loaded")
    assert Access((Way.DMA_BUF, Way.STAGED), {}).reason(Way.STAGED) == ""


class Library:
    """What ``libcuda`` would do, for one device; notes what it was asked for."""

    def __init__(self, *, supported: int = 1, code: int = 0) -> None:
        self._supported, self._code = supported, code
        self.asked: list[tuple[Any, ...]] = []

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuDeviceGet(self, device: Any, index: Any) -> int:
        device._obj.value = index.value + 40
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:
        self.asked.append((attribute.value, device.value))
        value._obj.value = self._supported
        return self._code

    def cuMemGetHandleForAddressRange(self, handle: Any, address: Any, nbytes: Any, kind: Any, flags: Any) -> int:
        self.asked.append((address.value, nbytes.value, kind.value, flags.value))
        handle._obj.value = 7
        return self._code

    def cuPointerSetAttribute(self, value: Any, attribute: Any, address: Any) -> int:
        self.asked.append((value._obj.value, attribute.value, address.value))
        return self._code


def test_the_driver_is_asked_as_its_interface_says() -> None:
    library = Library()
    driver = Driver(library)
    assert driver.exports_dma_buf(2) and driver.dma_buf(1 << 40, 4096) == 7
    driver.order_copies(1 << 41)
    assert library.asked == [(124, 42), (1 << 40, 4096, 1, 0), (1, 6, 1 << 41)]


def test_a_driver_that_refuses_or_is_too_old_is_an_error_with_its_name() -> None:
    with pytest.raises(OSError, match="cuMemGetHandleForAddressRange fails with CUDA's error 801"):
        Driver(Library(code=801)).dma_buf(0, 4096)
    old = Library()
    old.cuPointerSetAttribute = None  # type: ignore[assignment, method-assign]
    with pytest.raises(OSError, match="this driver has no cuPointerSetAttribute"):
        Driver(old).order_copies(0)


def test_facts_of_a_gpu(tmp_path: Path) -> None:
    def without() -> Driver:
        return Driver(ctypes.CDLL("libno-such-driver.so.1"))

    none = card_facts(0, driver=without, modules=tmp_path)
    assert "libno-such-driver" in none.no_dma_buf and none.no_peer == "nvidia_peermem is not loaded"
    (tmp_path / "nvidia_peermem").mkdir()
    assert card_facts(0, driver=lambda: Driver(Library()), modules=tmp_path) == CardFacts()
    old = card_facts(0, driver=lambda: Driver(Library(supported=0)), modules=tmp_path)
    assert old == CardFacts(no_dma_buf="this driver exports none")


class Card(Device):
    """A card whose driver takes what is in ``takes``."""

    binding = "test"
    error = OSError

    def __init__(self, *takes: Way) -> None:
        self.takes = takes
        self.open: list[Way] = []

    def _register(self, address: int, nbytes: int) -> Any:
        return self._take(Way.PEER)

    def _register_dma_buf(self, memory: DmaBuf, nbytes: int) -> Any:
        return self._take(Way.DMA_BUF)

    def _take(self, way: Way) -> Any:
        if way not in self.takes:
            raise VerbsError(0, f"this card takes no {way}")
        self.open.append(way)
        return SimpleNamespace(lkey=1, rkey=2, close=lambda: self.open.remove(way))


@pytest.mark.parametrize(("takes", "exports", "way"), [
    ([{Way.DMA_BUF, Way.PEER}, {Way.DMA_BUF}], True, Way.DMA_BUF),
    ([{Way.DMA_BUF, Way.PEER}, {Way.PEER}], True, Way.PEER),
    ([{Way.DMA_BUF, Way.PEER}, {Way.DMA_BUF}], False, Way.STAGED),
    ([{Way.PEER}, {Way.DMA_BUF}], True, Way.STAGED),
])
def test_a_way_is_taken_that_every_card_can_go(takes: list[set[Way]], exports: bool, way: Way) -> None:
    cards = [Card(*found) for found in takes]
    nics = [OpenNic(Nic("nic", -1, 1e9, True, False, ()), card, Gid(0, bytes(16), ""), "", Load(1e9)) for card in cards]
    fabric, segment = Fabric(nics, Topology({})), DeviceSegment("kv", OpenMemory(4096, exports=exports))
    fds = len(list(Path("/proc/self/fd").iterdir()))
    fabric.expose(segment)
    assert segment.way is way
    assert [card.open for card in cards] == [[] if way is Way.STAGED else [way]] * 2
    assert all(fabric.knows(i, segment) == (way is not Way.STAGED) for i in range(2))
    fabric.forget(segment.serial)
    assert not any(card.open for card in cards) and len(list(Path("/proc/self/fd").iterdir())) == fds


def test_memory_that_its_device_shows_nobody_is_staged() -> None:
    segment = DeviceSegment("kv", VeiledMemory(10))
    Fabric([], Topology({})).expose(segment)
    assert segment.way is Way.STAGED
