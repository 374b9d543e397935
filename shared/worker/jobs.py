"""What a worker is made of: shells that take jobs of one kind each, and one subscription that hands the jobs out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from shared.bus.bus import Bus, Delivery
from shared.bus.subjects import JOB
from shared.ids import WorkerId
from shared.messages import (
    Accepted,
    DecodeJob,
    Handover,
    Inquiry,
    JobState,
    Load,
    PrefillJob,
    Refused,
    Reserved,
    Role,
)
from shared.telemetry import metrics

Job = PrefillJob | DecodeJob | Handover

_KINDS: Mapping[type[Job], str] = {PrefillJob: "prefill", DecodeJob: "decode", Handover: "handover"}


class Shell(Protocol):
    """What makes a worker one of its kind."""

    role: Role
    takes: tuple[type[Job], ...]
    """The jobs that are for it."""

    def load(self) -> Load:
        """What the heartbeat reports."""
        ...

    def open(self) -> AbstractAsyncContextManager[None]:
        """Works while the context is open; jobs come once it is and no more when it ends."""
        ...

    async def take(self, job: Job) -> Reserved | Accepted | Refused:
        """One of :attr:`takes` has come."""
        ...

    def state_of(self, inquiry: Inquiry) -> JobState:
        """How far a job of its is; ``unknown`` when it has none such."""
        ...

    async def drain(self) -> None:
        """Takes nothing new and waits until all work has ended; the caller bounds the wait."""
        ...


@asynccontextmanager
async def serving(bus: Bus, worker: WorkerId, shells: Sequence[Shell]) -> AsyncIterator[None]:
    """Opens ``shells`` and hands them ``worker``'s jobs while the context is open."""
    roles = " and ".join(shell.role for shell in shells)

    async def on_job(delivery: Delivery) -> Reserved | Accepted | Refused | JobState:
        message: Job | Inquiry = delivery.message
        if isinstance(message, Inquiry):
            states = [shell.state_of(message) for shell in shells]
            return next((state for state in states if state.stage != "unknown"), states[0])
        shell = next((shell for shell in shells if isinstance(message, shell.takes)), None)
        reply = await shell.take(message) if shell is not None else refused(
            message, "unknown", f"{worker} is a {roles} worker")
        metrics.WORKER_JOBS.labels(kind=_KINDS[type(message)],
                                   answer=reply.code if isinstance(reply, Refused) else "accepted").inc()
        return reply

    async with AsyncExitStack() as stack:
        for shell in shells:
            await stack.enter_async_context(shell.open())
        subscription = await bus.serve(JOB.at(worker=worker), on_job)
        try:
            yield
        finally:
            await subscription.close()


def refused(job: Job, code: str, why: str) -> Refused:
    """The answer to a job that is not taken."""
    return Refused(request=job.request, attempt=job.attempt, code=code, message=why)  # type: ignore[arg-type]
