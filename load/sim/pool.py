"""Tasks in several processes: what each brings as it ends, how far all are, an end in good order when interrupted.

Simulations are deterministic, so processes that share a core change nothing but how long it takes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_LOOK_S = 0.25
"""Between two looks at how far the processes are."""


class Tick(Protocol):
    """What a task calls now and then."""

    def __call__(self, requests: int, /) -> None:
        """So many more requests are simulated; raises :class:`Interrupted` when nobody wants the rest."""
        ...


class Interrupted(Exception):
    """Nobody waits for this task any more."""


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(work: Callable[[_T, Tick], _R], tasks: Sequence[_T], *, jobs: int, tick: Tick) -> Iterator[tuple[int, _R]]:
    """(position, result) of each task as it ends; ``work`` is a function of a module, tasks and results are picklable.

    With one job the tasks run here, in their order. Interrupted or left early, the processes end within a moment.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        for position, task in enumerate(tasks):
            yield position, work(task, tick)
        return
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Event()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(done, stop)) as executor:
        pending = {executor.submit(_work, work, task): position for position, task in enumerate(tasks)}
        told = 0
        try:
            while pending:
                ended, _ = wait(pending, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                simulated = done.value
                tick(simulated - told)
                told = simulated
                for future in ended:
                    yield pending.pop(future), future.result()
        finally:
            stop.set()
            executor.shutdown(wait=True, cancel_futures=True)


_done: Any = None
_stop: Any = None


def _begin(done: Any, stop: Any) -> None:
    """In each process: the terminal's interrupt is for the one that waits, which then says when to stop."""
    global _done, _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _done, _stop = done, stop


def _work(work: Callable[[_T, Tick], _R], task: _T) -> _R:
    return work(task, _tick)


def _tick(requests: int) -> None:
    with _done.get_lock():
        _done.value += requests
    if _stop.is_set():
        raise Interrupted
