"""Frames of :mod:`shared.store.door_frames` over a connected stream socket, with descriptors over a unix one."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from shared.store import door_frames as frames
from shared.transfer.addresses import host_clock_s
from shared.transfer.native import Native

if TYPE_CHECKING:
    from shared.transfer._native import Stream

READ_AHEAD_BYTES = 64 << 10
_ROOM = socket.CMSG_SPACE(16 * array.array("i").itemsize)
_MAX_DESCRIPTORS = 32
# Plain numbers: to combine the module's own flags takes longer than to send a frame.
_NOW, _ALL, _CLOEXEC = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL), int(socket.MSG_CMSG_CLOEXEC)
T = TypeVar("T")


class Closed(Exception):
    """The other side ended the connection, or we did."""


class Late(Exception):
    """Not done by the deadline."""


class Line:
    """A connection: blocks in whatever thread uses it, one at a time; ``receive_now`` and ``send_now`` do not block."""

    def __init__(self, sock: socket.socket, decode: Callable[[memoryview], T]) -> None:
        self._sock = sock
        self._decode = decode
        self._takes_descriptors = sock.family == socket.AF_UNIX
        self._stream: Stream | None = None
        self._deadline_s: float | None = None
        self._patience_s = 0.0
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self._low = self._high = 0
        """``_ahead[_low:_high]`` was read and not used yet."""
        self._hang_up = select.poll()
        self._hang_up.register(sock, select.POLLRDHUP)
        self.descriptors: list[int] = []
        """Received and not taken by a frame yet; ours."""

    def fileno(self) -> int:
        """For an event loop."""
        return self._sock.fileno()

    def set_deadline(self, deadline_s: float) -> None:
        """Whatever would block beyond it, on the host's clock, raises :class:`Late`; kept to a tenth."""
        left_s = deadline_s - host_clock_s()
        if left_s <= 0:
            raise Late
        self._deadline_s = deadline_s
        if abs(left_s - self._patience_s) > 0.1 * left_s:  # the kernel need not be told of every request
            self._patience_s = left_s
            value = struct.pack("ll", int(left_s), max(1000, int(left_s % 1 * 1e6)))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    def set_blocking(self) -> None:
        """After an event loop has watched it, which makes it non-blocking."""
        self._sock.setblocking(True)

    def hasten(self, native: Native | None, *, takes_descriptors: bool) -> None:
        """From here on what receives looks for bytes before it sleeps, where that can be had."""
        self._takes_descriptors = takes_descriptors and self._takes_descriptors
        if native is not None:
            self._stream = native.stream(self._sock.fileno())

    def set_idle(self) -> None:
        """No deadline: waits for the other side for as long as it takes."""
        self._deadline_s = None
        if self._patience_s:
            self._patience_s = 0.0
            value = struct.pack("ll", 0, 0)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    # -- out ----------------------------------------------------------------------------------------------------

    def send(self, body: frames.Request | frames.Reply, payload: Sequence[memoryview] = (),
             descriptors: Sequence[int] = ()) -> None:
        """One frame; ``payload`` is gathered from where it lies. Raises :class:`Late` or ``OSError``."""
        data = frames.encode(body)
        if not payload and not descriptors:
            sent = self._try(self._sock.send, data)
            if sent == len(data):
                return
            data = data[sent:]
        parts = [memoryview(data), *payload]
        while parts:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            sent = self._try(self._sock.sendmsg, parts[:256], ancillary)
            descriptors = ()
            parts = _rest(parts, sent)

    def send_now(self, body: frames.Request | frames.Reply, descriptors: Sequence[int] = ()) -> bool:
        """One short frame, from an event loop. False when it did not go out at once: give the connection up."""
        data = frames.encode(body)
        try:
            if not descriptors:
                return self._sock.send(data, _NOW) == len(data)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            return self._sock.sendmsg([data], ancillary, _NOW) == len(data)
        except OSError:
            return False

    def ask(self, body: frames.Request) -> object:
        """Sends a question and receives its answer, when no other is under way."""
        if self._stream is None or self._deadline_s is None or self._low != self._high or self._takes_descriptors:
            self.send(body)
            return self.receive()
        received = self._try(self._stream.exchange, frames.encode(body), b"", 0, 0, self._ahead, b"", self._deadline_s)
        if not received:
            raise Closed
        self._low, self._high = 0, received
        return self.receive()

    # -- in -----------------------------------------------------------------------------------------------------

    def receive(self) -> object:
        """The next frame's body. Raises :class:`Closed`, :class:`Late`, ``OSError`` or :class:`frames.FrameError`."""
        while self._high - self._low < frames.HEADER_BYTES:
            self._read_ahead(0)
        length = frames.parse_header(self._ahead[self._low:self._high])
        self._low += frames.HEADER_BYTES
        if self._high - self._low >= length:
            return self._decode(self._take(length))
        data = memoryview(bytearray(length))
        self.receive_into(data)
        return self._decode(data)

    def receive_now(self) -> list[object]:
        """The short frames that are there. Never blocks."""
        try:
            self._read_ahead(_NOW)
        except Late:
            return []
        bodies: list[object] = []
        while self._high - self._low >= frames.HEADER_BYTES:
            length = frames.parse_header(self._ahead[self._low:self._high])
            if frames.HEADER_BYTES + length > READ_AHEAD_BYTES:
                raise frames.FrameError(f"question of {length} bytes exceeds {READ_AHEAD_BYTES}")
            if self._high - self._low < frames.HEADER_BYTES + length:
                break
            self._low += frames.HEADER_BYTES
            bodies.append(self._decode(self._take(length)))
        return bodies

    def receive_into(self, view: memoryview) -> None:
        """Fills ``view``, straight from the socket but for what was read ahead."""
        ahead = min(self._high - self._low, len(view))
        if ahead:
            view[:ahead] = self._take(ahead)
            view = view[ahead:]
        while len(view):
            received = self._receive(view, _ALL)
            if received == 0:
                raise Closed
            view = view[received:]

    def _read_ahead(self, flags: int) -> None:
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
        if self._stream is not None and flags != _NOW:
            if not self._takes_descriptors:
                return self._try(self._stream.receive, view, flags)
            received = self._try(self._stream.receive, view, flags, self.descriptors)
            self._check_descriptors()
            return received
        if not self._takes_descriptors:
            return self._try(self._sock.recv_into, view, len(view), flags)
        received, ancillary, _, _ = self._try(self._sock.recvmsg_into, [view], _ROOM, flags | _CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[:len(data) - len(data) % descriptors.itemsize])
                self.descriptors.extend(descriptors)
        self._check_descriptors()
        return int(received)

    def _check_descriptors(self) -> None:
        if len(self.descriptors) > _MAX_DESCRIPTORS:
            raise frames.FrameError(f"{len(self.descriptors)} descriptors came that no frame has spoken of")

    def _take(self, nbytes: int) -> memoryview:
        self._low += nbytes
        return self._ahead[self._low - nbytes:self._low]

    def _try(self, call: Callable[..., T], *arguments: object) -> T:
        """Blocks in the kernel; its word for being late is that it would block."""
        try:
            result = call(*arguments)
        except BlockingIOError:
            raise Late from None
        if self._deadline_s is not None and host_clock_s() >= self._deadline_s:
            raise Late  # the kernel finds no fault with waiting that got something across
        return result

    # -- life ---------------------------------------------------------------------------------------------------

    def hung_up(self) -> bool:
        """Has the other side, or have we, ended the stream?"""
        return bool(self._hang_up.poll(0))

    def shorten_queues(self, nbytes: int) -> None:
        """Bounds what the kernel holds of either direction: within a host it then stays in the processor's cache."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)

    def shutdown(self) -> None:
        """Ends both directions, from any thread, and wakes whoever is blocked."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # ended already

    def close(self) -> None:
        """Releases the descriptors; call it once nobody uses the connection. Idempotent."""
        self._sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def _rest(parts: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of ``parts`` behind the first ``nbytes``."""
    for i, part in enumerate(parts):
        if nbytes < len(part):
            return [part[nbytes:], *parts[i + 1:]]
        nbytes -= len(part)
    return []
