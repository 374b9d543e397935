"""Services that start before NATS does: they wait as long as they were told to, answer probes meanwhile, then serve."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import httpx
import pytest

from services.launcher.embedded import nats_server
from services.launcher.ports import free_port

START_S = 60.0


@pytest.mark.parametrize("name", ["gateway", "conductor", "store"])
async def test_a_service_waits_for_nats(name: str, tmp_path: Path) -> None:
    port, admin = free_port("127.0.0.1"), free_port("127.0.0.1")
    env = {"NATS_URL": f"nats://127.0.0.1:{port}", "NATS_WAIT_S": "10min", "ADMIN_PORT": str(admin),
           "GATEWAY_PORT": "0", "STORE_POOL_BYTES": "16MiB", "CACHE_DIR": str(tmp_path)}
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"services.{name}", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={f"MOONBUS_{key}": value for key, value in env.items()})
    assert running.stdout is not None and running.stderr is not None
    try:
        async with asyncio.timeout(START_S):
            while b" bus_error " not in (line := await running.stderr.readline()):
                assert line, "it ended"
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin}") as http:
                assert (await http.get("/health")).status_code == 200, "or it would be killed while it waits"
                assert (await http.get("/ready")).status_code == 503
            async with nats_server(tmp_path / "nats", port=port):
                assert json.loads(await running.stdout.readline())["ready"] == name
                running.send_signal(signal.SIGTERM)
                _, errors = await running.communicate()
                assert running.returncode == 0, errors
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()
        running._transport.close()  # type: ignore[attr-defined]  # else it is closed by the collector, with a warning
