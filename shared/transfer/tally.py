"""What has become of a push so far. Pure: outcomes in, a result out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.ids import WorkerId
from shared.transfer.plan import Batch
from shared.transfer.types import (
    Outcome,
    PathFailed,
    PeerGone,
    PushResult,
    Slice,
    SliceStatus,
    TransferCancelled,
    TransferError,
    Trouble,
)

NOTHING = Batch((), 0)
"""Brings a note and no bytes."""


class Tally:
    """Books of one push of ``slices`` to ``peer``. Times are seconds on the host's clock."""

    def __init__(self, peer: WorkerId, slices: Sequence[Slice], note: bytes | None, started_s: float) -> None:
        self._peer, self.slices, self._started_s = peer, slices, started_s
        self.note = note
        """What the receiver has to be told yet."""
        self.todo = {i: item for i, item in enumerate(slices) if item.remote.length}
        """{index: slice} that has not been tried, or whose connection broke."""
        self.troubles: dict[int, Trouble] = {}
        """{index of a slice: why it did not arrive}"""
        self._note_trouble: Trouble | None = None
        self._path = [""] * len(slices)
        self._ended_s = [started_s] * len(slices)
        self._paths: dict[str, None] = {}
        """Those that carried something, in order."""

    @property
    def owes_note(self) -> bool:
        """Is the note the only thing that is left to be done?"""
        return self.note is not None and not self.troubles and not self.todo and self._note_trouble is None

    def note_for(self, batches: Sequence[Batch]) -> bytes | None:
        """The note may go with ``batches`` only if they are one: it must not be there before they all are."""
        return self.note if len(batches) == 1 else None

    def take(self, path: str, batches: Sequence[Batch], outcomes: Sequence[Outcome], ended_s: Sequence[float],
             note: bytes | None) -> Trouble | None:
        """Books what became of ``batches``, which carried ``note``; the trouble of a connection, if one broke."""
        new: dict[int, Trouble] = {}
        broke: Trouble | None = None
        for batch, outcome, batch_ended_s in zip(batches, outcomes, ended_s, strict=True):
            for piece, trouble in zip(batch.pieces or (None,), outcome, strict=True):
                if trouble is None:
                    self._paths[path] = None
                elif trouble.kind is PeerGone:
                    broke = trouble
                if piece is None:
                    self._note_trouble = trouble
                    continue
                for index in piece.indexes:
                    self._path[index], self._ended_s[index] = path, batch_ended_s
                    if trouble is not None and index in self.todo:
                        new.setdefault(index, trouble)
        if self.troubles:
            for index in self.todo:
                self.troubles.pop(index, None)
        self.troubles |= new
        self.todo = {i: self.todo[i] for i, trouble in new.items() if trouble.kind is PeerGone} if new else {}
        if note is not None and not new and self._note_trouble is None:
            self.note = None
        return broke

    def fail_all(self, excluded: Mapping[str, str]) -> None:
        """No path connects the two: ``{path: why not}``."""
        trouble = Trouble(PathFailed, "; ".join(f"{path}: {why}" for path, why in excluded.items())
                          or "no path is allowed")
        self.troubles = dict.fromkeys(self.todo, trouble)
        if not self.todo:
            self._note_trouble = trouble

    def result(self, now_s: float) -> PushResult:
        """How it ended."""
        if self.owes_note:
            self._note_trouble = Trouble(TransferCancelled, "cancelled before the receiver was notified")
        for index in self.todo:
            self.troubles.setdefault(index, Trouble(TransferCancelled, "cancelled before it was sent"))
        statuses, nbytes, troubles = [], 0, self.troubles
        for i, item in enumerate(self.slices):
            error = None
            if troubles and (trouble := troubles.get(i)) is not None:
                error = self._error(trouble, item.nbytes, item.remote.segment)
            else:
                nbytes += item.nbytes
            statuses.append(SliceStatus(item, error, self._path[i], self._ended_s[i] - self._started_s))
        note = self._note_trouble
        return PushResult(statuses, None if note is None else self._error(note, 0, ""), nbytes,
                          now_s - self._started_s, "+".join(self._paths))

    def _error(self, trouble: Trouble, nbytes: int, segment: str) -> TransferError:
        return trouble.kind(self._peer, trouble.why, nbytes=nbytes, segment=segment)
