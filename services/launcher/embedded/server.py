"""A server as a child process: started on some port, watched, and stopped within a bound."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.launcher.ports import free_port
from shared.errors import Unavailable, UserError

HOST = "127.0.0.1"
READY_S = 30.0
"""Longest time a server may take until it answers."""
STOP_S = 10.0
"""Longest time of an orderly stop; then the server is killed."""
LEFTOVER_S = 5.0
"""How long to wait for the former server of a data directory: its parent may just have been killed."""
TRIES = 5
"""Ports tried when the free one that was found is taken by the time the server wants it."""
POLL_S = 0.02

# Runs between fork and the server: gives up root, asks the kernel to signal the server when its parent dies, and
# becomes the server. A separate interpreter rather than preexec_fn, which is unsafe in a process with threads.
GUARD = """
import os, sys
parent, death_signal, uid, gid = (int(value) for value in sys.argv[1:5])
libc = None
if sys.platform == "linux":
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
if uid:
    os.setgroups([]); os.setgid(gid); os.setuid(uid)
# After setuid, which clears it; ctypes is loaded before, since the interpreter may be out of reach by now.
if libc is not None and libc.prctl(1, death_signal, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl")
if os.getppid() != parent:
    sys.exit("the parent is gone")
os.execv(sys.argv[5], sys.argv[5:])
"""


@dataclass(frozen=True)
class Account:
    """Whom a server runs as; uid 0 means as we are."""

    name: str
    uid: int
    gid: int


OURSELVES = Account(name="", uid=0, gid=0)


class Process:
    """A running server, its log file and the lock on its data directory."""

    def __init__(self, what: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._what, self._popen, self._log = what, popen, log

    @classmethod
    def spawn(cls, what: str, command: Sequence[str], *, log: Path, lock: int, death_signal: signal.Signals,
              account: Account = OURSELVES, env: Mapping[str, str] | None = None) -> Process:
        """Starts ``command``; it inherits ``lock``, so the lock lives as long as the server does."""
        with log.open("wb") as sink:
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), str(int(death_signal)),
                 str(account.uid), str(account.gid), *command],
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, pass_fds=(lock,), start_new_session=True,
                cwd="/", env={**os.environ, **(env or {})},
            )
        return cls(what, popen, log)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """``None`` while it runs."""
        return self._popen.poll()

    def said(self) -> str:
        """The end of its log, on one line."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-5:])

    async def wait_ready(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Waits until ``is_ready``; raises ``Exited`` when it ended, ``Unavailable`` after ``READY_S``."""
        deadline_s = time.monotonic() + READY_S
        while True:
            if self.returncode is not None:
                raise Exited(self.said())
            if await is_ready():
                return
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self._what} did not get ready within {READY_S:g} s; it said: {self.said()} "
                                  f"(log: {self._log})")
            await asyncio.sleep(POLL_S)

    async def stop(self, gentle: signal.Signals, *, grace_s: float = STOP_S) -> None:
        """Ends it: ``gentle`` first, a kill after ``grace_s`` seconds. Also when cancelled meanwhile."""
        try:
            if self.returncode is None:
                self._popen.send_signal(gentle)
            deadline_s = time.monotonic() + grace_s
            # NOTE: polled because a process ends without telling every kind of loop.
            while self.returncode is None and time.monotonic() < deadline_s:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        finally:
            if self.returncode is None:
                self._popen.kill()
                self._popen.wait(STOP_S)


class Exited(Exception):
    """The server ended while it was to start; carries what it said last."""


async def lock_of(what: str, directory: Path) -> int:
    """Descriptor that locks ``directory``; raises ``UserError`` when a server lives there."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + LEFTOVER_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                os.close(descriptor)
                raise UserError(f"{what} already runs in {directory}; stop that one (is another `moonbus up` "
                                "running?) or set MOONBUS_DATA_DIR to another directory") from None
            await asyncio.sleep(POLL_S)
        except BaseException:
            os.close(descriptor)
            raise


def refuse_taken(what: str, port: int) -> None:
    """Raises ``UserError`` when somebody listens on ``port`` already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
            raise UserError(f"port {HOST}:{port} for {what} {why}; stop what uses it, or start `moonbus up` anew, "
                            "which takes a free one") from error


async def start_on_some_port(port: int, start: Callable[[int], Awaitable[Process]]) -> tuple[Process, int]:
    """Starts on ``port``, or on a free one when it is 0. Raises ``Exited`` when it would not start."""
    for tries_left in reversed(range(TRIES if port == 0 else 1)):
        chosen = port or free_port(HOST)
        try:
            return await start(chosen), chosen
        except Exited as ended:
            if not tries_left or "in use" not in str(ended):
                raise
    raise AssertionError("unreachable")


class Server:
    """What both servers are to those who run them."""

    _process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id; ``None`` while stopped."""
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        """The process is there."""
        return self._process is not None and self._process.returncode is None
