"""Which elastic workers prefill and which decode: the formula, the line, and that nobody goes to and fro."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.conductor.core.cluster import Cluster
from services.conductor.core.machine import Conductor
from services.conductor.core.policies.registry import make_policy
from services.conductor.core.policy import Policy
from services.conductor.core.roles import Roles, Rules, balanced, in_line
from services.conductor.core.worker import Job, Worker
from shared.ids import ConductorId, RequestId, SpecDigest, WorkerId
from shared.messages import Hello, Placed, Placement, Rejection
from tests.support.playbook import Playbook, after
from tests.unit.conductor.builders import (
    OTHER_SPEC,
    SPEC,
    Names,
    answer,
    ask,
    chain,
    done,
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

    def test_what_answers_to_the_prompts_that_arrive_will_need(self) -> None:
        workers, roles = fleet(2, 2), Roles(tbt_slo_s=0.2, now=0.0)
        for tenth in range(6000):
            roles.asked(0.3, tenth / 10, num_tokens=950, answer_tokens=100.0)  # 1,000 tokens of context on average
        need = roles.need(workers, 600.0)
        own_s = 10 * 100 * (0.01 + 1000 * 1e-6)  # a second: of the request and of its context
        assert need.answers == pytest.approx(own_s / (1 - 20 / 130), rel=0.02) and need.decode == 0.0
        long = Roles(tbt_slo_s=0.2, now=0.0)
        for tenth in range(6000):
            long.asked(0.3, tenth / 10, num_tokens=59_995, answer_tokens=10.0)
        held = long.need(workers, 600.0).answers_memory
        assert held == pytest.approx(10 * 10 * 60_000 * 0.13 / 64_000 / 0.8, rel=0.02)

    @pytest.mark.parametrize("answer_tokens", [-3.0, 0.0])
    def test_prompts_without_an_answer_need_nobody_to_decode(self, answer_tokens: float) -> None:
        roles = Roles(tbt_slo_s=0.2, now=0.0)
        roles.asked(0.3, 31.0, num_tokens=-7, answer_tokens=answer_tokens)
        assert roles.need(fleet(2, 2), 31.0).answers == 0.0

    def test_at_first_answers_are_not_taken_to_be_as_short_as_those_that_have_ended(self) -> None:
        needs = []
        for answer_tokens, max_tokens in ((5.0, 100), (100.0, 100), (5.0, 2000), (512.0, 2000), (900.0, 2000)):
            roles = Roles(tbt_slo_s=0.2, now=0.0)
            for second in range(20):
                roles.asked(0.3, float(second), num_tokens=1000, answer_tokens=answer_tokens, max_tokens=max_tokens)
            needs.append(roles.need(fleet(2, 2), 20.0).answers)
        assert 0 < needs[0] == needs[1] < needs[2] == needs[3] < needs[4]

    def test_without_a_bound_four_lone_steps_are_one_and_short_answers_halve_it(self) -> None:
        workers, roles = fleet(1, 1), Roles(tbt_slo_s=None, now=0.0)
        assert roles.need(workers, 0.0).step_limit_s == pytest.approx(0.65 * 4 * 0.03)
        workers[0].answers.short_share = 0.5
        assert roles.need(workers, 0.0).step_limit_s == pytest.approx(0.12 / 1.96)
        for bound_s in (0.2, *[0.1] * 500):
            roles.bounded(bound_s, lone_s=0.03)
        assert roles.need(workers, 0.0).step_limit_s == pytest.approx(0.1 / 1.998, rel=1e-3)

    def test_one_bound_that_nobody_can_keep_counts_for_a_lone_step_in_fifty(self) -> None:
        workers, roles = fleet(1, 1), Roles(tbt_slo_s=None, now=0.0)
        roles.bounded(1e-6, lone_s=0.03)
        assert roles.need(workers, 0.0).step_limit_s == pytest.approx(0.65 / (1 / 0.03 / 50 + 0.98 / 0.12))
        for _ in range(300):
            roles.bounded(None, lone_s=0.03)
        assert roles.need(workers, 0.0).step_limit_s == pytest.approx(0.65 * 0.12, rel=1e-3)

    @given(usual_s=st.none() | st.floats(0.05, 10), lone_s=st.floats(0.03, 1), slos_s=st.lists(
        st.none() | st.floats(1e-9, 1e9), max_size=200))
    def test_the_mean_bound_is_one_of_theirs_or_between(
            self, usual_s: float | None, lone_s: float, slos_s: list[float | None]) -> None:
        workers, roles = fleet(1, 1), Roles(tbt_slo_s=usual_s, now=0.0)
        for slo_s in slos_s:
            roles.bounded(slo_s, lone_s=lone_s)
        bounds_s = [usual_s or 0.12, *(max(slo_s, lone_s) for slo_s in slos_s if slo_s is not None)]
        limit_s = roles.need(workers, 0.0).step_limit_s
        assert max(0.65 * min(bounds_s) * 0.999, 0.033) <= limit_s * 1.001
        assert limit_s <= max(0.65 * max(bounds_s), 0.033) * 1.001


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


class TestBalance:
    @pytest.mark.parametrize(("count", "computing", "memory", "spare", "prefill"), [
        (16, 0.0, 0.0, 1.5, 15),
        (9, 0.25, 0.0, 0.0, 7),  # 7.2 would be just right; eight prefill workers are more than the ninth can follow
        (4, 0.3, 0.0, 0.0, 3),  # the fourth can follow 3.3
        (4, 0.3, 0.0, 1.0, 2),  # it has 0.38 left after what it has to spare: for 1.3, and two decode for more than two
        (4, 0.0, 0.45, 1.0, 3),  # room for the answers to 2.2 is better than two who prefill
        (4, 0.0, 0.55, 1.0, 2),
        (8, 0.25, 0.0, 3.0, 4),  # 4 prefill, 1 is needed to decode, 3 are to spare
    ])
    def test_by_hand(self, count: int, computing: float, memory: float, spare: float, prefill: int) -> None:
        assert balanced(count, computing, memory, spare) == prefill

    def test_it_stays_where_little_would_be_gained(self) -> None:
        assert balanced(16, 0.5, 0.0, 0.0) == 11 and balanced(16, 0.5, 0.0, 0.0, before=10) == 10
        assert balanced(16, 0.5, 0.0, 0.0, before=12) == 11 and balanced(8, 0.5, 0.0, 0.0, before=10) == 5

    @given(count=st.integers(2, 300), computing=st.floats(0, 1e4), memory=st.floats(0, 1e4), spare=st.floats(0, 10),
           more=st.floats(0, 10), before=st.integers(0, 400))
    def test_none_serves_more_and_the_more_decode_needs_the_fewer_prefill(
            self, count: int, computing: float, memory: float, spare: float, more: float, before: int) -> None:
        def served(prefill: int) -> float:
            own = (math.sqrt(spare * spare + 4 * (count - prefill)) - spare) ** 2 / 4
            return min(prefill, own / max(computing, 1e-9), (count - prefill) / max(memory, 1e-9))

        prefill = balanced(count, computing, memory, spare)
        most = max(served(other) for other in range(1, count))
        assert 1 <= prefill < count and served(prefill) == pytest.approx(most)
        assert served(balanced(count, computing, memory, spare, before)) >= 0.95 * most * (1 - 1e-9)
        assert balanced(count, computing + more, memory, spare) <= prefill
        assert balanced(count, computing, memory + more, spare) <= prefill
        assert balanced(count, computing, memory, spare + more) <= prefill


def queue(worker: Worker, seconds: float) -> None:
    """It has one prompt under way and so many seconds of them behind it."""
    worker.prefilling.clear()
    for i, work_s in enumerate((0.0, seconds)):
        job = Job(RequestId(f"{worker.id}-{i}"), 0, worker.id, WorkerId("d0"), 1000, 10, 0, work_s, 0.0, work_s)
        job.rank = float(i)
        worker.prefilling[job.request] = job
    worker.changed()


class TestCalled:
    def test_the_one_with_the_fewest_prompts_and_nobody_else_until_it_has_come(self) -> None:
        workers, roles = fleet(8, 2), Roles(tbt_slo_s=None, now=0.0)
        for i, worker in enumerate(workers[:8]):
            queue(worker, 9.0 if i != 3 else 5.0)
        roles.look(workers, 0.0)
        assert roles.call_decode(workers, 0.5)
        for second in range(1, 8):
            roles.look(workers, float(second))
            assert not roles.call_decode(workers, second + 0.5)
            prefill, decode = roles.split(workers)
            assert set(names(prefill)) == {f"p{i}" for i in range(8) if i != 3} and names(decode) == ["d1", "d0"]
        queue(workers[3], 0.5)
        assert names(roles.split(workers)[1]) == ["p3", "d1", "d0"]
        assert roles.call_decode(workers, 8.5) and not roles.call_decode(workers, 8.6)

    def test_it_counts_for_a_while_and_the_latest_goes_home_first(self) -> None:
        workers, roles = fleet(4, 1), Roles(tbt_slo_s=None, now=0.0, rules=Rules(window_s=5.0))
        for i, worker in enumerate(workers[:4]):
            queue(worker, 0.1 * (4 - i) if i != 1 else 0.0)
        roles.look(workers, 0.0)
        assert roles.call_decode(workers, 0.0) and roles.call_decode(workers, 4.0)
        assert [set(names(side)) for side in roles.split(workers)] == [{"p0", "p2"}, {"p1", "p3", "d0"}]
        roles.look(workers, 7.0)  # the first call is over, not the second
        assert [set(names(side)) for side in roles.split(workers)] == [{"p0", "p2"}, {"p1", "p3", "d0"}]
        roles.look(workers, 10.0)
        assert names(roles.split(workers)[0]) == ["p0", "p1", "p2", "p3"]

    def test_a_call_leaves_the_mean_as_it_is(self) -> None:
        workers, roles = fleet(2, 2), Roles(tbt_slo_s=0.2, now=0.0, rules=Rules(window_s=0.0))
        for worker in workers[2:]:
            decodes(worker, 8)
        for second in range(100):
            roles.look(workers, float(second))
        mean = roles._decode._mean
        assert roles.call_decode(workers, 99.5)
        assert roles._decode._mean == mean

    @settings(max_examples=60)
    @given(homes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
           rates=st.lists(st.floats(0, 6), min_size=5, max_size=40),
           chance=st.randoms(use_true_random=False))
    def test_a_call_moves_one_and_only_when_all_have_come(
            self, homes: tuple[int, int], rates: list[float], chance: random.Random) -> None:
        workers, roles = fleet(*homes), Roles(tbt_slo_s=0.2, now=0.0, rules=Rules(rate_s=5.0, window_s=4.0))
        for second, rate in enumerate(rates):
            now = float(second)
            for worker in workers:
                queue(worker, chance.choice([0.0, 0.0, 0.5, 2.0]))
            roles.asked(rate, now)
            roles.look(workers, now)
            before = [set(names(side)) for side in roles._sides(workers)]
            least = min(worker.queue_s(now) for worker in workers if worker.id in before[0])
            was_called = roles.call_decode(workers, now)
            after = [set(names(side)) for side in roles._sides(workers)]
            moved = before[0] - after[0]
            assert len(moved) == was_called and after[1] - before[1] == moved and len(after[0]) >= 1
            if was_called:
                assert not any(worker.burden.behind_s > 1.0 for worker in workers if worker.id in before[1])
                called = next(worker for worker in workers if worker.id in moved)
                group = [worker for worker in workers if worker.hello.role == called.hello.role]
                assert called.queue_s(now) == min(worker.queue_s(now) for worker in group if worker.id in before[0])
                if homes[0] >= len(before[0]):
                    assert called.queue_s(now) == least


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


class Overload:
    """Prompts of half a second, the answers to which take 0.45 workers for each one that prefills: eight are balanced
    when 5.2 prefill, eleven when 7.2 do, sixteen when 10.6 do."""

    def __init__(self, homes: tuple[int, int], *, rules: Rules | None = None) -> None:
        self.workers = fleet(*homes)
        self.roles = Roles(tbt_slo_s=0.2, now=0.0, rules=rules or Rules(first_s=0.0))
        self.now = 0.0

    def step(self, *, load: float, ratio: float = 0.45, answers: float = 0.0, queued_s: float = 20.0) -> int:
        """One second: ``load`` seconds of prompts arrive, the answers to which need ``ratio`` workers for each second;
        those there are need ``answers`` workers. Answers how many workers are to prefill."""
        tokens = 2000.0
        answer_tokens = ratio * (1 - 20 / 130) / (0.01 + 1e-6 * tokens) / 2  # one of these a half second
        for half in range(round(2 * load)):
            self.roles.asked(0.5, self.now + half / 2 / load, num_tokens=round(tokens - answer_tokens / 2),
                             answer_tokens=answer_tokens)
        self.now += 1.0
        share = answers * (1 - 20 / 130) / len(self.workers)
        for worker in self.workers:
            decodes(worker, round(2 * share / (1 - share)))
            worker.load_s, worker.unexplained_tokens = self.now, round(queued_s * 1000)
            worker.changed()
        self.roles.look(self.workers, self.now)
        return len(self.roles._sides(self.workers)[0])


class TestBothShort:
    @pytest.mark.parametrize(("homes", "prefill"), [((4, 4), 5), ((8, 8), 10), ((12, 4), 12), ((2, 6), 5)])
    @pytest.mark.parametrize("answers", [0.0, 3.0])
    def test_so_many_prefill_as_decode_can_follow_and_nobody_leaves_home_in_prefill_for_it(
            self, homes: tuple[int, int], prefill: int, answers: float) -> None:
        overload = Overload(homes)
        counts = [overload.step(load=2.0 * sum(homes), answers=answers) for _ in range(200)]
        assert set(counts[10:]) == {prefill}  # what arrives is known by then

    def test_decode_takes_from_home_no_more_than_the_balance_leaves(self) -> None:
        overload = Overload((12, 4))
        counts = [overload.step(load=32.0, answers=11.0) for _ in range(100)]
        assert counts[10:] == sorted(counts[10:], reverse=True) and counts[-1] == 10

    @pytest.mark.parametrize("homes", [(4, 4), (8, 8), (3, 8)])
    def test_a_load_that_varies_by_a_fifth_moves_nobody(self, homes: tuple[int, int]) -> None:
        overload, chance = Overload(homes), random.Random(5)
        counts = [overload.step(load=2.0 * sum(homes) * chance.uniform(0.8, 1.2),
                                ratio=0.45 * chance.uniform(0.8, 1.2), answers=sum(homes) * chance.uniform(0, 0.5),
                                queued_s=chance.uniform(5, 40)) for _ in range(600)]
        assert len(set(counts[10:])) == 1

    def test_who_finds_no_room_waits_for_it(self) -> None:
        overload = Overload((4, 4))
        assert [overload.step(load=16.0) for _ in range(10)][-1] == 5
        assert not overload.roles.call_decode(overload.workers, overload.now)
        assert {overload.step(load=16.0) for _ in range(80)} == {5}

    def test_where_prompts_merely_press_they_get_whom_they_need(self) -> None:
        overload = Overload((4, 4))
        counts = [overload.step(load=4.0, ratio=0.05, answers=0.5, queued_s=0.5) for _ in range(30)]
        assert counts[-1] == 7

    def test_it_ends_a_while_after_the_shortage(self) -> None:
        overload = Overload((4, 4), rules=Rules(window_s=20.0, rate_s=5.0, first_s=0.0))
        assert [overload.step(load=16.0) for _ in range(30)][-1] == 5
        counts = [overload.step(load=3.0, queued_s=0.0) for _ in range(60)]
        assert counts[:20] == [5] * 20 and counts[-1] == 7

    @settings(max_examples=50)
    @given(homes=st.tuples(st.integers(1, 6), st.integers(1, 6)), steps=st.lists(st.tuples(
        st.integers(0, 40), st.sampled_from([0.0, 0.05, 0.4, 1.0, 20.0]), st.floats(0, 12), st.floats(0, 60)),
        min_size=1, max_size=30))
    def test_both_roles_are_always_taken_and_who_saw_the_same_agrees(
            self, homes: tuple[int, int], steps: list[tuple[int, float, float, float]]) -> None:
        first, second = Overload(homes), Overload(homes)
        random.Random(1).shuffle(second.workers)
        for arriving, ratio, answers, queued_s in steps:
            answers = min(answers, sum(homes) - 0.1)
            seen = [one.step(load=float(arriving), ratio=ratio, answers=answers, queued_s=queued_s)
                    for one in (first, second)]
            assert seen[0] == seen[1] and 1 <= seen[0] <= sum(homes) - 1
            assert [names(side) for side in first.roles.split(first.workers)] == [
                names(side) for side in second.roles.split(second.workers)]

    def test_advice_is_the_balance(self) -> None:
        workers = [
            *(fixed(f"p{i}", "prefill") for i in range(4)), *(fixed(f"d{i}", "decode") for i in range(12))]
        overload = Overload((4, 12))
        overload.workers, roles = workers, overload.roles
        assert {overload.step(load=32.0) for _ in range(20)} == {4}
        advice = roles.advice(workers, overload.now)
        assert advice.is_short and advice.is_wrong
        assert (advice.best_prefill, advice.best_decode) == (10, 6)
        at_best = Overload((10, 6))
        assert [at_best.step(load=32.0) for _ in range(20)][-1] == 10
        advice = at_best.roles.advice(at_best.workers, at_best.now)
        assert advice.is_short and not advice.is_wrong and (advice.best_prefill, advice.best_decode) == (10, 6)


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

    def test_only_bounds_of_what_was_placed_count_and_replicas_learn_them(self) -> None:
        plays = [stage(pair("p1", "prefill", max_running=64), pair("d1", "decode", max_running=64),
                       machine=Conductor(ConductorId(name), Names(), Policy(), seed=1)) for name in ("c1", "c2")]
        answer(plays[0], ask("first", chain("prompt", 4)))

        def limit_s(play: Playbook) -> float:
            return machine_of(play)._roles[SPEC.digest].need(
                list(machine_of(play)._cluster.workers.values()), play.now).step_limit_s

        before_s = limit_s(plays[0])
        refused = answer(plays[0], ask("tiny", chain("prompt", 4), tbt_slo_s=1e-6))
        assert isinstance(refused, Rejection) and limit_s(plays[0]) == before_s
        for i in range(20):
            plays[0] >> ask(f"r{i}", chain(f"prompt {i}", 4), tbt_slo_s=0.5)
            reply, *published = plays[0].take()
            assert isinstance(reply.message, Placement)
            for effect in published:
                assert effect.message.tbt_slo_s == 0.5
                plays[1] >> effect.message
        plays[1] >> Placed(placement=msgspec.structs.replace(reply.message, conductor=ConductorId("c3")), num_tokens=64,
                           max_tokens=1, keys=b"", tbt_slo_s=math.nan)
        assert limit_s(plays[0]) == pytest.approx(limit_s(plays[1]), rel=0.01) and limit_s(plays[0]) > before_s

    def test_replicas_expect_the_same_answers_to_what_was_placed(self) -> None:
        plays = [stage(pair("p1", "prefill"), pair("d1", "decode"), machine=Conductor(
            ConductorId(name), Names(), Policy(), seed=1)) for name in ("c1", "c2")]
        plays[0] >> ask("r", chain("prompt", 4), max_tokens=50)
        reply, published = plays[0].take()
        assert isinstance(reply.message, Placement)
        plays[1] >> published.message
        needs = [machine_of(play)._roles[SPEC.digest].need(
            list(machine_of(play)._cluster.workers.values()), play.now).answers for play in plays]
        assert needs[0] == pytest.approx(needs[1]) and needs[0] > 0

    def test_where_nobody_can_be_called_a_rejection_is_decided_once(self) -> None:
        play = stage(pair("p1", "prefill"), pair("d1", "decode", capacity_blocks=100))
        play >> load("d1", role="decode", running=1, free_blocks=2)
        assert answer(play, ask("r", chain("prompt", 20))).code == "capacity"
        pool = machine_of(play)._pools[SPEC.digest]
        decisions: list[RequestId] = []
        place = machine_of(play)._placer.place

        def counted(question: Any, *rest: Any, **fields: Any) -> Any:
            decisions.append(question.request)
            return place(question, *rest, **fields)

        machine_of(play)._placer.place = counted  # type: ignore[assignment]
        for i in range(5):
            assert answer(play, ask(f"r{i}", chain("prompt", 20))).code == "capacity"
        assert len(decisions) == 5 and machine_of(play)._pools[SPEC.digest] is pool

    def test_nobody_is_called_for_a_request_that_other_bounds_turn_away(self) -> None:
        play = stage(pair("p1", "prefill"), pair("p2", "prefill"), pair("d1", "decode"))
        late = answer(play, ask("r", chain("prompt", 20), ttft_slo_s=1e-6))
        slow = answer(play, ask("s", chain("prompt", 20), tbt_slo_s=1e-6))
        assert (late.code, slow.code) == ("ttft", "tbt")
        assert [names(side) for side in machine_of(play)._roles[SPEC.digest].split(
            list(machine_of(play)._cluster.workers.values()))] == [["p1", "p2"], ["d1"]]

    def test_room_is_looked_for_as_the_decision_does(self) -> None:
        """Answers to what begins like this are long: there is no room, though the tenant's usual answer has some."""
        play = stage(pair("p1", "prefill"), pair("p2", "prefill"), pair("d1", "decode", capacity_blocks=100))
        for i in range(40):
            for prompt, tokens in (("long", 600), *[(f"other {i}", 2)] * 9):
                answer(play, ask(f"{prompt}-{i}", chain(prompt, 4), max_tokens=1000))
                play >> done(f"{prompt}-{i}", tokens)
        play >> load("d1", role="decode", running=1, free_blocks=10)
        placed = answer(play, ask("r", chain("long", 4), max_tokens=1000))
        assert isinstance(placed, Placement) and placed.decode == "p2"

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

    def test_advice_is_told_of_the_workers_it_is_made_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are looked up once: who they are may not change between the advice and what it is about."""
        play = stage(hello("p1"), hello("d1", "decode"), hello("q1", spec=OTHER_SPEC),
                     hello("e1", "decode", spec=OTHER_SPEC))
        for spec in (SPEC, OTHER_SPEC):
            play >> ask(f"r {spec.model}", [], tokens=500, spec=spec.digest, model=spec.model)
            play.take()
        machine, looked = machine_of(play), list[SpecDigest]()
        takers = machine._takers

        def counted(spec: SpecDigest) -> list[Worker]:
            looked.append(spec)
            return takers(spec)

        monkeypatch.setattr(machine, "_takers", counted)
        told = machine.told_advice(play.now)
        assert sorted((one.spec, one.model) for one in told) == sorted(
            (spec.digest, spec.model) for spec in (SPEC, OTHER_SPEC))
        assert sorted(looked) == [one.spec for one in told]
        needs = {spec: one.need for spec, one in machine.advice(play.now).items()}
        assert all(one.answers == max(needs[one.spec].answers, needs[one.spec].answers_memory) > 0.0 for one in told)
