"""Chooses tokens. A choice depends on the logits, the request's values and the position, on nothing else.

So a request gives the same answer alone or in any batch, and goes on identically when another worker takes it over.
Chance is counter-based: the one uniform number a token needs is Philox of (seed, position), and the token is found
by inverting the cumulative distribution over the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shared.messages import Sampling

_LIKELY = 256
"""Candidates tried first for ``top_p``; sorting a whole vocabulary costs milliseconds a token."""


def sample(logits: torch.Tensor, params: Sequence[Sampling], positions: Sequence[int],
           generated: Sequence[int]) -> list[int]:
    """One token a row of ``logits`` (float32 [rows, vocab] on the CPU, left as it is).

    ``positions`` are the tokens' absolute positions (prompt included), which chance is drawn by; ``generated`` is
    how many tokens each answer has so far, which ``min_tokens`` counts.
    """
    rows = zip(logits, params, positions, generated, strict=True)
    allowed = [_without_stops(row, values) if count < values.min_tokens else row for row, values, _, count in rows]
    return [
        int(row.argmax()) if values.temperature <= 0 else _draw(row, values, position)
        for row, values, position in zip(allowed, params, positions, strict=True)
    ]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to ``position`` under ``seed`` (any integer), on every machine."""
    key = np.array([seed & (2**64 - 1), position], dtype=np.uint64)
    # Raw bits, since numpy promises those of a bit generator for ever, but not what is made of them. 53 of them,
    # since a double holds no more: all 64 could round up to 1.
    return (int(np.random.Philox(key=key).random_raw()) >> 11) / 2**53


def _without_stops(row: torch.Tensor, values: Sampling) -> torch.Tensor:
    stops = [token for token in values.stop_token_ids if 0 <= token < row.shape[0]]
    if not stops:
        return row
    row = row.clone()
    row[stops] = float("-inf")
    return row


def _draw(row: torch.Tensor, values: Sampling, position: int) -> int:
    weights, ids = _candidates(row, values)
    cumulative = torch.cumsum(weights, 0)
    point = uniform(values.seed, position) * cumulative[-1]
    chosen = int(torch.searchsorted(cumulative, point, right=True))
    return int(ids[min(chosen, len(ids) - 1)])


def _candidates(row: torch.Tensor, values: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Unnormalised probabilities (float64) and ids of what ``top_k``, and then ``top_p`` of the rest, leave over."""
    vocab = row.shape[0]
    weights = row.double() / values.temperature
    weights = (weights - weights.max()).exp_()
    if 0 < values.top_k < vocab:
        top, ids = torch.topk(weights, values.top_k)
        total = float(top.sum())
    elif values.top_p < 1:
        total = float(weights.sum())
        top, ids = torch.topk(weights, min(_LIKELY, vocab))
        if float(top.sum()) < values.top_p * total:
            top, ids = torch.sort(weights, descending=True)
    else:
        return weights, torch.arange(vocab)
    if values.top_p < 1:
        # The token that crosses top_p stays in, so at least one does.
        kept = int((torch.cumsum(top, 0) < values.top_p * total).sum()) + 1
        top, ids = top[:kept], ids[:kept]
    return top, ids
