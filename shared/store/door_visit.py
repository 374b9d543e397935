"""A visit: one connection at a worker's door, and what it holds there."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from shared.ids import OperationId
from shared.messages import StoredBlock
from shared.store import door_frames as frames
from shared.store.door_line import Line
from shared.transfer.segment import MappedSegment


@dataclass(slots=True)
class Hold:
    """Blocks that are pinned for a client until ``until_s``: it copies them (a loan), or asked for it (a pin)."""

    operation: OperationId
    count: int
    """Blocks that it keeps from being evicted, those that its own continue included."""
    until_s: float
    borrower: tuple[str, str] | None = None
    """Client and incarnation whose loan it is; ``None`` for a pin."""
    is_over: bool = False


@dataclass(eq=False, slots=True)
class Visit:
    """All of it belongs to the loop but ``line``, whose reading half belongs to the thread if there is one.

    What it holds (loans, pins, stock, slots that are being filled) ends with it, however it ends.
    """

    line: Line
    local: bool
    """Over a unix socket: it sees our memory, and we see its."""
    id: str
    peer: str
    """Who is at its other end: an address, or a process of this host."""
    heard_s: float
    """When it came, or was last heard."""
    deadline_s: float | None
    """By when it must have entered; ``None`` once it has."""
    stock_operation: OperationId
    """Of its stock, and of slots that are being filled."""
    enter: frames.Enter | None = None
    loans: deque[Hold] = field(default_factory=deque)
    """Oldest first; one that is over stays until the client says that it knows."""
    pins: dict[str, Hold] = field(default_factory=dict)
    """{the client's name of the pin: what we hold for it}"""
    thread: threading.Thread | None = None
    stock: deque[int] = field(default_factory=deque)
    """Private slots of :attr:`stock_operation`, to be filled."""
    stocked_s: float = 0.0
    news: list[StoredBlock] = field(default_factory=list)
    """Stored, and not announced yet."""
    used: int = 0
    """Slots of puts that were answered, or will be in this turn of the loop."""
    unused: list[int] = field(default_factory=list)
    """Those of them whose values were not stored."""
    is_served: bool = False
    """Something takes time: a question that waits, or what its thread does."""
    proofs: bool = False
    is_leaving: bool = False
    """Its line was cut, and its thread will notice."""
    ended: bool = False
    inbox: deque[object] = field(default_factory=deque)
    """Questions that were read and are not answered yet; without a thread."""
    sources: dict[int, MappedSegment] = field(default_factory=dict)
    """{serial: memory of the client}; the thread's if there is one."""

    @property
    def tenant(self) -> str:
        """For whom it acts. Of a visit that has entered."""
        assert self.enter is not None
        return self.enter.tenant

    @property
    def has_entered(self) -> bool:
        """Has it shown a token?"""
        return self.enter is not None

    @property
    def is_busy(self) -> bool:
        """Is something of it being served, or held for it?"""
        return self.is_served or bool(self.inbox or self.pins) or any(not loan.is_over for loan in self.loans)
