"""The hands of a prefill worker: jobs in, blocks fetched, chunks computed, layers pushed, handed over.

Each job is one task that walks the steps in :meth:`PrefillShell._run`; one more task runs the engine over whatever
the queue plans. Cancel, deadline and every failure end a job the same way: its task ends, and :meth:`_give_back`
returns what it held, after the engine's step when the engine is writing into it.

Memory is given out in order of arrival, all that a job needs at once: a job that waits holds only the prefix it found,
and whoever is ahead of it has everything to finish. Before each of its chunks a job looks again for what others have
computed or brought meanwhile, and gives back the slots it needs no more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from services.prefill.core.queue import Chunk, PrefillQueue
from services.prefill.settings import Settings
from shared.bus.bus import Delivery
from shared.bus.subjects import CANCEL, JOB, PROGRESS, TOKENS
from shared.engine.thread import Work
from shared.errors import BusError, RequestTimeout
from shared.ids import BlockKey, OperationId, WorkerId
from shared.kv import unpack_keys, unpack_tokens
from shared.messages import (
    Accepted,
    Cancel,
    Handover,
    Inquiry,
    JobFailed,
    JobState,
    Load,
    PrefillJob,
    Progress,
    Range,
    Refused,
    Role,
    Stages,
    StoredBlock,
    TokenBatch,
)
from shared.order import ORDER
from shared.store.parts import Part
from shared.telemetry import metrics, tracing
from shared.transfer import PushStream, Slice
from shared.worker.cancelled import Cancelled
from shared.worker.jobs import Job, refused
from shared.worker.runtime import SEGMENT, Worker

log = logging.getLogger(__name__)

_HANDOVER_TIMEOUT_S = 10.0


class _Failed(Exception):
    """A job cannot go on; ``blame`` is who should not get it again."""

    def __init__(self, code: str, message: str, blame: WorkerId | None = None) -> None:
        self.code, self.message, self.blame = code, message, blame
        super().__init__(message)


@dataclass(eq=False)
class _Job:
    """One prompt on its way through this worker."""

    message: PrefillJob
    operation: OperationId
    tokens: npt.NDArray[np.uint32]
    keys: list[BlockKey]
    arrived_s: float
    """Unix seconds."""
    #: slots of the pool, block by block, once all are allocated
    slots: list[int] = field(default_factory=list)
    stream: PushStream | None = None
    """Takes its KV to the decode worker."""
    first_token: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    started_s: float = 0.0
    """Unix seconds at which its first chunk began; 0 before it."""
    stages: Stages = field(default_factory=Stages)
    """What fetching brought."""
    context: Context = field(default_factory=otel_context.get_current)
    task: asyncio.Task[None] | None = None
    computed: int = 0
    """Tokens the engine has computed for it."""
    computing_s: float = 0.0
    """What the passes took that computed them, without waiting for the engine."""
    handed_over: bool = False
    code: str = "cancelled"
    """Why it ended before it was handed over."""


class PrefillShell:
    """Serves one worker's jobs while open."""

    role: Role = "prefill"
    takes: tuple[type[Job], ...] = (PrefillJob,)

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self._worker, self._settings, self._agent = worker, settings, worker.agent
        spec = self._spec = worker.spec
        self._block_tokens, self._block_bytes, self._layer_bytes = spec.block_tokens, spec.block_bytes, spec.layer_bytes
        self._queue = PrefillQueue(ORDER, worker.engine.profile, chunk_tokens=settings.chunk_tokens,
                                   block_tokens=self._block_tokens)
        #: {operation: its job}; all and only jobs that hold something or may still come to
        self._jobs: dict[OperationId, _Job] = {}
        #: jobs whose slots the engine is writing right now
        self._computing: frozenset[OperationId] = frozenset()
        #: {block: jobs that bring it from elsewhere}; never 0
        self._coming: Counter[BlockKey] = Counter()
        self._cancelled = Cancelled()
        self._memory = asyncio.Lock()
        self._work, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self.draining = False

    def load(self) -> Load:
        """What the heartbeat reports."""
        statistics = self._agent.observe()
        metrics.WORKER_QUEUED.labels(kind="prefill").set(len(self._jobs) - len(self._computing))
        metrics.WORKER_RUNNING.labels(kind="prefill").set(len(self._computing))
        return Load(
            worker=self._worker.id, incarnation=self._worker.incarnation, role="prefill", kv_seq=self._agent.seq,
            queued=len(self._jobs) - len(self._computing), queued_tokens=self._remaining_tokens(),
            running=len(self._computing),
            free_blocks=self._agent.pool.available, cached_blocks=statistics.cached,
            draining=self.draining or self._agent.is_retired,
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Works while the context is open; at its end whatever still runs is cancelled."""
        subscription = await self._worker.bus.subscribe(CANCEL.at(), self._on_cancel)
        async with asyncio.TaskGroup() as group:  # an engine loop that dies ends the worker, which is started again
            computing = group.create_task(self._compute(), name="prefill-compute")
            try:
                yield
            finally:
                await subscription.close()
                tasks = [job.task for job in self._jobs.values() if job.task is not None]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                computing.cancel()

    async def drain(self) -> None:
        """Takes nothing new and waits until all jobs have ended; the caller bounds the wait."""
        self.draining = True
        await self._idle.wait()

    # --- messages ----------------------------------------------------------------------------------------------

    def state_of(self, inquiry: Inquiry) -> JobState:
        """How far a prompt is."""
        return JobState(request=inquiry.request, attempt=inquiry.attempt,
                        stage="waiting" if _operation(inquiry) in self._jobs else "unknown")

    async def take(self, job: Job) -> Accepted | Refused:
        """A prompt has come."""
        assert isinstance(job, PrefillJob)
        return self._accept(job)

    def _accept(self, message: PrefillJob) -> Accepted | Refused:
        operation = _operation(message)
        if operation in self._jobs:
            return Accepted(request=message.request, attempt=message.attempt)
        refusal = self._refusal(message)
        if refusal is not None:
            return refused(message, *refusal)
        job = _Job(message=message, operation=operation, tokens=unpack_tokens(message.tokens),
                   keys=unpack_keys(message.keys), arrived_s=time.time())
        self._jobs[operation] = job
        self._worker.room.prompt_taken(operation, self._spec.blocks_of(len(job.tokens)))
        self._idle.clear()
        job.task = asyncio.create_task(self._supervise(job), name=f"prefill-{operation}")
        job.task.add_done_callback(lambda task: self._give_back(job))
        return Accepted(request=message.request, attempt=message.attempt)

    def _refusal(self, message: PrefillJob) -> tuple[str, str] | None:
        """Code and reason, if it is not taken."""
        if self._cancelled.covers(message.request, message.attempt):
            return "cancelled", "it was cancelled before it arrived"
        if message.decode == self._worker.id:
            return "unknown", f"{self._worker.id} cannot prefill for itself"
        if message.spec != self._worker.spec.digest:
            return "spec", f"{self._worker.id} serves another cache spec"
        if self.draining or self._agent.is_retired:
            return "draining", f"{self._worker.id} is stopping"
        if len(self._jobs) >= self._settings.max_queued:
            return "capacity", f"{self._worker.id} holds {len(self._jobs)} jobs, its limit"
        no_room = self._worker.room.refuses_prompt(self._spec.blocks_of(len(unpack_tokens(message.tokens))))
        return ("capacity", f"{self._worker.id} takes no such prompt now: {no_room}") if no_room else None

    async def _on_cancel(self, delivery: Delivery) -> None:
        cancel: Cancel = delivery.message
        self._cancelled.note(cancel)
        for job in list(self._jobs.values()):
            if job.message.request == cancel.request and cancel.attempt in (-1, job.message.attempt) and job.task:
                job.task.cancel()

    # --- a job's life ------------------------------------------------------------------------------------------

    async def _supervise(self, job: _Job) -> None:
        """Runs a job to its end and tells the gateway when it failed; never raises."""
        message = job.message
        try:
            async with asyncio.timeout(message.deadline_s):
                await self._run(job)
        except asyncio.CancelledError:
            log.info("action=job_cancelled request=%s attempt=%d", message.request, message.attempt)
        except TimeoutError:
            await self._fail(job, _Failed("deadline", f"not done within {message.deadline_s:.1f} s"))
        except _Failed as error:
            await self._fail(job, error)
        except Exception as error:
            log.exception("action=job_crashed request=%s", message.request)
            await self._fail(job, _Failed("internal", f"{type(error).__name__} on {self._worker.id}"))

    def _give_back(self, job: _Job) -> None:
        """The job's task has ended: frees what it held, unless the engine is writing into it just now."""
        self._queue.remove(job.operation)
        if job.operation in self._computing:
            return  # the compute loop calls again after its step
        if self._jobs.pop(job.operation, None) is None:
            return
        self._worker.room.prompt_served(job.operation)
        self._agent.release(job.operation)
        if not job.handed_over:
            metrics.WORKER_WASTED_PREFILL_TOKENS.labels(why=job.code).inc(job.computed)
        if not self._jobs:
            self._idle.set()

    def _remaining_tokens(self) -> int:
        """Prompt tokens to be computed, those of jobs included that still wait for memory or for owners."""
        waiting = (len(job.tokens) - job.stages.hit_tokens for job in self._jobs.values() if not job.slots)
        return self._queue.remaining_tokens + sum(waiting)

    async def _run(self, job: _Job) -> None:
        message, total = job.message, len(job.tokens)
        reusable = min(len(job.keys), (total - 1) // self._block_tokens)
        cached, slots = await self._allocate(job, reusable)
        worth = job.keys[cached:reusable if message.own_blocks is None else min(message.own_blocks, reusable)]
        with self._bringing(job, cached, reusable, worth):
            asked_s = time.monotonic()
            promoted, slots = await self._agent.promote(job.operation, worth, slots, timeout_s=message.deadline_s)
            ssd_s = time.monotonic() - asked_s
            stages, slots = await self._fetch(job, own=cached + promoted, reusable=reusable, slots=slots)
        if promoted:
            stages = msgspec.structs.replace(stages, ssd_s=ssd_s, ssd_bytes=promoted * self._block_bytes)
        reused = stages.hit_tokens // self._block_tokens
        reused_slots = [self._agent.pool.slot(key) for key in job.keys[:reused]]
        missing = self._spec.blocks_of(total) - reused - len(slots)
        if missing > 0:  # some stay with a writer that stopped half-way
            self._worker.room.prompt_waits(job.operation)
            slots += await self._agent.wait_allocate(job.operation, missing, tenant=message.tenant)
        self._worker.room.prompt_served(job.operation)
        job.stages, job.slots = stages, reused_slots + slots
        stream = job.stream = self._worker.transfer.stream(message.landing.endpoint, message.landing.grant)
        try:
            stream.push(self._slices(job, range(reused), 0, self._block_bytes))
            self._queue.add(job.operation, total=total, done=stages.hit_tokens, now=time.monotonic(),
                            head_start_s=message.head_start_s, keys=job.keys, lead_s=(
                                None if message.lead_s is None else message.lead_s - (time.time() - job.arrived_s)))
            self._work.set()
            either: set[asyncio.Future[Any]] = {job.first_token, stream.broken}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            token = 0 if stream.broken.done() else await job.first_token
            computed_s = time.time()
            pushed = await stream.close()
            if pushed.error is not None:  # what the decode worker would not take is its blame unless it is ours
                raise _Failed(f"transfer_{pushed.error.code}", f"KV did not reach {message.decode}: {pushed.error}",
                              blame=message.decode)
        finally:
            await stream.stop()
        pushed_s = time.time()
        tracing.record("kv.push", start_s=pushed_s - pushed.seconds, end_s=pushed_s, attributes={
            "moonbus.worker": message.decode, "moonbus.bytes": pushed.nbytes, "moonbus.pushes": stream.pushes,
            "moonbus.path": pushed.path})
        stages = msgspec.structs.replace(
            job.stages, prefill_queue_s=max(0.0, computed_s - job.arrived_s - stages.fetch_s - job.computing_s),
            prefill_s=job.computing_s, pushed_bytes=pushed.nbytes,
            push_path=pushed.path, push_wait_s=pushed_s - computed_s)
        metrics.WORKER_PROMPT_TOKENS.observe(total)
        metrics.WORKER_QUEUE_SECONDS.labels(kind="prefill").observe(stages.prefill_queue_s)
        metrics.WORKER_COMPUTED_TOKENS.inc(total - stages.hit_tokens)
        metrics.WORKER_REUSED_TOKENS.labels(origin="local").inc(stages.local_hit_tokens)
        metrics.WORKER_REUSED_TOKENS.labels(origin="fetched").inc(stages.hit_tokens - stages.local_hit_tokens)
        await self._tell(job, "prefilled", stages)
        await self._hand_over(job, token, stages)

    async def _allocate(self, job: _Job, reusable: int) -> tuple[int, list[int]]:
        """Pins what of the prompt is cached and takes slots for the rest, once there are enough; how many blocks are
        cached, and the slots."""
        async with self._memory:
            while True:
                released = self._agent.next_release
                cached = len(self._agent.pin(job.operation, job.keys[:reusable]))
                slots = self._agent.allocate(
                    job.operation, self._spec.blocks_of(len(job.tokens)) - cached, tenant=job.message.tenant)
                if slots is not None:
                    self._worker.room.prompt_fits(job.operation)
                    return cached, slots
                self._worker.room.prompt_waits(job.operation)
                await released.wait()

    @contextmanager
    def _bringing(self, job: _Job, cached: int, reusable: int, worth: Sequence[BlockKey]) -> Generator[None]:
        """Prompts that lack the same blocks wait for them meanwhile, instead of computing them; ``worth`` are those
        that are to be read from our SSD if they are there."""
        ssd = self._agent.ssd
        ends = [source.first_block + source.num_blocks for source in job.message.sources]
        if ssd is not None:
            ends.append(cached + ssd.match(worth))
        keys = job.keys[cached:min(max(ends, default=0), reusable)]
        self._coming.update(keys)
        try:
            yield
        finally:
            self._coming -= Counter(keys)
            self._work.set()

    async def _fetch(self, job: _Job, *, own: int, reusable: int, slots: list[int]) -> tuple[Stages, list[int]]:
        """Lets the owners of the reuse plan push what we lack into ``slots``.

        Returns how far the verified prefix reaches and what that took, and the slots that are left for computing.
        """
        parts: list[Part] = []
        reached = own
        for source in sorted(job.message.sources, key=lambda source: source.first_block):
            # Owners hold whole prefixes: one that was to follow blocks we have lost since is asked for those too.
            end = min(source.first_block + source.num_blocks, reusable)
            if end > reached and source.owner != self._worker.id:
                blocks = [self._block(job, index, source=source.owner) for index in range(reached, end)]
                parts.append(Part(source.owner, blocks))
                reached = end
        if not parts:
            return Stages(local_hit_tokens=own * self._block_tokens, hit_tokens=own * self._block_tokens), slots
        began_s = time.time()
        wanted = reached - own
        settings = self._settings
        patience_s = settings.fetch_timeout_s + wanted * self._block_bytes / settings.transfer.min_bytes_per_s
        fetched, spare = await self._agent.fetch(job.operation, job.message.request, parts, slots[:wanted],
                                                 timeout_s=min(patience_s, job.message.deadline_s))
        for part, result in zip(parts, fetched, strict=True):
            tracing.record("kv.fetch", start_s=began_s, end_s=began_s + result.seconds, attributes={
                "moonbus.owner": result.owner, "moonbus.blocks": result.blocks, "moonbus.asked": len(part.blocks),
                "moonbus.bytes": result.nbytes, "moonbus.path": result.path, "moonbus.why": result.why})
            if result.why:
                metrics.WORKER_RECOMPUTED_BLOCKS.labels(why=result.why).inc(len(part.blocks) - result.blocks)
                log.warning("action=fetch_short request=%s owner=%s asked=%d got=%d why=%s", job.message.request,
                            result.owner, len(part.blocks), result.blocks, result.why)
        came = sum(result.blocks for result in fetched)
        return Stages(
            fetch_s=time.time() - began_s, fetched_blocks=came, fetched_bytes=sum(result.nbytes for result in fetched),
            fetch_path="+".join(sorted({result.path for result in fetched if result.blocks})),
            fetch_failed_blocks=wanted - came, local_hit_tokens=own * self._block_tokens,
            hit_tokens=(own + came) * self._block_tokens), spare + slots[wanted:]

    async def _hand_over(self, job: _Job, token: int, stages: Stages) -> None:
        message = job.message
        handover = Handover(request=message.request, attempt=message.attempt, worker=self._worker.id,
                            first_token=token, stages=stages)
        address = JOB.at(worker=message.decode)
        try:
            try:
                reply = await self._worker.bus.request(address, handover, timeout_s=_HANDOVER_TIMEOUT_S)
            except RequestTimeout:  # the answer may be lost rather than late; asking again starts nothing twice
                reply = await self._worker.bus.request(address, handover, timeout_s=_HANDOVER_TIMEOUT_S)
        except BusError as error:
            what = f"{message.decode} did not take the handover: {error}"
            raise _Failed("decode_gone", what, blame=message.decode) from error
        if isinstance(reply, Refused):
            raise _Failed(reply.code, reply.message, blame=message.decode)
        job.handed_over = True

    async def _tell(self, job: _Job, stage: Literal["prefill_started", "prefilled"], stages: Stages) -> None:
        """News for the conductors, who do without it when the bus is away."""
        progress = Progress(request=job.message.request, attempt=job.message.attempt, worker=self._worker.id,
                            stage=stage, num_tokens=len(job.tokens), hit_tokens=stages.hit_tokens, stages=stages)
        try:
            await self._worker.bus.publish(PROGRESS.at(), progress)
        except BusError as error:
            log.debug("action=progress_lost error=%s", error)

    async def _fail(self, job: _Job, error: _Failed) -> None:
        message = job.message
        job.code = error.code
        metrics.WORKER_FAILURES.labels(code=error.code).inc()
        log.warning("action=job_failed request=%s attempt=%d code=%s error=%s", message.request, message.attempt,
                    error.code, error.message)
        failed = JobFailed(request=message.request, attempt=message.attempt, worker=self._worker.id,
                           blame=error.blame or self._worker.id, code=error.code, message=error.message)
        try:
            await self._worker.bus.publish(TOKENS.at(gateway=message.gateway), TokenBatch(items=[failed]))
        except BusError as lost:
            log.warning("action=failure_lost request=%s error=%s", message.request, lost)

    # --- the engine --------------------------------------------------------------------------------------------

    async def _compute(self) -> None:
        """Runs the engine over whatever the queue plans, until cancelled."""
        while True:
            chunks = self._plan()
            if not chunks:
                self._work.clear()
                await self._work.wait()
                continue
            jobs = [self._jobs[chunk.operation] for chunk in chunks]
            self._computing = frozenset(chunk.operation for chunk in chunks)
            try:
                await self._step(chunks, jobs)
            except Exception as error:  # one bad step must not end the worker; its jobs are placed elsewhere
                log.exception("action=step_failed jobs=%d", len(jobs))
                for job in jobs:
                    self._queue.remove(job.operation)
                    if not job.first_token.done():
                        job.first_token.set_exception(
                            _Failed("engine", f"a forward pass failed on {self._worker.id}: {type(error).__name__}"))
            finally:
                self._computing = frozenset()
                for job in jobs:
                    if job.task is not None and job.task.done():
                        self._give_back(job)

    def _plan(self) -> list[Chunk]:
        """What the engine computes next: nothing that has become cached since the prompts were looked at last."""
        while True:
            chunks = self._queue.plan(self._coming)
            if not any([self._reuse(self._jobs[chunk.operation], chunk.start) for chunk in chunks]):
                return chunks

    def _reuse(self, job: _Job, start: int) -> bool:
        """Takes over blocks from token ``start`` on that others have computed or brought; whether there are any."""
        first = start // self._block_tokens
        keys = job.keys[:(len(job.tokens) - 1) // self._block_tokens]
        end = first + self._agent.pool.match(keys[first:])
        if end == first:
            return False
        spare, job.slots[first:end] = job.slots[first:end], self._agent.pin(job.operation, keys[:end])[first:]
        self._agent.give_back(job.operation, spare)
        gained = (end - first) * self._block_tokens
        job.stages = msgspec.structs.replace(job.stages, hit_tokens=job.stages.hit_tokens + gained,
                                             local_hit_tokens=job.stages.local_hit_tokens + gained)
        self._queue.reuse(job.operation, end * self._block_tokens)
        if job.stream is not None:
            job.stream.push(self._slices(job, range(first, end), 0, self._block_bytes))
        return True

    async def _step(self, chunks: list[Chunk], jobs: list[_Job]) -> None:
        loop = asyncio.get_running_loop()
        start_s = time.time()
        for job in jobs:
            if not job.started_s:
                job.started_s = start_s
                tracing.record("prefill.queue", start_s=job.arrived_s, end_s=start_s, parent=job.context)
                await self._tell(job, "prefill_started", job.stages)
        works = [
            Work(job.tokens[chunk.start:chunk.start + chunk.length], chunk.start,
                 job.slots[:self._spec.blocks_of(chunk.start + chunk.length)],
                 sampling=job.message.sampling if chunk.last else None)
            for chunk, job in zip(chunks, jobs, strict=True)
        ]

        def on_layer(layer: int) -> None:
            loop.call_soon_threadsafe(self._layer_ready, chunks, jobs, layer)

        computed = await self._worker.engine.step(works, on_layer)
        end_s = time.time()
        metrics.WORKER_STEP_SECONDS.labels(kind="prefill").observe(computed.seconds)
        metrics.WORKER_BATCH_REQUESTS.labels(kind="prefill").observe(len(chunks))
        for chunk, job, token in zip(chunks, jobs, computed.tokens, strict=True):
            tracing.record("prefill.chunk", start_s=end_s - computed.seconds, end_s=end_s, parent=job.context,
                           attributes={"moonbus.start": chunk.start, "moonbus.tokens": chunk.length,
                                       "moonbus.batch": len(chunks)})
            self._queue.advance(chunk)
            job.computed += chunk.length
            job.computing_s += computed.seconds
            if job.task is None or job.task.done():
                continue
            for index in range(chunk.start // self._block_tokens, (chunk.start + chunk.length) // self._block_tokens):
                self._agent.seal(job.operation, job.slots[index], self._block(job, index))
            if token is not None and not job.first_token.done():
                job.first_token.set_result(token)

    def _layer_ready(self, chunks: list[Chunk], jobs: list[_Job], layer: int) -> None:
        """The KV of ``layer`` is in the pool for these chunks: it leaves while the next layer computes."""
        for chunk, job in zip(chunks, jobs, strict=True):
            blocks = range(chunk.start // self._block_tokens, self._spec.blocks_of(chunk.start + chunk.length))
            slices = self._slices(job, blocks, layer * self._layer_bytes, self._layer_bytes)
            if job.stream is not None and slices:
                job.stream.push(slices)

    def _slices(self, job: _Job, blocks: range, offset: int, length: int) -> list[Slice]:
        """Bytes ``[offset, offset + length)`` of those of ``blocks`` that the decode worker lacks.

        Blocks whose slots follow each other on both sides are parts of one slice.
        """
        landing, stride = job.message.landing, self._block_bytes
        slices: list[Slice] = []
        for index in range(max(blocks.start, landing.first_block), blocks.stop):
            place = landing.slots[index - landing.first_block]
            own, there = job.slots[index] * stride + offset, place.offset + offset
            if slices:
                last, step = slices[-1], slices[-1].count * stride
                if (last.offset + step == own and last.remote.offset + step == there
                        and last.remote.segment == place.segment):
                    slices[-1] = Slice(SEGMENT, last.offset, last.remote, last.count + 1, stride)
                    continue
            slices.append(Slice(SEGMENT, own, Range(segment=place.segment, offset=there, length=length)))
        return slices

    def _block(self, job: _Job, index: int, source: WorkerId | None = None) -> StoredBlock:
        """Full block ``index`` of the prompt, as indexes and the catalog shall know it."""
        return StoredBlock(
            key=job.keys[index], parent=job.keys[index - 1] if index else job.message.root, depth=index,
            nbytes=self._block_bytes, tokens=self._block_tokens, origin="received" if source else "computed",
            source=source or WorkerId(""), request=job.message.request, tenant=job.message.tenant)


def _operation(message: PrefillJob | Inquiry) -> OperationId:
    """Under which an attempt's prompt holds memory; not its answer's, which the same worker may have for another."""
    return OperationId(f"{message.request}.{message.attempt}.prefill")
