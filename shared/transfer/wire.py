"""Frames over a connected stream socket, with descriptors where the socket can carry them."""

from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.transfer import frames

Bytes = npt.NDArray[np.uint8]


class Closed(Exception):
    """The other side closed the connection, or we shut it down."""


class Connection:
    """Blocking; any thread may send (frames never mix), one thread receives.

    :meth:`shutdown` wakes whoever is blocked. :meth:`close` releases the descriptor: call it once no other
    thread uses the connection.
    """

    def __init__(self, sock: socket.socket, *, takes_descriptors: bool = False) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._takes_descriptors = takes_descriptors

    def send(self, body: frames.Body, payload: Sequence[Bytes] = (), descriptors: Sequence[int] = ()) -> None:
        """One frame; ``payload`` is gathered from where it lies. Raises ``OSError``."""
        parts: list[memoryview] = [memoryview(frames.encode(body)), *(part.data for part in payload)]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with self._sending:
            while parts:
                sent = self._sock.sendmsg(parts, ancillary)
                ancillary = []
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]

    def receive_header(self) -> tuple[frames.Kind, int, list[int]]:
        """Kind, body length and descriptors (owned by the caller) of the next frame.

        Raises :class:`Closed`, ``OSError`` or :class:`frames.FrameError`.
        """
        header = bytearray(frames.HEADER_BYTES)
        view = memoryview(header)
        descriptors: list[int] = []
        try:
            while view:
                if self._takes_descriptors:
                    received, new = _receive_with_descriptors(self._sock, view)
                    descriptors += new
                else:
                    received = self._sock.recv_into(view)
                if received == 0:
                    raise Closed
                view = view[received:]
            kind, length = frames.parse_header(bytes(header))
        except BaseException:
            close_all(descriptors)
            raise
        return kind, length, descriptors

    def receive_body(self, kind: frames.Kind, length: int) -> frames.Body:
        """The body that a header announced."""
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return frames.decode(kind, bytes(data))

    def receive_into(self, view: memoryview) -> None:
        """Fills ``view``; raises :class:`Closed` when the stream ends before."""
        while view:
            received = self._sock.recv_into(view, len(view), socket.MSG_WAITALL)
            if received == 0:
                raise Closed
            view = view[received:]

    def set_timeout(self, timeout_s: float | None) -> None:
        """For the handshake only: both directions share it."""
        self._sock.settimeout(timeout_s)

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Ends one or both directions; the other side reads the end of the stream."""
        try:
            self._sock.shutdown(how)
        except OSError:
            pass  # the other side was faster: it is ended already

    def close(self) -> None:
        """Releases the descriptor."""
        self._sock.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Closes what nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)


def keep_alive(sock: socket.socket) -> None:
    """A TCP peer that vanished without a word is noticed within about 20 s even when nobody sends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


def _receive_with_descriptors(sock: socket.socket, view: memoryview) -> tuple[int, list[int]]:
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(frames.MAX_SEGMENTS * descriptors.itemsize)
    received, ancillary, _, _ = sock.recvmsg_into([view], room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[:len(data) - len(data) % descriptors.itemsize])
    return received, list(descriptors)
