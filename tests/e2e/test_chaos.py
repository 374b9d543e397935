"""Things die while requests run: nobody waits for ever, nothing ends without a word, answers stay right."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from shared.bus.bus import Delivery
from shared.bus.subjects import BLOCKS, KV_STORED, STATS, WORKERS
from shared.errors import BusError
from shared.messages import BlocksQuery, StatsQuery, StatsReply, WorkersQuery
from tests.support.eventually import eventually
from tests.support.stack import RunningStack, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(server_dir: Path) -> AsyncIterator[RunningStack]:
    """A stack of its own: what happens to it here is nothing for the other modules."""
    directory = server_dir / "stack-chaos"
    directory.mkdir()
    async with running_stack(directory, settings={"MOONBUS_BLOCK_TOKENS": "16"}) as running:
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
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"{stack.url}/metrics", timeout=5)).text
    in_flight = [line for line in metrics.splitlines() if line.startswith("moonbus_gateway_in_flight_requests ")]
    assert in_flight == ["moonbus_gateway_in_flight_requests 0.0"]


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
    announced: set[bytes] = set()

    async def note(delivery: Delivery) -> None:
        announced.update(block.key for block in delivery.message.blocks)

    listening = await stack.bus.subscribe(KV_STORED.any(), note)
    # Stopped, not killed: the supervisor would start a killed one again at once.
    postgres = stack.pid("postgres")
    stack.kill("postgres", signal.SIGSTOP)
    try:
        async with stack.client() as client:
            for n in range(12):
                answer = await client.chat.completions.create(
                    model=stack.model, temperature=0, max_tokens=20, extra_body={"ignore_eos": True},
                    messages=[{"role": "user", "content": f"Outage {n}. " + "Nothing is written down. " * 8}])
                assert answer.choices[0].finish_reason == "length"
    finally:
        stack.kill("postgres", signal.SIGCONT)
    assert stack.pid("postgres") == postgres
    await listening.close()
    assert len(announced) > 50

    async def caught_up() -> bool:
        try:
            reply = await stack.bus.request(STATS.at(), StatsQuery(), timeout_s=10)
        except BusError:
            return False
        return isinstance(reply, StatsReply) and reply.feed_pending == 0

    await eventually(caught_up, "the feed is written", timeout_s=60)
    assert await _catalogued(stack) >= announced


async def _catalogued(stack: RunningStack) -> set[bytes]:
    reply = await stack.bus.request(BLOCKS.at(), BlocksQuery(limit=10_000, all=True), timeout_s=20)
    return {block.key for block in reply.blocks}


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
