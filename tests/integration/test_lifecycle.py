"""A service's process as its supervisor sees it: ready line, admin port, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]


class Life:
    """A running service of :mod:`tests.support.lives`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ready_line(self) -> Any:
        assert self.process.stdout is not None
        async with asyncio.timeout(20.0):
            return json.loads(await self.process.stdout.readline())

    async def ended(self) -> tuple[int, str]:
        """Exit code and stderr."""
        assert self.process.stderr is not None
        async with asyncio.timeout(20.0):
            said = (await self.process.stderr.read()).decode()
            return await self.process.wait(), said


@asynccontextmanager
async def life(body: str, *, port: int = 0, drain_s: float = 5.0, trace_file: str = "",
               otlp: str = "") -> AsyncIterator[Life]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.lives", body, str(port), str(drain_s), trace_file, otlp, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    try:
        yield Life(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def get(admin: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(f"http://{admin}{path}")


async def test_a_service_is_ready_serves_its_admin_port_and_drains() -> None:
    async with life("serve") as service:
        line = await service.ready_line()
        assert line == {"ready": "tester", "id": "t-1", "admin": line["admin"], "url": "http://example"}
        assert (await get(line["admin"], "/health")).status_code == 200
        assert (await get(line["admin"], "/ready")).status_code == 200
        metrics = await get(line["admin"], "/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        assert "process_resident_memory_bytes" in metrics.text
        assert (await get(line["admin"], "/nothing")).status_code == 404
        service.process.send_signal(signal.SIGTERM)
        code, said = await service.ended()
    assert code == 0
    assert " info tester/t-1 ready admin=" in said
    assert " info tester/t-1 stopping why=SIGTERM" in said
    assert " info tester/t-1 stopped" in said


async def test_before_it_is_ready_it_is_alive_but_not_ready() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def health() -> int:
        try:
            return (await get(f"127.0.0.1:{port}", "/health")).status_code
        except httpx.TransportError:
            return 0

    async with life("never_ready", port=port) as service:
        await eventually(lambda: is_200(health()), "it is alive", timeout_s=20.0)
        assert (await get(f"127.0.0.1:{port}", "/ready")).status_code == 503
        service.process.send_signal(signal.SIGINT)
        assert (await service.ended())[0] == 0


async def is_200(answer: Any) -> bool:
    return bool(await answer == 200)


async def test_while_it_drains_it_is_not_ready_and_a_second_signal_ends_it_at_once() -> None:
    async with life("hang", drain_s=60.0) as service:
        line = await service.ready_line()
        service.process.send_signal(signal.SIGTERM)

        async def draining() -> bool:
            return (await get(line["admin"], "/ready")).status_code == 503

        await eventually(draining)
        assert (await get(line["admin"], "/health")).status_code == 200
        service.process.send_signal(signal.SIGTERM)
        code, said = await service.ended()
    assert code == 130
    assert "second SIGTERM" in said


async def test_a_drain_that_takes_too_long_is_cut() -> None:
    async with life("hang", drain_s=0.1) as service:
        await service.ready_line()
        service.process.send_signal(signal.SIGTERM)
        code, said = await service.ended()
    assert code == 0
    assert "drain_cut after_s=0.1" in said


async def test_what_does_not_end_is_left_where_it_stands() -> None:
    async with life("deaf", drain_s=0.1) as service:
        await service.ready_line()
        service.process.send_signal(signal.SIGTERM)
        code, said = await service.ended()
    assert code == 130
    assert "tester: has not ended 0.6 s after it was told to" in said and "most recent call first" in said


async def test_a_body_that_returns_ends_the_process() -> None:
    async with life("end") as service:
        assert (await service.ended())[0] == 0


async def test_what_a_person_can_fix_is_one_line() -> None:
    for body in ("lack", "lack_in_group"):
        async with life(body) as service:
            code, said = await service.ended()
        assert code == 1
        assert said.strip().splitlines()[-1] == "tester: cannot reach the moon; build a ladder"
        assert "Traceback" not in said


async def test_a_bug_comes_with_its_stack_trace() -> None:
    async with life("crash") as service:
        code, said = await service.ended()
    assert code == 1
    assert " critical tester/t-1 failed" in said
    assert "ZeroDivisionError: a bug of ours" in said


async def test_a_taken_admin_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with life("serve", port=port) as service:
            code, said = await service.ended()
    assert code == 1
    assert said.strip().splitlines()[-1].startswith(f"tester: admin port 127.0.0.1:{port} is taken; ")
    assert "Traceback" not in said


async def test_spans_of_several_processes_share_one_file(tmp_path: Path) -> None:
    spans = tmp_path / "traces" / "spans.jsonl"
    for _ in range(2):
        async with life("serve", trace_file=str(spans)) as service:
            await service.ready_line()
            service.process.send_signal(signal.SIGTERM)
            await service.ended()
    lines = [json.loads(line) for line in spans.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["start", "start"]
    assert set(lines[0]) == {"trace_id", "span_id", "parent_id", "name", "service", "instance", "start_s", "end_s",
                             "attributes", "status"}
    assert lines[0]["service"] == "tester"
    assert lines[0]["trace_id"] != lines[1]["trace_id"]


async def test_a_trace_collector_that_is_away_is_said_once_and_holds_up_nothing(tmp_path: Path) -> None:
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        collector = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with life("serve", trace_file=str(tmp_path / "spans.jsonl"), otlp=collector) as service:
            await service.ready_line()
            service.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(8.0):
                code, said = await service.ended()
    assert code == 0
    assert said.count("export") <= 1
    assert len((tmp_path / "spans.jsonl").read_text().splitlines()) == 1
