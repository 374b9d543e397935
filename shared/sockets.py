"""Unix sockets in the file system: where they lie, and what becomes of those whose process was killed."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

PREFIX = "moonbus-sockets-"
_YOUNG_S = 60.0
"""What is younger may belong to a process that is about to use it."""


def private_directory() -> str:
    """A new one, whose owner removes it."""
    remove_left()
    return tempfile.mkdtemp(prefix=PREFIX)


class SharedDirectory:
    """A private directory for the sockets of several processes, which outlives all of them.

    Leaving its context removes it with all that is in it; so does whoever comes next if this process is killed.
    """

    def __init__(self) -> None:
        self.path = private_directory()
        self._owner = socket.socket(socket.AF_UNIX)
        try:  # while it lives, an old directory is not a left one
            self._owner.bind(os.path.join(self.path, "owner.sock"))
        except OSError:
            self.__exit__()
            raise

    def __enter__(self) -> SharedDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self._owner.close()
        shutil.rmtree(self.path, ignore_errors=True)


def remove_left() -> None:
    """Removes the directories that killed processes of this user left."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            left = _is_old(directory)
            sweep(directory)
            if left:
                directory.rmdir()
        except OSError:  # it is in use, another user's, or gone already
            continue


def sweep(directory: Path) -> None:
    """Removes the sockets (``*.sock``) to which no process answers any more."""
    for path in directory.glob("*.sock"):
        try:
            if _is_old(path) and is_dead(path):
                path.unlink()
        except OSError:  # another user's, or gone already
            continue


def is_dead(path: Path) -> bool:
    """Does no process hold the socket? One that does is not disturbed: a datagram cannot connect to a stream."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def _is_old(path: Path) -> bool:
    return time.time() - os.lstat(path).st_mtime > _YOUNG_S
