"""The numbers of many workers side by side, so that a decision looks at all of them with a few array operations.

A board is a copy: before each use, the rows of the workers that changed since are written again. What a cell means is
defined by the worker's own formula beside the column (:class:`services.conductor.core.worker.Worker`); a test holds
the two together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.conductor.core import native
from services.conductor.core.estimate import Costs
from services.conductor.core.worker import BEHIND_S, LATE_S, MARGIN_S, Worker
from shared.ids import WorkerId

Column = npt.NDArray[np.float64]
"""A number of each worker."""
Mask = npt.NDArray[np.bool_]
"""Some of the workers."""

_FEW_WAITING = 8
"""Room for so many in each queue to begin with, the one that is computed counted in."""
_NOBODY = np.array([[math.inf], [0.0], [math.inf]])
"""A place in a queue where nobody is: rank, seconds of computing, seconds to spare."""
_SINCE = 9
"""Row of a prefill board: when the one that is computed was placed; see ``_since_s``."""


class _Board:
    """What boards have in common. ``_cells`` has a row for each number, a column for each worker."""

    def __init__(self, workers: Sequence[Worker], cells_of: Callable[[Worker], tuple[float, ...]]) -> None:
        self.workers = workers
        self._cells_of = cells_of
        self.places: dict[WorkerId, int] = {worker.id: place for place, worker in enumerate(workers)}
        self._changes, self._seen = workers[0].changes, -1
        self._cells = np.empty((0, 0))
        self._rows: tuple[Column, ...] = ()
        self.taught_s: Column = np.empty(0)
        """When each pace was learnt."""
        self.first_taught_s = 0.0
        """The earliest of these."""

    def refresh(self) -> bool:
        """Reads what changed; whether anything did."""
        changes = self._changes
        if changes.count == self._seen:
            return False
        workers, cells_of = self.workers, self._cells_of
        changed = changes.since(self._seen) if self._rows else None
        self._seen = changes.count
        if changed is None:
            places = list(range(len(workers)))
            self._cells = np.array([cells_of(worker) for worker in workers]).T.copy()
            self._rows = tuple(self._cells)
            self.taught_s = self._rows[-1]
            self._view()
        else:
            places = [place for worker in changed if (place := self.places.get(worker)) is not None]
            if not places:
                return False
            self._write(places)
            self.first_taught_s = float(np.minimum.reduce(self.taught_s))
            return True
        self._read(places)
        self.first_taught_s = float(np.minimum.reduce(self.taught_s))
        return True

    def _view(self) -> None:
        """The arrays are others than before."""

    def _write(self, places: Sequence[int]) -> None:
        """Everything of these workers."""
        for place in places:
            self._cells[:, place] = self._cells_of(self.workers[place])
        self._read(places)

    def _read(self, places: Sequence[int]) -> None:
        """What is not a cell, of these workers."""


@dataclass(frozen=True, slots=True)
class Line:
    """Where a prompt would come in the queue of each worker; arrays end with a cell for each worker."""

    queue_s: Column
    """What is computed before it."""
    delayed: Column
    """How many it makes wait longer."""
    yields_s: Column | None
    """How much later it counts as come, lest it make others late; ``None`` where nobody is due."""


class PrefillBoard(_Board):
    """Queues and costs of prefill workers."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(workers, _prefill_cells)
        self.order = workers[0].order
        """Of all of them."""
        #: (rank, seconds of computing, seconds to spare) × place in the queue × worker: first the one that is computed,
        #: whose first two change with time and are written when asked for, then those that wait, in their order
        self._queues = np.empty((3, _FEW_WAITING, len(workers)))
        self._queues[:] = _NOBODY[:, :, None]
        self._lengths = np.ones(len(workers), dtype=np.int64)
        self._count = np.zeros(len(workers))
        """Requests in each queue."""
        self.block_tokens, self.block_bytes = workers[0].hello.spec.block_tokens, workers[0].hello.spec.block_bytes

    def _write(self, places: Sequence[int]) -> None:
        if native.WHY_NOT:
            super()._write(places)
            return
        for place in places:
            worker = self.workers[place]
            burden = worker.burden
            self._make_room(1 + len(burden.waiting))
            native.write(*self._views, len(self.workers), place, _prefill_cells(worker), burden.waiting,
                         burden.first_spare_s)

    def _make_room(self, length: int) -> None:
        """In each queue."""
        if length > self._queues.shape[1]:
            wider = np.empty((3, 2 * length, len(self.workers)))
            wider[:] = _NOBODY[:, :, None]
            wider[:, :self._queues.shape[1]] = self._queues
            self._queues = wider
            self._view()

    def _view(self) -> None:
        """Views of the arrays, for the compiled part: to make one takes longer than what is done with it."""
        self._views = (self._cells.data, self._queues.data, self._queues.shape[1], self._lengths.data, self._count.data)

    def _read(self, places: Sequence[int]) -> None:
        since_s, lengths = self._rows[_SINCE], self._lengths
        for place in places:
            burden = self.workers[place].burden
            end, before = 1 + len(burden.waiting), int(lengths[place])
            self._make_room(end)
            if end > 1:
                self._queues[:, 1:end, place] = np.array(burden.waiting).T
            if before > end:
                self._queues[:, end:before, place] = _NOBODY
            self._queues[2, 0, place] = burden.first_spare_s
            lengths[place] = end
            self._count[place] = end - (since_s[place] == math.inf)

    def fill_survey(self, answers: npt.NDArray[np.float64], own: dict[WorkerId, int], ranked: dict[int, float],
                    known: tuple[float, ...] | None, terms: tuple[float, ...]) -> tuple[bool, float, float, float]:
        """The compiled pass over all that is on the board; see :mod:`services.conductor.core.survey`."""
        return native.fill_survey(*self._views, answers, own, self.places, ranked, known, terms)

    def queue_s(self, now: float) -> Column:
        """As ``Worker.queue_s``."""
        queue_s: Column = self._rows[0] + self._front_s(now)
        return queue_s

    def line(self, prefill_s: Column, now: float, *, since_s: float) -> Line:
        """Where a prompt comes that needs so many seconds of computing and counts from ``since_s`` on; as
        ``Worker.line``."""
        queues = self._at(now)
        rank = self.order.ranks(since_s, prefill_s)
        ranks, lefts_s, spares_s = queues[:, :, None] if rank.ndim > 1 else queues
        yields_s = None
        if np.minimum.reduce(spares_s, axis=None) < math.inf:
            cannot_wait = (spares_s < prefill_s + MARGIN_S) & (spares_s > -LATE_S)
            behind = np.maximum.reduce(np.where(cannot_wait, ranks, -math.inf))
            yields_s = np.where(behind > rank, behind + BEHIND_S - rank, 0.0)
            rank = rank + yields_s
        goes_first = ranks <= rank
        return Line(np.add.reduce(goes_first * lefts_s), self._count - np.add.reduce(goes_first), yields_s)

    def _at(self, now: float) -> npt.NDArray[np.float64]:
        """The queues as they are now."""
        queues = self._queues[:, :np.maximum.reduce(self._lengths)]
        queues[1, 0] = front_s = self._front_s(now)
        queues[0, 0] = self.order.ranks(self._rows[_SINCE], front_s)
        return queues

    def _front_s(self, now: float) -> Column:
        """What is left of the one that is computed, with what nobody can explain."""
        _, first_end_s, first_least_s, unexplained_end_s = self._rows[:4]
        front_s: Column = np.maximum(first_end_s - now, first_least_s)
        if np.logical_or.reduce(unexplained_end_s != 0.0):
            front_s = front_s + np.maximum(unexplained_end_s - now, 0.0)
        return front_s

    def prefill_s(self, num_tokens: int, hit_tokens: Column, *, costs: Costs | None = None) -> Column:
        """As ``Costs.prefill_s``, by each one's own costs unless some are given."""
        fixed_s, token_s, square_s = self._rows[4:7] if costs is None else costs.prefill
        prefill_s: Column = fixed_s + (num_tokens - hit_tokens) * (token_s + square_s * (num_tokens + hit_tokens))
        return prefill_s

    def pull_s(self, nbytes: Column) -> Column:
        """At least what pulling so many bytes takes: behind what the receiver is pulling, over its better link."""
        fixed_s, byte_s = self._rows[7:9]
        pull_s: Column = fixed_s + byte_s * nbytes
        return pull_s


class DecodeBoard(_Board):
    """Batches and costs of decode workers."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(workers, _decode_cells)
        self.full: set[int] = set()
        """Places of those whose batch is full."""

    def _read(self, places: Sequence[int]) -> None:
        for place in places:
            worker = self.workers[place]
            (self.full.add if worker.batch() >= worker.hello.max_running else self.full.discard)(place)

    @property
    def free_blocks(self) -> Column:
        """As ``Worker.free_blocks``."""
        free_blocks: Column = self._rows[2]
        return free_blocks

    @property
    def max_running(self) -> Column:
        """Requests of a full batch."""
        max_running: Column = self._rows[3]
        return max_running

    def step_s(self, num_tokens: int, *, costs: Costs | None = None) -> Column:
        """A step with one more request of so many tokens, those on their way counted in; by own costs or by these."""
        if costs is None:
            own_s: Column = self._rows[7] + self._rows[6] * num_tokens
            return own_s
        batch, context_tokens, _, max_running = self._rows[:4]
        fixed_s, request_s, token_s = costs.decode
        step_s: Column = (fixed_s + request_s * np.minimum(batch + 1.0, max_running)
                          + token_s * (context_tokens + num_tokens))
        return step_s


def _prefill_cells(worker: Worker) -> tuple[float, ...]:
    burden, costs = worker.burden, worker.costs
    fixed_s, byte_s = costs.better_link
    return (burden.behind_s, burden.first_left_s + burden.first_since_s, burden.first_least_s,
            burden.unexplained_s + worker.load_s if burden.unexplained_s else 0.0, *costs.prefill,
            fixed_s + byte_s * burden.receiving_bytes, byte_s,
            _since_s(worker), worker.taught_s)


def _since_s(worker: Worker) -> float:
    """From when on the one counts that is computed; nobody takes over from what only the worker knows, or where nobody
    does at all, and where nothing is computed there is nobody to take over from."""
    burden = worker.burden
    if burden.front is None:
        return -math.inf if burden.unexplained_s else math.inf
    return burden.front.since_s if worker.order.is_preemptive else -math.inf


def _decode_cells(worker: Worker) -> tuple[float, ...]:
    burden, costs, most = worker.burden, worker.costs, worker.hello.max_running
    return (burden.batch, burden.context_tokens, burden.free_blocks, most, *costs.decode,
            costs.step_s(batch=min(burden.batch + 1, most), context_tokens=burden.context_tokens), worker.taught_s)
