"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol


class Eventually(Protocol):
    """The shape of :func:`eventually`."""

    async def __call__(self, condition: Callable[[], Any | Awaitable[Any]], message: str = "", *,
                       timeout_s: float = 30.0) -> Any: ...


async def eventually(condition: Callable[[], Any | Awaitable[Any]], message: str = "", *,
                     timeout_s: float = 30.0) -> Any:
    """Asks ``condition`` (plain or async) until it is true and returns what it said.

    Fails with ``message`` and its last answer after ``timeout_s`` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.001
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {message or condition} (last answer: {answer!r})")
        await asyncio.sleep(pause_s)
        pause_s = min(0.05, pause_s * 1.5)
