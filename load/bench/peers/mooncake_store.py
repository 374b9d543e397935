"""Mooncake's store over TCP: values kept by another process, put and got with its zero-copy calls.

Three processes: a ``mooncake_master``, an owner whose client lends memory, and ours, whose client lends none and
registers its own. Runs where its wheel is installed.

Greeting ``{"pids": [client, owner], "confined": bool}``; question ``{"what": "put" | "get", "nbytes": n, "batch": n,
"seconds": s}``; answer ``{"seconds": [of each call]}``. Ends with its stdin, or with the process that started it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
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


def open_store(master: str, lend_bytes: int, buffer_bytes: int) -> Any:
    """A client of the store that lends so much memory."""
    store = import_module("mooncake.store").MooncakeDistributedStore()
    confine.check("setup", store.setup(HOST, "P2PHANDSHAKE", lend_bytes, buffer_bytes, "tcp", "", master))
    return store


def own(talk: confine.Talk, master: str, lend_bytes: int) -> list[subprocess.Popen[bytes]]:
    """Lends memory until nobody listens any more."""
    store = open_store(master, lend_bytes, 16 << 20)
    talk.say({})
    while talk.hear() is not None:
        pass
    del store
    return []


class Client:
    """Two buffers of ``nbytes``, the first full of noise, and a store that another process lends ``lend_bytes``."""

    def __init__(self, nbytes: int, lend_bytes: int) -> None:
        server, master = confine.serve_master(Path(import_module("mooncake").__file__ or "").parent)
        self.servers = [server]
        self.owner = subprocess.Popen([sys.executable, __file__, "own", master, str(lend_bytes)],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.servers.append(self.owner)
        assert self.owner.stdout is not None
        if confine.parse(self.owner.stdout.readline()) is None:
            raise SystemExit("the process that lends memory ended")
        self.store = open_store(master, 0, 16 << 20)
        self.nbytes = nbytes
        self._mappings = [mmap.mmap(-1, nbytes) for _ in range(2)]
        self._mappings[0][:] = random.Random(1).randbytes(nbytes)
        self._mappings[1][:] = bytes(nbytes)  # pages exist from now on
        self.source, self.landing = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self._mappings)
        for address in (self.source, self.landing):
            confine.check("register_buffer", self.store.register_buffer(address, nbytes))
        self._keys = 0

    def put(self, nbytes: int, batch: int, until_s: float) -> list[float]:
        """Seconds of each ``put_from`` (or batch of them) of new keys, out of one place after another; they are removed
        outside of them."""
        taken: list[float] = []
        while len(taken) < LEAST_CALLS or time.perf_counter() < until_s:
            keys, places = self._new_keys(batch), self._places(self.source, nbytes, batch, len(taken))
            started_s = time.perf_counter()
            self._put(keys, places, nbytes)
            taken.append(time.perf_counter() - started_s)
            for key in keys:
                confine.check("remove", self.store.remove(key, True))
        return taken

    def get(self, nbytes: int, batch: int, until_s: float) -> list[float]:
        """Seconds of each ``get_into`` (or batch of them), of one key after another into one place after another."""
        count = self.nbytes // nbytes
        keys, taken = self._new_keys(count), list[float]()
        for i, key in enumerate(keys):
            self._put([key], [self.source + i * nbytes], nbytes)
        while len(taken) < LEAST_CALLS or time.perf_counter() < until_s:
            first = len(taken) * batch % count
            some = [keys[(first + i) % count] for i in range(batch)]
            places = self._places(self.landing, nbytes, batch, len(taken))
            started_s = time.perf_counter()
            if batch == 1:
                received = [self.store.get_into(some[0], places[0], nbytes)]
            else:
                received = self.store.batch_get_into(some, places, [nbytes] * batch)
            taken.append(time.perf_counter() - started_s)
            if any(got != nbytes for got in received):
                raise SystemExit(f"get_into answered {received}")
        filled = min(count, len(taken) * batch) * nbytes
        if self._mappings[1][:filled] != self._mappings[0][:filled]:
            raise SystemExit("get_into delivered other bytes than put_from took")
        for key in keys:
            confine.check("remove", self.store.remove(key, True))
        return taken

    def _put(self, keys: list[str], places: list[int], nbytes: int) -> None:
        if len(keys) == 1:
            confine.check("put_from", self.store.put_from(keys[0], places[0], nbytes))
        else:
            for status in self.store.batch_put_from(keys, places, [nbytes] * len(keys)):
                confine.check("batch_put_from", status)

    def _places(self, base: int, nbytes: int, batch: int, call: int) -> list[int]:
        count = self.nbytes // nbytes
        return [base + (call * batch + i) % count * nbytes for i in range(batch)]

    def _new_keys(self, count: int) -> list[str]:
        self._keys += count
        return [f"bench-{self._keys - i}" for i in range(count)]


def serve(talk: confine.Talk, nbytes: int, lend_bytes: int) -> list[subprocess.Popen[bytes]]:
    """Answers questions; in the end, the processes it started."""
    confined = confine.network()
    client = Client(nbytes, lend_bytes)
    talk.say({"pids": [os.getpid(), client.owner.pid], "confined": confined})
    while (question := talk.hear()) is not None:
        call = client.put if question["what"] == "put" else client.get
        talk.say({"seconds": call(question["nbytes"], question["batch"], time.perf_counter() + question["seconds"])})
    return client.servers


if __name__ == "__main__":
    confine.die_with_parent()
    if sys.argv[1] == "own":
        confine.leave(own(confine.Talk(), sys.argv[2], int(sys.argv[3])))
    confine.leave(serve(confine.Talk(), int(sys.argv[1]), int(sys.argv[2])))
