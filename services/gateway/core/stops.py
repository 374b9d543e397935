"""Stop strings in a text that arrives in pieces.

Text that might be the start of a stop string is held back until the next piece decides; so nothing of a stop
string is ever sent, and the result does not depend on where the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string of one answer."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Adds ``text``; returns what may be sent now. Once :attr:`matched` is set nothing more comes out."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = self._first(text)
        if found is not None:
            at, self.matched = found
            self._held = ""
            return text[:at]
        keep = self._undecided(text)
        self._held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def flush(self) -> str:
        """The answer ended by itself: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Where the stop string that is complete first begins, and which; of two complete at once the longer.

        The order is by *end*, since that is the order in which a character-by-character reader would notice.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return None if best is None else (best[1], best[2])

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
