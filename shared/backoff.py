"""The one retry schedule: exponential, capped, jittered; a pure function."""

from __future__ import annotations

import random


def delay_s(attempt: int, *, first_s: float = 0.05, limit_s: float = 2.0, chance: random.Random) -> float:
    """Seconds to wait before retry number ``attempt`` (from 0).

    Doubles from ``first_s`` up to ``limit_s`` and takes a random half off, so that a thousand clients of a server
    that just came back do not arrive together.
    """
    full_s = min(limit_s, first_s * 2.0 ** min(attempt, 60))
    return full_s * (0.5 + 0.5 * chance.random())
