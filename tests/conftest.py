"""Fixtures and rules of all tests.

* Settings of whoever runs the tests do not reach them: ``MOONBUS_*`` is stripped from the environment at import
  (``MOONBUS_TEST_CACHE``, where models are kept for tests, is no setting and stays).
* The folder is the tier, and the tier is a marker: ``unit``, ``contract``, ``integration``, ``e2e``.
* A test that leaves a task, a thread or a child process behind fails (all tiers but e2e).
* NATS and Postgres are real, from the wheels, one server of each a session; a test gets them empty.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import nats
import pytest
import pytest_asyncio
import uvloop

from services.launcher import embedded
from shared.bus.nats import NatsBus
from tests.support import eventually as eventually_module
from tests.support import leaks

for _name in [name for name in os.environ if name.startswith("MOONBUS_") and name != "MOONBUS_TEST_CACHE"]:
    del os.environ[_name]

TIERS = {
    "unit": "no I/O, seconds in total",
    "contract": "one body, every implementation",
    "integration": "real NATS and Postgres, one service",
    "e2e": "the whole stack",
}


def pytest_configure(config: pytest.Config) -> None:
    for tier, meaning in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {meaning}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        tier = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        if tier in TIERS:
            item.add_marker(tier)


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("e2e"):
        yield
        return
    before = leaks.Resources.now()
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("_no_task_leaks")
    yield
    leaked = before.leaked()
    if leaked:
        pytest.fail(f"left behind: {', '.join(leaked)}", pytrace=False)


@pytest_asyncio.fixture
async def _no_task_leaks() -> AsyncIterator[None]:
    yield
    leaked = await leaks.leaked_tasks()
    if leaked:
        pytest.fail(f"tasks left running: {', '.join(leaked)}", pytrace=False)


@pytest.fixture
def eventually() -> eventually_module.Eventually:
    """Waits for a condition: see :func:`tests.support.eventually.eventually`."""
    return eventually_module.eventually


@pytest.fixture(scope="session")
def server_dir() -> Iterator[Path]:
    """A directory that also the unprivileged account of Postgres can reach, which pytest's own is not."""
    directory = Path(tempfile.mkdtemp(prefix="moonbus-tests-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats_server(server_dir: Path) -> AsyncIterator[embedded.NatsServer]:
    """The session's NATS server. Do not stop it: a test about outages starts one of its own."""
    async with embedded.nats_server(server_dir / "nats") as server:
        leaks.SESSION_PROCESSES.add(server.pid)
        yield server


@pytest_asyncio.fixture
async def nats_url(nats_server: embedded.NatsServer) -> AsyncIterator[str]:
    """URL of a NATS server without streams."""
    yield nats_server.url
    client = await nats.connect(nats_server.url)
    jetstream = client.jetstream()
    for stream in await jetstream.streams_info():
        await jetstream.delete_stream(stream.config.name or "")
    await client.close()


@pytest_asyncio.fixture
async def nats_bus(nats_url: str) -> AsyncIterator[NatsBus]:
    """A bus on that server."""
    async with NatsBus.connect(nats_url, name="test") as bus:
        yield bus


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def postgres_server(server_dir: Path) -> AsyncIterator[embedded.Postgres]:
    """The session's Postgres server. Do not stop it: a test about outages starts one of its own."""
    async with embedded.postgres_server(server_dir / "postgres") as server:
        leaks.SESSION_PROCESSES.add(server.pid)
        yield server


@pytest_asyncio.fixture
async def postgres_url(postgres_server: embedded.Postgres) -> AsyncIterator[str]:
    """SQLAlchemy URL of a fresh, empty database."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield await postgres_server.create_database(name)
    await postgres_server.drop_database(name)


def pytest_asyncio_loop_factories(
        config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], AbstractEventLoop]]:
    """The loop of production, for uvloop differs in more than speed; only the launcher runs on asyncio's own."""
    return {"asyncio": asyncio.new_event_loop} if "launcher" in item.path.parts else {"uvloop": uvloop.new_event_loop}
