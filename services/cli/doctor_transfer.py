"""``moonbus doctor`` on transfers: the paths this host has, and the one each pair of workers would take."""

from __future__ import annotations

import importlib.util
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from services.cli.find import ask
from services.cli.findings import Finding, Verdict
from shared.bus.subjects import WORKERS
from shared.errors import MoonbusError, UserError
from shared.ids import fresh
from shared.messages import Hello, Role, WorkersQuery, WorkersReply
from shared.settings import CommonSettings, load
from shared.transfer import TransferSettings, cuda, shm, verbs
from shared.transfer.addresses import advertised_host
from shared.transfer.device import Way, plan_access
from shared.transfer.fabric import Fabric
from shared.transfer.native import WHY_NOT, find_native
from shared.transfer.plan import RULES, choose_paths
from shared.units import format_bytes
from shared.worker.settings import WorkerSettings

MAX_PAIRS = 12
"""Pairs of workers named on a line."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
_BINDINGS = ("pyverbs", "ibverbs")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


def examine_host() -> Iterator[Finding]:
    """Every path, best first: is it there, and if not, why not. What both kinds of workers share is said once."""
    seen: dict[Finding, list[Role]] = {}
    for role in ROLES:
        try:
            settings = load(WorkerSettings, role, whole=False)
        except UserError as error:
            findings = [Finding("fail", "settings", str(error))]
        else:
            findings = list(examine(settings))
        for finding in findings:
            seen.setdefault(finding, []).append(role)
    for finding, roles in seen.items():
        yield finding if len(roles) == len(ROLES) else replace(finding, what=f"{finding.what} of {roles[0]} workers")


def examine(worker: WorkerSettings) -> Iterator[Finding]:
    """Every path of a worker with these settings, and whether one of them serves."""
    settings = worker.transfer
    asked = settings.paths if settings.paths != TransferSettings().paths else ()
    checks: dict[str, Callable[[], Finding]] = {
        "copy": _copy, "nvlink": partial(_nvlink, "nvlink" in asked), "shm": _shm,
        "rdma": partial(_rdma, settings, "rdma" in asked), "tcp": partial(_tcp, settings)}
    served = False
    for path in settings.paths:
        if path in checks:
            finding = checks[path]()
            served |= finding.verdict == "ok" and path not in ("copy", "nvlink")
            yield finding
        else:
            yield Finding("fail", path, "no path has this name", "correct MOONBUS_TRANSFER_PATHS")
    for path in checks:
        if path not in settings.paths:
            yield Finding("absent", path, "switched off: MOONBUS_TRANSFER_PATHS does not name it")
    if not served:
        yield Finding("fail", "paths", _unserved(settings.paths),
                      "name shm or tcp in MOONBUS_TRANSFER_PATHS, or unset it for all paths")
    if settings.rdma_devices and "rdma" not in settings.paths:
        yield Finding("warn", "rdma devices", f"{', '.join(settings.rdma_devices)} will not be used",
                      "name rdma in MOONBUS_TRANSFER_PATHS, or unset MOONBUS_TRANSFER_RDMA_DEVICES")
    if settings.socket_dir and {"shm", "nvlink"} & set(settings.paths):
        yield _socket_dir(settings.socket_dir)
    yield _compiled(settings)


def _compiled(settings: TransferSettings) -> Finding:
    """Nothing depends on it but speed."""
    native = find_native(settings)
    if native is None:
        if settings.native:
            return Finding("absent", "compiled part", WHY_NOT, "with a C compiler at hand, install moonbus again")
        return Finding("absent", "compiled part", "switched off by MOONBUS_TRANSFER_NATIVE")
    looks = f"looks for messages for {native.spin_us:g} µs before it sleeps" if native.spin_us else "sleeps at once"
    return Finding("ok", "compiled part", f"in use; it {looks}")


def _unserved(paths: Sequence[str]) -> str:
    if not paths:
        return "MOONBUS_TRANSFER_PATHS is empty: workers could send each other nothing"
    return f"MOONBUS_TRANSFER_PATHS names only {', '.join(paths)}: none serves two workers here"


def _socket_dir(directory: str) -> Finding:
    """Listens on a socket there as a worker would; it is gone again when this returns."""
    path = os.path.abspath(os.path.join(directory, f"{fresh('t', 6)}.sock"))
    advice = "set MOONBUS_TRANSFER_SOCKET_DIR to a directory that workers may write, or unset it for private ones"
    try:
        shm.listen_shm(path).close()
        os.unlink(path)
    except OSError as error:
        return Finding("fail", "socket directory", f"workers cannot make a socket in {directory} ({error})", advice)
    return Finding("ok", "socket directory", f"{directory} takes sockets")


def _copy() -> Finding:
    return Finding("ok", "copy", "between engines of one process")


def _nvlink(asked: bool) -> Finding:
    found = cuda.probe()
    if not found.devices:
        if asked:
            return Finding("warn", "nvlink", f"{found.reason}, but MOONBUS_TRANSFER_PATHS names it",
                           "take nvlink from MOONBUS_TRANSFER_PATHS")
        return Finding("absent", "nvlink", found.reason)
    several = len(found.devices) > 1
    pairs = [f"{one.index} and {other.index}" for one in found.devices for other in found.devices
             if one.index < other.index and other.uuid in one.reaches and one.uuid in other.reaches]
    access = f"; direct access between {', '.join(pairs) or 'none of them'}" if several else ""
    there = f"{', '.join(f'{one.index} {one.name}' for one in found.devices)}{access}"
    return Finding("warn" if asked else "absent", "nvlink", f"{there}; for programs that register CUDA tensors: what "
                   "workers send each other lies in the host's memory, also when they compute on a GPU")


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


def _rdma(settings: TransferSettings, asked: bool, sysfs: Path = verbs.SYSFS) -> Finding:
    """Opens the devices as a worker would, and says which address it speaks from on each.

    Workers refuse to start without the devices that were named one by one.
    """
    states = {path.name: _port_state(path) for path in sorted(sysfs.glob("*"))}
    bindings = [name for name in _BINDINGS if importlib.util.find_spec(name) is not None]
    binding = f"binding {bindings[0]}" if bindings else "no binding of libibverbs can be imported"
    found = f"{', '.join(f'{name} is {state}' for name, state in states.items()) or 'no device'}; {binding}"
    lacking = [name for name in settings.rdma_devices if name not in states]
    if lacking:
        return Finding("fail", "rdma", f"there is no {', '.join(lacking)}: {found}",
                       "correct MOONBUS_TRANSFER_RDMA_DEVICES, or unset it for all devices with an active port")
    if not states:
        if asked:
            return Finding("warn", "rdma", f"{found}, but MOONBUS_TRANSFER_PATHS names it",
                           "take rdma from MOONBUS_TRANSFER_PATHS")
        return Finding("absent", "rdma", found)
    trouble: Verdict = "fail" if settings.rdma_devices else "warn"
    if not bindings:
        return Finding(trouble, "rdma", found, "install your distribution's python3-pyverbs")
    if "active" not in states.values():
        return Finding(trouble, "rdma", found, "bring a link up; `rdma link` shows them")
    gid_index = settings.rdma_gid_index if settings.rdma_gid_index >= 0 else None
    try:
        fabric = Fabric.open(devices=settings.rdma_devices, gid_index=gid_index,
                             host=advertised_host(settings.host, settings.advertise))
    except verbs.VerbsError as error:
        return Finding(trouble, "rdma", f"{found}; {error.strerror}",
                       "this user must be able to read and write /dev/infiniband; see MOONBUS_TRANSFER_RDMA_DEVICES")
    nics = "; ".join([*map(str, fabric.nics), *_gpu_memory(fabric.no_dma_buf)])
    fabric.close()
    return Finding("ok", "rdma", f"{found}; {nics}")


def _gpu_memory(no_dma_buf: str) -> Iterator[str]:
    """How the cards would get at each GPU's memory; their drivers have the last word when it is registered."""
    for device in cuda.probe().devices:
        access = plan_access(cuda.card_facts(device.index), no_dma_buf=no_dma_buf)
        way = access.ways[0]
        reason = access.reason(way)
        yield f"memory of GPU {device.index} {f'by {way}' if way is not Way.STAGED else way}" + (
            f" ({reason})" if reason else "")


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
    """The path of each pair that moves KV, with why; pairs with the same answer share a finding.

    A worker that does not say which paths it may take is taken to have the settings of this environment.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for sender in workers:
        try:
            allowed = sender.endpoint.paths or load(WorkerSettings, sender.role, whole=False).transfer.paths
        except UserError as error:
            yield Finding("fail", "pairs", str(error))
            return
        known = [path for path in allowed if path in RULES]
        for receiver in workers:
            elastic = sender.elastic or receiver.elastic
            if sender.worker == receiver.worker or (sender.role == receiver.role == "decode" and not elastic):
                continue
            groups.setdefault(_answer(known, sender, receiver), []).append(f"{sender.worker} → {receiver.worker}")
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
    if chosen is None:
        return "", "; ".join(against) or "the sender may take none"
    return chosen.path, "; ".join([chosen.reason, *against])
