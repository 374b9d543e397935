"""What is asked of other owners, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.ids import WorkerId
from shared.messages import StoredBlock


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a chain that one owner is asked for."""

    owner: WorkerId
    blocks: Sequence[StoredBlock]
    """As they shall be sealed here: origin ``received``, source the owner."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of asking one owner: the first ``blocks`` of its part are cached and pinned now."""

    owner: WorkerId
    blocks: int
    nbytes: int
    seconds: float
    path: str
    why: str = ""
    """Why fewer than wanted; empty when all came."""
