"""Threads for calls that block: a bounded queue in, futures of one event loop out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """One call. ``future`` ends when the call has, or when it was given up before it began."""

    def __init__(self, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.call = call
        self.future: asyncio.Future[T] = loop.create_future()
        self.abandoned = False
        """Nobody wants it any more: it does not begin, or its result is thrown away."""


class DiskThreads:
    """``count`` threads that take jobs in order. Used from one event loop, which never waits for them."""

    def __init__(self, name: str, *, count: int, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._waiting: deque[Job[Any]] = deque()
        self._ended: deque[tuple[Job[Any], Any, BaseException | None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        # Daemons: a disk that never answers must not keep the process from ending.
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Job[T] | None:
        """Runs ``call`` soon; ``None`` when ``limit`` jobs wait already."""
        job = Job(call, self._loop)
        with self._changed:
            if self._closing or len(self._waiting) >= self._limit:
                return None
            self._waiting.append(job)
            self._changed.notify()
        return job

    def abandon(self, job: Job[Any]) -> None:
        """The caller does not wait any more. A job that has not begun ends at once, cancelled."""
        job.abandoned = True
        with self._changed:
            if job not in self._waiting:
                return
            self._waiting.remove(job)
        job.future.cancel()

    def close(self, timeout_s: float) -> bool:
        """Ends the threads once all jobs are done; false when one is still busy after ``timeout_s``. Blocks."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                job = self._waiting.popleft()
            result, error = None, None
            try:
                result = job.call()
            except BaseException as raised:  # belongs to whoever waits for the job
                error = raised
            self._ended.append((job, result, error))
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return  # the loop is closed: nobody waits

    def _deliver(self) -> None:
        while self._ended:
            job, result, error = self._ended.popleft()
            if job.future.done():
                continue
            if error is not None:
                job.future.set_exception(error)
                if job.abandoned:
                    job.future.exception()  # looked at: nobody else will
            else:
                job.future.set_result(result)
