"""Mooncake's path within a host: a client without resources of its own ("dummy") shares its memory with a client that
has them ("real"), which copies. Runs where its wheel is installed.

Greeting ``{"pids": [dummy, real], "confined": bool}``; question ``{"nbytes": n, "seconds": s, "what": "put" | "get"}``;
answer ``{"seconds": [of each call]}``. Ends with its stdin, or with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
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

HOST = confine.HOST
LEAST_CALLS = 3


class Store:
    """A master, a real client and our dummy client, with two buffers of ``nbytes`` in the shared memory."""

    def __init__(self, nbytes: int) -> None:
        binaries = Path(import_module("mooncake").__file__ or "").parent
        master, address = confine.serve_master(binaries)
        port = confine.free_port()
        self.real = confine.serve(
            binaries / "mooncake_client", port, f"-host={HOST}", f"-port={port}", f"-master_server_address={address}",
            "-metadata_server=P2PHANDSHAKE", f"-global_segment_size={8 * nbytes}")
        self.servers = [master, self.real]
        self.dummy: Any = import_module("mooncake.store").MooncakeDistributedStore()
        confine.check("setup_dummy", self.dummy.setup_dummy(4 * nbytes, nbytes, f"{HOST}:{port}"))
        self.source, self.landing = (self._buffer(nbytes, fill) for fill in (7, 1))
        self._keys = 0

    def _buffer(self, nbytes: int, fill: int) -> int:
        address = int(self.dummy.alloc_from_mem_pool(nbytes))
        confine.check("register_buffer", self.dummy.register_buffer(address, nbytes))
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
            confine.check("put_from", status)
            confine.check("remove", self.dummy.remove(key, True))
        return taken

    def get(self, nbytes: int, until_s: float) -> list[float]:
        """Seconds of each ``get_into`` of one object."""
        key, taken = self._new_key(), list[float]()
        confine.check("put_from", self.dummy.put_from(key, self.source, nbytes))
        while len(taken) < LEAST_CALLS or time.perf_counter() < until_s:
            started_s = time.perf_counter()
            received = self.dummy.get_into(key, self.landing, nbytes)
            taken.append(time.perf_counter() - started_s)
            if received != nbytes:
                raise SystemExit(f"get_into answered {received}")
        if ctypes.string_at(self.landing, nbytes) != ctypes.string_at(self.source, nbytes):
            raise SystemExit("get_into delivered other bytes than put_from took")
        confine.check("remove", self.dummy.remove(key, True))
        return taken

    def _new_key(self) -> str:
        self._keys += 1
        return f"bench-{self._keys}"


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
