"""The memories a block can lie in, fastest first."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """``device`` is the accelerator's memory, ``dram`` the host's, ``ssd`` the local disk."""

    DEVICE = "device"
    DRAM = "dram"
    SSD = "ssd"

    # Enum's own is a Python function that hashes the name: a large part of what it takes to look up a block's tier.
    __hash__ = str.__hash__
