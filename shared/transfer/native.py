"""The compiled part of the engine, ``_native.c``, where it was built and is wanted.

It takes time away and nothing else: without it the same bytes go the same ways. Sleeping in the kernel costs tens of
microseconds and cold caches at each end of each message, so a :class:`Stream` looks for an answer a while before it
sleeps; ``copy`` keeps more of the memory's channels busy than memcpy does. Both leave the GIL to other threads.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shared.transfer.settings import TransferSettings

_API = 1
"""What is asked of it; a file that was built before this source was written may not have it."""

try:
    from shared.transfer import _native
except ImportError:  # no compiler when this was installed
    WHY_NOT = "it was not compiled"
else:
    WHY_NOT = "" if _native.API == _API else "it was compiled from another version"
"""Why there is none; empty where there is one."""

if TYPE_CHECKING:
    from shared.transfer._native import Stream

Bytes = npt.NDArray[np.uint8]


class Native:
    """How an engine uses it."""

    def __init__(self, spin_us: float) -> None:
        #: Longest time that one side looks for bytes before it sleeps; 0 where there is no processor to spare.
        self.spin_us = spin_us if len(os.sched_getaffinity(0)) > 1 else 0.0

    def stream(self, descriptor: int) -> Stream:
        """For the socket ``descriptor``, which stays the caller's."""
        return _native.Stream(descriptor, self.spin_us)

    def copy(self, to: Bytes, source: Bytes, length: int, count: int, stride: int) -> None:
        """``count`` parts of ``length`` bytes, each ``stride`` after the one before, here as there.

        The two do not overlap. Raises ``ValueError`` when one of them is too short.
        """
        _native.copy(to, source, length, count, stride)


def find_native(settings: TransferSettings) -> Native | None:
    """What ``settings`` want of it; ``None`` without it."""
    return Native(settings.spin_us) if settings.native and not WHY_NOT else None
