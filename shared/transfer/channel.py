"""A connected stream socket as both protocols of the data plane use it: the engine's and the store's door."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from typing import TYPE_CHECKING

from shared.transfer.addresses import host_clock_s
from shared.transfer.frames import FrameError

if TYPE_CHECKING:
    from shared.transfer._native import Stream

_DESCRIPTOR_BYTES = array.array("i").itemsize
# Plain numbers: to combine the module's own flags takes longer than to send a frame.
_ALL, _CLOEXEC = int(socket.MSG_WAITALL), int(socket.MSG_CMSG_CLOEXEC)


class Closed(Exception):
    """The other side closed the connection, or we shut it down."""


class Channel:
    """Bytes in with read-ahead, descriptors where the socket carries them, and deadlines that the kernel keeps.

    One reader: a thread that blocks, or an event loop. :meth:`shutdown` wakes whoever is blocked. :meth:`close`
    releases the descriptors: call it once nobody else uses the connection.
    """

    def __init__(self, sock: socket.socket, *, read_ahead_bytes: int, takes_descriptors: bool,
                 max_descriptors: int) -> None:
        self._sock = sock
        self._stream: Stream | None = None
        """What looks for bytes before it sleeps, where that can be had."""
        self._deadline_s: float | None = None
        self._patience_s = 0.0
        self._takes_descriptors = takes_descriptors
        self._max_descriptors = max_descriptors
        """That may have come and not been taken; half as many come at once."""
        self._room = socket.CMSG_SPACE(max_descriptors // 2 * _DESCRIPTOR_BYTES)
        self._ahead = memoryview(bytearray(read_ahead_bytes))
        self._low = self._high = 0
        """``_ahead[_low:_high]`` was read and not used yet."""
        self._hang_up = select.poll()
        self._hang_up.register(sock, select.POLLRDHUP)
        self.descriptors: list[int] = []
        """Received and not taken by a frame yet; ours."""

    # -- in -----------------------------------------------------------------------------------------------------

    def receive_into(self, view: memoryview) -> None:
        """Fills ``view``, straight from the socket but for what was read ahead. Blocks.

        Raises :class:`Closed` when the stream ends before.
        """
        ahead = min(self._high - self._low, len(view))
        if ahead:
            view[:ahead] = self._take(ahead)
            view = view[ahead:]
        while view:
            received = self._receive(view, _ALL)
            if received == len(view):
                return
            if received == 0:
                raise Closed
            view = view[received:]

    def _read_ahead(self, flags: int) -> None:
        """Reads more behind what was read ahead."""
        if self._low == self._high:
            self._low = self._high = 0
        elif self._high == len(self._ahead):
            self._ahead[:self._high - self._low] = self._ahead[self._low:self._high]
            self._low, self._high = 0, self._high - self._low
        received = self._receive(self._ahead[self._high:], flags)
        if received == 0:
            raise Closed
        self._high += received

    def _receive(self, view: memoryview, flags: int) -> int:
        stream = self._stream
        if not self._takes_descriptors:
            return self._sock.recv_into(view, len(view), flags) if stream is None else stream.receive(view, flags)
        if stream is not None:
            received = stream.receive(view, flags, self.descriptors)
        else:
            received, ancillary, _, _ = self._sock.recvmsg_into([view], self._room, flags | _CLOEXEC)
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors = array.array("i")
                    descriptors.frombytes(data[:len(data) - len(data) % descriptors.itemsize])
                    self.descriptors.extend(descriptors)
        if len(self.descriptors) > self._max_descriptors:
            raise FrameError(f"{len(self.descriptors)} descriptors came that no frame has spoken of")
        return received

    def _take(self, nbytes: int) -> memoryview:
        self._low += nbytes
        return self._ahead[self._low - nbytes:self._low]

    # -- life ---------------------------------------------------------------------------------------------------

    def set_patience(self, deadline_s: float) -> float:
        """What would block beyond ``deadline_s`` raises ``BlockingIOError``; it still blocks in the kernel.

        ``deadline_s`` is on the host's clock, and kept to a tenth of the time that is left. Returns the seconds left.
        """
        left_s = deadline_s - host_clock_s()
        if left_s <= 0:
            raise BlockingIOError
        self._deadline_s = deadline_s
        if abs(left_s - self._patience_s) > 0.1 * left_s:  # the kernel need not be told of everything that is sent
            self._tell_patience(left_s, max(1000, int(left_s % 1 * 1e6)))
        return left_s

    def set_idle(self) -> None:
        """No deadline: waits for the other side for as long as it takes."""
        self._deadline_s = None
        if self._patience_s:
            self._tell_patience(0.0, 0)

    def _tell_patience(self, patience_s: float, micros: int) -> None:
        self._patience_s = patience_s
        value = struct.pack("ll", int(patience_s), micros)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    def hung_up(self) -> bool:
        """Has the other side, or have we, ended the stream, whatever may be left to read of it?"""
        return bool(self._hang_up.poll(0))

    def shorten_queues(self, nbytes: int) -> None:
        """Bounds what the kernel holds of either direction.

        Between two ends of one host the bytes in the queue then stay in the processor's cache from one end to
        the other; over a network the kernel's own choice is the better one.
        """
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)

    def shutdown(self) -> None:
        """Ends both directions, from any thread; the other side reads the end of the stream."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster: it is ended already

    def close(self) -> None:
        """Releases the descriptors. Idempotent."""
        self._sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def split_parts(parts: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first ``nbytes`` of ``parts``, and the rest."""
    for i, part in enumerate(parts):
        if nbytes < len(part):
            return [*parts[:i], part[:nbytes]], [part[nbytes:], *parts[i + 1:]]
        nbytes -= len(part)
    return parts, []
