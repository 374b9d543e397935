"""What the store-manager asks of store agents: copy blocks, drop copies, keep them, respect quotas, empty yourself.

All of it is advice about memory, never about a request: an agent that cannot follow says so and serves on.
"""

from __future__ import annotations

from shared.ids import OperationId, WorkerId
from shared.messages.base import Message, Part
from shared.messages.blocks import StoredBlock


class Replicate(Message, frozen=True):
    """Fetch these blocks from ``source`` and keep them: stretches of chains, parents before children.

    A block whose parent the agent does not hold (and that is not a root's child) is left out.
    """

    operation: OperationId
    source: WorkerId
    blocks: list[StoredBlock]
    deadline_s: float


class Replicated(Message, frozen=True):
    """Answer to :class:`Replicate`: ``blocks`` of them are held now, ``copied`` of those arrived by this request."""

    operation: OperationId
    blocks: int
    copied: int
    nbytes: int
    why: str = ""
    """Why not all; empty when all are held."""


class Trim(Message, frozen=True):
    """Drop your copies of these blocks from every tier, as far as nobody uses them and nothing continues them."""

    keys: bytes
    """Packed block keys."""
    reason: str = "trim"


class Trimmed(Message, frozen=True):
    """Answer to :class:`Trim`."""

    blocks: int


class Protect(Message, frozen=True):
    """Evict these blocks last during the next ``ttl_s`` seconds; a newer word for a block replaces the older one."""

    keys: bytes
    """Packed block keys."""
    ttl_s: float


class Protected(Message, frozen=True):
    """Answer to :class:`Protect`: ``blocks`` of them are held."""

    blocks: int


class Retire(Message, frozen=True):
    """Your hot blocks are copied elsewhere: take nothing new, and drop what you hold if ``drop`` says so."""

    why: str = "drain"
    drop: bool = True
    """False: some of it is nowhere else, so serve on what you hold until somebody ends you."""


class Retired(Message, frozen=True):
    """Answer to :class:`Retire`: ``blocks`` were dropped; those in use follow when their operations end."""

    blocks: int


class TenantQuota(Part, frozen=True):
    """How many bytes of one worker's tiers a tenant's blocks may take."""

    tenant: str
    nbytes: int


class Quotas(Message, frozen=True):
    """The budgets of ``worker``, all of them: a tenant that is not named has none, and nothing limits it.

    Repeated by the store-manager, so that a worker that missed it, or is new, learns it all the same.
    """

    worker: WorkerId
    budgets: list[TenantQuota]
