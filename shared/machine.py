"""The shape of a decision maker: events in, effects out, time as an argument.

A machine never waits and never reads a clock. ``shared.driver`` runs one with asyncio and the bus;
``load.sim`` will run the same object under virtual time. Every effect that takes time comes back as an event,
failure included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

E_contra = TypeVar("E_contra", contravariant=True)


class Effect(msgspec.Struct, frozen=True):
    """Something for the shell to do. Services add their own kinds."""


class Publish(Effect, frozen=True):
    """Send ``message`` to ``address`` (a rendered subject); no answer is expected."""

    address: Any
    message: Any


class Reply(Effect, frozen=True):
    """Answer the request that arrived as ``Asked(token=...)``."""

    token: int
    message: Any


class Request(Effect, frozen=True):
    """Ask ``address``; the machine hears ``Answered(tag, message)`` or ``Unanswered(tag, why)``."""

    address: Any
    message: Any
    tag: Any
    timeout_s: float


class Asked(msgspec.Struct, frozen=True):
    """A request reached us; answer with ``Reply(token, ...)`` exactly once."""

    token: int
    message: Any


class Answered(msgspec.Struct, frozen=True):
    """A ``Request`` effect was answered."""

    tag: Any
    message: Any


class Unanswered(msgspec.Struct, frozen=True):
    """A ``Request`` effect got no answer; ``gone`` when nobody listens at all."""

    tag: Any
    why: str
    gone: bool = False


class Woke(msgspec.Struct, frozen=True):
    """The time that ``next_wake`` named has come."""


class Machine(Protocol[E_contra]):
    """Decides. Knows no loop, no clock, no network."""

    def handle(self, event: E_contra, *, now: float) -> Sequence[Effect]:
        """Applies ``event`` at ``now`` (monotonic seconds); the only door into the state."""
        ...

    def next_wake(self) -> float | None:
        """Absolute monotonic seconds of the next ``Woke`` wanted; ``None`` when nothing is due."""
        ...

    def check_invariants(self) -> None:
        """Raises :class:`shared.errors.Bug` when the state contradicts itself."""
        ...
