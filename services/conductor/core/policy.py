"""The numbers a conductor decides by, given at start."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import PlaceRequest
from shared.order import ORDER, Order

_LEAST_S = 0.001
"""Instead of a bound that has passed."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits, waits and tolerances; all ``_s`` are seconds."""

    suspect_after_s: float = 2.0
    """Silence after which a worker gets no new work."""
    dead_after_s: float = 8.0
    """Silence after which a worker's blocks leave the index."""
    order: Order = ORDER
    """In which prefill workers compute what they have."""
    regard: float = 1.0
    """What a second that a request makes another one wait counts for, in seconds of its own."""
    max_queue_s: float = 30.0
    """Predicted wait, for prefill or for a decode slot, beyond which a worker gets no new work."""
    ttft_slo_s: float | None = None
    """Time to first token asked of requests that bring none; ``None``: no limit."""
    tbt_slo_s: float | None = None
    """Time between tokens asked of requests that bring none; ``None``: no limit."""
    max_blocks: int = 20_000_000
    """(worker, block) pairs the index holds."""
    max_index_bytes: int = 4 << 30
    """Memory the index takes, estimated."""
    max_promised: int = 1_000_000
    """Distinct blocks promised and not yet announced."""
    promise_s: float = 3.0
    """How long a promise outlives the predicted, then the actual, end of its prefill."""
    fetch_gain: float = 1.2
    """Recomputing must take this many times the transfer before blocks are pulled: estimates are not exact."""
    max_sources: int = 4
    """Owners that one prompt pulls from at most."""
    tie: float = 0.02
    """Options this close to the best (relative) are equals; which one wins is drawn."""
    candidates: int = 8
    """Options reported with a decision, best first."""
    trust_s: float = 15.0
    """Time for which what was learnt of a worker's pace is taken as true. Older than that, a worker is thought no
    slower than the best of those known better, so that one bad spell does not keep all work from it for ever."""
    settle_s: float = 2.0
    """Time after which a decision must show in the worker's own load, or it is not believed any more."""
    job_ttl_s: float = 600.0
    """Time after which a request nobody reported on is forgotten."""
    hold_s: float = 0.1
    """How long an early KV event waits for the one before it."""
    sync_timeout_s: float = 5.0
    """Longest wait for an owner's answer."""
    rollcall_window_s: float = 0.5
    """After the start: time for workers to answer the rollcall."""
    converge_within_s: float = 3.0
    """After the start: time after which the conductor serves with what it has."""

    def ttft_asked_s(self, ask: PlaceRequest) -> float | None:
        """Within how many seconds after it was to be placed first ``ask`` must have its first token: what it says
        itself, else ``ttft_slo_s``; ``None`` for no limit."""
        return self.ttft_slo_s if ask.ttft_slo_s is None else ask.ttft_slo_s + ask.waited_s

    def ttft_left_s(self, ask: PlaceRequest) -> float | None:
        """The same from now on: what it has waited is taken off. Above 0, also where the bound has passed."""
        left_s = ask.ttft_slo_s
        if left_s is None and self.ttft_slo_s is not None:
            left_s = self.ttft_slo_s - ask.waited_s
        return None if left_s is None else max(left_s, _LEAST_S)
