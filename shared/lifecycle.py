"""How every service lives: open, ready, serve, drain, end.

:func:`run` gives a service its loop, logs, traces, signals and admin port; the service gives it one coroutine, its
``body``. The first SIGTERM or SIGINT asks the body to drain, the second ends the process at once; a supervisor that
forwards signals must therefore start services in a session of their own, or a Ctrl-C arrives twice.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from shared.errors import UserError
from shared.settings import CommonSettings
from shared.telemetry import logs, tracing

_log = logging.getLogger(__name__)

FORCED_EXIT = 130
"""Exit code after a second signal, and of a process that does not end by itself."""
END_S = 10.0
"""A process that was told to stop and is still there so long after ``drain_s`` leaves without tidying up."""
ADMIN_CLOSE_S = 1.0
"""Longest time that open admin requests may hold up the end."""


class Lifecycle:
    """What a body sees of its process's life."""

    def __init__(self, service: str, instance: str, admin: str) -> None:
        self._service, self._instance = service, instance
        self.admin = admin
        """``host:port`` of the admin HTTP server."""
        self.stopping = asyncio.Event()
        """Set when the service shall drain and return."""
        self.was_ready = False
        """It took work at some time: there may be something to finish."""

    @property
    def is_ready(self) -> bool:
        """The service takes work."""
        return self.was_ready and not self.stopping.is_set()

    def ready(self, **facts: Any) -> None:
        """Says that the service takes work: /ready answers 200, and one JSON line with ``facts`` goes to stdout."""
        self.was_ready = True
        line = {"ready": self._service, "id": self._instance, "admin": self.admin, **facts}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        _log.info("ready", extra={"fields": {"admin": self.admin, **facts}})

    def stop(self, why: str) -> None:
        """Asks the service to drain."""
        if not self.stopping.is_set():
            _log.info("stopping", extra={"fields": {"why": why}})
            self.stopping.set()


def run(service: str, instance: str, settings: CommonSettings, body: Callable[[Lifecycle], Awaitable[None]]) -> int:
    """Runs ``body`` until it returns, and returns the process's exit code.

    0 when the body returned, also when the drain had to be cut at ``settings.drain_s``; 1 when it failed: a
    ``UserError`` as one line on stderr, anything else with its stack trace in the log. What has not ended ``END_S``
    after that is left where it stands, with the code ``FORCED_EXIT``.
    """
    last_resort = _LastResort(service)
    try:
        logs.setup(service, instance, settings.log_level)
        provider = tracing.setup(service, instance, settings)
    except UserError as error:
        return _explain(service, error)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_live(service, instance, settings, body, last_resort))
    except Exception as error:
        known = user_errors(error)
        if known:
            return _explain(service, *known)
        _log.critical("failed", exc_info=error)
        return 1
    finally:
        tracing.shut(provider)
        last_resort.cancel()
    return 0


class _LastResort:
    """Ends the process, from a thread of its own, when everything else that should has failed to."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._timer: threading.Timer | None = None

    def arm(self, after_s: float) -> None:
        """Unless :meth:`cancel` comes first."""
        self._timer = threading.Timer(after_s, self._leave, [after_s])
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """It ended by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def _leave(self, after_s: float) -> None:
        sys.stderr.write(f"{self._service}: has not ended {after_s:g} s after it was told to; leaving it at this:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(FORCED_EXIT)


def user_errors(error: BaseException) -> list[UserError]:
    """The user errors that ``error`` (which may be a group) consists of; empty when it holds anything else too."""
    if isinstance(error, UserError):
        return [error]
    if isinstance(error, BaseExceptionGroup):
        parts = [user_errors(part) for part in error.exceptions]
        return [leaf for part in parts for leaf in part] if all(parts) else []
    return []


def _explain(service: str, *errors: UserError) -> int:
    for error in errors:
        sys.stderr.write(f"{service}: {error}\n")
    sys.stderr.flush()
    return 1


async def _live(
    service: str, instance: str, settings: CommonSettings, body: Callable[[Lifecycle], Awaitable[None]],
    last_resort: _LastResort,
) -> None:
    listening = bind(settings.admin_host, settings.admin_port, what="admin port", setting="MOONBUS_ADMIN_PORT")
    host, port = listening.getsockname()[:2]
    lifecycle = Lifecycle(service, instance, f"{host}:{port}")
    admin = _AdminServer(lifecycle)
    with _signals(lifecycle):
        serving = asyncio.create_task(admin.serve([listening]), name="admin http")
        try:
            await _drive(lifecycle, settings, body, last_resort)
        finally:
            lifecycle.stopping.set()
            admin.should_exit = True
            await asyncio.wait({serving}, timeout=2 * ADMIN_CLOSE_S)
            serving.cancel()
            await asyncio.wait({serving})
            listening.close()
    _log.info("stopped")


async def _drive(
    lifecycle: Lifecycle, settings: CommonSettings, body: Callable[[Lifecycle], Awaitable[None]],
    last_resort: _LastResort,
) -> None:
    async def drive_body() -> None:
        await body(lifecycle)

    working = asyncio.create_task(drive_body(), name="body")
    stopping = asyncio.create_task(lifecycle.stopping.wait(), name="wait for stop")
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        last_resort.arm(settings.drain_s + END_S)
        if not working.done() and lifecycle.was_ready:
            await asyncio.wait({working}, timeout=settings.drain_s)
            if not working.done():
                _log.warning("drain_cut", extra={"fields": {"after_s": settings.drain_s}})
        if not working.done():  # also: it was told to stop while it started, and has nothing to finish
            working.cancel()
            await asyncio.wait({working})
        if not working.cancelled():
            working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait({working, stopping})


@contextmanager
def _signals(lifecycle: Lifecycle) -> Generator[None]:
    loop = asyncio.get_running_loop()
    seen = 0

    def on_signal(number: signal.Signals) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            sys.stderr.write(f"second {number.name}: leaving at once\n")
            sys.stderr.flush()
            os._exit(FORCED_EXIT)
        lifecycle.stop(number.name)

    watched = (signal.SIGTERM, signal.SIGINT)
    for number in watched:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in watched:
            loop.remove_signal_handler(number)


def bind(host: str, port: int, *, what: str, setting: str) -> socket.socket:
    """A socket that listens there; raises :class:`UserError` naming ``what`` it is for and the ``setting`` of it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror or error})"
        raise UserError(f"{what} {host}:{port} {why}; stop what uses it or set {setting} "
                        "(0 picks a free one)") from error
    listening.setblocking(False)
    return listening


class HttpServer(uvicorn.Server):
    """uvicorn inside a service: signals are the lifecycle's business."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _AdminServer(HttpServer):
    """/health, /ready and /metrics."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        super().__init__(uvicorn.Config(
            self._app, interface="asgi3", log_config=None, access_log=False, lifespan="off", ws="none",
            proxy_headers=False, server_header=False,
            timeout_graceful_shutdown=int(ADMIN_CLOSE_S), timeout_keep_alive=5,
        ))

    async def _app(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]],
                   send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        status, kind, content = self._answer(scope["path"])
        await send({"type": "http.response.start", "status": status,
                    "headers": [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(content))]})
        await send({"type": "http.response.body", "body": content if scope["method"] != "HEAD" else b""})

    def _answer(self, path: str) -> tuple[int, str, bytes]:
        text = "text/plain; charset=utf-8"
        if path == "/health":
            return 200, text, b"alive\n"
        if path == "/ready":
            return (200, text, b"ready\n") if self._lifecycle.is_ready else (503, text, b"not ready\n")
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest()
        return 404, text, b"here are /health, /ready and /metrics\n"
