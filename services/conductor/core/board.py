"""The numbers of many workers side by side, so that a decision looks at all of them with a few array operations.

A board is a copy: before each use, the rows of the workers that changed since are written again. What a cell means is
defined by the worker's own formula beside the column (:class:`services.conductor.core.cluster.Worker`); a test holds
the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.conductor.core.cluster import Worker
from services.conductor.core.estimate import Costs
from shared.ids import WorkerId

Column = npt.NDArray[np.float64]
"""A number of each worker."""
Mask = npt.NDArray[np.bool_]
"""Some of the workers."""

_FEW_WAITING = 8
"""Room for so many in each queue to begin with."""
_MARGIN_S = 0.5
"""Who would be left with less than this to spare would be late."""
_LATE_S = 5.0
"""Who will be later than this is late anyway."""
_NOBODY = np.inf
"""Rank of a place in a queue where nobody is; what it would take is not looked at."""


class _Board:
    """What boards have in common. ``_cells`` has a row for each number, a column for each worker."""

    def __init__(self, workers: Sequence[Worker], cells_of: Callable[[Worker], tuple[float, ...]]) -> None:
        self.workers = workers
        self._cells_of = cells_of
        self._versions: list[int] = []
        self._cells = np.empty((0, 0))
        self._rows: tuple[Column, ...] = ()
        self.taught_s: Column = np.empty(0)
        """When each pace was learnt."""
        self.first_taught_s = 0.0
        """The earliest of these."""

    def refresh(self) -> bool:
        """Reads what changed; whether anything did."""
        versions = [worker.version for worker in self.workers]
        if versions == self._versions:
            return False
        workers, cells_of = self.workers, self._cells_of
        if self._versions:
            places = [place for place, old in enumerate(self._versions) if versions[place] != old]
            self._cells[:, places] = np.array([cells_of(workers[place]) for place in places]).T
        else:
            places = list(range(len(workers)))
            self._cells = np.array([cells_of(worker) for worker in workers]).T.copy()
            self._rows = tuple(self._cells)
            self.taught_s = self._rows[-1]
        self._read(places)
        self._versions = versions
        self.first_taught_s = float(self.taught_s.min())
        return True

    def _read(self, places: Sequence[int]) -> None:
        """What is not a cell, of these workers."""


@dataclass(frozen=True, slots=True)
class Line:
    """Where a prompt would come in the queue of each worker; arrays end with a cell for each worker."""

    queue_s: Column
    """What is computed before it."""
    delayed: Column
    """How many it makes wait longer."""


class PrefillBoard(_Board):
    """Queues and costs of prefill workers."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(workers, _prefill_cells)
        self.places: dict[WorkerId, int] = {worker.id: place for place, worker in enumerate(workers)}
        self.order = workers[0].order
        """Of all of them."""
        self._is_explained = True
        #: of those that wait, by worker and in their order: rank, seconds of computing, seconds to spare
        self._waiting = np.full((3, len(workers), _FEW_WAITING), _NOBODY)
        self._lengths = [0] * len(workers)
        self._longest = 0

    def refresh(self) -> bool:
        """See :meth:`_Board.refresh`."""
        is_new = super().refresh()
        if is_new:
            self._is_explained = not self._rows[3].any()
        return is_new

    def _read(self, places: Sequence[int]) -> None:
        for place in places:
            waiting = self.workers[place].burden.waiting
            length, before = len(waiting), self._lengths[place]
            if length > self._waiting.shape[2]:
                wider = np.full((3, len(self.workers), 2 * length), _NOBODY)
                wider[:, :, :self._waiting.shape[2]] = self._waiting
                self._waiting = wider
            row = self._waiting[:, place]
            if length:
                row[:, :length] = np.array(waiting).T
            if before > length:
                row[:, length:before] = _NOBODY
            self._lengths[place] = length
        self._longest = max(self._lengths)

    def queue_s(self, now: float) -> Column:
        """As ``Worker.queue_s``."""
        queue_s: Column = self._rows[0] + self._front_s(now)
        return queue_s

    def line(self, prefill_s: Column, now: float) -> Line:
        """Where a prompt comes that needs so many seconds of computing; as ``Worker.line``."""
        front_s, order = self._front_s(now), self.order
        rank = order.ranks(now, prefill_s)
        queue_s: Column = np.zeros_like(rank)
        delayed: Column = np.zeros_like(rank)
        if self._longest:
            ranks, lefts_s, _ = self._waiting[:, :, :self._longest]
            goes_first = ranks <= rank[..., None]
            queue_s = np.where(goes_first, lefts_s, 0.0).sum(axis=-1)
            delayed = np.asarray(self._lengths) - goes_first.sum(axis=-1)
        if order.is_preemptive:
            stays = order.ranks(self._rows[9], front_s) <= rank
            return Line(queue_s + np.where(stays, front_s, 0.0), delayed + (~stays & (front_s > 0)))
        return Line(queue_s + front_s, delayed)

    def makes_late(self, prefill_s: Column, now: float) -> Mask:
        """Where a prompt that needs so many seconds of computing would make another one late.

        Predictions are not exact: who has little to spare, or is a little late, is not made to wait either. Who is
        late anyway holds up nobody.
        """
        ranks, _, spare_s = self._waiting[:, :, :max(self._longest, 1)]
        rank = self.order.ranks(now, prefill_s)
        after_s = prefill_s + _MARGIN_S
        late: Mask = ((ranks > rank[..., None]) & (spare_s > -_LATE_S) & (spare_s < after_s[..., None])).any(axis=-1)
        if self.order.is_preemptive:
            since_s, front_spare_s = self._rows[9:11]
            makes_way = self.order.ranks(since_s, self._front_s(now)) > rank
            late |= makes_way & (front_spare_s > -_LATE_S) & (front_spare_s < after_s)
        return late

    def _front_s(self, now: float) -> Column:
        """What is left of the one that is computed, and of what nobody can explain."""
        _, first_end_s, first_least_s, unexplained_end_s = self._rows[:4]
        front_s: Column = np.maximum(first_end_s - now, first_least_s)
        if not self._is_explained:
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

    @property
    def batch(self) -> Column:
        """Requests decoding or on their way."""
        batch: Column = self._rows[0]
        return batch

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
        batch, context_tokens, _, max_running = self._rows[:4]
        fixed_s, request_s, token_s = self._rows[4:7] if costs is None else costs.decode
        step_s: Column = (fixed_s + request_s * np.minimum(batch + 1.0, max_running)
                          + token_s * (context_tokens + num_tokens))
        return step_s


def _prefill_cells(worker: Worker) -> tuple[float, ...]:
    burden, costs = worker.burden, worker.costs
    fixed_s, byte_s = costs.better_link
    return (burden.behind_s, burden.first_left_s + burden.first_since_s, burden.first_least_s,
            burden.unexplained_s + worker.load_s if burden.unexplained_s else 0.0, *costs.prefill,
            fixed_s + byte_s * burden.receiving_bytes, byte_s,
            burden.front.placed_s if burden.front is not None else 0.0, burden.first_spare_s, worker.taught_s)


def _decode_cells(worker: Worker) -> tuple[float, ...]:
    burden = worker.burden
    return (burden.batch, burden.context_tokens, burden.free_blocks, worker.hello.max_running, *worker.costs.decode,
            worker.taught_s)
