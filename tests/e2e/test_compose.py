"""docker-compose.yml without Docker: each service's command, environment, order and health check, as local processes.

NATS and Postgres are the session's real servers, in place of the two images; what a container would see under a
path or a name of the compose network is mapped to what is there on this machine.
"""

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import yaml

from services.launcher.ports import free_port
from shared.bus.nats import NatsBus
from shared.bus.subjects import STATS
from shared.messages import StatsQuery, StatsReply
from shared.units import parse_seconds
from tests.support.eventually import eventually

COMPOSE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text())
OURS: dict[str, dict[str, Any]] = {name: it for name, it in COMPOSE["services"].items() if "build" in it}
CHOSEN = {"MOONBUS_MODEL": "tiny-random", "MOONBUS_POOL_BYTES": "64MiB", "MOONBUS_STORE_POOL_BYTES": "64MiB",
          "MOONBUS_STORE_SSD_BYTES": "128MiB"}
"""What the user of the file sets."""
HEALTH_S = 300.0


class Container:
    """One replica of a service, as a process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, env: Mapping[str, str], log: Path) -> None:
        self.name, self.process, self.env, self._log = name, process, env, log

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    async def healthy(self, check: list[str]) -> bool:
        """Runs the service's own health check in the container's environment."""
        assert self.process.returncode is None, f"{self.name} ended: {self.said()}"
        probe = await asyncio.create_subprocess_exec(
            *localised(check), env=self.env, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL)
        return await probe.wait() == 0


def interpolate(value: str) -> str:
    """``${NAME:-default}`` as compose fills it in."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: CHOSEN.get(found[1], found[2]), value)


def localised(command: list[str]) -> list[str]:
    """The images' executables as ours."""
    interpreter = {"moonbus": [sys.executable, "-m", "services.cli"], "python": [sys.executable]}
    return [*interpreter[command[0]], *(interpolate(word) for word in command[1:])]


def environment(service: Mapping[str, Any], here: Mapping[str, str]) -> dict[str, str]:
    """The container's environment with names and paths replaced by what stands for them ``here``."""
    env = {name: interpolate(value) for name, value in service["environment"].items() if value is not None}
    for name, value in env.items():
        for theirs, ours in here.items():
            value = value.replace(theirs, ours)
        env[name] = str(free_port("127.0.0.1")) if name.endswith("_PORT") else value
    return {**env, "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}


def order() -> list[str]:
    """Our services such that each comes after what it depends on."""
    graph = {name: set(service.get("depends_on", {})) & set(OURS) for name, service in OURS.items()}
    return list(TopologicalSorter(graph).static_order())


@asynccontextmanager
async def container(
        name: str, service: Mapping[str, Any], here: Mapping[str, str], log: Path) -> AsyncIterator[Container]:
    """Runs one replica; at the end it is stopped as compose would stop it, and must have ended well."""
    env = environment(service, here)
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *localised(service["command"]), env=env, stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink)
    running = Container(name, process, env, log)
    try:
        yield running
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(parse_seconds(service["stop_grace_period"])):
            assert await process.wait() == 0, running.said()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_composed_services_serve_a_request(nats_url: str, postgres_url: str, tmp_path: Path) -> None:
    database = urlsplit(postgres_url)
    here = {
        "nats://nats:4222": nats_url,
        "postgresql://moonbus:moonbus@postgres:5432/moonbus": f"postgresql://{database.netloc}{database.path}",
        "0.0.0.0": "127.0.0.1", "/models": str(tmp_path / "models"), "/data": str(tmp_path / "data"),
        "/run/moonbus": str(tmp_path / "sockets"), "/ssd": str(tmp_path / "ssd"),
    }
    for folder in ("models", "data", "sockets", "ssd"):
        (tmp_path / folder).mkdir()
    running: dict[str, list[Container]] = {}
    async with AsyncExitStack() as stack:
        for name in order():
            service = OURS[name]
            for other, wait in service.get("depends_on", {}).items():
                for replica in running.get(other, []):
                    await reach(replica, wait["condition"])
            replicas = service.get("deploy", {}).get("replicas", 1)
            running[name] = [
                await stack.enter_async_context(container(name, service, here, tmp_path / f"{name}-{number}.log"))
                for number in range(replicas)
            ]
        for name, replicas in running.items():
            if OURS[name]["restart"] != "no":
                for replica in replicas:
                    await reach(replica, "service_healthy")

        gateway = f"http://127.0.0.1:{running['gateway'][0].env['MOONBUS_GATEWAY_PORT']}"
        async with openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as client:
            async def offered() -> bool:
                return [model.id async for model in client.models.list()] == ["tiny-random"]

            await eventually(offered, "the gateway offers the model", timeout_s=30)
            answers = [
                await client.completions.create(model="tiny-random", prompt="ferry " * 40, max_tokens=8, temperature=0)
                for _ in range(2)
            ]
        assert answers[0].choices[0].text == answers[1].choices[0].text
        assert answers[0].usage is not None and answers[0].usage.completion_tokens == 8
        await the_catalog_has_both(nats_url)
        for replica in running["prefill"]:
            async with httpx.AsyncClient() as http:
                metrics = await http.get(f"http://127.0.0.1:{replica.env['MOONBUS_ADMIN_PORT']}/metrics")
            assert "moonbus_worker_jobs_total" in metrics.text


async def reach(replica: Container, condition: str) -> None:
    """Waits as compose does before it starts what depends on ``replica``."""
    if condition == "service_completed_successfully":
        async with asyncio.timeout(HEALTH_S):
            assert await replica.process.wait() == 0, replica.said()
        return
    check = OURS[replica.name]["healthcheck"]["test"]
    assert check[0] == "CMD"
    deadline_s = time.monotonic() + HEALTH_S
    while not await replica.healthy(check[1:]):
        assert time.monotonic() < deadline_s, f"{replica.name} did not become healthy: {replica.said()}"
        await asyncio.sleep(0.2)


async def the_catalog_has_both(nats_url: str) -> None:
    """store-manager wrote both requests."""

    async with NatsBus.connect(nats_url, name="test") as bus:
        async def both() -> bool:
            reply = await bus.request(STATS.at(), StatsQuery(), timeout_s=5.0)
            return isinstance(reply, StatsReply) and reply.requests == 2

        await eventually(both, "both requests are in the catalog", timeout_s=30)
