"""Policies that need no formula: ``random``, ``round_robin``, ``least_load``, ``longest_prefix``.

They reuse what the chosen worker has itself and pull nothing. ``least_load`` and ``longest_prefix`` stand for the
Mooncake paper's "load balancing" and for routing by longest match as its public router does it.
"""

from __future__ import annotations

from services.conductor.core.policies.base import Choice, PublishedPolicy, View
from services.conductor.core.worker import Worker


class Random(PublishedPolicy):
    """Any worker of each kind."""

    def choose_prefill(self, view: View) -> Choice:
        """Drawn."""
        return view.local(self._rng.choice(view.prefill))

    def choose_decode(self, view: View) -> Worker:
        """Drawn."""
        return self._rng.choice(view.decode)


class RoundRobin(PublishedPolicy):
    """Each worker in turn, in order of id."""

    _turn = -1

    def choose_prefill(self, view: View) -> Choice:
        """The next one."""
        self._turn += 1
        return view.local(_sorted(view.prefill)[self._turn % len(view.prefill)])

    def choose_decode(self, view: View) -> Worker:
        """The next one."""
        return _sorted(view.decode)[self._turn % len(view.decode)]


class LeastLoad(PublishedPolicy):
    """The shortest predicted queue, whatever is cached where; the shortest predicted decode step."""

    def choose_prefill(self, view: View) -> Choice:
        """By queue."""
        return view.local(self._least([(worker.queue_s(view.now), worker) for worker in view.prefill]))


class LongestPrefix(PublishedPolicy):
    """Most blocks cached; among equals the shortest predicted queue."""

    def choose_prefill(self, view: View) -> Choice:
        """By match, then by queue."""
        most = max(view.own(worker) for worker in view.prefill)
        return view.local(self._least([(worker.queue_s(view.now), worker) for worker in view.prefill
                                       if view.own(worker) == most]))


def _sorted(workers: object) -> list[Worker]:
    return sorted(workers, key=lambda worker: worker.id)  # type: ignore[call-overload, no-any-return]
