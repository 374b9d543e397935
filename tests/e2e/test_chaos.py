"""Things die while requests run: nobody waits for ever, nothing ends without a word, answers stay right."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import pytest_asyncio

from shared.bus.bus import Delivery
from shared.bus.subjects import DONE, KV_STORED, LINEAGE, STATS, WORKERS
from shared.errors import BusError
from shared.messages import LineageQuery, LineageReply, RequestDone, StatsQuery, StatsReply, WorkersQuery
from tests.support.eventually import eventually
from tests.support.stack import RunningStack, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(server_dir: Path) -> AsyncIterator[RunningStack]:
    """A stack of its own: what happens to it here is nothing for the other modules.

    Its workers are elastic, one at home in prefill and two in decode: whoever dies, the others do its work.
    """
    directory = server_dir / "stack-chaos"
    directory.mkdir()
    settings = {"MOONBUS_BLOCK_TOKENS": "16", "MOONBUS_ELASTIC": "true", "MOONBUS_LAUNCHER_PREFILL": "1",
                # However slow the machine is, nothing is turned away for it, and decoding can spare a worker.
                "MOONBUS_CONDUCTOR_MAX_QUEUE_S": "600", "MOONBUS_CONDUCTOR_TBT_SLO_S": "60"}
    async with running_stack(directory, settings=settings) as running:
        yield running


@dataclass
class Outcomes:
    """How the requests of a light load ended."""

    right: int = 0
    refused: list[int] = field(default_factory=list)
    """HTTP statuses of clean errors before the first token."""
    broken: list[str] = field(default_factory=list)
    """Clean error events in the middle of an answer."""


class LightLoad:
    """A few clients that ask, one request after the other, until told to stop; every answer is checked."""

    def __init__(self, stack: RunningStack, expected: dict[str, str], *, max_tokens: int) -> None:
        self._stack, self._expected, self._max_tokens = stack, expected, max_tokens
        self._stop = asyncio.Event()
        self.outcomes = Outcomes()
        self.started = 0

    async def run(self, clients: int = 3) -> None:
        await asyncio.gather(*(self._client(n) for n in range(clients)))

    def stop(self) -> None:
        self._stop.set()

    async def _client(self, number: int) -> None:
        texts = list(self._expected)
        turn = number
        async with self._stack.client() as client:
            while not self._stop.is_set():
                turn += 1
                await self._one(client, texts[turn % len(texts)])

    async def _one(self, client: openai.AsyncOpenAI, text: str) -> None:
        self.started += 1
        answer = ""
        finish = None
        try:
            # The deadline is the point: a request that hangs fails the test here.
            async with asyncio.timeout(60):
                stream = await client.chat.completions.create(
                    model=self._stack.model, messages=[{"role": "user", "content": text}], temperature=0, stream=True,
                    max_tokens=self._max_tokens, extra_body={"ignore_eos": True})
                async for chunk in stream:
                    if chunk.choices:
                        answer += chunk.choices[0].delta.content or ""
                        finish = chunk.choices[0].finish_reason or finish
        except openai.APIStatusError as error:
            assert error.status_code in (429, 502, 503), error
            self.outcomes.refused.append(error.status_code)
            await asyncio.sleep(0.05)
            return
        except openai.APIConnectionError:
            self.outcomes.refused.append(0)  # nobody listens: the gateway itself was the victim
            await asyncio.sleep(0.05)
            return
        except httpx.HTTPError as error:
            self.outcomes.broken.append(type(error).__name__)
            return
        except openai.APIError as error:
            self.outcomes.broken.append(error.message)
            return
        assert finish == "length", "an answer ended without a word"
        assert answer == self._expected[text]
        self.outcomes.right += 1


async def expected_answers(stack: RunningStack, count: int, max_tokens: int) -> dict[str, str]:
    """Questions and their answers, as nobody disturbed gives them."""
    answers = {}
    async with stack.client() as client:
        for n in range(count):
            text = f"Question {n}. " + "The lamp is trimmed at dusk. " * 8
            reply = await client.chat.completions.create(
                model=stack.model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=max_tokens,
                extra_body={"ignore_eos": True, "cache_salt": "undisturbed"})
            answers[text] = reply.choices[0].message.content or ""
    return answers


@pytest.mark.parametrize("victim", ["prefill-1", "decode-1", "conductor", "store-manager", "gateway", "nats"])
async def test_a_killed_process_loses_no_request_silently(stack: RunningStack, victim: str) -> None:
    await stack.whole()
    load = LightLoad(stack, await expected_answers(stack, 5, 24), max_tokens=24)
    running = asyncio.create_task(load.run())
    await eventually(lambda: load.outcomes.right >= 5, "the load runs", timeout_s=60)
    pid = stack.kill(victim)
    await stack.reborn(victim, pid)
    healed = load.outcomes.right
    await eventually(lambda: load.outcomes.right >= healed + 10, "requests succeed again", timeout_s=60)
    load.stop()
    await running
    ended = load.outcomes.right + len(load.outcomes.refused) + len(load.outcomes.broken)
    assert ended == load.started
    if victim in ("conductor", "store-manager", "prefill-1"):
        # Placed again, or never needed: the client sees a pause at most.
        assert not load.outcomes.broken and not load.outcomes.refused, load.outcomes
    assert await _metric(stack.url, "moonbus_gateway_in_flight_requests") == 0


async def test_a_worker_that_stands_still_for_three_seconds_keeps_its_blocks(stack: RunningStack) -> None:
    await stack.whole()
    before = {w.hello.worker: (w.hello.incarnation, w.indexed_blocks) for w in (await stack.workers()).workers}
    assert before["prefill-1"][1] > 0
    stack.kill("prefill-1", signal.SIGSTOP)
    try:
        async def suspect() -> bool:
            states = {w.hello.worker: w.state for w in (await stack.workers()).workers}
            return states["prefill-1"] == "suspect"
        await eventually(suspect, "its silence is noticed", timeout_s=10)
        async with stack.client() as client:
            answer = await client.chat.completions.create(
                model=stack.model, messages=[{"role": "user", "content": "Still there?"}], max_tokens=3)
            assert answer.choices[0].finish_reason
    finally:
        stack.kill("prefill-1", signal.SIGCONT)
    await stack.whole()
    after = {w.hello.worker: (w.hello.incarnation, w.indexed_blocks) for w in (await stack.workers()).workers}
    assert after["prefill-1"][0] == before["prefill-1"][0]
    assert after["prefill-1"][1] >= before["prefill-1"][1]


async def test_a_conductor_that_comes_late_knows_as_much(stack: RunningStack) -> None:
    await stack.whole()

    async def indexed() -> dict[str, int]:
        try:
            reply = await stack.bus.request(WORKERS.at(), WorkersQuery(), timeout_s=2)
        except BusError:
            return {}
        return {w.hello.worker: w.indexed_blocks for w in reply.workers if w.state == "alive"}

    before = await indexed()
    await stack.reborn("conductor", stack.kill("conductor"))
    await eventually(lambda: _equal(indexed, before), f"the index is again {before}", timeout_s=20)


async def _equal(ask: object, expected: dict[str, int]) -> bool:
    return await ask() == expected  # type: ignore[operator,no-any-return]


async def test_without_postgres_requests_go_on_and_the_catalog_catches_up(stack: RunningStack) -> None:
    await stack.whole()
    #: {key of an announced block: its parent's}
    announced: dict[bytes, bytes] = {}

    async def note(delivery: Delivery) -> None:
        announced.update((block.key, block.parent) for block in delivery.message.blocks)

    asked = itertools.count()

    async def ask_on() -> None:
        async with stack.client() as client:
            while len(announced) < 300:
                answer = await client.chat.completions.create(
                    model=stack.model, temperature=0, max_tokens=20, extra_body={"ignore_eos": True},
                    messages=[{"role": "user", "content": f"Outage {next(asked)}. " + "Nothing is written. " * 20}])
                assert answer.choices[0].finish_reason == "length"

    listening = await stack.bus.subscribe(KV_STORED.any(), note)
    async with stopped_postgres(stack):
        written = await _blocks_written(stack)
        async with asyncio.timeout(20):
            await asyncio.gather(*(ask_on() for _ in range(3)))
        assert await _blocks_written(stack) == written, "Postgres was away"
    await listening.close()

    async def caught_up() -> bool:
        try:
            reply = await stack.bus.request(STATS.at(), StatsQuery(), timeout_s=10)
        except BusError:
            return False
        return isinstance(reply, StatsReply) and reply.feed_pending == 0

    await eventually(caught_up, "the feed is written", timeout_s=60)
    for deepest in announced.keys() - set(announced.values()):
        lineage = await stack.bus.request(LINEAGE.at(), LineageQuery(key_hex=deepest.hex()), timeout_s=20)
        assert isinstance(lineage, LineageReply), lineage
        assert [block.depth for block in lineage.blocks] == list(range(len(lineage.blocks))), "the chain has no hole"
        for block in lineage.blocks:
            announced.pop(block.key, None)
    assert not announced, "all of it is in the catalog"


@asynccontextmanager
async def stopped_postgres(stack: RunningStack) -> AsyncIterator[None]:
    """Stops Postgres, the processes of open connections too; not killed, or the supervisor would start it again."""
    postgres = psutil.Process(stack.pid("postgres"))
    postgres.suspend()  # first, so that it starts no more of them
    others = postgres.children(recursive=True)
    try:
        for process in others:
            process.suspend()
        yield
    finally:
        for process in (*others, postgres):
            process.resume()
    assert stack.pid("postgres") == postgres.pid


async def _blocks_written(stack: RunningStack) -> float:
    """Rows of blocks that the store-manager has written in its life."""
    unit = stack.state.unit("store-manager")
    assert unit is not None
    return await _metric(f"http://{unit.admin}", 'moonbus_store_rows_written_total{table="kv_block"}')


async def _metric(url: str, name: str) -> float:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics", timeout=5)).text
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name} "))


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
async def test_nothing_runs_on_for_a_client_that_has_gone(stack: RunningStack, stream: bool) -> None:
    await stack.whole()
    await eventually(lambda: _idle(stack), "nothing is left of earlier tests", timeout_s=10)
    ends: list[RequestDone] = []

    async def note(delivery: Delivery) -> None:
        ends.append(delivery.message)

    listening = await stack.bus.subscribe(DONE.any(), note)
    question: dict[str, Any] = {"model": stack.model, "messages": [{"role": "user", "content": "And then?"}],
                                "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        if stream:
            async with client.stream("POST", "/v1/chat/completions", json=question) as answer:
                chunks = (line async for line in answer.aiter_lines() if line.startswith("data: "))
                for _ in range(5):
                    await anext(chunks)
        else:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=question))
            await eventually(lambda: _decoding(stack), "it runs", timeout_s=10)
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled()
    await eventually(lambda: _idle(stack), "everybody has freed what it held", timeout_s=1)
    await eventually(lambda: ends, "its end is told")
    await listening.close()
    assert [end.outcome for end in ends] == ["cancelled"]


async def _decoding(stack: RunningStack) -> bool:
    return any(w.load is not None and w.hello.role == "decode" and w.load.running
               for w in (await stack.workers()).workers)


async def _idle(stack: RunningStack) -> bool:
    workers = (await stack.workers()).workers
    return (await _metric(stack.url, "moonbus_gateway_in_flight_requests") == 0
            and all(w.load is not None and w.load.queued == w.load.running == 0 for w in workers if w.state == "alive"))


async def test_a_worker_of_another_kind_is_refused_by_name(stack: RunningStack) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "serve", "prefill", "--set", "block_tokens=32", "--set", "worker_id=odd",
        "--set", "chunk_tokens=256", "--set", "model=tiny-random", "--set", f"nats_url={stack.state.nats_url}",
        "--set", "threads=1", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 1
    last = errors.decode().strip().splitlines()[-1]
    assert "odd" in last and "block_tokens: 16 here, 32 there" in last and "Traceback" not in errors.decode()


async def _tokens_of(http: httpx.AsyncClient, stack: RunningStack, prompt: Sequence[int],
                     **more: str) -> tuple[list[int], str]:
    """The answer's tokens, and who prefilled it."""
    answer = await http.post(f"{stack.url}/v1/completions", json={
        "model": stack.model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"], answer.headers["x-moonbus-prefill-worker"]


def _long_prompt(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(5, 250) for _ in range(1_200)]


async def test_a_decode_worker_prefills_while_prompts_pile_up(stack: RunningStack) -> None:
    await stack.whole()
    answers: dict[int, list[int]] = {}
    helped: list[int] = []
    seeds = itertools.count()

    async def client(http: httpx.AsyncClient) -> None:
        while not helped:
            seed = next(seeds)
            answers[seed], prefill = await _tokens_of(http, stack, _long_prompt(seed))
            if prefill != "prefill-1":
                helped.append(seed)

    async with httpx.AsyncClient(timeout=120) as http, asyncio.timeout(120):
        await asyncio.gather(*(client(http) for _ in range(8)))
        now = {worker.hello.worker: worker.now for worker in (await stack.workers()).workers}
        assert "prefill" in (now["decode-1"], now["decode-2"])
        expected, _ = await _tokens_of(http, stack, _long_prompt(helped[0]), cache_salt="reference")
    assert answers[helped[0]] == expected


async def test_a_worker_that_does_both_dies_and_nobody_gets_a_wrong_token(stack: RunningStack) -> None:
    await stack.whole()
    answers: dict[int, list[int]] = {}
    seeds = itertools.count(10_000)
    victim = ""

    async def client(http: httpx.AsyncClient) -> None:
        """Asks until somebody was killed, so that answers are under way then; what came before is not kept."""
        while not victim:
            seed = next(seeds)
            answer, _ = await _tokens_of(http, stack, _long_prompt(seed))
            if victim:
                answers[seed] = answer

    async with httpx.AsyncClient(timeout=120) as http, asyncio.timeout(170), asyncio.TaskGroup() as group:
        asking = [group.create_task(client(http)) for _ in range(6)]
        victim = await eventually(lambda: _busy(stack), "a decode worker is at work", timeout_s=90)
        pid = stack.kill(victim)
        await asyncio.wait(asking)
        await stack.reborn(victim, pid)
        assert answers and all([answer == (await _tokens_of(http, stack, _long_prompt(seed), cache_salt="reference"))[0]
                                for seed, answer in answers.items()])


async def _busy(stack: RunningStack) -> str:
    """A decode worker that has something to do."""
    loads = [(worker.hello, load) for worker in (await stack.workers()).workers
             for load in (worker.load, worker.other_load) if load is not None]
    return next((hello.worker for hello, load in loads if hello.role == "decode" and load.queued + load.running), "")
