"""Registered memory, and the memory of others that a descriptor opens."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import Bug
from shared.transfer import cuda
from shared.transfer.device import DeviceMemory, Way
from shared.transfer.frames import Span
from shared.transfer.native import Native

HUGE_PAGE_BYTES = 2 << 20
_serials = itertools.count(1)


class Segment:
    """``nbytes`` of memory under ``name``.

    ``buffer`` is a writable view for the owner (``torch.frombuffer``, ``numpy.frombuffer``), ``array`` the same as
    uint8. ``fd`` is an anonymous file that holds it, so that another process can map it, or -1 for memory of the
    caller's. The memory itself lives until the last view of it dies; after :meth:`close` nobody new can map it.
    ``serial`` is unique in this process: a later segment of the same name has another. ``mappable``: another process
    can map ``fd`` without fear of its end. ``staged``: bytes go in and out through other memory, which takes time.
    ``way``: how network cards get at a device's memory. ``gpu``: its memory, if it is CUDA's. ``native`` copies into
    it, if it is there.
    """

    staged = False
    way: Way | None = None
    gpu: cuda.CudaMemory | None = None
    native: Native | None = None

    def __init__(self, name: str, array: npt.NDArray[np.uint8], fd: int) -> None:
        self.name, self.array, self.fd = name, array, fd
        self.nbytes = len(array)
        self.buffer = array.data
        self.serial = next(_serials)
        self.mappable = fd >= 0 and bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)

    @classmethod
    def allocate(cls, name: str, nbytes: int, *, huge_pages: bool = False) -> Segment:
        """New zeroed memory; pages are allocated when first touched, huge ones when they are free and wanted."""
        if nbytes <= 0:
            raise Bug(f"segment {name} cannot have {nbytes} bytes")
        for fd, size in _files(f"moonbus-{name}", nbytes, huge_pages):
            try:
                os.ftruncate(fd, size)
                # A peer that maps the file must not be able to meet its end (SIGBUS).
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
                mapped = mmap.mmap(fd, size)
            except OSError:
                os.close(fd)
                if size % HUGE_PAGE_BYTES == 0 and huge_pages:
                    continue  # too few huge pages are free: ordinary ones serve as well
                raise
            return cls(name, np.frombuffer(mapped, dtype=np.uint8)[:nbytes], fd)
        raise Bug("an ordinary file is always tried")

    @classmethod
    def adopt(cls, name: str, memory: Any) -> Segment:
        """Memory that exists: a memfd (its descriptor, which stays the caller's), a CPU or CUDA tensor, other
        :class:`DeviceMemory`, or a writable contiguous buffer (numpy array, memoryview, bytearray); kept alive.

        Raises :class:`Bug` when it cannot be written, is not contiguous, is empty or none of these.
        """
        if isinstance(memory, int):
            try:
                nbytes = os.fstat(memory).st_size
            except OSError as error:
                raise Bug(f"memory of segment {name}: {memory} is no open descriptor") from error
            if nbytes <= 0:
                raise Bug(f"memory of segment {name} is an empty file")
            fd = os.dup(memory)
            try:
                return cls(name, np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8), fd)
            except BaseException:
                os.close(fd)
                raise
        if cuda.is_cuda_tensor(memory):
            memory = cuda.CudaMemory(memory)
        if isinstance(memory, DeviceMemory):
            return DeviceSegment(name, memory)
        array = _tensor_bytes(name, memory) if hasattr(memory, "data_ptr") else _buffer_bytes(name, memory)
        if not len(array):
            raise Bug(f"memory of segment {name} is empty")
        return cls(name, array, -1)

    def read(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """``[offset, offset + length)``: the memory itself, or a copy when it is staged."""
        return self.array[offset:offset + length]

    def read_parts(self, offset: int, span: Span) -> npt.NDArray[np.uint8]:
        """Parts like those of ``span``, the first at ``offset``, back to back; a copy unless there is but one."""
        if span.count == 1:
            return self.read(offset, span.length)
        return np.concatenate([self.read(offset + start - span.offset, span.length) for start, _ in span.parts()])

    def read_into(self, out: npt.NDArray[np.uint8], offset: int) -> None:
        """Copies ``[offset, offset + len(out))`` into ``out``."""
        out[:] = self.array[offset:offset + len(out)]

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Copies ``data`` to ``[offset, offset + len(data))``."""
        if self.native is None:
            self.array[offset:offset + len(data)] = data
        else:
            self.native.copy(self.array[offset:offset + len(data)], data, len(data), 1, 0)

    def write_parts(self, span: Span, data: npt.NDArray[np.uint8]) -> None:
        """Copies the parts of ``span`` out of ``data``, which begins with the first and ends with the last of them."""
        if span.count == 1:
            self.write(span.offset, data)
        elif self.native is not None:
            self.native.copy(self.array[span.offset:span.stop], data, span.length, span.count, span.stride)
        else:
            _rows(self.array, span.offset, span)[...] = _rows(data, 0, span)

    def landing(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Where to receive what belongs in ``[offset, offset + length)``; tell :meth:`landed` when it is there."""
        return self.array[offset:offset + length]

    def landed(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """``data``, from :meth:`landing`, is filled."""

    def fetch(self, offset: int, source: cuda.Tensor) -> Callable[[], None]:
        """Begins to copy ``source``, uint8[n] of a GPU, to ``[offset, offset + n)``; call the result to wait."""
        cuda.copy_to_host(self.array[offset:offset + len(source)], source)
        return _nothing

    def settle(self) -> None:
        """Returns once a device is done with what it was given to do with the memory: then others may read it."""

    def close(self) -> None:
        """Closes the descriptor and drops our views. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.array = np.empty(0, dtype=np.uint8)
        self.buffer = memoryview(b"")


class DeviceSegment(Segment):
    """Memory of a device: there is no view of it in the host (``array`` and ``buffer`` are empty)."""

    staged = True
    way: Way = Way.STAGED

    def __init__(self, name: str, memory: DeviceMemory) -> None:
        super().__init__(name, np.empty(0, dtype=np.uint8), -1)
        self.memory, self.nbytes = memory, memory.nbytes
        if isinstance(memory, cuda.CudaMemory):
            self.gpu = memory

    def read(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        out = np.empty(length, dtype=np.uint8)
        self.memory.to_host(offset, out)
        return out

    def read_into(self, out: npt.NDArray[np.uint8], offset: int) -> None:
        self.memory.to_host(offset, out)

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        self.memory.from_host(offset, data)

    def write_parts(self, span: Span, data: npt.NDArray[np.uint8]) -> None:
        for start, stop in span.parts():
            self.write(start, data[start - span.offset:stop - span.offset])

    def landing(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        return np.empty(length, dtype=np.uint8)

    def landed(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        self.memory.from_host(offset, data)

    def fetch(self, offset: int, source: cuda.Tensor) -> Callable[[], None]:
        if self.gpu is not None:
            return self.gpu.copy_from(offset, source)
        passing = np.empty(len(source), dtype=np.uint8)
        cuda.copy_to_host(passing, source)
        self.memory.from_host(offset, passing)
        return _nothing

    def settle(self) -> None:
        self.memory.settle()


def _rows(array: npt.NDArray[np.uint8], offset: int, span: Span) -> npt.NDArray[np.uint8]:
    """uint8[count, length], a part of ``span`` a row, the first at ``offset``; raises when it does not fit."""
    return np.ndarray((span.count, span.length), np.uint8, array, offset, (span.stride, 1))


class MappedSegment:
    """A peer's memory, mapped from the descriptor it handed over, to be read. Takes ownership of ``fd``."""

    def __init__(self, fd: int) -> None:
        try:
            nbytes = os.fstat(fd).st_size
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"memory of {nbytes} bytes could shrink under us")
            self.array: npt.NDArray[np.uint8] = np.frombuffer(
                mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), dtype=np.uint8)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Drops our view, and with it the mapping."""
        self.array = np.empty(0, dtype=np.uint8)


def _nothing() -> None:
    """What was copied at once needs no waiting."""


def _files(name: str, nbytes: int, huge_pages: bool) -> Iterator[tuple[int, int]]:
    """Descriptors to try in turn, each with the size the file must get."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_pages:
        try:
            yield (os.memfd_create(name, flags | os.MFD_HUGETLB),
                   -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        except OSError:
            pass  # a kernel without them
    yield os.memfd_create(name, flags), nbytes


def _tensor_bytes(name: str, tensor: Any) -> npt.NDArray[np.uint8]:
    """The bytes of a torch tensor, without torch: numpy does not know all of its dtypes."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise Bug(f"memory of segment {name} is not a contiguous CPU tensor")
    nbytes = tensor.numel() * tensor.element_size()
    view = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    view.owner = tensor  # numpy keeps the view, the view keeps the tensor
    return np.frombuffer(view, dtype=np.uint8)


def _buffer_bytes(name: str, memory: Any) -> npt.NDArray[np.uint8]:
    try:
        view = memoryview(memory)
    except TypeError as error:
        raise Bug(f"memory of segment {name} is of type {type(memory).__name__}: no tensor, no buffer, no descriptor "
                  f"of a memfd") from error
    if view.readonly or not view.c_contiguous or "O" in view.format:
        raise Bug(f"memory of segment {name} cannot be written, is not contiguous or holds Python objects")
    return np.frombuffer(view.cast("B"), dtype=np.uint8)
