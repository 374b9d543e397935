"""The conductor's hands: what comes over the bus becomes events, decisions become spans and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from opentelemetry import trace

from services.conductor.core.machine import Conductor, Converged, Deaf, Event, Reconnected, Started, Statistics
from shared.bus.bus import Bus, Delivery
from shared.bus.subjects import (
    BYE,
    CANCEL,
    DONE,
    HELLO,
    KV_EVICTED,
    KV_STORED,
    KV_SYNC,
    LOAD,
    PLACE,
    PLACED,
    PROGRESS,
    REFUSE,
    ROLLCALL,
    WORKERS,
    Address,
)
from shared.clock import Clock
from shared.driver import Driver
from shared.ids import WorkerId
from shared.messages import Placement, PlaceRequest, Rejection, RequestDone, RoleAdvice
from shared.telemetry import metrics
from shared.telemetry.logs import Limited

_log = logging.getLogger(__name__)
_tracer = trace.get_tracer("moonbus.conductor")

QUEUE = "conductor"
"""Of several conductors one gets each question."""
DECIDE_WITHIN_S = 5.0
"""Longest time a question waits for its decision: behind a backlog, nobody needs the answer any more."""
_EXPORT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.25
"""Pause between two looks at the connection: shorter than any silence that makes a worker suspect."""
_LISTENED = (HELLO, LOAD, BYE, KV_STORED, KV_EVICTED, PROGRESS, PLACED, CANCEL)
"""What goes to the machine as it is."""


class Subjects:
    """The addresses the machine's effects go to."""

    rollcall: Address = ROLLCALL.at()
    placed: Address = PLACED.at()

    def sync(self, worker: WorkerId) -> Address:
        """Where ``worker`` answers what was missed."""
        return KV_SYNC.at(worker=worker)

    def refuse(self, worker: WorkerId) -> Address:
        """Where ``worker`` hears that it must stop."""
        return REFUSE.at(worker=worker)


class ConductorShell:
    """Serves one machine over one bus while open."""

    def __init__(self, machine: Conductor, bus: Bus, clock: Clock) -> None:
        self._machine, self._bus, self._clock = machine, bus, clock
        self._driver: Driver[Event] = Driver(
            machine, bus, clock, effects={Converged: self._on_converged}, name="conductor")
        self._converged = asyncio.Event()
        self._complaints = Limited(_log)
        self._exported = _Export()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listens, converges, then answers until left; raises what breaks the machine."""
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
            owned = [tasks.create_task(self._driver.run(), name="conductor"),
                     tasks.create_task(self._export(), name="conductor-metrics"),
                     tasks.create_task(self._watch(), name="conductor-connection")]
            try:
                for subject in _LISTENED:
                    stack.push_async_callback((await self._bus.subscribe(subject.any(), self._on_message)).close)
                stack.push_async_callback((await self._bus.subscribe(DONE.any(), self._on_done)).close)
                self._bus.on_reconnect(self._on_reconnect)
                await self._driver.put(Started())
                await self._converged.wait()
                for subject, handler in ((PLACE, self._on_place), (WORKERS, self._on_workers)):
                    serving = await self._bus.serve(subject.at(), handler, queue=QUEUE)
                    stack.push_async_callback(serving.close)
                yield
                await stack.aclose()  # answer what was asked before the driver stops
            finally:
                for task in owned:
                    task.cancel()

    async def _on_message(self, delivery: Delivery) -> None:
        speaker = delivery.params.get("worker")
        if speaker is not None and speaker != delivery.message.worker:
            self._complaints.warning("imposture", key=speaker, subject=delivery.subject, worker=delivery.message.worker)
            return
        self._driver.feed(delivery.message)

    async def _on_done(self, delivery: Delivery) -> None:
        _observe_outcome(delivery.message, self._machine.id)
        self._driver.feed(delivery.message)

    async def _on_reconnect(self) -> None:
        await self._driver.put(Reconnected())

    async def _on_converged(self, effect: Converged) -> None:
        if effect.missing:
            fields = {"workers": effect.workers, "missing": ",".join(effect.missing)}
            _log.warning("unconverged", extra={"fields": fields})
        self._converged.set()

    async def _on_workers(self, delivery: Delivery) -> Any:
        return await self._driver.ask(delivery.message, timeout_s=DECIDE_WITHIN_S)

    async def _on_place(self, delivery: Delivery) -> Placement | Rejection:
        ask: PlaceRequest = delivery.message
        began_s = time.perf_counter()
        with _tracer.start_as_current_span("place.decide") as span:
            answer: Placement | Rejection = await self._driver.ask(ask, timeout_s=DECIDE_WITHIN_S)
            span.set_attributes(_asked(ask, self._machine.id) | _answered(answer))
        metrics.CONDUCTOR_DECISION_SECONDS.observe(time.perf_counter() - began_s)
        self._count(answer)
        return answer

    def _count(self, answer: Placement | Rejection) -> None:
        if isinstance(answer, Rejection):
            metrics.CONDUCTOR_REJECTIONS.labels(code=answer.code).inc()
            return
        self._exported.placed(answer.prefill, answer.decode)
        metrics.CONDUCTOR_PREDICTED_TTFT_SECONDS.observe(answer.predicted_ttft_s)
        metrics.CONDUCTOR_PREDICTED_TBT_SECONDS.observe(answer.predicted_tbt_s)
        metrics.CONDUCTOR_PREDICTED_HIT_TOKENS.inc(answer.hit_tokens)

    async def _watch(self) -> None:
        while True:
            if not self._bus.connected:
                self._driver.feed(Deaf())
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _export(self) -> None:
        while True:
            statistics = self._machine.statistics()
            self._exported.advise(self._machine.told_advice(self._clock.monotonic()))
            if dropped := self._exported.update(statistics):
                self._complaints.warning("index_full", key="index_full", dropped_blocks=dropped,
                                         blocks=sum(statistics.blocks.values()), bytes=statistics.index_bytes)
            await asyncio.sleep(_EXPORT_EVERY_S)


def _asked(ask: PlaceRequest, conductor: str) -> dict[str, str | int | float]:
    return {"moonbus.request": ask.request, "moonbus.attempt": ask.attempt, "moonbus.conductor": conductor,
            "moonbus.prompt_tokens": ask.num_tokens, "moonbus.excluded": ",".join(ask.exclude)}


def _answered(answer: Placement | Rejection) -> dict[str, str | int | float]:
    candidates = msgspec.json.encode(answer.candidates).decode()
    if isinstance(answer, Rejection):
        return {"moonbus.rejection": answer.code, "moonbus.reason": answer.message,
                "moonbus.retry_after_s": answer.retry_after_s, "moonbus.candidates": candidates}
    return {
        "moonbus.prefill": answer.prefill, "moonbus.decode": answer.decode, "moonbus.own_blocks": answer.own_blocks,
        "moonbus.sources": msgspec.json.encode(answer.sources).decode(), "moonbus.hit_tokens": answer.hit_tokens,
        "moonbus.predicted_queue_s": answer.predicted_queue_s,
        "moonbus.predicted_transfer_s": answer.predicted_transfer_s,
        "moonbus.predicted_prefill_s": answer.predicted_prefill_s, "moonbus.predicted_ttft_s": answer.predicted_ttft_s,
        "moonbus.predicted_tbt_s": answer.predicted_tbt_s, "moonbus.candidates": candidates}


def _observe_outcome(done: RequestDone, conductor: str) -> None:
    """What became of a promise; only of our own, so that sums over conductors are right.

    The first token is counted from the promise on: what a former attempt took is not this one's fault.
    """
    placed = done.decisions[-1] if done.decisions else None
    if done.conductor != conductor or done.ttft_s is None or placed is None or not isinstance(placed.answer, Placement):
        return
    promised, ttft_s = placed.answer, done.ttft_s - placed.at_s
    metrics.CONDUCTOR_ACTUAL_TTFT_SECONDS.observe(ttft_s)
    metrics.CONDUCTOR_TTFT_ERROR_SECONDS.observe(ttft_s - promised.predicted_ttft_s)
    metrics.CONDUCTOR_ACTUAL_HIT_TOKENS.inc(done.hit_tokens)
    off = [("ttft", ttft_s, promised.predicted_ttft_s, promised.predicted_ttft_s),
           ("hit_tokens", done.hit_tokens, promised.hit_tokens, done.prompt_tokens)]
    if done.tbt_s is not None:
        metrics.CONDUCTOR_ACTUAL_TBT_SECONDS.observe(done.tbt_s)
        off.append(("tbt", done.tbt_s, promised.predicted_tbt_s, promised.predicted_tbt_s))
    for of, actual, predicted, whole in off:
        if whole > 0:
            metrics.CONDUCTOR_PREDICTION_ERROR.labels(of=of, outcome=done.outcome).observe((actual - predicted) / whole)


class _Export:
    """The machine's state as metrics; series of workers that are gone are removed."""

    def __init__(self) -> None:
        self._blocks: set[WorkerId] = set()
        self._workers: set[tuple[str, str]] = set()
        self._errors: set[tuple[WorkerId, str]] = set()
        #: (prefill, decode) of the placements counted so far
        self._pairs: set[tuple[WorkerId, WorkerId]] = set()
        self._syncs: dict[tuple[WorkerId, str], int] = {}
        self._dropped_blocks = self._stale = self._mismatched = 0
        self._refused: dict[str, int] = {}
        #: models that something was advised for
        self._advised: set[str] = set()

    def placed(self, prefill: WorkerId, decode: WorkerId) -> None:
        """Counts a placement."""
        self._pairs.add((prefill, decode))
        metrics.CONDUCTOR_PLACEMENTS.labels(prefill=prefill, decode=decode).inc()

    def advise(self, advice: Sequence[RoleAdvice]) -> None:
        """Shows how many workers are needed and advised, summed over the cache specs of a model."""
        for model in self._advised - {one.model for one in advice}:
            for role in ("prefill", "decode"):
                metrics.CONDUCTOR_NEEDED_WORKERS.remove(model, role)
                metrics.CONDUCTOR_ADVISED_WORKERS.remove(model, role)
        needed: defaultdict[tuple[str, str], float] = defaultdict(float)
        best: defaultdict[tuple[str, str], int] = defaultdict(int)
        for one in advice:
            needed[one.model, "prefill"] += one.needed_prefill
            needed[one.model, "decode"] += one.needed_decode
            best[one.model, "prefill"] += one.best_prefill
            best[one.model, "decode"] += one.best_decode
        for (model, role), count in needed.items():
            metrics.CONDUCTOR_NEEDED_WORKERS.labels(model=model, role=role).set(count)
            metrics.CONDUCTOR_ADVISED_WORKERS.labels(model=model, role=role).set(best[model, role])
        self._advised = {one.model for one in advice}

    def update(self, now: Statistics) -> int:
        """Shows ``now``; answers how many block copies the full index did not take since the last time."""
        for pair in [pair for pair in self._pairs if not now.blocks.keys() >= set(pair)]:
            metrics.CONDUCTOR_PLACEMENTS.remove(*pair)
            self._pairs.remove(pair)
        for gone in self._blocks - set(now.blocks):
            metrics.CONDUCTOR_INDEX_BLOCKS.remove(gone)
        for worker, blocks in now.blocks.items():
            metrics.CONDUCTOR_INDEX_BLOCKS.labels(worker=worker).set(blocks)
        self._blocks = set(now.blocks)
        for role, state in self._workers - set(now.workers):
            metrics.CONDUCTOR_WORKERS.remove(role, state)
        for (role, state), count in now.workers.items():
            metrics.CONDUCTOR_WORKERS.labels(role=role, state=state).set(count)
        self._workers = set(now.workers)
        for worker, model in self._errors - set(now.errors):
            metrics.CONDUCTOR_ESTIMATE_ERROR.remove(worker, model)
        for (worker, model), error in now.errors.items():
            metrics.CONDUCTOR_ESTIMATE_ERROR.labels(worker=worker, model=model).set(error)
        self._errors = set(now.errors)
        metrics.CONDUCTOR_IN_FLIGHT.set(now.jobs)
        metrics.CONDUCTOR_PROMISED_BLOCKS.set(now.promised_blocks)
        for worker, why in self._syncs.keys() - now.syncs.keys():
            metrics.CONDUCTOR_RESYNCS.remove(worker, why)
            del self._syncs[worker, why]
        for (worker, why), count in now.syncs.items():
            before = self._syncs.get((worker, why), 0)
            metrics.CONDUCTOR_RESYNCS.labels(worker=worker, why=why).inc(count - before if count >= before else count)
            self._syncs[worker, why] = count
        metrics.CONDUCTOR_INDEX_BYTES.set(now.index_bytes)
        dropped = now.dropped_blocks - self._dropped_blocks
        metrics.CONDUCTOR_INDEX_DROPPED.inc(dropped)
        for kind, count in now.refused.items():
            metrics.CONDUCTOR_REFUSED.labels(kind=kind).inc(count - self._refused.get(kind, 0))
        self._refused = dict(now.refused)
        metrics.CONDUCTOR_KV_EVENTS_DROPPED.labels(why="stale").inc(now.feed.dropped - self._stale)
        metrics.CONDUCTOR_KV_EVENTS_DROPPED.labels(why="spec").inc(now.mismatched_events - self._mismatched)
        self._dropped_blocks, self._stale = now.dropped_blocks, now.feed.dropped
        self._mismatched = now.mismatched_events
        return dropped
