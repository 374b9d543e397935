"""One pool promised to both: prompts and answers of a worker that takes either.

Pure. Theory of operation. An answer holds its slots from its reservation on, while its prompt is computed *elsewhere*;
a prompt that was taken waits *here* for its slots. Two workers, each full of reservations, would so wait for each
other's prompts for ever. Everything else ends by itself: prompts that have their slots, answers that run. A prompt that
has its slots can lose some while owners push into them, to a writer that stops half-way and keeps them for a while: it
waits once more, then. Therefore

* prompts that were taken fit, each for itself, beside all that is reserved, until they can lose nothing any more; while
  one waits nothing more is reserved;
* while an answer that lost its slots waits for new ones, neither is taken.

What was taken before that is finite, so whoever waits gets its slots.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.errors import Bug
from shared.ids import OperationId


class Room:
    """Of one pool of ``total_blocks``."""

    def __init__(self, total_blocks: int) -> None:
        self._total = total_blocks
        #: {answer whose prompt is computed elsewhere: blocks it holds}
        self._reserved: dict[OperationId, int] = {}
        self._reserved_blocks = 0
        #: {prompt that has no slots yet, or may lose some: blocks it needs}
        self._prompts: dict[OperationId, int] = {}
        #: those of them for which there was no room
        self._waiting: set[OperationId] = set()
        self.answers_wait: Callable[[], bool] = lambda: False
        """Whether an answer has lost its slots; set by who decodes."""

    @property
    def reserved_blocks(self) -> int:
        """Blocks of all answers whose prompts are computed elsewhere."""
        return self._reserved_blocks

    def refuses_prompt(self, blocks: int) -> str:
        """Why a prompt of so many blocks is not taken now; empty when it is."""
        if blocks + self._reserved_blocks > self._total:
            taken = f", {self._reserved_blocks} are reserved for answers" if self._reserved_blocks else ""
            return f"it needs {blocks} of {self._total} blocks{taken}"
        return "an answer waits for memory" if self.answers_wait() else ""

    def refuses_answer(self, blocks: int = 0) -> str:
        """Why an answer whose prompt has so many blocks gets no reservation now; empty when it does."""
        if self._waiting:
            return f"{len(self._waiting)} prompts wait for memory"
        if self.answers_wait():
            return "an answer waits for memory"
        largest = max(self._prompts.values(), default=0)
        if largest and self._reserved_blocks + blocks + largest > self._total:
            return f"a prompt was taken that needs {largest} of {self._total} blocks"
        return ""

    def prompt_taken(self, operation: OperationId, blocks: int) -> None:
        """It will need so many slots."""
        self._prompts[operation] = blocks

    def prompt_waits(self, operation: OperationId) -> None:
        """There was no room for it. Idempotent."""
        if operation in self._prompts:
            self._waiting.add(operation)

    def prompt_fits(self, operation: OperationId) -> None:
        """It has its slots and may lose some, to wait again. Idempotent."""
        self._waiting.discard(operation)

    def prompt_served(self, operation: OperationId) -> None:
        """It has its slots for good, or is gone. Idempotent."""
        self._prompts.pop(operation, None)
        self._waiting.discard(operation)

    def reserved(self, operation: OperationId, blocks: int) -> None:
        """An answer holds so many blocks and waits for its prompt."""
        if operation in self._reserved:
            raise Bug(f"{operation} is reserved twice")
        self._reserved[operation] = blocks
        self._reserved_blocks += blocks

    def started(self, operation: OperationId) -> None:
        """Its prompt is here, or it is gone. Idempotent."""
        self._reserved_blocks -= self._reserved.pop(operation, 0)
