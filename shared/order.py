"""In what order a prefill worker computes its prompts: a number per prompt, the least of which goes first.

The workers order by it, the conductor predicts by it whom a prompt will wait for and whom it will delay, and the
simulator runs both. With ``since`` the moment a prompt was ready to be computed and ``left`` the seconds of computing
it still needs::

    rank = since + min(stretch * left, most)

* ``stretch`` 0 is first come, first served.
* A large ``stretch`` is shortest remaining first: least mean time to first token, and long prompts may starve.
* Between the two a second of waiting outweighs ``1 / stretch`` seconds of computing. All prompts that wait age alike,
  so their order does not change while they do.
* ``most`` bounds how much later somebody may come and still go first: nobody waits for prompts that arrived more
  than ``most`` seconds after it. Prompts so long that they reach the bound are first come, first served among
  themselves.

Where ``is_preemptive``, a prompt with a smaller number takes over at the next chunk boundary. What was computed of the
other one is kept, and what is left of it is less, so its own number has become smaller too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Order:
    """One order."""

    stretch: float = 0.0
    """Seconds of waiting that one of computing stands for."""
    most_s: float = math.inf
    """Longest time for which whoever comes later may go first."""
    is_preemptive: bool = True

    def lead_s(self, left_s: float) -> float:
        """By how much others may come later than a prompt that needs ``left_s``, and still go before it."""
        return min(self.stretch * left_s, self.most_s)

    def rank(self, since_s: float, left_s: float) -> float:
        """The number of a prompt that was ready at ``since_s``."""
        return since_s + self.lead_s(left_s)

    def ranks(self, since_s: float | Seconds, left_s: Seconds) -> Seconds:
        """The numbers of many prompts side by side."""
        ranks: Seconds = since_s + np.minimum(self.stretch * left_s, self.most_s)
        return ranks


FCFS = Order(is_preemptive=False)
"""First come, first served: what every peer does."""

SRPT = Order(stretch=1e9)
"""Shortest remaining prefill first; between equals, the one that came first."""

ORDER = Order(stretch=10.0, most_s=40.0)
"""Of our prefill workers; see the ablation in docs/simulator.md."""


def aged(aging: float) -> Order:
    """Shortest remaining first, a second of waiting worth ``aging`` seconds of computing, without a bound."""
    return Order(stretch=1.0 / aging) if aging > 0 else SRPT
