"""What the programs here share: they end with whoever started them, nobody outside reaches them, they speak JSON.

Only the standard library: it runs under any interpreter, without moonbus.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_FLAGS = "16sh14x"
"""struct ifreq with the flags of an interface"""


class Talk:
    """Lines of JSON on the stdin and stdout we were given; whatever libraries print goes to stderr."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)

    def say(self, value: object) -> None:
        """One line, at once."""
        os.write(self._out, json.dumps(value).encode() + b"\n")

    def hear(self) -> Any:
        """The next line's value; ``None`` at the end."""
        return parse(sys.stdin.buffer.readline())


def parse(line: bytes) -> Any:
    """A line's value; ``None`` for the end."""
    return json.loads(line) if line else None


def die_with_parent() -> None:
    """SIGKILL once whoever started us is gone; a thread stuck in a library cannot prevent it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def network() -> bool:
    """Moves this process, and those it starts, into a network of their own that has only a loopback.

    The servers here listen on every interface whatever they are told. False where the kernel does not let us; call
    it while there is one thread.
    """
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWNET) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        _, flags = struct.unpack(_FLAGS, fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack(_FLAGS, b"lo", 0)))
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack(_FLAGS, b"lo", flags | _IFF_UP))
    return True


def leave(children: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    """Ends ``children`` and this process without the libraries' own clean-up, which takes a second or more."""
    for child in children:
        child.kill()
        child.wait()
    os._exit(0)


if __name__ == "__main__":  # confine.py PROGRAM ARGUMENTS: becomes the program, which then ends with its parent
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])
