"""Who this host is, and how others reach it."""

from __future__ import annotations

import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from shared.ids import HostId

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> HostId:
    """The kernel's boot id: equal for all network namespaces and containers of one running kernel."""
    try:
        return HostId(_BOOT_ID.read_text().strip())
    except OSError:  # no /proc: the network card's address is the next best thing
        return HostId(f"{uuid.getnode():012x}")


host_clock_s = time.monotonic
"""Seconds on the clock that all processes of a host share (CLOCK_MONOTONIC)."""


def advertised_host(bind_host: str, advertise_host: str) -> str:
    """What peers connect to: as set, else the bound address, else (a wildcard) this host's outward address."""
    if advertise_host:
        return advertise_host
    if bind_host not in ("", "0.0.0.0", "::"):
        return bind_host
    return _outward_address()


def _outward_address() -> str:
    """Source address of the default route. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: routed like any outside address
            return str(probe.getsockname()[0])
        except OSError:  # no route: a lone host
            return socket.gethostname()


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    """How peers of the same host reach the CUDA memory of an engine: ``Endpoint.nvlink`` in its parts."""

    socket: str
    """Path of the unix socket that serves them."""
    device: str
    """Identity of the GPU that has the memory."""
    reaches: tuple[str, ...]
    """Identities of the GPUs whose memory that one can read directly; its own is one."""

    def __str__(self) -> str:
        return "#".join([self.socket, self.device, ",".join(self.reaches)])

    @classmethod
    def parse(cls, text: str) -> DeviceAddress:
        """The opposite of ``str``; raises ``ValueError``."""
        parts = text.rsplit("#", 2)
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"{text!r} is not socket#device#device,...")
        return cls(parts[0], parts[1], tuple(parts[2].split(",")))


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; raises ``ValueError`` when it is not one."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not 0 < int(port) < 2**16:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
