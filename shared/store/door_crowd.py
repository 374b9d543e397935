"""Who may stay when many want to come to a door. Pure; times are the caller's monotonic seconds.

Connections are counted in all and for each peer (an address, or a process of this host), so that nobody keeps the
others out by opening many, or by opening them and saying nothing. When there is no place left, one is made: of those
who have not entered yet, or else of those who have but hold nothing and were silent for a while, one goes whose peer
has most connections. A client that meets that connects again with its next call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MAX_VISITS = 512
MAX_OF_ONE = 256
"""Visits of one peer."""
IDLE_S = 1.0
"""A visit that was silent for so long may have to make room."""


class Guest(Protocol):
    """One connection."""

    @property
    def peer(self) -> str:
        """Who is at its other end."""
        ...

    @property
    def heard_s(self) -> float:
        """When it came, or was last heard."""
        ...

    @property
    def has_entered(self) -> bool:
        """Has it shown a token?"""
        ...

    @property
    def is_busy(self) -> bool:
        """Is something of it being served, or held for it?"""
        ...


G = TypeVar("G", bound=Guest)


@dataclass(frozen=True, slots=True)
class Admission(Generic[G]):
    """Whether somebody new may come, and who leaves for it."""

    is_admitted: bool
    leaves: G | None = None


def admit(peer: str, guests: Collection[G], *, now_s: float, most: int = MAX_VISITS,
          most_of_one: int = MAX_OF_ONE) -> Admission[G]:
    """May one more of ``peer`` come, beside ``guests``?"""
    of = Counter(guest.peer for guest in guests)
    if of[peer] >= most_of_one:
        crowd = [guest for guest in guests if guest.peer == peer]
    elif len(guests) >= most:
        crowd = list(guests)
    else:
        return Admission(True)
    leaves = min((guest for guest in crowd if _may_leave(guest, now_s)), default=None,
                 key=lambda guest: (guest.has_entered, -of[guest.peer], guest.heard_s))
    return Admission(leaves is not None, leaves)


def _may_leave(guest: Guest, now_s: float) -> bool:
    return not guest.has_entered or (not guest.is_busy and guest.heard_s + IDLE_S <= now_s)
