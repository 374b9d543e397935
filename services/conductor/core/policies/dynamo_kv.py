"""``dynamo_kv``: NVIDIA Dynamo's KV router (its documentation, "Router design" and router configuration, mid 2026).

::

    cost = prefill_load_scale * max(active prefill blocks + incoming blocks - credits, 0) + decode blocks
    credits = matching blocks * overlap credit of their tier (device 1.0, host 0.75, disk 0.25)

Least cost wins; temperature 0, so ties are drawn. Active prefill blocks are those the router has sent there and that
are not computed yet. Prefill workers hold no decode blocks in disaggregated serving; a decode worker's cost is its
decode blocks and the request's. Our workers' caches are in host memory: credit 0.75.
"""

from __future__ import annotations

from services.conductor.core.policies.base import Choice, PublishedPolicy, View
from services.conductor.core.worker import Worker

PREFILL_LOAD_SCALE = 1.0
HOST_CREDIT = 0.75


class DynamoKv(PublishedPolicy):
    """See the module."""

    def choose_prefill(self, view: View) -> Choice:
        """By cost in blocks."""
        return view.local(self._least([(prefill_cost(view, worker), worker) for worker in view.prefill]))

    def choose_decode(self, view: View) -> Worker:
        """By active blocks."""
        return self._least([(worker.context_tokens() / view.block_tokens, worker) for worker in view.decode])


def prefill_cost(view: View, worker: Worker) -> float:
    """The formula."""
    active = sum(job.computed_tokens for job in worker.prefilling.values()) / view.block_tokens
    return PREFILL_LOAD_SCALE * max(active + view.blocks - HOST_CREDIT * view.own(worker), 0.0)
