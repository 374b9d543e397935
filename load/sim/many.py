"""Many runs: policies over traces side by side, and the highest rate that still meets the bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from load.sim.experiment import Result, RunOptions, simulate
from load.workload.traces import Trace
from shared.errors import UserError

GOOD_SHARE = 0.95
"""At the knee so many of all requests are inside both bounds."""

Tell = Callable[[str], None]
"""Takes what is being run, for a person."""


@dataclass(frozen=True)
class Knee:
    """The highest rate found."""

    rate_scale: float
    result: Result
    """The run at that rate."""
    tried: list[tuple[float, bool]]
    """Each rate tried, and whether it was good enough."""


def find_knee(trace: Trace, options: RunOptions, *, low: float = 0.25, high: float = 8.0, precision: float = 0.02,
              good_share: float = GOOD_SHARE, tell: Tell = lambda text: None) -> Knee:
    """Bisection over the rate, geometric, until the bracket is ``precision`` wide; a hopeless run is stopped early.

    Starts from ``options.rate_scale``, so a good guess saves runs. Raises :class:`UserError` when even ``low`` is too
    fast.
    """
    tried: list[tuple[float, bool]] = []

    def attempt(rate: float) -> Result | None:
        result = simulate(trace, replace(options, rate_scale=rate), give_up_share=1 - good_share)
        is_good = not result.is_given_up and result.summary.slo_share >= good_share
        tried.append((rate, is_good))
        tell(f"{trace.name} {options.policy} at {rate:.3f}x: {'good' if is_good else 'too fast'}")
        return result if is_good else None

    best: Result | None = None
    good, bad, rate, step = low, high, min(max(options.rate_scale, low), high), 1.5
    while bad / good > 1 + precision:
        result = attempt(rate)
        if result is not None:
            good, best = rate, result
            if bad >= high and rate >= high:
                break
            rate = min(rate * step, high) if bad == high else (good * bad) ** 0.5
        else:
            if rate <= low:
                raise UserError(f"{trace.name}: not even {low:g}x the trace's rate leaves {good_share:.0%} of the "
                                "requests inside both bounds; give more nodes or wider bounds")
            bad = rate
            rate = max(rate / step, low) if best is None else (good * bad) ** 0.5
    if best is None:
        best = attempt(good)
        if best is None:
            raise UserError(f"{trace.name}: not even {low:g}x the trace's rate leaves {good_share:.0%} of the requests "
                            "inside both bounds; give more nodes or wider bounds")
    return Knee(good, best, tried)
