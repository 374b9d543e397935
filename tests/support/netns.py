"""Two hosts on one machine: network namespaces joined by a cable that delays, loses and can be cut.

Needs root and iproute2 (``ip``, ``tc``); :func:`unavailable` says what is missing. Where the kernel has netem, the
cable is a veth pair with ``tc netem`` at both ends. Where it has not, the cable is two TUN devices and a process
(this module, run as a program) that carries the packets between them and does to them what netem would.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import re
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "moonbus-test"
ADDRESSES = ("10.203.0.1", "10.203.0.2")
DEVICE = "cable"
MTU = 9000

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_QUEUE_PACKETS = 10_000
"""Packets on the cable in one direction; more are lost, as netem's ``limit`` does it."""


@dataclass(frozen=True)
class Host:
    """One side."""

    namespace: str
    address: str


@dataclass(frozen=True)
class TwoHosts:
    """Both sides, and the cable between them."""

    left: Host
    right: Host
    cable: str
    """``netem`` or ``tun``."""

    def cut(self) -> None:
        """The cable's right end is pulled: packets are lost without a word to the left."""
        self._set("down")

    def mend(self) -> None:
        """It is plugged in again."""
        self._set("up")

    def _set(self, state: str) -> None:
        _run("ip", "-n", self.right.namespace, "link", "set", DEVICE, state)


def unavailable() -> str:
    """Why there cannot be two hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"iproute2 is not installed ({', '.join(missing)})"
    try:
        with _namespace(f"{PREFIX}-{os.getpid()}-probe") as name:
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if not _has_netem(name) and not Path("/dev/net/tun").exists():
                return "the kernel has neither netem nor TUN devices"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


@contextmanager
def two_hosts(*, delay_s: float = 0.0, loss: float = 0.0) -> Iterator[TwoHosts]:
    """Both up and reachable; each direction delays by ``delay_s`` and loses the share ``loss`` of its packets."""
    _remove_stale()
    with ExitStack() as stack:
        left, right = (
            Host(stack.enter_context(_namespace(f"{PREFIX}-{os.getpid()}-{side}")), address)
            for side, address in zip("ab", ADDRESSES, strict=True))
        names = left.namespace, right.namespace
        if _has_netem(left.namespace):
            cable = "netem"
            _join_by_veth(names, delay_s, loss)
        else:
            cable = "tun"
            stack.enter_context(_joined_by_tun(names, delay_s, loss))
        for host in (left, right):
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", DEVICE)
            _run("ip", "-n", host.namespace, "link", "set", DEVICE, "mtu", str(MTU), "up")
        yield TwoHosts(left, right, cable)


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    """Everything in it (addresses, devices) goes with it, and it goes by name, whatever failed inside."""
    _run("ip", "netns", "add", name)
    try:
        yield name
    finally:
        _run("ip", "netns", "delete", name)


def _remove_stale() -> None:
    """What a killed test run left behind."""
    for name in re.findall(rf"^{PREFIX}-\d+-\w+", _run("ip", "netns", "list"), re.MULTILINE):
        if not Path(f"/proc/{name.split('-')[2]}").exists():
            _run("ip", "netns", "delete", name)


def _has_netem(namespace: str) -> bool:
    tried = subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem"], check=False,
                           capture_output=True)
    if tried.returncode == 0:
        _run("tc", "-n", namespace, "qdisc", "delete", "dev", "lo", "root")
    return tried.returncode == 0


def _join_by_veth(namespaces: tuple[str, str], delay_s: float, loss: float) -> None:
    left, right = namespaces
    _run("ip", "link", "add", DEVICE, "netns", left, "type", "veth", "peer", "name", DEVICE, "netns", right)
    for name in namespaces:
        _run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "netem", "limit", str(_QUEUE_PACKETS),
             "delay", f"{delay_s * 1e3:g}ms", "loss", f"{loss * 100:g}%")


@contextmanager
def _joined_by_tun(namespaces: tuple[str, str], delay_s: float, loss: float) -> Iterator[None]:
    descriptors: list[int] = []
    try:
        for i, namespace in enumerate(namespaces):
            ours = f"mbtun{os.getpid() % 100_000}{'ab'[i]}"
            descriptors.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(descriptors[-1], _TUNSETIFF, struct.pack("16sH", ours.encode(), _IFF_TUN | _IFF_NO_PI))
            _run("ip", "link", "set", ours, "name", DEVICE, "netns", namespace)
        carrier = subprocess.Popen(
            [sys.executable, __file__, *map(str, descriptors), str(delay_s), str(loss)],
            stdin=subprocess.PIPE, pass_fds=descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    try:
        yield
    finally:
        carrier.kill()
        carrier.wait()
        assert carrier.stdin is not None
        carrier.stdin.close()


def _run(*command: str) -> str:
    """Its output; raises ``CalledProcessError`` with what it said."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# -- the process that carries packets ---------------------------------------------------------------------------


def _carry(ends: tuple[int, int], delay_s: float, loss: float) -> None:
    """Until the standard input ends, that is, until the test is gone."""
    chance = random.Random(1)
    on_the_cable: list[tuple[float, int, int, bytes]] = []
    """(when it arrives, order of departure, at which end, packet)"""
    departed = 0
    poller = select.poll()
    for end in (sys.stdin.fileno(), *ends):
        poller.register(end, select.POLLIN)
    while True:
        wait_s = max(0.0, on_the_cable[0][0] - time.monotonic()) if on_the_cable else 1.0
        for ready, _ in poller.poll(wait_s * 1e3):
            if ready == sys.stdin.fileno():
                return
            packet = os.read(ready, 1 << 16)
            departed += 1
            if chance.random() >= loss and len(on_the_cable) < 2 * _QUEUE_PACKETS:
                to = ends[1] if ready == ends[0] else ends[0]
                heapq.heappush(on_the_cable, (time.monotonic() + delay_s, departed, to, packet))
        while on_the_cable and on_the_cable[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(on_the_cable)
            try:
                os.write(to, packet)
            except OSError:  # that end is down, or full: the packet is lost
                continue


if __name__ == "__main__":
    _carry((int(sys.argv[1]), int(sys.argv[2])), float(sys.argv[3]), float(sys.argv[4]))
