"""The memories a block can lie in, fastest first."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """``device`` is the accelerator's memory, ``dram`` the host's, ``ssd`` the local disk."""

    DEVICE = "device"
    DRAM = "dram"
    SSD = "ssd"
