"""The compiled part of the engine, ``_native.c``, where it was built and is wanted.

It takes time away and nothing else: without it the same bytes go the same ways. Sleeping in the kernel costs tens of
microseconds and cold caches at each end of each message, so a stream looks for an answer a while before it sleeps. A
large copy goes past the caches and is shared with a second thread, which keeps more of the memory's channels busy than
memcpy does. Nothing of it holds the GIL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.transfer.settings import TransferSettings

_API = 4
"""What is asked of it; a file that was built before this source was written may not have it."""

try:
    import shared.transfer._native as _native
except ModuleNotFoundError:  # no compiler when this was installed
    WHY_NOT = "it was not compiled"
except ImportError as error:  # there is a file, for another machine or Python
    WHY_NOT = str(error)
else:
    WHY_NOT = "" if _native.API == _API else "it was compiled from another version"
"""Why there is none; empty where there is one."""

if TYPE_CHECKING:
    from shared.transfer._native import Stream


Differ = Callable[[memoryview, int, int, bytes, tuple[tuple[int, int], ...]], tuple[int, ...] | None]
"""``differ(data, start, stop, frame, places)``: the numbers, big-endian, at ``places`` (ascending pairs of offset and
bytes) of ``data[start:stop]``, if that begins like ``frame`` everywhere else, and ``None`` otherwise"""


class Native:
    """An engine's part of it, with a thread that helps to copy between :meth:`start` and :meth:`close`."""

    def __init__(self, spin_us: float) -> None:
        self._processors = len(os.sched_getaffinity(0))
        #: Longest time that whoever waits looks for something before it sleeps; 0 where there is no processor to spare.
        self.spin_us = spin_us if self._processors > 1 else 0.0
        self._helper = _native.Helper(self.spin_us)
        self._thread: threading.Thread | None = None
        self.copy = self._helper.copy
        """``copy(to, source, length, count, stride)``: ``count`` parts of ``length`` bytes, each ``stride`` after the
        one before, here as there, where the two do not overlap; raises ``ValueError`` when one is too short."""

        self.begin = self._helper.begin
        """``begin(to, source, places)``: begins to copy what lies at ``places``, a list of (offset in ``to``, offset in
        ``source``, length), while its caller does something else. Copies that are not short go past the caches: it is
        for memory that nobody looks at soon. ``finish()`` does what is left of it and returns when all is there; until
        then nobody may touch either memory. One at a time, and one thread that begins and finishes. Raises
        ``ValueError`` when a place is not in both."""
        self.finish = self._helper.finish

        self.differ: Differ = _native.differ

    def start(self, name: str) -> None:
        """Starts the thread, where there is a processor for it."""
        if self._processors > 1:
            self._thread = threading.Thread(target=self._helper.run, name=f"{name}-copy", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits for the thread; copies go on without it. Idempotent."""
        self._helper.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def stream(self, descriptor: int) -> Stream:
        """For the socket ``descriptor``, which stays the caller's."""
        return _native.Stream(descriptor, self.spin_us)


def find_native(settings: TransferSettings) -> Native | None:
    """What ``settings`` want of it; ``None`` without it."""
    return Native(settings.spin_us) if settings.native and not WHY_NOT else None
