"""How a client of the store comes to a worker's door: asked over the bus, so that its permissions say who may.

What is said at the door itself does not travel over the bus; see :mod:`shared.store.door_frames`.
"""

from __future__ import annotations

from typing import Literal

from shared.ids import HostId, Incarnation, SpecDigest, WorkerId
from shared.messages.base import Message


class OpenDoor(Message, frozen=True):
    """``client`` wants to come, for values of ``spec``."""

    client: str
    incarnation: Incarnation
    """Of the client: fresh at each start."""
    host: HostId
    spec: SpecDigest
    tenant: str = ""
    """For whom it acts: whose values it gets and puts, which count against this tenant's quota."""


class DoorOpened(Message, frozen=True):
    """Where the door is, and the token that opens it to this client until ``expires_at_s``."""

    worker: WorkerId
    incarnation: Incarnation
    host: HostId
    shm: str
    """Path of its unix socket, for clients of the same host; empty for none."""
    tcp: str
    """``host:port``, for everybody else; empty for none."""
    token: bytes
    """HMAC over client, incarnation, spec, tenant and expiry under a secret that dies with the worker's incarnation."""
    expires_at_s: float
    """Unix seconds of the worker's clock: connections must have been opened by then; those that were stay."""
    block_bytes: int
    """Size of every value there."""
    num_blocks: int
    """Values that its memory has room for."""


class DoorRefused(Message, frozen=True):
    """The door stays closed; ``message`` is one line for a person."""

    code: Literal["spec", "tenant"]
    message: str
