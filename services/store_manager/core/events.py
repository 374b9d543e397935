"""Facts that never cross the wire. Hellos, loads and byes reach the machine as the messages they are."""

from __future__ import annotations

import msgspec

Life = tuple[str, str]
"""(worker, incarnation)"""


class Entry(msgspec.Struct, frozen=True):
    """A message of the durable feed, known by its position; its content stays with the shell."""

    seq: int
    """Position in the stream."""
    rows: int
    """About how many rows it makes."""


class Started(msgspec.Struct, frozen=True):
    """The shell is up: begin."""


class Deaf(msgspec.Struct, frozen=True):
    """The bus is away; comes again and again until it is back."""


class Reconnected(msgspec.Struct, frozen=True):
    """The bus was away and is back: what was said meanwhile was not heard."""


class Led(msgspec.Struct, frozen=True):
    """We lead, in ``term``, until ``until_s`` (monotonic seconds) unless more comes."""

    term: int
    until_s: float


class Unled(msgspec.Struct, frozen=True):
    """We do not lead."""


class Draining(msgspec.Struct, frozen=True):
    """Take nothing new, write what is held."""


class Fetched(msgspec.Struct, frozen=True):
    """What a ``Fetch`` brought; maybe nothing."""

    entries: tuple[Entry, ...]


class FetchFailed(msgspec.Struct, frozen=True):
    """A ``Fetch`` could not be done."""

    why: str


class Written(msgspec.Struct, frozen=True):
    """A ``Write`` is durable."""

    gaps: tuple[Life, ...] = ()
    """Lives of workers whose news has a hole."""
    workers: int = 0
    """Lives it brought news of."""


class WriteFailed(msgspec.Struct, frozen=True):
    """A ``Write`` wrote nothing; ``refused`` when its data will never be taken."""

    why: str
    refused: bool = False


class Reconciled(msgspec.Struct, frozen=True):
    """A ``Reconcile`` is done."""


class ReconcileFailed(msgspec.Struct, frozen=True):
    """A ``Reconcile`` changed nothing; ``gone`` when nobody answers for the worker."""

    why: str
    gone: bool = False


class Marked(msgspec.Struct, frozen=True):
    """A ``Mark`` is done."""


class MarkFailed(msgspec.Struct, frozen=True):
    """A ``Mark`` changed nothing."""

    why: str


class Maintained(msgspec.Struct, frozen=True):
    """A ``Maintain`` is done; ``more`` when there is more to do soon."""

    more: bool = False


class MaintainFailed(msgspec.Struct, frozen=True):
    """A ``Maintain`` could not be done."""

    why: str
