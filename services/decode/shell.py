"""The hands of a decode worker: reserve, verify, step, stream, keep.

A request is *reserved* from ``DecodeJob`` until ``Handover``; then the batch has it until it is over. One task runs the
engine over whatever the batch plans. Whatever ends a request (answer complete, cancel, deadline, failure) goes through
:meth:`DecodeShell._end`, once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from services.decode.core.batch import DecodeBatch, Outcome, Running, Step, Sums
from services.decode.settings import Settings
from shared.bus.bus import Delivery
from shared.bus.subjects import CANCEL, PROGRESS, TOKENS
from shared.engine.thread import Computed, Work
from shared.errors import BusError, NoResponders
from shared.ids import BlockKey, GatewayId, OperationId, fresh
from shared.kv import pack_tokens, unpack_keys, unpack_tokens
from shared.messages import (
    Accepted,
    Cancel,
    DecodeJob,
    Handover,
    Inquiry,
    JobFailed,
    JobState,
    Landing,
    Load,
    Progress,
    Refused,
    Reserved,
    Role,
    Stages,
    TokenBatch,
    TokenChunk,
)
from shared.telemetry import metrics, tracing
from shared.units import format_seconds
from shared.worker.cancelled import Cancelled
from shared.worker.jobs import Job, refused
from shared.worker.runtime import Worker

log = logging.getLogger(__name__)

_RELEASE_PATIENCE_S = 2.0
"""How long a handover waits for the last writer to be done with our memory."""
_LOOK_S = 1.0
"""How often it is looked whether the gateways of our requests still listen."""
_LOOKS = 3
"""Looks in a row that must find nobody: a gateway that reconnects is away for a moment too."""


@dataclass(eq=False)
class _Request:
    """One request on this worker, from its reservation to its end."""

    message: DecodeJob
    operation: OperationId
    tokens: list[int]
    keys: list[BlockKey]
    slots: list[int]
    landing: Landing
    deadline: asyncio.TimerHandle
    context: Context = field(default_factory=otel_context.get_current)
    running: Running | None = None
    """Set once it was handed over."""
    starting: bool = False
    cancelled: str = ""
    """Why it must end after the step that computes it."""
    handed_over_s: float = 0.0
    """Unix seconds."""
    sent: int = 0
    """Tokens sent to the gateway."""


class DecodeShell:
    """Serves one worker's requests while open."""

    role: Role = "decode"
    takes: tuple[type[Job], ...] = (DecodeJob, Handover)

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self._worker, self._settings, self._agent = worker, settings, worker.agent
        self._batch = DecodeBatch(
            worker.agent.pool, block_tokens=worker.spec.block_tokens, block_bytes=worker.spec.block_bytes,
            max_running=settings.max_running, chunk_tokens=settings.chunk_tokens, max_context=worker.spec.max_context)
        #: {operation: request}; all and only requests that have not ended
        self._requests: dict[OperationId, _Request] = {}
        #: requests that the engine computes right now
        self._computing: frozenset[OperationId] = frozenset()
        self._work, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._cancelled = Cancelled()
        self.draining = False
        worker.room.answers_wait = lambda: self._batch.has_preempted

    def load(self) -> Load:
        """What the heartbeat reports."""
        statistics = self._agent.observe()
        running = len(self._batch.running)
        metrics.WORKER_QUEUED.labels(kind="decode").set(len(self._requests) - running)
        metrics.WORKER_RUNNING.labels(kind="decode").set(running)
        return Load(
            worker=self._worker.id, incarnation=self._worker.incarnation, role="decode", kv_seq=self._agent.seq,
            queued=len(self._requests) - running, running=running, context_tokens=self._batch.context_tokens,
            free_blocks=0 if self._worker.room.refuses_answer() else self._agent.pool.available,
            cached_blocks=statistics.cached,
            draining=self.draining or self._agent.is_retired)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Works while the context is open; whatever still runs at its end fails, visibly."""
        subscription = await self._worker.bus.subscribe(CANCEL.at(), self._on_cancel)
        try:
            async with asyncio.TaskGroup() as group:  # an engine loop that dies ends the worker, which is started again
                stepping = group.create_task(self._run(), name="decode-steps")
                looking = group.create_task(self._watch_gateways(), name="watch-gateways")
                try:
                    yield
                finally:
                    await subscription.close()
                    looking.cancel()
                    stepping.cancel()
        finally:
            failures = [(request.message.gateway, self._failure(request, "stopped", f"{self._worker.id} stopped"))
                        for request in self._requests.values()]
            for request in list(self._requests.values()):
                self._end(request, "failed")
            for gateway, failure in failures:
                await self._publish({gateway: [failure]}, [])

    async def drain(self) -> None:
        """Takes nothing new and waits until all requests have ended; the caller bounds the wait."""
        self.draining = True
        await self._idle.wait()

    # --- messages ----------------------------------------------------------------------------------------------

    async def take(self, job: Job) -> Reserved | Accepted | Refused:
        """A request is to be reserved, or one that was is handed over."""
        if isinstance(job, Handover):
            return await self._start(job)
        assert isinstance(job, DecodeJob)
        async with self._recalled(job):
            return self._reserve(job)

    def state_of(self, inquiry: Inquiry) -> JobState:
        """How far an answer is."""
        request = self._requests.get(_operation(inquiry))
        if request is None:
            return JobState(request=inquiry.request, attempt=inquiry.attempt, stage="unknown")
        return JobState(request=inquiry.request, attempt=inquiry.attempt, sent=request.sent,
                        stage="waiting" if request.running is None else "running")

    @asynccontextmanager
    async def _recalled(self, message: DecodeJob) -> AsyncIterator[None]:
        """What we hold of the prompt on our SSD is in memory meanwhile: that much need not be sent to us."""
        agent, ssd = self._agent, self._agent.ssd
        keys = unpack_keys(message.keys)
        cached = agent.pool.match(keys)
        count = 0 if ssd is None or self.draining else ssd.match(keys[cached:])
        if count == 0:
            yield
            return
        recalling = OperationId(fresh("recall", 4))
        try:
            agent.pin(recalling, keys[:cached], use=False)
            slots = agent.allocate(recalling, count, tenant=message.tenant)
            if slots is not None:
                _, spare = await agent.promote(recalling, keys[cached:cached + count], slots,
                                                  timeout_s=message.deadline_s)
                agent.give_back(recalling, spare)
            yield
        finally:
            agent.release(recalling)

    def _reserve(self, message: DecodeJob) -> Reserved | Refused:
        operation, room = _operation(message), self._worker.room
        known = self._requests.get(operation)
        if known is not None:
            return Reserved(request=message.request, attempt=message.attempt, landing=known.landing)
        if self._cancelled.covers(message.request, message.attempt):
            return refused(message, "cancelled", "it was cancelled before it arrived")
        if message.spec != self._worker.spec.digest:
            return refused(message, "spec", f"{self._worker.id} serves another cache spec")
        if self.draining or self._agent.is_retired:
            return refused(message, "draining", f"{self._worker.id} is stopping")
        if len(self._requests) >= self._settings.max_reserved:
            return refused(message, "capacity", f"{self._worker.id} holds {len(self._requests)} requests, its limit")
        tokens, keys = unpack_tokens(message.tokens).tolist(), unpack_keys(message.keys)
        blocks = self._worker.spec.blocks_of(len(tokens))
        if no_room := room.refuses_answer(blocks):
            return refused(message, "capacity", f"{self._worker.id} reserves nothing now: {no_room}")
        own = self._agent.pin(operation, keys)
        need = blocks - len(own)
        roomy = need + len(self._batch) < self._agent.pool.available
        slots = self._agent.allocate(operation, need, tenant=message.tenant) if roomy else None
        if slots is None:
            self._agent.release(operation)
            free = f"{self._agent.pool.available} of {self._worker.num_blocks} are free"
            return refused(message, "capacity", f"{need} blocks are needed, {free}")
        ranges = [self._agent.range(slot) for slot in slots]
        grant = self._worker.transfer.grant(operation, ranges, ttl_s=message.deadline_s)
        landing = Landing(endpoint=self._worker.transfer.endpoint, grant=grant, first_block=len(own), slots=ranges)
        request = _Request(
            message=message, operation=operation, tokens=tokens, keys=keys, slots=own + slots, landing=landing,
            deadline=asyncio.get_running_loop().call_later(message.deadline_s, self._expire, operation))
        self._requests[operation] = request
        room.reserved(operation, blocks)
        self._idle.clear()
        return Reserved(request=message.request, attempt=message.attempt, landing=landing)

    async def _start(self, message: Handover) -> Accepted | Refused:
        """Every block must be here and verified; then the first token may leave."""
        request = self._requests.get(_operation(message))
        if request is None:
            return refused(message, "unknown", f"{self._worker.id} has no reservation for it")
        if request.starting:
            return Accepted(request=message.request, attempt=message.attempt)
        request.starting, request.handed_over_s = True, time.time()
        self._worker.transfer.shut(request.operation)  # or a straggler could write once we have looked
        covered = self._worker.transfer.covered
        missing = [place for place in request.landing.slots if not covered(request.operation, place)]
        try:
            async with asyncio.timeout(_RELEASE_PATIENCE_S):
                await self._worker.transfer.release(request.operation)
        except TimeoutError:
            missing = request.landing.slots
        if request.operation not in self._requests:
            return refused(message, "cancelled", "it was cancelled meanwhile")
        if missing:
            reason = f"{len(missing)} of {len(request.landing.slots)} blocks did not arrive verified"
            self._end(request, "failed")
            return refused(message, "incomplete", reason)
        too_slow = self._too_slow(request)
        if too_slow:
            self._end(request, "failed")
            return refused(message, "tbt", too_slow)
        self._join(request, message)
        return Accepted(request=message.request, attempt=message.attempt)

    def _too_slow(self, request: _Request) -> str:
        """Why one more request would break its promise on the pace of tokens; empty when it would not."""
        slo_s = request.message.tbt_slo_s
        if slo_s is None:
            return ""
        profile, batch = self._worker.engine.profile, len(self._batch.running) + 1
        context = self._batch.context_tokens + len(request.tokens)
        predicted_s = (profile.decode_fixed_s + profile.decode_per_request_s * batch
                       + profile.decode_per_context_token_s * context)
        if predicted_s <= slo_s:
            return ""
        pace = f"{format_seconds(predicted_s)} a token"
        return f"a batch of {batch} would take {pace}, {format_seconds(slo_s)} are promised"

    def _join(self, request: _Request, message: Handover) -> None:
        prompt = len(request.tokens)
        running = Running(
            operation=request.operation, request=message.request, tenant=request.message.tenant,
            root=request.message.root, tokens=request.tokens, prompt_len=prompt, sampling=request.message.sampling,
            keys=list(request.keys), slots=request.slots, computed_len=prompt, sealed=request.landing.first_block)
        request.running = running
        self._worker.room.started(request.operation)
        stored = self._batch.seal(running, now=self._worker.clock.monotonic(), source=message.worker)
        self._agent.announce_stored(stored)
        outcome = self._batch.start(running, message.first_token)
        stages = msgspec.structs.replace(message.stages, decode_queue_s=time.time() - request.handed_over_s)
        chunk = self._chunk(request, outcome, stages)
        self._spawn_publish({request.message.gateway: [chunk]}, [self._progress(request, "first_token")])
        if outcome.finish:
            self._end(request, "finished")
        self._work.set()

    async def _on_cancel(self, delivery: Delivery) -> None:
        cancel: Cancel = delivery.message
        self._cancelled.note(cancel)
        for request in list(self._requests.values()):
            if request.message.request == cancel.request and cancel.attempt in (-1, request.message.attempt):
                self._stop(request, cancel.reason)

    async def _watch_gateways(self) -> None:
        """Ends what was asked by a gateway that is gone: nobody would ever cancel it, or read it."""
        missed: Counter[GatewayId] = Counter()
        while True:
            await asyncio.sleep(_LOOK_S)
            for gateway in {request.message.gateway for request in self._requests.values()}:
                try:
                    # Nobody answers this subject: a deadline that passes means that somebody listens.
                    await self._worker.bus.request(TOKENS.at(gateway=gateway), TokenBatch(items=[]), timeout_s=_LOOK_S)
                except NoResponders:
                    missed[gateway] += 1
                except BusError:
                    del missed[gateway]
                if missed[gateway] >= _LOOKS:
                    for request in [r for r in self._requests.values() if r.message.gateway == gateway]:
                        self._stop(request, "its gateway is gone")

    def _expire(self, operation: OperationId) -> None:
        request = self._requests.get(operation)
        if request is not None:
            failure = self._failure(request, "deadline", f"not done within {request.message.deadline_s:.1f} s")
            self._spawn_publish({request.message.gateway: [failure]}, [])
            self._stop(request, "deadline")

    # --- ending ------------------------------------------------------------------------------------------------

    def _stop(self, request: _Request, reason: str) -> None:
        """Ends a request now, or after the step that is computing it."""
        if request.operation in self._computing:
            request.cancelled = reason
        else:
            log.info("action=request_stopped request=%s reason=%s", request.message.request, reason)
            self._end(request, "failed")

    def _fail(self, request: _Request, code: str, message: str) -> None:
        failure = self._failure(request, code, message)
        self._end(request, "failed")
        self._spawn_publish({request.message.gateway: [failure]}, [])

    def _end(self, request: _Request, stage: str) -> None:
        """Gives everything back. Finished blocks stay cached: the next turn of a chat begins with them."""
        self._requests.pop(request.operation)
        request.deadline.cancel()
        self._batch.remove(request.operation)
        self._worker.room.started(request.operation)
        if request.running is None:
            self._agent.release_landing_soon(request.operation)
        else:
            self._agent.release(request.operation)
            metrics.WORKER_GENERATED_TOKENS.inc(request.running.generated_len)
            tracing.record("decode.stream", start_s=request.handed_over_s, end_s=time.time(), parent=request.context,
                           attributes={"moonbus.tokens": request.running.generated_len,
                                       "moonbus.steps": request.running.steps, "moonbus.end": stage})
            self._spawn_publish({}, [self._progress(request, "finished" if stage == "finished" else "failed")])
        if not self._requests:
            self._idle.set()

    # --- the engine --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Steps while there is something to step, until cancelled."""
        while True:
            released = self._agent.next_release
            self._work.clear()
            step = self._batch.plan(now=self._worker.clock.monotonic())
            # From here to the end of the step nobody else ends these requests: see _stop.
            self._computing = frozenset(row.running.operation for row in step.rows)
            self._agent.announce_evicted(step.evicted, "capacity")
            metrics.WORKER_PREEMPTIONS.inc(step.preempted)
            if step.preempted:  # what they gave up may be what a prompt waits for, and they wait for its memory
                self._agent.settle()
            for outcome in step.ended:
                request = self._requests[outcome.running.operation]
                self._spawn_publish({request.message.gateway: [self._chunk(request, outcome)]}, [])
                self._end(request, "finished")
            if not step.rows:
                await self._until_any(self._work, released)
                continue
            try:
                computed = await self._compute(step)
            except Exception as error:  # one bad step must not end the worker
                log.exception("action=step_failed requests=%d", len(step.rows))
                self._computing = frozenset()
                for row in step.rows:
                    self._fail(self._requests[row.running.operation], "engine",
                               f"a forward pass failed on {self._worker.id}: {type(error).__name__}")
                continue
            self._computing = frozenset()
            self._batch.computed(step, computed.seconds)
            await self._deliver(step, computed.tokens)

    async def _until_any(self, *events: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait(), name="decode-idle") for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _compute(self, step: Step) -> Computed:
        start_s = time.time()
        for row in step.rows:
            if not row.running.steps:
                request = self._requests[row.running.operation]
                metrics.WORKER_QUEUE_SECONDS.labels(kind="decode").observe(start_s - request.handed_over_s)
                tracing.record("decode.queue", start_s=request.handed_over_s, end_s=start_s, parent=request.context)
        works = [
            Work(np.asarray(row.running.tokens[row.start:row.start + row.length], dtype=np.uint32), row.start,
                 row.running.slots[:self._worker.spec.blocks_of(row.start + row.length)],
                 sampling=row.running.sampling if row.samples else None, generated=row.running.generated_len)
            for row in step.rows
        ]
        computed = await self._worker.engine.step(works)
        metrics.WORKER_STEP_SECONDS.labels(kind="decode").observe(computed.seconds)
        metrics.WORKER_BATCH_REQUESTS.labels(kind="decode").observe(len(works))
        return computed

    async def _deliver(self, step: Step, tokens: list[int | None]) -> None:
        """What the step brought goes to the gateways, one batch each; who is done, or was cancelled, ends."""
        chunks: dict[GatewayId, list[TokenChunk | JobFailed]] = defaultdict(list)
        now = self._worker.clock.monotonic()
        ending: list[tuple[_Request, str]] = []
        for row, token in zip(step.rows, tokens, strict=True):
            request = self._requests[row.running.operation]
            outcome, stored = self._batch.apply(row, token, now=now)
            self._agent.announce_stored(stored)
            if request.cancelled:
                log.info("action=request_stopped request=%s reason=%s", request.message.request, request.cancelled)
                ending.append((request, "failed"))
                continue
            if outcome.token is not None or outcome.finish:
                chunks[request.message.gateway].append(self._chunk(request, outcome))
            if outcome.finish:
                ending.append((request, "finished"))
        await self._publish(chunks, [])
        for request, stage in ending:
            if request.operation in self._requests:
                self._end(request, stage)

    # --- words -------------------------------------------------------------------------------------------------

    def _chunk(self, request: _Request, outcome: Outcome, stages: Stages | None = None) -> TokenChunk:
        tokens = [] if outcome.token is None else [outcome.token]
        chunk = TokenChunk(request=request.message.request, attempt=request.message.attempt, worker=self._worker.id,
                           first=request.sent, tokens=pack_tokens(tokens), finish=outcome.finish, stages=stages)
        request.sent += len(tokens)
        return chunk

    def _failure(self, request: _Request, code: str, message: str) -> JobFailed:
        metrics.WORKER_FAILURES.labels(code=code).inc()
        log.warning("action=request_failed request=%s code=%s error=%s", request.message.request, code, message)
        return JobFailed(request=request.message.request, attempt=request.message.attempt, worker=self._worker.id,
                         code=code, message=message)

    def _progress(self, request: _Request, stage: str) -> Progress:
        own = request.running.own if request.running else Sums()
        steps = max(own.steps, 1)
        return Progress(
            request=request.message.request, attempt=request.message.attempt, worker=self._worker.id, stage=stage,  # type: ignore[arg-type]
            num_tokens=len(request.tokens), batch=round(own.requests / steps),
            context_tokens=round(own.context_tokens / steps), step_s=own.seconds / steps)

    def _spawn_publish(self, chunks: dict[GatewayId, list[TokenChunk | JobFailed]], progress: list[Progress]) -> None:
        """Publishes from a plain function, in order: publishing only fills the connection's buffer."""
        self._agent.spawn(self._publish(chunks, progress), "decode-publish")

    async def _publish(self, chunks: dict[GatewayId, list[TokenChunk | JobFailed]], progress: list[Progress]) -> None:
        try:
            for gateway, items in chunks.items():
                await self._worker.bus.publish(TOKENS.at(gateway=gateway), TokenBatch(items=items))
            for news in progress:
                await self._worker.bus.publish(PROGRESS.at(), news)
        except BusError as error:
            # Gateways notice a missing chunk by its index and give the request up with a clear error.
            log.warning("action=publish_failed error=%s", error)


def _operation(message: DecodeJob | Handover | Inquiry) -> OperationId:
    """Under which an attempt's answer holds memory."""
    return OperationId(f"{message.request}.{message.attempt}")
