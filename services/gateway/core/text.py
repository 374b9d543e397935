"""An answer's tokens as text that may be sent: whole characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.gateway.core.detokenize import TextStream
from services.gateway.core.stops import StopStrings


class AnswerText:
    """The text of one answer. Stop strings count only in what comes after the first ``min_tokens`` tokens."""

    def __init__(self, open_stream: Callable[[], TextStream], *, stops: Sequence[str], min_tokens: int) -> None:
        self._open_stream, self._stop_strings, self._min_tokens = open_stream, tuple(stops), min_tokens
        self.restart()

    def restart(self) -> None:
        """The answer begins again: all text so far is void."""
        self._stream = self._open_stream()
        self._stops = StopStrings(self._stop_strings)
        self.ids: list[int] = []
        """Token ids of the answer, the one that completed a stop string included."""

    @property
    def tokens(self) -> int:
        """How many tokens the answer has so far."""
        return len(self.ids)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, tokens: Sequence[int], *, last: bool) -> str:
        """Adds ``tokens`` (``last``: the answer ends with them); returns what may be sent now."""
        text = ""
        for token in tokens:
            if self.matched is not None:
                return text
            self.ids.append(token)
            piece = self._stream.push(token)
            text += self._stops.push(piece) if self.tokens > self._min_tokens else piece
        if last and self.matched is None:
            text += self._stops.push(self._stream.flush()) + self._stops.flush()
        return text
