"""What the machine wants done; of ``Fetch``, ``Write``, ``Reconcile``, ``Mark`` and ``Maintain`` one each at a time."""

from __future__ import annotations

from services.store_manager.core.events import Life
from shared.machine import Effect


class Fetch(Effect, frozen=True):
    """Get up to ``limit`` messages of the durable feed; comes back as ``Fetched`` or ``FetchFailed``."""

    limit: int


class Write(Effect, frozen=True):
    """Write the messages at these positions in one transaction; comes back as ``Written`` or ``WriteFailed``."""

    seqs: tuple[int, ...]


class Ack(Effect, frozen=True):
    """They are durable: the feed need not bring them again."""

    seqs: tuple[int, ...]


class Discard(Effect, frozen=True):
    """This one will never be taken: say so, count it, and acknowledge it."""

    seq: int
    why: str


class Reconcile(Effect, frozen=True):
    """Ask the worker what it holds and make its rows say that; comes back as ``Reconciled`` or ``ReconcileFailed``."""

    life: Life


class Mark(Effect, frozen=True):
    """Make the states of lives follow what is heard; comes back as ``Marked`` or ``MarkFailed``."""

    heard: tuple[Life, ...]
    dead: tuple[tuple[Life, str], ...]
    """With why."""


class Maintain(Effect, frozen=True):
    """Do the catalog's upkeep: partitions, retention; comes back as ``Maintained`` or ``MaintainFailed``."""


class CallRoll(Effect, frozen=True):
    """Ask every worker to say hello."""


class Report(Effect, frozen=True):
    """Postgres can be used again, or cannot; only when that changes."""

    reachable: bool
    why: str = ""


class Drained(Effect, frozen=True):
    """Nothing is held any more, or what is held cannot be written now and will be delivered again."""
