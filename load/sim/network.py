"""Links: every node has one way out and one way in, and the flows on each share it equally.

A flow moves at the lesser of its two shares, so what one side cannot use of its share stays unused: a link is never
faster than a real one. Latency is added once, at the end of a flow.
"""

from __future__ import annotations

from collections.abc import Callable

from load.sim.loop import Loop


class Flow:
    """Bytes under way from one node to another."""

    __slots__ = ("done", "rate", "receiver", "remaining", "sender", "since_s", "version")

    def __init__(self, sender: Port, receiver: Port, nbytes: float, done: Callable[[], None]) -> None:
        self.sender, self.receiver, self.remaining, self.done = sender, receiver, nbytes, done
        self.rate = 0.0
        self.since_s = 0.0
        self.version = 0


class Port:
    """One node's network card: bytes a second out and in, and the flows on each."""

    __slots__ = ("capacity", "incoming", "outgoing", "received_bytes", "scale", "sent_bytes")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.scale = 1.0
        """1 normally, 0 while the link is cut."""
        self.outgoing: dict[Flow, None] = {}
        self.incoming: dict[Flow, None] = {}
        self.sent_bytes = 0.0
        self.received_bytes = 0.0


class Network:
    """All flows. Times are those of ``loop``."""

    def __init__(self, loop: Loop, *, latency_s: float) -> None:
        self._loop, self._latency_s = loop, latency_s

    def send(self, sender: Port, receiver: Port, nbytes: float, done: Callable[[], None]) -> Flow | None:
        """Starts a flow; ``done`` is called when its last byte has arrived. ``None`` when nothing has to move."""
        sender.sent_bytes += nbytes
        receiver.received_bytes += nbytes
        if sender is receiver or nbytes <= 0:
            self._loop.after(self._latency_s, done)
            return None
        flow = Flow(sender, receiver, nbytes, done)
        flow.since_s = self._loop.now
        sender.outgoing[flow] = None
        receiver.incoming[flow] = None
        self._share(sender, receiver)
        return flow

    def end(self, flow: Flow) -> None:
        """Gives a flow up. Idempotent."""
        if flow in flow.sender.outgoing:
            self._remove(flow)

    def scale(self, port: Port, scale: float) -> None:
        """From now on the port has this share of its capacity."""
        port.scale = scale
        self._share(port, port)

    def _remove(self, flow: Flow) -> None:
        flow.version += 1
        del flow.sender.outgoing[flow], flow.receiver.incoming[flow]
        self._share(flow.sender, flow.receiver)

    def _share(self, sender: Port, receiver: Port) -> None:
        """The number of flows on these two changed: all on them get new rates."""
        for flow in sender.outgoing:
            self._pace(flow)
        for flow in receiver.incoming:
            if flow.sender is not sender:
                self._pace(flow)
        if sender is receiver:
            for flow in receiver.incoming:
                self._pace(flow)

    def _pace(self, flow: Flow) -> None:
        sender, receiver, now = flow.sender, flow.receiver, self._loop.now
        rate = min(sender.capacity * sender.scale / len(sender.outgoing),
                   receiver.capacity * receiver.scale / len(receiver.incoming))
        if rate == flow.rate and flow.version:
            return
        flow.remaining -= flow.rate * (now - flow.since_s)
        flow.since_s, flow.rate = now, rate
        flow.version += 1
        if rate > 0:
            self._loop.at(now + max(flow.remaining, 0.0) / rate, self._arrived, flow, flow.version)

    def _arrived(self, flow: Flow, version: int) -> None:
        if version == flow.version:
            self._remove(flow)
            self._loop.after(self._latency_s, flow.done)
