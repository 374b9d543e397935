"""What a test may not leave behind."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

import psutil

SETTLE_S = 2.0
"""What is about to end gets this long."""


#: process ids of servers that belong to the session, whichever test happened to start them
SESSION_PROCESSES: set[int | None] = set()


async def leaked_tasks() -> list[str]:
    """Names of the tasks of this loop that still run after ``SETTLE_S``, but the current one."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if not tasks:
        return []
    _, running = await asyncio.wait(tasks, timeout=SETTLE_S)
    return sorted(f"{task.get_name()} {task.get_coro()}" for task in running)


@dataclass(frozen=True)
class Resources:
    """Threads and child processes of this process at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[psutil.Process]

    @classmethod
    def now(cls) -> Resources:
        """Those there are."""
        return cls(frozenset(_threads()), frozenset(_children()))

    def leaked(self) -> list[str]:
        """Descriptions of those that came since and do not go within ``SETTLE_S``."""
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            threads = _threads() - self.threads
            children = _children() - self.children
            if not (threads or children) or time.monotonic() > deadline_s:
                break
            time.sleep(0.01)
        return [f"thread {thread.name}" for thread in threads] + [f"process {child}" for child in children]


def _threads() -> set[threading.Thread]:
    # The loop joins the threads of its default executor when it closes, which is after the test.
    pools = ("asyncio_", "uvloop_")
    return {thread for thread in threading.enumerate() if not thread.daemon and not thread.name.startswith(pools)}


def _children() -> set[psutil.Process]:
    found = set()
    for child in psutil.Process().children():
        if child.pid in SESSION_PROCESSES:
            continue
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child)
        except psutil.NoSuchProcess:
            continue
    return found
