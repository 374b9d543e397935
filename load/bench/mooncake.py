"""Mooncake's wheel beside us: its environment, and probes that run its programs there."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from load.bench.child import Child
from load.bench.limits import figures
from load.bench.processes import cpu_seconds
from load.bench.rounds import Probe
from shared.errors import UserError

_log = logging.getLogger(__name__)

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
_PEERS = Path(__file__).parent / "peers"
_ENV = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_LOG_LEVEL": "WARNING"}
_ANSWER_S = 30.0
"""Time beyond the measurement itself; a write that hangs costs it, and then its rows."""
_IMPORT_S = 60.0
_INSTALL_S = 600.0
_PACKAGE = "mooncake"
_IMPORT = f"import {_PACKAGE}.engine, {_PACKAGE}.store"


@dataclass(frozen=True, slots=True)
class Python:
    """The interpreter that imports the wheel: ``given``, or that of an environment made once under ``cache``."""

    given: Path | None
    cache: Path

    def ready(self) -> Path:
        """Its path, once it imports the wheel. Raises :class:`UserError` with what is missing."""
        python = self.given or _environment(self.cache)
        _require(python)
        return python


def _environment(cache: Path) -> Path:
    directory = cache / "peers" / WHEEL.replace("==", "-")
    python = directory / "bin" / "python"
    if not (directory / "installed").exists():
        _run([sys.executable, "-m", "venv", "--clear", str(directory)], f"cannot make {directory}")
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", WHEEL],
             f"cannot install {WHEEL} into {directory}")
        (directory / "installed").touch()
    return python


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{what}: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it gave no reason"]
        raise UserError(f"{what}: {said[-1]}")


def _require(python: Path) -> None:
    try:
        done = subprocess.run([str(python), "-c", _IMPORT], check=False, capture_output=True, text=True,
                              timeout=_IMPORT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} does not run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it gave no reason"]
        if f"No module named '{_PACKAGE}'" in said[-1]:
            raise UserError(f"{python} has no {WHEEL}; install it there")
        raise UserError(f"{WHEEL} does not load in {python}: {said[-1]}; it needs these libraries of the system: on "
                        "Debian and Ubuntu, sudo apt install libibverbs1 librdmacm1 libnuma1 libcurl4")


@asynccontextmanager
async def tcp_probes(python: Python, sizes: Mapping[str, int], seconds: float) -> AsyncIterator[list[Probe]]:
    """Writes of the TransferEngine from one process into another's memory. Raises :class:`UserError`."""
    async with _start("mooncake-tcp", python, "mooncake_tcp.py", "send", str(max(sizes.values()))) as child:
        yield [Probe(f"{child.name}/{label}", partial(_ask, child, {"nbytes": nbytes}, seconds))
               for label, nbytes in sizes.items()]


@asynccontextmanager
async def shm_probes(what: str, python: Python, sizes: Mapping[str, int], seconds: float) -> AsyncIterator[list[Probe]]:
    """``put`` into, or ``get`` out of, the process that shares our memory: one copy. Raises :class:`UserError`."""
    async with _start(f"mooncake-{what}", python, "mooncake_shm.py", str(max(sizes.values()))) as child:
        yield [Probe(f"{child.name}/{label}", partial(_ask, child, {"nbytes": nbytes, "what": what}, seconds))
               for label, nbytes in sizes.items()]


@asynccontextmanager
async def store_probes(python: Python, sizes: Mapping[str, int], seconds: float, *, region_bytes: int, pool_bytes: int,
                       batch_of: Callable[[int], int]) -> AsyncIterator[list[Probe]]:
    """Put and get of its store over TCP: the values lie with another process. Raises :class:`UserError`."""
    async with _start("mooncake", python, "mooncake_store.py", str(region_bytes), str(pool_bytes)) as child:
        yield [Probe(f"mooncake-{what}{'-batch' if batch > 1 else ''}/{label}",
                     partial(_ask, child, {"nbytes": nbytes, "what": what, "batch": batch}, seconds))
               for label, nbytes in sizes.items() for what in ("put", "get") for batch in (1, batch_of(nbytes))]


@asynccontextmanager
async def _start(name: str, python: Python, program: str, *arguments: str) -> AsyncIterator[Child]:
    command = [str(await asyncio.to_thread(python.ready)), str(_PEERS / program), *arguments]
    async with Child.start(name, command, env=_ENV) as child:
        if not child.greeting["confined"]:
            _log.warning("the kernel lets %s have no network of its own, so its servers listen on every interface "
                         "until this ends", name)
        yield child


async def _ask(child: Child, question: Mapping[str, object], seconds: float) -> Mapping[str, float]:
    await child.ask({**question, "seconds": 0.0}, timeout_s=_ANSWER_S)  # connections and pages
    pids, nbytes = child.greeting["pids"], question["nbytes"]
    batch = question.get("batch", 1)
    assert isinstance(nbytes, int) and isinstance(batch, int)
    before_s = cpu_seconds(pids)
    answer = await child.ask({**question, "seconds": seconds}, timeout_s=seconds + _ANSWER_S)
    used_s, taken = cpu_seconds(pids) - before_s, answer["seconds"]
    return {**figures(nbytes * batch, taken), "cpu": used_s / (nbytes * batch * len(taken) / 1e9)}
