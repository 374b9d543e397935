"""Frames over a connected stream socket, with descriptors where the socket can carry them."""

from __future__ import annotations

import array
import select
import socket
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shared.transfer import frames
from shared.transfer.addresses import host_clock_s
from shared.transfer.channel import Channel, Closed, split_parts
from shared.transfer.native import Differ, Native

Bytes = npt.NDArray[np.uint8]
READ_AHEAD_BYTES = 16 << 10
"""Read in one go, in the hope of a whole frame."""


class Connection(Channel):
    """Frames out from any thread (they never mix), frames in by one reader."""

    def __init__(self, sock: socket.socket, *, takes_descriptors: bool = False) -> None:
        super().__init__(sock, read_ahead_bytes=READ_AHEAD_BYTES, takes_descriptors=takes_descriptors,
                         max_descriptors=2 * frames.MAX_ATTACHED)
        self._differ: Differ | None = None
        self._echo: frames.Echo | None = None
        """For a claim that has the names of the one before."""
        self._readiness: select.epoll | None = None
        self._sending = threading.Lock()
        self._unsent: list[memoryview] = []
        """What the kernel did not take at once; goes out before anything else. Under ``_sending``."""

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
            parts, later = (parts, []) if at_most is None else split_parts(parts, len(parts[0]) + at_most)
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

    # -- life ---------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout_s: float | None) -> None:
        """For the handshake only: both directions share it."""
        self._sock.settimeout(timeout_s)

    def close(self) -> None:
        if self._readiness is not None:
            self._readiness.close()
        super().close()


def _send_some(sock: socket.socket, parts: list[memoryview], descriptors: Sequence[int],
               flags: int) -> list[memoryview]:
    """One system call; what it left of ``parts``."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    return split_parts(parts, sock.sendmsg(parts, ancillary, flags))[1]


def keep_alive(sock: socket.socket, *, gone_s: float = 20.0) -> None:
    """A TCP peer that vanished without a word is noticed within ``gone_s``, and in twice that when nobody sends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(gone_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(gone_s / 6)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(gone_s * 1e3))
