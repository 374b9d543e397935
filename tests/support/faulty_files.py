"""Files that do what disks do on bad days: fail, fill up, stall, tear."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, field
from pathlib import Path

from shared.store.ssd.files import DiskFile, File


@dataclass
class FaultyFiles:
    """Real files; the faults hold for all of them from when they are set."""

    read_errno: int = 0
    write_errno: int = 0
    allocate_errno: int = 0
    disk_bytes: int = 0
    """No file may be longer, unless it is 0: the disk is full then."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Reads and writes of blocks wait for it."""
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Counts the calls that reached the gate while it was shut."""
    failures: int = 0
    """Calls that failed on purpose."""
    log: list[tuple[str, int, bytes]] = field(default_factory=list)
    """(file name, offset, bytes) of every write, in order."""

    def __post_init__(self) -> None:
        self.gate.set()

    def open(self, path: Path) -> File:
        return _FaultyFile(path, self)

    def fail(self, code: int) -> None:
        if code:
            self.failures += 1
            raise OSError(code, "injected")

    def wait(self) -> None:
        if not self.gate.is_set():
            self.entered.release()
            self.gate.wait()


class _FaultyFile(DiskFile):
    def __init__(self, path: Path, faults: FaultyFiles) -> None:
        super().__init__(path)
        self._name, self._faults = path.name, faults

    def read(self, buffer: memoryview, offset: int) -> int:
        self._faults.wait()
        self._faults.fail(self._faults.read_errno)
        return super().read(buffer, offset)

    def write(self, buffer: bytes | memoryview, offset: int) -> None:
        self._faults.wait()
        self._faults.fail(self._faults.write_errno)
        self._faults.log.append((self._name, offset, bytes(buffer)))
        super().write(buffer, offset)

    def allocate(self, nbytes: int) -> None:
        self._faults.fail(self._faults.allocate_errno)
        if self._faults.disk_bytes and nbytes > self._faults.disk_bytes:
            self._faults.fail(errno.ENOSPC)
        super().allocate(nbytes)

