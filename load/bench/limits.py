"""What could be done at best: by the machine (memory copied within a process, TCP without us), and by Python."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from load.bench.peers import confine
from load.bench.rounds import Probe
from shared.errors import UserError

LEAST_REPEATS = 5
_HOST = "127.0.0.1"
_START_S = 5.0
_CLIENT_GRACE_S = 10.0
_POLL_S = 0.02


@asynccontextmanager
async def memcpy(sizes: Mapping[str, int], seconds: float) -> AsyncIterator[list[Probe]]:
    """One thread copies between two mappings of memfds: a push in shared memory that costs nothing else."""
    yield [Probe(f"memcpy/{label}", partial(asyncio.to_thread, _copy, nbytes, seconds))
           for label, nbytes in sizes.items()]


def _copy(nbytes: int, seconds: float) -> Mapping[str, float]:
    source, target = mapped_memfd(nbytes), mapped_memfd(nbytes)
    source[:], target[:] = 7, 1  # pages exist from now on
    taken: list[float] = []
    until_s = time.perf_counter() + seconds
    while len(taken) < LEAST_REPEATS or time.perf_counter() < until_s:
        started_s = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - started_s)
    return figures(nbytes, taken)


def mapped_memfd(nbytes: int) -> npt.NDArray[np.uint8]:
    """New memory, uint8[nbytes]; unmapped with its last view."""
    descriptor = os.memfd_create("moonbus-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        return np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
    finally:
        os.close(descriptor)


def figures(nbytes: int, taken: list[float]) -> dict[str, float]:
    """``p50`` in ms and ``rate`` in GB/s of transfers of ``nbytes`` that took these seconds one after the other."""
    return {"p50": float(np.median(taken)) * 1e3, "rate": nbytes * len(taken) / sum(taken) / 1e9}


class _Sum(msgspec.Struct):
    seconds: float
    bytes: int


class _Cpu(msgspec.Struct):
    host_total: float
    remote_total: float


class _End(msgspec.Struct):
    sum_received: _Sum
    cpu_utilization_percent: _Cpu


class _Report(msgspec.Struct):
    """The part of iperf3's JSON that we read; ``error`` instead of ``end`` figures when it failed."""

    end: _End | msgspec.UnsetType = msgspec.UNSET
    error: str = ""


@asynccontextmanager
async def iperf3(seconds: float) -> AsyncIterator[list[Probe]]:
    """A server on loopback, and a probe that runs a client: one stream, writes of 1 MiB, whole seconds.

    Raises :class:`UserError` when iperf3 is not installed or its server does not start.
    """
    program = shutil.which("iperf3")
    if program is None:
        raise UserError("iperf3 is not installed; on Debian and Ubuntu: sudo apt install iperf3")
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        sys.executable, confine.__file__, program, "-s", "-B", _HOST, "-p", str(port), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True)
    command = [program, "-c", _HOST, "-p", str(port), "-l", "1M", "-t", str(max(1, round(seconds))), "-J"]

    try:
        await _wait_for_listener(port)
        yield [Probe("iperf3/1MiB", partial(_run_client, command, max(1.0, seconds) + _CLIENT_GRACE_S))]
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


async def _run_client(command: list[str], timeout_s: float) -> Mapping[str, float]:
    client = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL,
                                                  stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                                                  start_new_session=True)
    try:
        said, _ = await asyncio.wait_for(client.communicate(), timeout_s)
    except TimeoutError as error:
        raise UserError(f"iperf3 did not end within {timeout_s:g} s") from error
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    try:
        report = msgspec.json.decode(said, type=_Report)
    except msgspec.DecodeError as error:
        raise UserError(f"iperf3 said something else than its report: {error}") from error
    if report.end is msgspec.UNSET:
        raise UserError(f"iperf3: {report.error}")
    received, cpu = report.end.sum_received, report.end.cpu_utilization_percent
    return {"rate": received.bytes / received.seconds / 1e9,
            "cpu": (cpu.host_total + cpu.remote_total) / 100 * received.seconds / (received.bytes / 1e9)}


async def _wait_for_listener(port: int) -> None:
    until_s = time.monotonic() + _START_S
    while True:
        try:
            # Its server takes a connection that says nothing for a failed test, and goes on.
            _, writer = await asyncio.open_connection(_HOST, port)
            writer.close()
            await writer.wait_closed()
            return
        except OSError as error:
            if time.monotonic() > until_s:
                raise UserError(f"iperf3 does not listen on port {port} after {_START_S:g} s: {error}") from error
        await asyncio.sleep(_POLL_S)


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind((_HOST, 0))
        return int(sock.getsockname()[1])
