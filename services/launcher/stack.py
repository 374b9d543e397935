"""A whole stack as one call: own the data directory, start everything, do something with it, stop everything."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from services.launcher import embedded, state
from services.launcher.checks import wrong_settings
from services.launcher.plan import plan_stack
from services.launcher.ports import free_port
from services.launcher.resources import measure
from services.launcher.settings import Settings
from services.launcher.supervise import StackFailed, Supervisor, UnitView, stop_signals
from shared import sockets
from shared.bus.nats import NatsBus
from shared.bus.subjects import WORKERS
from shared.errors import BusError, ModelError, UserError
from shared.messages import WorkersQuery
from shared.models import ModelDir, local_path, resolve
from shared.stack_state import StackState, UnitState

SERVING_S = 60.0
"""Longest time from the last ready line until the gateway offers the model and the conductor knows all workers."""
_POLL_S = 0.05

TRACE_BYTES = 64 * 2**20
"""What earlier stacks left is moved aside when it is more than this."""


class Watcher(Protocol):
    """What shows a person how the stack does."""

    def changed(self, units: list[UnitView]) -> None:
        """A unit's state changed."""
        ...

    def news(self, line: str) -> None:
        """Something unexpected happened that the stack copes with."""
        ...


@dataclass(frozen=True)
class Stack:
    """A stack that serves."""

    settings: Settings
    model: ModelDir
    gateway_url: str
    nats_url: str
    postgres_url: str
    supervisor: Supervisor


def run(settings: Settings, body: Callable[[Stack], Awaitable[int]], *, watcher: Watcher) -> int | None:
    """Runs ``body`` on a fresh stack and stops it again: ``body``'s result, ``None`` when a signal ended it.

    Raises :class:`UserError` when a service would refuse its settings, before anything is started, and when the stack
    cannot start or an essential part of it is gone for good.
    """
    with state.owning(settings.data_path()):
        for wrong in wrong_settings(settings):
            raise wrong
        if not settings.trace_file:  # a file the user named is the user's to keep short
            rotate(settings.trace_path)
        settings = msgspec.structs.replace(settings, port=check_port(settings.host, settings.port))
        model = fetch_model(settings)
        return asyncio.run(_run(settings, model, body, watcher))


def rotate(trace: Path) -> None:
    """Moves ``trace.jsonl`` to ``trace.1.jsonl``, over an older one, if it is large. No service may have it open."""
    try:
        if trace.stat().st_size > TRACE_BYTES:
            trace.replace(trace.with_suffix(f".1{trace.suffix}"))
    except FileNotFoundError:
        pass  # the first stack here
    except OSError as error:
        raise UserError(f"cannot move {trace}, the spans of earlier stacks, aside: {error.strerror}; "
                        "delete it or choose another --data-dir") from error


def check_port(host: str, port: int) -> int:
    """The port the gateway is to listen on: ``port``, or a free one for 0, which then stays over its restarts.

    Raises :class:`UserError` when it could not listen there: minutes earlier than it would find out.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            port = port or free_port(host)
            probe.bind((host, port))
            return port
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {port} on {host} is taken; stop what uses it or choose another --port") from None
            why = error.strerror or str(error)
            raise UserError(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from None


def fetch_model(settings: Settings) -> ModelDir:
    """The model; pulled first, with its progress on the terminal, when it is not here."""
    try:
        return resolve(settings.model, settings.cache_path())
    except ModelError:
        if local_path(settings.model) is not None:
            raise  # a directory is as the user made it
    pull = [sys.executable, "-m", "services.cli", "models", "pull", settings.model]
    done = subprocess.run([*pull, "--cache-dir", str(settings.cache_path())], stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise UserError(f"model {settings.model} could not be fetched (see above); choose another --model")
    return resolve(settings.model, settings.cache_path())


async def _run(settings: Settings, model: ModelDir, body: Callable[[Stack], Awaitable[int]],
               watcher: Watcher) -> int | None:
    started_at_s = time.time()
    serving = False

    unwritten = ""

    def changed() -> None:
        nonlocal unwritten
        views = supervisor.views()
        watcher.changed(views)
        try:
            state.write(settings.data_path(), _state(settings, model, started_at_s, serving, supervisor, views))
        except OSError as error:  # others find a stack that is not quite this one; serving goes on
            if unwritten != str(error):
                watcher.news(f"{settings.data_path()} cannot be written: {error.strerror or error}; free some space")
            unwritten = str(error)

    socket_dir = sockets.SharedDirectory()
    supervisor = Supervisor(
        plan_stack(settings, measure(), python=sys.executable, socket_dir=socket_dir.path),
        log_dir=settings.log_path,
        servers={
            "nats": lambda: embedded.nats_server(settings.data_path() / "nats"),
            "postgres": lambda: embedded.postgres_server(settings.data_path() / "postgres"),
        },
        stop_grace_s=settings.drain_s + 5.0,
        on_change=changed,
        on_news=watcher.news,
    )

    async def work() -> int:
        nonlocal serving
        await supervisor.start()
        stack = Stack(
            settings=settings, model=model, gateway_url=_gateway_url(supervisor),
            nats_url=str(supervisor.facts("nats")["url"]), postgres_url=str(supervisor.facts("postgres")["url"]),
            supervisor=supervisor,
        )
        await wait_serving(stack)
        serving = True
        changed()
        return await body(stack)

    with socket_dir:
        return await _work(supervisor, work)


async def _work(supervisor: Supervisor, work: Callable[[], Coroutine[None, None, int]]) -> int | None:
    """``work`` on the supervised stack, which is stopped afterwards; ``None`` when a signal ended it."""
    async with supervisor, stop_signals(supervisor.kill) as stopping:
        working = asyncio.create_task(work(), name="work with the stack")
        interrupted = asyncio.create_task(stopping.wait(), name="wait for a signal")
        failed = asyncio.create_task(supervisor.wait(), name="wait for a failure")
        tasks: tuple[asyncio.Task[object], ...] = (working, interrupted, failed)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            return working.result() if working.done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await supervisor.stop()


async def wait_serving(stack: Stack) -> None:
    """Returns when a request would be served: the conductor knows every worker, the gateway offers the model."""
    wanted = stack.settings.prefill + stack.settings.decode + stack.settings.store
    alive, offered = 0, False
    deadline_s = time.monotonic() + SERVING_S
    async with NatsBus.connect(stack.nats_url, name="launcher") as bus, httpx.AsyncClient(timeout=2.0) as http:
        while time.monotonic() < deadline_s:
            try:
                known = await bus.request(WORKERS.at(), WorkersQuery(), timeout_s=2.0)
                alive = sum(worker.state == "alive" for worker in known.workers)
                models = (await http.get(f"{stack.gateway_url}/v1/models")).json()["data"]
                offered = any(entry["id"] == stack.model.name for entry in models)
            except (BusError, httpx.HTTPError):
                pass  # not listening yet: that is what is waited for
            if alive >= wanted and offered:
                return
            await asyncio.sleep(_POLL_S)
    raise StackFailed(f"after {SERVING_S:g} s the conductor knows {alive} of {wanted} workers and the gateway "
                      f"{'offers' if offered else 'does not offer'} {stack.model.name}; see {stack.settings.log_path}")


def _gateway_url(supervisor: Supervisor) -> str:
    return str(supervisor.facts("gateway").get("url", ""))


def _state(settings: Settings, model: ModelDir, started_at_s: float, serving: bool, supervisor: Supervisor,
           views: list[UnitView]) -> StackState:
    return StackState(
        pid=os.getpid(), started_at_s=started_at_s, ready=serving, gateway_url=_gateway_url(supervisor),
        nats_url=str(supervisor.facts("nats").get("url", "")),
        postgres_url=str(supervisor.facts("postgres").get("url", "")), model=model.name,
        trace_file=str(settings.trace_path),
        units=[
            UnitState(name=view.name, service=view.service, state=view.state, pid=view.pid,
                            admin=str(view.facts.get("admin", "")), log=view.log)
            for view in views
        ],
    )
