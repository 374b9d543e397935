"""``sglang_cache_aware``: the cache-aware policy of SGLang's router (SMG, lightseekorg/smg at 73da68ca9, defaults).

With ``load`` the requests the router has sent to a worker and that are not answered::

    if max(load) - min(load) > 64 and max(load) > 1.5 * min(load):   least load
    elif best match / prompt > 0.3:                                  the worker with the best match
    else:                                                            the worker with the smallest tree

In disaggregated serving decode workers get the power of two choices by load.
"""

from __future__ import annotations

from services.conductor.core.policies.base import Choice, PublishedPolicy, View
from services.conductor.core.worker import Worker

CACHE_THRESHOLD = 0.3
BALANCE_ABSOLUTE = 64
BALANCE_RELATIVE = 1.5


class SglangCacheAware(PublishedPolicy):
    """See the module."""

    def choose_prefill(self, view: View) -> Choice:
        """By load when it is uneven, else by match."""
        loads = [len(worker.prefilling) for worker in view.prefill]
        if max(loads) - min(loads) > BALANCE_ABSOLUTE and max(loads) > BALANCE_RELATIVE * min(loads):
            return view.local(self._least(list(zip(loads, view.prefill, strict=True))))
        best = max(view.prefill, key=view.own)
        if view.own(best) / view.blocks > CACHE_THRESHOLD:
            return view.local(self._least([(len(worker.prefilling), worker) for worker in view.prefill
                                           if view.own(worker) == view.own(best)]))
        return view.local(self._least([(tree_blocks(worker), worker) for worker in view.prefill]))

    def choose_decode(self, view: View) -> Worker:
        """The less loaded of two that are drawn."""
        drawn = self._rng.sample(list(view.decode), min(2, len(view.decode)))
        return min(drawn, key=lambda worker: len(worker.decoding))


def tree_blocks(worker: Worker) -> int:
    """Blocks the router believes to be on ``worker``: what it said last, and what was sent there since."""
    said = worker.load.cached_blocks if worker.load is not None else 0
    return said + sum(job.computed_tokens for job in worker.prefilling.values()) // worker.hello.spec.block_tokens
