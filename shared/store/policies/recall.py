"""A small memory of how often blocks were used before they were dropped."""

from __future__ import annotations

from array import array

from shared.ids import BlockKey

_COUNT_BITS = 3
MOST_USES = (1 << _COUNT_BITS) - 2
"""Higher counts are kept as this."""


class Recall:
    """``{block key: uses}`` of about the last ``slots`` keys told, in two bytes each.

    Each key has one slot, which the last key told takes over: a key is forgotten after ``slots`` others with
    probability 1 - 1/e. The slot keeps 13 bits of the key, so one in 8,192 unknown keys is taken for a known one;
    a policy that is now and then wrong about a block does no harm.
    """

    def __init__(self, slots: int) -> None:
        size = 1 << max(0, slots - 1).bit_length()
        self._mask = size - 1
        #: tag << 3 | uses + 1; 0 is empty
        self._slots = array("H", bytes(2 * size))

    def __len__(self) -> int:
        return self._mask + 1

    def put(self, key: BlockKey, uses: int) -> None:
        """Remembers the uses of ``key``."""
        name = int.from_bytes(key[:8], "little")
        self._slots[name & self._mask] = (name >> 51) << _COUNT_BITS | min(uses, MOST_USES) + 1

    def get(self, key: BlockKey) -> int | None:
        """The uses of ``key`` when it was told last; ``None`` when it is not known (any more)."""
        name = int.from_bytes(key[:8], "little")
        held = self._slots[name & self._mask]
        if held and held >> _COUNT_BITS == name >> 51:
            return (held & (1 << _COUNT_BITS) - 1) - 1
        return None
