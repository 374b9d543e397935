"""A conductor process on a real NATS, with workers that own blocks and answer for them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry import context as trace_context

from shared.bus.bus import Bus, Delivery
from shared.bus.nats import NatsBus
from shared.bus.subjects import (
    DONE,
    HELLO,
    KV_EVICTED,
    KV_STORED,
    KV_SYNC,
    LOAD,
    PLACE,
    PLACED,
    REFUSE,
    ROLLCALL,
    WORKERS,
)
from shared.ids import BlockKey, GatewayId, HostId, Incarnation, RequestId, WorkerId
from shared.kv import CacheSpec, block_keys, pack_keys, root_key
from shared.messages import (
    Decision,
    Endpoint,
    Evicted,
    Hello,
    KvEvent,
    Load,
    Placement,
    PlaceRequest,
    RequestDone,
    Role,
    Since,
    SnapshotPage,
    Stored,
    StoredBlock,
    SyncEvents,
    WorkersQuery,
)
from shared.telemetry import tracing
from tests.support.command import moonbus
from tests.support.eventually import Eventually

BLOCK_TOKENS = 16
SPEC = CacheSpec(model="toy", weights_digest="w", tokenizer_digest="t", dtype="float32", layers=1, kv_heads=1,
                 head_dim=8, block_tokens=BLOCK_TOKENS, max_context=4096)
HEARTBEAT_S = 0.2
RING = 3
PAGE_BLOCKS = 4


def chain(seed: int, blocks: int) -> list[BlockKey]:
    return block_keys(root_key(SPEC, "t"), [seed * 1000 + i for i in range(blocks * BLOCK_TOKENS)], BLOCK_TOKENS)


class ScriptedWorker:
    """Says hello, beats, stores and evicts as told, and answers what others missed."""

    def __init__(self, bus: Bus, name: str, role: Role, *, life: int = 1, spec: CacheSpec = SPEC) -> None:
        self.bus, self.id, self.role, self.spec = bus, WorkerId(name), role, spec
        self.incarnation = Incarnation(f"{name}-{life}")
        self.life = life
        self.blocks: dict[BlockKey, None] = {}
        self.recent: list[KvEvent] = []
        self.seq = 0
        self.questions: list[Since] = []
        self.refusals: list[str] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ScriptedWorker]:
        subscriptions = [
            await self.bus.serve(KV_SYNC.at(worker=self.id), self._on_sync),
            await self.bus.subscribe(ROLLCALL.at(), self._on_rollcall),
            await self.bus.subscribe(REFUSE.at(worker=self.id), self._on_refuse)]
        beating = asyncio.create_task(self._beat())
        await self.hello()
        try:
            yield self
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            for subscription in subscriptions:
                await subscription.close()

    async def hello(self) -> None:
        await self.bus.publish(HELLO.at(worker=self.id), Hello(
            worker=self.id, incarnation=self.incarnation, role=self.role, spec=self.spec, capacity_blocks=1000,
            endpoint=Endpoint(worker=self.id, incarnation=self.incarnation, host=HostId("h")), max_running=8,
            started_at_s=float(self.life)))

    async def store(self, keys: list[BlockKey], *, lose: bool = False) -> None:
        self.blocks.update(dict.fromkeys(keys))
        self.seq += 1
        await self._announce(Stored(worker=self.id, incarnation=self.incarnation, seq=self.seq, spec=self.spec.digest,
                                    at_s=0.0, blocks=[self._block(key) for key in keys]), lose)

    async def evict(self, keys: list[BlockKey], *, lose: bool = False) -> None:
        for key in keys:
            self.blocks.pop(key, None)
        self.seq += 1
        await self._announce(Evicted(worker=self.id, incarnation=self.incarnation, seq=self.seq, at_s=0.0,
                                     keys=pack_keys(keys)), lose)

    async def _announce(self, event: KvEvent, lose: bool) -> None:
        self.recent = [*self.recent, event][-RING:]
        subject = KV_STORED if isinstance(event, Stored) else KV_EVICTED
        if not lose:
            await self.bus.publish(subject.at(worker=self.id), event)

    @staticmethod
    def _block(key: BlockKey) -> StoredBlock:
        return StoredBlock(key=key, parent=key, depth=0, nbytes=1)

    async def _beat(self) -> None:
        while True:
            await self.bus.publish(LOAD.at(worker=self.id), Load(
                worker=self.id, incarnation=self.incarnation, role=self.role, kv_seq=self.seq, free_blocks=1000))
            await asyncio.sleep(HEARTBEAT_S)

    async def _on_rollcall(self, delivery: Delivery) -> None:
        await self.hello()

    async def _on_refuse(self, delivery: Delivery) -> None:
        self.refusals.append(delivery.message.message)

    async def _on_sync(self, delivery: Delivery) -> SyncEvents | SnapshotPage:
        since: Since = delivery.message
        self.questions.append(since)
        missed = [event for event in self.recent if event.seq > since.seq]
        if not since.snapshot and len(missed) == self.seq - since.seq:
            return SyncEvents(worker=self.id, incarnation=self.incarnation, events=missed)
        keys = list(self.blocks)
        part = keys[since.page * PAGE_BLOCKS:(since.page + 1) * PAGE_BLOCKS]
        return SnapshotPage(worker=self.id, incarnation=self.incarnation, seq=self.seq, spec=self.spec.digest,
                            snapshot=str(self.seq), page=since.page, pages=max(1, -(-len(keys) // PAGE_BLOCKS)),
                            blocks=[self._block(key) for key in part])


class ConductorProcess:
    """``python -m services.conductor``."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any]) -> None:
        self.process, self.ready = process, ready

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def metric(self, line: str) -> float:
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"http://{self.ready['admin']}/metrics")).text
        return next((float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line)), 0.0)


Start = Callable[..., Any]


@pytest.fixture
async def start(nats_url: str) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:
        async def start(**settings: str) -> ConductorProcess:
            env = {**os.environ, "MOONBUS_NATS_URL": nats_url,
                   **{f"MOONBUS_CONDUCTOR_{name.upper()}": value for name, value in settings.items()}}
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.conductor", env=env, stdout=asyncio.subprocess.PIPE)
            stack.push_async_callback(_end, process)
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), 30)
            assert line, f"the conductor ended with {await process.wait()} before it was ready"
            return ConductorProcess(process, json.loads(line))
        yield start


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        await asyncio.wait_for(process.wait(), 15)


@pytest.fixture
async def workers(nats_url: str) -> AsyncIterator[dict[str, ScriptedWorker]]:
    roles: dict[str, Role] = {"prefill-1": "prefill", "prefill-2": "prefill", "decode-1": "decode"}
    async with NatsBus.connect(nats_url, name="workers") as bus, AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(ScriptedWorker(bus, name, role).open())
               for name, role in roles.items()}


async def indexed(bus: Bus) -> dict[str, int]:
    reply = await bus.request(WORKERS.at(), WorkersQuery(), timeout_s=5.0)
    return {state.hello.worker: state.indexed_blocks for state in reply.workers if state.state == "alive"}


def owned(workers: dict[str, ScriptedWorker]) -> dict[str, int]:
    return {name: len(worker.blocks) for name, worker in workers.items()}


async def place(bus: Bus, request: str, keys: list[BlockKey], **fields: Any) -> Any:
    return await bus.request(PLACE.at(), PlaceRequest(
        request=RequestId(request), model="toy", spec=SPEC.digest, tenant="t", num_tokens=len(keys) * BLOCK_TOKENS + 5,
        keys=pack_keys(keys), max_tokens=8, **fields), timeout_s=5.0)


async def test_it_places_where_the_blocks_are_and_a_restarted_one_does_the_same(
    start: Start, workers: dict[str, ScriptedWorker], nats_bus: NatsBus, eventually: Eventually,
) -> None:
    first = await start(conductor_id="c1")
    doc, chat = chain(1, 10), chain(2, 30)
    await workers["prefill-1"].store(doc)
    for i in range(0, 30, 5):
        await workers["decode-1"].store(chat[i:i + 5])
    await workers["decode-1"].evict(chat[25:])
    await eventually(lambda: _same(nats_bus, workers), "the index never reached what the workers own")
    before = await place(nats_bus, "r1", doc)
    assert isinstance(before, Placement)
    assert (before.prefill, before.own_blocks, before.conductor) == ("prefill-1", 10, "c1")

    await first.kill()
    await workers["prefill-2"].store(doc[:4])
    await start(conductor_id="c2")
    assert await indexed(nats_bus) == owned(workers), "ready means converged"
    after = await place(nats_bus, "r2", doc)
    assert (after.prefill, after.own_blocks, after.conductor) == ("prefill-1", 10, "c2")
    pulled = await place(nats_bus, "r3", chat[:25], exclude=[WorkerId("prefill-1")])
    assert pulled.prefill == "prefill-2" and [source.owner for source in pulled.sources] == ["decode-1"]


async def test_lost_events_are_asked_for_once(
    start: Start, workers: dict[str, ScriptedWorker], nats_bus: NatsBus, eventually: Eventually,
) -> None:
    conductor = await start()
    owner, doc = workers["prefill-1"], chain(3, 12)
    await owner.store(doc[:4])
    await eventually(lambda: _same(nats_bus, workers))
    owner.questions.clear()
    await owner.store(doc[4:8], lose=True)
    await owner.evict(doc[:1])
    await eventually(lambda: _same(nats_bus, workers), "the gap was never closed")
    assert [question.seq for question in owner.questions] == [1]
    for key in doc[8:]:
        await owner.store([key], lose=True)  # more than the owner's ring remembers: only a snapshot helps
    await eventually(lambda: _same(nats_bus, workers), "the heartbeat did not show the loss")
    assert [question.page for question in owner.questions] == [0, 0, 1, 2]
    await eventually(lambda: _is(conductor, 'moonbus_conductor_resyncs_total{why="gap",worker="prefill-1"}', 2.0))


async def test_a_worker_that_restarts_under_its_id_is_another_one(
    start: Start, nats_bus: NatsBus, eventually: Eventually,
) -> None:
    await start()
    async with ScriptedWorker(nats_bus, "prefill-1", "prefill").open() as old:
        await old.store(chain(4, 6))
        await eventually(lambda: _same(nats_bus, {"prefill-1": old}))
    async with ScriptedWorker(nats_bus, "prefill-1", "prefill", life=2).open() as new:
        await eventually(lambda: _same(nats_bus, {"prefill-1": new}))
        await new.store(chain(5, 2))
        await eventually(lambda: _same(nats_bus, {"prefill-1": new}))


async def test_a_worker_with_another_cache_spec_is_refused(
    start: Start, workers: dict[str, ScriptedWorker], nats_bus: NatsBus, eventually: Eventually,
) -> None:
    await start()
    other = msgspec.structs.replace(SPEC, weights_digest="retrained")
    async with ScriptedWorker(nats_bus, "prefill-9", "prefill", spec=other).open() as stranger:
        await eventually(lambda: stranger.refusals)
        assert "weights_digest: w here, retrained there" in stranger.refusals[0]


async def test_replicas_hear_each_others_decisions(
    start: Start, workers: dict[str, ScriptedWorker], nats_bus: NatsBus, eventually: Eventually,
) -> None:
    conductors = [await start(conductor_id=f"c{i}") for i in range(2)]
    announced: list[Any] = []

    async def on_placed(delivery: Delivery) -> None:
        announced.append(delivery.message)

    listening = await nats_bus.subscribe(PLACED.at(), on_placed)
    answers = [await place(nats_bus, f"r{i}", chain(50 + i, 40)) for i in range(12)]
    assert {answer.conductor for answer in answers} == {"c0", "c1"}, "a queue group shares the work"
    await eventually(lambda: len(announced) == 12)
    for conductor in conductors:
        await eventually(partial(_is, conductor, "moonbus_conductor_in_flight_requests", 12.0))
    await listening.close()


async def test_what_was_promised_is_held_against_what_came_of_it(
    start: Start, workers: dict[str, ScriptedWorker], nats_bus: NatsBus, eventually: Eventually,
) -> None:
    conductor = await start(conductor_id="c1")
    promised = await place(nats_bus, "r1", chain(70, 4))
    await nats_bus.publish(DONE.at(), RequestDone(
        request=RequestId("r1"), gateway=GatewayId("g"), model="toy", spec=SPEC.digest, tenant="t", received_at_s=0.0,
        outcome="ok", prompt_tokens=promised.hit_tokens + 69, hit_tokens=promised.hit_tokens, conductor="c1",
        ttft_s=0.5 + 2 * promised.predicted_ttft_s, tbt_s=0.8 * promised.predicted_tbt_s, completion_tokens=3,
        decisions=[Decision(attempt=0, at_s=0.5, answer=promised)]))
    reply = await nats_bus.request(WORKERS.at(), WorkersQuery(), timeout_s=5.0)
    (advice,) = reply.advice
    assert (advice.model, advice.prefill, advice.decode, advice.is_wrong) == ("toy", 2, 1, False)
    assert reply.index.dropped == 0 < reply.index.max_block_copies
    advised = 'moonbus_conductor_advised_workers{model="toy",role="prefill"}'
    await eventually(partial(_is, conductor, advised, 2.0))
    error = "moonbus_conductor_prediction_relative_error"
    for of, above, up_to in (("ttft", "0.5", "2.0"), ("tbt", "-0.25", "-0.1"), ("hit_tokens", "-0.05", "0.0")):
        await eventually(partial(_is, conductor, f'{error}_bucket{{le="{up_to}",of="{of}",outcome="ok"}}', 1.0))
        assert await _is(conductor, f'{error}_bucket{{le="{above}",of="{of}",outcome="ok"}}', 0.0)
    for name in ("predicted_tbt", "actual_tbt", "predicted_ttft", "actual_ttft"):
        assert await _is(conductor, f"moonbus_conductor_{name}_seconds_count", 1.0)


async def test_advice_is_for_people_and_programs(
    start: Start, workers: dict[str, ScriptedWorker], nats_bus: NatsBus, nats_url: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    async def advise(*flags: str) -> str:
        assert not await asyncio.to_thread(moonbus, "advise", "--nats-url", nats_url, *flags)
        return capsys.readouterr().out

    await start()
    assert "nothing to advise on" in await advise()
    await place(nats_bus, "r1", chain(71, 4))
    assert "toy: 2 prefill and 1 decode workers fit the load" in await advise()
    (one,) = json.loads(await advise("--json"))
    assert (one["model"], one["best_prefill"], one["is_wrong"]) == ("toy", 2, False)


async def test_a_full_index_is_said_and_what_does_not_fit_is_not_reused(
    start: Start, workers: dict[str, ScriptedWorker], nats_bus: NatsBus, eventually: Eventually,
    capfd: pytest.CaptureFixture[str],
) -> None:
    conductor, log = await start(max_blocks="4"), []
    await workers["prefill-1"].store(chain(80, 10))
    await eventually(partial(_is, conductor, "moonbus_conductor_index_dropped_blocks_total", 6.0))

    def said() -> bool:
        log.append(capfd.readouterr().err)
        return "index_full" in "".join(log)

    await eventually(said, "the log says that the index is full")
    assert "dropped_blocks=6" in "".join(log)
    answer = await place(nats_bus, "r1", chain(80, 10), exclude=[WorkerId("prefill-2")])
    assert (answer.prefill, answer.own_blocks) == ("prefill-1", 4)


async def test_decisions_are_spans_of_the_askers_trace(
    start: Start, workers: dict[str, ScriptedWorker], nats_bus: NatsBus, eventually: Eventually, tmp_path: Path,
) -> None:
    traces = tmp_path / "spans.jsonl"
    await start(trace_file=str(traces))
    trace = "0af7651916cd43dd8448eb211c80319c"
    token = trace_context.attach(tracing.extract({"traceparent": f"00-{trace}-b7ad6b7169203331-01"}))
    try:
        await place(nats_bus, "r1", chain(6, 3))
    finally:
        trace_context.detach(token)
    await eventually(lambda: traces.exists() and "place.decide" in traces.read_text())
    span = next(json.loads(line) for line in traces.read_text().splitlines() if "place.decide" in line)
    assert trace in json.dumps(span)
    wanted = {"moonbus.candidates", "moonbus.prefill", "moonbus.decode", "moonbus.predicted_ttft_s"}
    assert wanted <= set(span["attributes"])


async def test_policies_of_others_can_decide_too(
    start: Start, workers: dict[str, ScriptedWorker], nats_bus: NatsBus,
) -> None:
    await start(placement="round_robin", admission="none")
    answers = [await place(nats_bus, f"r{i}", chain(90, 4)) for i in range(4)]
    assert [answer.prefill for answer in answers] in (
        ["prefill-1", "prefill-2"] * 2, ["prefill-2", "prefill-1"] * 2), "whatever is cached where"


async def test_a_policy_that_nobody_has_is_one_line(nats_url: str) -> None:
    lost = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.conductor", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "MOONBUS_NATS_URL": nats_url, "MOONBUS_CONDUCTOR_PLACEMENT": "oracle"})
    out, err = await asyncio.wait_for(lost.communicate(), 30)
    assert lost.returncode == 1 and out == b""
    assert "there is no policy oracle; there are random, round_robin" in err.decode().splitlines()[-1]


async def test_a_stopped_conductor_leaves_and_a_missing_nats_is_one_line(
    start: Start, workers: dict[str, ScriptedWorker],
) -> None:
    conductor = await start()
    conductor.process.terminate()
    assert await asyncio.wait_for(conductor.process.wait(), 10) == 0
    lost = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.conductor", env={**os.environ, "MOONBUS_NATS_URL": "nats://127.0.0.1:1"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    out, err = await asyncio.wait_for(lost.communicate(), 30)
    assert lost.returncode == 1 and out == b""
    assert "127.0.0.1:1" in err.decode().splitlines()[-1] and "Traceback" not in err.decode()


async def _same(bus: Bus, workers: dict[str, ScriptedWorker]) -> bool:
    return await indexed(bus) == owned(workers)


async def _is(conductor: ConductorProcess, line: str, value: float) -> bool:
    return await conductor.metric(line) == value
