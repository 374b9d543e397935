"""Choosing tokens: what they depend on, and how often each comes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from shared.engine.sampler import sample, uniform
from shared.messages import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def draws(logits: torch.Tensor, values: Sampling, count: int = 4000) -> Counter[int]:
    """How often each token comes over ``count`` positions."""
    return Counter(sample(logits.expand(count, -1), [values] * count, range(count), [0] * count))


def test_uniform_has_golden_values() -> None:
    # Two machines must agree on these for an answer to go on identically elsewhere.
    assert [uniform(0, 0), uniform(7, 3), uniform(-1, 2**40)] == [
        0.011546754286331562, 0.4821286018761155, 0.8277035787776519]
    values = [uniform(5, position) for position in range(2000)]
    assert all(0 <= value < 1 for value in values)
    assert abs(np.mean(values) - 0.5) < 0.02


def test_temperature_zero_is_greedy_and_ties_go_to_the_smaller_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, 0.0]])
    assert sample(logits, [Sampling(max_tokens=1)] * 2, [4, 5], [0, 0]) == [1, 0]


def test_a_choice_depends_on_nothing_but_its_own_row() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 500, generator=generator)
    params = [Sampling(max_tokens=9, **values) for values in (
        {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {}, {"temperature": 1.3, "seed": 3},
        {"temperature": 1.0, "top_k": 7, "seed": -4}, {"temperature": 0.8, "top_p": 0.9, "seed": 4},
        {"temperature": 5.0, "seed": 2**63},
    )]
    positions = [10, 11, 10, 500, 10, 3]
    together = sample(logits, params, positions, [0] * 6)
    alone = [sample(logits[i:i + 1], [params[i]], [positions[i]], [0])[0] for i in range(6)]
    backwards = sample(logits.flip(0), params[::-1], positions[::-1], [0] * 6)[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_softmax_says(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0) * 4000
    seen = draws(LOGITS, Sampling(max_tokens=1, temperature=temperature, seed=11))
    chi_square = sum((seen[token] - float(mean)) ** 2 / float(mean) for token, mean in enumerate(expected))
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001; the draws are seeded, so this never flickers


def test_top_k_and_top_p_cut_the_tail() -> None:
    probabilities = LOGITS.softmax(0)
    assert set(draws(LOGITS, Sampling(max_tokens=1, temperature=1.0, top_k=2))) == {0, 1}
    # 0 and 1 together are just short of this much, so the token that crosses it stays
    crossing = float(probabilities[:2].sum()) + 0.01
    assert set(draws(LOGITS, Sampling(max_tokens=1, temperature=1.0, top_p=crossing))) == {0, 1, 2}
    assert set(draws(LOGITS, Sampling(max_tokens=1, temperature=1.0, top_p=1e-9))) == {0}
    # top_p counts within what top_k left over: 0 alone is 0.73 of {0, 1}
    assert set(draws(LOGITS, Sampling(max_tokens=1, temperature=1.0, top_k=2, top_p=0.7))) == {0}


def test_top_p_over_a_flat_vocabulary_looks_beyond_the_likely_few() -> None:
    seen = draws(torch.zeros(2000), Sampling(max_tokens=1, temperature=1.0, top_p=0.5), count=3000)
    assert 600 < len(seen) <= 1000


def test_stop_tokens_wait_for_min_tokens() -> None:
    values = Sampling(max_tokens=9, stop_token_ids=[0, 77], min_tokens=3)
    logits = LOGITS.clone()
    assert sample(logits.expand(2, -1), [values] * 2, [20, 21], [2, 3]) == [1, 0]
    assert torch.equal(logits, LOGITS)
