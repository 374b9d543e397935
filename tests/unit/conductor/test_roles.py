"""Which elastic workers prefill and which decode: the formula, the line, and that nobody goes to and fro."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.conductor.core.cluster import Cluster, Worker
from services.conductor.core.machine import Conductor
from services.conductor.core.policies.registry import make_policy
from services.conductor.core.policy import Policy
from services.conductor.core.roles import Roles, Rules, in_line
from shared.ids import ConductorId, RequestId, WorkerId
from shared.messages import Hello, Placement, Rejection
from tests.support.playbook import Playbook, after
from tests.unit.conductor.builders import (
    SPEC,
    Names,
    answer,
    ask,
    chain,
    hello,
    load,
    progress,
    stage,
)


def elastic(worker: str, role: Literal["prefill", "decode"]) -> Worker:
    cluster = Cluster(Policy())
    cluster.join(msgspec.structs.replace(hello(worker, role, max_running=64), elastic=True))
    return cluster.workers[WorkerId(worker)]


def fixed(worker: str, role: Literal["prefill", "decode"]) -> Worker:
    cluster = Cluster(Policy())
    cluster.join(hello(worker, role))
    return cluster.workers[WorkerId(worker)]


def fleet(prefill: int, decode: int) -> list[Worker]:
    return [*(elastic(f"p{i}", "prefill") for i in range(prefill)),
            *(elastic(f"d{i}", "decode") for i in range(decode))]


def decodes(worker: Worker, batch: int, context_tokens: int = 0) -> None:
    """It said that it runs so many answers."""
    worker.decode_load = load(worker.id, role="decode", running=batch, context_tokens=context_tokens)
    worker.changed()


def names(workers: list[Worker]) -> list[str]:
    return [worker.id for worker in workers]


class TestNeed:
    def test_prefill_by_what_arrives_and_what_is_queued(self) -> None:
        roles = Roles(tbt_slo_s=None, now=0.0, rules=Rules(utilisation=0.5, horizon_s=10.0))
        for tenth in range(6000):
            roles.asked(0.3, tenth / 10)
        workers = fleet(2, 2)
        workers[0].load = load("p0", queued_tokens=20_000)
        workers[0].unexplained_tokens = 20_000  # 1 ms each, and 10 ms for the prompt
        workers[0].load_s = 600.0
        workers[0].changed()
        need = roles.need(workers, 600.0)
        assert need.prefill_rate == pytest.approx(3.0, rel=0.02)
        assert need.queued_s == pytest.approx(20.01)
        assert need.prefill == pytest.approx(need.prefill_rate / 0.5 + 2.001)

    def test_decode_by_what_answers_take_of_the_steps(self) -> None:
        workers = fleet(1, 2)
        decodes(workers[1], 4, 20_000)  # a step takes 20 + 40 + 20 ms
        decodes(workers[2], 2)          # 20 + 20 ms
        need = Roles(tbt_slo_s=0.2, now=0.0).need(workers, 0.0)
        assert need.step_limit_s == pytest.approx(0.65 * 0.2)
        assert need.decode_rate == pytest.approx(0.75 + 0.5)
        assert need.decode == pytest.approx(1.25 / (1 - 20 / 130))

    def test_decode_by_memory(self) -> None:
        workers = fleet(1, 2)
        decodes(workers[1], 1, 60_000)  # of 64,000 a worker
        need = Roles(tbt_slo_s=100.0, now=0.0).need(workers, 0.0)
        assert need.memory == pytest.approx(60 / 64) and need.decode == pytest.approx(60 / 64 / 0.8)

    def test_without_a_bound_four_lone_steps_are_one_and_short_answers_halve_it(self) -> None:
        workers, roles = fleet(1, 1), Roles(tbt_slo_s=None, now=0.0)
        assert roles.need(workers, 0.0).step_limit_s == pytest.approx(0.65 * 4 * 0.03)
        workers[0].answers.short_share = 0.5
        assert roles.need(workers, 0.0).step_limit_s == pytest.approx(0.12 / 1.96)
        for bound_s in (0.2, *[0.1] * 500):
            roles.bounded(bound_s)
        assert roles.need(workers, 0.0).step_limit_s == pytest.approx(0.1 / 1.998, rel=1e-3)


class TestLine:
    def test_home_first_and_who_can_do_but_one_thing_at_the_ends(self) -> None:
        workers = [*fleet(2, 3), fixed("a-decode", "decode"), fixed("z-prefill", "prefill")]
        assert names(in_line(workers)) == ["z-prefill", "p0", "p1", "d2", "d1", "d0", "a-decode"]

    @settings(max_examples=40)
    @given(kinds=st.lists(st.sampled_from(["p", "d", "P", "D"]), min_size=1, max_size=9), rate=st.floats(0, 30),
           batches=st.lists(st.integers(0, 64), min_size=9, max_size=9), order=st.randoms(use_true_random=False))
    def test_everybody_does_what_it_can_and_both_roles_are_taken(
            self, kinds: list[str], rate: float, batches: list[int], order: random.Random) -> None:
        workers = []
        for i, kind in enumerate(kinds):
            make = elastic if kind.isupper() else fixed
            workers.append(make(f"w{i}", "prefill" if kind in "pP" else "decode"))
            decodes(workers[-1], batches[i], batches[i] * 500)
        splits = []
        for _ in range(2):
            roles = Roles(tbt_slo_s=None, now=0.0)
            for second in range(3):
                roles.asked(rate, float(second))
                roles.look(workers, float(second))
            prefill, decode = roles.split(workers)
            splits.append((names(prefill), names(decode)))
            order.shuffle(workers)
        assert splits[0] == splits[1]
        assert not set(splits[0][0]) & set(splits[0][1])
        assert all(worker.does("prefill") for worker in prefill) and all(worker.does("decode") for worker in decode)
        can_prefill = [worker for worker in workers if worker.does("prefill")]
        can_decode = [worker for worker in workers if worker.does("decode")]
        if len(workers) > 1 and can_prefill and can_decode:
            assert prefill and decode


class TestToAndFro:
    def settle(self, load_at: Callable[[float], float], until_s: float) -> list[tuple[float, int]]:
        """(when, workers that prefill) at each change, with seconds of prefill a second by ``load_at``, which arrive
        in bursts of prompts of very different lengths, and answers to match."""
        rng = random.Random(3)
        workers, roles = fleet(4, 4), Roles(tbt_slo_s=0.1, now=0.0)
        changes: list[tuple[float, int]] = []
        for second in range(int(until_s)):
            now, work = float(second), load_at(float(second))
            if second % 3 == 0:
                left = 3 * work
                while left > 0:
                    roles.asked(prompt_s := min(left, rng.choice([0.1, 0.3, 0.5, 3.0])), now)
                    left -= prompt_s
            prefill, decode = roles.split(workers)
            share = min(0.2 * work / len(decode), 0.9)  # of each decode worker, for the answers
            for worker in workers:
                batch = 2 * share / (1 - share) * rng.uniform(0.8, 1.2) if worker in decode else 0.0
                decodes(worker, round(batch))
                worker.unexplained_tokens = rng.randrange(3000) if worker in prefill else 0
                worker.load_s = now
                worker.changed()
            roles.look(workers, now)
            count = len(roles.split(workers)[0])
            if not changes or count != changes[-1][1]:
                changes.append((now, count))
        return changes

    @pytest.mark.parametrize("work", [1.3, 2.0, 3.1])
    def test_a_steady_load_moves_nobody_once_settled(self, work: float) -> None:
        changes = self.settle(lambda now: work, 900.0)
        assert sum(when > 200.0 for when, _ in changes) <= 1  # and that one may be called by a new extreme

    def test_no_pressure_no_change(self) -> None:
        assert self.settle(lambda now: 0.5, 300.0) == [(0.0, 4)]

    def test_each_edge_of_a_square_wave_moves_in_its_direction_only(self) -> None:
        period_s = 300.0
        changes = self.settle(lambda now: 3.0 if now % (2 * period_s) < period_s else 0.5, 4 * period_s)
        assert len({count for _, count in changes}) > 2
        for edge in range(4):
            counts = [count for when, count in changes if edge * period_s <= when < (edge + 1) * period_s]
            assert counts == sorted(counts, reverse=edge % 2 == 1)


def pair(worker: str, role: Literal["prefill", "decode"], **fields: Any) -> Hello:
    return msgspec.structs.replace(hello(worker, role, **fields), elastic=True)


def machine_of(play: Playbook) -> Conductor:
    assert isinstance(play.machine, Conductor)
    return play.machine


class TestMachine:
    def test_pressure_on_prefill_calls_decode_workers_and_leaves_one(self) -> None:
        play = stage(*(pair(f"p{i}", "prefill", max_running=64) for i in (1, 2)),
                     *(pair(f"d{i}", "decode", max_running=64) for i in (1, 2, 3)))
        placed = []
        for i in range(15):
            placed.append(answer(play, ask(f"r{i}", chain(f"prompt {i}", 40))))
            play >> after(0.12)
            play.take()
        assert {one.prefill for one in placed} == {"p1", "p2"}  # the others still have answers
        for one in placed:
            if one.decode == "d3":
                play >> progress(one.request, "d3", "finished")
        play >> after(0.5)
        play.take()
        placed += [answer(play, ask(f"s{i}", chain(f"another {i}", 40))) for i in range(5)]
        assert {one.prefill for one in placed} == {"p1", "p2", "d3"}
        assert all(one.prefill != one.decode for one in placed)
        assert placed[-1].decode == "d1"

    def test_published_policies_see_workers_at_home(self) -> None:
        machine = Conductor(ConductorId("c1"), Names(), Policy(), seed=1, placer=make_policy(
            "least_load", "none", ConductorId("c1"), Policy(), seed=1))
        play = stage(pair("p1", "prefill"), pair("d1", "decode"), pair("d2", "decode"), machine=machine)
        for i in range(20):
            placed = answer(play, ask(f"r{i}", chain(f"prompt {i}", 40)))
            assert placed.prefill == "p1" and placed.decode in ("d1", "d2")
            play >> after(0.1)
            play.take()

    def test_who_is_excluded_is_replaced_by_one_of_the_other_role(self) -> None:
        play = stage(pair("p1", "prefill"), pair("p2", "prefill"), pair("d1", "decode"))
        placed = answer(play, ask("r", chain("prompt", 4), exclude=[WorkerId("d1")]))
        assert {placed.prefill, placed.decode} == {"p1", "p2"}

    def test_where_no_decode_worker_has_room_another_one_is_called(self) -> None:
        play = stage(pair("p1", "prefill"), pair("p2", "prefill"), pair("d1", "decode", capacity_blocks=100))
        play >> load("d1", role="decode", running=1, free_blocks=2)
        placed = answer(play, ask("r", chain("prompt", 20)))
        assert isinstance(placed, Placement) and placed.decode == "p2"
        too_long = answer(play, ask("long", chain("prompt", 2000)))
        assert isinstance(too_long, Rejection) and too_long.code == "capacity"

    def test_the_two_loads_of_a_worker_are_kept_apart(self) -> None:
        cluster = Cluster(Policy())
        cluster.join(pair("w", "prefill"))
        worker = cluster.workers[WorkerId("w")]
        cluster.load(load("w", role="decode", running=3, context_tokens=900, free_blocks=7), 1.0)
        cluster.load(load("w", role="prefill", queued=1, queued_tokens=500, free_blocks=50), 2.0)
        assert (worker.batch(), worker.context_tokens(), worker.free_blocks()) == (3, 900, 7)
        assert worker.queue_s(2.0) == pytest.approx(0.51)
        cluster.load(load("w", role="decode"), 3.0)  # idle as a decode worker, not as a prefill worker
        assert worker.batch() == 0 and worker.queue_s(2.5) == pytest.approx(0.01)

    def test_an_idle_role_says_nothing_of_the_other_one(self) -> None:
        play = stage(pair("w1", "prefill"), pair("w2", "decode"))
        placed = answer(play, ask("r", chain("prompt", 4)))
        assert (placed.prefill, placed.decode) == ("w1", "w2")
        play >> after(5.0)
        play.take()
        cluster = machine_of(play)._cluster
        play >> load("w1", role="decode")
        assert RequestId("r") in cluster.workers[WorkerId("w1")].prefilling
        play >> load("w1", role="prefill")
        assert RequestId("r") not in cluster.workers[WorkerId("w1")].prefilling

    def test_advice_for_fixed_roles(self) -> None:
        play = stage(hello("p1"), *(hello(f"d{i}", "decode") for i in (1, 2, 3)))
        for i in range(20):
            answer(play, ask(f"r{i}", chain(f"prompt {i}", 10)))
            play >> after(0.1)
            play.take()
        advice = machine_of(play).advice(play.now)[SPEC.digest]
        assert (advice.prefill, advice.decode) == (1, 3)
        assert advice.is_wrong and advice.best_prefill == 3 and advice.best_decode == 1 and not advice.is_short
        idle = stage(hello("p1"), hello("d1", "decode"))
        assert machine_of(idle).advice(1.0) == {}
