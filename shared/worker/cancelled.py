"""Cancels that may overtake their job: both travel on subjects of their own."""

from __future__ import annotations

from shared.ids import RequestId
from shared.messages import Cancel


class Cancelled:
    """Remembers the latest cancels, the oldest forgotten first."""

    def __init__(self, limit: int = 4_096) -> None:
        self._limit = limit
        #: (request, attempt), attempt -1 for all, in order of arrival
        self._known: dict[tuple[RequestId, int], None] = {}

    def note(self, cancel: Cancel) -> None:
        """Remembers ``cancel``."""
        self._known[cancel.request, cancel.attempt] = None
        if len(self._known) > self._limit:
            del self._known[next(iter(self._known))]

    def covers(self, request: RequestId, attempt: int) -> bool:
        """Whether that attempt of the request was cancelled already."""
        return (request, attempt) in self._known or (request, -1) in self._known
