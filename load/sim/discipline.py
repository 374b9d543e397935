"""In what order a prefill node computes its prompts: a number per prompt that does not change while it waits.

The least number goes first. Where ``is_preemptive``, a prompt with a smaller number takes over at the next chunk
boundary. ``T`` below is the seconds of computing a prompt still needs.

* ``fcfs``: the moment it became ready. What every peer does.
* ``srpt``: ``T``, shortest remaining first: least mean time to first token, and long prompts may starve.
* ``aged``: ``T + aging * ready``: a second of waiting is worth ``aging`` seconds of computing. All waiting prompts age
  alike, so their order does not change. 0 is ``srpt``; a large one is ``fcfs``.
* ``fair``: ``arrived + slack + stretch * whole``: the deadline of a length-fair bound on the time to first token;
  earliest deadline first.
* ``deadline``: as ``aged``, until a prompt must be computed from now on to meet such a deadline. Then it is *urgent*:
  before all that are not, earliest deadline first among those that are. So short prompts gain and long ones keep
  their bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from load.sim.request import Job

_URGENT = 1e9
"""An urgent prompt's lead over those that are not, in seconds."""

Rank = Callable[[Job, float], float]
"""Takes the prompt and the seconds of computing it still needs."""


@dataclass(frozen=True)
class Discipline:
    """One order."""

    name: str
    rank: Rank
    is_preemptive: bool
    deadline_s: Rank | None = None
    """When a prompt's first token is due; it gets urgent so that it can just make it. ``None``: nothing gets urgent."""

    def rank_of(self, job: Job, remaining_s: float) -> float:
        """The number, urgency considered."""
        if job.is_urgent and self.deadline_s is not None:
            return self.deadline_s(job, remaining_s) - _URGENT
        return self.rank(job, remaining_s)

    def urgent_at_s(self, job: Job, remaining_s: float) -> float:
        """When ``job`` gets urgent, if it still waits then."""
        return self.deadline_s(job, remaining_s) - remaining_s if self.deadline_s is not None else math.inf


def fcfs() -> Discipline:
    """First come, first served."""
    return Discipline("fcfs", lambda job, remaining_s: job.ready_s, is_preemptive=False)


def srpt() -> Discipline:
    """Shortest remaining prefill first."""
    return Discipline("srpt", lambda job, remaining_s: remaining_s, is_preemptive=True)


def aged(aging: float) -> Discipline:
    """Shortest remaining first, waiting counted against it."""
    return Discipline("aged", lambda job, remaining_s: remaining_s + aging * job.ready_s, is_preemptive=True)


def fair(*, slack_s: float, stretch: float, whole_s: Callable[[Job], float]) -> Discipline:
    """Earliest deadline first, the deadline growing with the prompt's own uncached prefill."""
    return Discipline("fair", lambda job, remaining_s: job.arrived_s + slack_s + stretch * whole_s(job),
                      is_preemptive=True)


def deadline(aging: float, *, slack_s: float, stretch: float, whole_s: Callable[[Job], float]) -> Discipline:
    """Shortest remaining first, aged, but nobody who can still meet a length-fair deadline waits beyond it."""
    return Discipline("deadline", lambda job, remaining_s: remaining_s + aging * job.ready_s, is_preemptive=True,
                      deadline_s=lambda job, remaining_s: job.arrived_s + slack_s + stretch * whole_s(job))
