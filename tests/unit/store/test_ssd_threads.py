"""Calls that block run on threads, in order, bounded; whoever waits may give up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shared.store.ssd.threads import DiskThreads


async def test_results_and_errors_come_back_in_order() -> None:
    threads = DiskThreads("test", count=1, limit=100)
    order: list[int] = []
    jobs = [threads.submit(lambda n=n: order.append(n) or n) for n in range(20)]  # type: ignore[misc, func-returns-value]
    assert [await job.future for job in jobs if job is not None] == list(range(20)) == order

    def fail() -> None:
        raise OSError(5, "disk")

    failing = threads.submit(fail)
    assert failing is not None
    with pytest.raises(OSError, match="disk"):
        await failing.future
    assert await asyncio.to_thread(threads.close, 5.0)
    assert threads.submit(fail) is None


async def test_no_more_wait_than_the_limit_and_who_waits_may_give_up() -> None:
    threads, gate = DiskThreads("test", count=1, limit=2), threading.Event()
    begun = threading.Event()

    def stall() -> str:
        begun.set()
        gate.wait()
        return "late"

    running = threads.submit(stall)
    assert running is not None
    await asyncio.to_thread(begun.wait)
    waiting = [threads.submit(lambda: "soon") for _ in range(3)]
    assert [job is None for job in waiting] == [False, False, True]
    assert waiting[0] is not None and waiting[1] is not None
    threads.abandon(waiting[0])
    assert waiting[0].future.cancelled()
    threads.abandon(running)
    assert not running.future.done(), "it has begun: its memory is in use"
    assert not await asyncio.to_thread(threads.close, 0.05)
    gate.set()
    assert await running.future == "late" and await waiting[1].future == "soon"
    assert await asyncio.to_thread(threads.close, 5.0)
