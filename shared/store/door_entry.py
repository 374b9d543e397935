"""The way to a door: where it listens, the tokens that open it, and who is let in. On the worker's event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from hmac import compare_digest
from pathlib import Path

from shared import sockets
from shared.bus.bus import Delivery
from shared.bus.subjects import tenant_token
from shared.errors import SettingError
from shared.ids import fresh, tenant_fault
from shared.messages import DoorOpened, DoorRefused, OpenDoor
from shared.store import door_frames as frames
from shared.store.door_keep import Keep, tally
from shared.transfer.addresses import advertised_host, join_address
from shared.transfer.frames import FrameError
from shared.transfer.shm import MAX_SOCKET_PATH_BYTES, check_clock, listen_shm
from shared.transfer.tcp import listen_tcp

log = logging.getLogger(__name__)

TOKEN_S = 60.0
"""How long a token opens the door; connections that are open stay."""
RETRY_S = 0.1
"""Pause after connections could not be accepted."""
_QUEUED = 128
_CREDENTIALS = struct.Struct("3i")
"""Of a process: pid, uid, gid."""


class Entry:
    """``on_connection`` gets every connection that is made, whoever made it."""

    def __init__(self, keep: Keep, on_connection: Callable[[socket.socket], None]) -> None:
        self._keep, self._on_connection = keep, on_connection
        self._loop = asyncio.get_running_loop()
        self._secret = secrets.token_bytes(32)
        self._listeners: list[socket.socket] = []
        self._shm = self._tcp = self._directory = ""
        self.read_only = -1
        """Descriptor of our memory that cannot be mapped for writing; -1 where nobody can map it."""

    def listen(self) -> None:
        """Where the settings say. Raises :class:`SettingError`; :meth:`close` all the same."""
        settings, segment = self._keep.settings, self._keep.segment
        if "tcp" in settings.paths:
            try:
                sock, port = listen_tcp(settings.host)
            except OSError as error:
                raise SettingError("transfer_host", settings.host, f"an address of this host ({error})") from error
            self._tcp = join_address(advertised_host(settings.host, settings.advertise), port)
            self._accept_on(sock)
        if "shm" in settings.paths and segment.mappable:
            directory = settings.socket_dir  # which the transfer engine, opened first, has swept
            if not directory:
                directory = self._directory = sockets.private_directory()
            path = os.path.abspath(os.path.join(directory, f"{fresh('d', 6)}.sock"))
            if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
                raise SettingError("transfer_socket_dir", directory, f"a path so short that {path} has at most "
                                                                     f"{MAX_SOCKET_PATH_BYTES} bytes; /tmp is one")
            try:
                sock = listen_shm(path)
            except OSError as error:
                raise SettingError("transfer_socket_dir", directory, f"a writable directory ({error})") from error
            self._shm = path
            # What a client maps it must not be able to write by mistake.
            self.read_only = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._accept_on(sock)

    async def on_open(self, delivery: Delivery) -> DoorOpened | DoorRefused:
        """Somebody asks over the bus how to come in."""
        ask: OpenDoor = delivery.message
        keep = self._keep
        if delivery.params["tenant"] != tenant_token(ask.tenant):  # the bus's permissions are for the subject
            tally("open", "tenant")
            return DoorRefused(code="tenant", message=f"asked for tenant {ask.tenant!r} by the subject of another: "
                                                      f"{delivery.subject}")
        if fault := tenant_fault(ask.tenant):
            tally("open", "tenant")
            return DoorRefused(code="tenant", message=fault)
        if ask.spec != keep.spec.digest:
            tally("open", "spec")
            return DoorRefused(code="spec", message=f"worker {keep.worker} keeps values of another cache spec: "
                                                    f"{keep.spec.model}, {keep.block_bytes} bytes each")
        tally("open", "ok")
        expires_at_s = keep.clock.wall() + TOKEN_S
        token = frames.sign(self._secret, client=ask.client, incarnation=ask.incarnation, spec=ask.spec,
                            tenant=ask.tenant, expires_at_s=expires_at_s)
        return DoorOpened(worker=keep.worker, incarnation=keep.incarnation, host=keep.host, shm=self._shm,
                          tcp=self._tcp, token=token, expires_at_s=expires_at_s, block_bytes=keep.block_bytes,
                          num_blocks=keep.num_blocks)

    def objection(self, enter: frames.Enter, *, local: bool) -> tuple[str, str] | None:
        """Code and reason why this one is not let in."""
        if enter.version != frames.VERSION:
            return "version", f"this door speaks version {frames.VERSION}, not {enter.version}"
        token = frames.sign(self._secret, client=enter.client, incarnation=enter.incarnation, spec=enter.spec,
                            tenant=enter.tenant, expires_at_s=enter.expires_at_s)
        if not compare_digest(token, enter.token):
            return "token", "the token is not of this door, or not for this client"
        late_s = self._keep.clock.wall() - enter.expires_at_s
        if late_s >= 0:
            return "token", f"the token expired {late_s:.1f} s ago"
        if local:
            try:
                check_clock(enter.clock_s)
            except FrameError as error:
                return "clock", str(error)
        return None

    def stop(self) -> None:
        """Nobody comes any more."""
        for sock in self._listeners:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._listeners.clear()

    def close(self) -> None:
        """Releases what the addresses were made of; blocks for a moment."""
        if self.read_only >= 0:
            os.close(self.read_only)
            self.read_only = -1
        if self._shm:
            Path(self._shm).unlink(missing_ok=True)
        if self._directory:
            os.rmdir(self._directory)

    def _accept_on(self, sock: socket.socket) -> None:
        sock.listen(_QUEUED)
        sock.setblocking(False)
        self._listeners.append(sock)
        self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return  # a client that left while queued
        except OSError as error:  # out of descriptors: who waits goes on waiting, and the loop must not wait on them
            log.warning("action=door_accept_failed error=%s", error)
            self._loop.remove_reader(listener.fileno())
            self._loop.call_later(RETRY_S, self._accept_again, listener)
            return
        self._on_connection(sock)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)


def peer_of(sock: socket.socket) -> str:
    """Who is at the other end: an address, or a process of this host."""
    if sock.family == socket.AF_UNIX:
        pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return f"process {pid}"
    try:
        return str(sock.getpeername()[0])
    except OSError:  # it is gone already
        return ""
