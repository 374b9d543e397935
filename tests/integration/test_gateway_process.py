"""The gateway as a process: ready line, drain on SIGTERM, one clear line when it cannot start; and its trace."""

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

from shared.models import cache_spec, describe
from tests.support.eventually import eventually
from tests.support.scripted_cluster import cluster_of
from tests.support.text_model import write_text_model

START_S = 30.0
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "the fox"}]}


@asynccontextmanager
async def process(**env: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={f"MOONBUS_{name.upper()}": str(value) for name, value in env.items()})
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()
        running._transport.close()  # type: ignore[attr-defined]  # else it is closed by the collector, with a warning


async def ready_line(running: asyncio.subprocess.Process) -> Any:
    assert running.stdout is not None
    return json.loads(await asyncio.wait_for(running.stdout.readline(), START_S))


async def test_a_life_from_ready_to_drained(nats_url: str, tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "models" / "scripted")
    spec = cache_spec(describe("scripted", path), dtype="float32", block_tokens=4)
    trace_file = tmp_path / "traces.jsonl"
    async with cluster_of(nats_url, spec) as cluster, process(
            gateway_port=0, gateway_gateway_id="gateway-7", nats_url=nats_url, cache_dir=tmp_path,
            trace_file=trace_file) as running:
        said = await ready_line(running)
        assert (said["ready"], said["id"]) == ("gateway", "gateway-7")
        async with httpx.AsyncClient(base_url=said["url"], timeout=20) as http:
            async def is_ready() -> bool:
                return (await http.get("/ready")).status_code == 200

            await eventually(is_ready, timeout_s=10.0)
            cluster.pause_at = 1
            traced = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
            async with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True},
                                   headers=traced) as response:
                assert response.headers["x-moonbus-trace-id"] == "ab" * 16
                running.send_signal(signal.SIGTERM)

                async def is_draining() -> bool:
                    return not await is_ready()

                await eventually(is_draining)
                turned_away = await http.post("/v1/chat/completions", json=BODY)
                assert (turned_away.status_code, turned_away.headers["connection"]) == (503, "close")
                assert (await http.get("/health")).status_code == 200
                cluster.go_on.set()
                assert (await response.aread()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(running.wait(), 10) == 0
        await eventually(lambda: cluster.dones)
        assert cluster.dones[0].outcome == "ok" and cluster.dones[0].trace == "ab" * 16

    spans = {span["name"]: span for span in map(json.loads, trace_file.read_text().splitlines())
             if span["trace_id"] == "ab" * 16}
    assert {"request", "tokenize", "place", "reserve", "dispatch", "first_token", "stream"} <= set(spans)
    root = spans.pop("request")
    assert root["parent_id"] == "cd" * 8 and root["attributes"]["moonbus.outcome"] == "ok"
    for name in ("tokenize", "place", "reserve", "dispatch", "first_token", "stream"):
        assert spans[name]["parent_id"] == root["span_id"], name
    assert spans["place"]["attributes"]["moonbus.prefill"] == "prefill-1"
    assert json.loads(spans["place"]["attributes"]["moonbus.candidates"]) == []


async def test_a_port_that_is_taken(nats_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with process(gateway_port=port, nats_url=nats_url, cache_dir=tmp_path) as running:
            _, errors = await asyncio.wait_for(running.communicate(), START_S)
    lines = [line for line in errors.decode().splitlines() if " info " not in line]
    assert running.returncode == 1
    assert len(lines) == 1 and f"127.0.0.1:{port} is taken" in lines[0] and "MOONBUS_GATEWAY_PORT" in lines[0]


async def test_no_nats(tmp_path: Path) -> None:
    async with process(gateway_port=0, nats_url="nats://127.0.0.1:1", cache_dir=tmp_path) as running:
        _, errors = await asyncio.wait_for(running.communicate(), START_S)
    assert running.returncode == 1
    assert "cannot reach NATS at nats://127.0.0.1:1" in errors.decode().splitlines()[-1]
