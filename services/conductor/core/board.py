"""The numbers of many workers side by side, so that a decision looks at all of them with a few array operations.

A board is a copy: before each use, the rows of the workers that changed since are written again. What a cell means is
defined by the worker's own formula beside the column (:class:`services.conductor.core.cluster.Worker`); a test holds
the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.conductor.core.cluster import Worker
from services.conductor.core.estimate import Costs
from shared.ids import WorkerId

Column = npt.NDArray[np.float64]
"""A number of each worker."""
Mask = npt.NDArray[np.bool_]
"""Some of the workers."""


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
            self._cells = np.array([cells_of(worker) for worker in workers]).T.copy()
            self._rows = tuple(self._cells)
            self.taught_s = self._rows[-1]
        self._versions = versions
        self.first_taught_s = float(self.taught_s.min())
        return True


class PrefillBoard(_Board):
    """Queues and costs of prefill workers."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(workers, _prefill_cells)
        self.places: dict[WorkerId, int] = {worker.id: place for place, worker in enumerate(workers)}
        self._is_explained = True

    def refresh(self) -> bool:
        """See :meth:`_Board.refresh`."""
        is_new = super().refresh()
        if is_new:
            self._is_explained = not self._rows[3].any()
        return is_new

    def queue_s(self, now: float) -> Column:
        """As ``Worker.queue_s``."""
        behind_s, first_end_s, first_least_s, unexplained_end_s = self._rows[:4]
        queue_s: Column = behind_s + np.maximum(first_end_s - now, first_least_s)
        if not self._is_explained:
            queue_s += np.maximum(unexplained_end_s - now, 0.0)
        return queue_s

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
            fixed_s + byte_s * burden.receiving_bytes, byte_s, worker.taught_s)


def _decode_cells(worker: Worker) -> tuple[float, ...]:
    burden = worker.burden
    return (burden.batch, burden.context_tokens, burden.free_blocks, worker.hello.max_running, *worker.costs.decode,
            worker.taught_s)
