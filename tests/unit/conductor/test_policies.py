"""Each published policy's formula against cases computed by hand.

Workers compute 1 ms a prompt token, over blocks of 64 tokens (64 ms a block); see ``builders``.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.conductor.core.cluster import Cluster
from services.conductor.core.machine import Conductor
from services.conductor.core.placement import Usable
from services.conductor.core.policies import llmd_scorer, sglang_cache_aware
from services.conductor.core.policies.admission import (
    Admission,
    Bounded,
    EarlyRejection,
    PredictedRejection,
    Prediction,
)
from services.conductor.core.policies.base import View
from services.conductor.core.policies.dynamo_kv import prefill_cost
from services.conductor.core.policies.registry import PUBLISHED, make_policy
from services.conductor.core.policy import Policy
from services.conductor.core.rejection import Reasons
from services.conductor.core.worker import Worker
from shared.errors import UserError
from shared.ids import ConductorId, RequestId, WorkerId
from shared.messages import Bye, Placement, PlaceRequest, Progress, Rejection
from tests.unit.conductor.builders import BLOCK_TOKENS, SPEC, Names, answer, hello, life_of, load, stage
from tests.unit.conductor.builders import ask as asked

C = ConductorId("c1")


class Match:
    """What the index would answer: each worker's own prefix in blocks, and the longest one can send."""

    def __init__(self, own: dict[str, int]) -> None:
        self.own = {WorkerId(worker): blocks for worker, blocks in own.items()}

    def run(self, start: int) -> tuple[int, list[WorkerId]]:
        best = max(self.own.values(), default=0)
        return (best, [w for w, n in self.own.items() if n == best]) if best > start else (start, [])


class Scene:
    """Prefill workers p1 to p3 and decode workers d1, d2 with work on them."""

    def __init__(self) -> None:
        self.cluster = Cluster(Policy())
        for name in ("p1", "p2", "p3", "d1", "d2"):
            self.cluster.join(hello(name, "prefill" if name[0] == "p" else "decode", host=name))
        self._placed = 0

    def worker(self, name: str) -> Worker:
        return self.cluster.workers[WorkerId(name)]

    def busy(self, prefill: str, tokens: int, decode: str = "d1", *, prefilled_s: float | None = None) -> RequestId:
        """A request of ``tokens`` is on its way, placed at 0 s."""
        self._placed += 1
        request = RequestId(f"busy-{self._placed}")
        placement = Placement(
            request=request, attempt=0, conductor=C, prefill=WorkerId(prefill), prefill_incarnation=life_of(prefill),
            decode=WorkerId(decode), decode_incarnation=life_of(decode), own_blocks=0, sources=[], hit_tokens=0,
            predicted_queue_s=0.0, predicted_transfer_s=0.0, predicted_prefill_s=tokens * 1e-3, predicted_tbt_s=0.0)
        self.cluster.place(placement, num_tokens=tokens, max_tokens=10, now=0.0)
        if prefilled_s is not None:
            self.cluster.progress(Progress(request=request, attempt=0, worker=WorkerId(prefill), stage="prefilled",
                                           num_tokens=tokens), now=prefilled_s)
        return request

    def view(self, tokens: int, own: dict[str, int] | None = None) -> View:
        usable = self.usable()
        return View(ask(tokens), self.cluster, usable.prefill, usable.decode, Match(own or {}), 0.0)  # type: ignore[arg-type]

    def usable(self) -> Usable:
        return Usable([self.worker(f"p{i}") for i in (1, 2, 3)], [self.worker(f"d{i}") for i in (1, 2)], 0)

    def place(self, policy: str, tokens: int, own: dict[str, int] | None = None, *, admission: str = "none",
              seed: int = 0, **fields: Any) -> Placement | Rejection:
        made = make_policy(policy, admission, C, Policy(), seed=seed)
        return made.place(ask(tokens, **fields), self.cluster, self.usable(), Match(own or {}), now=0.0)  # type: ignore[arg-type]

    def chosen(self, policy: str, tokens: int, own: dict[str, int] | None = None, *, seed: int = 0) -> Placement:
        answer = self.place(policy, tokens, own, seed=seed)
        assert isinstance(answer, Placement)
        return answer


def ask(tokens: int, **fields: Any) -> PlaceRequest:
    return PlaceRequest(request=RequestId("r"), model="toy", spec=SPEC.digest, tenant="", num_tokens=tokens, keys=b"",
                        max_tokens=10, **fields)


def test_random_draws_from_all_and_follows_its_seed() -> None:
    scene = Scene()
    drawn = [scene.chosen("random", 640, seed=seed) for seed in range(40)]
    assert {one.prefill for one in drawn} == {"p1", "p2", "p3"} and {one.decode for one in drawn} == {"d1", "d2"}
    assert [scene.chosen("random", 640, seed=seed).prefill for seed in range(40)] == [one.prefill for one in drawn]


def test_round_robin_takes_each_in_turn() -> None:
    scene = Scene()
    policy = make_policy("round_robin", "none", C, Policy(), seed=0)
    answers = [policy.place(ask(64), scene.cluster, scene.usable(), Match({}), now=0.0) for _ in range(4)]  # type: ignore[arg-type]
    assert [(one.prefill, one.decode) for one in answers if isinstance(one, Placement)] == [
        ("p1", "d1"), ("p2", "d2"), ("p3", "d1"), ("p1", "d2")]


def test_least_load_takes_the_shortest_queue_whatever_is_cached() -> None:
    scene = Scene()
    scene.busy("p1", 200)
    scene.busy("p2", 100)
    scene.busy("p3", 300)
    placement = scene.chosen("least_load", 640, {"p1": 9, "p2": 2})
    assert placement.prefill == "p2" and placement.hit_tokens == 2 * BLOCK_TOKENS
    assert placement.predicted_queue_s == pytest.approx(0.1) and placement.decode == "d2"


def test_longest_prefix_follows_the_cache_and_breaks_ties_by_queue() -> None:
    scene = Scene()
    scene.busy("p1", 900)
    assert scene.chosen("longest_prefix", 640, {"p1": 5, "p2": 4}).prefill == "p1"
    assert scene.chosen("longest_prefix", 640, {"p1": 5, "p2": 5}).prefill == "p2"


def test_mooncake_a1_weighs_queue_transfer_and_prefill() -> None:
    scene = Scene()
    scene.busy("p1", 500)
    scene.busy("p3", 50)
    # 640 tokens. p1: 0.5 s queue, 9 own blocks, 64 tokens left: 0.564. p2: pulls 9 blocks for about a millisecond,
    # 64 left: 0.065. p3: the same behind 0.05 s of queue: 0.115
    placement = scene.chosen("mooncake_a1", 640, {"p1": 9})
    assert placement.prefill == "p2" and placement.own_blocks == 0
    assert [(source.owner, source.first_block, source.num_blocks) for source in placement.sources] == [("p1", 0, 9)]
    # transfer: 1 ms, and 9 blocks of 8192 bytes at 1e8 bytes a second
    assert placement.predicted_transfer_s == pytest.approx(0.001 + 9 * 8192 / 1e8)
    assert placement.predicted_ttft_s == pytest.approx(0.001 + 9 * 8192 / 1e8 + 0.01 + 0.064)


def test_mooncake_a1_recomputes_what_its_own_copy_lacks_below_the_threshold() -> None:
    scene = Scene()
    scene.busy("p1", 500)
    scene.busy("p3", 500)
    # p2 has 7 of 9: 9 / 7 is not above 1.5, so it computes the rest although pulling would be quicker
    placement = scene.chosen("mooncake_a1", 640, {"p1": 9, "p2": 7})
    assert placement.prefill == "p2" and not placement.sources and placement.hit_tokens == 7 * BLOCK_TOKENS
    # 5 of 9: 1.8 is above it
    placement = scene.chosen("mooncake_a1", 640, {"p1": 9, "p2": 5})
    assert [(source.first_block, source.num_blocks) for source in placement.sources] == [(5, 4)]


def test_cache_aware_is_the_same_without_transfers() -> None:
    scene = Scene()
    scene.busy("p1", 500)
    assert scene.chosen("cache_aware", 640, {"p1": 9}).prefill == "p1"  # 0.564 s against 0.64 s elsewhere
    scene.busy("p1", 100)
    placement = scene.chosen("cache_aware", 640, {"p1": 9})
    assert placement.prefill in ("p2", "p3") and not placement.sources


def test_dynamo_counts_blocks() -> None:
    scene = Scene()
    scene.busy("p1", 5 * BLOCK_TOKENS)
    scene.busy("p2", 2 * BLOCK_TOKENS)
    view = scene.view(10 * BLOCK_TOKENS, {"p1": 8, "p2": 1})
    # 5 + 10 - 0.75 * 8 = 9; 2 + 10 - 0.75 = 11.25; 10
    assert [prefill_cost(view, worker) for worker in view.prefill] == pytest.approx([9.0, 11.25, 10.0])
    assert scene.chosen("dynamo_kv", 640, {"p1": 8, "p2": 1}).prefill == "p1"


def test_sglang_follows_a_good_match_and_spreads_the_rest() -> None:
    scene = Scene()
    scene.busy("p1", 64)
    assert scene.chosen("sglang_cache_aware", 640, {"p1": 4}).prefill == "p1"  # 0.4 of the prompt
    # 0.3 is not above the threshold: the smallest tree
    scene.cluster.load(load("p2", cached_blocks=50), 0.0)
    scene.cluster.load(load("p3", cached_blocks=7), 0.0)
    scene.cluster.load(load("p1", cached_blocks=90), 0.0)
    assert sglang_cache_aware.tree_blocks(scene.worker("p1")) == 91
    assert scene.chosen("sglang_cache_aware", 640, {"p1": 3}).prefill == "p3"


def test_sglang_balances_when_requests_are_uneven() -> None:
    scene = Scene()
    for _ in range(65):
        scene.busy("p1", 64)
    scene.busy("p2", 64)
    assert scene.chosen("sglang_cache_aware", 640, {"p1": 10}).prefill == "p3"


def test_llmd_sums_weighted_scores() -> None:
    scene = Scene()
    scene.cluster.load(load("p1", free_blocks=500, queued=1, queued_tokens=64), 0.0)
    scene.cluster.load(load("p2", free_blocks=1000), 0.0)
    scene.busy("p1", 64)
    view = scene.view(10 * BLOCK_TOKENS, {"p1": 5})
    # p1: 3 * 0.8 * 0.5 + 2 * 0.5 + 2 * 0; p2: 0 + 2 * 1 + 2 * 1
    assert llmd_scorer.score(view, scene.worker("p1"), 1, [1, 0, 0]) == pytest.approx(2.2)
    assert llmd_scorer.score(view, scene.worker("p2"), 0, [1, 0, 0]) == pytest.approx(4.0)
    assert scene.chosen("llmd_scorer", 640, {"p1": 5}).prefill in ("p2", "p3")
    assert llmd_scorer.score(view, scene.worker("p2"), 0, [0, 0, 0]) == pytest.approx(4.0)


def test_slo_turns_away_what_the_pair_cannot_do() -> None:
    scene = Scene()
    for name in ("p1", "p2", "p3"):
        scene.busy(name, 1000)
    answer = scene.place("mooncake_a1", 640, admission="slo", ttft_slo_s=1.5)
    assert isinstance(answer, Rejection) and answer.code == "ttft"
    assert answer.retry_after_s == pytest.approx(0.2)  # 1.64 s against 1.5 s; the shortest wait there is
    answer = scene.place("mooncake_a1", 640, admission="slo", tbt_slo_s=0.01)
    assert isinstance(answer, Rejection) and answer.code == "tbt"
    assert {one.decode for one in answer.decode_candidates} == {"d1", "d2"}
    assert isinstance(scene.place("mooncake_a1", 640, admission="baseline", tbt_slo_s=0.01), Placement)


@pytest.mark.parametrize("admission", ["slo", "baseline", "early", "early_prediction"])
def test_who_had_waited_so_much_less_as_it_is_late_would_have_been_taken(admission: str) -> None:
    """Behind a queue of 3 s it takes 4.01 s of the 4.5 s asked; the schemes of others take queues as predicted."""
    scene = Scene()
    for name in ("p1", "p2", "p3"):
        scene.busy(name, 3000)

    def answer(waited_s: float) -> Placement | Rejection:
        return scene.place("mooncake_a1", 1000, admission=admission, ttft_slo_s=4.5 - waited_s, waited_s=waited_s)

    late = answer(0.52)
    assert isinstance(late, Rejection) and late.code == "ttft" and late.late_s == pytest.approx(0.03)
    assert late.message.endswith("asked are 4.50 s")
    assert isinstance(answer(0.52 - late.late_s + 0.001), Rejection)
    assert isinstance(answer(0.52 - late.late_s - 0.001), Placement)


@pytest.mark.parametrize("policy", PUBLISHED)
@pytest.mark.parametrize("tbt_slo_s", [None, 0.01])
def test_what_others_decide_says_whose_policy_it_was_and_what_decode_workers_there_were(
        policy: str, tbt_slo_s: float | None) -> None:
    placer = make_policy(policy, "slo", C, Policy(), seed=1)
    machine = Conductor(C, Names(), Policy(), seed=1, placer=placer, published=policy)
    play = stage(*(hello(name, "prefill" if name[0] == "p" else "decode") for name in ("p1", "p2", "d1", "d2")),
                 machine=machine)
    said = answer(play, asked("r", [], tokens=500, tbt_slo_s=tbt_slo_s))
    assert isinstance(said, Placement if tbt_slo_s is None else Rejection)
    assert said.policy == policy and {one.decode for one in said.decode_candidates} == {"d1", "d2"}
    if isinstance(said, Placement):
        assert said.decode_candidates[0].decode == said.decode, "the chosen one comes first"


@pytest.mark.parametrize("policy", PUBLISHED)
@pytest.mark.parametrize("homes", ["pdd", "ppd"])
@pytest.mark.parametrize("how", ["excluded", "gone", "draining"])
def test_elastic_workers_stand_in_for_the_last_one_of_the_other_side(policy: str, homes: str, how: str) -> None:
    placer = make_policy(policy, "none", C, Policy(), seed=1)
    workers = [msgspec.structs.replace(hello(f"{home}{i}", "prefill" if home == "p" else "decode"), elastic=True)
               for i, home in enumerate(homes)]
    play = stage(*workers, machine=Conductor(C, Names(), Policy(), seed=1, placer=placer, published=policy))
    (last,) = [worker for worker in workers if homes.count(worker.worker[0]) == 1]
    exclude = []
    match how:
        case "excluded":
            exclude = [last.worker]
        case "gone":
            play >> Bye(worker=last.worker, incarnation=last.incarnation)
        case "draining":
            play >> load(last.worker, role=last.role, draining=True)
    left = {worker.worker for worker in workers} - {last.worker}
    said = answer(play, asked("r", [], tokens=500, exclude=exclude))
    assert isinstance(said, Placement) and {said.prefill, said.decode} == left
    two = answer(play, asked("r2", [], tokens=500, exclude=[*exclude, *sorted(left)[:1]]))
    assert isinstance(two, Rejection) and two.code == "no_worker", "nobody prefills for itself"


@pytest.mark.parametrize("elastic", [False, True])
def test_nobody_stands_in_while_somebody_is_at_home(elastic: bool) -> None:
    placer = make_policy("round_robin", "none", C, Policy(), seed=1)
    workers = [msgspec.structs.replace(hello(name, "prefill" if name[0] == "p" else "decode"), elastic=elastic)
               for name in ("p1", "d1", "d2", "d3")]
    play = stage(*workers, machine=Conductor(C, Names(), Policy(), seed=1, placer=placer, published="round_robin"))
    assert {answer(play, asked(f"r{i}", [], tokens=500)).prefill for i in range(6)} == {"p1"}
    alone = answer(play, asked("last", [], tokens=500, exclude=[WorkerId("p1")]))
    assert isinstance(alone, Placement) if elastic else alone.code == "no_worker"


def _step_s(scheme: EarlyRejection, scene: Scene, *, then_s: float, now: float) -> float:
    prediction = Prediction(queue_s=then_s - now, transfer_s=0.0, prefill_s=0.0, tbt_s=0.0, decode=scene.worker("d1"))
    return scheme.step_s(scene.worker("d1"), prediction, now)


def test_early_rejection_sees_what_decodes_now_and_prediction_what_will() -> None:
    scene = Scene()
    scene.busy("p1", 100, prefilled_s=1.0)
    coming = scene.busy("p1", 200)
    batch = scene.worker("d1").costs.step_s
    now, later = 2.0, 4.0
    assert _step_s(EarlyRejection(), scene, then_s=later, now=now) == batch(batch=1, context_tokens=100)
    predicted = PredictedRejection(decode_s=10.0)
    prediction = Prediction(queue_s=1.0, transfer_s=0.0, prefill_s=0.5, tbt_s=0.0, decode=scene.worker("d1"))
    request = ask(200)
    taken = predicted.check(PlaceRequest(request=coming, model="toy", spec=SPEC.digest, tenant="", num_tokens=200,
                                         keys=b"", max_tokens=10), prediction, scene.usable(), Policy(),
                            Reasons(request, Policy(), 0.0), [], now=0.0)
    assert taken is None  # its prefill is predicted to end at 1.5 s
    assert _step_s(predicted, scene, then_s=later, now=now) == batch(batch=2, context_tokens=300)
    # at 12 s the first has decoded for over 10 s
    assert _step_s(predicted, scene, then_s=12.0, now=now) == batch(batch=1, context_tokens=200)


@pytest.mark.parametrize(("scheme", "says"), [
    (Bounded(checks_tbt=True), "the time between tokens is predicted as 40 ms"),
    (EarlyRejection(), "without this request, steps of the decode workers take on average {step}"),
    (PredictedRejection(decode_s=10.0),
     "without this request, steps of the decode workers are predicted to take on average {step}"),
])
def test_a_rejection_says_what_the_time_is_that_decided(scheme: Admission, says: str) -> None:
    scene = Scene()
    worker = scene.worker("d1")
    prediction = Prediction(queue_s=0.0, transfer_s=0.0, prefill_s=0.1, tbt_s=0.04, decode=worker)
    request = msgspec.structs.replace(ask(64), tbt_slo_s=0.001)
    reasons = Reasons(request, Policy(), 0.0)
    rejection = scheme.check(request, prediction, scene.usable(), Policy(), reasons, [], now=0.0)
    step_s = worker.costs.step_s(batch=0, context_tokens=0)
    assert rejection is not None and says.format(step=f"{step_s * 1e3:.3g} ms") in rejection.message


@pytest.mark.parametrize("policy", PUBLISHED)
def test_nobody_to_serve_is_said(policy: str) -> None:
    made = make_policy(policy, "none", C, Policy(), seed=0)
    answer = made.place(ask(64), Cluster(Policy()), Usable([], [], 0), Match({}), now=0.0)  # type: ignore[arg-type]
    assert isinstance(answer, Rejection) and answer.code == "no_worker"


def test_names_nobody_has_are_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"no policy fastest; there are random, .*moonbus"):
        make_policy("fastest", "none", C, Policy(), seed=0)
    with pytest.raises(UserError, match="no admission always; there are none, slo"):
        make_policy("random", "always", C, Policy(), seed=0)
