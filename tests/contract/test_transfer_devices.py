"""Memory of a GPU, on every path, without a GPU: CPU tensors stand in for CUDA ones.

What is not real here is what CUDA would do: telling a GPU's tensor, finding devices, making and opening handles. The
engine, its paths, staging and the protocol are the real ones.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shared.errors import Bug
from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Grant, Range
from shared.transfer import ChecksumMismatch, GrantRefused, Slice, TransferEngine, TransferSettings, cuda
from shared.transfer.cuda import CudaDevice, CudaMemory, CudaProbe, DeviceHandle
from tests.support.eventually import eventually

NBYTES = 1 << 20
OP = OperationId("op")


class Driver:
    """What CUDA does, for CPU tensors: one GPU, ``no_opening`` says why handles cannot be opened."""

    def __init__(self) -> None:
        self.memories: weakref.WeakValueDictionary[bytes, CudaMemory] = weakref.WeakValueDictionary()
        self.opened = 0
        self.no_opening = ""

    def is_cuda_tensor(self, memory: object) -> bool:
        return isinstance(memory, torch.Tensor)

    def probe(self) -> CudaProbe:
        index: Any = torch.device("cpu").index
        return CudaProbe((CudaDevice(index, "one", "uuid-1", ("uuid-1",)),))

    def handle(self, memory: CudaMemory) -> DeviceHandle:
        name = str(id(memory)).encode()
        self.memories[name] = memory
        return DeviceHandle("uuid-1", name, memory.nbytes, 0, b"/torch_1_2_3", 0, b"event", True, 0, memory.nbytes)

    def open_handle(self, handle: DeviceHandle) -> torch.Tensor:
        handle.check()
        if self.no_opening:
            raise RuntimeError(self.no_opening)
        self.opened += 1
        return self.memories[handle.memory].bytes


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(cuda, "is_cuda_tensor", found.is_cuda_tensor)
    monkeypatch.setattr(cuda, "probe", found.probe)
    monkeypatch.setattr(cuda, "open_handle", found.open_handle)
    monkeypatch.setattr(CudaMemory, "handle", lambda memory: found.handle(memory))
    return found


@dataclass
class Pair:
    """A sender and a receiver with a segment ``gpu`` and a segment ``host`` each."""

    sender: TransferEngine
    receiver: TransferEngine
    source: dict[str, Any]
    target: dict[str, Any]

    async def push(self, grant: Grant, source: str, target: str, *slices: tuple[int, int, int]) -> Any:
        """``slices``: (local offset, remote offset, length)."""
        pushed = [Slice(source, local, Range(segment=target, offset=remote, length=length))
                  for local, remote, length in slices]
        return await self.sender.push(self.receiver.endpoint, pushed, grant, timeout_s=10)

    def grant(self, segment: str, length: int = NBYTES) -> Grant:
        return self.receiver.grant(OP, [Range(segment=segment, offset=0, length=length)], ttl_s=60)

    def bytes_at(self, segment: str) -> bytes:
        return bytes(np.asarray(self.target[segment]))


@asynccontextmanager
async def opened(*paths: str, nbytes: int = NBYTES, **settings: Any) -> AsyncIterator[Pair]:
    chosen = TransferSettings(paths=paths, **settings)
    async with (
        TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=chosen) as sender,
        TransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"),
                            settings=TransferSettings(paths=paths)) as receiver,
    ):
        noise = np.random.default_rng(3).integers(1, 256, nbytes, dtype=np.uint8)
        source = {"gpu": torch.from_numpy(noise.copy()), "host": noise}
        target = {"gpu": torch.zeros(nbytes, dtype=torch.uint8), "host": np.zeros(nbytes, dtype=np.uint8)}
        for engine, memories in ((sender, source), (receiver, target)):
            for name, memory in memories.items():
                engine.register(name, memory=memory)
        yield Pair(sender, receiver, source, target)


def source_bytes(pair: Pair) -> bytes:
    return pair.source["host"].tobytes()


@pytest.mark.parametrize("path", ["copy", "shm", "tcp"])
@pytest.mark.parametrize(("source", "target"), [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")])
@pytest.mark.parametrize("checksums", ["on", "off"])
async def test_other_paths_stage_what_the_host_cannot_see(driver: Driver, path: str, source: str, target: str,
                                                          checksums: str) -> None:
    async with opened(path, checksums=checksums) as pair:
        result = await pair.push(pair.grant(target), source, target, (0, 1000, 3000), (7, 500_000, 400_000))
        assert result.ok and result.path == path and result.nbytes == 403_000
        expected, sent = bytearray(NBYTES), source_bytes(pair)
        expected[1000:4000], expected[500_000:900_000] = sent[:3000], sent[7:400_007]
        assert pair.bytes_at(target) == expected


@pytest.mark.parametrize("path", ["copy", "shm", "tcp", "nvlink"])
async def test_a_flipped_byte_in_memory_of_a_gpu_is_found(driver: Driver, path: str) -> None:
    async with opened(path, corrupt_every=2) as pair:
        result = await pair.push(pair.grant("gpu"), "gpu", "gpu", *((i * 1000, i * 2000, 1000) for i in range(4)))
        assert [type(status.error) for status in result.slices] == [type(None), ChecksumMismatch] * 2
        assert pair.receiver.statistics().corrupt_spans == 2


async def test_from_gpu_to_gpu_nothing_passes_through_the_host(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("staged")

    async with opened("nvlink", "tcp") as pair:
        monkeypatch.setattr(CudaMemory, "to_host", fail)
        monkeypatch.setattr(CudaMemory, "from_host", fail)
        grant = pair.grant("gpu")
        for offset in (0, 10_000):
            result = await pair.push(grant, "gpu", "gpu", (offset, offset, 10_000))
            assert result.ok and result.path == "nvlink"
        assert pair.bytes_at("gpu")[:20_000] == source_bytes(pair)[:20_000]
        assert driver.opened == 1, "the handle is opened once"
        assert pair.receiver.covered(OP, Range(segment="gpu", offset=0, length=20_000))
        assert pair.receiver.statistics().received_bytes == {"nvlink": 20_000}


async def test_a_push_larger_than_a_batch(driver: Driver) -> None:
    nbytes = 70 << 20
    async with opened("nvlink", nbytes=nbytes) as pair:
        result = await pair.push(pair.grant("gpu", nbytes), "gpu", "gpu", (0, 0, nbytes))
        assert result.ok and pair.bytes_at("gpu") == source_bytes(pair)


async def test_what_lands_in_the_host_comes_straight_from_the_gpu(driver: Driver) -> None:
    async with opened("nvlink", "tcp") as pair:
        result = await pair.push(pair.grant("host"), "gpu", "host", (0, 5, 1000))
        assert result.ok and result.path == "nvlink"
        assert pair.bytes_at("host")[5:1005] == source_bytes(pair)[:1000]


async def test_bytes_of_the_host_take_another_path(driver: Driver) -> None:
    async with opened("nvlink", "shm") as pair:
        grant = pair.grant("gpu")
        assert (await pair.push(grant, "host", "gpu", (0, 0, 1000))).path == "shm"
        assert (await pair.push(grant, "gpu", "gpu", (0, 0, 1000))).path == "nvlink"
        assert (await pair.push(grant, "host", "gpu", (0, 0, 1000))).path == "shm"


async def test_a_handle_that_cannot_be_opened_costs_the_path_not_the_push(driver: Driver) -> None:
    driver.no_opening = "invalid device ordinal"
    async with opened("nvlink", "shm") as pair:
        result = await pair.push(pair.grant("gpu"), "gpu", "gpu", (0, 0, 1000))
        assert result.ok and result.path == "shm"
        assert pair.bytes_at("gpu")[:1000] == source_bytes(pair)[:1000]
        assert pair.sender.statistics().failovers == {("nvlink", "shm"): 1}
        assert pair.receiver.statistics().dropped_connections["protocol"] >= 1


async def test_a_grant_is_looked_at_before_anything_is_copied(driver: Driver) -> None:
    async with opened("nvlink") as pair:
        forged = msgspec.structs.replace(pair.grant("gpu"), token=b"\0" * 32)
        assert isinstance((await pair.push(forged, "gpu", "gpu", (0, 0, 1000))).error, GrantRefused)
        assert pair.bytes_at("gpu") == bytes(NBYTES)


async def test_an_engine_with_a_gpu_says_so_once_it_has_memory_there(driver: Driver) -> None:
    async with TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"),
                                   settings=TransferSettings(paths=("nvlink", "shm"))) as engine:
        assert not engine.endpoint.nvlink
        engine.register("host", 4096)
        assert not engine.endpoint.nvlink
        engine.register("gpu", memory=torch.zeros(10))
        first = engine.endpoint.nvlink
        assert "#uuid-1#uuid-1" in first and engine.endpoint.shm
        engine.register("more", memory=torch.zeros(10))
        assert engine.endpoint.nvlink == first


async def test_memory_on_a_second_gpu_is_a_bug(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    async with TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"),
                                   settings=TransferSettings(paths=("nvlink",))) as engine:
        engine.register("gpu", memory=torch.zeros(10))
        device = driver.probe().devices[0]
        other = CudaDevice(device.index, "two", "uuid-2", ("uuid-2",))
        monkeypatch.setattr(cuda, "probe", lambda: CudaProbe((other,)))
        with pytest.raises(Bug, match="on another"):
            engine.register("more", memory=torch.zeros(10))


async def test_unregistered_memory_is_let_go_by_both_ends(driver: Driver) -> None:
    async with opened("nvlink") as pair:
        assert (await pair.push(pair.grant("gpu"), "gpu", "gpu", (0, 0, 1000))).ok
        assert len(driver.memories) == 1
        pair.source.clear()
        await pair.sender.unregister("gpu")
        await eventually(lambda: gc.collect() >= 0 and not driver.memories)
        assert pair.receiver.statistics().connections == 1
        await asyncio.wait_for(pair.receiver.release(OP), 5)
