"""A conductor and workers that follow a script, on the real bus with the real messages.

The gateway's peers, not a mock of the bus: each has a connection of its own, so that closing it is what a killed
process looks like. Nothing is computed: the decode worker answers with the tokens that the test chose.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from shared.bus.bus import Delivery
from shared.bus.nats import NatsBus
from shared.bus.subjects import CANCEL, DONE, HELLO, JOB, KV_SYNC, LOAD, PLACE, ROLLCALL, TOKENS
from shared.ids import ConductorId, HostId, Incarnation, OperationId, RequestId, WorkerId, fresh
from shared.kv import CacheSpec, pack_tokens
from shared.messages import (
    Accepted,
    Cancel,
    DecodeJob,
    Endpoint,
    Grant,
    Handover,
    Hello,
    JobFailed,
    Landing,
    Load,
    Placement,
    PlaceRequest,
    PrefillJob,
    Refused,
    Rejection,
    RequestDone,
    Reserved,
    Role,
    Stages,
    SyncEvents,
    TokenBatch,
    TokenChunk,
)

STAGES = Stages(prefill_queue_s=0.01, hit_tokens=7, local_hit_tokens=7, prefill_s=0.02, push_path="shm")


class ScriptedWorker:
    """One worker. Set the attributes before the request that they shall meet."""

    def __init__(self, cluster: Cluster, name: str, role: Role, spec: CacheSpec, bus: NatsBus) -> None:
        self.id, self.role, self.bus = WorkerId(name), role, bus
        self.refuse: str = ""
        """Code with which jobs are refused."""
        self.fail: str = ""
        """Prefill: code with which jobs fail after they were accepted."""
        self.mute = False
        """Prefill: accepts jobs and never hands over."""
        self.jobs: list[Any] = []
        self._cluster = cluster
        self._tasks: set[asyncio.Task[None]] = set()
        endpoint = Endpoint(worker=self.id, incarnation=Incarnation(fresh()), host=HostId("host"))
        self.hello = Hello(
            worker=self.id, incarnation=endpoint.incarnation, role=role, spec=spec, endpoint=endpoint,
            capacity_blocks=100, max_running=8, started_at_s=1.0)

    async def start(self) -> None:
        await self.bus.serve(JOB.at(worker=self.id), self._job)
        await self.bus.serve(KV_SYNC.at(worker=self.id), self._sync)
        await self.bus.subscribe(ROLLCALL.at(), self._rollcall)
        await self.say_hello()
        self._spawn(self._beat())

    async def say_hello(self) -> None:
        await self.bus.publish(HELLO.at(worker=self.id), self.hello)

    async def kill(self) -> None:
        """What SIGKILL looks like from outside: the connection is gone, nothing was said."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._cluster.disconnect(self.id)

    async def stop_heart(self) -> None:
        """Heartbeats end; the worker still listens."""
        for task in self._tasks:
            if task.get_name() == "beat":
                task.cancel()

    async def _beat(self) -> None:
        while True:
            await self.bus.publish(LOAD.at(worker=self.id), Load(
                worker=self.id, incarnation=self.hello.incarnation, role=self.role, kv_seq=0))
            await asyncio.sleep(0.1)

    async def _rollcall(self, _: Delivery) -> None:
        await self.say_hello()

    async def _sync(self, delivery: Delivery) -> SyncEvents:
        return SyncEvents(worker=self.id, incarnation=self.hello.incarnation, events=[])

    async def _job(self, delivery: Delivery) -> Any:
        job = delivery.message
        self.jobs.append(job)
        if self.refuse:
            return Refused(request=job.request, attempt=job.attempt, code=self.refuse, message="scripted",
                           retry_after_s=3.0)
        match job:
            case DecodeJob():
                grant = Grant(worker=self.id, incarnation=self.hello.incarnation, operation=OperationId("op"),
                              ranges=[], expires_at_s=2e9, token=b"")
                landing = Landing(endpoint=self.hello.endpoint, grant=grant, first_block=0, slots=[])
                return Reserved(request=job.request, attempt=job.attempt, landing=landing)
            case PrefillJob():
                self._spawn(self._prefill(job))
                return Accepted(request=job.request, attempt=job.attempt)
            case Handover():
                reserved = next(known for known in self.jobs
                                if isinstance(known, DecodeJob) and known.request == job.request
                                and known.attempt == job.attempt)
                self._spawn(self._decode(reserved, job))
                return Accepted(request=job.request, attempt=job.attempt)

    async def _prefill(self, job: PrefillJob) -> None:
        if self.fail:
            failed = JobFailed(request=job.request, attempt=job.attempt, worker=self.id, code=self.fail,
                               message="scripted")
            await self.bus.publish(TOKENS.at(gateway=job.gateway), TokenBatch(items=[failed]))
        elif not self.mute:
            await self.bus.request(JOB.at(worker=job.decode), Handover(
                request=job.request, attempt=job.attempt, worker=self.id, first_token=0, stages=STAGES), timeout_s=5)

    async def _decode(self, job: DecodeJob, handover: Handover) -> None:
        tokens, finish = self._cluster.answer(job)
        for i, token in enumerate(tokens):
            if i == self._cluster.pause_at:
                self._cluster.paused.set()
                await self._cluster.go_on.wait()
            if job.request in self._cluster.cancelled:
                return
            last = i == len(tokens) - 1
            chunk = TokenChunk(
                request=job.request, attempt=job.attempt, worker=self.id, first=i, tokens=pack_tokens([token]),
                finish=finish if last else "", stages=handover.stages if i == 0 else None)
            await self.bus.publish(TOKENS.at(gateway=job.gateway), TokenBatch(items=[chunk]))
            await asyncio.sleep(0)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work, name="beat" if work.__name__ == "_beat" else work.__name__)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Cluster:
    """Everybody the gateway talks to."""

    def __init__(self, url: str, spec: CacheSpec) -> None:
        self.url, self.spec = url, spec
        self.workers: dict[str, ScriptedWorker] = {}
        self.answer: Callable[[DecodeJob], tuple[list[int], Any]] = lambda job: ([10, 11, 12], "stop")
        """The tokens of the next answers and how they finish."""
        self.pause_at: int | None = None
        """Answers stop before this token until :attr:`go_on` is set; ``paused`` tells that they have."""
        self.paused, self.go_on = asyncio.Event(), asyncio.Event()
        self.reject: Rejection | None = None
        self.places: list[PlaceRequest] = []
        self.cancels: list[Cancel] = []
        self.cancelled: set[RequestId] = set()
        self.dones: list[RequestDone] = []
        self._connections: dict[str, AsyncExitStack] = {}

    async def add(self, name: str, role: Role, spec: CacheSpec | None = None) -> ScriptedWorker:
        worker = ScriptedWorker(self, name, role, spec or self.spec, await self._connect(name))
        self.workers[name] = worker
        await worker.start()
        return worker

    async def start_conductor(self) -> None:
        bus = await self._connect("conductor")
        await bus.serve(PLACE.at(), self._place, queue="conductor")

    async def stop_conductor(self) -> None:
        await self.disconnect("conductor")

    async def listen(self) -> None:
        bus = await self._connect("listener")
        await bus.subscribe(CANCEL.at(), self._cancel)
        await bus.subscribe(DONE.at(), self._done)

    async def disconnect(self, name: str) -> None:
        if name in self._connections:
            await self._connections.pop(name).aclose()

    async def close(self) -> None:
        self.go_on.set()
        for worker in self.workers.values():
            await worker.kill()
        for name in list(self._connections):
            await self.disconnect(name)

    async def _connect(self, name: str) -> NatsBus:
        stack = AsyncExitStack()
        self._connections[name] = stack
        return await stack.enter_async_context(NatsBus.connect(self.url, name=name))

    async def _place(self, delivery: Delivery) -> Placement | Rejection:
        request: PlaceRequest = delivery.message
        self.places.append(request)
        if self.reject is not None:
            return msgspec.structs.replace(self.reject, request=request.request)
        chosen = {
            role: next((w for w in self.workers.values() if w.role == role and w.id not in request.exclude), None)
            for role in ("prefill", "decode")}
        prefill, decode = chosen["prefill"], chosen["decode"]
        if prefill is None or decode is None:
            return Rejection(request=request.request, code="no_worker", message="nobody left", retry_after_s=2.5)
        return Placement(
            request=request.request, attempt=request.attempt, conductor=ConductorId("conductor-1"), prefill=prefill.id,
            prefill_incarnation=prefill.hello.incarnation, decode=decode.id,
            decode_incarnation=decode.hello.incarnation, own_blocks=0, sources=[], hit_tokens=0,
            predicted_queue_s=0.01, predicted_transfer_s=0.02, predicted_prefill_s=0.03, predicted_tbt_s=0.04)

    async def _cancel(self, delivery: Delivery) -> None:
        self.cancels.append(delivery.message)
        if delivery.message.attempt == -1:
            self.cancelled.add(delivery.message.request)

    async def _done(self, delivery: Delivery) -> None:
        self.dones.append(delivery.message)


@asynccontextmanager
async def cluster_of(url: str, spec: CacheSpec, *, prefill: int = 1, decode: int = 1) -> AsyncIterator[Cluster]:
    """A conductor and so many workers, named as in the embedded stack."""
    cluster = Cluster(url, spec)
    try:
        await cluster.listen()
        await cluster.start_conductor()
        for i in range(prefill):
            await cluster.add(f"prefill-{i + 1}", "prefill")
        for i in range(decode):
            await cluster.add(f"decode-{i + 1}", "decode")
        yield cluster
    finally:
        await cluster.close()
