"""The demonstration and the foreground stack, as a new user meets them."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from shared.stack_state import StackState, find_stack
from tests.support.eventually import eventually

START_S = 300.0
"""Six interpreters that load torch share few cores."""


@pytest.fixture(scope="module")
def cache_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="moonbus-cache-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A directory that also the unprivileged account of Postgres can reach."""
    directory = Path(tempfile.mkdtemp(prefix="moonbus-data-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", *arguments, "--model", "tiny-random", env={**os.environ, "COLUMNS": "80"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)


@asynccontextmanager
async def up(data_dir: Path, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, StackState]]:
    """A stack in the foreground of a process of its own, once it serves."""
    process = await start("up", "--data-dir", str(data_dir), *arguments)
    try:
        def serving() -> StackState | None:
            assert process.returncode is None, "it ended"
            found = find_stack(data_dir)
            return found if found is not None and found.ready else None

        yield process, await eventually(serving, "the stack serves", timeout_s=START_S)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 60)


def children_of(stack: StackState) -> list[int]:
    return [unit.pid for unit in stack.units if unit.pid]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_demo_holds_what_it_promises_and_leaves_nothing(data_dir: Path, cache_dir: Path) -> None:
    process = await start("demo", "--data-dir", str(data_dir), "--cache-dir", str(cache_dir))
    out, _ = await asyncio.wait_for(process.communicate(), START_S)
    said = out.decode()
    assert process.returncode == 0, said
    assert "token for token" in said
    assert "prefix moved in" in said and "by shm" in said
    assert "Lineage of" in said and "kv.fetch" in said
    assert str(data_dir / "trace.jsonl") in said.replace("\n", "")
    assert find_stack(data_dir) is None
    assert (data_dir / "trace.jsonl").stat().st_size > 0


async def test_up_serves_heals_and_stops(data_dir: Path, cache_dir: Path) -> None:
    async with up(data_dir, "--cache-dir", str(cache_dir), "--port", "0", "--prefill", "1", "--decode", "1") as (
            process, stack):
        async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=60) as http:
            async def answer() -> int:
                body = {"model": "tiny-random", "prompt": "hello", "max_tokens": 4, "temperature": 0}
                return (await http.post("/v1/completions", json=body)).status_code

            assert await answer() == 200
            before = stack.unit("decode-1")
            assert before is not None
            os.kill(before.pid, signal.SIGKILL)

            def restarted() -> bool:
                now = find_stack(data_dir)
                unit = now.unit("decode-1") if now is not None else None
                return unit is not None and unit.state == "ready" and unit.pid not in (0, before.pid)

            await eventually(restarted, "decode-1 is back under its name", timeout_s=START_S)

            async def answers() -> bool:
                return await answer() == 200

            await eventually(answers, "the stack serves again", timeout_s=60)
        pids = children_of(find_stack(data_dir) or stack)
        process.send_signal(signal.SIGINT)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, out.decode()
        assert "Stopped." in out.decode() and "decode-1 was ended by SIGKILL" in out.decode()
        assert all(gone(pid) for pid in pids)


async def test_a_second_signal_stops_at_once_and_a_killed_launcher_takes_everything_along(
        data_dir: Path, cache_dir: Path) -> None:
    flags = ("--cache-dir", str(cache_dir), "--port", "0", "--prefill", "1", "--decode", "1")
    async with up(data_dir, *flags) as (process, stack):
        decode = stack.unit("decode-1")
        assert decode is not None
        os.kill(decode.pid, signal.SIGSTOP)  # it will not drain, however politely asked
        process.send_signal(signal.SIGINT)

        def draining() -> bool:
            now = find_stack(data_dir)
            unit = now.unit("decode-1") if now is not None else None
            return unit is not None and unit.state == "stopping"

        await eventually(draining, "the first signal is heard", timeout_s=30)
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0
        assert all(gone(pid) for pid in children_of(stack))
    async with up(data_dir, *flags) as (process, stack):
        process.kill()
        await process.communicate()
        await eventually(lambda: all(gone(pid) for pid in children_of(stack)), "the children are gone", timeout_s=60)
        assert find_stack(data_dir) is None
