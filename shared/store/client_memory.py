"""Memory that a client's values come from and go to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import Bug
from shared.store.client_errors import BadMemory, counted
from shared.transfer import Segment

Bytes = npt.NDArray[np.uint8]


class Part:
    """A stretch of memory that a value comes from or goes to.

    ``array`` is the memory itself, as uint8. With a ``segment`` it lies there, from ``offset`` on, and other processes
    of this host can copy out of it.
    """

    __slots__ = ("array", "offset", "segment")

    def __init__(self, array: Bytes, segment: Segment | None = None, offset: int = 0) -> None:
        self.array, self.segment, self.offset = array, segment, offset

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self.array)

    @property
    def is_alive(self) -> bool:
        """May it be used? Memory that others could map is gone once its buffer is unregistered."""
        return self.segment is None or self.segment.fd >= 0


class Buffer(Part):
    """Registered memory; a slice of it (``buffer[:2 << 20]``) is a :class:`Part`, all of it is one too.

    Made by ``client.buffer``, whose memory other processes can map, which is the fastest to put from; or by
    ``client.register``, which keeps the caller's memory alive. Lives until it is unregistered or the client closes.
    """

    __slots__ = ("_is_open", "_segment")

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment.array, segment if segment.mappable else None)
        self._segment = segment
        self._is_open = True

    @classmethod
    def allocate(cls, nbytes: int, *, huge_pages: bool) -> Buffer:
        """New zeroed memory."""
        return cls(Segment.allocate("buffer", nbytes, huge_pages=huge_pages))

    @classmethod
    def adopt(cls, memory: Any) -> Buffer:
        """See :meth:`Segment.adopt`; memory of a GPU is none that a store's client can use."""
        segment = Segment.adopt("buffer", memory)
        if segment.staged:
            raise Bug("a store's client takes memory of the host, not of a GPU")
        return cls(segment)

    @property
    def serial(self) -> int:
        """Unique in this process."""
        return self._segment.serial

    def close(self) -> None:
        """No call may use it any more."""
        self._segment.close()
        self.array, self.segment, self._is_open = self._segment.array, None, False

    @property
    def is_alive(self) -> bool:
        return self._is_open

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, where: slice) -> Part:
        start, stop, step = where.indices(len(self.array))
        if step != 1 or stop < start:
            raise counted(BadMemory(f"{where} is no stretch of {len(self.array)} bytes"))
        return Part(self.array[start:stop], self.segment, start)
