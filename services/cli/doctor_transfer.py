"""``moonbus doctor`` on transfers: the paths this host has, and the one each pair of workers would take."""

from __future__ import annotations

import importlib.util
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from services.cli.find import ask
from services.cli.findings import Finding
from shared.bus.subjects import WORKERS
from shared.errors import MoonbusError
from shared.messages import Hello, WorkersQuery, WorkersReply
from shared.settings import CommonSettings, load
from shared.transfer import TransferSettings, cuda, verbs
from shared.transfer.addresses import advertised_host
from shared.transfer.fabric import Fabric
from shared.transfer.plan import choose_paths
from shared.units import format_bytes
from shared.worker.settings import WorkerSettings

MAX_PAIRS = 12
"""Pairs of workers named on a line."""
_BINDINGS = ("pyverbs", "ibverbs")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


def examine_host() -> Iterator[Finding]:
    """Every path, best first: is it there, and if not, why not. Looks at the settings of a prefill worker."""
    settings = load(WorkerSettings, "prefill", whole=False).transfer
    checks: dict[str, Callable[[], Finding]] = {
        "copy": _copy, "nvlink": _nvlink, "shm": _shm, "rdma": partial(_rdma, settings),
        "tcp": partial(_tcp, settings)}
    for path in settings.paths:
        if path in checks:
            yield checks[path]()
        else:
            yield Finding("fail", path, "no path has this name", "correct MOONBUS_TRANSFER_PATHS")
    for path in checks:
        if path not in settings.paths:
            yield Finding("ok", path, "switched off: MOONBUS_TRANSFER_PATHS does not name it")


def _copy() -> Finding:
    return Finding("ok", "copy", "between engines of one process")


def _nvlink() -> Finding:
    found = cuda.probe()
    if not found.devices:
        return Finding("ok", "nvlink", found.reason)
    several = len(found.devices) > 1
    pairs = [f"{one.index} and {other.index}" for one in found.devices for other in found.devices
             if one.index < other.index and other.uuid in one.reaches and one.uuid in other.reaches]
    access = f"; direct access between {', '.join(pairs) or 'none of them'}" if several else ""
    return Finding("ok", "nvlink", f"{', '.join(f'{device.index} {device.name}' for device in found.devices)}{access}")


def _shm() -> Finding:
    try:
        _share_memory()
    except OSError as error:
        return Finding("warn", "shm", f"memfd or unix sockets do not work here ({error.strerror})",
                       "transfers within this host use TCP")
    return Finding("ok", "shm", f"memfd works, descriptors pass through a unix socket; {_huge_pages()}; "
                                f"/dev/shm is not used, its size does not matter")


def _share_memory() -> None:
    """Hands a memfd through a unix socket and maps it, as two workers would."""
    nbytes = mmap.PAGESIZE
    descriptor = os.memfd_create("moonbus-doctor")
    try:
        os.ftruncate(descriptor, nbytes)
        left, right = socket.socketpair(socket.AF_UNIX)
        with left, right:
            socket.send_fds(left, [b"1"], [descriptor])
            _, received, _, _ = socket.recv_fds(right, 1, 1)
        for passed in received:
            with mmap.mmap(passed, nbytes):
                os.close(passed)
    finally:
        os.close(descriptor)


def _huge_pages() -> str:
    try:
        free = int(_HUGE_PAGES.read_text())
    except (OSError, ValueError):
        return "this kernel has no huge pages of 2 MiB"
    if not free:
        return "no huge pages are reserved (sysctl vm.nr_hugepages), ordinary ones serve"
    return f"{format_bytes(free * 2 * 2**20)} in huge pages are free"


def _rdma(settings: TransferSettings, sysfs: Path = verbs.SYSFS) -> Finding:
    """Opens the devices as a worker would, and says which address it speaks from on each."""
    states = {path.name: _port_state(path) for path in sorted(sysfs.glob("*"))}
    bindings = [name for name in _BINDINGS if importlib.util.find_spec(name) is not None]
    binding = f"binding {bindings[0]}" if bindings else "no binding of libibverbs can be imported"
    if not states:
        return Finding("ok", "rdma", f"no device; {binding}")
    found = f"{', '.join(f'{name} is {state}' for name, state in states.items())}; {binding}"
    if not bindings:
        return Finding("warn", "rdma", found, "install your distribution's python3-pyverbs")
    if "active" not in states.values():
        return Finding("warn", "rdma", found, "bring a link up; `rdma link` shows them")
    gid_index = settings.rdma_gid_index if settings.rdma_gid_index >= 0 else None
    try:
        fabric = Fabric.open({}, devices=settings.rdma_devices, gid_index=gid_index,
                             host=advertised_host(settings.host, settings.advertise))
    except verbs.VerbsError as error:
        return Finding("fail" if settings.rdma_devices else "warn", "rdma", f"{found}; {error.strerror}",
                       "this user must be able to read and write /dev/infiniband; see MOONBUS_TRANSFER_RDMA_DEVICES")
    nics = "; ".join(map(str, fabric.nics))
    fabric.close()
    return Finding("ok", "rdma", f"{found}; {nics}")


def _port_state(device: Path) -> str:
    """State of the device's first port in a word: active, down, init, armed."""
    try:
        return (device / "ports" / "1" / "state").read_text().partition(":")[2].strip().lower()
    except OSError:
        return "port unreadable"


def _tcp(settings: TransferSettings) -> Finding:
    host = settings.host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0", 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        return Finding("fail", "tcp", f"workers cannot listen on {host} ({error})",
                       "set MOONBUS_TRANSFER_HOST to an address of this host")
    if host in ("localhost", "::1") or host.startswith("127."):
        return Finding("ok", "tcp", f"workers listen on {host}, which only this host reaches",
                       "for workers on several hosts set MOONBUS_TRANSFER_HOST=0.0.0.0")
    return Finding("ok", "tcp", f"workers listen on {host}")


def examine_pairs(common: CommonSettings) -> Iterator[Finding]:
    """What each worker of the running stack would take to each other one."""
    try:
        reply = cast(WorkersReply, ask(common, WORKERS.at(), WorkersQuery(), who="conductor"))
    except MoonbusError as error:
        yield Finding("warn", "pairs", str(error))
        return
    yield from explain([worker.hello for worker in reply.workers if worker.state != "dead"])


def explain(workers: Sequence[Hello]) -> Iterator[Finding]:
    """The path of each pair that moves KV, with why; pairs with the same answer share a finding."""
    groups: dict[tuple[str, str], list[str]] = {}
    for sender in workers:
        allowed = load(WorkerSettings, sender.role, whole=False).transfer.paths
        for receiver in workers:
            if sender.worker == receiver.worker or (sender.role, receiver.role) == ("decode", "decode"):
                continue
            groups.setdefault(_answer(allowed, sender, receiver), []).append(f"{sender.worker} → {receiver.worker}")
    for (path, why), pairs in groups.items():
        names = ", ".join(pairs[:MAX_PAIRS]) + (f" and {len(pairs) - MAX_PAIRS} more" if len(pairs) > MAX_PAIRS else "")
        if path:
            yield Finding("ok", path, f"{names} ({why})")
        else:
            yield Finding("fail", "no path", f"{names} ({why})", "see MOONBUS_TRANSFER_PATHS and the findings above")


def _answer(allowed: Sequence[str], sender: Hello, receiver: Hello) -> tuple[str, str]:
    """Path, empty for none, and the reasons: for it, and against those that stand before it."""
    routes = choose_paths(allowed, sender.endpoint, receiver.endpoint, same_process=False, paused={})
    chosen = routes.choices[0] if routes.choices else None
    better = allowed if chosen is None else allowed[:allowed.index(chosen.path)]
    against = [f"{path}: {routes.excluded[path]}" for path in better if path in routes.excluded]
    return ("", "; ".join(against)) if chosen is None else (chosen.path, "; ".join([chosen.reason, *against]))
