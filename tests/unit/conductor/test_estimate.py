"""Costs: start from the profile, follow what is seen, are not fooled."""

from __future__ import annotations

import math
import random

import pytest

from services.conductor.core.estimate import Costs, Fit
from shared.messages import Profile

PROFILE = Profile(prefill_fixed_s=0.02, prefill_per_token_s=1e-3, prefill_per_token2_s=1e-8)


def truth(num_tokens: int, hit_tokens: int, *, slower: float = 1.0) -> float:
    return slower * (0.02 + 1e-3 * (num_tokens - hit_tokens) + 1e-8 * (num_tokens**2 - hit_tokens**2))


def test_before_any_observation_the_profile_counts() -> None:
    assert Costs(PROFILE).prefill_s(num_tokens=1000, hit_tokens=400) == pytest.approx(truth(1000, 400))
    assert Costs(PROFILE).errors() == {}


def test_a_worker_that_turns_twice_as_slow_is_recognised_within_20_requests() -> None:
    rng, costs = random.Random(1), Costs(PROFILE)
    for slower in (1.0, 2.0):
        for _ in range(20):
            tokens = rng.randint(100, 8000)
            seconds = truth(tokens, 0, slower=slower) * rng.uniform(0.95, 1.05)
            costs.observe_prefill(seconds, num_tokens=tokens, hit_tokens=0)
    for tokens in (200, 2000, 8000):
        assert costs.prefill_s(num_tokens=tokens, hit_tokens=0) == pytest.approx(truth(tokens, 0, slower=2.0), rel=0.1)
    assert costs.errors()["prefill"] < 0.15


def test_a_wrong_profile_is_learnt_from_random_prompts() -> None:
    rng, costs = random.Random(2), Costs(Profile())
    for _ in range(60):
        tokens = rng.randint(500, 100_000)
        hit = rng.randrange(0, tokens, 64)
        costs.observe_prefill(1.133e-4 * (tokens - hit) + 7.37e-10 * (tokens**2 - hit**2) + 0.005, num_tokens=tokens,
                              hit_tokens=hit)
    for tokens, hit in ((2000, 0), (30_000, 10_000), (90_000, 0)):
        expected = 1.133e-4 * (tokens - hit) + 7.37e-10 * (tokens**2 - hit**2) + 0.005
        assert costs.prefill_s(num_tokens=tokens, hit_tokens=hit) == pytest.approx(expected, rel=0.15)


def test_a_coefficient_that_the_profile_lost_comes_back() -> None:
    rng = random.Random(5)
    costs = Costs(Profile(prefill_fixed_s=0.01, prefill_per_token_s=1e-9, prefill_per_token2_s=3.6e-7))
    for _ in range(40):
        tokens = rng.randint(50, 4000)
        costs.observe_prefill(truth(tokens, 0), num_tokens=tokens, hit_tokens=0)
    for tokens in (200, 1000, 4000):
        assert costs.prefill_s(num_tokens=tokens, hit_tokens=0) == pytest.approx(truth(tokens, 0), rel=0.2)


def test_single_outliers_do_not_move_the_estimate() -> None:
    rng, costs = random.Random(3), Costs(PROFILE)
    for i in range(30):
        tokens = rng.randint(100, 8000)
        factor = {7: 50.0, 19: 0.01, 28: 30.0}.get(i, 1.0)
        costs.observe_prefill(truth(tokens, 0) * factor, num_tokens=tokens, hit_tokens=0)
    assert costs.prefill_s(num_tokens=3000, hit_tokens=0) == pytest.approx(truth(3000, 0), rel=0.15)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_impossible_observations_are_refused(seconds: float) -> None:
    costs = Costs(PROFILE)
    assert not costs.observe_prefill(seconds, num_tokens=100, hit_tokens=0)
    assert not costs.observe_prefill(1.0, num_tokens=100, hit_tokens=100)
    assert not costs.observe_prefill(1.0, num_tokens=100, hit_tokens=-1)
    assert not costs.observe_step(1.0, batch=0, context_tokens=5)
    assert not costs.observe_transfer(1.0, 0, same_host=True)
    assert costs.prefill_s(num_tokens=1000, hit_tokens=0) == pytest.approx(truth(1000, 0))


def test_impossible_profiles_give_finite_estimates() -> None:
    costs = Costs(Profile(prefill_fixed_s=math.nan, prefill_per_token_s=math.inf, decode_fixed_s=-5.0,
                          transfer_bytes_per_s=0.0))
    assert 0 <= costs.prefill_s(num_tokens=1000, hit_tokens=0) < math.inf
    assert 0 <= costs.step_s(batch=1, context_tokens=0) < math.inf
    assert 0 <= costs.transfer_s(1000, same_host=True) < math.inf


def test_links_of_one_host_and_of_the_network_are_learnt_apart() -> None:
    costs = Costs(PROFILE)
    for nbytes in (10**6, 3 * 10**6, 10**7, 5 * 10**6) * 5:
        costs.observe_transfer(0.001 + nbytes / 5e9, nbytes, same_host=True)
        costs.observe_transfer(0.02 + nbytes / 1e8, nbytes, same_host=False)
    assert costs.transfer_s(4 * 10**6, same_host=True) == pytest.approx(0.001 + 4e6 / 5e9, rel=0.15)
    assert costs.transfer_s(4 * 10**6, same_host=False) == pytest.approx(0.02 + 4e6 / 1e8, rel=0.15)


def test_predictions_never_turn_negative() -> None:
    rng, fit = random.Random(4), Fit((0.1, 1e-3), typical=(1.0, 100.0))
    for _ in range(100):
        fit.observe(rng.uniform(0.001, 10.0), 1.0, rng.uniform(0, 1000))
        assert fit.seconds(1.0, rng.uniform(0, 1e6)) > 0


@pytest.mark.parametrize("seed", range(20))
def test_how_far_a_prefill_is_in_tokens_and_in_seconds(seed: int) -> None:
    rng = random.Random(seed)
    costs = Costs(Profile(prefill_fixed_s=rng.choice((0.0, 0.1)), prefill_per_token_s=rng.choice((0.0, 1e-4)),
                          prefill_per_token2_s=rng.choice((0.0, 1e-9, 1e-7))))
    num_tokens = rng.randint(2, 100_000)
    prompt = {"num_tokens": num_tokens, "hit_tokens": rng.randrange(0, num_tokens)}
    computed = num_tokens - prompt["hit_tokens"]
    assert costs.done_share(0, **prompt) == 0.0 == costs.done_tokens(0.0, **prompt)
    assert costs.done_share(computed, **prompt) == pytest.approx(1.0)
    assert costs.done_tokens(1.0, **prompt) == pytest.approx(computed)
    tokens = rng.uniform(0.01, 1.0) * computed
    share = costs.done_share(tokens, **prompt)
    assert 0.0 < share <= 1.0 and costs.done_tokens(share, **prompt) == pytest.approx(tokens, rel=1e-6)
    left_s = costs.prefill_s(num_tokens=num_tokens, hit_tokens=0) - costs.prefill_s(
        num_tokens=round(prompt["hit_tokens"] + tokens), hit_tokens=0)
    assert (1.0 - share) * costs.prefill_s(**prompt) == pytest.approx(left_s, rel=1e-3, abs=1e-3)


def lengths(rng: random.Random) -> tuple[int, int]:
    """A prompt, as heavy-tailed as real ones, and what of it is cached."""
    tokens = int(min(rng.lognormvariate(9, 1.1), 128_000)) + 64
    return tokens, rng.randrange(0, tokens, 512) if rng.random() < 0.5 else 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("noise", "outliers", "most"), [(0.05, 0.0, 0.06), (0.15, 0.0, 0.16), (0.05, 0.05, 0.2)])
def test_real_lengths_noise_and_outliers_converge(seed: int, noise: float, outliers: float, most: float) -> None:
    rng, costs = random.Random(seed), Costs(Profile(
        prefill_fixed_s=0.08, prefill_per_token_s=2e-3, prefill_per_token2_s=1e-8))
    errors = []
    for i in range(120):
        tokens, hit = lengths(rng)
        seconds = truth(tokens, hit)
        if i >= 40:
            errors.append(abs(costs.prefill_s(num_tokens=tokens, hit_tokens=hit) - seconds) / seconds)
        factor = rng.choice((0.05, 20.0)) if rng.random() < outliers else rng.lognormvariate(0, noise)
        costs.observe_prefill(seconds * factor, num_tokens=tokens, hit_tokens=hit)
    assert sorted(errors)[len(errors) * 8 // 10] < most


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_a_change_of_pace_is_followed_within_ten_observations_and_keeps_the_shape(factor: float) -> None:
    for seed in range(10):
        rng, costs = random.Random(seed), Costs(PROFILE)
        for i in range(40):
            tokens, hit = lengths(rng)
            pace = factor if i >= 30 else 1.0
            costs.observe_prefill(truth(tokens, hit, slower=pace) * rng.uniform(0.95, 1.05), num_tokens=tokens,
                                  hit_tokens=hit)
        for tokens in (500, 8000, 60_000):
            expected = truth(tokens, 0, slower=factor)
            assert costs.prefill_s(num_tokens=tokens, hit_tokens=0) == pytest.approx(expected, rel=0.25)


def test_decode_steps_are_learnt_from_batch_and_context() -> None:
    rng, costs = random.Random(6), Costs(Profile(
        decode_fixed_s=0.05, decode_per_request_s=3e-4, decode_per_context_token_s=1e-7))
    for _ in range(60):
        batch = rng.randint(1, 32)
        context = batch * rng.randint(500, 30_000)
        costs.observe_step((0.026 + 1.45e-4 * batch + 3.46e-8 * context) * rng.uniform(0.97, 1.03), batch=batch,
                           context_tokens=context)
    for batch, context in ((1, 8000), (16, 200_000), (32, 600_000)):
        expected = 0.026 + 1.45e-4 * batch + 3.46e-8 * context
        assert costs.step_s(batch=batch, context_tokens=context) == pytest.approx(expected, rel=0.15)


def test_no_transfer_is_predicted_to_take_less_than_the_better_link() -> None:
    costs = Costs(PROFILE)
    for nbytes in (10**6, 3 * 10**6, 10**7, 5 * 10**6) * 5:
        costs.observe_transfer(0.001 + nbytes / 5e9, nbytes, same_host=True)
        costs.observe_transfer(0.0001 + nbytes / 1e8, nbytes, same_host=False)
    fixed_s, byte_s = costs.better_link
    for same_host in (True, False):
        assert fixed_s + byte_s * 4e6 <= costs.transfer_s(4 * 10**6, same_host=same_host)
