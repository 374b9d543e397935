"""Why a request cannot be taken, in one line for a person, and when it is worth asking again.

``retry_after_s`` is computed: the time until the condition that failed is predicted to hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.conductor.core.answers import beginning
from services.conductor.core.policy import Policy
from services.conductor.core.worker import DOUBT, Worker
from shared.messages import Candidate, DecodeCandidate, PlaceRequest, Rejection, RejectionCode

_SHORTEST_S, _LONGEST_S = 0.2, 60.0
"""Bounds of ``retry_after_s``: less would be a loop, more would outlive the prediction."""


class Reasons:
    """The rejections of one request."""

    def __init__(self, ask: PlaceRequest, policy: Policy, now: float, *,
                 decode: Sequence[DecodeCandidate] = ()) -> None:
        """They show ``decode``, the candidates where those are known."""
        self._ask, self._policy, self._now, self._decode = ask, policy, now, decode

    def no_worker(self, *, prefill: int, decode: int, excluded: int, retry_after_s: float) -> Rejection:
        """Nobody serves this model, or nobody who is left may."""
        missing = " and ".join(role for role, count in (("prefill", prefill), ("decode", decode)) if not count)
        why = f"; {excluded} excluded by the request" if excluded else ""
        return self._rejection("no_worker", f"no {missing} worker for model {self._ask.model} is available{why}",
                               retry_after_s, [])

    def queues_full(self, queue_s: float, max_queue_s: float, candidates: list[Candidate]) -> Rejection:
        """Every prefill queue is over its bound."""
        return self._rejection(
            "capacity", f"the shortest prefill queue is {queue_s:.1f} s long, the bound is {max_queue_s:.1f} s",
            queue_s - max_queue_s, candidates)

    def no_room(self, decoders: Sequence[Worker], max_queue_s: float, candidates: list[Candidate], *,
                spare_s: float = 0.0) -> Rejection:
        """No decode worker has room for the request's KV, or a place in its batch soon enough. It can wait for that
        ``spare_s`` and still be in time."""
        ask = self._ask
        needed = decoders[0].needed_blocks(ask.num_tokens, ask.max_tokens, ask.tenant, beginning(ask.keys))
        free = max(worker.free_blocks() for worker in decoders)
        if needed > free:
            message = (f"the request needs {needed} blocks of decode memory, "
                       f"the emptiest of {len(decoders)} workers has {free}")
            wait_s = min(worker.next_free_s(self._now) for worker in decoders)
            if needed > max(worker.hello.capacity_blocks for worker in decoders):
                spare_s = 0.0
        else:
            wait_s = min(worker.slot_wait_s(self._now) for worker in decoders)
            message = f"a place in a decode batch would be free in {wait_s:.1f} s, the bound is {max_queue_s:.1f} s"
            wait_s -= max_queue_s
        return self._rejection("capacity", message, wait_s, candidates, spare_s=spare_s)

    def ttft(self, ttft_s: float, queue_s: float, candidates: list[Candidate], *, doubt: float = DOUBT) -> Rejection:
        """The first token would come ``ttft_s`` seconds from now, ``queue_s`` of them in a queue that by the rule which
        turned it away may be longer by the share ``doubt``: too late."""
        asked_s, waited_s = self._policy.ttft_asked_s(self._ask) or 0.0, self._ask.waited_s
        alone_s, after_s = ttft_s - queue_s, waited_s + ttft_s
        parts = f" ({_said(waited_s)} waited already, {_said(ttft_s)} from now)" if waited_s else ""
        message = f"the first token is predicted after {_said(after_s)}{parts}, asked are {_said(asked_s)}"
        retry_after_s = ttft_s - asked_s  # by whoever asks again nothing has been waited
        if alone_s > asked_s:
            message = f"{message}; without a queue it would be {_said(alone_s)}"
            retry_after_s = queue_s
        elif doubt and after_s <= asked_s:
            message = f"{message}, and the queue of {_said(queue_s)} may be {doubt:.0%} longer than predicted"
        late_s = max(after_s + doubt * queue_s - asked_s, 0.0)
        return self._rejection("ttft", message, retry_after_s, candidates, late_s=late_s)

    def tbt(self, tbt_s: float, slo_s: float, worker: Worker, candidates: list[Candidate], *,
            spare_s: float = 0.0, what: str = "the time between tokens is predicted as") -> Rejection:
        """Tokens would come too slowly; ``spare_s`` as in :meth:`no_room`. ``what`` says what ``tbt_s`` is."""
        return self._rejection(
            "tbt", f"{what} {_said(tbt_s)}, asked are {_said(slo_s)}",
            worker.next_free_s(self._now), candidates, spare_s=spare_s if worker.batch() else 0.0)

    def _rejection(self, code: RejectionCode, message: str, retry_after_s: float,
                   candidates: list[Candidate], *, spare_s: float = 0.0, late_s: float = 0.0) -> Rejection:
        retry_after_s = min(max(retry_after_s, _SHORTEST_S), _LONGEST_S)
        waits = retry_after_s <= spare_s
        return Rejection(request=self._ask.request, code=code, message=message, candidates=candidates,
                         retry_after_s=retry_after_s, wait_s=retry_after_s if waits else 0.0,
                         spare_s=spare_s if waits else 0.0, late_s=late_s, decode_candidates=list(self._decode))


def _said(duration_s: float) -> str:
    """With the digits that tell a bound from its prediction, however short both are: ``12.5 ms``, ``3.20 s``."""
    return f"{duration_s:.2f} s" if duration_s >= 0.9995 else f"{duration_s * 1e3:.3g} ms"
