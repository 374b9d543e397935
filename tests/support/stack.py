"""A whole stack as a user starts it: ``moonbus up`` in a process of its own, found through its state file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

from shared.bus.bus import Bus
from shared.bus.nats import NatsBus
from shared.bus.subjects import WORKERS
from shared.errors import BusError
from shared.messages import WorkersQuery, WorkersReply
from shared.stack_state import StackState, find_stack
from tests.support.eventually import eventually

START_S = 180.0
"""A cold machine imports torch four times side by side."""
REBIRTH_S = 60.0


@dataclass
class RunningStack:
    """A stack that serves."""

    data_dir: Path
    url: str
    model: str
    process: asyncio.subprocess.Process
    bus: Bus

    @property
    def state(self) -> StackState:
        """What the state file says now."""
        found = find_stack(self.data_dir)
        assert found is not None
        return found

    @property
    def trace_file(self) -> Path:
        return Path(self.state.trace_file)

    def client(self) -> openai.AsyncOpenAI:
        """The real OpenAI client; close it."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def pid(self, name: str) -> int:
        """Process id of a unit."""
        unit = self.state.unit(name)
        assert unit is not None
        return unit.pid

    def kill(self, name: str, signum: int = signal.SIGKILL) -> int:
        """Sends a signal to a unit; its process id."""
        pid = self.pid(name)
        os.kill(pid, signum)
        return pid

    async def reborn(self, name: str, pid: int) -> None:
        """Waits until the supervisor has started ``name`` again and everybody knows it."""
        await eventually(lambda: self.pid(name) not in (0, pid) and self._unit_ready(name),
                         f"{name} is started again", timeout_s=REBIRTH_S)
        await self.whole()

    async def whole(self) -> None:
        """Waits until gateway and conductor know every worker as alive."""
        await eventually(self._is_whole, "every worker is alive", timeout_s=REBIRTH_S)

    async def workers(self) -> WorkersReply:
        """The cluster as the conductor sees it."""
        reply: WorkersReply = await self.bus.request(WORKERS.at(), WorkersQuery(), timeout_s=5)
        return reply

    def _unit_ready(self, name: str) -> bool:
        unit = self.state.unit(name)
        return unit is not None and unit.state == "ready"

    async def _is_whole(self) -> bool:
        try:
            async with httpx.AsyncClient() as client:
                ready = await client.get(f"{self.url}/ready", timeout=5)
            workers = await self.workers()
        except (httpx.HTTPError, BusError):
            return False
        alive = [worker for worker in workers.workers if worker.state == "alive"]
        pids = {worker.hello.pid for worker in alive}
        expected = {unit.pid for unit in self.state.units if unit.service in ("prefill", "decode")}
        return ready.status_code == 200 and expected <= pids


@asynccontextmanager
async def running_stack(data_dir: Path, *, model: str = "tiny-random", settings: Mapping[str, str] | None = None,
                        ) -> AsyncIterator[RunningStack]:
    """Starts ``moonbus up`` in ``data_dir`` on a free port; stops it with Ctrl-C and expects a clean end."""
    with (data_dir / "up.log").open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli", "up", "--model", model, "--port", "0", "--data-dir", str(data_dir),
            stdout=sink, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **(settings or {})})
    try:
        def ready() -> StackState | None:
            assert process.returncode is None, (data_dir / "up.log").read_text()
            found = find_stack(data_dir)
            return found if found is not None and found.ready else None

        up: StackState = await eventually(ready, "the stack is up", timeout_s=START_S)
        async with NatsBus.connect(up.nats_url, name="e2e") as bus:
            yield RunningStack(data_dir, up.gateway_url, up.model, process, bus)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 90) == 0, (data_dir / "up.log").read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
