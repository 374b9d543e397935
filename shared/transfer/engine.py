"""The transfer engine: registered memory, grants, and pushes by the best path there is."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from shared import sockets
from shared.clock import Clock, SystemClock
from shared.errors import Bug, SettingError, UserError
from shared.ids import HostId, Incarnation, OperationId, WorkerId, fresh
from shared.messages import Endpoint, Grant, Range
from shared.telemetry import metrics
from shared.transfer import copy, cuda, nvlink, rdma, shm, tcp
from shared.transfer.addresses import DeviceAddress, advertised_host, host_clock_s, host_id, join_address
from shared.transfer.fabric import Fabric
from shared.transfer.frames import MAX_NAME, MAX_NOTE_BYTES
from shared.transfer.lane import Lane, Sender, call_on
from shared.transfer.ledger import ANYBODY, Ledger
from shared.transfer.native import find_native
from shared.transfer.plan import RULES
from shared.transfer.push import Push, PushStream, start_push
from shared.transfer.receiver import OpenSession, Receiver
from shared.transfer.router import MakeLane, Router
from shared.transfer.segment import DeviceSegment, Segment
from shared.transfer.settings import TransferSettings
from shared.transfer.statistics import Counts, Statistics
from shared.transfer.types import Notification, Slice
from shared.transfer.verbs import VerbsError

_log = logging.getLogger(__name__)

LANES: Mapping[str, MakeLane] = {
    copy.PATH: copy.CopyLane, nvlink.PATH: nvlink.NvlinkLane, shm.PATH: shm.ShmLane, tcp.PATH: tcp.TcpLane,
}
"""{path: what makes a lane on it}; RDMA's has the opened devices with it. Whether a path connects two ends is said by
:data:`shared.transfer.plan.RULES`."""

WATCH_S = 0.1
"""Pause between two looks for what is overdue."""
MAX_NOTIFICATIONS = 4096
"""Notifications that nobody has taken yet; further ones are refused to their senders."""


class TransferEngine:
    """One per worker process; made by :meth:`open`, used from the event loop that opened it.

    Its segments may be read and written by anybody who was given their ``buffer``; a range that is granted to an
    operation belongs to that operation's writers until :meth:`release` has returned. ``settings``, ``router``,
    ``sender``, ``check``, ``begin_unregister`` and ``finish_unregister`` are for the package's own modules.
    """

    def __init__(self, worker: WorkerId, incarnation: Incarnation, host: HostId, settings: TransferSettings,
                 clock: Clock) -> None:
        self.settings = settings
        self._segments: dict[str, Segment] = {}
        self._leaving: set[str] = set()
        """Names of segments that are being unregistered: nothing is granted of them or pushed from them any more."""
        self._ledger = Ledger(worker, incarnation, self._segments, clock=clock)
        self._loop = asyncio.get_running_loop()
        self._notifications: deque[Notification] = deque()
        self._notified = asyncio.Event()
        name = f"transfer-{worker}"
        native = self._native = find_native(settings)
        self._receiver = Receiver(
            self._ledger, host=host, checksums=settings.checksums, clock=clock,
            max_connections=settings.max_connections, native=native, name=name, notify=self._notify,
            can_notify=lambda: len(self._notifications) < MAX_NOTIFICATIONS)
        self.sender = Sender(worker, incarnation, host, self._segments, clock, settings.proofs,
                              settings.connect_timeout_s, name, native)
        self._endpoint = Endpoint(worker=worker, incarnation=incarnation, host=host)
        self._lanes = dict(LANES)
        self.router = Router(self._lanes, self.sender, settings, clock, self._endpoint,
                             Counts(self._ledger.received_bytes_by_path))
        self._fabric: Fabric | None = None
        self._private_dir = ""
        self._socket_paths: list[str] = []

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *, worker: WorkerId, incarnation: Incarnation, host: HostId | None = None,
        settings: TransferSettings | None = None, clock: Clock | None = None,
    ) -> AsyncIterator[TransferEngine]:
        """Listens on every path that ``settings`` allow; leaving frees threads, sockets and segments.

        ``host`` falls back to ``settings.host_id`` and then to :func:`host_id`. Raises :class:`SettingError`.
        """
        settings = _checked(settings or TransferSettings())
        for path in settings.paths:
            if path not in RULES:
                raise SettingError("transfer_paths", path, f"some of {', '.join(RULES)}")
        engine = cls(worker, incarnation, HostId(settings.host_id) if settings.host_id else host or host_id(),
                     settings, clock or SystemClock())
        watch: asyncio.Task[None] | None = None
        try:
            if engine._native is not None:
                engine._native.start(f"transfer-{worker}")
            engine._listen()
            watch = asyncio.create_task(engine._watch(), name=f"transfer-{worker}-watch")
            yield engine
        finally:
            if watch is not None:
                watch.cancel()
                await asyncio.wait([watch])
            await engine._close()

    @property
    def endpoint(self) -> Endpoint:
        """How peers reach this engine."""
        return self._endpoint

    # -- memory -------------------------------------------------------------------------------------------------

    def register(self, name: str, nbytes: int = 0, *, memory: Any = None) -> Segment:
        """Memory to push from, and into under a grant: ``nbytes`` new zeroed bytes, or ``memory`` that exists.

        ``memory``: a numpy array, CPU or CUDA tensor, memoryview or bytearray (writable, contiguous; kept alive),
        the descriptor of a memfd (stays the caller's), or a device's memory (:class:`DeviceMemory`). It stays
        registered until :meth:`unregister`, or the engine closes. With the first CUDA tensor the :attr:`endpoint`
        changes: peers on this host may reach its GPU then. A device's memory is registered with RDMA's cards here.
        """
        self._check_open()
        if name in self._segments or not 0 < len(name) <= MAX_NAME:
            raise Bug(f"segment name {name!r} is taken or unusable")
        if memory is not None and nbytes:
            raise Bug(f"segment {name} is to have {nbytes} bytes, and memory that has as many as it has")
        if memory is None:
            segment = Segment.allocate(name, nbytes, huge_pages=self.settings.huge_pages)
        else:
            segment = Segment.adopt(name, memory)
        if isinstance(segment, DeviceSegment):
            self._serve_device(segment)
        segment.native = self._native
        self._segments[name] = segment
        return segment

    async def unregister(self, name: str) -> None:
        """Forgets a segment; from when this returns on, nobody reads or writes it. What was granted of it is void.

        Pushes from it are cancelled; writers into it are cut off.
        """
        await self.finish_unregister(self.begin_unregister(name))

    def begin_unregister(self, name: str) -> Segment:
        """Refuses new pushes from a segment and new grants of it; :meth:`finish_unregister` does the rest."""
        segment = self._segments.get(name)
        if segment is None or name in self._leaving:
            raise Bug(f"no segment {name!r} is registered")
        self._leaving.add(name)
        return segment

    async def finish_unregister(self, segment: Segment) -> None:
        """See :meth:`unregister`."""
        name = segment.name
        try:
            pushes = [push for push in self.router.pushes if push.uses(name)]
            for push in pushes:
                push.cancel()
            for push in pushes:
                await push
            quiet: asyncio.Future[None] = self._loop.create_future()
            self._ledger.retire(name, partial(call_on, self._loop, _resolve, quiet))
            await quiet
            del self._segments[name]
        finally:
            self._leaving.discard(name)
        self.router.forget(segment.serial)
        if self._fabric is not None:
            await asyncio.to_thread(self._fabric.forget, segment.serial)
        segment.close()

    def grant(self, operation: OperationId, ranges: Sequence[Range], *, ttl_s: float,
              peer: WorkerId = ANYBODY) -> Grant:
        """Leave for a peer to write ``ranges`` for ``operation``; see :meth:`Ledger.grant`."""
        self._check_open()
        if not 0 < ttl_s < inf:
            raise Bug(f"grant for {operation} of {ttl_s} s")
        leaving = next((item for item in ranges if item.segment in self._leaving), None)
        if leaving is not None:
            raise Bug(f"grant for {operation} of memory that is being unregistered: {leaving}")
        return self._ledger.grant(operation, ranges, ttl_s=ttl_s, peer=peer)

    def covered(self, operation: OperationId, range: Range) -> bool:
        """Has every byte of ``range`` been written and verified under ``operation``, with no writer in it now?

        It may be written again as long as the operation is not :meth:`shut`.
        """
        return self._ledger.covered(operation, range)

    def shut(self, operation: OperationId) -> None:
        """Refuses new writers: what is :meth:`covered` from now on stays so. Idempotent; :meth:`release` implies it."""
        self._ledger.shut(operation)

    def received_bytes(self, operation: OperationId) -> int:
        """Distinct bytes that arrived verified under ``operation``; 0 once it is released."""
        return self._ledger.received_bytes(operation)

    async def release(self, operation: OperationId) -> None:
        """Revokes the operation's grants and returns once no writer can touch their ranges any more.

        Writers end by themselves or at their deadline, when their connection is cut. Idempotent.
        """
        quiet: asyncio.Future[None] = self._loop.create_future()
        self._ledger.revoke(operation, partial(call_on, self._loop, _resolve, quiet))
        await quiet

    async def notifications(self) -> AsyncIterator[Notification]:
        """What senders wanted known, each after all that it speaks of was committed. For one consumer; never ends."""
        while True:
            while self._notifications:
                yield self._notifications.popleft()
            self._notified.clear()
            await self._notified.wait()

    # -- sending ------------------------------------------------------------------------------------------------

    def push(self, peer: Endpoint, slices: Sequence[Slice], grant: Grant, *, timeout_s: float | None = None,
             notify: bytes | None = None) -> Push:
        """Writes ``slices`` into ``peer``'s memory under its ``grant``; starts at once, ``await`` it for the result.

        Every trouble with the transfer is a status of the slices it concerns. Do not change the source bytes
        before it has ended. ``timeout_s`` falls back to a deadline in proportion to the size. ``notify`` (at most 64
        KiB) is told to the peer's owner once every slice was committed, and not at all if one was not.
        Raises :class:`Bug` for a slice that is not of our memory.
        """
        timeout_s = self.settings.timeout_s(self.check(slices, notify), timeout_s)
        return start_push(self.router, peer, slices, grant, deadline_s=host_clock_s() + timeout_s, note=notify)

    def stream(self, peer: Endpoint, grant: Grant, *, timeout_s: float | None = None) -> PushStream:
        """Pushes under one grant that end together, such as layers that are sent while the next ones are computed.

        ``timeout_s`` counts for each of them, and falls back to a deadline in proportion to its size.
        """
        return PushStream(peer.worker, self.check,
                          lambda slices, note: self.push(peer, slices, grant, timeout_s=timeout_s, notify=note))

    def statistics(self) -> Statistics:
        """Counters since the engine was opened."""
        ledger, receiver, counts = self._ledger, self._receiver, self.router.counts
        counts.flush()
        return Statistics(
            pushes=dict(counts.pushes), sent_bytes=dict(counts.sent_bytes),
            received_bytes=dict(ledger.received_bytes_by_path), failures=dict(counts.failures),
            failovers=dict(counts.failovers), refused_claims=ledger.refused_claims,
            corrupt_spans=ledger.corrupt_spans, dropped_connections=dict(receiver.dropped),
            connections=receiver.connections)

    def check(self, slices: Sequence[Slice], notify: bytes | None = None) -> int:
        """Bytes of ``slices``; raises :class:`Bug` for one that is not of our memory, or a note that is too long."""
        if notify is not None and not (isinstance(notify, bytes) and len(notify) <= MAX_NOTE_BYTES):
            raise Bug(f"a notification is at most {MAX_NOTE_BYTES} bytes, not {len(notify)} of {type(notify).__name__}")
        nbytes = 0
        for item in slices:
            remote, segment = item.remote, self._segments.get(item.segment)
            length = extent = remote.length
            if item.count != 1:
                if item.count < 1 or item.stride < length:
                    raise Bug(f"parts of a slice overlap: {item}")
                extent = item.extent
            if segment is None or item.offset < 0 or length < 0 or item.offset + extent > segment.nbytes:
                raise Bug(f"slice of bytes that are not ours: {item}")
            if remote.offset < 0 or item.segment in self._leaving:
                raise Bug(f"slice to bytes that nobody has, or of memory that is being unregistered: {item}")
            nbytes += length * item.count
        return nbytes

    def _check_open(self) -> None:
        if self.router.closed:
            raise Bug("this engine was closed")

    def _notify(self, notification: Notification) -> None:
        """From a session's thread."""
        self._notifications.append(notification)
        call_on(self._loop, self._notified.set)

    # -- life ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        settings, own = self.settings, self._endpoint
        addresses: dict[str, Any] = {}
        if tcp.PATH in settings.paths:
            try:
                sock, port = tcp.listen_tcp(settings.host)
            except OSError as error:
                raise _cannot_listen("transfer_host", settings.host, "an address of this host", error) from error
            self._receiver.listen(sock, tcp.open_session)
            addresses["tcp"] = join_address(advertised_host(settings.host, settings.advertise), port)
        if shm.PATH in settings.paths:
            addresses["shm"] = self._listen_unix(shm.open_session)
        if rdma.PATH in settings.paths:
            addresses["rdma"] = self._listen_rdma()
        self._endpoint = self.router.own = msgspec.structs.replace(own, paths=list(settings.paths), **addresses)
        if copy.PATH in settings.paths:
            copy.register_local(self._endpoint, self._receiver)

    def _listen_rdma(self) -> str:
        """The address; empty where there is no device, unless one was asked for."""
        settings = self.settings
        host = advertised_host(settings.host, settings.advertise)
        try:
            fabric = self._fabric = Fabric.open(
                devices=settings.rdma_devices, host=host,
                gid_index=settings.rdma_gid_index if settings.rdma_gid_index >= 0 else None)
        except VerbsError as error:
            if settings.rdma_devices:
                raise SettingError("transfer_rdma_devices", ", ".join(settings.rdma_devices),
                                   f"active RDMA devices ({error.strerror})") from error
            _log.info("action=rdma_unavailable why=%r", error.strerror)
            return ""
        try:
            sock, port = tcp.listen_tcp(settings.host)
        except OSError as error:
            raise _cannot_listen("transfer_host", settings.host, "an address of this host", error) from error
        self._receiver.listen(sock, partial(rdma.open_session, fabric))
        self._lanes[rdma.PATH] = partial(rdma.RdmaLane, fabric)
        return join_address(host, port)

    def _serve_device(self, segment: DeviceSegment) -> None:
        """Offers its GPU to peers of this host, and finds out how RDMA's cards get at it."""
        if self._fabric is not None:
            self._fabric.expose(segment)
        if segment.gpu is None:
            return
        own = self._endpoint
        index = segment.gpu.device.index
        device = next((device for device in cuda.probe().devices if device.index == index), None)
        if nvlink.PATH in self.settings.paths and device is not None:
            if not own.nvlink:
                address = DeviceAddress(self._listen_unix(nvlink.open_session), device.uuid, device.reaches)
                own = msgspec.structs.replace(own, nvlink=str(address))
            elif DeviceAddress.parse(own.nvlink).device != device.uuid:
                raise Bug(f"segment {segment.name} is on GPU {index}, others of this engine are on another")
        self._endpoint = self.router.own = own

    def _listen_unix(self, open_session: OpenSession) -> str:
        """Path of a new socket that is listened on."""
        path = self._new_socket_path()
        try:
            self._receiver.listen(shm.listen_shm(path), open_session)
        except OSError as error:
            raise _cannot_listen("transfer_socket_dir", self.settings.socket_dir, "a writable directory",
                                 error) from error
        self._socket_paths.append(path)
        return path

    def _new_socket_path(self) -> str:
        directory = self.settings.socket_dir or self._private_dir
        if not directory:
            directory = self._private_dir = sockets.private_directory()
        elif not self._socket_paths:
            sockets.sweep(Path(directory))
        path = os.path.abspath(os.path.join(directory, f"{fresh('t', 6)}.sock"))
        if len(os.fsencode(path)) > shm.MAX_SOCKET_PATH_BYTES:
            raise SettingError("transfer_socket_dir", directory, f"a path so short that {path} has at most "
                                                                 f"{shm.MAX_SOCKET_PATH_BYTES} bytes; /tmp is one")
        return path

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self._receiver.watch()
                self.router.tidy()
                metrics.TRANSFER_IN_FLIGHT_BYTES.set(self.router.inflight_bytes)
                self.router.counts.flush()
            except Exception:  # without it no writer would ever be overdue, and a release could wait for ever
                _log.exception("action=watch_failed worker=%s", self._endpoint.worker)

    async def _close(self) -> None:
        """Stops sending, then receiving, then drops the memory; waits for every thread."""
        copy.unregister_local(self._endpoint)
        lanes = self.router.close()
        self.router.counts.flush()
        await asyncio.to_thread(self._free, lanes)

    def _free(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.join()
        self._receiver.close()
        self._ledger.close()
        if self._native is not None:
            self._native.close()
        if self._fabric is not None:
            self._fabric.close()
        for segment in self._segments.values():
            segment.close()
        for path in self._socket_paths:
            Path(path).unlink(missing_ok=True)
        if self._private_dir:
            os.rmdir(self._private_dir)


def _cannot_listen(name: str, value: str, expected: str, error: OSError) -> UserError:
    """What stands in the way: seldom anything but the setting."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(f"the transfer engine cannot listen: {error.strerror}; raise the limit (ulimit -n)")
    return SettingError(name, value, f"{expected} ({error})")


def _checked(settings: TransferSettings) -> TransferSettings:
    """Raises :class:`SettingError` for values that could not have come from the environment either."""
    try:
        return msgspec.convert(msgspec.to_builtins(settings), TransferSettings)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = f"transfer_{where.rstrip('`')}"
        value = getattr(settings, where.rstrip("`").partition("[")[0], "")
        expected = what.removeprefix("Expected ") if what.startswith("Expected ") else f"another one ({what})"
        raise SettingError(name, str(value), expected) from error


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
