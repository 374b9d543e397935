"""Several processes that push small pieces to one another, all to all, many at a time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from load.bench import member
from load.bench.child import START_S, Child
from shared.ids import WorkerId
from shared.messages import Endpoint, Grant
from shared.transfer import TransferSettings

_GRACE_S = 30.0
"""Time beyond the run itself in which pushes in flight end and members answer."""


class Mesh:
    """Made by :meth:`start`; grants last for one :meth:`run`, as those of a request do."""

    def __init__(self, children: Sequence[Child], workers: Sequence[WorkerId]) -> None:
        self._children = children
        self._workers = workers
        self._endpoints = [msgspec.convert(child.greeting, Endpoint) for child in children]
        self._phase = 0

    @classmethod
    @asynccontextmanager
    async def start(cls, settings: TransferSettings, *, processes: int, in_flight: int,
                    nbytes: int) -> AsyncIterator[Mesh]:
        """``in_flight`` pushes of ``nbytes`` at any moment in the whole mesh. Raises :class:`ChildLost`."""
        workers = [WorkerId(f"member-{i}") for i in range(processes)]
        share = -(-in_flight // processes)
        async with AsyncExitStack() as stack:
            starting = []
            for worker in workers:
                order = member.Order(worker, [other for other in workers if other != worker], settings, nbytes, share)
                command = [sys.executable, "-m", member.__name__, msgspec.json.encode(order).decode()]
                # All at once: an interpreter takes its time to start.
                starting.append(asyncio.ensure_future(
                    stack.enter_async_context(Child.start(worker, command, start_s=START_S + processes))))
            try:
                children = await asyncio.gather(*starting)
            finally:
                await asyncio.wait(starting)
            yield cls(children, workers)

    @property
    def pids(self) -> list[int]:
        """Of the members."""
        return [child.pid for child in self._children]

    async def run(self, seconds: float) -> member.Ran:
        """Everybody pushes for ``seconds``; what became of all pushes. Raises :class:`ChildLost`."""
        self._phase += 1
        granted = [msgspec.convert(answer, dict[WorkerId, Grant]) for answer in await self._ask_all(
            [member.AskGrants(self._phase, seconds + _GRACE_S)] * len(self._children))]
        runs = []
        for worker in self._workers:
            targets = [member.Target(endpoint, grants[worker])
                       for endpoint, grants in zip(self._endpoints, granted, strict=True) if worker in grants]
            runs.append(member.Run(targets, seconds))
        everything = member.Ran()
        for answer in await self._ask_all(runs, seconds):
            ran = msgspec.convert(answer, member.Ran, strict=False)  # JSON has text for keys
            everything.seconds.merge(ran.seconds)
            everything.failed += ran.failed
            everything.error = everything.error or ran.error
        await self._ask_all([member.Release(self._phase)] * len(self._children))
        return everything

    async def _ask_all(self, questions: Sequence[member.Question], seconds: float = 0.0) -> list[object]:
        answers: list[object] = await asyncio.gather(*(
            child.ask(question, timeout_s=seconds + _GRACE_S)
            for child, question in zip(self._children, questions, strict=True)))
        return answers
