"""Errors of the store's client. A value that is not there is no error: it is ``False``, ``None`` or a mask.

::

    UserError
    └── StoreError         code
        ├── BusAway            bus        NATS cannot be reached (also a shared.errors.Unavailable)
        ├── NoStore            store      no worker with this spec lends memory, or none can be reached
        ├── ForeignSpec        spec       a worker serves this name with another spec
        ├── EntryRefused       token      the door does not take our token (forged, expired, of a former life)
        ├── WrongSize          size       a value, or memory for one, of another size than the spec's
        ├── BadMemory          memory     what is no memory of this client's, or none that it can use
        ├── BadCall            call       a call that cannot be meant: other counts, no time, a closed client
        ├── BadTenant          tenant     a tenant's name that cannot be
        ├── BadUrl             url        what is no address of NATS
        ├── BadKey             key        a key that this spec cannot have
        ├── BatchTooLarge      batch      more keys than one call takes
        ├── StoreFull          full       back-pressure: everything the workers have is in use
        ├── StoreDraining      draining   the workers that could take it are being emptied
        ├── MissingParent      parent     a block whose predecessor is not where it was put
        ├── StoreTimeout       deadline   not done by the call's deadline
        └── CorruptValue       checksum   other bytes arrived than were sent
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from shared.errors import Unavailable, UserError
from shared.telemetry import metrics


class StoreError(UserError):
    """A call was not done. ``done``: of a batch, what was, a flag a key, as the call would have returned it."""

    code = "store"

    def __init__(self, message: str, done: Sequence[bool] = ()) -> None:
        super().__init__(message)
        self.done = list(done)


class BusAway(StoreError, Unavailable):
    """NATS cannot be reached."""

    code = "bus"


class NoStore(StoreError):
    """No worker with this spec lends memory, or none can be reached."""


class ForeignSpec(StoreError):
    """A worker serves this name with another spec."""

    code = "spec"


class EntryRefused(StoreError):
    """The door does not take our token."""

    code = "token"


class WrongSize(StoreError):
    """A value, or memory for one, of another size than the spec's."""

    code = "size"


class BadMemory(StoreError):
    """What is no memory of this client's, or none that it can use."""

    code = "memory"


class BadCall(StoreError):
    """A call that cannot be meant."""

    code = "call"


class BadTenant(StoreError):
    """A tenant's name that cannot be: too long, or with characters that cannot be printed."""

    code = "tenant"


class BadUrl(StoreError):
    """What is no address of NATS."""

    code = "url"


class BadKey(StoreError):
    """A key that this spec cannot have."""

    code = "key"


class BatchTooLarge(StoreError):
    """More keys than one call takes."""

    code = "batch"


class StoreFull(StoreError):
    """Back-pressure: everything the workers have is in use. Try again when something was released."""

    code = "full"


class StoreDraining(StoreError):
    """Every worker that could take it is being emptied; start another, or one of them anew."""

    code = "draining"


class MissingParent(StoreError):
    """A block whose predecessor is not where it was put."""

    code = "parent"


class StoreTimeout(StoreError):
    """Not done by the call's deadline."""

    code = "deadline"


class CorruptValue(StoreError):
    """Other bytes arrived than were sent."""

    code = "checksum"


E = TypeVar("E", bound=StoreError)


def counted(error: E) -> E:
    """``error``, which a caller is about to meet."""
    metrics.STORE_CLIENT_ERRORS.labels(code=error.code).inc()
    return error
