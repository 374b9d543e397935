"""Coupled instances against hand-computed cases."""

from __future__ import annotations

from typing import Any

import pytest

from load.sim.coupled import CoupledCluster, CoupledOptions
from load.sim.loop import Loop
from load.sim.outcome import Objective, Outcomes
from load.sim.request import Job
from tests.unit.sim.builders import BLOCK_TOKENS, job, quick


def run(jobs: list[Job], **options: Any) -> CoupledCluster:
    profile, loop = quick(), Loop()
    outcomes = Outcomes(Objective(1e9, 1e9), profile, expected=len(jobs))
    cluster = CoupledCluster(loop, CoupledOptions(**{
        "profile": profile, "instances": 1, "block_tokens": BLOCK_TOKENS, **options}), outcomes)
    cluster.offer(jobs)
    loop.run(is_over=lambda: outcomes.ended >= len(jobs))
    assert outcomes.ended == len(jobs)
    return cluster


def test_a_prompt_makes_the_running_answers_stand_still() -> None:
    first, second = job(0, 0.0, 100, output=11), job(1, 0.115, 200)
    run([first, second])
    # the step that runs at 0.115 ends at 0.13; then 0.2 s of prefill; 9 steps of 0.03 are left, the first after it
    assert second.first_s == pytest.approx(0.33)
    assert first.finished_s == pytest.approx(0.1 + 10 * 0.03 + 0.2)
    assert first.gap_s == pytest.approx(0.23)


def test_chunks_share_their_steps_with_the_answers() -> None:
    first, second = job(0, 0.0, 100, output=11), job(1, 0.115, 200)
    run([first, second], chunk_tokens=100)
    # two chunks of 0.1 s, a fifth more for being chunks, each with one token of the first: 0.01 s
    assert second.first_s == pytest.approx(0.12 + 2 * 0.13)
    assert first.gap_s == pytest.approx(0.13)


def test_prefixes_are_reused_only_with_a_cache() -> None:
    for has_cache, hit in ((False, 0), (True, 190)):
        jobs = [job(0, 0.0, 200, prompt="a"), job(1, 5.0, 200, prompt="a")]
        run(jobs, has_prefix_cache=has_cache)
        assert jobs[1].hit_tokens == hit


def test_a_request_goes_where_least_is_to_be_done() -> None:
    jobs = [job(0, 0.0, 500), job(1, 0.0, 100), job(2, 0.0, 100)]
    run(jobs, instances=2)
    assert [one.first_s for one in jobs] == pytest.approx([0.5, 0.1, 0.2])


def test_a_full_instance_makes_prompts_wait() -> None:
    jobs = [job(0, 0.0, 500, output=101), job(1, 0.0, 500, output=2)]
    run(jobs)
    assert jobs[1].started_s == pytest.approx(jobs[0].finished_s)
