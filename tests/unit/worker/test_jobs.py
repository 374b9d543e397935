"""One subscription, several shells: each gets what it takes, and an inquiry finds whoever knows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from shared.bus.memory import MemoryBus
from shared.bus.subjects import JOB
from shared.errors import NoResponders
from shared.ids import RequestId, WorkerId
from shared.messages import (
    Accepted,
    DecodeJob,
    Handover,
    Inquiry,
    JobState,
    Load,
    PrefillJob,
    Refused,
    Role,
)
from shared.worker.jobs import Job, Shell, serving
from tests.support.golden import sample

WORKER = WorkerId("w")


def job(kind: type[Job]) -> Any:
    return msgspec.convert(sample(msgspec.inspect.type_info(kind), kind.__name__), kind)


class Scripted:
    """A shell that accepts all it takes and knows one request."""

    def __init__(self, role: Role, takes: tuple[type[Job], ...], knows: str = "") -> None:
        self.role, self.takes, self._knows = role, takes, knows
        self.taken: list[type[Job]] = []
        self.is_open = False

    def load(self) -> Load:
        raise AssertionError("nobody asks for it here")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self.is_open = True
        yield
        self.is_open = False

    async def take(self, job: Job) -> Accepted:
        assert self.is_open
        self.taken.append(type(job))
        return Accepted(request=job.request, attempt=job.attempt)

    def state_of(self, inquiry: Inquiry) -> JobState:
        return JobState(request=inquiry.request, attempt=inquiry.attempt,
                        stage="running" if inquiry.request == self._knows else "unknown")

    async def drain(self) -> None:
        raise AssertionError("nobody asks for it here")


@asynccontextmanager
async def worker(*shells: Shell) -> AsyncIterator[MemoryBus]:
    async with MemoryBus() as bus, serving(bus, WORKER, shells):
        yield bus


async def ask(bus: MemoryBus, message: Any) -> Any:
    return await bus.request(JOB.at(worker=WORKER), message, timeout_s=5)


async def test_each_shell_gets_what_it_takes() -> None:
    prefill, decode = Scripted("prefill", (PrefillJob,)), Scripted("decode", (DecodeJob, Handover))
    async with worker(prefill, decode) as bus:
        for kind in (PrefillJob, DecodeJob, Handover, PrefillJob):
            assert isinstance(await ask(bus, job(kind)), Accepted)
    assert prefill.taken == [PrefillJob, PrefillJob] and decode.taken == [DecodeJob, Handover]
    assert not prefill.is_open and not decode.is_open


async def test_what_nobody_takes_is_refused_with_what_the_worker_is() -> None:
    async with worker(Scripted("prefill", (PrefillJob,))) as bus:
        reply = await ask(bus, job(DecodeJob))
    assert isinstance(reply, Refused) and reply.code == "unknown" and reply.message == "w is a prefill worker"


@pytest.mark.parametrize("knows", ["prefill", "decode", ""])
async def test_an_inquiry_finds_whoever_knows(knows: str) -> None:
    shells: Sequence[Shell] = [Scripted(role, (), "r" if role == knows else "") for role in ("prefill", "decode")]
    async with worker(*shells) as bus:
        state = await ask(bus, Inquiry(request=RequestId("r"), attempt=0))
    assert state.stage == ("running" if knows else "unknown")


async def test_nobody_hears_of_jobs_once_it_is_over() -> None:
    async with MemoryBus() as bus:
        async with serving(bus, WORKER, [Scripted("prefill", (PrefillJob,))]):
            pass
        with pytest.raises(NoResponders):
            await ask(bus, job(PrefillJob))
