"""``llmd_scorer``: llm-d's endpoint picker (llm-d router at ebab68792), its precise-prefix reference profile.

A weighted sum of scores in [0, 1], the largest wins::

    3 * prefix + 2 * kv + 2 * queue
    prefix = matched blocks / blocks of the prompt (tier weight 1.0 on the GPU, 0.8 in host memory)
    kv     = 1 - share of the KV memory in use
    queue  = (max(queue) - queue) / (max(queue) - min(queue)), in waiting requests; 1 when all are equal

In disaggregated serving the decode worker is scored by the same terms over the decode workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.conductor.core.policies.base import Choice, PublishedPolicy, View
from services.conductor.core.worker import Worker

PREFIX_WEIGHT, KV_WEIGHT, QUEUE_WEIGHT = 3.0, 2.0, 2.0
HOST_TIER = 0.8


class LlmdScorer(PublishedPolicy):
    """See the module."""

    def choose_prefill(self, view: View) -> Choice:
        """By score."""
        return view.local(self._best(view, view.prefill, [len(worker.prefilling) for worker in view.prefill]))

    def choose_decode(self, view: View) -> Worker:
        """By score."""
        return self._best(view, view.decode, [len(worker.decoding) for worker in view.decode])

    def _best(self, view: View, workers: Sequence[Worker], queues: Sequence[int]) -> Worker:
        return self._least([(-score(view, worker, queue, queues), worker)
                            for worker, queue in zip(workers, queues, strict=True)])


def score(view: View, worker: Worker, queue: int, queues: Sequence[int]) -> float:
    """The formula; ``queues`` are those of all workers that are compared."""
    prefix = HOST_TIER * view.own(worker) / view.blocks
    capacity = max(worker.hello.capacity_blocks, 1)
    kv = min(max(worker.free_blocks() / capacity, 0.0), 1.0)
    spread = max(queues) - min(queues)
    idle = (max(queues) - queue) / spread if spread else 1.0
    return PREFIX_WEIGHT * prefix + KV_WEIGHT * kv + QUEUE_WEIGHT * idle
