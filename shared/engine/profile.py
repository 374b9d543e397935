"""What this model costs on this machine, measured at start, so that the conductor begins with sane numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from shared.engine.batch import Row
from shared.engine.runtime import Engine
from shared.messages import Profile

_SHORT, _LONG = 16, 64
"""Tokens of the two prefill passes that a line is laid through."""
_CONTEXT = 1024
"""Tokens of context that attention's own cost is measured over."""
_BATCH = 4
_LEAST_S = 1e-9
"""No cost is zero or negative, whatever a noisy machine measures."""


def measure(engine: Engine) -> Profile:
    """Runs a few short passes, well under a second for a small model; call it before the pool holds anything.

    Contexts are simulated: what the slots hold does not change how long attending to them takes. What a worker
    can't know about itself (transfers) keeps its default.
    """
    spec, slots = engine.spec, engine.pool.num_blocks
    context = min(_CONTEXT, spec.max_context - _LONG - 1)
    long = min(_LONG, spec.max_context - 1)

    def row(new: int, start: int) -> Row:
        needed = -(-(start + new) // spec.block_tokens)
        return Row(np.zeros(new, np.uint32), start, [i % slots for i in range(needed)])

    def seconds(rows: Sequence[Row]) -> float:
        began_s = time.perf_counter()
        engine.forward(rows)
        return time.perf_counter() - began_s

    seconds([row(1, 0)])  # the first pass sizes buffers and picks kernels
    short_s = min(seconds([row(_SHORT, 0)]) for _ in range(2))
    long_s = seconds([row(long, 0)])
    deep_s = seconds([row(long, context)])
    one_s = min(seconds([row(1, 0)]) for _ in range(2))
    batch_s = seconds([row(1, 0)] * _BATCH)
    far_s = seconds([row(1, context)])

    per_token_s = max((long_s - short_s) / (long - _SHORT), _LEAST_S)
    per_request_s = max((batch_s - one_s) / (_BATCH - 1), _LEAST_S)
    return Profile(
        prefill_fixed_s=max(short_s - _SHORT * per_token_s, _LEAST_S),
        prefill_per_token_s=per_token_s,
        # Over a context c, n new tokens see n² + 2nc (token, token) pairs more than none at all.
        prefill_per_token2_s=max((deep_s - long_s) / (2 * long * context), _LEAST_S),
        decode_fixed_s=max(one_s - per_request_s, _LEAST_S),
        decode_per_request_s=per_request_s,
        decode_per_context_token_s=max((far_s - one_s) / context, _LEAST_S),
    )
