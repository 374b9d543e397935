"""The thin layer between the slot files and the operating system. Tests put faults in by wrapping it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Codes of an ``OSError`` that mean: no room, which is no fault of the device."""


class File(Protocol):
    """A file that is read and written in place. All calls block, hold no lock and may raise ``OSError``."""

    def size(self) -> int:
        """Bytes, holes included."""
        ...

    def read(self, buffer: memoryview, offset: int) -> int:
        """Fills ``buffer`` from ``offset`` on; how many bytes there were (fewer only at the end of the file)."""
        ...

    def write(self, buffer: bytes | memoryview, offset: int) -> None:
        """Writes all of ``buffer`` at ``offset``."""
        ...

    def allocate(self, nbytes: int) -> None:
        """Makes the file at least ``nbytes`` long, with room on the disk for all of it."""
        ...

    def truncate(self, nbytes: int) -> None:
        """Makes the file exactly ``nbytes`` long."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Files(Protocol):
    """Opens files."""

    def open(self, path: Path) -> File:
        """``path`` for reading and writing; made when there is none."""
        ...


class DiskFile:
    """A file of the operating system; reads and writes go straight to and from the caller's memory, without the GIL."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, buffer: memoryview, offset: int) -> int:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def write(self, buffer: bytes | memoryview, offset: int) -> None:
        view, done = memoryview(buffer), 0
        while done < len(view):
            done += os.pwritev(self._fd, [view[done:]], offset + done)

    def allocate(self, nbytes: int) -> None:
        begin = self.size()
        if begin >= nbytes:
            return
        try:
            os.posix_fallocate(self._fd, begin, nbytes - begin)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self._fd, nbytes)  # a file system that cannot promise room: writes will tell

    def truncate(self, nbytes: int) -> None:
        os.ftruncate(self._fd, nbytes)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DiskFiles:
    """The operating system's files."""

    def open(self, path: Path) -> File:
        return DiskFile(path)
