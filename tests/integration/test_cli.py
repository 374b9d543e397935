"""Commands against a real bus, database and HTTP server; each runs as a process, as a person would run it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.launcher import state
from shared.bus.bus import Delivery
from shared.bus.nats import NatsBus
from shared.bus.subjects import BLOCKS, LINEAGE, STATS, WORKERS
from shared.ids import BlockKey, HostId, Incarnation, WorkerId
from shared.kv import CacheSpec
from shared.messages import (
    BlockRow,
    BlocksReply,
    Endpoint,
    Failure,
    Hello,
    LineageReply,
    Load,
    ReplicaRow,
    StatsReply,
    WorkersReply,
    WorkerState,
    WorkerStats,
)
from shared.models import describe
from shared.stack_state import StackState, find_stack, state_path

SPEC = CacheSpec(model="m", weights_digest="w", tokenizer_digest="t", dtype="float32", layers=2, kv_heads=1,
                 head_dim=8, block_tokens=16, max_context=512)
HELLO = Hello(
    worker=WorkerId("prefill-1"), incarnation=Incarnation("i"), role="prefill", spec=SPEC, capacity_blocks=9,
    max_running=1, started_at_s=1.0,
    endpoint=Endpoint(worker=WorkerId("prefill-1"), incarnation=Incarnation("i"), host=HostId("h")))


def block(depth: int, *, source: str = "") -> BlockRow:
    copy = ReplicaRow(worker="prefill-2", incarnation="i", tier="dram", stored_at_s=1.0, origin="computed",
                      source=source)
    return BlockRow(
        key=BlockKey(bytes([depth]) * 32), parent=BlockKey(bytes(32)), depth=depth, model="m", tenant="t", tokens=16,
        nbytes=1024, created_by="prefill-1", created_at_s=1.0, request="r1", hits=depth, last_used_at_s=None,
        replicas=[copy])


class Ended:
    """A command that is over."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


async def moonbus(*arguments: str, stdin: str = "", timeout_s: float = 60.0) -> Ended:
    process = await start(*arguments)
    try:
        out, err = await asyncio.wait_for(process.communicate(stdin.encode()), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", *arguments, env={**os.environ, "COLUMNS": "200"},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)


@asynccontextmanager
async def answering(bus: NatsBus, answers: dict[Any, Any]) -> AsyncIterator[list[Any]]:
    """Somebody who answers on each subject with a fixed reply; yields the questions that came."""
    asked: list[Any] = []

    def handler(reply: Any) -> Callable[[Delivery], Any]:
        async def answer(delivery: Delivery) -> Any:
            asked.append(delivery.message)
            return reply
        return answer

    subscriptions = [await bus.serve(subject.at(), handler(reply)) for subject, reply in answers.items()]
    try:
        yield asked
    finally:
        for subscription in subscriptions:
            await subscription.close()


async def test_workers(nats_url: str, nats_bus: NatsBus) -> None:
    load = Load(worker=HELLO.worker, incarnation=HELLO.incarnation, role="prefill", kv_seq=0, queued=3, free_blocks=7)
    reply = WorkersReply(conductor="conductor-1", workers=[
        WorkerState(hello=HELLO, load=load, state="suspect", silence_s=2.0, indexed_blocks=5),
        WorkerState(hello=HELLO, load=msgspec.structs.replace(load, draining=True), state="alive", silence_s=0.1,
                    indexed_blocks=0)])
    async with answering(nats_bus, {WORKERS: reply}):
        ended = await moonbus("workers", "--nats-url", nats_url)
    assert ended.code == 0, ended.err
    assert "conductor-1" in ended.out and "suspect" in ended.out and "7/9" in ended.out
    assert "draining" in ended.out and "alive" not in ended.out


async def test_workers_that_are_elastic(nats_url: str, nats_bus: NatsBus) -> None:
    load = Load(worker=HELLO.worker, incarnation=HELLO.incarnation, role="prefill", kv_seq=0, queued=3, running=4)
    other = msgspec.structs.replace(load, role="decode", queued=20, running=30)
    reply = WorkersReply(conductor="conductor-1", workers=[WorkerState(
        hello=msgspec.structs.replace(HELLO, elastic=True), load=load, other_load=other, now="decode", state="alive",
        silence_s=0.1, indexed_blocks=0)])
    async with answering(nats_bus, {WORKERS: reply}):
        ended = await moonbus("workers", "--nats-url", nats_url)
    assert ended.code == 0, ended.err
    assert all(word in ended.out.split() for word in ("now", "decode", "23", "34")), ended.out


async def test_catalog_questions(nats_url: str, nats_bus: NatsBus) -> None:
    totals = StatsReply(blocks=10, live_blocks=8, live_replicas=9, live_bytes=4096, requests=2, prompt_tokens=100,
                        hit_tokens=50, feed_pending=0,
                        workers=[WorkerStats(worker="prefill-1", role="prefill", state="alive", blocks=8, nbytes=4096)])
    chain = LineageReply(blocks=[block(0), block(1, source="prefill-1")], descendants=3)
    answers = {BLOCKS: BlocksReply(blocks=[block(1)], total=10), STATS: totals, LINEAGE: chain}
    async with answering(nats_bus, answers) as asked:
        listed = await moonbus("kv", "ls", "--nats-url", nats_url, "--order", "hot", "--limit", "5")
        counted = await moonbus("kv", "stats", "--nats-url", nats_url)
        traced = await moonbus("kv", "lineage", "0x01AB", "--nats-url", nats_url)
    assert (listed.code, counted.code, traced.code) == (0, 0, 0), listed.err + counted.err + traced.err
    assert "1 of 10 blocks" in listed.out and "01" * 6 in listed.out
    assert "50 (50%)" in counted.out
    assert "prefill-2 ← prefill-1" in traced.out and "blocks that continue it: 3" in traced.out
    assert asked[0].order == "hot" and asked[0].limit == 5
    assert asked[2].key_hex == "01ab"


async def test_a_failure_of_the_catalog_is_one_line(nats_url: str, nats_bus: NatsBus) -> None:
    async with answering(nats_bus, {LINEAGE: Failure(message="no block begins with 01ab")}):
        ended = await moonbus("kv", "lineage", "01ab", "--nats-url", nats_url)
    assert (ended.code, ended.err) == (1, "moonbus: no block begins with 01ab\n")


async def test_nobody_answers(nats_url: str) -> None:
    ended = await moonbus("workers", "--nats-url", nats_url)
    assert ended.code == 1
    assert ended.err.startswith(f"moonbus: no conductor answers on {nats_url}") and ended.err.count("\n") == 1


async def test_no_bus() -> None:
    ended = await moonbus("workers", "--nats-url", "nats://127.0.0.1:1")
    assert ended.code == 1
    assert "nats://127.0.0.1:1" in ended.err and ended.err.count("\n") == 1


async def test_the_running_stack_is_found_by_its_data_directory(
        nats_url: str, nats_bus: NatsBus, tmp_path: Path) -> None:
    reply = WorkersReply(conductor="conductor-7", workers=[])
    stack = StackState(pid=1, started_at_s=0.0, ready=True, gateway_url="http://127.0.0.1:1", nats_url=nats_url,
                       postgres_url="", model="m", trace_file="", units=[])
    async with answering(nats_bus, {WORKERS: reply}):
        with state.owning(tmp_path):
            state.write(tmp_path, stack)
            ended = await moonbus("workers", "--data-dir", str(tmp_path))
    assert ended.code == 0, ended.err
    assert "conductor-7" in ended.out


def test_a_dead_stacks_file_is_not_believed(tmp_path: Path) -> None:
    stack = StackState(pid=1, started_at_s=0.0, ready=True, gateway_url="http://127.0.0.1:1", nats_url="",
                       postgres_url="", model="m", trace_file="", units=[])
    with state.owning(tmp_path):
        state.write(tmp_path, stack)
        assert find_stack(tmp_path) == stack
        kept = state_path(tmp_path).read_bytes()
    state_path(tmp_path).write_bytes(kept)  # as a killed launcher leaves it
    assert find_stack(tmp_path) is None


async def test_two_stacks_in_one_directory_are_refused(tmp_path: Path) -> None:
    with state.owning(tmp_path):
        ended = await moonbus("up", "--data-dir", str(tmp_path), "--model", "tiny-random")
    assert ended.code == 1
    assert f"another stack runs in {tmp_path}" in ended.err and ended.err.count("\n") == 1


async def test_a_taken_port_stops_up_at_once(tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    async with taken:
        ended = await moonbus("up", "--data-dir", str(tmp_path), "--port", str(port))
    assert (ended.code, ended.err) == (
        1, f"moonbus: port {port} on 127.0.0.1 is taken; stop what uses it or choose another --port\n")


async def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    ended = await moonbus("up", "--data-dir", str(tmp_path / "data"), "--port", "0", "--model", f"{tmp_path}/nothing/")
    assert ended.code == 1
    assert "has no config.json" in ended.err and ended.err.count("\n") == 1


async def test_migrate_and_doctor(postgres_url: str, nats_url: str, tmp_path: Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONBUS_POSTGRES_URL", postgres_url)
    monkeypatch.setenv("MOONBUS_NATS_URL", nats_url)
    flags = ("--data-dir", str(tmp_path), "--cache-dir", str(tmp_path / "cache"), "--port", "0")
    before = await moonbus("doctor", *flags)
    assert before.code == 1
    assert "run moonbus migrate" in before.out and "run `moonbus models pull smollm2-135m`" in before.out
    for _ in range(2):
        migrated = await moonbus("migrate")
        assert migrated.code == 0, migrated.err
    after = await moonbus("doctor", *flags)
    assert after.code == 0, after.out
    assert f"answers at {nats_url}" in after.out


async def test_postgres_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONBUS_POSTGRES_URL", "postgresql://moonbus@127.0.0.1:1/moonbus")
    ended = await moonbus("migrate")
    assert ended.code == 1
    assert "127.0.0.1:1" in ended.err and ended.err.count("\n") == 1


async def test_pulling_a_model_is_idempotent_and_lists_it(tmp_path: Path) -> None:
    for _ in range(2):
        ended = await moonbus("models", "pull", "tiny-random", "--cache-dir", str(tmp_path))
        assert ended.code == 0, ended.err
    model = describe("tiny-random", tmp_path / "models" / "tiny-random")
    listed = await moonbus("models", "ls", "--cache-dir", str(tmp_path))
    assert "tiny-random" in listed.out and model.weights_digest[:12] in listed.out
    unknown = await moonbus("models", "pull", "no-such", "--cache-dir", str(tmp_path))
    assert unknown.code == 1 and unknown.err.splitlines()[-1].startswith("moonbus: model no-such is unknown")


async def test_chat_through_a_pipe(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request a connection: a model list, or an echo of the last message word by word."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split(":")[1]) for line in head.lower().splitlines() if "content-length" in line), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        if head.startswith("GET"):
            kind, content = "application/json", json.dumps({"data": [{"id": "m"}]})
        else:
            asked.append(body)
            words = body["messages"][-1]["content"].split()
            events = [json.dumps({"choices": [{"delta": {"content": f"<{word}>"}}]}) for word in words]
            kind, content = "text/event-stream", "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n"
                     f"content-length: {len(content)}\r\n\r\n{content}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/"
        said = "hello there\n\n/clear\nagain\n/exit\n"
        ended = await moonbus("chat", "--url", url, "--system", "Be brief.", stdin=said)
    assert (ended.code, ended.out) == (0, "<hello><there>\n<again>\n"), ended.err
    assert [message["role"] for message in asked[0]["messages"]] == ["system", "user"]
    assert [message["content"] for message in asked[1]["messages"]] == ["Be brief.", "again"]


async def test_chat_without_a_stack(tmp_path: Path) -> None:
    ended = await moonbus("chat", "--data-dir", str(tmp_path), stdin="hello\n")
    assert ended.code == 1
    assert ended.err.startswith(f"moonbus: no stack runs in {tmp_path}") and ended.err.count("\n") == 1


async def test_ctrl_c_is_130(nats_url: str, nats_bus: NatsBus) -> None:
    heard = asyncio.Event()

    async def never(delivery: Delivery) -> WorkersReply:
        heard.set()
        await asyncio.Event().wait()
        raise AssertionError

    subscription = await nats_bus.serve(WORKERS.at(), never)
    process = await start("workers", "--nats-url", nats_url)
    try:
        await asyncio.wait_for(heard.wait(), 30)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await subscription.close()
    assert (process.returncode, err) == (130, b"")
