"""Decisions: who gets it, what is reused, why not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from services.conductor.core.machine import Conductor
from services.conductor.core.policies.registry import make_policy
from services.conductor.core.policy import Policy
from shared.ids import BlockKey, ConductorId, WorkerId
from shared.kv import Tier
from shared.machine import Publish, Reply
from shared.messages import Placed, Placement, Profile, Rejection, Source
from shared.order import FCFS
from tests.support.playbook import Playbook, after, like
from tests.unit.conductor.builders import (
    BLOCK_TOKENS,
    OTHER_SPEC,
    PROFILE,
    SPEC,
    Names,
    answer,
    ask,
    chain,
    hello,
    life_of,
    load,
    progress,
    stage,
    stored,
)

SLOW_LINK = Profile(prefill_fixed_s=0.01, prefill_per_token_s=1e-3, prefill_per_token2_s=0.0, transfer_bytes_per_s=1e4)


def two_and_one(**policy: Any) -> Playbook:
    return stage(hello("p1"), hello("p2"), hello("d1", "decode"), **policy)


def test_warm_prefix_wins_over_idle_worker() -> None:
    doc = chain("doc", 8)
    (two_and_one() >> stored("p1", 1, doc)
        >> ask("r1", doc)
        << like(Reply, message=like(Placement, prefill="p1", decode="d1", own_blocks=8, sources=[],
                                    hit_tokens=8 * BLOCK_TOKENS, prefill_incarnation=life_of("p1"),
                                    decode_incarnation=life_of("d1")))
        << like(Publish, address="placed", message=like(Placed, num_tokens=8 * BLOCK_TOKENS + 32))).done()


def test_load_beats_a_tiny_prefix() -> None:
    doc = chain("doc", 1)
    play = two_and_one() >> stored("p1", 1, doc) >> load("p1", kv_seq=1, queued=1, queued_tokens=2000)
    placement = answer(play, ask("r1", chain("long", 8, after=("doc", 1))))
    assert placement.prefill == "p2"


def test_the_last_token_is_always_computed() -> None:
    doc = chain("doc", 4)
    play = two_and_one() >> stored("p1", 1, doc)
    exact = answer(play, ask("r1", doc, tokens=4 * BLOCK_TOKENS))
    assert (exact.own_blocks, exact.hit_tokens) == (3, 3 * BLOCK_TOKENS)
    assert exact.predicted_prefill_s == pytest.approx(0.01 + BLOCK_TOKENS * 1e-3)


def test_blocks_are_pulled_when_that_is_cheaper_than_recomputing() -> None:
    doc = chain("doc", 8)
    play = two_and_one() >> stored("p1", 1, doc)
    placement = answer(play, ask("r1", doc, exclude=[WorkerId("p1")]))
    assert placement.prefill == "p2" and placement.own_blocks == 0
    assert placement.sources == [Source(owner=WorkerId("p1"), incarnation=life_of("p1"), first_block=0, num_blocks=8)]
    assert placement.hit_tokens == 8 * BLOCK_TOKENS
    nbytes = 8 * SPEC.block_bytes
    assert placement.predicted_transfer_s == pytest.approx(0.001 + nbytes / 1e8)


def test_blocks_are_recomputed_when_that_is_cheaper_than_pulling() -> None:
    doc = chain("doc", 8)
    play = stage(hello("p1"), hello("p2", profile=SLOW_LINK), hello("d1", "decode")) >> stored("p1", 1, doc)
    placement = answer(play, ask("r1", doc, exclude=[WorkerId("p1")]))
    assert placement.prefill == "p2" and placement.sources == [] and placement.hit_tokens == 0
    assert "pulling them would take" in placement.candidates[0].note


def test_what_more_copies_of_a_prefix_would_be_worth() -> None:
    doc = chain("doc", 8)
    play = stage(hello("p1", profile=SLOW_LINK), hello("p2", profile=SLOW_LINK), hello("d1", "decode"))
    play >> stored("p1", 1, doc)
    assert answer(play, ask("r1", doc)).reuse_gain_s == 0.0, "it runs where they are, at once"
    play >> progress("r1", "p1", "failed") >> load("p1", kv_seq=1, queued=1, queued_tokens=2000)
    elsewhere = answer(play, ask("r2", doc))
    assert (elsewhere.prefill, elsewhere.sources) == ("p2", [])
    assert elsewhere.reuse_gain_s == pytest.approx(8 * BLOCK_TOKENS * 1e-3), "all but the last 32 tokens"
    assert answer(play, ask("r3", chain("new", 4))).reuse_gain_s == 0.0, "nobody has any of it"


def test_decode_workers_own_blocks_too_and_continue_what_prefill_has() -> None:
    chat = chain("chat", 8)
    play = two_and_one() >> stored("p1", 1, chat[:3]) >> stored("d1", 1, chat)
    placement = answer(play, ask("r1", chat))
    assert (placement.prefill, placement.own_blocks) == ("p1", 3)
    assert placement.sources == [Source(owner=WorkerId("d1"), incarnation=life_of("d1"), first_block=3, num_blocks=5)]


def test_several_owners_cover_a_prompt_together() -> None:
    doc = chain("doc", 9)
    play = stage(hello("p1"), hello("p2"), hello("p3"), hello("d1", "decode"))
    play >> stored("p1", 1, doc[:4]) >> stored("p2", 1, doc[4:])
    placement = answer(play, ask("r1", doc, exclude=[WorkerId("p1"), WorkerId("p2")]))
    assert placement.prefill == "p3"
    pulls = [(source.owner, source.first_block, source.num_blocks) for source in placement.sources]
    assert pulls == [("p1", 0, 4), ("p2", 4, 5)]


def test_of_equal_owners_the_one_on_the_same_host_sends() -> None:
    doc = chain("doc", 4)
    play = stage(hello("p1", host="far"), hello("p2", host="near"), hello("p3", host="near"), hello("d1", "decode"))
    play >> stored("p1", 1, doc) >> stored("p2", 1, doc)
    placement = answer(play, ask("r1", doc, exclude=[WorkerId("p1"), WorkerId("p2")]))
    assert [source.owner for source in placement.sources] == ["p2"]


def test_a_burst_of_siblings_spreads_and_reuses() -> None:
    doc = chain("doc", 20)
    play = stage(*(hello(f"p{i}") for i in range(4)), hello("d1", "decode", max_running=64))
    placements = [answer(play, ask(f"r{i}", [*doc, *chain(f"tail{i}", 2, after=("doc", 20))[20:]])) for i in range(20)]
    used = Counter(placement.prefill for placement in placements)
    assert len(used) == 4 and max(used.values()) <= 8
    reusing = [placement for placement in placements if placement.own_blocks >= 20]
    assert len(reusing) == 16, "all but the first on each worker reuse what the first will have computed"
    assert all(not placement.sources for placement in placements), "nobody can send yet what is only promised"


def test_a_promise_that_is_not_kept_is_forgotten() -> None:
    doc = chain("doc", 8)
    play = two_and_one()
    first = answer(play, ask("r1", doc))
    play >> after(30.0)
    play.take()
    for worker in ("p1", "p2", "d1"):
        play >> load(worker, role="decode" if worker == "d1" else "prefill")
        play.take()
    later = answer(play, ask("r2", doc))
    assert first.hit_tokens == later.hit_tokens == 0


@pytest.mark.parametrize("exclude", [["p1"], ["d1"], ["p1", "d1"]])
def test_excluded_workers_get_nothing(exclude: list[str]) -> None:
    play = stage(hello("p1"), hello("p2"), hello("d1", "decode"), hello("d2", "decode"))
    for i in range(10):
        placement = answer(play, ask(f"r{i}", [], tokens=10, exclude=list(map(WorkerId, exclude))))
        assert not {placement.prefill, placement.decode} & set(exclude)


def test_equals_are_drawn_from_and_a_seed_repeats_the_draw() -> None:
    def drawn(seed: int) -> list[str]:
        hellos = [*(hello(f"p{i}") for i in range(4)), hello("d1", "decode")]
        return [answer(stage(*hellos, seed=seed), ask("r", [], tokens=50)).prefill for _ in range(2)]
    assert all(first == second for first, second in map(drawn, range(20)))
    assert len({drawn(seed)[0] for seed in range(20)}) > 2


def test_decode_is_the_one_with_the_shortest_step() -> None:
    play = stage(hello("p1"), hello("d1", "decode"), hello("d2", "decode"))
    play >> load("d1", role="decode", running=3, context_tokens=3000)
    play >> load("d2", role="decode", running=1, context_tokens=500)
    placement = answer(play, ask("r1", [], tokens=100))
    assert placement.decode == "d2"
    assert placement.predicted_tbt_s == pytest.approx(0.02 + 2 * 0.01 + 604 * 1e-6, rel=1e-3)


def test_among_equal_decode_workers_the_one_that_holds_the_chat() -> None:
    chat = chain("chat", 6)
    play = stage(hello("p1"), hello("d1", "decode"), hello("d2", "decode")) >> stored("d2", 1, chat)
    for i in range(5):
        play >> ask(f"r{i}", chat)
        assert play.take()[0].message.decode == "d2"
        play >> progress(f"r{i}", "d2", "finished")


def test_decode_load_is_counted_before_anybody_reports_it() -> None:
    play = stage(hello("p1"), hello("d1", "decode"), hello("d2", "decode"))
    used = Counter(answer(play, ask(f"r{i}", [], tokens=100)).decode for i in range(10))
    assert used == {"d1": 5, "d2": 5}


def rejected(play: Playbook, **fields: Any) -> Rejection:
    rejection = answer(play, ask("r", [], **{"tokens": 1000, **fields}))
    assert isinstance(rejection, Rejection)
    assert rejection.retry_after_s > 0
    return rejection


class TestRejections:
    def test_nobody_is_there(self) -> None:
        assert rejected(stage()).code == "no_worker"
        one_sided = rejected(stage(hello("p1")))
        assert one_sided.code == "no_worker" and "no decode worker" in one_sided.message

    def test_everybody_is_excluded(self) -> None:
        play = two_and_one()
        rejection = rejected(play, exclude=[WorkerId("p1"), WorkerId("p2")])
        assert rejection.code == "no_worker" and "2 excluded" in rejection.message

    def test_another_model(self) -> None:
        assert rejected(two_and_one(), spec=OTHER_SPEC.digest).code == "no_worker"

    def test_full_queues_and_the_wait_until_they_are_not(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode"), max_queue_s=5.0) >> load("p1", queued=9, queued_tokens=8000)
        rejection = rejected(play)
        assert rejection.code == "capacity"
        assert rejection.retry_after_s == pytest.approx(8.01 - 5.0)
        assert rejection.candidates[0].queue_s == pytest.approx(8.01)
        play >> after(1.0)
        assert rejected(play).retry_after_s == pytest.approx(7.01 - 5.0)

    def test_no_room_in_decode(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode")) >> load("d1", role="decode", free_blocks=10, running=1)
        rejection = rejected(play)
        assert rejection.code == "capacity" and "needs 17 blocks" in rejection.message and "has 10" in rejection.message

    def test_room_is_waited_for_by_who_is_in_time_all_the_same(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode", capacity_blocks=30))
        place = answer(play, ask("before", [], tokens=1000, max_tokens=20))
        play >> progress("before", "p1", "prefilled") >> load("d1", role="decode", free_blocks=10, running=1)
        step_s = 0.02 + 0.01 + 1000e-6
        waits = rejected(play, ttft_slo_s=5.0)
        assert place.decode == "d1" and waits.code == "capacity"
        assert waits.wait_s == waits.retry_after_s == pytest.approx(20 * step_s)
        assert waits.spare_s == pytest.approx(5.0 - 1.01)
        assert rejected(play, ttft_slo_s=1.5).wait_s == 0.0, "1.01 s of computing and 0.62 s are too much"
        assert rejected(play).spare_s == 30.0, "without a bound, as long as for computing"
        assert rejected(play, waited_s=29.9).wait_s == 0.0
        assert rejected(play, tokens=2000, ttft_slo_s=50.0).wait_s == 0.0, "there never is as much room"

    def test_what_was_waited_is_taken_off_the_bound_of_the_settings(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode", capacity_blocks=30), ttft_slo_s=5.0)
        answer(play, ask("before", [], tokens=1000, max_tokens=20))
        play >> progress("before", "p1", "prefilled") >> load("d1", role="decode", free_blocks=10, running=1)
        assert rejected(play, waited_s=1.0).spare_s == pytest.approx(4.0 - 1.01)
        own = rejected(play, waited_s=1.0, ttft_slo_s=6.0)
        assert own.spare_s == pytest.approx(6.0 - 1.01), "its own comes first, and is what is left"
        assert rejected(play, waited_s=4.0).wait_s == 0.0
        assert "a wait of nan seconds" in rejected(play, waited_s=float("nan")).message

    def test_no_place_in_the_batch_soon_enough(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode", max_running=1), max_queue_s=2.0)
        assert answer(play, ask("r0", [], tokens=100, max_tokens=10_000)).decode == "d1"
        rejection = rejected(play, tokens=100)
        assert rejection.code == "capacity" and "decode batch" in rejection.message

    def test_first_token_too_late(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode")) >> load("p1", queued=1, queued_tokens=3000)
        rejection = rejected(play, ttft_slo_s=2.0)
        assert rejection.code == "ttft"
        assert rejection.retry_after_s == pytest.approx(3.01 + 1.01 - 2.0)
        hopeless = rejected(play, ttft_slo_s=0.5)
        assert "without a queue it would be 1.01 s" in hopeless.message
        assert (rejection.late_s, hopeless.late_s) == (pytest.approx(2.17, 1e-3), pytest.approx(3.67, 1e-3))

    @pytest.mark.parametrize("of_settings", [False, True])
    @pytest.mark.parametrize("placer", ["ours", "theirs"])
    @pytest.mark.parametrize("waited_s", [1.5, 2.0, 7.0])
    def test_a_bound_that_was_waited_for_is_told_as_it_was_asked(self, of_settings: bool, placer: str,
                                                                 waited_s: float) -> None:
        settings = {"ttft_slo_s": 2.0 if of_settings else None}
        machine = Conductor(ConductorId("c"), Names(), Policy(**settings), seed=1, placer=None if placer == "ours" else
                            make_policy("mooncake_a1", "slo", ConductorId("c"), Policy(**settings), seed=1))
        play = stage(hello("p1"), hello("d1", "decode"), machine=machine)
        rejection = rejected(play, waited_s=waited_s, ttft_slo_s=None if of_settings else 2.0 - waited_s)
        assert rejection.message == (f"the first token is predicted after {waited_s + 1.01:.2f} s ({waited_s:.2f} s "
                                     "waited already, 1.01 s from now), asked are 2.00 s")
        assert rejection.late_s == pytest.approx(waited_s + 1.01 - 2.0)
        assert rejection.retry_after_s == 0.2, "asked anew it would be in time"

    @pytest.mark.parametrize(("left_s", "late_s"), [(2.0, None), (0.001, 1.009), (0.0, 1.01), (-0.5, 1.51)])
    def test_what_is_left_of_a_request_s_own_bound_is_not_made_less(self, left_s: float, late_s: float | None) -> None:
        """It waited for 1.5 s, and its prompt takes 1.01 s. A bound of the settings that it would meet says nothing."""
        play = stage(hello("p1"), hello("d1", "decode"), ttft_slo_s=30.0)
        said = answer(play, ask("r", [], tokens=1000, waited_s=1.5, ttft_slo_s=left_s))
        if late_s is None:
            assert isinstance(said, Placement)
            (placed,) = [effect.message for effect in play.story if isinstance(effect, Publish)
                         and isinstance(effect.message, Placed)]
            assert placed.ttft_slo_s == 2.0
        else:
            assert isinstance(said, Rejection) and said.code == "ttft" and said.late_s == pytest.approx(late_s)
            assert f"asked are {'1.50 s' if left_s >= 0 else '1.00 s'}" in said.message

    def test_short_bounds_are_told_with_digits(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode"))
        assert "predicted after 20 ms, asked are 0.5 ms; without a queue it would be 20 ms" in rejected(
            play, tokens=10, ttft_slo_s=0.0005).message
        assert rejected(play, tokens=10, tbt_slo_s=1e-6).message == (
            "the time between tokens is predicted as 30 ms, asked are 0.001 ms")

    def test_a_queue_that_may_be_too_long(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode")) >> load("p1", queued=1, queued_tokens=3000)
        rejection = rejected(play, ttft_slo_s=4.1)
        assert rejection.message == ("the first token is predicted after 4.02 s, asked are 4.10 s, and the queue of "
                                     "3.01 s may be 5% longer than predicted")

    def test_tokens_too_slow(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode")) >> load("d1", role="decode", running=5, context_tokens=5000)
        rejection = rejected(play, tbt_slo_s=0.05)
        assert rejection.code == "tbt" and rejection.policy == ""
        assert [one.decode for one in rejection.decode_candidates] == ["d1"]
        assert rejection.decode_candidates[0].tbt_s > 0.05
        assert isinstance(answer(play, ask("r", [], tokens=10, tbt_slo_s=0.2)), Placement)

    def test_limits_of_the_settings_count_when_the_request_has_none(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode"), ttft_slo_s=0.5, tbt_slo_s=1.0)
        assert rejected(play).code == "ttft"
        assert isinstance(answer(play, ask("r", [], tokens=1000, ttft_slo_s=3.0)), Placement)

    @pytest.mark.parametrize(
        "wrong", [{"tokens": 0}, {"max_tokens": -1}, {"ttft_slo_s": float("nan")}, {"tbt_slo_s": -1.0},
                  {"ttft_slo_s": 0.0}, {"ttft_slo_s": -2.0, "waited_s": 2.0},
                  {"head_start_s": float("inf")}])
    def test_what_cannot_be_true(self, wrong: dict[str, Any]) -> None:
        assert "cannot be true" in rejected(two_and_one(), **wrong).message

    def test_keys_that_are_none(self) -> None:
        rejection = answer(two_and_one(), ask("r", [BlockKey(b"short")], tokens=100))
        assert "5 bytes are no whole number" in rejection.message


def test_candidates_are_sorted_with_their_terms() -> None:
    doc = chain("doc", 8)
    play = two_and_one() >> stored("p1", 1, doc) >> load("p1", kv_seq=1, queued=1, queued_tokens=100)
    placement = answer(play, ask("r1", doc))
    assert [candidate.ttft_s for candidate in placement.candidates] == sorted(c.ttft_s for c in placement.candidates)
    options = {(c.prefill, c.own_blocks, c.fetched_blocks) for c in placement.candidates}
    assert options == {("p1", 8, 0), ("p2", 0, 8), ("p2", 0, 0)}
    chosen = placement.candidates[0]
    assert placement.predicted_ttft_s == pytest.approx(chosen.ttft_s)


def test_links_under_load_are_slower() -> None:
    doc = chain("doc", 8)
    play = stage(hello("p1"), hello("p2"), hello("p3"), hello("d1", "decode")) >> stored("p1", 1, doc)
    first = answer(play, ask("r1", doc, exclude=[WorkerId("p1"), WorkerId("p2")]))
    second = answer(play, ask("r2", doc, exclude=[WorkerId("p1"), WorkerId("p3")]))
    assert second.predicted_transfer_s > first.predicted_transfer_s
    play >> progress("r1", "p3", "prefilled") >> progress("r2", "p2", "prefilled")
    third = answer(play, ask("r3", chain("new", 1), exclude=[WorkerId("p1")]))
    assert third.predicted_queue_s == 0


def test_a_bad_spell_long_ago_keeps_no_work_from_a_decode_worker() -> None:
    play = stage(hello("p1"), hello("d1", "decode"), hello("d2", "decode"), trust_s=15.0,
                 suspect_after_s=100.0, dead_after_s=200.0)

    def finish(request: str, worker: str, step_s: float) -> None:
        play >> progress(request, worker, "finished", batch=1, context_tokens=100, step_s=step_s)
        play.take()

    for n in range(6):
        finish(f"slow{n}", "d2", 1.0)
        finish(f"good{n}", "d1", 0.01)
    assert answer(play, ask("now", chain("a", 1))).decode == "d1"
    finish("now", "d1", 0.01)
    play >> after(16)
    play.take()
    finish("later", "d1", 0.01)
    assert {answer(play, ask(f"again{n}", chain("b", 1))).decode for n in range(4)} == {"d1", "d2"}


class TestSsd:
    """8 blocks of 8 KiB and 64 ms of computing each; the first 3 in memory, the others on SSD."""

    def town(self, bytes_per_s: float, **policy: Any) -> Playbook:
        profile = msgspec.structs.replace(PROFILE, ssd_bytes_per_s=bytes_per_s)
        play = stage(hello("p1", profile=profile), hello("p2", profile=profile), hello("d1", "decode"), **policy)
        self.doc = chain("doc", 8)
        return play >> stored("p1", 1, self.doc[:3]) >> stored("p1", 2, self.doc[3:], tier=Tier.SSD)

    def test_blocks_are_read_from_the_own_ssd_when_that_is_quicker_than_computing_them(self) -> None:
        placement = answer(self.town(5 * SPEC.block_bytes / 0.1), ask("r", self.doc, exclude=[WorkerId("p2")]))
        assert (placement.own_blocks, placement.hit_tokens) == (8, 512)
        assert placement.predicted_transfer_s == pytest.approx(0.1)
        assert placement.predicted_prefill_s == pytest.approx(0.01 + 0.032)
        assert placement.candidates[0].note == "reads 5 blocks from its SSD in 0.1 s"

    def test_and_computed_again_when_it_is_not(self) -> None:
        placement = answer(self.town(5 * SPEC.block_bytes / 0.3), ask("r", self.doc, exclude=[WorkerId("p2")]))
        assert (placement.own_blocks, placement.predicted_transfer_s) == (3, 0.0), "0.3 s for 0.32 s is no gain"
        assert placement.predicted_prefill_s == pytest.approx(0.01 + 0.032 + 5 * 0.064)

    def test_what_is_read_while_others_are_computed_is_not_waited_for(self) -> None:
        play = self.town(5 * SPEC.block_bytes / 0.3, order=FCFS)
        answer(play, ask("before", [], tokens=290, exclude=[WorkerId("p2")]))
        placement = answer(play, ask("r", self.doc, exclude=[WorkerId("p2")]))
        assert (placement.own_blocks, placement.predicted_transfer_s) == (8, 0.0)
        assert placement.predicted_queue_s == pytest.approx(0.3)

    def test_an_owner_reads_from_its_ssd_before_it_sends(self) -> None:
        placement = answer(self.town(5 * SPEC.block_bytes / 0.1), ask("r", self.doc, exclude=[WorkerId("p1")]))
        assert [(source.first_block, source.num_blocks) for source in placement.sources] == [(0, 3), (3, 5)]
        assert placement.predicted_transfer_s == pytest.approx(0.1 + 0.001 + 8 * SPEC.block_bytes / 1e8)
        assert placement.candidates[0].note == "owners read from SSD for 0.1 s"

    def test_or_sends_what_it_has_in_memory(self) -> None:
        placement = answer(self.town(5 * SPEC.block_bytes / 0.4), ask("r", self.doc, exclude=[WorkerId("p1")]))
        assert [(source.first_block, source.num_blocks) for source in placement.sources] == [(0, 3)]

    def test_who_has_it_in_memory_sends_before_who_has_it_on_ssd(self) -> None:
        profile = msgspec.structs.replace(PROFILE, ssd_bytes_per_s=5 * SPEC.block_bytes / 0.1)
        doc = chain("doc", 8)
        play = stage(*(hello(f"p{i}", profile=profile) for i in (1, 2, 3)), hello("d1", "decode"))
        play >> stored("p1", 1, doc, tier=Tier.SSD) >> stored("p2", 1, doc)
        placement = answer(play, ask("r", doc, exclude=[WorkerId("p1"), WorkerId("p2")]))
        assert [source.owner for source in placement.sources] == ["p2"]

    def test_the_rate_is_learnt(self) -> None:
        play = self.town(5 * SPEC.block_bytes / 0.1)
        for i in range(20):
            answer(play, ask(f"r{i}", [], tokens=64, exclude=[WorkerId("p2")]))
            play >> progress(f"r{i}", "p1", "prefilled", num_tokens=64, prefill_s=0.074,
                             stages={"ssd_s": 0.4, "ssd_bytes": 5 * SPEC.block_bytes})
            play.take()
        assert answer(play, ask("r", self.doc, exclude=[WorkerId("p2")])).own_blocks == 3
