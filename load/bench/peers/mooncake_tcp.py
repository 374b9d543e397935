"""Mooncake's TransferEngine over TCP between two processes; runs where its wheel is installed.

Greeting ``{"pids": [sender, receiver], "confined": bool}``; question ``{"nbytes": n, "seconds": s}``; answer
``{"seconds": [of each write]}``. Ends with its stdin, or with the process that started it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from load.bench.peers import confine
else:
    import confine  # it lies beside this file, and moonbus is not installed here

HOST = confine.HOST
LEAST_WRITES = 3


def open_engine(nbytes: int) -> tuple[Any, mmap.mmap, int]:
    """The engine, and memory registered with it: mapping and address."""
    engine = import_module("mooncake.engine").TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit("TransferEngine.initialize failed")
    memory = mmap.mmap(-1, nbytes)
    memory[:] = bytes(nbytes)  # pages exist from now on
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if engine.register_memory(address, nbytes):
        raise SystemExit("TransferEngine.register_memory failed")
    return engine, memory, address


def receive(talk: confine.Talk, nbytes: int) -> list[subprocess.Popen[bytes]]:
    """Says where its memory is and lets it be written; answers the processes it started."""
    engine, _memory, address = open_engine(nbytes)
    talk.say({"port": engine.get_rpc_port(), "address": address})
    while talk.hear() is not None:
        pass
    return []


def send(talk: confine.Talk, nbytes: int) -> list[subprocess.Popen[bytes]]:
    """Answers questions; in the end, the processes it started."""
    confined = confine.network()
    command = [sys.executable, __file__, "receive", str(nbytes)]
    receiver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    there = confine.parse(receiver.stdout.readline())
    if there is None:
        raise SystemExit("the receiving process ended")
    engine, memory, address = open_engine(nbytes)
    memory[:] = b"\x07" * nbytes
    peer = f"{HOST}:{there['port']}"
    talk.say({"pids": [os.getpid(), receiver.pid], "confined": confined})
    while (question := talk.hear()) is not None:
        until_s = time.perf_counter() + question["seconds"]
        taken: list[float] = []
        while len(taken) < LEAST_WRITES or time.perf_counter() < until_s:
            started_s = time.perf_counter()
            status = engine.transfer_sync_write(peer, address, there["address"], question["nbytes"])
            taken.append(time.perf_counter() - started_s)
            if status:
                raise SystemExit(f"transfer_sync_write of {question['nbytes']} bytes answered {status}")
        talk.say({"seconds": taken})
    return [receiver]


if __name__ == "__main__":
    confine.die_with_parent()
    confine.leave((receive if sys.argv[1] == "receive" else send)(confine.Talk(), int(sys.argv[2])))
