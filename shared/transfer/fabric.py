"""The RDMA devices of one engine: opened once, each with every segment registered once, when it is first needed."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared.transfer import verbs
from shared.transfer.device import Access, Way, plan_access
from shared.transfer.rails import Gid, Load, Nic, Topology, choose_gid
from shared.transfer.segment import DeviceSegment, Segment
from shared.transfer.verbs import Device, Region, VerbsError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class OpenNic:
    """A card we use, and the address we speak from."""

    nic: Nic
    device: Device
    gid: Gid
    why: str
    """Why that address."""
    load: Load

    def __str__(self) -> str:
        return (f"{self.nic.name} ({self.device.binding}, NUMA node {self.nic.node}, GID {self.gid.index} "
                f"{ipaddress.IPv6Address(self.gid.raw)}: {self.why})")


@dataclass(slots=True)
class _Registered:
    """One segment on all devices; keeps its memory alive for them."""

    segment: Segment
    memory: object
    node: int
    regions: dict[int, Region]


class Fabric:
    """Made by :meth:`open`. :meth:`region` from any thread; loads belong to the engine's event loop."""

    def __init__(self, nics: Sequence[OpenNic], topology: Topology) -> None:
        self.nics = tuple(nics)
        self.topology = topology
        self._registered: dict[int, _Registered] = {}
        """{serial of a segment: where it is registered}"""
        self._lock = threading.Lock()

    @classmethod
    def open(cls, *, devices: Sequence[str] = (), gid_index: int | None = None,
             host: str = "") -> Fabric:
        """Opens ``devices``, or all whose port is active.

        ``host`` is the address that peers know us by; ``gid_index`` overrides the choice of the GID on every device.
        Raises :class:`VerbsError`, saying what is missing, when there is no device to use.
        """
        found = {nic.name: nic for nic in verbs.nics()}
        missing = [name for name in devices if name not in found]
        if missing:
            raise VerbsError(errno.ENODEV, f"no active RDMA device {', '.join(missing)}; "
                                           f"there is {', '.join(found) or 'none'}")
        if not found:
            raise VerbsError(errno.ENODEV, "no active RDMA device")
        addresses = _as_gids(host)
        nics: list[OpenNic] = []
        troubles: list[str] = []
        for name in devices or found:
            try:
                gid, why = choose_gid(found[name], addresses, override=gid_index)
                device = verbs.open_device(name)
            except (LookupError, VerbsError) as error:
                troubles.append(f"{name}: {error}")
                continue
            nics.append(OpenNic(found[name], device, gid, why, Load(found[name].bytes_per_s)))
            _log.info("action=rdma_device_opened device=%s", nics[-1])
        if not nics:
            raise VerbsError(errno.ENODEV, "; ".join(troubles))
        for trouble in troubles:
            _log.warning("action=rdma_device_left_out why=%r", trouble)
        return cls(nics, Topology(verbs.numa_distances()))

    @property
    def no_dma_buf(self) -> str:
        """Why not all cards take a dma-buf, as far as is known; empty if they may."""
        return next((nic.device.no_dma_buf for nic in self.nics if nic.device.no_dma_buf), "")

    def expose(self, segment: DeviceSegment) -> None:
        """Finds the best way by which every card gets at a device's memory, and registers it there."""
        access = plan_access(segment.memory.card_facts(), no_dma_buf=self.no_dma_buf)
        why_not = dict(access.why_not)
        for way in access.ways:
            try:
                regions = self._expose(segment, way)
            except OSError as error:
                why_not[way] = error.strerror or str(error)
                continue
            if regions:
                self._registered[segment.serial] = _Registered(segment, segment.memory, -1, regions)
            segment.way = way
            break
        reason = Access(access.ways, why_not).reason(segment.way)
        _log.info("action=device_memory_exposed segment=%s way=%r why=%r", segment.name, str(segment.way), reason)

    def _expose(self, segment: DeviceSegment, way: Way) -> dict[int, Region]:
        """On every card or none; raises ``OSError``."""
        regions: dict[int, Region] = {}
        if way is Way.STAGED:
            return regions
        exported = segment.memory.dma_buf() if way is Way.DMA_BUF else None
        try:
            for i, nic in enumerate(self.nics):
                if exported is not None:
                    regions[i] = nic.device.register_dma_buf(exported, segment.nbytes)
                else:
                    regions[i] = nic.device.register(segment.memory.peer_address(), segment.nbytes)
        except OSError:
            for region in regions.values():
                region.close()
            raise
        finally:
            if exported is not None:
                os.close(exported.fd)
        return regions

    def region(self, nic: int, segment: Segment) -> Region:
        """Its registration on the device ``nic``, made now if need be (which pins its memory). None of memory that is
        staged. Raises :class:`VerbsError`.
        """
        with self._lock:
            registered = self._registered.get(segment.serial)
            if registered is None:
                registered = self._registered[segment.serial] = _Registered(
                    segment, segment.array, verbs.numa_node(segment.array.ctypes.data), {})
            region = registered.regions.get(nic)
            if region is None:
                try:
                    region = self.nics[nic].device.register(segment.array.ctypes.data, segment.nbytes)
                except VerbsError as error:
                    if error.errno == errno.ENOMEM:
                        raise VerbsError(errno.ENOMEM, f"{error.strerror}; a process may pin no more memory than "
                                                       f"`ulimit -l` allows") from error
                    raise
                registered.regions[nic] = region
        return region

    def knows(self, nic: int, segment: Segment) -> bool:
        """Will :meth:`region` answer at once?"""
        registered = self._registered.get(segment.serial)
        return registered is not None and nic in registered.regions

    def node(self, segment: Segment) -> int:
        """NUMA node of a segment's memory; -1 while it is not registered anywhere, or a device's."""
        registered = self._registered.get(segment.serial)
        return registered.node if registered is not None else -1

    def forget(self, serial: int) -> None:
        """No device touches that segment's memory after this; a peer that still writes into it gets an error."""
        with self._lock:
            registered = self._registered.pop(serial, None)
        if registered is not None:
            for region in registered.regions.values():
                region.close()

    def close(self) -> None:
        """After every queue pair is closed."""
        for serial in list(self._registered):
            self.forget(serial)
        for nic in self.nics:
            nic.device.close()


def _as_gids(host: str) -> Collection[bytes]:
    """The addresses of ``host`` as GIDs."""
    if not host:
        return ()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    gids = set()
    for _, _, _, _, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        gids.add(ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed)
    return gids
