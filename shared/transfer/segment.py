"""Registered memory: an anonymous file in RAM, so that its descriptor can be handed to another process."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from shared.errors import Bug


class Segment:
    """``nbytes`` of zeroed memory under ``name``; pages are allocated when first touched.

    ``buffer`` is a writable view for the owner (``torch.frombuffer``, ``numpy.frombuffer``). The memory itself
    lives until the last view of it dies; after :meth:`close` nobody new can map it.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        if nbytes <= 0:
            raise Bug(f"segment {name} cannot have {nbytes} bytes")
        self.name, self.nbytes = name, nbytes
        self.fd = os.memfd_create(f"moonbus-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            # A peer that maps the file must not be able to shrink it under us (SIGBUS).
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapped = mmap.mmap(self.fd, nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        # Only views hold the mapping: it goes with the last of them, whoever has it.
        self.buffer = memoryview(mapped)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)

    def close(self) -> None:
        """Closes the descriptor and drops our views. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.array = np.empty(0, dtype=np.uint8)
            self.buffer = memoryview(b"")


class MappedSegment:
    """A peer's segment, mapped from the descriptor it handed out. Takes ownership of ``fd``."""

    def __init__(self, fd: int) -> None:
        try:
            nbytes = os.fstat(fd).st_size
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"segment of {nbytes} bytes could shrink under us")
            self.array: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Drops our view, and with it the mapping."""
        self.array = np.empty(0, dtype=np.uint8)
