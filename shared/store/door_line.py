"""Frames of :mod:`shared.store.door_frames` over a connected stream socket, with descriptors over a unix one."""

from __future__ import annotations

import array
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from shared.store import door_frames as frames
from shared.transfer.addresses import host_clock_s
from shared.transfer.channel import Channel, Closed, split_parts
from shared.transfer.frames import FrameError
from shared.transfer.native import Native

READ_AHEAD_BYTES = 64 << 10
_MAX_DESCRIPTORS = 32
_GATHERED = 256
"""Parts of one system call."""
# A plain number: to look up the module's own takes longer than to send a frame.
_NOW = int(socket.MSG_DONTWAIT)
T = TypeVar("T")


class Late(Exception):
    """Not done by the deadline."""


class Line(Channel):
    """A connection: blocks in whatever thread uses it, one at a time; ``receive_now`` and ``send_now`` do not block."""

    def __init__(self, sock: socket.socket, decode: Callable[[memoryview], T]) -> None:
        super().__init__(sock, read_ahead_bytes=READ_AHEAD_BYTES, takes_descriptors=sock.family == socket.AF_UNIX,
                         max_descriptors=_MAX_DESCRIPTORS)
        self._decode = decode

    def fileno(self) -> int:
        """For an event loop."""
        return self._sock.fileno()

    def set_deadline(self, deadline_s: float) -> None:
        """Whatever would block beyond it, on the host's clock, raises :class:`Late`; kept to a tenth."""
        try:
            self.set_patience(deadline_s)
        except BlockingIOError:
            raise Late from None

    def set_blocking(self) -> None:
        """After an event loop has watched it, which makes it non-blocking."""
        self._sock.setblocking(True)

    def hasten(self, native: Native | None, *, takes_descriptors: bool) -> None:
        """From here on what receives looks for bytes before it sleeps, where that can be had."""
        self._takes_descriptors = takes_descriptors and self._takes_descriptors
        if native is not None:
            self._stream = native.stream(self._sock.fileno())

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
            sent = self._try(self._sock.sendmsg, parts[:_GATHERED], ancillary)
            descriptors = ()
            parts = split_parts(parts, sent)[1]

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

    def _receive(self, view: memoryview, flags: int) -> int:
        try:
            return self._try(super()._receive, view, flags)
        except FrameError as error:
            raise frames.FrameError(str(error)) from None

    def _try(self, call: Callable[..., T], *arguments: object) -> T:
        """Blocks in the kernel; its word for being late is that it would block."""
        try:
            result = call(*arguments)
        except BlockingIOError:
            raise Late from None
        if self._deadline_s is not None and host_clock_s() >= self._deadline_s:
            raise Late  # the kernel finds no fault with waiting that got something across
        return result
