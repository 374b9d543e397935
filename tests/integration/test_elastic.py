"""Elastic workers on real NATS, with a real (tiny) model: prompts of others beside answers of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import groupby
from pathlib import Path

import pytest
import pytest_asyncio

from shared.bus.bus import Delivery
from shared.bus.nats import NatsBus
from shared.bus.subjects import JOB, LOAD, PROGRESS
from shared.engine.thread import Computed, Work
from shared.messages import Accepted, Inquiry, Load, Progress, Refused, Reserved, Sampling
from shared.settings import CommonSettings
from shared.worker.presence import Presence
from tests.support.eventually import Eventually
from tests.support.workers import Workers, clean, open_workers, prompt


@pytest_asyncio.fixture
async def workers(nats_url: str, cache: Path) -> AsyncIterator[Workers]:
    """prefill-1, and the elastic decode-1 and decode-2."""
    elastic = {name: {"elastic": True} for name in ("decode-1", "decode-2")}
    async with open_workers(nats_url, cache, prefills=1, decodes=2, settings=elastic) as opened:
        yield opened
        for worker in opened.everybody:
            worker.agent.pool.check_invariants()


def engine_log(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, list[float]]]:
    """What decode-1's engine does, as it is asked; and how many seconds each took."""
    asked: list[str] = []
    seconds: dict[str, list[float]] = {"step": [], "chunk": []}
    step = workers.d1.engine.step

    async def logged(works: Sequence[Work], on_layer: Callable[[int], None] | None = None) -> Computed:
        kind = "step" if on_layer is None else "chunk"
        asked.append(kind)
        computed = await step(works, on_layer)
        seconds[kind].append(computed.seconds)
        return computed

    monkeypatch.setattr(workers.d1.engine, "step", logged)
    return asked, seconds


async def test_it_prefills_for_another_while_it_decodes(
        workers: Workers, eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    own, others = prompt(40), prompt(700, seed=2)
    d1, d2 = workers.decodes
    expected = [(await workers.asker.ask(workers.p1, decode, tokens, max_tokens=count, salt="reference")).tokens
                for decode, tokens, count in ((d1, own, 200), (d2, others, 20))]
    asked, seconds = engine_log(workers, monkeypatch)
    ends: list[Progress] = []

    async def on_progress(delivery: Delivery) -> None:
        if delivery.message.stage == "finished" and delivery.message.worker == d1.id:
            ends.append(delivery.message)

    subscription = await workers.p1.bus.subscribe(PROGRESS.at(), on_progress)
    job, reserved = await workers.asker.reserve(d1.id, own, Sampling(max_tokens=200))
    assert isinstance(reserved, Reserved)
    await workers.asker.dispatch(workers.p1.id, d1.id, job, reserved)
    mine = workers.asker.answers[job.request]
    await eventually(lambda: len(mine.tokens) > 3, "it decodes")
    theirs = await workers.asker.ask(d1, d2, others, max_tokens=20)
    assert not mine.over.is_set(), "it was done before: nothing was shown"
    await asyncio.wait_for(mine.over.wait(), 20)
    assert [mine.tokens, theirs.tokens] == expected
    chunks = [len(list(group)) for kind, group in groupby(asked) if kind == "chunk"]
    assert sum(chunks) == -(-700 // 32) and max(chunks) <= 2, asked  # the engine takes turns
    await eventually(lambda: ends, "it tells what its steps took")
    await subscription.close()
    assert (ends[0].batch, ends[0].context_tokens) == (1, 140)  # 199 steps, over 41 .. 239 tokens
    assert ends[0].step_s == pytest.approx(sum(seconds["step"]) / 199), "not what it computed in between"
    assert theirs.stages is not None and theirs.stages.prefill_s == pytest.approx(sum(seconds["chunk"]))
    await eventually(lambda: clean(workers), "everything given back")


async def test_two_prefill_for_each_other(workers: Workers, eventually: Eventually) -> None:
    """Pools that hold little more than one prompt: neither waits for the other for ever."""
    d1, d2 = workers.decodes
    tokens = [prompt(300, seed=seed) for seed in range(8)]
    expected = [(await workers.asker.ask(workers.p1, d1, each, max_tokens=5, salt="reference")).tokens
                for each in tokens]
    answers = await asyncio.gather(*(
        workers.asker.ask(*((d1, d2) if n % 2 else (d2, d1)), each, max_tokens=5) for n, each in enumerate(tokens)))
    assert [answer.tokens for answer in answers] == expected
    await eventually(lambda: clean(workers))


async def test_full_pools_refuse_and_never_hang(nats_url: str, cache: Path, eventually: Eventually) -> None:
    elastic = {name: {"elastic": True, "pool_bytes": 12 * 8192} for name in ("decode-1", "decode-2")}
    async with open_workers(nats_url, cache, prefills=1, decodes=2, settings=elastic) as workers:
        d1, d2 = workers.decodes
        tokens = [prompt(80 + 5 * n, seed=20 + n) for n in range(10)]
        expected = [(await workers.asker.ask(workers.p1, d1, each, max_tokens=9, salt="reference")).tokens
                    for each in tokens]

        async def insist(number: int) -> list[int]:
            prefill, decode = (d1, d2) if number % 2 else (d2, d1)
            for attempt in range(10_000):
                job, reserved = await workers.asker.reserve(
                    decode.id, tokens[number], Sampling(max_tokens=9), request=f"{number}-{attempt}")
                if isinstance(reserved, Reserved):
                    taken = await workers.asker.dispatch(prefill.id, decode.id, job, reserved)
                    if isinstance(taken, Accepted):
                        answer = workers.asker.answers[job.request]
                        await asyncio.wait_for(answer.over.wait(), 15)
                        assert answer.failure is None, answer.failure
                        return answer.tokens
                    assert taken.code == "capacity"
                    await workers.asker.cancel(job.request)
                else:
                    assert reserved.code == "capacity"
                await asyncio.sleep(0.01)
            raise AssertionError("it was never taken")

        assert await asyncio.gather(*map(insist, range(len(tokens)))) == expected
        await eventually(lambda: clean(workers))
        for worker in workers.everybody:
            worker.agent.pool.check_invariants()


async def test_a_prompt_gets_what_a_preempted_answer_gave_up(
        nats_url: str, cache: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, pinning a prefix that it found, for an answer that cannot grow beside that: both need what is left."""
    elastic = {"decode-1": {"elastic": True, "pool_bytes": 10 * 8192}}
    async with open_workers(nats_url, cache, prefills=1, decodes=2, settings=elastic) as workers:
        d1, d2 = workers.decodes
        grows, waits = prompt(96), prompt(128, seed=2)
        expected = [(await workers.asker.ask(workers.p1, d2, tokens, max_tokens=count, salt="reference")).tokens
                    for tokens, count in ((grows, 40), (waits, 5))]
        await workers.asker.ask(workers.p1, d1, waits[:49], max_tokens=1)  # three blocks of it
        step, may_step = d1.engine.step, asyncio.Event()

        async def held(works: Sequence[Work], on_layer: Callable[[int], None] | None = None) -> object:
            await may_step.wait()
            return await step(works, on_layer)

        monkeypatch.setattr(d1.engine, "step", held)
        answers = []
        for prefill, decode, tokens, count in ((workers.p1, d1, grows, 40), (d1, d2, waits, 5)):
            job, reserved = await workers.asker.reserve(decode.id, tokens, Sampling(max_tokens=count))
            assert isinstance(reserved, Reserved)
            assert isinstance(await workers.asker.dispatch(prefill.id, decode.id, job, reserved), Accepted)
            answers.append(workers.asker.answers[job.request])
            if decode is d1:
                await eventually(lambda: answers[0].tokens, "it runs")
        await eventually(lambda: d1.room.refuses_answer() == "1 prompts wait for memory")
        may_step.set()
        await asyncio.wait_for(asyncio.gather(*(answer.over.wait() for answer in answers)), 15)
        assert [answer.tokens for answer in answers] == expected
        await eventually(lambda: clean(workers))


async def test_it_does_not_prefill_for_itself(workers: Workers, eventually: Eventually) -> None:
    job, reserved = await workers.asker.reserve(workers.d1.id, prompt(50), Sampling(max_tokens=5))
    assert isinstance(reserved, Reserved)
    reply = await workers.asker.dispatch(workers.d1.id, workers.d1.id, job, reserved)
    assert isinstance(reply, Refused) and reply.message == "decode-1 cannot prefill for itself"
    await workers.asker.cancel(job.request)
    await eventually(lambda: clean(workers))


async def test_a_cancel_ends_one_half_and_leaves_the_other(workers: Workers, eventually: Eventually) -> None:
    d1, d2 = workers.decodes
    job, reserved = await workers.asker.reserve(d2.id, prompt(2_000, seed=3), Sampling(max_tokens=5), request="one")
    assert isinstance(reserved, Reserved)
    await workers.asker.dispatch(d1.id, d2.id, job, reserved)
    again, landing = await workers.asker.reserve(d1.id, prompt(48, seed=4), Sampling(max_tokens=400), request="two")
    assert isinstance(landing, Reserved)
    await workers.asker.dispatch(workers.p1.id, d1.id, again, landing)
    answer = workers.asker.answers[again.request]
    await eventually(lambda: len(answer.tokens) > 3, "it decodes")
    bus = workers.p1.bus
    for request, stage in (("one", "waiting"), ("two", "running"), ("three", "unknown")):
        state = await bus.request(JOB.at(worker=d1.id), Inquiry(request=request, attempt=0), timeout_s=5)  # type: ignore[arg-type]
        assert state.stage == stage, request
    await workers.asker.cancel(job.request)
    await eventually(lambda: workers.other_shells["decode-1"].load().queued_tokens == 0, "its prompt is gone")
    seen = len(answer.tokens)
    await eventually(lambda: len(answer.tokens) > seen, "its answer goes on")
    await workers.asker.cancel(again.request)
    await eventually(lambda: clean(workers), "everything given back")


async def test_it_drains_both_halves(workers: Workers, eventually: Eventually) -> None:
    d1, d2 = workers.decodes
    job, reserved = await workers.asker.reserve(d1.id, prompt(40), Sampling(max_tokens=30))
    assert isinstance(reserved, Reserved)
    await workers.asker.dispatch(workers.p1.id, d1.id, job, reserved)
    theirs, landing = await workers.asker.reserve(d2.id, prompt(600, seed=2), Sampling(max_tokens=2))
    assert isinstance(landing, Reserved)
    await workers.asker.dispatch(d1.id, d2.id, theirs, landing)
    halves = (workers.shells["decode-1"], workers.other_shells["decode-1"])
    await asyncio.wait_for(asyncio.gather(*(half.drain() for half in halves)), 20)
    assert all(half.load().draining for half in halves)
    mine = workers.asker.answers[job.request]
    await eventually(lambda: mine.finish == "length" and len(mine.tokens) == 30, "its answer was finished")
    await asyncio.wait_for(workers.asker.answers[theirs.request].over.wait(), 20)
    _, refused = await workers.asker.reserve(d1.id, prompt(20), Sampling(max_tokens=3))
    assert isinstance(refused, Refused) and refused.code == "draining"


async def test_a_heartbeat_tells_the_load_of_each_role(workers: Workers, nats_url: str, eventually: Eventually) -> None:
    heard: dict[str, Load] = {}
    d1 = workers.d1

    async with NatsBus.connect(nats_url, name="listener") as bus:
        async def on_load(delivery: object) -> None:
            load: Load = delivery.message  # type: ignore[attr-defined]
            heard[load.role] = load

        subscription = await bus.subscribe(LOAD.at(worker=d1.id), on_load)
        hello = d1.hello(max_running=4)
        assert hello.elastic and not workers.p1.hello(max_running=4).elastic
        loads = [shell.load for shell in (workers.shells["decode-1"], workers.other_shells["decode-1"])]
        settings = CommonSettings(nats_url=nats_url, heartbeat_s=0.05)
        async with Presence(d1.bus, settings, hello, *loads).open():
            await eventually(lambda: len(heard) == 2)
            heard.clear()
            await eventually(lambda: len(heard) == 2, "and again")
        await subscription.close()
    assert {(load.worker, load.incarnation) for load in heard.values()} == {(d1.id, d1.incarnation)}
