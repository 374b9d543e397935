"""Frames over a connected stream socket, with descriptors where the socket can carry them."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shared.transfer import frames
from shared.transfer.addresses import host_clock_s
from shared.transfer.native import Differ, Native

if TYPE_CHECKING:
    from shared.transfer._native import Stream

Bytes = npt.NDArray[np.uint8]
_ROOM = socket.CMSG_SPACE(frames.MAX_ATTACHED * array.array("i").itemsize)
READ_AHEAD_BYTES = 16 << 10
"""Read in one go, in the hope of a whole frame."""


class Closed(Exception):
    """The other side closed the connection, or we shut it down."""


class Connection:
    """Frames out from any thread (they never mix), frames in by one reader: a thread that blocks, or an event loop.

    :meth:`shutdown` wakes whoever is blocked. :meth:`close` releases the descriptor: call it once no other
    thread uses the connection.
    """

    def __init__(self, sock: socket.socket, *, takes_descriptors: bool = False) -> None:
        self._sock = sock
        self._stream: Stream | None = None
        self._differ: Differ | None = None
        self._echo: frames.Echo | None = None
        """For a claim that has the names of the one before."""
        self._readiness: select.epoll | None = None
        self._deadline_s: float | None = None
        self._patience_s = 0.0
        self._hang_up = select.poll()
        self._hang_up.register(sock, select.POLLRDHUP)
        self._sending = threading.Lock()
        self._unsent: list[memoryview] = []
        """What the kernel did not take at once; goes out before anything else. Under ``_sending``."""
        self._takes_descriptors = takes_descriptors
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self._low = self._high = 0
        """``_ahead[_low:_high]`` was read and not used yet."""
        self.descriptors: list[int] = []
        """Received and not taken by a frame yet; ours."""

    def hasten(self, native: Native | None) -> None:
        """From here on what receives looks for bytes before it sleeps, where that can be had. The socket blocks."""
        if native is not None:
            self._stream = native.stream(self._sock.fileno())
            self._differ = native.differ

    def readiness(self) -> int:
        """A descriptor, ours, that an event loop can watch for something to receive.

        It is not the socket's own: a loop makes what it watches non-blocking, and the thread that sends wants to block.
        """
        if self._readiness is None:
            self._readiness = select.epoll()
            self._readiness.register(self._sock, select.EPOLLIN)
        return self._readiness.fileno()

    # -- out ----------------------------------------------------------------------------------------------------

    def send(self, body: frames.Body, payload: Sequence[Bytes] = (), descriptors: Sequence[int] = ()) -> None:
        """One frame; ``payload`` is gathered from where it lies. Blocks. Raises ``OSError``."""
        parts = [memoryview(frames.encode(body)), *(part.data for part in payload)]
        with self._sending:
            self._send_rest(self._unsent)
            self._send_rest(_send_some(self._sock, parts, descriptors, 0))

    def send_whole(self, frame: bytes) -> None:
        """A frame that is encoded already. Blocks. Raises ``OSError``."""
        with self._sending:
            if self._unsent:
                self._send_rest(self._unsent)
            sent = self._sock.send(frame)
            if sent < len(frame):
                self._send_rest([memoryview(frame)[sent:]])

    def exchange(self, frame: bytes, memory: memoryview, start: int, nbytes: int, wanted: bytes) -> frames.Body | None:
        """Sends ``frame`` and ``nbytes`` of ``memory`` from ``start`` on, and receives the answer: ``None`` when it is
        the frame ``wanted``.

        For a connection that nobody else uses meanwhile, whose answers are all received and whose patience is set.
        Blocks. Raises what :meth:`send` and :meth:`receive` raise.
        """
        ahead, stream, deadline_s = self._ahead, self._stream, self._deadline_s
        assert deadline_s is not None
        if stream is not None:
            received = stream.exchange(frame, memory, start, nbytes, ahead, wanted, deadline_s)
            if received is None:
                return None
            if not received:
                raise Closed
            self._low, self._high = 0, received
        else:
            self._send_rest([memoryview(frame), memory[start:start + nbytes]] if nbytes else [memoryview(frame)])
            self.set_patience(deadline_s)
            self._low = self._high = 0
            self._read_ahead(0)
            if ahead[:self._high] == wanted:
                self._low = self._high
                return None
        return self.receive()

    def send_now(self, body: frames.Body, payload: Sequence[Bytes] = (), descriptors: Sequence[int] = (), *,
                 at_most: int | None = None) -> bool | None:
        """Like :meth:`send`, but never blocks; the kernel is offered ``at_most`` that many bytes of the payload.

        True: the kernel has it. ``None``: the kernel has its beginning, :meth:`flush` owes the rest. False: nothing
        was sent, somebody else is sending.
        """
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if self._unsent:
                return False
            parts = [memoryview(frames.encode(body)), *(part.data for part in payload)]
            parts, later = (parts, []) if at_most is None else _split(parts, len(parts[0]) + at_most)
            try:
                self._unsent = _send_some(self._sock, parts, descriptors, socket.MSG_DONTWAIT) + later
            except BlockingIOError:
                return False
            return None if self._unsent else True
        finally:
            self._sending.release()

    def flush(self) -> None:
        """Sends what :meth:`send_now` could not. Blocks. Raises ``OSError``."""
        with self._sending:
            self._send_rest(self._unsent)

    def _send_rest(self, parts: list[memoryview]) -> None:
        while parts:
            if self._deadline_s is not None and host_clock_s() >= self._deadline_s:
                raise BlockingIOError  # the kernel finds no fault with waiting that got something out
            parts = _send_some(self._sock, parts, (), 0)
        self._unsent = []

    # -- in -----------------------------------------------------------------------------------------------------

    def receive(self, begun: Callable[[], None] = lambda: None) -> frames.Body:
        """The next frame's body; calls ``begun`` when a part of it is there and the rest is not. Blocks.

        Raises :class:`Closed`, ``OSError`` or :class:`frames.FrameError`.
        """
        if self._high == self._low:
            self._low = self._high = 0
            self._read_ahead(0)
        if self._high - self._low < frames.HEADER_BYTES:
            begun()
            while self._high - self._low < frames.HEADER_BYTES:
                self._read_ahead(0)
        if (echo := self._echo) is not None:
            assert self._differ is not None
            numbers = self._differ(self._ahead, self._low, self._high, echo.frame, echo.places)
            if numbers is not None and (write := echo.decode(*numbers)) is not None:
                self._low += len(echo.frame)
                return write
        start = self._low
        kind, length = frames.parse_header(self._ahead, start)
        self._low += frames.HEADER_BYTES
        if self._high - self._low >= length:
            body = frames.decode(kind, self._take(length))
            if self._differ is not None and frames.is_formed(self._ahead, start, kind):
                self._echo = frames.Echo.of(bytes(self._ahead[start:self._low]), body)
            return body
        begun()
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return frames.decode(kind, data)

    def receive_now(self) -> list[frames.Body]:
        """The frames that are there. Never blocks. They are short: longer ones are no answers of this protocol."""
        try:
            self._read_ahead(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        bodies = []
        while self._high - self._low >= frames.HEADER_BYTES:
            kind, length = frames.parse_header(self._ahead, self._low)
            whole = frames.HEADER_BYTES + length
            if whole > READ_AHEAD_BYTES:
                raise frames.FrameError(f"answer of {whole} bytes exceeds {READ_AHEAD_BYTES}")
            if self._high - self._low < whole:
                break
            self._low += frames.HEADER_BYTES
            bodies.append(frames.decode(kind, self._take(length)))
        return bodies

    def receive_into(self, view: memoryview) -> None:
        """Fills ``view``, straight from the socket but for what was read ahead. Blocks.

        Raises :class:`Closed` when the stream ends before.
        """
        ahead = min(self._high - self._low, len(view))
        if ahead:
            view[:ahead] = self._take(ahead)
            view = view[ahead:]
        while view:
            received = self._receive(view, socket.MSG_WAITALL)
            if received == len(view):
                return
            if received == 0:
                raise Closed
            view = view[received:]

    def _read_ahead(self, flags: int) -> None:
        """Reads more behind what was read ahead."""
        if self._low:
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
            received, ancillary, _, _ = self._sock.recvmsg_into([view], _ROOM, flags | socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors = array.array("i")
                    descriptors.frombytes(data[:len(data) - len(data) % descriptors.itemsize])
                    self.descriptors.extend(descriptors)
        if len(self.descriptors) > 2 * frames.MAX_ATTACHED:
            raise frames.FrameError(f"{len(self.descriptors)} descriptors came that no frame has spoken of")
        return received

    def _take(self, nbytes: int) -> memoryview:
        self._low += nbytes
        return self._ahead[self._low - nbytes:self._low]

    # -- life ---------------------------------------------------------------------------------------------------

    def hung_up(self) -> bool:
        """Has the other side ended the stream, whatever may be left to read of it?"""
        return bool(self._hang_up.poll(0))

    def set_timeout(self, timeout_s: float | None) -> None:
        """For the handshake only: both directions share it."""
        self._sock.settimeout(timeout_s)

    def set_patience(self, deadline_s: float) -> float:
        """What would block beyond ``deadline_s`` raises ``BlockingIOError``; it still blocks in the kernel.

        ``deadline_s`` is on the host's clock, and kept to a tenth of the time that is left. Returns the seconds left.
        """
        left_s = deadline_s - host_clock_s()
        if left_s <= 0:
            raise BlockingIOError
        self._deadline_s = deadline_s
        if abs(left_s - self._patience_s) > 0.1 * left_s:  # the kernel need not be told of every push
            self._patience_s = left_s
            value = struct.pack("ll", int(left_s), max(1000, int(left_s % 1 * 1e6)))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        return left_s

    def shorten_queues(self, nbytes: int) -> None:
        """Bounds what the kernel holds of either direction.

        Between two ends of one host the bytes in the queue then stay in the processor's cache from one end to
        the other; over a network the kernel's own choice is the better one.
        """
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)

    def shutdown(self) -> None:
        """Ends both directions; the other side reads the end of the stream."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster: it is ended already

    def close(self) -> None:
        """Releases the descriptors."""
        if self._readiness is not None:
            self._readiness.close()
        self._sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def _send_some(sock: socket.socket, parts: list[memoryview], descriptors: Sequence[int],
               flags: int) -> list[memoryview]:
    """One system call; what it left of ``parts``."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    return _split(parts, sock.sendmsg(parts, ancillary, flags))[1]


def _split(parts: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first ``nbytes`` of ``parts``, and the rest."""
    for i, part in enumerate(parts):
        if nbytes < len(part):
            return [*parts[:i], part[:nbytes]], [part[nbytes:], *parts[i + 1:]]
        nbytes -= len(part)
    return parts, []


def keep_alive(sock: socket.socket, *, gone_s: float = 20.0) -> None:
    """A TCP peer that vanished without a word is noticed within ``gone_s``, and in twice that when nobody sends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(gone_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(gone_s / 6)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(gone_s * 1e3))
