"""Performs what the machines decide: one :class:`Exchange` a request, one :class:`Gateway` for all of them.

Everything that happens to a request goes through :meth:`Exchange.feed`, which is synchronous: the machine decides,
the effects are carried out (what takes time as a task that feeds its outcome back), the text for the client waits in
``pieces`` until the HTTP side fetches it. So a slow client delays nobody, and its end is noticed at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context, attach

from services.gateway.core.machine import (
    Abandoned,
    Aborted,
    AskConductor,
    AskWorker,
    BusReturned,
    Deliver,
    Ended,
    Event,
    Limits,
    NobodyThere,
    RequestMachine,
    Restart,
    Started,
    Stopped,
    Tag,
    Tell,
    TooLarge,
    WorkerLost,
)
from services.gateway.core.problem import Problem
from services.gateway.core.text import AnswerText
from services.gateway.prompt import Prompt
from services.gateway.roster import Roster
from services.gateway.settings import Settings
from shared import backoff
from shared.bus.bus import Bus, Delivery, Subscription
from shared.bus.subjects import CANCEL, DONE, JOB, PLACE, TOKENS, Address
from shared.clock import Clock
from shared.errors import Bug, BusError, NoResponders, PayloadTooLarge
from shared.ids import ConductorId, GatewayId, RequestId, WorkerId
from shared.machine import Answered, Effect, Unanswered, Woke
from shared.messages import Placement, PrefillJob, Rejection, RequestDone
from shared.telemetry import metrics, tracing

_log = logging.getLogger(__name__)
_tracer = trace.get_tracer("moonbus.gateway")

CLOSE_S = 2.0
"""Longest time that last words (cancels, ends of requests) may take at shutdown."""


INTERNAL = Problem(status=500, code="internal_error", message="the gateway failed on this request; its log says why")


class Piece(msgspec.Struct, frozen=True):
    """Text for the client; ``tokens`` of the answer have been received with it."""

    text: str
    tokens: int


class Exchange:
    """One request under way. Made by :meth:`Gateway.open`; ends by itself, or with :meth:`abandon`."""

    def __init__(self, gateway: Gateway, prompt: Prompt, text: AnswerText, *, received_s: float, received_at_s: float,
                 context: Context, client_id: str = "") -> None:
        job = prompt.job
        self._client_id = client_id
        self.job, self.context = job, context
        self.machine = RequestMachine(job, gateway.limits, retry_delay_s=gateway.retry_delay_s)
        self.pieces: deque[Piece] = deque()
        self.ended: Ended | None = None
        self._gateway, self._text = gateway, text
        self._received_s, self._received_at_s = received_s, received_at_s
        self._fetched_tokens = 0
        self._events: deque[Event] = deque()
        self._feeding = False
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._asking: set[asyncio.Task[None]] = set()
        self._dispatched_at_s = 0.0
        self._first_token_at_s = 0.0
        self._last_chunk_s = 0.0
        self._tbt = metrics.GATEWAY_TBT_SECONDS.labels(model=job.model)

    # -- what the HTTP side sees -------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._text.tokens

    @property
    def ids(self) -> list[int]:
        """Token ids of the answer so far."""
        return self._text.ids

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this request."""
        return self.machine.stages.hit_tokens if self.machine.stages else 0

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the answer."""
        return self._text.matched

    @property
    def finish(self) -> str:
        """``stop`` or ``length``, once ended well."""
        return "stop" if self._text.matched is not None else (self.ended.finish if self.ended else "")

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        first_s = self.machine.first_token_s
        return None if first_s is None else first_s - self._received_s

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until there are pieces or the end; false when neither came in ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def take(self) -> list[Piece]:
        """The pieces that wait, in order."""
        pieces = list(self.pieces)
        self.pieces.clear()
        if pieces:
            self._fetched_tokens = pieces[-1].tokens
        return pieces

    def abandon(self, code: str, why: str) -> None:
        """The client is gone: everything of this request is freed everywhere. Without effect once it ended."""
        self.feed(Abandoned(code, why))

    # -- the machine -------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Gives ``event`` to the machine and carries out what follows; an event met on the way waits its turn."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                for effect in self.machine.handle(self._events.popleft(), now=self._gateway.clock.monotonic()):
                    self._perform(effect)
        except Exception:
            # a bug of ours must cost this request only, and must not leave it hanging until its deadline
            _log.exception("exchange_failed", extra={"fields": {"request": self.job.request}})
            self._events.clear()
            if self.ended is None:
                for effect in self.machine.handle(Aborted(INTERNAL), now=self._gateway.clock.monotonic()):
                    self._perform(effect)
        finally:
            self._feeding = False
        self._arm()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Deliver(tokens=tokens, finish=finish):
                self._deliver(tokens, last=bool(finish))
            case AskConductor(message=message, tag=tag, timeout_s=timeout_s):
                self._ask(self._place(PLACE.at(), message, tag, timeout_s), "place")
            case AskWorker(worker=worker, message=message, tag=tag, timeout_s=timeout_s):
                if isinstance(message, PrefillJob):
                    message = msgspec.structs.replace(
                        message, endpoints=self._gateway.roster.endpoints(message.sources))
                    self._dispatched_at_s = self._gateway.clock.wall()
                self._ask(self._give(worker, message, tag, timeout_s), tag.step)
            case NobodyThere(worker=worker):
                self._gateway.roster.nobody_there(worker)
            case Tell(message=message):
                self._gateway.tell(CANCEL.at(), message, self.context)
                if message.attempt >= 0:
                    metrics.GATEWAY_RETRIES.labels(code=message.reason).inc()
            case Restart(why=why):
                _log.info("request_restarted", extra={"fields": {"request": self.job.request, "why": why}})
                self._text.restart()
                self.pieces.clear()
                self._fetched_tokens = 0
                self._first_token_at_s = self._last_chunk_s = 0.0
            case Ended():
                self._end(effect)
            case _:
                raise Bug(f"request {self.job.request}: no way to perform {effect!r}")

    def _deliver(self, tokens: list[int], *, last: bool) -> None:
        now_s = self._gateway.clock.monotonic()
        if not self._last_chunk_s:
            self._first_token_at_s = self._gateway.clock.wall()
            tracing.record("first_token", start_s=self._dispatched_at_s, end_s=self._first_token_at_s,
                           parent=self.context)
        elif tokens:
            self._tbt.observe(now_s - self._last_chunk_s)
        self._last_chunk_s = now_s
        text = self._text.push(tokens, last=last)
        self.pieces.append(Piece(text, self._text.tokens))
        self._news.set()
        if self._text.matched is not None:
            self._events.append(Stopped())
        elif not self.job.replayable and self._text.tokens - self._fetched_tokens > self._gateway.stream_buffer_tokens:
            self._events.append(Abandoned(
                "slow_client", f"{self._text.tokens - self._fetched_tokens} tokens waited for the client to read"))

    def _end(self, ended: Ended) -> None:
        self.ended = ended
        for task in self._asking:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._first_token_at_s:
            tracing.record("stream", start_s=self._first_token_at_s, end_s=self._gateway.clock.wall(),
                           parent=self.context,
                           attributes={"moonbus.tokens": self._text.tokens, "moonbus.finish": self.finish})
        self._gateway.ended(self, self._summary(ended))
        self._news.set()

    def _summary(self, ended: Ended) -> RequestDone:
        machine, job, placement = self.machine, self.job, self.machine.placement
        gaps = self._text.tokens - 1
        tbt_s = None
        if machine.first_token_s is not None and machine.last_token_s is not None and gaps > 0:
            tbt_s = (machine.last_token_s - machine.first_token_s) / gaps
        return RequestDone(
            request=job.request, gateway=job.gateway, model=job.model, spec=job.spec, tenant=job.tenant,
            received_at_s=self._received_at_s, outcome=ended.outcome, code=ended.code, finish=self.finish,
            prompt_tokens=job.num_tokens, completion_tokens=self._text.tokens,
            predicted_hit_tokens=placement.hit_tokens if placement else 0, hit_tokens=self.cached_tokens,
            predicted_ttft_s=placement.predicted_ttft_s if placement else 0.0, ttft_s=self.ttft_s, tbt_s=tbt_s,
            duration_s=self._gateway.clock.monotonic() - self._received_s, attempts=machine.attempt + 1,
            conductor=placement.conductor if placement else ConductorId(""),
            prefill=placement.prefill if placement else WorkerId(""),
            decode=placement.decode if placement else WorkerId(""),
            trace=self.trace_id, stages=machine.stages, last_key=job.keys[-32:], client_id=self._client_id,
            decisions=[msgspec.structs.replace(one, at_s=one.at_s - self._received_s) for one in machine.decisions])

    @property
    def trace_id(self) -> str:
        """Hex id of the request's trace; empty when nothing is traced."""
        span = trace.get_current_span(self.context).get_span_context()
        return f"{span.trace_id:032x}" if span.is_valid else ""

    def _arm(self) -> None:
        """Sees to it that the machine wakes in time; a timer that fires early is harmless, so it is kept."""
        wake_s = self.machine.next_wake()
        if wake_s is None:
            return
        now_s = self._gateway.clock.monotonic()
        if self._timer is not None:
            if self._timer_due_s <= wake_s:
                return
            self._timer.cancel()
        # Kept here, since uvloop gives a timer that is due at once as a handle that cannot say when.
        self._timer_due_s = max(now_s, wake_s)
        self._timer = asyncio.get_running_loop().call_later(self._timer_due_s - now_s, self._wake)

    def _wake(self) -> None:
        self._timer = None  # gone before the machine is asked: loops may fire a little early, and it may say "not yet"
        self.feed(Woke())

    # -- questions ---------------------------------------------------------------------------------------------

    def _ask(self, question: Coroutine[None, None, None], step: str) -> None:
        task = self._gateway.spawn(question, f"{step} {self.job.request}")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _place(self, address: Address, message: object, tag: Tag, timeout_s: float) -> None:
        with _tracer.start_as_current_span(
                "place", context=self.context, attributes={"moonbus.attempt": tag.attempt}) as span:
            reply = await self._request(address, message, tag, timeout_s)
            if isinstance(reply, Placement | Rejection):
                span.set_attribute("moonbus.candidates", json.dumps([
                    {**msgspec.structs.asdict(one), "ttft_s": one.ttft_s} for one in reply.candidates]))
            if isinstance(reply, Placement):
                span.set_attributes({
                    "moonbus.prefill": reply.prefill, "moonbus.decode": reply.decode,
                    "moonbus.conductor": reply.conductor, "moonbus.hit_tokens": reply.hit_tokens,
                    "moonbus.sources": json.dumps([source.owner for source in reply.sources]),
                    "moonbus.predicted_ttft_s": reply.predicted_ttft_s,
                    "moonbus.predicted_tbt_s": reply.predicted_tbt_s})
            elif isinstance(reply, Rejection):
                span.set_attributes({"moonbus.rejected": reply.code, "moonbus.retry_after_s": reply.retry_after_s,
                                     "moonbus.why": reply.message})
        self._answered(reply, tag)

    async def _give(self, worker: WorkerId, message: object, tag: Tag, timeout_s: float) -> None:
        with _tracer.start_as_current_span(
                tag.step, context=self.context,
                attributes={"moonbus.worker": worker, "moonbus.attempt": tag.attempt}) as span:
            reply = await self._request(JOB.at(worker=worker), message, tag, timeout_s)
            span.set_attribute("moonbus.answer", type(reply).__name__)
        self._answered(reply, tag)

    async def _request(self, address: Address, message: object, tag: Tag, timeout_s: float) -> object:
        """The reply, or the event that says why there is none."""
        try:
            return await self._gateway.bus.request(address, message, timeout_s=timeout_s)
        except PayloadTooLarge as error:
            return TooLarge(tag, error.size_bytes, error.limit_bytes)
        except NoResponders as error:
            return Unanswered(tag, str(error), gone=True)
        except (BusError, ValueError) as error:  # ValueError: a worker's name that cannot stand in a subject
            return Unanswered(tag, str(error))

    def _answered(self, reply: object, tag: Tag) -> None:
        self.feed(reply if isinstance(reply, TooLarge | Unanswered) else Answered(tag, reply))


class Gateway:
    """What all requests share: the bus, the roster, the threads, the requests under way."""

    def __init__(self, settings: Settings, bus: Bus, clock: Clock, *, gateway_id: GatewayId) -> None:
        self.settings, self.bus, self.clock, self.gateway_id = settings, bus, clock, gateway_id
        self.limits = Limits(
            place_timeout_s=settings.place_timeout_s, job_timeout_s=settings.job_timeout_s,
            deadline_s=settings.request_deadline_s, stall_s=settings.stall_s, quiet_s=settings.quiet_s,
            max_attempts=settings.max_attempts)
        self.stream_buffer_tokens = settings.stream_buffer_tokens
        self.threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        self.roster = Roster(
            bus, clock, asker=gateway_id, cache=settings.cache_path(), models=settings.models,
            suspect_after_s=settings.suspect_after_s, dead_after_s=settings.dead_after_s, threads=self.threads,
            on_lost=self._lost)
        self.draining = False
        """No new requests: this gateway is about to leave."""
        #: {request: its exchange}, all and only those that have not ended
        self._under_way: dict[RequestId, Exchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens: Subscription | None = None
        self._chance = random.Random()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Listens for tokens and workers."""
        self._tokens = await self.bus.subscribe(TOKENS.at(gateway=self.gateway_id), self._on_tokens)
        self.bus.on_reconnect(self._reconnected)
        await self.roster.start()

    async def close(self) -> None:
        """Aborts what is left, waits shortly for the last words, stops listening."""
        self.abort("the gateway is shutting down")
        await self.roster.close()
        if self._tokens is not None:
            await self._tokens.close()
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=CLOSE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Until no request is under way; false when some still are after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _reconnected(self) -> None:
        for exchange in list(self._under_way.values()):
            exchange.feed(BusReturned())

    def abort(self, why: str) -> None:
        """Ends every request under way with an error that invites a retry."""
        problem = Problem(status=503, code="shutting_down", message=why, retry_after_s=1.0)
        for exchange in list(self._under_way.values()):
            exchange.feed(Aborted(problem))

    def open(self, prompt: Prompt, text: AnswerText, *, received_s: float, received_at_s: float,
             context: Context, client_id: str = "") -> Exchange:
        """Begins to run ``prompt``; times of its arrival are monotonic and Unix seconds; ``client_id`` is what the
        client calls it."""
        exchange = Exchange(self, prompt, text, received_s=received_s, received_at_s=received_at_s, context=context,
                            client_id=client_id)
        self._under_way[prompt.job.request] = exchange
        self._idle.clear()
        metrics.GATEWAY_PROMPT_TOKENS.labels(model=prompt.job.model).inc(prompt.job.num_tokens)
        exchange.feed(Started())
        return exchange

    def ended(self, exchange: Exchange, done: RequestDone) -> None:
        """The one place where a request's end is counted and told."""
        if self._under_way.pop(done.request, None) is None:
            raise Bug(f"request {done.request} ended twice")
        if not self._under_way:
            self._idle.set()
        self.tell(DONE.at(), done, exchange.context)
        model = done.model
        metrics.GATEWAY_REQUESTS.labels(model=model, outcome=done.outcome, code=done.code).inc()
        metrics.GATEWAY_ATTEMPTS.observe(done.attempts)
        metrics.GATEWAY_DURATION_SECONDS.labels(model=model).observe(done.duration_s)
        metrics.GATEWAY_COMPLETION_TOKENS.labels(model=model).inc(done.completion_tokens)
        metrics.GATEWAY_CACHED_TOKENS.labels(model=model).inc(done.hit_tokens)
        if done.ttft_s is not None:
            metrics.GATEWAY_TTFT_SECONDS.labels(model=model).observe(done.ttft_s)
        level = logging.INFO if done.outcome in ("ok", "cancelled", "rejected") else logging.WARNING
        _log.log(level, "request_done", extra={"fields": {
            "request": done.request, "client": done.client_id or "-", "outcome": done.outcome, "code": done.code or "-",
            "prompt": done.prompt_tokens, "answer": done.completion_tokens, "hit": done.hit_tokens,
            "attempts": done.attempts, "seconds": done.duration_s, "story": " > ".join(exchange.machine.story)}})

    def retry_delay_s(self, attempt: int) -> float:
        """Pause before a question to the conductors is repeated."""
        return backoff.delay_s(attempt, limit_s=1.0, chance=self._chance)

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """A task that this gateway owns."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def tell(self, address: Address, message: object, context: Context) -> None:
        """Publishes ``message`` soon, in trace ``context``; a bus that is away costs the message, not the request."""
        self.spawn(self._publish(address, message, context), f"publish {address}")

    async def _publish(self, address: Address, message: object, context: Context) -> None:
        attach(context)  # for this task only: it ends with the message
        try:
            await self.bus.publish(address, message)
        except BusError as error:
            metrics.BUS_PUBLISH_FAILURES.labels(subject=address.subject.template).inc()
            _log.warning("publish_failed", extra={"fields": {"subject": address.text, "why": error}})

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("task_failed", exc_info=error, extra={"fields": {"task": task.get_name()}})

    def _lost(self, worker: WorkerId, why: str) -> None:
        for exchange in list(self._under_way.values()):
            exchange.feed(WorkerLost(worker, why))

    async def _on_tokens(self, delivery: Delivery) -> None:
        for item in delivery.message.items:
            exchange = self._under_way.get(item.request)
            if exchange is not None:  # else it was cancelled a moment ago
                exchange.feed(item)
