"""Runs the units of a plan: starts them in order, waits for each, restarts what crashed, stops in reverse.

A unit starts once all units it comes ``after`` are ready; independent ones start side by side. *Ready* means:
a server is open, a task ended with exit code 0, a service printed its ready line (a JSON object with the key
``ready``) on stdout. A unit that fails before the stack was up fails the start; a service that ends later is
started again after a pause that doubles, until it crashed too often in a row. Then the supervisor gives it
up, and when no unit of the same service is left and the service is essential, ``wait`` ends with the reason.

Children are in process groups of their own, so a terminal's Ctrl-C reaches only the launcher, which then
stops them in order; and the kernel kills them when the launcher dies, however it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from services.launcher.plan import Fact, Unit
from shared.errors import UserError
from shared.units import format_seconds

State = Literal["waiting", "starting", "ready", "restarting", "failed", "stopping", "stopped"]


class Server(Protocol):
    """Something opened in the launcher that runs beside it."""

    @property
    def url(self) -> str:
        """What clients connect to; stays the same over a restart."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id; ``None`` while it does not run."""
        ...

    @property
    def running(self) -> bool:
        """Its process is there."""
        ...

    async def start(self) -> None:
        """Starts it again after it ended."""
        ...


Servers = Mapping[str, Callable[[], AbstractAsyncContextManager[Server]]]
"""{unit name: opens that server}."""

_KILL_WAIT_S = 5.0
_WATCH_S = 0.25
"""How often a server is looked at: its process ends without telling the loop."""

# Between fork and service: the kernel shall kill it when the launcher dies. An interpreter of its own rather than
# preexec_fn, which is unsafe in a process with threads.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the launcher is gone")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


class StackFailed(UserError):
    """The stack could not start, or an essential part of it is gone for good."""


@dataclass(frozen=True)
class RestartRule:
    """When a service that ended is started again."""

    first_delay_s: float = 0.5
    most_delay_s: float = 8.0
    quick_s: float = 20.0
    """A life shorter than this counts as a quick crash."""
    limit: int = 5
    """Quick crashes in a row after which it is given up."""

    def delay_s(self, quick_crashes: int) -> float | None:
        """The pause before the next start after ``quick_crashes`` in a row; ``None``: give up."""
        if quick_crashes >= self.limit:
            return None
        return min(self.most_delay_s, self.first_delay_s * 2.0 ** max(0, quick_crashes - 1))


@dataclass(frozen=True)
class UnitView:
    """One unit as others see it at a moment."""

    name: str
    service: str
    state: State
    pid: int
    restarts: int
    facts: Mapping[str, Any]
    log: str
    """Path of its log file; empty for a server."""


@dataclass
class _Running:
    """A unit and what became of it."""

    unit: Unit
    log_path: Path
    state: State = "waiting"
    process: asyncio.subprocess.Process | None = None
    server: Server | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the first readiness, for the units that come after; stays set over restarts."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Supervisor:
    """The processes of one stack. Use as an async context manager: leaving it stops everything."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        log_dir: Path,
        servers: Servers,
        rule: RestartRule | None = None,
        stop_grace_s: float = 15.0,
        on_change: Callable[[], None] = lambda: None,
        on_news: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``on_change`` is called when a view changed, ``on_news`` with a line about something unexpected."""
        self._running = {unit.name: _Running(unit, log_dir / f"{unit.name}.log") for unit in units}
        self._log_dir, self._servers, self._rule = log_dir, servers, rule or RestartRule()
        self._stop_grace_s = stop_grace_s
        self._on_change, self._on_news = on_change, on_news
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._hurry = asyncio.Event()
        self._started = False

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def views(self) -> list[UnitView]:
        """All units in the plan's order."""
        return [
            UnitView(
                name=running.unit.name, service=running.unit.service, state=running.state,
                pid=_pid(running),
                restarts=running.restarts, facts=dict(running.facts),
                log="" if running.unit.kind == "server" else str(running.log_path),
            )
            for running in self._running.values()
        ]

    def facts(self, name: str) -> Mapping[str, Any]:
        """What the unit said when it became ready; empty before that."""
        return self._running[name].facts

    async def start(self) -> None:
        """Returns when every unit is ready; raises :class:`StackFailed` on the first that cannot be."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for running in self._running.values():
            running.task = asyncio.create_task(self._tend(running), name=f"tend {running.unit.name}")
            running.task.add_done_callback(self._tended)
        ready = asyncio.create_task(self._all_ready(), name="all units ready")
        ends: set[asyncio.Future[Any]] = {ready, self._failure}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            self._started = True
        finally:
            ready.cancel()

    async def wait(self) -> None:
        """Waits for ever, or until an essential service is given up: then raises :class:`StackFailed`."""
        raise await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """Stops in reverse order, those that stop together at once; each gets SIGTERM, its grace, SIGKILL."""
        groups = itertools.groupby(
            self._running.values(), key=lambda running: running.unit.stops_with or running.unit.service)
        for group in reversed([list(group) for _, group in groups]):
            await asyncio.gather(*(self._stop(running) for running in group))

    def kill(self) -> None:
        """Gives up on grace: every child still alive gets SIGKILL at once. ``stop`` then returns soon."""
        self._hurry.set()
        for running in self._running.values():
            _signal(running.process, signal.SIGKILL)

    async def _all_ready(self) -> None:
        for running in self._running.values():
            await running.ready.wait()

    async def _tend(self, running: _Running) -> None:
        """The life of one unit, from waiting for its turn to its end."""
        for name in running.unit.after:
            await self._running[name].ready.wait()
        try:
            match running.unit.kind:
                case "server":
                    await self._tend_server(running)
                case "task":
                    await self._tend_task(running)
                case "service":
                    await self._tend_service(running)
        except StackFailed as failure:
            self._set(running, "failed")
            self._fail(failure)
        except UserError as error:
            self._set(running, "failed")
            self._fail(StackFailed(f"{running.unit.name} did not start: {error}"))

    async def _tend_server(self, running: _Running) -> None:
        self._set(running, "starting")
        async with self._servers[running.unit.name]() as server:
            running.server = server
            running.facts["url"] = server.url
            running.ready.set()
            self._set(running, "ready")
            quick_crashes, began_s = 0, time.monotonic()
            while not await _happens(running.stop, timeout_s=_WATCH_S):
                if server.running or self._hurry.is_set():
                    continue
                quick_crashes = self._count_crash(quick_crashes, began_s)
                delay_s = self._rule.delay_s(quick_crashes)
                if delay_s is None:
                    raise StackFailed(f"{running.unit.name} ended {quick_crashes} times in a row; see the logs in "
                                      f"{self._log_dir.parent / running.unit.name}")
                await self._pause(running, "ended", delay_s)
                if running.stop.is_set():
                    break
                began_s = time.monotonic()
                await server.start()
                self._set(running, "ready")
            self._set(running, "stopping")
        self._set(running, "stopped")

    async def _tend_task(self, running: _Running) -> None:
        self._set(running, "starting")
        with _open_log(running.log_path, rotate=True) as sink:
            process = await self._spawn(running, sink)
            pump = asyncio.create_task(_pump(process, running, sink), name=f"stdout of {running.unit.name}")
            try:
                async with asyncio.timeout(running.unit.start_timeout_s):
                    code = await process.wait()
                    await pump
            except TimeoutError:
                why = f"did not end within {running.unit.start_timeout_s:g} s"
                raise StackFailed(self._story(running, why)) from None
            finally:
                await self._reap(process, pump)
        if running.stop.is_set():
            self._set(running, "stopped")
        elif code != 0:
            raise StackFailed(self._story(running, "failed"))
        else:
            running.ready.set()
            self._set(running, "stopped")

    async def _tend_service(self, running: _Running) -> None:
        quick_crashes = 0
        while True:
            self._set(running, "starting" if not running.restarts else "restarting")
            began_s = time.monotonic()
            became_ready, why = await self._one_life(running, rotate=not running.restarts)
            if running.stop.is_set() or self._hurry.is_set():
                self._set(running, "stopped")
                return
            if not became_ready and not self._started:
                raise StackFailed(self._story(running, f"did not start ({why})"))
            quick_crashes = self._count_crash(quick_crashes, began_s)
            delay_s = self._rule.delay_s(quick_crashes)
            if delay_s is None:
                self._give_up(running, f"ended {quick_crashes} times in a row ({why})")
                return
            await self._pause(running, why, delay_s)
            if running.stop.is_set():
                self._set(running, "stopped")
                return

    def _count_crash(self, quick_crashes: int, began_s: float) -> int:
        return quick_crashes + 1 if time.monotonic() - began_s < self._rule.quick_s else 1

    async def _pause(self, running: _Running, why: str, delay_s: float) -> None:
        """Says that a unit ended and waits before the next start, or until it shall stop."""
        running.restarts += 1
        self._set(running, "restarting")
        self._on_news(f"{running.unit.name} {why}; starting it again in {format_seconds(delay_s)}")
        await _happens(running.stop, timeout_s=delay_s)

    async def _one_life(self, running: _Running, *, rotate: bool) -> tuple[bool, str]:
        """One process from start to end: whether it became ready, and how it ended, for a person."""
        came_up, began_s = asyncio.Event(), time.monotonic()
        with _open_log(running.log_path, rotate=rotate) as sink:
            process = await self._spawn(running, sink)
            pump = asyncio.create_task(
                _pump(process, running, sink, came_up), name=f"stdout of {running.unit.name}")
            exited = asyncio.create_task(process.wait(), name=f"end of {running.unit.name}")
            waiting = asyncio.create_task(came_up.wait(), name=f"readiness of {running.unit.name}")
            try:
                await asyncio.wait({exited, waiting}, timeout=running.unit.start_timeout_s,
                                   return_when=asyncio.FIRST_COMPLETED)
                if not came_up.is_set() and not exited.done():
                    return False, f"was not ready within {running.unit.start_timeout_s:g} s"
                if came_up.is_set():
                    running.ready.set()
                    self._set(running, "ready")
                    if running.restarts:
                        self._on_news(f"{running.unit.name} is ready again after "
                                      f"{format_seconds(time.monotonic() - began_s)}")
                code = await exited
                return came_up.is_set(), _how_it_ended(code)
            finally:
                waiting.cancel()
                await self._reap(process, pump)
                await exited

    async def _spawn(self, running: _Running, sink: BinaryIO) -> asyncio.subprocess.Process:
        unit = running.unit
        defaults = {name: self._resolve(value) for name, value in unit.defaults.items()}
        env = {name: self._resolve(value) for name, value in unit.env.items()}
        running.process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *unit.argv,
            env={**defaults, **os.environ, **env}, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=sink.fileno(), process_group=0,
        )
        self._on_change()
        return running.process

    async def _reap(self, process: asyncio.subprocess.Process, pump: asyncio.Task[None]) -> None:
        """Nothing of the process stays: killed if it still runs, its stdout read to the end or let go."""
        if process.returncode is None:
            _signal(process, signal.SIGKILL)
            await process.wait()
        # A grandchild may hold stdout open for ever; what it says is nobody's business any more.
        await asyncio.wait({pump}, timeout=0.5)
        pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pump

    def _resolve(self, value: str | Fact) -> str:
        return value if isinstance(value, str) else str(self._running[value.unit].facts[value.name])

    async def _stop(self, running: _Running) -> None:
        task = running.task
        if task is None or task.done():
            return
        running.stop.set()
        if running.state == "waiting":
            task.cancel()
        elif running.process is not None and running.process.returncode is None:
            self._set(running, "stopping")
            _signal(running.process, signal.SIGKILL if self._hurry.is_set() else signal.SIGTERM)
        hurry = asyncio.create_task(self._hurry.wait(), name="hurry")
        try:
            await asyncio.wait({task, hurry}, timeout=self._stop_grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                _signal(running.process, signal.SIGKILL)
                await asyncio.wait({task}, timeout=_KILL_WAIT_S)
        finally:
            hurry.cancel()
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def _give_up(self, running: _Running, why: str) -> None:
        self._set(running, "failed")
        story = self._story(running, why)
        left = [other for other in self._running.values()
                if other.unit.service == running.unit.service and other.state != "failed"]
        if running.unit.essential and not left:
            self._fail(StackFailed(story))
        else:
            self._on_news(f"{story}; giving it up, the rest goes on")

    def _tended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, failure: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_result(failure)

    def _set(self, running: _Running, state: State) -> None:
        running.state = state
        self._on_change()

    def _story(self, running: _Running, what: str) -> str:
        words = last_words(running.log_path, running.unit.service)
        return f"{running.unit.name} {what}{': ' + words if words else ''} (its log: {running.log_path})"


@contextlib.asynccontextmanager
async def stop_signals(kill: Callable[[], None]) -> AsyncIterator[asyncio.Event]:
    """Yields an event that the first SIGINT, SIGTERM or SIGHUP sets; each later one calls ``kill``."""
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            kill()
        stopping.set()

    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stopping
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def last_words(log_path: Path, service: str, *, tail_bytes: int = 4096) -> str:
    """A log's last line that ``service`` meant for the user (``<service>: ...``), else its last line."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - tail_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for name in (f"{service}: ", "moonbus: "):
        if addressed := [line.removeprefix(name) for line in lines if line.startswith(name)]:
            return addressed[-1]
    return lines[-1] if lines else ""


async def _pump(process: asyncio.subprocess.Process, running: _Running, sink: BinaryIO,
                came_up: asyncio.Event | None = None) -> None:
    """Reads stdout to its end: the ready line becomes the unit's facts, everything else goes to the log."""
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # a line longer than the reader's buffer: no ready line, and not worth keeping
            continue
        if not line:
            return
        facts = _ready_facts(line)
        if facts is not None and came_up is not None and not came_up.is_set():
            running.facts = facts
            came_up.set()
        else:
            with contextlib.suppress(OSError):  # a full disk loses the line, not the service
                sink.write(line)


def _ready_facts(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "ready" in value else None


def _open_log(path: Path, *, rotate: bool) -> BinaryIO:
    """Opens ``path`` for appending; ``rotate`` puts the former stack's log aside as ``.1`` first."""
    if rotate and path.exists():
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab", buffering=0)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _pid(running: _Running) -> int:
    """Of the unit's process; 0 while there is none."""
    if running.server is not None:
        return running.server.pid or 0
    return running.process.pid if running.process is not None and running.process.returncode is None else 0


async def _happens(event: asyncio.Event, *, timeout_s: float) -> bool:
    """Waits for ``event`` at most so long; whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):  # wait_for loses a cancellation that comes together with the event
            await event.wait()
    return event.is_set()


def _signal(process: asyncio.subprocess.Process | None, number: signal.Signals) -> None:
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
