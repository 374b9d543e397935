"""The numbers of many workers side by side, so that a decision looks at all of them with a few array operations.

A board is a copy: before each use, the rows of the workers that changed since are written again. What a cell means is
defined by the worker's own formula beside the column (:class:`services.conductor.core.cluster.Worker`); a test holds
the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.conductor.core.cluster import Worker
from services.conductor.core.estimate import Costs
from shared.ids import WorkerId

Column = npt.NDArray[np.float64]
"""A number of each worker."""
Mask = npt.NDArray[np.bool_]
"""Some of the workers."""


class PrefillBoard:
    """Queues and costs of prefill workers."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.places: dict[WorkerId, int] = {worker.id: place for place, worker in enumerate(workers)}
        self._versions = [-1] * len(workers)
        self._cells = np.zeros((12, len(workers)))

    def refresh(self) -> None:
        """Reads what changed."""
        _refresh(self, _prefill_cells)

    def queue_s(self, now: float) -> Column:
        """As ``Worker.queue_s``."""
        behind_s, left_s, since_s, least_s, unexplained_s, load_s = self._cells[:6]
        queue_s: Column = behind_s + np.maximum(left_s + since_s - now, least_s)
        queue_s += np.maximum(unexplained_s + load_s - now, 0.0)
        return queue_s

    def prefill_s(self, num_tokens: int, hit_tokens: Column, *, costs: Costs | None = None) -> Column:
        """As ``Costs.prefill_s``, by each one's own costs unless some are given."""
        fixed_s, token_s, square_s = self._cells[6:9] if costs is None else costs.prefill
        prefill_s: Column = fixed_s + (num_tokens - hit_tokens) * (token_s + square_s * (num_tokens + hit_tokens))
        return prefill_s

    def pull_s(self, nbytes: Column) -> Column:
        """At least what pulling so many bytes takes: behind what the receiver is pulling, over its better link."""
        fixed_s, byte_s = self._cells[9:11]
        pull_s: Column = fixed_s + byte_s * nbytes
        return pull_s

    @property
    def taught_s(self) -> Column:
        """When each pace was learnt."""
        taught_s: Column = self._cells[11]
        return taught_s


class DecodeBoard:
    """Batches and costs of decode workers."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self._versions = [-1] * len(workers)
        self._cells = np.zeros((8, len(workers)))

    def refresh(self) -> None:
        """Reads what changed."""
        _refresh(self, _decode_cells)

    @property
    def batch(self) -> Column:
        """Requests decoding or on their way."""
        batch: Column = self._cells[0]
        return batch

    @property
    def free_blocks(self) -> Column:
        """As ``Worker.free_blocks``."""
        free_blocks: Column = self._cells[2]
        return free_blocks

    @property
    def max_running(self) -> Column:
        """Requests of a full batch."""
        max_running: Column = self._cells[3]
        return max_running

    @property
    def taught_s(self) -> Column:
        """When each pace was learnt."""
        taught_s: Column = self._cells[7]
        return taught_s

    def step_s(self, num_tokens: int, *, costs: Costs | None = None) -> Column:
        """A step with one more request of so many tokens, those on their way counted in; by own costs or by these."""
        batch, context_tokens, _, max_running = self._cells[:4]
        fixed_s, request_s, token_s = self._cells[4:7] if costs is None else costs.decode
        step_s: Column = (fixed_s + request_s * np.minimum(batch + 1.0, max_running)
                          + token_s * (context_tokens + num_tokens))
        return step_s


def _refresh(board: Any, cells_of: Any) -> None:
    versions = [worker.version for worker in board.workers]
    if versions != board._versions:
        for place, (new, old) in enumerate(zip(versions, board._versions, strict=True)):
            if new != old:
                board._cells[:, place] = cells_of(board.workers[place])
        board._versions = versions


def _prefill_cells(worker: Worker) -> tuple[float, ...]:
    burden, costs = worker.burden, worker.costs
    near, far = costs.link(same_host=True), costs.link(same_host=False)
    byte_s = min(near[1], far[1])
    return (burden.behind_s, burden.first_left_s, burden.first_since_s, burden.first_least_s, burden.unexplained_s,
            worker.load_s, *costs.prefill, min(near[0], far[0]) + byte_s * burden.receiving_bytes, byte_s,
            worker.taught_s)


def _decode_cells(worker: Worker) -> tuple[float, ...]:
    burden = worker.burden
    return (burden.batch, burden.context_tokens, burden.free_blocks, worker.hello.max_running, *worker.costs.decode,
            worker.taught_s)
