"""What a prompt would cost on each prefill worker, all side by side: the part of a decision that grows with workers.

Done by the compiled part where there is one, and with arrays otherwise. Both come to the same numbers,
bit for bit; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.conductor.core import native
from services.conductor.core.board import Column, Mask, PrefillBoard
from services.conductor.core.estimate import Costs
from services.conductor.core.policy import Policy
from services.conductor.core.worker import BEHIND_S, LATE_S, MARGIN_S
from shared.ids import WorkerId

BESIDE = 0.25
"""What a second of a transfer that nobody waits for counts for."""
_ROWS = 10


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be placed, and when."""

    num_tokens: int
    now: float
    since_s: float
    """From when on it counts in queues."""
    own: dict[WorkerId, int]
    """Leading blocks each worker has, or is promised; workers with none may be left out."""
    covered: int
    """Leading blocks that can be pulled."""
    ranked: dict[int, float]
    """{place on the board: seconds of computing by which it is ranked there}, where that is not what it computes."""
    known: Costs | None
    """Costs to take for those whose own are old, where these are less."""


@dataclass(slots=True)
class Survey:
    """The answer, a cell for each worker of the board: without pulls unless it says otherwise; and some sums."""

    own: Column
    """Leading blocks each worker has, or is promised."""
    prefill_s: Column
    """Computing what it has not."""
    ranked_s: Column
    """Seconds of computing by which it is ranked."""
    queue_s: Column
    """What is computed before it."""
    delays_s: Column
    """What it makes others wait longer, all together."""
    yields_s: Column | None
    """How much later it counts as come, lest it make others late; ``None`` where nothing is due."""
    alone_s: Column
    """What it costs: its time to first token, and what others wait longer."""
    rest_s: Column
    """Computing what no sender has. This and the next two are there when there is something to pull."""
    pull_s: Column
    """At least what pulling that much takes."""
    bound_s: Column
    """At least what pulling costs in all; infinite where it does not pay."""
    longest_s: float
    """Of ``queue_s``."""
    least_s: float
    """Of ``alone_s``."""
    held_s: float
    """Time to first token where it would run if everybody held what anybody can send."""


def take_survey(board: PrefillBoard, prompt: Prompt, policy: Policy) -> Survey:
    """``board`` is up to date."""
    if native.WHY_NOT or len(board.workers) == 1:  # arrays add up a single row in another order
        return with_arrays(board, prompt, policy)
    order, known = board.order, prompt.known
    answers = np.empty((_ROWS, len(board.workers)))
    terms = (prompt.now, prompt.since_s, prompt.num_tokens, prompt.covered, board.block_tokens, board.block_bytes,
             order.stretch, order.most_s, MARGIN_S, LATE_S, BEHIND_S, policy.trust_s, policy.regard,
             policy.fetch_gain, BESIDE)
    is_due, longest_s, least_s, held_s = board.fill_survey(
        answers, prompt.own, prompt.ranked, None if known is None else known.prefill, terms)
    own, prefill_s, ranked_s, queue_s, delays_s, yields_s, alone_s, rest_s, pull_s, bound_s = answers
    return Survey(own, prefill_s, ranked_s, queue_s, delays_s, yields_s if is_due else None, alone_s, rest_s, pull_s,
                  bound_s, longest_s, least_s, held_s)


def with_arrays(board: PrefillBoard, prompt: Prompt, policy: Policy) -> Survey:
    """:func:`take_survey` without the compiled part."""
    own, may_pull, num_tokens = _leading(board, prompt.own), prompt.covered > 0, prompt.num_tokens
    hits = np.empty((2, len(own))) if may_pull else own  # alone; with all that can be pulled
    if may_pull:
        hits[0] = own
        np.maximum(own, prompt.covered, out=hits[1])
    hit_tokens = hits * board.block_tokens
    prefill_s = board.prefill_s(num_tokens, hit_tokens)
    if prompt.known is not None:
        is_old: Mask = prompt.now - board.taught_s > policy.trust_s
        known_s = board.prefill_s(num_tokens, hit_tokens, costs=prompt.known)
        prefill_s = np.where(is_old, np.minimum(prefill_s, known_s), prefill_s)
    ranked_s = prefill_s
    if prompt.ranked:
        ranked_s = ranked_s.copy()
        ranked_s[..., list(prompt.ranked)] = list(prompt.ranked.values())
    line = board.line(ranked_s, prompt.now, since_s=prompt.since_s)
    regard, yields_s = policy.regard, line.yields_s
    queue_s, delayed = line.queue_s, line.delayed
    rest_s = pull_s = bound_s = own
    held_s = np.inf
    if may_pull:
        ranked_s, (prefill_s, rest_s) = ranked_s[0], prefill_s
        (queue_s, rest_queue_s), (delayed, rest_delayed) = line.queue_s, line.delayed
        yields_s = yields_s if yields_s is None else yields_s[0]
        pull_s = board.pull_s((hits[1] - own) * board.block_bytes)
        matters_s = rest_s * (1.0 + regard * rest_delayed)
        best = (rest_queue_s + matters_s).argmin()
        held_s = float(rest_queue_s[best] + rest_s[best])
        is_worth = prefill_s - rest_s >= policy.fetch_gain * np.maximum(pull_s - rest_queue_s, BESIDE * pull_s)
        bound_s = np.where(is_worth, np.maximum(rest_queue_s, pull_s) + matters_s, np.inf)
    delays_s = delayed * prefill_s
    alone_s = queue_s + prefill_s + regard * delays_s
    return Survey(own, prefill_s, ranked_s, queue_s, delays_s, yields_s, alone_s, rest_s, pull_s, bound_s,
                  float(np.maximum.reduce(queue_s)), float(np.minimum.reduce(alone_s)), held_s)


def _leading(board: PrefillBoard, blocks: Mapping[WorkerId, int]) -> Column:
    """Leading blocks of each worker of the board, of those given and, for the others, none."""
    leading = np.zeros(len(board.workers))
    found = [(place, count) for worker, count in blocks.items() if (place := board.places.get(worker)) is not None]
    if found:
        at, counts = zip(*found, strict=True)
        leading[list(at)] = counts
    return leading
