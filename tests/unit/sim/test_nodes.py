"""What nodes take, against hand-computed cases; see ``builders`` for the round numbers."""

from __future__ import annotations

from typing import Any

import pytest

from load.sim.decode import Steps
from load.sim.outcome import Objective
from load.sim.request import Job
from shared.messages import PlaceRequest
from shared.order import FCFS, SRPT, Order, aged
from tests.unit.sim.builders import PROFILE, job, quick, run


def test_a_prefill_alone_takes_its_computing_and_its_push_overlaps() -> None:
    only = job(0, 5.0, 200)
    run([only], profile=quick())
    assert only.started_s == 5.0 and only.computed_s == pytest.approx(0.2)
    assert only.first_s == pytest.approx(5.2, abs=1e-4)


def test_a_slow_link_shows_in_the_first_token_and_not_in_the_prefill() -> None:
    only = job(0, 0.0, 200)  # 12,800 bytes at 1000 B/s: the push needs 12.8 s, whatever is computed meanwhile
    run([only], profile=quick(nic_gbps=8e-6))
    assert only.computed_s == pytest.approx(0.2)
    assert only.first_s == pytest.approx(12.8)


def test_prefills_take_quadratic_time_and_reuse_costs_what_the_profile_says() -> None:
    profile = quick(prefill_fixed_s=0.5, prefill_per_token2_s=1e-6, reuse_fixed_s=0.1, reuse_per_token_s=1e-3)
    first, again = job(0, 0.0, 200, prompt="same"), job(1, 100.0, 200, prompt="same")
    run([first, again], profile=profile)
    assert first.computed_s == pytest.approx(0.5 + 0.2 + 0.04)
    # 19 of 20 blocks are reused, the last token is always computed: 190 tokens
    assert again.hit_tokens == 190
    assert again.computed_s == pytest.approx(0.5 + 0.1 + 0.19 + 0.01 + 1e-6 * (200 ** 2 - 190 ** 2))


def test_a_burst_of_equal_prompts_is_computed_once() -> None:
    jobs = [job(i, 0.0, 200, prompt="same") for i in range(3)]
    run(jobs, profile=quick())
    assert [one.hit_tokens for one in jobs] == [0, 190, 190]


def test_a_prefix_is_pulled_from_where_it_is() -> None:
    # 1 MB/s: 99 blocks of 640 bytes in 63 ms, computing them 1 s
    profile = quick(nic_gbps=8e-3, dram_tokens=9000, vram_bytes=640e3)
    warm = job(0, 0.0, 1000, prompt="long")
    longer, pulled = job(1, 10.0, 2000, prompt="long"), job(2, 10.0, 1000, prompt="long")
    run([warm, longer, pulled], profile=profile, prefill=2, policy="mooncake_a1")
    placements = [one.placement.prefill for one in (warm, longer, pulled) if one.placement]
    assert placements[0] == placements[1] != placements[2]
    assert pulled.fetched_bytes == 99 * 640 and pulled.hit_tokens == 990
    assert pulled.fetch_s == pytest.approx(99 * 640 / 1e6, rel=1e-3)


def test_evicted_blocks_come_back_from_the_ssd_when_that_is_quicker() -> None:
    first, other, again = job(0, 0.0, 500, prompt="a"), job(1, 10.0, 800, prompt="b"), job(2, 20.0, 500, prompt="a")
    run([first, other, again], profile=quick(dram_tokens=800), ssd_tokens=1000)
    assert again.hit_tokens == 490
    without = job(2, 20.0, 500, prompt="a")
    run([job(0, 0.0, 500, prompt="a"), job(1, 10.0, 800, prompt="b"), without], profile=quick(dram_tokens=800))
    assert without.hit_tokens == 0


def test_first_come_first_served_lets_a_long_prompt_block() -> None:
    long, short = job(0, 0.0, 900), job(1, 0.1, 50)
    run([long, short], profile=quick(), order=FCFS)
    assert long.prefilled_s == pytest.approx(0.9) and short.prefilled_s == pytest.approx(0.95)


def test_the_shortest_remaining_takes_over_at_the_next_chunk_boundary() -> None:
    long, short = job(0, 0.0, 900), job(1, 0.15, 50)
    run([long, short], profile=quick(), order=SRPT)
    assert short.started_s == pytest.approx(0.2)  # chunks of 100 tokens end every 0.1 s
    assert short.prefilled_s == pytest.approx(0.25) and long.prefilled_s == pytest.approx(0.95)
    assert long.computed_s == pytest.approx(0.9)


def test_a_prompt_nearly_done_is_not_interrupted() -> None:
    long, short = job(0, 0.0, 900), job(1, 0.85, 110)
    run([long, short], profile=quick(), order=SRPT)
    assert long.prefilled_s == pytest.approx(0.9)


def test_waiting_counts_against_shortness() -> None:
    def order(aging: float) -> list[int]:
        jobs = [job(0, 0.0, 500), job(1, 0.01, 300), job(2, 0.4, 200)]
        run(jobs, profile=quick(), order=aged(aging))
        return sorted(range(3), key=lambda i: jobs[i].prefilled_s)

    assert order(0.0) == [1, 2, 0]
    assert order(20.0) == [0, 1, 2]


def test_nobody_waits_for_who_comes_too_much_later() -> None:
    def run_in(order: Order) -> Job:
        jobs = [job(0, 0.0, 400), *(job(1 + i, 0.05 + 0.1 * i, 100) for i in range(20))]
        run(jobs, profile=quick(), order=order)
        return jobs[0]

    # short prompts keep coming as fast as they are computed: the long one starves
    assert run_in(SRPT).prefilled_s == pytest.approx(2.4)
    # after a chunk those go first that need 0.1 s and come within 0.6 - 2 * 0.1 s, which are four
    bounded = run_in(Order(stretch=2.0, most_s=0.6))
    assert bounded.prefilled_s == pytest.approx(0.8)


def test_a_batch_steps_as_long_as_its_requests_and_context_say() -> None:
    alone = job(0, 0.0, 100, output=11)
    run([alone], profile=quick(decode_per_context_token_s=1e-4))
    # 10 steps of 0.02 + 0.01 + 0.01, each 1e-4 longer than the one before
    assert alone.finished_s - alone.joined_s == pytest.approx(10 * 0.04 + 1e-4 * 45)
    assert alone.gap_s == pytest.approx(0.04 + 1e-4 * 9)


def test_a_second_request_joins_at_the_step_boundary_and_slows_the_first() -> None:
    first, second = job(0, 0.0, 10, output=101), job(1, 1.0, 10, output=3)
    run([first, second], profile=quick())
    # steps of 0.03 from 0.01 on: the second's KV is there at 1.01, in the step that ends at 0.01 + 34 * 0.03
    assert second.joined_s == pytest.approx(1.03)
    assert second.finished_s == pytest.approx(1.03 + 2 * 0.04)
    assert first.finished_s == pytest.approx(0.01 + 98 * 0.03 + 2 * 0.04)
    assert second.gap_s == pytest.approx(1.03 - 1.01 + 0.04)


def test_who_finds_no_room_waits_for_it() -> None:
    first, second = job(0, 0.0, 500, output=101), job(1, 0.0, 500, output=101)
    run([first, second], profile=quick(), prefill=2)  # room for 1000 tokens
    assert min(first.finished_s, second.finished_s) == pytest.approx(max(first.joined_s, second.joined_s))


def test_steps_forget_and_still_know_the_rest() -> None:
    steps = Steps()
    for _ in range(30):
        steps.add(1.0, 0.001, 1000)
    assert steps.is_long
    steps.forget(29_000)
    steps.add(5.0, 0.0, 10)
    assert steps.worst_s(29_990, 30_010) == pytest.approx(5.0)
    assert steps.worst_s(29_000, 29_010, waited_s=7.0) == pytest.approx(8.0)


def test_decode_turns_away_what_its_own_look_finds_too_slow_and_the_prefill_is_wasted() -> None:
    jobs = [job(i, 0.0, 100, output=50) for i in range(4)]
    cluster = run(jobs, profile=quick(), objective=Objective(ttft_s=100.0, tbt_s=0.045), admission="baseline",
                  asks_slo=True, rechecks=True)
    # a batch of 3 would step in 0.05 s
    assert cluster.outcomes.rejected == {"decode": 2} and cluster.outcomes.completed == 2
    assert cluster.outcomes.wasted_s == pytest.approx(0.2)


def test_a_request_beyond_its_bound_is_turned_away_before_it_costs_anything() -> None:
    jobs = [job(i, 0.0, 500) for i in range(4)]
    cluster = run(jobs, profile=quick(), objective=Objective(ttft_s=1.2, tbt_s=1.0), admission="slo", asks_slo=True)
    assert cluster.outcomes.rejected == {"ttft": 2}
    assert cluster.busy_s == pytest.approx(1.0)


@pytest.mark.parametrize(("bound_s", "completed"), [(8.0, 3), (2.0, 1)])
def test_a_request_waits_for_room_in_decode_while_it_would_be_in_time(bound_s: float, completed: int) -> None:
    jobs = [job(0, 0.0, 100, output=100), job(1, 0.3, 900, output=50), job(2, 0.5, 900, output=20)]
    cluster = run(jobs, profile=quick(), objective=Objective(ttft_s=bound_s, tbt_s=1.0), policy="moonbus",
                  admission="slo", asks_slo=True)
    assert cluster.outcomes.completed == completed and cluster.outcomes.rejected["capacity"] == 3 - completed
    assert all(one.first_s - one.at_s <= bound_s for one in jobs if one.first_s >= 0)
    assert all((one.waits > 1) == (completed == 3) for one in jobs[1:])


def test_the_simulated_gateway_too_sends_what_is_left_of_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PlaceRequest] = []

    def ask(**fields: Any) -> PlaceRequest:
        asked.append(PlaceRequest(**fields))
        return asked[-1]

    monkeypatch.setattr("load.sim.cluster.PlaceRequest", ask)
    run([job(0, 0.0, 100, output=100), job(1, 0.3, 900, output=50)], profile=quick(), policy="moonbus",
        objective=Objective(ttft_s=8.0, tbt_s=1.0), admission="slo", asks_slo=True)
    _, first, *again = asked
    assert (first.ttft_slo_s, first.waited_s) == (8.0, 0.0) and again
    assert all(one.waited_s > 0.0 and one.ttft_slo_s == 8.0 - one.waited_s for one in again)


def test_the_profile_knows_its_own_inverse() -> None:
    profile = quick(prefill_per_token2_s=1e-6)
    assert profile.tokens_by(100, profile.compute_s(100, 900)) == pytest.approx(900)
    assert PROFILE.tokens_by(100, PROFILE.compute_s(100, 900)) == pytest.approx(900)
    assert PROFILE.kv_bytes == 64 and PROFILE.vram_tokens == 1000
