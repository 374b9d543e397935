"""``mooncake_a1``: Algorithm 1 of the Mooncake paper (FAST'25, section 5.1; arXiv 2407.00079, algorithm 1).

With ``best`` the longest prefix any prefill worker has, and ``own`` the prefix of worker ``i``::

    if best / own > threshold (an own of 0 makes it infinite):  reuse best, transfer best - own from its holder
    else:                                                       reuse own
    ttft(i) = transfer + queue(i) + prefill(prompt, reuse)
    the worker with the least ttft; the decode worker with the least predicted load

``kvcache_balancing_threshold`` is not published. It is 1.5 here; in a scan of 1.05, 1.2, 1.5, 2, 4 and 8 the mean TTFT
changed by 1 % (see docs/simulator.md). ``cache_aware`` is the same without transfers (an infinite threshold): the
paper's "cache-aware" scheduling over local caches.
"""

from __future__ import annotations

import math

from services.conductor.core.policies.admission import Admission
from services.conductor.core.policies.base import Choice, PublishedPolicy, View
from services.conductor.core.policy import Policy
from shared.ids import ConductorId
from shared.messages import Source

BALANCING_THRESHOLD = 1.5


class MooncakeA1(PublishedPolicy):
    """See the module."""

    def __init__(self, conductor: ConductorId, policy: Policy, admission: Admission, *, seed: int,
                 threshold: float = BALANCING_THRESHOLD) -> None:
        super().__init__(conductor, policy, admission, seed=seed)
        self._threshold = threshold

    def choose_prefill(self, view: View) -> Choice:
        """By predicted time to first token."""
        options = []
        best = self._best(view) if math.isfinite(self._threshold) else None
        for worker in view.prefill:
            own = view.own(worker)
            choice = Choice(worker, own)
            if best is not None and best.num_blocks > own and (not own or best.num_blocks / own > self._threshold):
                choice = Choice(worker, own, (Source(
                    owner=best.owner, incarnation=best.incarnation, first_block=own,
                    num_blocks=best.num_blocks - own),))
            ttft_s = (view.transfer_s(choice) + worker.queue_s(view.now)
                      + view.prefill_s(worker, choice.hit_blocks))
            options.append((ttft_s, choice))
        return self._least(options)

    def _best(self, view: View) -> Source | None:
        """The longest prefix one worker can send, from its start."""
        end, holders = view.match.run(0)
        known = [view.cluster.workers[holder] for holder in holders if holder in view.cluster.workers]
        if not end or not known:
            return None
        owner = self._least([(worker.sending_bytes(), worker) for worker in known])
        return Source(owner=owner.id, incarnation=owner.hello.incarnation, first_block=0, num_blocks=end)
