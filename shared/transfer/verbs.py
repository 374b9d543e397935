"""RDMA verbs, as little of them as the transfer engine needs, over whichever binding is there.

``pyverbs`` comes with the Linux distributions (Debian's python3-pyverbs); the ``ibverbs`` wheel serves where that
cannot be imported. Neither is imported before :func:`open_device`, and what devices there are is read from sysfs: on
a host without one this module costs nothing and needs nothing.

Every call here may block for as long as the driver takes; ``pyverbs`` holds the GIL meanwhile. Any thread may call
anything, as the library allows, but ``close`` only once no other call is on its way. Raises :class:`VerbsError` and
nothing else.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from shared.transfer.device import DmaBuf
from shared.transfer.rails import Gid, Nic

SYSFS = Path("/sys/class/infiniband")
PORT = 1
"""Devices with several ports show up as several devices today."""
SEND_DEPTH = 128
RECEIVE_DEPTH = 160
"""Work requests of a queue pair that may be posted and not completed."""
GID_GAP = 32
"""Unused entries in a row after which a device's table of GIDs is taken to end."""

# Values of libibverbs' stable ABI, the same for both bindings.
_ACCESS = 1 | 2  # local and remote write
_RC = 2
_WRITE, _WRITE_WITH_IMMEDIATE = 0, 1
_SIGNALED = 2
_STATE_MASK, _STATE_ERROR = 1, 6
_RECEIVED_WITH_IMMEDIATE = 129

SLACK = 4
"""A device may wait so many times longer than it was told (InfiniBand, volume 1, section 9.7.6.1.3)."""


class VerbsError(OSError):
    """A verb failed, or there is no binding or device to call one on."""


class Status(IntEnum):
    """How a work request ended."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    OTHER = 255

    @classmethod
    def _missing_(cls, value: object) -> Status:
        return cls.OTHER


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one work request; after a failure the queue pair is in its error state."""

    request: int
    """The number it was posted with; meaningless for a receive."""
    status: Status
    immediate: int | None = None
    """What a peer's write ended with; ``None`` for our own writes."""


@dataclass(frozen=True, slots=True)
class Remote:
    """The other end of a queue pair; ``mtu`` as verbs number it (1: 256 bytes … 5: 4096)."""

    number: int
    psn: int
    gid: bytes
    lid: int
    mtu: int


@dataclass(frozen=True, slots=True)
class Timing:
    """When a peer that does not answer is given up."""

    exponent: int
    retries: int
    """At most 6: some devices take 7 for no limit."""

    @property
    def silence_s(self) -> float:
        """Seconds of silence, at least; a device may take :data:`SLACK` times as long."""
        return 4.096e-6 * (1 << self.exponent) * (self.retries + 1)


class Region:
    """Registered memory, as a binding has it. The memory must outlive it."""

    def __init__(self, device: Device, handle: Any, address: int) -> None:
        self._device, self._handle = device, handle
        self.lkey, self.rkey = int(handle.lkey), int(handle.rkey)
        self.address = address
        """What work requests call the first byte."""

    def close(self) -> None:
        """No device touches the memory after this."""
        with self._device.translated("deregistering memory"):
            self._handle.close()


class QueuePair(ABC):
    """A reliable connection, its completions, and the descriptor that announces them."""

    number: int
    fd: int
    """Readable when :meth:`completions` has something to say."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._parts: list[Any] = []
        """The binding's objects, in the order in which they are closed."""

    @abstractmethod
    def connect(self, remote: Remote, *, psn: int, gid_index: int, timing: Timing) -> None:
        """Makes it ready to write and to be written to, with all its receives posted."""

    @abstractmethod
    def write(self, request: int, source: tuple[int, int, int], target: tuple[int, int], *, signaled: bool,
              immediate: int | None = None) -> None:
        """Posts one: ``source`` is (address, bytes, lkey), ``target`` (address, rkey)."""

    @abstractmethod
    def receive(self) -> None:
        """Posts the receive of one immediate."""

    @abstractmethod
    def completions(self) -> list[Completion]:
        """Those there are; the descriptor becomes readable with the next."""

    @abstractmethod
    def fail(self) -> None:
        """Moves it to the error state: what is posted is flushed, nothing writes through it any more."""

    def close(self) -> None:
        """Nothing reads or writes through it after this. Idempotent."""
        parts, self._parts = self._parts, []
        with self._device.translated("closing a queue pair"):
            for part in parts:
                part.close()


class Device(ABC):
    """One opened device with a protection domain."""

    binding: ClassVar[str]
    pair: ClassVar[Callable[..., QueuePair]]
    """Makes one of the device."""
    error: type[Exception]
    """What the binding raises."""
    lid: int
    mtu: int
    context: Any
    domain: Any
    no_dma_buf = ""
    """Why it registers none, as far as the binding knows."""

    def register(self, address: int, nbytes: int) -> Region:
        """Lets the device read the memory, and write it for who has its key."""
        with self.translated(f"registering {nbytes} bytes"):
            return Region(self, self._register(address, nbytes), address)

    def register_dma_buf(self, memory: DmaBuf, nbytes: int) -> Region:
        """The same for another device's memory. The descriptor may be closed afterwards."""
        with self.translated(f"registering {nbytes} bytes of a dma-buf"):
            return Region(self, self._register_dma_buf(memory, nbytes), memory.offset)

    def queue_pair(self) -> QueuePair:
        """A new one, not connected."""
        with self.translated("making a queue pair"):
            return type(self).pair(self)

    def close(self) -> None:
        """After all that was made from it is closed."""
        with self.translated("closing the device"):
            self.domain.close()
            self.context.close()

    @contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Turns the binding's errors into ours."""
        try:
            yield
        except VerbsError:
            raise
        except self.error as error:
            number = getattr(error, "error_code", 0) or getattr(error, "errno", 0) or errno.EIO
            raise VerbsError(number, f"{what}: {error}") from error

    @abstractmethod
    def _register(self, address: int, nbytes: int) -> Any:
        """The binding's object for it."""

    @abstractmethod
    def _register_dma_buf(self, memory: DmaBuf, nbytes: int) -> Any:
        """The binding's object; work requests call its first byte ``memory.offset``."""


def open_device(name: str) -> Device:
    """Opens a device by its name in :func:`nics`."""
    reasons: list[str] = []
    for load in (_PyverbsDevice, _IbverbsDevice):
        try:
            return load(name)
        except ImportError as error:
            reasons.append(str(error))
    raise VerbsError(errno.ENOPKG, f"no binding of libibverbs can be imported ({'; '.join(reasons)})")


# -- what there is ----------------------------------------------------------------------------------------------


def nics(root: Path = SYSFS) -> list[Nic]:
    """Devices whose port is active, by name; empty where there are none. No binding is needed."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    found = []
    for name in names:
        port = root / name / "ports" / str(PORT)
        if "ACTIVE" in _text(port / "state"):
            found.append(Nic(name=name, node=int(_text(root / name / "device" / "numa_node") or -1),
                             bytes_per_s=_rate(_text(port / "rate")), ethernet=_text(port / "link_layer") == "Ethernet",
                             virtual=not (root / name / "device").exists(), gids=tuple(_gids(port))))
    return found


def numa_distances(root: Path = Path("/sys/devices/system/node")) -> dict[int, tuple[int, ...]]:
    """``{node: distance to node 0, 1, ...}``; empty where the kernel tells none."""
    distances = {}
    for path in sorted(root.glob("node[0-9]*/distance")):
        distances[int(path.parent.name.removeprefix("node"))] = tuple(int(word) for word in _text(path).split())
    return distances


def numa_node(address: int, maps: Path = Path("/proc/self/numa_maps")) -> int:
    """The node with most pages of the mapping that holds ``address``; -1 when it has none yet, or none is known."""
    best_start, pages = -1, {-1: 0}
    try:
        with maps.open() as lines:
            for line in lines:
                start = int(line.split(" ", 1)[0], 16)
                if best_start < start <= address:
                    best_start = start
                    pages = {int(node): int(count) for node, count in re.findall(r" N(\d+)=(\d+)", line)} or {-1: 0}
    except OSError:
        return -1
    return max(pages, key=lambda node: pages[node])


def _gids(port: Path) -> Iterator[Gid]:
    index = unused = 0
    while unused < GID_GAP and (text := _text(port / "gids" / str(index))):
        raw = ipaddress.IPv6Address(text).packed
        if any(raw):
            unused = 0
            yield Gid(index, raw, _text(port / "gid_attrs" / "types" / str(index)),
                      _text(port / "gid_attrs" / "ndevs" / str(index)))
        else:
            unused += 1
        index += 1


def _rate(text: str) -> float:
    """``100 Gb/sec (4X EDR)`` in bytes per second; 10 Gb/s when the kernel says nothing useful."""
    match = re.match(r"([\d.]+) Gb/sec", text)
    return (float(match[1]) if match else 10.0) * 1e9 / 8


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an unused entry of a table, or no such fact on this device
        return ""


# -- pyverbs ----------------------------------------------------------------------------------------------------


_pyverbs_lock = threading.Lock()
"""Held while a completion channel is made: older releases do not tell its descriptor."""


def _import_pyverbs() -> SimpleNamespace:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        import pyverbs.addr as addr
        import pyverbs.cq as cq
        import pyverbs.device as device
        import pyverbs.mr as mr
        import pyverbs.pd as pd
        import pyverbs.pyverbs_error as errors
        import pyverbs.qp as qp
        import pyverbs.wr as wr
    finally:
        # It configures logging for the whole process when it is imported.
        root.handlers[:], root.level = handlers, level
    return SimpleNamespace(addr=addr, cq=cq, device=device, mr=mr, pd=pd, errors=errors, qp=qp, wr=wr)


class _PyverbsQueuePair(QueuePair):
    def __init__(self, device: _PyverbsDevice) -> None:
        super().__init__(device)
        self._api = api = device.api
        with _pyverbs_lock:
            before = set(_event_descriptors())
            self._channel = api.cq.CompChannel(device.context)
            fd = getattr(self._channel, "fd", None)
            self.fd = int(fd) if fd is not None else next(iter(set(_event_descriptors()) - before))
        os.set_blocking(self.fd, False)
        self._queue = api.cq.CQ(device.context, SEND_DEPTH + RECEIVE_DEPTH, None, self._channel, 0)
        self._queue.req_notify()
        # A receive of an immediate brings no bytes, but the binding wants to know where they would go.
        self._scratch = api.mr.MR(device.domain, 64, _ACCESS)
        limits = api.qp.QPCap(max_send_wr=SEND_DEPTH, max_recv_wr=RECEIVE_DEPTH, max_send_sge=1, max_recv_sge=1)
        self._pair = api.qp.QP(device.domain, api.qp.QPInitAttr(
            qp_type=_RC, scq=self._queue, rcq=self._queue, cap=limits, sq_sig_all=0))
        self.number = int(self._pair.qp_num)
        self._parts = [self._pair, self._queue, self._channel, self._scratch]

    def connect(self, remote: Remote, *, psn: int, gid_index: int, timing: Timing) -> None:
        api = self._api
        with self._device.translated("connecting a queue pair"):
            gid = api.addr.GID(ipaddress.IPv6Address(remote.gid).exploded)
            route = api.addr.GlobalRoute(dgid=gid, sgid_index=gid_index, hop_limit=64)
            facts = api.qp.QPAttr(port_num=PORT)
            facts.qp_access_flags = _ACCESS
            self._pair.to_init(facts)
            for _ in range(RECEIVE_DEPTH):
                self.receive()
            facts.ah_attr = api.addr.AHAttr(port_num=PORT, dlid=remote.lid, is_global=1, gr=route)
            facts.path_mtu = min(self._device.mtu, remote.mtu)
            facts.dest_qp_num, facts.rq_psn = remote.number, remote.psn
            facts.max_dest_rd_atomic = facts.max_rd_atomic = 1
            facts.min_rnr_timer = 12  # 0.64 ms
            self._pair.to_rtr(facts)
            facts.sq_psn = psn
            facts.timeout, facts.retry_cnt, facts.rnr_retry = timing.exponent, timing.retries, 6
            self._pair.to_rts(facts)

    def write(self, request: int, source: tuple[int, int, int], target: tuple[int, int], *, signaled: bool,
              immediate: int | None = None) -> None:
        wr = self._api.wr
        with self._device.translated("posting a write"):
            part = wr.SGE(*source)
            work = wr.SendWR(wr_id=request, num_sge=1, sg=[part], send_flags=_SIGNALED if signaled else 0,
                             opcode=_WRITE if immediate is None else _WRITE_WITH_IMMEDIATE,
                             imm_data=0 if immediate is None else socket.htonl(immediate))
            work.set_wr_rdma(target[1], target[0])
            try:
                self._pair.post_send(work)
            finally:  # neither is freed with the object
                work.close()
                part.close()

    def receive(self) -> None:
        wr = self._api.wr
        with self._device.translated("posting a receive"):
            part = wr.SGE(self._scratch.buf, 1, self._scratch.lkey)
            work = wr.RecvWR(wr_id=0, num_sge=1, sg=[part])
            try:
                self._pair.post_recv(work)
            finally:
                work.close()
                part.close()

    def completions(self) -> list[Completion]:
        found: list[Completion] = []
        with self._device.translated("reading completions"):
            try:
                self._channel.get_cq_event(self._queue)
                self._queue.ack_events(1)
            except self._api.errors.PyverbsRDMAError as error:
                if error.error_code != errno.EAGAIN:
                    raise
            self._queue.req_notify()  # before the look, or one that comes in between goes unseen
            while True:
                count, works = self._queue.poll(32)
                found += [_completion(work, socket.ntohl(work.imm_data)) for work in works[:count]]
                if not count:
                    return found

    def fail(self) -> None:
        with self._device.translated("failing a queue pair"):
            facts = self._api.qp.QPAttr(qp_state=_STATE_ERROR)
            self._pair.modify(facts, _STATE_MASK)


class _PyverbsDevice(Device):
    binding = "pyverbs"
    pair: ClassVar = _PyverbsQueuePair

    def __init__(self, name: str) -> None:
        self.api = _import_pyverbs()
        self.error = self.api.errors.PyverbsError
        with self.translated(f"opening {name}"):
            self.context = self.api.device.Context(name=name)
            port = self.context.query_port(PORT)
            self.lid, self.mtu = int(port.lid), int(port.active_mtu)
            self.domain = self.api.pd.PD(self.context)
        if not hasattr(self.api.mr, "DmaBufMR"):
            self.no_dma_buf = "this pyverbs is too old"

    def _register(self, address: int, nbytes: int) -> Any:
        return self.api.mr.MR(self.domain, nbytes, _ACCESS, address=address)

    def _register_dma_buf(self, memory: DmaBuf, nbytes: int) -> Any:
        return self.api.mr.DmaBufMR(self.domain, nbytes, _ACCESS, dmabuf=memory.fd, offset=memory.offset)


def _event_descriptors() -> Iterator[int]:
    """Our descriptors that announce completions or asynchronous events."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                yield int(name)
        except FileNotFoundError:
            continue  # the one the listing itself had open


# -- ibverbs ----------------------------------------------------------------------------------------------------


class _IbverbsQueuePair(QueuePair):
    def __init__(self, device: _IbverbsDevice) -> None:
        super().__init__(device)
        self._api = device.api
        self._channel = device.context.create_comp_channel()
        self.fd = int(self._channel.fd)
        os.set_blocking(self.fd, False)
        self._queue = device.context.create_cq(SEND_DEPTH + RECEIVE_DEPTH, self._channel)
        self._queue.req_notify()
        self._pair = device.domain.create_qp(device.api.QPInitAttr(
            send_cq=self._queue, recv_cq=self._queue, qp_type=_RC, max_send_wr=SEND_DEPTH, max_recv_wr=RECEIVE_DEPTH,
            max_send_sge=1, max_recv_sge=1))
        self.number = int(self._pair.qp_num)
        self._parts = [self._pair, self._queue, self._channel]

    def connect(self, remote: Remote, *, psn: int, gid_index: int, timing: Timing) -> None:
        with self._device.translated("connecting a queue pair"):
            facts = self._api.QPInfo(qp_num=remote.number, psn=remote.psn, lid=remote.lid, gid=remote.gid,
                                            port=PORT, mtu=remote.mtu)
            self._pair.to_init(PORT, _ACCESS)
            for _ in range(RECEIVE_DEPTH):
                self.receive()
            self._pair.to_rtr(facts, sgid_index=gid_index, mtu=min(self._device.mtu, remote.mtu), hop_limit=64)
            self._pair.to_rts(psn, timeout=timing.exponent, retry_cnt=timing.retries, rnr_retry=6)

    def write(self, request: int, source: tuple[int, int, int], target: tuple[int, int], *, signaled: bool,
              immediate: int | None = None) -> None:
        api = self._api
        with self._device.translated("posting a write"):
            self._pair.post_send(api.SendWR(
                wr_id=request, sg_list=[api.SGE(*source)], send_flags=_SIGNALED if signaled else 0,
                opcode=_WRITE if immediate is None else _WRITE_WITH_IMMEDIATE, imm_data=immediate or 0,
                remote_addr=target[0], rkey=target[1]))

    def receive(self) -> None:
        with self._device.translated("posting a receive"):
            self._pair.post_recv(self._api.RecvWR(wr_id=0))

    def completions(self) -> list[Completion]:
        found: list[Completion] = []
        with self._device.translated("reading completions"):
            try:
                self._channel.get_cq_event()
                self._queue.ack_events(1)
            except self._api.VerbsError as error:
                if error.errno != errno.EAGAIN:
                    raise
            self._queue.req_notify()
            while works := self._queue.poll(32):
                found += [_completion(work, work.imm_data) for work in works]
        return found

    def fail(self) -> None:
        with self._device.translated("failing a queue pair"):
            self._pair.modify(_STATE_MASK, qp_state=_STATE_ERROR)


class _IbverbsDevice(Device):
    binding = "ibverbs"
    pair: ClassVar = _IbverbsQueuePair

    def __init__(self, name: str) -> None:
        import ibverbs

        self.api: Any = ibverbs
        self.error = ibverbs.VerbsError
        with self.translated(f"opening {name}"):
            found = next((device for device in ibverbs.get_device_list() if device.name == name), None)
            if found is None:
                raise VerbsError(errno.ENODEV, f"no device {name}")
            self.context = found.open()
            port = self.context.query_port(PORT)
            self.lid, self.mtu = int(port.lid), int(port.active_mtu)
            self.domain = self.context.alloc_pd()
        if not hasattr(self.domain, "reg_dmabuf_mr"):
            self.no_dma_buf = "this ibverbs is too old"

    def _register(self, address: int, nbytes: int) -> Any:
        return self.domain.reg_mr(address, nbytes, _ACCESS)

    def _register_dma_buf(self, memory: DmaBuf, nbytes: int) -> Any:
        return self.domain.reg_dmabuf_mr(memory.offset, nbytes, memory.offset, memory.fd, _ACCESS)


def _completion(work: Any, immediate: int) -> Completion:
    received = work.status == Status.SUCCESS and work.opcode == _RECEIVED_WITH_IMMEDIATE
    return Completion(int(work.wr_id), Status(work.status), int(immediate) if received else None)


__all__: Sequence[str] = [
    "Completion", "Device", "QueuePair", "Region", "Remote", "Status", "Timing", "VerbsError", "nics", "numa_distances",
    "numa_node", "open_device",
]
