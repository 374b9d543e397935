"""Prefill and decode workers on real NATS, with a real (tiny) model: reuse, loss, corruption, cancel, preemption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from shared.bus.nats import NatsBus
from shared.ids import WorkerId
from shared.messages import Refused, Reserved, Sampling, Source
from shared.transfer import TransferSettings
from tests.support.eventually import Eventually
from tests.support.workers import Asker, Workers, clean, open_workers, prompt


@pytest_asyncio.fixture
async def workers(nats_url: str, cache: Path) -> AsyncIterator[Workers]:
    async with open_workers(nats_url, cache) as opened:
        yield opened
        for worker in opened.everybody:
            worker.agent.pool.check_invariants()


async def test_cold_warm_and_fetched_answers_are_the_same(workers: Workers, eventually: Eventually) -> None:
    tokens = prompt(100)
    cold = await workers.asker.ask(workers.p1, workers.d1, tokens)
    assert cold.hit_tokens == 0 and cold.finish == "length" and len(cold.tokens) == 8
    warm = await workers.asker.ask(workers.p1, workers.d1, tokens)
    assert warm.hit_tokens == 96
    fetched = await workers.asker.ask(workers.p2, workers.d1, tokens, sources=[(workers.p1, 0, 6)])
    assert fetched.stages is not None
    assert (fetched.stages.fetched_blocks, fetched.stages.hit_tokens) == (6, 96)
    assert fetched.stages.fetch_path in ("copy", "shm", "tcp")
    assert cold.tokens == warm.tokens == fetched.tokens
    await eventually(lambda: clean(workers), "everything given back")


@pytest.mark.parametrize("path", ["copy", "shm", "tcp"])
async def test_every_path_gives_the_same_answer(nats_url: str, cache: Path, path: str) -> None:
    tokens = prompt(75, seed=2)
    async with open_workers(nats_url, cache, transfer=TransferSettings(paths=(path,))) as workers:
        cold = await workers.asker.ask(workers.p1, workers.d1, tokens)
        fetched = await workers.asker.ask(workers.p2, workers.d1, tokens, sources=[(workers.p1, 0, 4)])
        assert cold.tokens == fetched.tokens
        assert fetched.stages is not None and fetched.stages.fetch_path == path
        assert cold.stages is not None and cold.stages.push_path == path


async def test_two_owners_serve_one_prefix(nats_url: str, cache: Path) -> None:
    tokens = prompt(100, seed=3)
    async with open_workers(nats_url, cache, prefills=3) as workers:
        reference = await workers.asker.ask(workers.p1, workers.d1, tokens, salt="reference")
        await workers.asker.ask(workers.p1, workers.d1, tokens)
        await workers.asker.ask(workers.p2, workers.d1, tokens)
        both = await workers.asker.ask(workers.prefills[2], workers.d1, tokens,
                                       sources=[(workers.p1, 0, 2), (workers.p2, 2, 3)])
        assert both.stages is not None and both.stages.fetched_blocks == 5
        assert both.tokens == reference.tokens


async def test_the_next_turn_of_a_chat_begins_with_what_decode_kept(workers: Workers, eventually: Eventually) -> None:
    first = prompt(40, seed=4)
    turn = await workers.asker.ask(workers.p1, workers.d1, first, max_tokens=30)
    longer = first + turn.tokens + prompt(20, seed=5)
    kept = workers.asker.keys(first + turn.tokens)
    await eventually(lambda: {bytes(key) for key in kept} <= workers.asker.announced(workers.d1.id))
    again = await workers.asker.ask(workers.p2, workers.d1, longer, sources=[(workers.d1, 0, len(kept))])
    assert again.hit_tokens == len(kept) * 16
    reference = await workers.asker.ask(workers.p2, workers.d1, longer, salt="reference")
    assert again.tokens == reference.tokens


async def test_a_promise_that_is_not_kept_is_computed(workers: Workers) -> None:
    tokens = prompt(100, seed=6)
    reference = await workers.asker.ask(workers.p1, workers.d1, tokens, salt="reference")
    nothing = await workers.asker.ask(workers.p2, workers.d1, tokens, sources=[(workers.p1, 0, 6)])
    assert nothing.stages is not None
    assert (nothing.stages.fetched_blocks, nothing.stages.fetch_failed_blocks) == (0, 6)
    assert nothing.tokens == reference.tokens


async def test_an_owner_that_is_gone_costs_no_wait(workers: Workers) -> None:
    tokens = prompt(60, seed=7)
    job, reserved = await workers.asker.reserve(workers.d1.id, tokens, Sampling(max_tokens=4))
    assert isinstance(reserved, Reserved)
    source = Source(owner=WorkerId("nobody"), incarnation=workers.p1.incarnation, first_block=0, num_blocks=3)
    await workers.asker.dispatch(workers.p1.id, workers.d1.id, job, reserved, [source])
    answer = workers.asker.answers[job.request]
    await asyncio.wait_for(answer.over.wait(), 3)
    assert answer.finish == "length" and answer.hit_tokens == 0


async def test_corrupt_blocks_are_computed_and_corrupt_layers_sent_again(nats_url: str, cache: Path) -> None:
    tokens = prompt(120, seed=8)
    every = {"prefill-1": {"transfer": TransferSettings(corrupt_every=5)}}
    async with open_workers(nats_url, cache, settings=every) as workers:
        reference = await workers.asker.ask(workers.p2, workers.d1, tokens, salt="reference")
        pushed = await workers.asker.ask(workers.p1, workers.d1, tokens)
        fetched = await workers.asker.ask(workers.p2, workers.d1, tokens, sources=[(workers.p1, 0, 7)])
        assert fetched.stages is not None and fetched.stages.fetch_failed_blocks > 0
        assert reference.tokens == pushed.tokens == fetched.tokens


async def test_siblings_that_come_together_compute_their_prefix_once(
        workers: Workers, eventually: Eventually) -> None:
    shared = prompt(200, seed=70)
    prompts = [shared + prompt(20 + n, seed=71 + n) for n in range(8)]
    expected = [(await workers.asker.ask(workers.p2, workers.d1, tokens, salt=f"reference {n}")).tokens
                for n, tokens in enumerate(prompts)]
    answers = await asyncio.gather(*(workers.asker.ask(workers.p1, workers.d1, tokens) for tokens in prompts))
    assert [answer.tokens for answer in answers] == expected
    assert sorted(answer.hit_tokens for answer in answers) == [0] + [192] * 7
    await eventually(lambda: clean(workers), "everything given back")


async def test_siblings_of_a_prompt_that_is_cancelled_go_on_where_it_was(
        workers: Workers, eventually: Eventually) -> None:
    shared = prompt(1_200, seed=80)
    first, reserved = await workers.asker.reserve(workers.d1.id, shared + prompt(20, seed=81), Sampling(max_tokens=4))
    assert isinstance(reserved, Reserved)
    await workers.asker.dispatch(workers.p1.id, workers.d1.id, first, reserved)
    prompts = [shared + prompt(30 + n, seed=82 + n) for n in range(3)]
    others = [asyncio.create_task(workers.asker.ask(workers.p1, workers.d1, tokens)) for tokens in prompts]
    await eventually(lambda: workers.p1.agent.pool.statistics().cached >= 5, "some of it is computed")
    await workers.asker.cancel(first.request)
    answers = await asyncio.gather(*others)
    assert sum(answer.hit_tokens for answer in answers) > 2 * 1_200
    references = [await workers.asker.ask(workers.p2, workers.d1, tokens, salt="reference") for tokens in prompts]
    assert [answer.tokens for answer in answers] == [reference.tokens for reference in references]
    await eventually(lambda: clean(workers), "everything given back")


async def test_a_sibling_waits_for_what_another_fetches(workers: Workers, eventually: Eventually) -> None:
    """One is to fetch the prefix, one is not: neither computes it."""
    shared = prompt(200, seed=90)
    await workers.asker.ask(workers.p2, workers.d1, [*shared, 7], max_tokens=1)
    jobs = [await workers.asker.reserve(workers.d1.id, shared + more, Sampling(max_tokens=2)) for more in ([8], [9])]
    source = Source(owner=workers.p2.id, incarnation=workers.p2.incarnation, first_block=0, num_blocks=12)
    for (job, reserved), sources in zip(jobs, ([source], []), strict=True):
        assert isinstance(reserved, Reserved)
        await workers.asker.dispatch(workers.p1.id, workers.d1.id, job, reserved, sources)
    answers = [workers.asker.answers[job.request] for job, _ in jobs]
    await asyncio.wait_for(asyncio.gather(*(answer.over.wait() for answer in answers)), 20)
    assert [answer.stages.fetched_blocks for answer in answers if answer.stages is not None] == [12, 0]
    assert [answer.hit_tokens for answer in answers] == [192, 192]
    await eventually(lambda: clean(workers), "everything given back")


async def test_cancel_frees_everything_at_once(workers: Workers, eventually: Eventually) -> None:
    job, reserved = await workers.asker.reserve(workers.d1.id, prompt(90, seed=9), Sampling(max_tokens=3_000))
    assert isinstance(reserved, Reserved)
    await workers.asker.dispatch(workers.p1.id, workers.d1.id, job, reserved)
    answer = workers.asker.answers[job.request]
    await eventually(lambda: len(answer.tokens) > 3)
    await workers.asker.cancel(job.request)
    await eventually(lambda: clean(workers), "everything given back", timeout_s=1)
    await workers.asker.ask(workers.p1, workers.d1, prompt(20, seed=10))  # whatever was under way has arrived by now
    seen = len(answer.tokens)
    other = await workers.asker.ask(workers.p1, workers.d1, prompt(20, seed=11))
    assert len(answer.tokens) == seen and other.finish == "length"


async def test_cancelling_again_and_again_while_it_computes_leaks_nothing(
        workers: Workers, eventually: Eventually) -> None:
    for turn in range(6):
        tokens = prompt(1_500, seed=40 + turn)
        job, reserved = await workers.asker.reserve(workers.d1.id, tokens, Sampling(max_tokens=5))
        assert isinstance(reserved, Reserved)
        await workers.asker.dispatch(workers.p1.id, workers.d1.id, job, reserved)
        await eventually(lambda: workers.shells["prefill-1"].load().running == 1, "the engine computes it")
        for _ in range(3):
            await workers.asker.cancel(job.request)
        await eventually(lambda: clean(workers), "everything given back", timeout_s=2)
    assert workers.shells["prefill-1"].load().queued_tokens == 0


async def test_what_a_dead_gateway_asked_for_is_not_finished(workers: Workers, eventually: Eventually) -> None:
    async with NatsBus.connect(workers.p1.settings.nats_url, name="doomed") as bus:
        async with Asker(bus, workers.d1).open() as doomed:
            job, reserved = await doomed.reserve(workers.d1.id, prompt(30), Sampling(max_tokens=3_900))
            assert isinstance(reserved, Reserved)
            await doomed.dispatch(workers.p1.id, workers.d1.id, job, reserved)
            await eventually(lambda: len(doomed.answers[job.request].tokens) > 3)
    await eventually(lambda: clean(workers), "nobody computes for it any more", timeout_s=8)


async def test_a_cancel_that_overtakes_its_job_holds(workers: Workers, eventually: Eventually) -> None:
    from shared.ids import RequestId
    await workers.asker.cancel(RequestId("hasty"))
    await eventually(lambda: workers.shells["decode-1"]._cancelled.covers(RequestId("hasty"), 0))
    _, reply = await workers.asker.reserve(workers.d1.id, prompt(50), Sampling(max_tokens=5), request="hasty")
    assert isinstance(reply, Refused) and reply.code == "cancelled"


async def test_prompts_that_wait_for_memory_do_not_block_each_other(nats_url: str, cache: Path) -> None:
    """Prefixes of which each takes half the pool, and prompts that need more: all end, in whatever order."""
    async with open_workers(nats_url, cache, settings={"prefill-1": {"pool_bytes": 12 * 8192}}) as workers:
        prefixes = [prompt(80, seed=50 + n) for n in range(2)]
        for tokens in prefixes:
            await workers.asker.ask(workers.p1, workers.d1, tokens, max_tokens=1)
        answers = await asyncio.gather(*(
            workers.asker.ask(workers.p1, workers.d1, prefixes[n % 2] + prompt(70, seed=60 + n), max_tokens=2)
            for n in range(6)))
        assert all(answer.failure is None and len(answer.tokens) == 2 for answer in answers)


async def test_a_reservation_without_handover_ends_by_itself(workers: Workers, eventually: Eventually) -> None:
    job, reserved = await workers.asker.reserve(workers.d1.id, prompt(50), Sampling(max_tokens=5), deadline_s=0.3)
    assert isinstance(reserved, Reserved)
    await eventually(lambda: clean(workers) and not workers.d1.agent.pool.statistics().private)
    answer = workers.asker.answers[job.request]
    await eventually(lambda: answer.failure is not None)
    assert answer.failure is not None and answer.failure.code == "deadline"


async def test_what_does_not_fit_is_refused_with_the_numbers(workers: Workers) -> None:
    _, reply = await workers.asker.reserve(workers.d1.id, prompt(8_300), Sampling(max_tokens=5))
    assert isinstance(reply, Refused) and reply.code == "capacity"
    assert "519 blocks" in reply.message


async def test_a_handover_that_brings_too_little_starts_nothing(workers: Workers, eventually: Eventually) -> None:
    from shared.bus.subjects import JOB
    from shared.messages import Handover, Stages
    job, reserved = await workers.asker.reserve(workers.d1.id, prompt(50), Sampling(max_tokens=5))
    assert isinstance(reserved, Reserved)
    early = Handover(request=job.request, attempt=0, worker=workers.p1.id, first_token=7, stages=Stages())
    reply = await workers.p1.bus.request(JOB.at(worker=workers.d1.id), early, timeout_s=5)
    assert isinstance(reply, Refused) and reply.code == "incomplete"
    assert workers.asker.answers[job.request].tokens == []
    await eventually(lambda: clean(workers))


async def test_a_broken_promise_on_pace_sends_it_back(workers: Workers, eventually: Eventually) -> None:
    job, reserved = await workers.asker.reserve(workers.d1.id, prompt(50), Sampling(max_tokens=5), tbt_slo_s=1e-9)
    assert isinstance(reserved, Reserved)
    await workers.asker.dispatch(workers.p1.id, workers.d1.id, job, reserved)
    answer = workers.asker.answers[job.request]
    await asyncio.wait_for(answer.over.wait(), 5)
    assert answer.failure is not None and answer.failure.code == "tbt"
    assert (answer.failure.worker, answer.failure.blame) == ("prefill-1", "decode-1")
    await eventually(lambda: clean(workers))


async def test_full_pools_evict_preempt_and_stay_right(nats_url: str, cache: Path, eventually: Eventually) -> None:
    """Pools of a dozen blocks under eight requests at once: answers equal those of an idle cluster."""
    prompts = [prompt(30 + 7 * n, seed=20 + n) for n in range(8)]
    async with open_workers(nats_url, cache, prefills=1) as idle:
        expected = [(await idle.asker.ask(idle.p1, idle.d1, tokens, max_tokens=40)).tokens for tokens in prompts]
    async with open_workers(nats_url, cache, prefills=1, pool_bytes=14 * 8192) as workers:
        async def insist(tokens: list[int]) -> list[int]:
            while True:
                job, reserved = await workers.asker.reserve(workers.d1.id, tokens, Sampling(max_tokens=40))
                if isinstance(reserved, Refused):
                    assert reserved.code == "capacity"
                    await asyncio.sleep(0.02)
                    continue
                await workers.asker.dispatch(workers.p1.id, workers.d1.id, job, reserved)
                answer = workers.asker.answers[job.request]
                await asyncio.wait_for(answer.over.wait(), 30)
                assert answer.failure is None, answer.failure
                return answer.tokens
        got = await asyncio.gather(*(insist(tokens) for tokens in prompts))
        assert got == expected
        await eventually(lambda: clean(workers))
        for worker in workers.everybody:
            await eventually(lambda w=worker: workers.asker.announced(w.id) == {
                bytes(block.key) for block in w.agent.pool.blocks()}, f"what {worker.id} announced is what it holds")


async def test_a_sampled_answer_depends_on_the_seed_alone(workers: Workers) -> None:
    tokens = prompt(50, seed=30)
    sampled = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 20}
    one = await workers.asker.ask(workers.p1, workers.d1, tokens, seed=1, **sampled)
    again = await workers.asker.ask(workers.p2, workers.d1, tokens, seed=1, sources=[(workers.p1, 0, 3)], **sampled)
    other = await workers.asker.ask(workers.p1, workers.d1, tokens, seed=2, **sampled)
    assert one.tokens == again.tokens != other.tokens
