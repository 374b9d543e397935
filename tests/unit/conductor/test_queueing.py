"""Decisions that know in which order a worker computes. A prompt of n tokens takes (10 + n) ms."""

from __future__ import annotations

from typing import Any

import pytest

from services.conductor.core.machine import Conductor
from services.conductor.core.worker import BEHIND_S, Worker
from shared.ids import WorkerId
from shared.messages import Placement, Profile, Rejection
from shared.order import FCFS, SRPT, Order
from tests.support.playbook import Playbook, after
from tests.unit.conductor.builders import (
    BLOCK_TOKENS,
    answer,
    ask,
    chain,
    conductor,
    hello,
    load,
    progress,
    stage,
    stored,
)

ORDER = Order(stretch=10.0, most_s=40.0)


def one_and_one(order: Order = ORDER, **policy: Any) -> Playbook:
    return stage(hello("p1"), hello("d1", "decode", max_running=50), order=order, **policy)


def place(play: Playbook, request: str, tokens: int, **fields: Any) -> Placement:
    placement = answer(play, ask(request, [], tokens=tokens, **fields))
    assert isinstance(placement, Placement)
    return placement


def worker(play: Playbook, name: str = "p1") -> Worker:
    assert isinstance(play.machine, Conductor)
    return play.machine._cluster.workers[WorkerId(name)]


def started(play: Playbook, request: str, tokens: int) -> None:
    play >> progress(request, "p1", "prefill_started", num_tokens=tokens)


def prefilled(play: Playbook, request: str, tokens: int) -> None:
    play >> progress(request, "p1", "prefilled", num_tokens=tokens)


def test_a_prompt_waits_for_those_that_go_first_and_delays_the_others() -> None:
    play = one_and_one()
    place(play, "long", 3990)
    place(play, "longer", 4990)
    short = place(play, "short", 190)
    assert short.predicted_queue_s == 0.0 and short.predicted_prefill_s == pytest.approx(0.2)
    assert short.candidates[0].delays_s == pytest.approx(2 * 0.2)
    middle = place(play, "middle", 990)
    assert middle.predicted_queue_s == pytest.approx(0.2)
    assert middle.candidates[0].delays_s == pytest.approx(2 * 1.0)
    assert place(play, "last", 5990).predicted_queue_s == pytest.approx(0.2 + 1.0 + 4.0 + 5.0)


def test_a_head_start_counts_as_having_waited_here_and_on_replicas() -> None:
    play, other = one_and_one(), one_and_one(machine=conductor("c2", order=ORDER))
    for request, tokens, head_start_s in (("long", 1990, 0.0), ("longer", 3990, 0.0), ("low", 490, -20.0)):
        play >> ask(request, [], tokens=tokens, head_start_s=head_start_s)
        other >> play.take()[1].message
    for one in (play, other):
        assert [job.request for job in worker(one).ranked()] == ["long", "low", "longer"], "0.5 s count as 25"
        assert place(one, "usual", 1990).predicted_queue_s == pytest.approx(2.0), "20 s are more than 20: after long"
    assert place(play, "high", 3990, head_start_s=30.0).predicted_queue_s == 0.0


def test_first_come_first_served_is_the_sum_of_all() -> None:
    play = one_and_one(FCFS)
    place(play, "long", 3990)
    place(play, "longer", 4990)
    short = place(play, "short", 190)
    assert short.predicted_queue_s == pytest.approx(9.0) and short.candidates[0].delays_s == 0.0


def test_nobody_waits_for_who_comes_too_much_later() -> None:
    play = one_and_one()
    place(play, "first", 9990)
    for _ in range(20):  # the worker computes others all the time, and says so
        play >> after(2.0) >> load("p1", queued=1, queued_tokens=9990)
        play >> load("d1", role="decode")
        play.take()
    assert place(play, "late", 190).predicted_queue_s == pytest.approx(10.01, rel=0.01), "its rank is 40 + 2"


def test_a_worker_where_fewer_are_delayed_is_better() -> None:
    play = stage(hello("p1"), hello("p2"), hello("d1", "decode", max_running=50), order=SRPT)
    for request, name in (("a", "p2"), ("b", "p2"), ("c", "p1")):
        place(play, request, 3990, exclude=[WorkerId(name)])
    play >> load("p1", queued=2, queued_tokens=2 * 3990) >> load("p2", queued=1, queued_tokens=3990)
    assert place(play, "short", 190).prefill == "p2"


def test_of_a_transfer_only_what_outlasts_the_queue_is_waited_for() -> None:
    doc = chain("doc", 8)
    link = Profile(prefill_fixed_s=0.01, prefill_per_token_s=1e-3, prefill_per_token2_s=0.0, transfer_fixed_s=0.0,
                   transfer_bytes_per_s=8192 * 8 / 0.2)  # the whole of doc in 0.2 s
    play = stage(hello("p1", profile=link), hello("p2", profile=link), hello("d1", "decode"), order=FCFS)
    play >> stored("p1", 1, doc)
    idle = answer(play, ask("r1", doc, exclude=[WorkerId("p1")]))
    assert idle.sources and idle.predicted_transfer_s == pytest.approx(0.2)
    play >> progress("r1", "p2", "failed")
    place(play, "before", 140, exclude=[WorkerId("p1")])
    busy = answer(play, ask("r2", doc, exclude=[WorkerId("p1")]))
    assert (busy.predicted_queue_s, busy.predicted_transfer_s) == pytest.approx((0.15, 0.05))


def test_a_sibling_waits_for_the_one_that_computes_its_blocks() -> None:
    doc = chain("doc", 8)
    play = one_and_one()
    first = answer(play, ask("r1", doc))
    second = answer(play, ask("r2", doc))
    assert second.predicted_prefill_s < first.predicted_prefill_s / 5
    assert second.ranked_s == pytest.approx(first.predicted_prefill_s), "as long as the other until that is done"
    assert second.predicted_queue_s == pytest.approx(first.predicted_prefill_s)
    assert (first.ranked_s, second.own_blocks) == (0.0, 8)


def test_who_was_put_aside_has_what_it_had_left() -> None:
    play = one_and_one()
    place(play, "long", 3990)
    started(play, "long", 3990)
    play >> after(1.0)
    place(play, "short", 490)
    started(play, "short", 490)
    assert worker(play).queue_s(play.now) == pytest.approx(3.0 + 0.5)
    play >> after(0.4)
    assert worker(play).queue_s(play.now) == pytest.approx(3.0 + 0.1)
    prefilled(play, "short", 490)
    play >> after(1.0)
    assert worker(play).queue_s(play.now) == pytest.approx(2.0)


def test_a_heartbeat_says_how_far_the_one_is_that_runs() -> None:
    play = one_and_one()
    place(play, "long", 3990)
    started(play, "long", 3990)
    play >> after(1.0)
    place(play, "short", 990)
    started(play, "short", 990)
    play >> after(2.5)  # twice as slow as thought: the long one is a quarter done, the short one nine tenths
    play >> load("p1", running=1, queued=1, queued_tokens=2990 + 99)
    assert worker(play).queue_s(play.now) == pytest.approx(3.1, rel=0.02)
    worker(play).check_invariants()


def test_half_of_the_tokens_of_a_long_prompt_are_less_than_half_of_the_work() -> None:
    """With 10 ms + 1 ms · n + 1 µs · n², 4,000 tokens take 20.01 s and the first 2,000 of them 6.01 s."""
    costly = Profile(prefill_fixed_s=0.01, prefill_per_token_s=1e-3, prefill_per_token2_s=1e-6)
    play = stage(hello("p1", profile=costly), hello("d1", "decode", max_running=50), order=ORDER)
    place(play, "long", 4000)
    started(play, "long", 4000)
    play >> after(1.0) >> load("p1", running=1, queued_tokens=2000)
    assert worker(play).queue_s(play.now) == pytest.approx(14.0)
    place(play, "short", 90)
    started(play, "short", 90)  # it takes over: what the long one has left counts as tokens again
    play >> after(0.05) >> load("p1", running=1, queued=1, queued_tokens=2000 + 90)
    assert worker(play).queue_s(play.now) == pytest.approx(14.0 + 0.1081)


def test_a_heartbeat_counts_the_blocks_a_sibling_is_waiting_for() -> None:
    doc = chain("doc", 8)
    play = one_and_one()
    answer(play, ask("r1", doc))
    sibling = answer(play, ask("r2", doc))
    assert sibling.unmade_tokens == sibling.hit_tokens == 512
    started(play, "r1", 544)
    play >> after(0.3)
    play >> load("p1", running=1, queued=1, queued_tokens=544 - 290 + 544)
    assert worker(play).unexplained_tokens == 0
    assert worker(play).queue_s(play.now) == pytest.approx(0.554 - 0.295 + 0.042, abs=0.01)


def test_a_replica_counts_a_decision_as_the_one_that_made_it() -> None:
    doc = chain("doc", 8)
    play, other = one_and_one(), stage(hello("p1"), hello("d1", "decode", max_running=50),
                                       machine=conductor("c2", order=ORDER))
    for request in ("r1", "r2"):
        play >> ask(request, doc, ttft_slo_s=5.0)
        _, announced = play.take()
        other >> announced.message
        other.take()
    assert worker(other).line(0.1, other.now, since_s=other.now) == pytest.approx(
        worker(play).line(0.1, play.now, since_s=play.now))
    assert worker(other).burden.first_spare_s == pytest.approx(worker(play).burden.first_spare_s)
    assert worker(other).burden.waiting[0] == pytest.approx(worker(play).burden.waiting[0])


class TestBounds:
    def test_waiting_is_no_reason_to_turn_away_while_the_bound_is_met(self) -> None:
        play = one_and_one(FCFS)
        for i in range(9):
            place(play, f"r{i}", 990, ttft_slo_s=10.5)
        assert place(play, "last", 990, ttft_slo_s=10.5).predicted_queue_s == pytest.approx(9.0)
        rejection = answer(play, ask("more", [], tokens=990, ttft_slo_s=10.5))
        assert isinstance(rejection, Rejection)
        assert (rejection.code, rejection.retry_after_s) == ("ttft", pytest.approx(11.0 - 10.5))

    def test_who_cannot_wait_is_not_made_to(self) -> None:
        play = one_and_one()
        place(play, "front", 990)
        place(play, "tight", 1990, ttft_slo_s=4.7)  # after 3 s, or 3.05 should its queue take longer than thought
        short = place(play, "short", 190)
        assert short.predicted_queue_s == pytest.approx(3.0), "1.65 s to spare are less than 0.2 s and the margin"
        assert short.lead_s == pytest.approx(20.0 + BEHIND_S), "just behind the tight one"
        assert place(play, "tiny", 90).predicted_queue_s == 0.0, "0.1 s can be waited for"
        assert worker(play).burden.waiting[1][2] == pytest.approx(1.65 - 0.1 * 1.05)

    def test_nor_the_one_that_would_make_way(self) -> None:
        play = one_and_one()
        place(play, "tight", 1990, ttft_slo_s=2.1)
        assert place(play, "r", 190).predicted_queue_s == pytest.approx(2.0)

    def test_who_runs_has_less_to_spare_by_those_that_will_take_over(self) -> None:
        play = one_and_one()
        place(play, "running", 1990, ttft_slo_s=4.0)
        started(play, "running", 1990)
        assert place(play, "first", 190).predicted_queue_s == 0.0, "2 s to spare are enough for 0.2 s and the margin"
        assert worker(play).burden.first_spare_s == pytest.approx(2.0 - 0.2 * 1.05)
        assert place(play, "second", 190).predicted_queue_s == pytest.approx(0.2), "0.29 s are left for others"
        assert place(play, "third", 190).predicted_queue_s == pytest.approx(2.4), "0.08 s are not enough"

    def test_a_worker_where_nobody_is_in_the_way_is_better(self) -> None:
        play = stage(hello("p1"), hello("p2"), hello("d1", "decode", max_running=50), order=ORDER)
        place(play, "tight", 1990, exclude=[WorkerId("p2")], ttft_slo_s=2.1)
        place(play, "long", 4990, exclude=[WorkerId("p1")])
        assert place(play, "r", 190).prefill == "p2"

    def test_who_would_be_late_behind_them_is_turned_away(self) -> None:
        play = one_and_one()
        place(play, "tight", 1990, ttft_slo_s=2.1)
        rejection = answer(play, ask("r", [], tokens=190, ttft_slo_s=2.0))
        assert isinstance(rejection, Rejection) and rejection.code == "ttft"

    def test_who_is_late_anyway_holds_up_nobody(self) -> None:
        play = one_and_one()
        place(play, "tight", 1990, ttft_slo_s=2.1)
        started(play, "tight", 1990)
        play >> load("p1", running=1, queued=1, queued_tokens=9990)  # somebody's that we do not know of
        assert place(play, "r", 190, ttft_slo_s=30.0).predicted_queue_s == 0.0

    def test_a_worker_that_makes_it_is_taken_before_a_cheaper_one_that_does_not(self) -> None:
        doc = chain("doc", 8)
        slow = Profile(prefill_fixed_s=0.01, prefill_per_token_s=1e-3, prefill_per_token2_s=0.0,
                       transfer_bytes_per_s=1e3)
        play = stage(hello("p1", profile=slow), hello("p2", profile=slow), hello("d1", "decode"), order=SRPT)
        play >> stored("p1", 1, doc)
        for i in range(20):  # what it delays there costs more than computing all of it elsewhere
            place(play, f"r{i}", 990, exclude=[WorkerId("p2")])
        tokens = 8 * BLOCK_TOKENS + 32
        assert answer(play, ask("any", doc, tokens=tokens)).prefill == "p2"
        assert answer(play, ask("quick", doc, tokens=tokens, ttft_slo_s=0.3)).prefill == "p1"
