"""Small services for the lifecycle's tests.

``python -m tests.support.lives BODY ADMIN_PORT DRAIN_S TRACE_FILE OTLP``
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

from opentelemetry import trace

import shared.lifecycle
from shared.errors import Unavailable
from shared.lifecycle import Lifecycle, run
from shared.settings import CommonSettings


async def serve(lifecycle: Lifecycle) -> None:
    with trace.get_tracer("test").start_as_current_span("start"):
        lifecycle.ready(url="http://example")
    await lifecycle.stopping.wait()


async def never_ready(lifecycle: Lifecycle) -> None:
    await lifecycle.stopping.wait()


async def end(lifecycle: Lifecycle) -> None:
    lifecycle.ready()


async def lack(lifecycle: Lifecycle) -> None:
    raise Unavailable("cannot reach the moon; build a ladder")


async def lack_in_group(lifecycle: Lifecycle) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(lack(lifecycle))


async def crash(lifecycle: Lifecycle) -> None:
    raise ZeroDivisionError("a bug of ours")


async def hang(lifecycle: Lifecycle) -> None:
    lifecycle.ready()
    await asyncio.Event().wait()


async def deaf(lifecycle: Lifecycle) -> None:
    """Loses every cancellation."""
    shared.lifecycle.END_S = 0.5
    lifecycle.ready()
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


BODIES: dict[str, Callable[[Lifecycle], Awaitable[None]]] = {
    body.__name__: body for body in (serve, never_ready, end, lack, lack_in_group, crash, hang, deaf)
}

if __name__ == "__main__":
    name, port, drain_s, trace_file, otlp = sys.argv[1:]
    settings = CommonSettings(admin_port=int(port), drain_s=float(drain_s), trace_file=trace_file,
                              otlp_endpoint=otlp)
    sys.exit(run("tester", "t-1", settings, BODIES[name]))
