"""{fingerprint: row} of the index: a dictionary, or the compiled part's table where that was built.

The table takes 23 to 46 bytes a block, by how full it is, where a dictionary takes 62 to 92. A prompt's blocks are
found in it in a fifth of the time: in a dictionary of millions every look-up waits for memory three times, one after
the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.conductor.core import native


class Table(Protocol):
    """{fingerprint: row}."""

    def rows(self, blocks: Iterable[int], /) -> list[int | None]:
        """The row of each, ``None`` where there is none."""
        ...

    def stretches(self, prints: npt.NDArray[np.uint64], /) -> list[tuple[int, int]]:
        """[(place of the first block, row)] of stretches of blocks of one row, until the first that has none: its row
        is 0."""
        ...

    def put(self, blocks: Iterable[int], row: int, /) -> None:
        """They have this row from now on."""
        ...

    def drop(self, blocks: Iterable[int], /) -> None:
        """They have no row any more."""
        ...

    def sweep(self, count: int, /) -> Iterator[list[int]]:
        """All blocks, about ``count`` at a time. Between any two the table may change: who is in it from the first to
        the last comes once, and of the others some."""
        ...

    def __len__(self) -> int: ...


class DictTable:
    """The one without a compiled part."""

    def __init__(self) -> None:
        #: NOTE: nothing but integers, so the garbage collector leaves the whole of it alone
        self._rows: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __sizeof__(self) -> int:
        return self._rows.__sizeof__() + 32 * len(self._rows)

    def rows(self, blocks: Iterable[int], /) -> list[int | None]:
        """See :class:`Table`."""
        return list(map(self._rows.get, blocks))

    def stretches(self, prints: npt.NDArray[np.uint64], /) -> list[tuple[int, int]]:
        """See :class:`Table`."""
        found, last = [], -1
        for place, row in enumerate(map(self._rows.get, prints.tolist(), repeat(0))):
            if row != last:
                found.append((place, row))
                if not row:
                    break
                last = row
        return found

    def put(self, blocks: Iterable[int], row: int, /) -> None:
        """See :class:`Table`."""
        self._rows.update(dict.fromkeys(blocks, row))

    def drop(self, blocks: Iterable[int], /) -> None:
        """See :class:`Table`."""
        for block in blocks:
            self._rows.pop(block, None)

    def sweep(self, count: int, /) -> Iterator[list[int]]:
        """See :class:`Table`; a dictionary that changes has no places to go by, so the first takes a list of all."""
        left = list(self._rows)
        while left:
            yield left[-count:]
            del left[-count:]


def make_table() -> Table:
    """An empty one."""
    return DictTable() if native.WHY_NOT else native.Table()
