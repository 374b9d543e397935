"""Load against a real HTTP server that follows a script: client, replay, and the command as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from load.cli import app
from load.client import GatewayClient, GatewayError, connect
from load.live import Progress, ReplayOptions, Stop, replay
from load.record import REPORT_FILE, RunRecord, read_run
from load.workload.prompts import Plan, Planner, Scaling, token_ids
from load.workload.traces import Arrival, read
from services.launcher import state
from shared.errors import UserError
from shared.stack_state import StackState, state_path
from tests.support.eventually import eventually
from tests.support.scripted_gateway import BLOCK_TOKENS, Script, ScriptedGateway, rejection, serving

DEADLINE_S = 30
CLI = [sys.executable, "-m", "services.cli", "load"]


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with serving(ScriptedGateway()) as served:
        yield served


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[GatewayClient]:
    async with connect(gateway.url, clock=time.monotonic, timeout_s=5.0) as connected:
        yield connected


def answer_with(gateway: ScriptedGateway, script: Script) -> None:
    gateway.script = lambda index, body: script


# The client


async def test_a_stream_is_timed_chunk_by_chunk(gateway: ScriptedGateway, client: GatewayClient) -> None:
    hold = asyncio.Event()
    answer_with(gateway, Script(chunks=["Hel", "lo", ""], hold=hold, headers={"x-moonbus-request": "r-1"}))
    asking = asyncio.create_task(client.stream("completions", model="scripted", prompt=[1, 2, 3], max_tokens=3, seed=7))
    await gateway.wait_arrived(1)
    hold.set()
    answer = await asking
    assert answer.ok and answer.finish == "length" and answer.status == 200
    assert len(answer.chunk_at) == 2  # a chunk without text is no token
    assert answer.sent_at <= answer.chunk_at[0] <= answer.chunk_at[1] <= answer.finished_at
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 3, 0)
    assert answer.headers == {"request": "r-1", "predicted-hit-tokens": "0"}
    assert gateway.requests == [{"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, "seed": 7,
                                 "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}]


async def test_chat_sends_messages_and_reads_deltas(gateway: ScriptedGateway, client: GatewayClient) -> None:
    answer = await client.stream("chat", model="scripted", prompt="hello there", max_tokens=2)
    assert answer.ok and len(answer.chunk_at) == 2 and answer.prompt_tokens == 2
    assert gateway.requests[0]["messages"] == [{"role": "user", "content": "hello there"}]


async def test_an_answer_without_text_counts_from_its_end(gateway: ScriptedGateway, client: GatewayClient) -> None:
    answer_with(gateway, Script(chunks=[]))
    answer = await client.stream("completions", model="scripted", prompt=[1], max_tokens=1)
    assert answer.ok and answer.chunk_at == [] and answer.first_at == answer.finish_at


@pytest.mark.parametrize(("status", "code"), [(429, "ttft"), (503, "no_worker")])
async def test_a_rejection_brings_its_code_and_wait(
    gateway: ScriptedGateway, client: GatewayClient, status: int, code: str,
) -> None:
    answer_with(gateway, rejection(status, code))
    answer = await client.stream("completions", model="scripted", prompt=[1], max_tokens=1)
    assert (answer.status, answer.code, answer.message, answer.retry_after_s) == (status, code, f"not now: {code}", 2.0)
    assert not answer.ok


@pytest.mark.parametrize(("script", "code", "message"), [
    (Script(status=500, body=b"<html>oops</html>"), "http_500", "oops"),
    (rejection(429, "tbt", retry_after="Wed, 21 Oct 2026 07:28:00 GMT"), "tbt", "not now"),
    (Script(chunks=["a"], raw_after_chunks=b'data: {"error": {"message": "worker died", "code": "worker_lost"}}\n\n'),
     "worker_lost", "worker died"),
    (Script(chunks=["a"], raw_after_chunks=b"data: {nonsense\n\n"), "bad_event", "nonsense"),
    (Script(chunks=["a"], raw_after_chunks=b": bye\n\n"), "truncated", "without [DONE]"),
    (Script(chunks=["a"], break_off=True), "broken_stream", ""),
], ids=["no-openai-error", "retry-after-date", "error-event", "bad-event", "truncated", "connection-lost"])
async def test_every_bad_end_has_its_code(
    gateway: ScriptedGateway, client: GatewayClient, script: Script, code: str, message: str,
) -> None:
    answer_with(gateway, script)
    answer = await client.stream("completions", model="scripted", prompt=[1], max_tokens=1)
    assert not answer.ok and answer.code == code and message in answer.message
    assert answer.retry_after_s is None


async def test_silence_is_a_timeout_and_keeps_what_came(gateway: ScriptedGateway) -> None:
    hold = asyncio.Event()
    answer_with(gateway, Script(chunks=["a", "b"], hold=hold))
    async with connect(gateway.url, clock=time.monotonic, timeout_s=0.2) as client:
        answer = await client.stream("completions", model="scripted", prompt=[1], max_tokens=2)
    hold.set()
    assert answer.code == "timeout" and len(answer.chunk_at) == 1


async def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    async with connect(url, clock=time.monotonic) as client:
        with pytest.raises(GatewayError, match=r"no gateway answers at .*; start one with"):
            await client.models()
        answer = await client.stream("completions", model="m", prompt=[1], max_tokens=1)
    assert answer.code == "connect" and answer.status == 0


# The replay


def plans_for(arrivals: list[Arrival], scaling: Scaling | None = None) -> list[Plan]:
    planner = Planner(block_tokens=64, scaling=scaling or Scaling(max_output=4))
    return [planner.plan(arrival) for arrival in arrivals]


def arrivals(count: int, *, every_s: float = 0.0, turns: int = 5) -> list[Arrival]:
    """Chats of ``turns`` growing prompts each: a turn has the blocks of the one before it and one more."""
    found = []
    for i in range(count):
        chat, turn = divmod(i, turns)
        ids = tuple(chat * turns + block for block in range(turn + 1))
        found.append(Arrival(i, i * every_s, 64 * len(ids), 4, ids))
    return found


class Run:
    """One replay with its records."""

    def __init__(self, client: GatewayClient, plans: list[Plan], **options: Any) -> None:
        self.records: list[RunRecord] = []
        self.progress, self.stop = Progress(), Stop()
        self._going = asyncio.create_task(replay(
            client, plans, contents=lambda plan: token_ids(plan, vocabulary=range(1000), seed=0),
            options=ReplayOptions(api="completions", model="scripted", **options), clock=time.monotonic,
            write=self.records.append, progress=self.progress, stop=self.stop))

    async def ended(self) -> float:
        """Waits for the end; the duration in seconds."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._going


async def test_thirty_requests_leave_by_the_schedule_whatever_the_server_does(
    gateway: ScriptedGateway, client: GatewayClient,
) -> None:
    hold = asyncio.Event()
    gateway.script = lambda index, body: Script(hold_before=hold)  # not one answer before all are sent
    run = Run(client, plans_for(arrivals(30, every_s=0.1)), rate_scale=10.0)
    await gateway.wait_arrived(30)
    assert run.progress.sent == run.progress.in_flight == 30 and run.records == []
    hold.set()
    duration_s = await run.ended()
    assert sorted(record.index for record in run.records) == list(range(30))
    assert {record.outcome for record in run.records} == {"ok"}
    for record in run.records:
        assert record.scheduled_s == pytest.approx(record.index * 0.01)
        assert record.sent_s >= record.scheduled_s
        assert record.first_token_s is not None and record.sent_s < record.first_token_s <= record.finished_s
        assert record.prompt_tokens == record.input_tokens and record.completion_tokens == record.output_tokens == 4
        assert len(record.gaps_s) == 3
    assert duration_s >= 0.29
    assert run.progress.done == 30 and run.progress.in_flight == 0


async def test_the_server_finds_the_sharing_that_the_trace_has(gateway: ScriptedGateway, client: GatewayClient) -> None:
    plans = plans_for(arrivals(20))
    assert sum(plan.shared_tokens for plan in plans) > 0
    for plan in plans:  # one after the other, so that what comes before is there
        answer = await client.stream("completions", model="scripted", max_tokens=1,
                                     prompt=token_ids(plan, vocabulary=range(1000), seed=0))
        assert answer.cached_tokens == min(plan.shared_tokens, plan.input_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


async def test_outcomes_of_a_bad_day(gateway: ScriptedGateway, client: GatewayClient) -> None:
    def script(index: int, body: dict[str, Any]) -> Script:
        return (Script(), rejection(429, "capacity"), rejection(503, "no_worker"), Script(chunks=["x"], break_off=True),
                Script(status=500, body=b"oops"))[index % 5]

    gateway.script = script
    run = Run(client, plans_for(arrivals(10)))
    await run.ended()
    assert run.progress.outcomes == {"ok": 2, "rejected": 4, "failed": 4}
    assert {record.code for record in run.records} == {"", "capacity", "no_worker", "broken_stream", "http_500"}


async def test_the_valve_drops_and_counts(gateway: ScriptedGateway, client: GatewayClient) -> None:
    hold = asyncio.Event()
    gateway.script = lambda index, body: Script(hold_before=hold)
    run = Run(client, plans_for(arrivals(8)), max_in_flight=3)
    await gateway.wait_arrived(3)
    await eventually(lambda: len(run.records) == 5)
    assert {record.outcome for record in run.records} == {"dropped"}
    hold.set()
    await run.ended()
    assert run.progress.outcomes == {"dropped": 5, "ok": 3} and run.progress.sent == 3


async def test_first_stop_lets_requests_end_second_cancels(gateway: ScriptedGateway, client: GatewayClient) -> None:
    hold = asyncio.Event()
    gateway.script = lambda index, body: Script(hold=hold if index else None)
    run = Run(client, [*plans_for(arrivals(3)), *plans_for([Arrival(3, 1e6, 64, 4, (99,))])], grace_s=DEADLINE_S * 2.0)
    await gateway.wait_arrived(3)
    await eventually(lambda: run.progress.done == 1)
    run.stop.press()
    run.stop.press()
    await run.ended()
    hold.set()
    assert sorted(record.outcome for record in run.records) == ["interrupted", "interrupted", "ok"]
    assert all(record.finished_s >= record.sent_s for record in run.records)


async def test_grace_ends(gateway: ScriptedGateway, client: GatewayClient) -> None:
    hold = asyncio.Event()
    gateway.script = lambda index, body: Script(hold=hold)
    run = Run(client, plans_for(arrivals(1)), grace_s=0.05)
    await gateway.wait_arrived(1)
    run.stop.press()
    await run.ended()
    hold.set()
    assert [record.outcome for record in run.records] == ["interrupted"]


async def test_a_full_disk_ends_the_replay_with_its_error(gateway: ScriptedGateway, client: GatewayClient) -> None:
    def write(record: RunRecord) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        await replay(client, plans_for(arrivals(2)), contents=lambda plan: [1], clock=time.monotonic, write=write,
                     options=ReplayOptions(api="completions", model="scripted"), progress=Progress(), stop=Stop())


# The command, as a process


async def test_run_leaves_records_and_a_report(gateway: ScriptedGateway, tmp_path: Path) -> None:
    trace = write_trace(tmp_path, count=30)
    code, stdout, stderr = await cli("run", "--trace", trace, "--url", gateway.url, "--rate-scale", "100", "--ask-slo",
                                     "--length-scale", "0.1", "--max-output", "3", "--out", tmp_path / "out")
    assert code == 0, stderr
    info, records = read_run(tmp_path / "out")
    assert len(records) == 30 and {record.outcome for record in records} == {"ok"}
    assert info.model == "scripted" and info.duration_s is not None and not info.interrupted and info.planned == 30
    assert info.max_input == 4096 - 3  # from what the gateway says of the model
    assert all(isinstance(request["prompt"], list) for request in gateway.requests)
    assert (tmp_path / "out" / REPORT_FILE).stat().st_size > 10_000
    assert "30 of 30" in stdout and REPORT_FILE in stdout

    (tmp_path / "out" / REPORT_FILE).unlink()
    code, stdout, stderr = await cli("report", tmp_path / "out")
    assert code == 0 and (tmp_path / "out" / REPORT_FILE).exists(), stderr


async def test_text_prompts_are_measured_first(gateway: ScriptedGateway, tmp_path: Path) -> None:
    gateway.models = [{"id": "other"}, {"id": "scripted"}]  # neither context nor vocabulary told
    code, _, stderr = await cli("run", "--trace", write_trace(tmp_path, count=2), "--url", gateway.url, "--model",
                                "scripted", "--rate-scale", "100", "--out", tmp_path / "out",
                                MOONBUS_CACHE_DIR=str(tmp_path))
    assert code == 0, stderr
    _, records = read_run(tmp_path / "out")
    assert len(gateway.requests) == 4  # two of them to measure
    assert [record.prompt_tokens for record in records] == [record.input_tokens for record in records]


async def test_interrupted_run_keeps_its_records(gateway: ScriptedGateway, tmp_path: Path) -> None:
    hold = asyncio.Event()
    gateway.script = lambda index, body: Script(hold=hold if index == 2 else None)
    process = await start_cli("run", "--trace", write_trace(tmp_path, count=3, last_at_ms=10**7), "--url", gateway.url,
                              "--out", tmp_path / "out", "--grace", "1h")
    await gateway.wait_arrived(2)
    process.send_signal(signal.SIGINT)  # the third is hours away: nothing in flight, so this ends it
    code, _, stderr = await output(process)
    assert code == 0, stderr
    info, records = read_run(tmp_path / "out")
    assert info.interrupted and [record.outcome for record in records] == ["ok", "ok"]
    assert "stopped early: 2 of 3" in (tmp_path / "out" / REPORT_FILE).read_text()


async def test_killed_run_keeps_its_records(gateway: ScriptedGateway, tmp_path: Path) -> None:
    process = await start_cli("run", "--trace", write_trace(tmp_path, count=3, last_at_ms=10**7), "--url", gateway.url,
                              "--out", tmp_path / "out")
    rows = tmp_path / "out" / "requests.jsonl"
    await eventually(lambda: rows.exists() and rows.read_bytes().count(b"\n") == 2, timeout_s=DEADLINE_S)
    process.kill()
    await output(process)
    code, _, stderr = await cli("report", tmp_path / "out")
    assert code == 0, stderr
    assert "not brought to its end: 2 of 3" in (tmp_path / "out" / REPORT_FILE).read_text()


async def test_the_running_stack_s_gateway_is_the_default(gateway: ScriptedGateway, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    stack = StackState(pid=1, started_at_s=0.0, ready=True, gateway_url=gateway.url, nats_url="", postgres_url="",
                       model="m", trace_file="", units=[])
    command = ("run", "--trace", write_trace(tmp_path, count=1), "--out", tmp_path / "out", "--overwrite")
    with state.owning(data_dir):
        state.write(data_dir, stack)
        code, _, stderr = await cli(*command, MOONBUS_DATA_DIR=str(data_dir))
        left = state_path(data_dir).read_bytes()
    assert code == 0, stderr
    assert len(gateway.requests) == 1
    state_path(data_dir).write_bytes(left)  # as a killed launcher leaves it
    await cli(*command, MOONBUS_DATA_DIR=str(data_dir))
    assert len(gateway.requests) == 1, "a dead stack's gateway is nobody's"


@pytest.mark.parametrize(("options", "line"), [
    (["--trace", "nowhere.jsonl"], "trace nowhere.jsonl: No such file or directory"),
    (["--url", "http://127.0.0.1:{closed}"], "no gateway answers at http://127.0.0.1:{closed}"),
    (["--url", "http://10.0.0.1:8000"], "http://10.0.0.1:8000 is not on this machine; add --allow-remote"),
    (["--url", "localhost:8000"], "--url is localhost:8000; expected an address like http://127.0.0.1:8000"),
    (["--model", "gpt-9"], "does not serve model gpt-9; it serves scripted"),
    (["--slo-ttft", "soon"], "--slo-ttft: 'soon' is not a duration; write it like 250ms or 30s"),
    (["--rate-scale", "0"], "--rate-scale is 0; expected a number above 0"),
    (["--length-scale", "0.0001"], "--length-scale: length scale 0.0001 leaves less than one token"),
    (["--api", "chat", "--prompt", "tokens"], "--prompt tokens cannot go to --api chat"),
    (["--max-output", "5000"], "--max-output is 5000 and model scripted takes 4096"),
])
async def test_wrong_use_gets_one_line(
    gateway: ScriptedGateway, tmp_path: Path, options: list[str], line: str,
) -> None:
    closed = str(closed_port())
    given = [option.format(closed=closed) for option in options]
    defaults = {"--trace": str(write_trace(tmp_path, count=1)), "--url": gateway.url, "--out": str(tmp_path / "out")}
    rest = [part for name, value in defaults.items() if name not in given for part in (name, value)]
    said = await refused("run", *given, *rest)
    assert line.format(closed=closed) in said and "\n" not in said
    assert gateway.requests == []


async def test_no_model_yet(gateway: ScriptedGateway, tmp_path: Path) -> None:
    gateway.models = []
    said = await refused("run", "--trace", write_trace(tmp_path, count=1), "--url", gateway.url)
    assert "serves no model yet" in said


async def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    code, stdout, stderr = await cli("report", tmp_path)
    assert code == 1 and stdout == "" and stderr.startswith(f"moonbus: {tmp_path} holds no run")
    assert stderr.count("\n") == 1


def test_slices_of_the_reader_are_what_it_reads(tmp_path: Path) -> None:
    assert len(read(write_trace(tmp_path, count=30)).arrivals) == 30


def write_trace(directory: Path, *, count: int, last_at_ms: int | None = None) -> Path:
    """A small trace of our own: pairs of prompts where the second goes on where the first ended."""
    rows = []
    for i in range(count):
        ids = [0, 1 + i // 2 * 2] if i % 2 == 0 else [0, i // 2 * 2 + 1, i // 2 * 2 + 2]
        rows.append({"timestamp": i * 100, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids})
    if last_at_ms is not None:
        rows[-1]["timestamp"] = last_at_ms
    path = directory / "small.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def closed_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def refused(*arguments: object) -> str:
    """What the command has to say against these arguments; in this process, since it ends before the replay starts."""
    result = await asyncio.to_thread(CliRunner().invoke, app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


async def start_cli(*arguments: object, **env: str) -> asyncio.subprocess.Process:
    root = Path(__file__).parents[2]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MOONBUS_")}
    return await asyncio.create_subprocess_exec(
        *CLI, *(str(argument) for argument in arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**inherited, "PYTHONPATH": str(root), "COLUMNS": "200", **env})


async def output(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    async with asyncio.timeout(DEADLINE_S):
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout.decode(), stderr.decode()


async def cli(*arguments: object, **env: str) -> tuple[int, str, str]:
    """Runs `load` with these arguments; its exit code, stdout and stderr."""
    return await output(await start_cli(*arguments, **env))
