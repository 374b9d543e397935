"""CUDA memory: staging through the host, and handles by which another process reaches it. Untested on hardware.

The one module of the transfer engine that knows torch, and it imports torch only inside of what needs it, so a process
without torch or without a GPU can import it and ask :func:`probe`.

Paths that move host memory (``shm``, ``tcp``, and ``rdma`` where the cards cannot reach it) stage it: pinned buffers on
a side stream, so that the engine's own stream goes on computing. The path ``nvlink`` hands a handle to the
other process (CUDA IPC), which copies from device to device; RDMA's cards reach it by dma-buf or peer memory where
driver and cards let them (see ``device``). Either way bytes that are sent must be complete, or
queued on the device's default stream, when the push begins; side streams wait for that one.

Staging does not depend on the device: the tests run it with CPU tensors.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from shared.errors import Bug
from shared.transfer.device import CardFacts, DeviceMemory, DmaBuf

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Tensor  # for the other modules, which know no torch

STAGE_BYTES = 4 << 20
"""One of the two buffers through which a segment is staged: while one is filled, the other is emptied."""
MAX_HANDLE_BYTES = 64 << 10
"""Memory that grows in place (expandable segments) has a handle of some bytes for every 20 MB."""

PAGE_BYTES = mmap.PAGESIZE
_DMA_BUF_SUPPORTED, _RANGE_AS_DMA_BUF, _SYNC_MEMOPS = 124, 1, 6
"""CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS"""
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
_DEVICE_FILES = ("nvidia[0-9]*", "dxg")
_COUNTERS = 10_000
"""Length of the file of reference counts that torch keeps beside shared CUDA memory."""
_COUNTER_FILE = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU as this process sees it."""

    index: int
    name: str
    uuid: str
    """The same in every process of the host, unlike ``index``."""
    reaches: tuple[str, ...]
    """Identities of the GPUs whose memory it can read directly; its own is one."""


@dataclass(frozen=True, slots=True)
class CudaProbe:
    """The GPUs, or why there is none."""

    devices: tuple[CudaDevice, ...] = ()
    reason: str = ""

    def named(self, uuid: str) -> CudaDevice | None:
        """The device with that identity, if this process sees it."""
        return next((device for device in self.devices if device.uuid == uuid), None)


def probe(device_files: Path = Path("/dev")) -> CudaProbe:
    """What this process can use. Imports torch only where the driver shows a device; raises nothing."""
    if not any(True for pattern in _DEVICE_FILES for _ in device_files.glob(pattern)):
        return CudaProbe(reason="no CUDA device")
    try:
        cuda = _cuda()
    except ImportError:
        return CudaProbe(reason="no CUDA device can be used: torch is not installed")
    if not cuda.is_available():
        return CudaProbe(reason="no CUDA device can be used: torch finds none")
    return CudaProbe(tuple(_device(cuda, index) for index in range(cuda.device_count())))


def _cuda() -> Any:
    """The module ``torch.cuda``, which has no complete types."""
    import torch

    return torch.cuda


def _device(cuda: Any, index: int) -> CudaDevice:
    reached = [other for other in range(cuda.device_count())
               if other == index or cuda.can_device_access_peer(index, other)]
    return CudaDevice(index, cuda.get_device_name(index), _uuid(cuda, index),
                      tuple(_uuid(cuda, other) for other in reached))


def _uuid(cuda: Any, index: int) -> str:
    return str(cuda.get_device_properties(index).uuid)


def is_cuda_tensor(memory: object) -> bool:
    """Is it a tensor in a GPU's memory? Does not import torch: who has a tensor has done so."""
    return hasattr(memory, "data_ptr") and getattr(getattr(memory, "device", None), "type", "") == "cuda"


class SideStream:
    """Copies beside a device's own work, after what its default stream was given before; on a CPU, at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = _cuda()
        self._stream = self._cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Begins to copy; call the result to wait until the bytes are there. Other threads run meanwhile."""
        if self._stream is None:
            target.copy_(source)
            return _nothing
        self._stream.wait_stream(self._cuda.default_stream(self._device))
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._cuda.Event(blocking=True)
            event.record(self._stream)
        arrived: Callable[[], None] = event.synchronize
        return arrived


class CudaMemory(DeviceMemory):
    """A registered tensor on ``device``."""

    def __init__(self, tensor: torch.Tensor, *, stage_bytes: int = STAGE_BYTES) -> None:
        import torch

        if not tensor.is_contiguous() or not tensor.numel():
            raise Bug(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is no run of bytes")
        self.bytes = tensor.detach().view(-1).view(torch.uint8)
        """uint8[nbytes] on ``device``, the tensor's own memory."""
        self.nbytes = self.bytes.numel()
        self.device = tensor.device
        self._stream = SideStream(self.device)
        self._stages = [torch.empty(min(stage_bytes, self.nbytes), dtype=torch.uint8,
                                    pin_memory=self.device.type == "cuda") for _ in range(2)]
        self._views: list[npt.NDArray[np.uint8]] = [stage.numpy() for stage in self._stages]
        self._lock = threading.Lock()

    def to_host(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        length = len(out)
        self._check(offset, length)
        if (pinned := _pinned(out)) is not None:
            self._stream.copy(pinned, self.bytes[offset:offset + length])()
            return
        with self._lock:
            before: Callable[[], None] = _nothing
            for i, start, stop in self._parts(length):
                arrived = self._stream.copy(self._stages[i][:stop - start], self.bytes[offset + start:offset + stop])
                before()
                before = _then(arrived, out[start:stop], self._views[i][:stop - start])
            before()

    def from_host(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        self._check(offset, len(data))
        if (pinned := _pinned(data)) is not None:
            self._stream.copy(self.bytes[offset:offset + len(data)], pinned)()
            return
        with self._lock:
            pending: list[Callable[[], None]] = [_nothing, _nothing]
            for i, start, stop in self._parts(len(data)):
                pending[i]()
                self._views[i][:stop - start] = data[start:stop]
                pending[i] = self._stream.copy(self.bytes[offset + start:offset + stop],
                                               self._stages[i][:stop - start])
            for arrived in pending:
                arrived()

    def copy_from(self, offset: int, source: torch.Tensor) -> Callable[[], None]:
        """Begins to copy ``source``, uint8[n] on any device, to ``[offset, offset + n)``; call the result to wait."""
        self._check(offset, len(source))
        return self._stream.copy(self.bytes[offset:offset + len(source)], source)

    def part(self, offset: int, length: int) -> torch.Tensor:
        """``[offset, offset + length)`` to read from, once what the default stream was given is done."""
        self.settle()
        return self.bytes[offset:offset + length]

    def settle(self) -> None:
        if self.device.type == "cuda":
            _cuda().default_stream(self.device).synchronize()

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        import torch

        staging: npt.NDArray[np.uint8] = torch.empty(
            nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda").numpy()
        return staging

    def card_facts(self) -> CardFacts:
        return card_facts(self.device.index or 0)

    def dma_buf(self) -> DmaBuf:
        address = int(self.bytes.data_ptr())
        start = address // PAGE_BYTES * PAGE_BYTES
        stop = -(-(address + self.nbytes) // PAGE_BYTES) * PAGE_BYTES
        with _cuda().device(self.device):
            driver = Driver()
            driver.order_copies(address)
            return DmaBuf(driver.dma_buf(start, stop - start), address - start)

    def peer_address(self) -> int:
        address = int(self.bytes.data_ptr())
        with _cuda().device(self.device):
            Driver().order_copies(address)
        return address

    def handle(self) -> DeviceHandle:
        """Leave for one other process to read all of it. CUDA memory only; raises ``RuntimeError`` elsewhere."""
        with self._lock:
            storage: Any = self.bytes.untyped_storage()
            index, memory, nbytes, offset, counter, counter_offset, event, wait = storage._share_cuda_()
        return DeviceHandle(_uuid(_cuda(), index), memory, nbytes, offset, counter, counter_offset, event, wait,
                            int(self.bytes.storage_offset()), self.nbytes)

    def _parts(self, length: int) -> list[tuple[int, int, int]]:
        """(stage, start, stop) of every part of ``length`` bytes."""
        size = len(self._stages[0])
        return [(i % 2, start, min(start + size, length)) for i, start in enumerate(range(0, length, size))]

    def _check(self, offset: int, length: int) -> None:
        if not 0 <= offset <= offset + length <= self.nbytes:
            raise Bug(f"bytes {offset}..{offset + length} of {self.nbytes} on {self.device}")


Size = Annotated[int, Meta(ge=0, lt=2**53)]
Blob = Annotated[bytes, Meta(max_length=MAX_HANDLE_BYTES)]


class DeviceHandle(msgspec.Struct, frozen=True, array_like=True):
    """How another process of this host opens a :class:`DeviceMemory`; torch's own description of shared CUDA memory.

    It names an allocation to the driver; nothing in it is an address. ``start`` and ``length`` say which
    bytes of the tensor's storage it is about.
    """

    device: Annotated[str, Meta(max_length=64)]
    memory: Blob
    storage_bytes: Size
    storage_offset: Size
    counter: Blob
    counter_offset: Size
    event: Blob
    event_wait: bool
    start: Size
    length: Size

    def check(self) -> None:
        """Raises ``ValueError`` unless torch may be trusted with it: it writes where ``counter`` says."""
        if not _COUNTER_FILE.fullmatch(self.counter) or self.counter_offset >= _COUNTERS:
            raise ValueError(f"handle with reference count {self.counter_offset} in {self.counter!r}")
        if not self.memory or not self.length or self.start + self.length > self.storage_bytes:
            raise ValueError(f"handle of bytes {self.start}..{self.start + self.length} of {self.storage_bytes}")


def open_handle(handle: DeviceHandle) -> torch.Tensor:
    """The memory of another process, uint8[handle.length] on the GPU where it lies.

    Raises ``ValueError`` for a handle that is none or of a GPU that this process does not see, ``RuntimeError`` for
    what CUDA does not open.
    """
    handle.check()
    device = probe().named(handle.device)
    if device is None:
        raise ValueError(f"it lies on GPU {handle.device}, which this process does not see")
    import torch

    cuda = _cuda()
    cuda.init()
    with cuda.device(device.index):  # torch lets its current stream wait for the event in the handle
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index, handle.memory, handle.storage_bytes, handle.storage_offset, handle.counter,
            handle.counter_offset, handle.event, handle.event_wait)
        empty = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device.index))
        return empty.set_(storage, handle.start, (handle.length,), (1,))


def _pinned(memory: npt.NDArray[np.uint8]) -> torch.Tensor | None:
    """``memory`` as a tensor, if a device copies to and from it without help."""
    import torch

    if not _cuda().is_initialized() or not memory.flags.writeable:
        return None
    tensor = torch.from_numpy(memory)
    return tensor if tensor.is_pinned() else None


class Driver:
    """The CUDA driver's own library, for what torch has no call for. Raises ``OSError``.

    Untested on hardware; the tests put a library in its place. The calls are about the current context, which
    torch's device guard sets.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library if library is not None else ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", ctypes.c_uint(0))

    def exports_dma_buf(self, index: int) -> bool:
        """Can memory of that device be exported?"""
        device, value = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_DMA_BUF_SUPPORTED), device)
        return bool(value.value)

    def dma_buf(self, address: int, nbytes: int) -> int:
        """A new descriptor of whole pages of device memory."""
        descriptor = ctypes.c_int(-1)
        self._call("cuMemGetHandleForAddressRange", ctypes.byref(descriptor), ctypes.c_uint64(address),
                   ctypes.c_size_t(nbytes), ctypes.c_int(_RANGE_AS_DMA_BUF), ctypes.c_uint64(0))
        return descriptor.value

    def order_copies(self, address: int) -> None:
        """Copies from and to that memory are over when they return: cards read and write it between them."""
        self._call("cuPointerSetAttribute", ctypes.byref(ctypes.c_uint(1)), ctypes.c_int(_SYNC_MEMOPS),
                   ctypes.c_uint64(address))

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise OSError(errno.ENOSYS, f"this driver has no {name}")
        code = function(*arguments)
        if code:
            raise OSError(errno.EIO, f"{name} fails with CUDA's error {code}")


def card_facts(index: int, *, driver: Callable[[], Driver] = Driver, modules: Path = Path("/sys/module")) -> CardFacts:
    """What lets network cards reach memory of that device. Raises nothing."""
    try:
        no_dma_buf = "" if driver().exports_dma_buf(index) else "this driver exports none"
    except OSError as error:
        no_dma_buf = error.strerror or str(error)
    no_peer = "" if any((modules / name).exists() for name in _PEER_MODULES) else "nvidia_peermem is not loaded"
    return CardFacts(no_dma_buf, no_peer)


def copy_to_host(out: npt.NDArray[np.uint8], source: torch.Tensor) -> None:
    """Copies ``source``, uint8[n] on any device, into ``out``, uint8[n]; returns when it is there."""
    import torch

    torch.from_numpy(out).copy_(source)


def _nothing() -> None:
    """Copies on a CPU are done when they return."""


def _then(arrived: Callable[[], None], out: npt.NDArray[np.uint8],
          stage: npt.NDArray[np.uint8]) -> Callable[[], None]:
    def take() -> None:
        arrived()
        out[:] = stage

    return take
