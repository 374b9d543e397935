"""What workers are burdened with: sums, boards, and what will be there when a prefill ends."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from services.conductor.core.answers import Answers, beginning
from services.conductor.core.board import DecodeBoard, PrefillBoard
from services.conductor.core.cluster import Cluster
from services.conductor.core.machine import Conductor
from services.conductor.core.worker import Worker
from shared.ids import RequestId, WorkerId
from shared.kv import pack_keys
from shared.messages import Placement, Source
from tests.support.playbook import Playbook, after
from tests.unit.conductor.builders import answer, ask, chain, done, hello, load, progress, stage, stored


def cluster(play: Playbook) -> Cluster:
    assert isinstance(play.machine, Conductor)
    return play.machine._cluster


def busy_town(seed: int) -> tuple[Playbook, list[Worker], list[Worker]]:
    """Workers with queues, pulls, batches and heartbeats."""
    rng = random.Random(seed)
    play = stage(*(hello(f"p{i}") for i in range(5)), *(hello(f"d{i}", "decode", max_running=4) for i in range(3)))
    workers = cluster(play).workers
    prefill = [worker for worker in workers.values() if worker.hello.role == "prefill"]
    decode = [worker for worker in workers.values() if worker.hello.role == "decode"]
    play >> stored("p0", 1, chain("doc", 8)) >> stored("p1", 1, chain("doc", 4))
    seqs = {"p0": 1, "p1": 1}
    running: list[tuple[str, Placement]] = []
    for i in range(60):
        match rng.randrange(6):
            case 0 | 1 | 2:
                found = answer(play, ask(f"r{i}", chain("doc", 8), tokens=rng.randint(520, 4000), max_tokens=20,
                                         ttft_slo_s=rng.choice((None, 5.0, 30.0))))
                if isinstance(found, Placement):
                    running.append((f"r{i}", found))
            case 3 if running:
                request, placement = rng.choice(running)
                play >> progress(request, placement.prefill, "prefilled", prefill_s=rng.uniform(0.1, 3.0),
                                 num_tokens=2000)
            case 4 if running:
                request, placement = running.pop(0)
                play >> progress(request, placement.decode, "finished", step_s=rng.uniform(0.02, 0.1), batch=2,
                                 context_tokens=4000)
            case 5:
                one = rng.choice([*prefill, *decode])
                fields: dict[str, Any] = {"queued_tokens": rng.randint(0, 5000)} if one in prefill else {
                    "running": rng.randint(0, 4), "context_tokens": rng.randint(0, 9000)}
                play >> load(one.id, role=one.hello.role, queued=rng.randint(0, 2), kv_seq=seqs.get(one.id, 0),
                             **fields)
        play.take()
        play >> after(rng.choice((0.0, 0.1, 0.4)))
        play.take()
    return play, prefill, decode


@pytest.mark.parametrize("seed", range(4))
def test_boards_say_what_the_workers_do(seed: int) -> None:
    play, prefill, decode = busy_town(seed)
    board, now = PrefillBoard(prefill), play.now
    board.refresh()
    own = np.array([0.0, 3.0, 8.0, 0.0, 1.0])
    assert board.queue_s(now) == pytest.approx([worker.queue_s(now) for worker in prefill])
    for prefill_s, head_start_s in ((0.0, 0.0), (0.1, 0.0), (0.7, 5.0), (3.0, -5.0), (50.0, 0.0)):
        line = board.line(np.full(5, prefill_s), now, since_s=now - head_start_s)
        yields_s = np.zeros(5) if line.yields_s is None else line.yields_s
        for worker, *found in zip(prefill, line.queue_s, line.delayed, yields_s, strict=True):
            assert found == pytest.approx(worker.line(prefill_s, now, since_s=now - head_start_s))
    assert board.prefill_s(3000, own) == pytest.approx([
        worker.costs.prefill_s(num_tokens=3000, hit_tokens=int(hit)) for worker, hit in zip(prefill, own, strict=True)])
    for worker, least_s in zip(prefill, board.pull_s(np.full(5, 1e6)), strict=True):
        sources = [Source(owner=WorkerId("p0"), incarnation=worker.hello.incarnation, first_block=0, num_blocks=1)]
        ahead_bytes, _ = cluster(play).link(worker, sources)
        for same_host in (True, False):
            assert least_s <= worker.costs.transfer_s(10**6 + ahead_bytes, same_host=same_host) * (1 + 1e-9)
    steps = DecodeBoard(decode)
    steps.refresh()
    assert steps.step_s(500) == pytest.approx([worker.costs.step_s(
        batch=min(worker.batch() + 1, worker.hello.max_running), context_tokens=worker.context_tokens() + 500)
        for worker in decode])
    assert steps.free_blocks.tolist() == [worker.free_blocks() for worker in decode]
    decode[0].changed()
    decode[0].hello = hello("d0", "decode", max_running=1)
    assert steps.refresh() and steps.max_running[0] == 1 and not steps.refresh()


def test_who_will_be_done_by_then_is_not_in_the_batch() -> None:
    play = stage(hello("p1"), hello("d1", "decode"))
    for i in range(3):
        answer(play, ask(f"r{i}", [], tokens=1000, max_tokens=100))
        play >> progress(f"r{i}", "p1", "prefilled", prefill_s=1.01, num_tokens=1000) >> after(1.0)
        play.take()
        play >> load("d1", role="decode", running=i + 1, context_tokens=1000 * (i + 1))
    worker, now = cluster(play).workers[WorkerId("d1")], play.now
    assert worker.decoding_at(now, now=now) == (3, 3000)
    step_s = worker.costs.step_s(batch=3, context_tokens=3000)
    first_leaves_s = now - 3.0 + 100 * step_s
    batch, context_tokens = worker.decoding_at(first_leaves_s + 0.5, now=now)
    assert batch == 2 and 2000 < context_tokens < 2400, "one is done, the other two have grown"
    assert worker.decoding_at(now + 1000.0, now=now)[0] == 0


def test_who_should_have_been_done_long_ago_is_still_counted() -> None:
    play = stage(hello("p1"), hello("d1", "decode"))
    answer(play, ask("r1", [], tokens=1000, max_tokens=10))
    play >> progress("r1", "p1", "prefilled", prefill_s=1.01, num_tokens=1000)
    for _ in range(5):
        play >> after(1.0) >> load("d1", role="decode", running=1, context_tokens=1000) >> load("p1")
    worker = cluster(play).workers[WorkerId("d1")]
    assert worker.decoding_at(play.now + 50.0, now=play.now)[0] == 1


def test_answers_are_expected_to_be_like_the_same_tenants_lately() -> None:
    answers = Answers()
    for _ in range(60):
        answers.observe(20, "short")
        answers.observe(1000, "long")
    assert answers.usual("short") == pytest.approx(20, abs=1) and answers.usual("long") == pytest.approx(1000, rel=0.01)
    assert 20 < answers.usual("new") < 1000, "of who is new, what is usual"
    for _ in range(40):
        answers.observe(100, "mixed")
        answers.observe(300, "mixed")
    assert answers.most("mixed") == pytest.approx(300, rel=0.1) and answers.most("short") < 25


def test_answers_to_prompts_that_begin_alike_are_expected_to_be_alike() -> None:
    answers = Answers()
    for _ in range(30):
        answers.observe(10, "tenant", (1, 2))
        answers.observe(500, "tenant", (1, 3))
    assert answers.usual("tenant", (1, 2)) == pytest.approx(10, abs=10)
    assert answers.usual("tenant", (1, 3, 4)) == pytest.approx(500, rel=0.05), "what is longer and unknown says nothing"
    assert answers.usual("tenant", (1,)) == pytest.approx(255, rel=0.15)
    assert answers.usual("tenant", (7, 2)) == answers.usual("tenant"), "what comes after the unknown neither"
    assert answers.most("tenant", (1, 2)) < 60 and answers.most("tenant", (1,)) > 400


def test_a_decision_goes_by_how_long_answers_to_such_prompts_were() -> None:
    long, short = chain("long", 4), chain("short", 4)
    play = stage(hello("p1"), hello("d1", "decode", max_running=50))
    for i in range(20):
        for name, doc, tokens in (("l", long, 900), ("s", short, 5)):
            answer(play, ask(f"{name}{i}", doc, max_tokens=1000))
            play >> progress(f"{name}{i}", "d1", "finished", step_s=0.03, batch=1, context_tokens=300)
            play >> done(f"{name}{i}", tokens)
            play.take()
    for name, doc in (("long", long), ("short", short)):
        answer(play, ask(name, doc, max_tokens=1000))
    jobs = cluster(play).jobs
    assert jobs[RequestId("long")].answer_tokens > 800 and jobs[RequestId("short")].answer_tokens < 40
    worker = cluster(play).workers[WorkerId("d1")]
    assert worker.needed_blocks(64, 1000, "tenant", beginning(pack_keys(short))) <= 2


def test_room_is_looked_for_by_the_tenants_answers() -> None:
    play = stage(hello("p1"), hello("d1", "decode"))
    worker = cluster(play).workers[WorkerId("d1")]
    assert worker.needed_blocks(640, 10_000, "chatty") == 10 + 4
    for _ in range(60):
        cluster(play).answered(6400, "chatty", RequestId("r"))
    assert worker.needed_blocks(640, 10_000, "chatty") == pytest.approx(10 + 100, abs=2)
    assert worker.needed_blocks(640, 64, "chatty") == 11, "never more than it may"


def test_what_cannot_be_true_is_refused_and_counted() -> None:
    play = stage(hello("p1"), hello("d1", "decode"))
    answer(play, ask("r1", [], tokens=1000))
    before = cluster(play).workers[WorkerId("p1")].costs.prefill
    nan = float("nan")
    play >> progress("r1", "p1", "prefilled", prefill_s=nan, num_tokens=1000)
    play >> progress("r1", "p1", "prefilled", prefill_s=-1.0, num_tokens=1000)
    play >> progress("r1", "d1", "finished", step_s=nan, batch=1, context_tokens=1000)
    play >> load("p1", queued=-1) >> load("d1", role="decode", free_blocks=-5)
    play >> progress("r2", "p1", "prefilled") >> progress("r2", "d1", "finished")  # not measured: no fault
    assert dict(cluster(play).refused) == {"prefill": 2, "decode": 1, "load": 2}
    assert cluster(play).workers[WorkerId("p1")].costs.prefill == before
