"""The conductor as a whole: joins, losses, restarts, replicas, time."""

from __future__ import annotations

import random

import msgspec

from services.conductor.core.machine import Conductor, Converged, Deaf, Reconnected, Started
from shared.ids import BlockKey, GatewayId, RequestId, WorkerId
from shared.kv import CacheSpec, Tier, pack_keys
from shared.machine import Answered, Asked, Publish, Reply, Request, Unanswered
from shared.messages import (
    Bye,
    Cancel,
    Refuse,
    RequestDone,
    Rollcall,
    Since,
    SnapshotPage,
    StoredBlock,
    SyncEvents,
    WorkersQuery,
    WorkersReply,
)
from tests.support.playbook import Playbook, after, like
from tests.unit.conductor.builders import (
    SPEC,
    answer,
    ask,
    chain,
    conductor,
    evicted,
    hello,
    life_of,
    load,
    progress,
    stage,
    stored,
)


def workers(play: Playbook) -> WorkersReply:
    play >> Asked(0, WorkersQuery())
    (reply,) = play.take()
    assert isinstance(reply, Reply)
    return reply.message  # type: ignore[no-any-return]


def indexed(play: Playbook) -> dict[str, int]:
    return {state.hello.worker: state.indexed_blocks for state in workers(play).workers}


class TestConvergence:
    def test_rollcall_then_every_worker_tells_its_blocks(self) -> None:
        play = (Playbook(conductor())
                >> Started() << like(Publish, address="rollcall", message=like(Rollcall, asker="c1"))
                >> hello("p1") << like(Request, address="sync p1", message=Since(incarnation=life_of("p1"), seq=0)))
        play >> after(1.0)
        play.done()  # p1 has not answered yet
        since = Since(incarnation=life_of("p1"), seq=0)
        tag = next(effect.tag for effect in play.story if isinstance(effect, Request))
        assert tag.since == since
        (play >> Answered(tag, SyncEvents(worker=WorkerId("p1"), incarnation=life_of("p1"), events=[]))
            << Converged(workers=1, missing=[])).done()
        play >> after(10.0)

    def test_nobody_there(self) -> None:
        play = Playbook(conductor(), ignore=(Publish,)) >> Started() >> after(0.6) << Converged(workers=0, missing=[])
        (play >> after(5.0)).done()

    def test_a_worker_that_does_not_answer_holds_it_up_for_a_time_only(self) -> None:
        play = Playbook(conductor(), ignore=(Publish,)) >> Started() >> hello("p1")
        (asked,) = play.take()
        play >> Unanswered(asked.tag, "no reply")
        play >> load("p1") >> after(2.0)
        play.take()  # asked again
        (play >> load("p1") >> after(1.1)) << Converged(workers=1, missing=[WorkerId("p1")])

    def test_strangers_lead_to_one_rollcall_a_second(self) -> None:
        play = stage()
        play >> after(2.0)
        play.take()
        play >> load("x1") << like(Publish, address="rollcall") >> load("x2") >> after(0.9) >> load("x3")
        play >> after(0.2) >> load("x1") << like(Publish, address="rollcall")
        play >> after(1.1) >> Reconnected() << like(Publish, address="rollcall")


class TestWorkers:
    def test_another_cache_spec_is_refused_with_both_values(self) -> None:
        other = msgspec.structs.replace(SPEC, dtype="float16")
        (stage(hello("p1")) >> hello("p2", spec=other)
            << like(Publish, address="refuse p2", message=like(
                Refuse, worker="p2", incarnation=life_of("p2"),
                message=lambda text: "float32 here, float16 there" in text))).done()

    def test_a_dead_worker_gets_nothing_and_owns_nothing(self) -> None:
        doc = chain("doc", 4)
        play = stage(hello("p1"), hello("p2"), hello("d1", "decode")) >> stored("p1", 1, doc)
        for _ in range(10):
            play >> after(1.0) >> load("p2") >> load("d1", role="decode")
            play.take()
        assert indexed(play)["p1"] == 0
        placement = answer(play, ask("r1", doc))
        assert (placement.prefill, placement.sources, placement.hit_tokens) == ("p2", [], 0)

    def test_a_suspect_gets_nothing_and_sends_nothing_but_keeps_its_blocks(self) -> None:
        doc = chain("doc", 4)
        play = stage(hello("p1"), hello("p2"), hello("d1", "decode")) >> stored("p1", 1, doc)
        for _ in range(3):
            play >> after(1.0) >> load("p2") >> load("d1", role="decode")
            play.take()
        placement = answer(play, ask("r1", doc))
        assert (placement.prefill, placement.sources) == ("p2", []) and indexed(play)["p1"] == 4
        play >> load("p1", kv_seq=1)
        assert answer(play, ask("r2", doc)).prefill == "p1"

    def test_an_elastic_worker_is_told_of_with_both_loads_and_the_role_it_has_now(self) -> None:
        elastic = [msgspec.structs.replace(hello(name, role), elastic=True)  # type: ignore[arg-type]
                   for name, role in (("p1", "prefill"), ("d1", "decode"))]
        play = stage(*elastic) >> load("d1", role="decode", queued=2) >> load("d1", role="prefill", queued=3)
        states = {state.hello.worker: state for state in workers(play).workers}
        assert [states[name].now for name in ("p1", "d1")] == ["prefill", "decode"]  # type: ignore[index]
        both = states[WorkerId("d1")]
        assert both.load is not None and both.other_load is not None
        assert (both.load.queued, both.other_load.queued) == (2, 3)
        assert states[WorkerId("p1")].other_load is None

    def test_a_draining_worker_takes_no_work_but_sends(self) -> None:
        doc = chain("doc", 8)
        play = stage(hello("p1"), hello("p2"), hello("d1", "decode")) >> stored("p1", 1, doc)
        play >> load("p1", kv_seq=1, draining=True)
        placement = answer(play, ask("r1", doc))
        assert placement.prefill == "p2" and [source.owner for source in placement.sources] == ["p1"]

    def test_a_store_takes_no_work_but_sends_also_from_its_disk(self) -> None:
        doc = chain("doc", 8)
        play = stage(hello("p1"), hello("s1", "store"), hello("d1", "decode")) >> stored("s1", 1, doc, tier=Tier.SSD)
        placement = answer(play, ask("r1", doc))
        assert (placement.prefill, placement.decode) == ("p1", "d1")
        assert [source.owner for source in placement.sources] == ["s1"]

    def test_a_store_may_lend_for_values_that_are_no_kv_and_nobody_else_may(self) -> None:
        values = CacheSpec.opaque("embeddings", 4096)
        stage(hello("s1", "store", spec=values)).done()
        (stage() >> hello("p1", spec=values) << like(Publish, address="refuse p1")).done()

    def test_goodbye(self) -> None:
        doc = chain("doc", 4)
        play = stage(hello("p1"), hello("d1", "decode")) >> stored("p1", 1, doc)
        play >> Bye(worker=WorkerId("p1"), incarnation=life_of("p1")) >> load("p1", kv_seq=1)
        assert indexed(play)["p1"] == 0 and answer(play, ask("r1", doc)).code == "no_worker"

    def test_a_restart_under_the_same_id(self) -> None:
        doc, other = chain("doc", 4), chain("other", 2)
        play = stage(hello("p1"), hello("p2"), hello("d1", "decode")) >> stored("p1", 1, doc)
        in_flight = answer(play, ask("r1", doc))
        assert in_flight.prefill == "p1"
        since = Since(incarnation=life_of("p1", 2), seq=0)
        (play >> hello("p1", life=2) << like(Request, address="sync p1", message=since)).done()
        assert indexed(play)["p1"] == 0
        play >> stored("p1", 2, doc)  # of its former life, late
        tag = next(effect.tag for effect in reversed(play.story) if isinstance(effect, Request))
        play >> Answered(tag, SyncEvents(worker=WorkerId("p1"), incarnation=life_of("p1", 2),
                                         events=[stored("p1", 1, other, life=2)]))
        assert indexed(play)["p1"] == 2
        assert next(s.waiting_s for s in workers(play).workers if s.hello.worker == "p1") == 0
        play >> stored("p1", 2, doc[:1], life=2)
        assert indexed(play)["p1"] == 3

    def test_one_thought_dead_that_speaks_again_is_asked_anew(self) -> None:
        play = stage(hello("p1")) >> stored("p1", 1, chain("doc", 4))
        play >> after(9.0)
        play.take()
        assert workers(play).workers[0].state == "dead"
        play >> load("p1", kv_seq=1)
        (asked,) = play.take()
        assert asked.message == Since(incarnation=life_of("p1"), seq=0)
        play >> Answered(asked.tag, SyncEvents(worker=WorkerId("p1"), incarnation=life_of("p1"),
                                               events=[stored("p1", 1, chain("doc", 4))]))
        assert indexed(play)["p1"] == 4

    def test_a_conductor_that_stood_still_itself_declares_nobody_dead(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode"))
        play.now += 30.0  # no Woke came: we did not run
        play >> load("p1") >> after(0.3)
        play.take()
        assert "dead" not in {state.state for state in workers(play).workers}

    def test_events_of_another_spec_are_counted_and_dropped(self) -> None:
        play = stage(hello("p1"))
        play >> stored("p1", 1, chain("doc", 4), spec=msgspec.structs.replace(SPEC, dtype="float16"))
        assert indexed(play)["p1"] == 0
        assert isinstance(play.machine, Conductor) and play.machine.statistics().mismatched_events == 1

    def test_what_no_worker_can_be_is_refused(self) -> None:
        for impossible in (msgspec.structs.replace(SPEC, block_tokens=0), msgspec.structs.replace(SPEC, dtype="int3")):
            play = stage() >> hello("p1", spec=impossible)
            (play << like(Publish, address="refuse p1", message=like(Refuse, worker="p1"))).done()
            assert workers(play).workers == []

    def test_heartbeats_of_an_earlier_life_or_below_zero_are_not_believed(self) -> None:
        play = stage(hello("p1", life=2), hello("d1", "decode"))
        play >> load("p1", life=1, queued=5, queued_tokens=50_000)
        play.take()
        play >> load("p1", life=2, queued=1, queued_tokens=-3000)
        assert workers(play).workers[1].waiting_s == 0

    def test_an_owner_that_is_gone_while_suspect_is_dead(self) -> None:
        play = stage(hello("p1"))
        play >> after(2.6)
        play.take()
        play >> load("p1", kv_seq=5)  # heard again, but something was lost
        play >> after(0.15)
        (asked,) = play.take()
        play >> after(2.6)
        play.take()
        play >> Unanswered(asked.tag, "nobody listens", gone=True)
        assert workers(play).workers[0].state == "dead"


class TestIndex:
    def test_a_gap_causes_one_question(self) -> None:
        doc = chain("doc", 6)
        play = stage(hello("p1")) >> stored("p1", 1, doc[:2]) >> stored("p1", 3, doc[4:]) >> evicted("p1", 4, doc[:1])
        assert indexed(play)["p1"] == 2
        play >> after(0.15) << like(Request, address="sync p1", message=Since(incarnation=life_of("p1"), seq=1))
        play >> stored("p1", 5, chain("more", 1)) >> load("p1", kv_seq=5) >> after(1.0)
        tag = next(effect.tag for effect in reversed(play.story) if isinstance(effect, Request))
        play >> Answered(tag, SyncEvents(worker=WorkerId("p1"), incarnation=life_of("p1"), events=[
            stored("p1", 2, doc[2:4]), stored("p1", 3, doc[4:]), evicted("p1", 4, doc[:1])]))
        assert indexed(play)["p1"] == 6
        (play >> load("p1", kv_seq=5) >> after(1.0)).done()

    def test_late_start_reaches_the_same_index_as_one_that_saw_everything(self) -> None:
        rng = random.Random(5)
        names = ("p1", "p2", "d1")
        early = stage(*(hello(name, "decode" if name == "d1" else "prefill") for name in names))
        prompts = [chain(f"doc{i}", 12) for i in range(6)]
        truth: dict[str, set[BlockKey]] = {name: set() for name in names}
        seqs = dict.fromkeys(names, 0)
        for _ in range(400):
            name, keys = rng.choice(names), rng.choice(prompts)
            seqs[name] += 1
            if rng.random() < 0.7:
                some = keys[:rng.randint(1, 12)]
                early >> stored(name, seqs[name], some)
                truth[name].update(some)
            else:
                some = keys[rng.randrange(12):]
                early >> evicted(name, seqs[name], some)
                truth[name].difference_update(some)
        late = Playbook(conductor("c2")) >> Started()
        late.take()
        for name in names:
            late >> hello(name, "decode" if name == "d1" else "prefill")
            (asked,) = late.take()
            late.run(pages(asked, name, seqs[name], sorted(truth[name])))
        expected = {name: len(blocks) for name, blocks in truth.items()}
        assert indexed(early) == indexed(late) == expected
        for i, keys in enumerate(prompts):
            one, other = (answer(play, ask(f"q{i}", keys)) for play in (early, late))
            play_over = RequestId(f"q{i}")
            for play in (early, late):
                play >> Cancel(request=play_over, reason="test")
            assert {(c.prefill, c.own_blocks, c.fetched_blocks) for c in one.candidates} == {
                (c.prefill, c.own_blocks, c.fetched_blocks) for c in other.candidates}

    def test_a_tier_left_is_not_a_block_lost(self) -> None:
        doc = chain("doc", 3)
        play = stage(hello("p1")) >> stored("p1", 1, doc) >> stored("p1", 2, doc, tier=Tier.SSD)
        play >> evicted("p1", 3, doc, tier=Tier.DRAM)
        assert indexed(play)["p1"] == 3
        play >> evicted("p1", 4, doc, tier=Tier.SSD)
        assert indexed(play)["p1"] == 0


def pages(asked: Request, name: str, seq: int, keys: list[BlockKey], *, page_blocks: int = 7) -> list[Answered]:
    """The owner's snapshot as answers to the questions that follow one another."""
    cut = [keys[i:i + page_blocks] for i in range(0, len(keys), page_blocks)] or [[]]
    return [Answered(asked.tag, SnapshotPage(
        worker=WorkerId(name), incarnation=life_of(name), seq=seq, spec=SPEC.digest, snapshot="s", page=number,
        pages=len(cut), blocks=[StoredBlock(key=key, parent=key, depth=0, nbytes=1) for key in part]))
        for number, part in enumerate(cut)]


class TestLoad:
    def waiting(self, play: Playbook, worker: str = "p1") -> float:
        return next(state.waiting_s for state in workers(play).workers if state.hello.worker == worker)

    def stage(self) -> Playbook:
        return stage(hello("p1"), hello("d1", "decode"))

    def test_work_counts_from_the_decision_shrinks_with_time_and_ends_when_prefilled(self) -> None:
        play = self.stage()
        answer(play, ask("r1", [], tokens=1000))
        assert round(self.waiting(play), 3) == 1.01
        play >> after(0.4)
        assert round(self.waiting(play), 3) == 0.61
        play >> after(1.5)
        assert 0 < self.waiting(play) < 0.11, "late, but not done"
        play >> progress("r1", "p1", "prefilled", prefill_s=1.9, num_tokens=1000)
        assert self.waiting(play) == 0

    def test_heartbeats_show_progress_inside_a_prefill(self) -> None:
        play = self.stage()
        answer(play, ask("r1", [], tokens=2000))
        answer(play, ask("r2", [], tokens=1000))
        play >> after(0.5) >> load("p1", queued=1, running=1, queued_tokens=1500)
        assert 0.7 < self.waiting(play) < 1.6, "of 3000 tokens 1500 are left, whatever the clock says"

    def test_work_of_others_counts_too(self) -> None:
        play = self.stage()
        play >> load("p1", queued=2, queued_tokens=2000)
        assert round(self.waiting(play), 2) == 2.01
        play >> after(1.0)
        assert round(self.waiting(play), 2) == 1.01
        play >> load("p1")
        assert self.waiting(play) == 0

    def test_an_idle_worker_has_nothing_of_what_was_decided_long_ago(self) -> None:
        play = self.stage()
        answer(play, ask("r1", [], tokens=60_000))
        play >> after(1.0) >> load("p1")
        assert self.waiting(play) > 5.0, "the job may still be on its way"
        play >> after(1.5) >> load("p1")
        assert self.waiting(play) == 0

    def test_cancel_done_failure_and_a_new_attempt_free_everything(self) -> None:
        done = RequestDone(request=RequestId("r1"), gateway=GatewayId("g"), model="toy", spec=SPEC.digest, tenant="t",
                           received_at_s=0.0, outcome="ok", completion_tokens=5)
        for end in (Cancel(request=RequestId("r1"), reason="client gone"), done, progress("r1", "p1", "failed"),
                    progress("r1", "d1", "finished", step_s=0.03, batch=1)):
            play = self.stage()
            answer(play, ask("r1", chain("doc", 8)))
            assert self.waiting(play) > 0
            play >> end
            assert self.waiting(play) == 0
            play >> after(1.0) >> load("p1") >> load("d1", role="decode") >> after(2.5)
            assert isinstance(play.machine, Conductor)
            assert (play.machine.statistics().jobs, play.machine.statistics().promised_blocks) == (0, 0)

    def test_a_former_attempt_is_released_and_its_late_news_ignored(self) -> None:
        play = stage(hello("p1"), hello("p2"), hello("d1", "decode"))
        first = answer(play, ask("r1", [], tokens=5000))
        second = answer(play, ask("r1", [], tokens=5000, attempt=1, exclude=[first.prefill]))
        assert second.prefill != first.prefill and self.waiting(play, first.prefill) == 0
        play >> progress("r1", first.prefill, "prefilled", attempt=0)
        play >> Cancel(request=RequestId("r1"), reason="retry", attempt=0)
        assert self.waiting(play, second.prefill) > 4

    def test_costs_follow_what_is_observed(self) -> None:
        play = self.stage()
        for i in range(8):
            answer(play, ask(f"r{i}", [], tokens=1000))
            play >> after(3.0) >> load("p1", running=1, queued_tokens=1) >> load("d1", role="decode", running=1)
            play >> progress(f"r{i}", "p1", "prefilled", prefill_s=3.03, num_tokens=1000)
            play >> progress(f"r{i}", "d1", "finished", step_s=0.06, batch=1, context_tokens=1000)
        play >> load("p1") >> load("d1", role="decode")
        placement = answer(play, ask("r", [], tokens=1000))
        assert 2.7 < placement.predicted_prefill_s < 3.3
        assert 0.05 < placement.predicted_tbt_s < 0.07
        assert isinstance(play.machine, Conductor)
        assert set(play.machine.statistics().errors) == {("p1", "prefill"), ("d1", "decode")}

    def test_a_request_nobody_reports_on_is_forgotten(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode"), job_ttl_s=5.0)
        answer(play, ask("r1", [], tokens=60_000))
        for _ in range(7):
            play >> after(1.0) >> load("p1", running=1, queued_tokens=60_000) >> load("d1", role="decode", queued=1)
        assert isinstance(play.machine, Conductor) and play.machine.statistics().jobs == 0


class TestReplicas:
    def test_decisions_of_another_conductor_count_and_promise(self) -> None:
        doc = chain("doc", 8)
        here, there = stage(hello("p1"), hello("p2"), hello("d1", "decode")), conductor("c2", seed=2)
        other = stage(hello("p1"), hello("p2"), hello("d1", "decode"), machine=there)
        other >> ask("r1", doc)
        reply, announced = other.take()
        here >> announced.message
        assert [s.waiting_s for s in workers(here).workers] == [s.waiting_s for s in workers(other).workers]
        follower = answer(here, ask("r2", [*doc, *chain("tail", 1)]))
        assert follower.prefill != reply.message.prefill or follower.own_blocks == 8
        here >> Cancel(request=RequestId("r1"), reason="test") >> Cancel(request=RequestId("r2"), reason="test")
        assert all(state.waiting_s == 0 for state in workers(here).workers)

    def test_its_own_announcement_changes_nothing(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode"))
        play >> ask("r1", [], tokens=1000)
        _, announced = play.take()
        play >> progress("r1", "p1", "prefilled") >> announced.message
        assert workers(play).workers[1].waiting_s == 0

    def test_a_decision_that_is_no_number_is_ignored(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode"))
        play >> ask("r1", [], tokens=1000)
        _, announced = play.take()
        placement = msgspec.structs.replace(announced.message.placement, predicted_queue_s=float("nan"))
        other = stage(hello("p1"), hello("d1", "decode"), machine=conductor("c2"))
        (other >> msgspec.structs.replace(announced.message, placement=placement)).done()
        assert workers(other).workers[1].waiting_s == 0

    def test_a_decision_about_workers_nobody_knows(self) -> None:
        play = stage(hello("p1"), hello("d1", "decode"))
        play >> ask("r1", [], tokens=1000)
        _, announced = play.take()
        (stage(machine=conductor("c2")) >> announced.message).done()


def test_a_bus_that_is_away_is_nobodys_silence() -> None:
    play = stage(hello("p1"), hello("d1", "decode"), suspect_after_s=2.0, dead_after_s=8.0)
    for _ in range(100):
        play >> Deaf() >> after(0.25)
    play >> Reconnected() << like(Publish, address="rollcall")
    play >> after(1.0)
    play.done()
    assert [state.state for state in workers(play).workers] == ["alive", "alive"]


def test_the_same_events_give_the_same_decisions() -> None:
    def run() -> list[object]:
        play = stage(*(hello(f"p{i}") for i in range(3)), hello("d1", "decode"), hello("d2", "decode"), seed=7)
        return [answer(play, ask(f"r{i}", chain(f"doc{i % 4}", 6))) for i in range(30)]
    assert run() == run()


def test_packed_keys_of_an_eviction_may_be_torn() -> None:
    doc = chain("doc", 2)
    play = stage(hello("p1")) >> stored("p1", 1, doc)
    torn = evicted("p1", 2, doc)
    play >> msgspec.structs.replace(torn, keys=pack_keys(doc)[:-5])
    assert indexed(play)["p1"] == 1
