"""One request's life at the edge.

::

    new ─► placing ─► reserving ─► prefilling ─► streaming ─► done
             ▲            │            │             │
             └────────────┴────────────┴─────────────┘  another attempt, without the worker that failed

* *placing*: the conductors are asked; none answering is waited for until ``place_timeout_s`` (one may be restarting),
  or until the first token would be late.
* *reserving*: the decode worker is asked for landing room; no grant, no prefill.
* *prefilling*: the prefill worker has the job (or is about to); the first token is awaited.
* *streaming*: tokens have been delivered. An attempt that fails now can be repeated only when the client has seen
  nothing of them (``replayable``: answers that are not streamed).
* *done*: entered exactly once, with exactly one :class:`Ended`; everything later is ignored.

Nobody is believed for ever: after ``quiet_s`` without a word, and after the bus was away, the workers are asked what
they have of the request (a *look*). Words that they have spoken and that did not come within ``gap_s`` are lost, unless
it was we who stood still meanwhile.

An attempt ends early when a worker refuses, is unreachable, reports failure or is declared lost, or when tokens are
lost on the way; it is cancelled on the bus, who is to blame excluded and the request placed again, at most
``max_attempts`` times. Whether that is possible shows here alone, so no worker is asked. Once the decode worker has
spoken, nothing that is heard of or from the prefill worker matters any more. A cancel always reaches the bus before
:class:`Ended` unless the workers themselves finished the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal
from zlib import crc32

import msgspec

from services.gateway.core.problem import Problem
from services.gateway.core.streams import TokenOrder
from shared.errors import Bug
from shared.ids import BlockKey, GatewayId, RequestId, SpecDigest, WorkerId
from shared.machine import Answered, Effect, Unanswered, Woke
from shared.messages import (
    Accepted,
    Cancel,
    Decision,
    DecodeJob,
    Finish,
    Inquiry,
    JobFailed,
    JobState,
    Placement,
    PlaceRequest,
    PrefillJob,
    Refused,
    Rejection,
    Reserved,
    Sampling,
    Stages,
    TokenChunk,
)

State = Literal["new", "placing", "reserving", "prefilling", "streaming", "done"]
Outcome = Literal["ok", "cancelled", "rejected", "failed"]
Step = Literal["place", "reserve", "dispatch", "look"]

REJECTED_STATUS = {"no_worker": 503, "ttft": 429, "tbt": 429, "capacity": 429, "quota": 429}
"""{rejection code: HTTP status}: 429 is contended, 503 is absent."""
_CONTENDED = ("capacity", "tbt")
"""Codes of a worker's refusal that mean load, not absence."""
_LATE_S = 0.5
"""Woken so much later than we wanted, we stood still ourselves: what we miss may be waiting at our own door."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request after tokenising: all that the machine needs to run it somewhere."""

    request: RequestId
    gateway: GatewayId
    model: str
    spec: SpecDigest
    tenant: str
    num_tokens: int
    tokens: bytes
    """Packed prompt token ids."""
    keys: bytes
    """Packed keys of the prompt's full blocks."""
    root: BlockKey
    sampling: Sampling
    exclude: tuple[WorkerId, ...] = ()
    """Workers that the client does not want."""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    head_start_s: float = 0.0
    """Where prompts queue, it counts as having come so much earlier."""
    replayable: bool = False
    """Nothing reaches the client before the end, so even a started answer may be computed again."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how often; seconds."""

    place_timeout_s: float = 10.0
    place_try_s: float = 2.0
    """Longest wait for one answer of a conductor."""
    job_timeout_s: float = 10.0
    """Longest wait for a worker to say whether it takes a job."""
    deadline_s: float = 300.0
    """Longest life of a request."""
    stall_s: float = 30.0
    """Longest silence of an answer that has begun."""
    quiet_s: float = 5.0
    """Silence after which the workers are asked whether they still have the request."""
    gap_s: float = 2.0
    """Longest wait for a token chunk that others have overtaken, or that its worker says it has sent."""
    max_attempts: int = 3


# -- events of its own (the wire's TokenChunk and JobFailed are events as they are) ---------------------------------

class Started(msgspec.Struct, frozen=True):
    """The request is ready to be placed."""


class WorkerLost(msgspec.Struct, frozen=True):
    """A worker died, or came back as somebody else; whatever it had of us is gone."""

    worker: WorkerId
    why: str


class BusReturned(msgspec.Struct, frozen=True):
    """The bus was away and is back: what was said meanwhile may be lost."""


class TooLarge(msgspec.Struct, frozen=True):
    """A message of ours does not fit on the bus."""

    tag: Tag
    size_bytes: int
    limit_bytes: int


class Abandoned(msgspec.Struct, frozen=True):
    """The client is gone, or does not read."""

    code: str
    why: str


class Stopped(msgspec.Struct, frozen=True):
    """A stop string ended the text; the rest of the answer is not wanted."""


class Aborted(msgspec.Struct, frozen=True):
    """The gateway itself gives up on the request (it is shutting down, say)."""

    problem: Problem


# -- effects ---------------------------------------------------------------------------------------------------------

class Tag(msgspec.Struct, frozen=True):
    """Which question an answer belongs to."""

    step: Step
    attempt: int
    number: int
    """Counts the questions of a request, so that a late answer to a repeated one is recognised."""


class AskConductor(Effect, frozen=True):
    """Ask any conductor; comes back as Answered, Unanswered or TooLarge with ``tag``."""

    message: PlaceRequest
    tag: Tag
    timeout_s: float


class AskWorker(Effect, frozen=True):
    """Give ``worker`` a job, or ask after one; comes back as Answered, Unanswered or TooLarge with ``tag``."""

    worker: WorkerId
    message: DecodeJob | PrefillJob | Inquiry
    tag: Tag
    timeout_s: float


class NobodyThere(Effect, frozen=True):
    """Nobody listens where ``worker`` should be: tell the membership."""

    worker: WorkerId


class Tell(Effect, frozen=True):
    """Publish ``message`` to everybody."""

    message: Cancel


class Deliver(Effect, frozen=True):
    """The next tokens of the answer; ``finish`` with the last ones."""

    tokens: list[int]
    finish: Finish


class Restart(Effect, frozen=True):
    """Forget what was delivered: the answer begins again."""

    why: str


class Ended(Effect, frozen=True):
    """The end, once. ``problem`` is what the client hears unless the outcome is ok."""

    outcome: Outcome
    code: str = ""
    finish: str = ""
    problem: Problem | None = None


Event = (Started | Answered | Unanswered | TokenChunk | JobFailed | WorkerLost | BusReturned | TooLarge | Abandoned
         | Stopped | Aborted | Woke)


class RequestMachine:
    """Decides the steps of one request."""

    def __init__(self, job: Job, limits: Limits, *, retry_delay_s: Callable[[int], float]) -> None:
        """``retry_delay_s`` gives the pause before asking the conductors for the n-th time again (n from 0), which is
        also what the n-th wait for room is longer than predicted."""
        self.job, self.limits = job, limits
        self._retry_delay_s = retry_delay_s
        self.state: State = "new"
        self.attempt = 0
        self.placement: Placement | None = None
        """Of the present attempt; kept after the end."""
        self.stages: Stages | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.decisions: list[Decision] = []
        """What conductors answered, one for each attempt; ``at_s`` is on the clock of :meth:`handle`."""
        self.story: list[str] = []
        """One line a turn of the life, for logs and for whoever asks why."""
        self._order = TokenOrder(0)
        self._excluded: list[WorkerId] = list(job.exclude)
        self._contention: Problem | None = None
        """What a worker said that was full, for when nobody else is left."""
        self._deadline_s = 0.0
        self._attempt_s = 0.0
        """When the present attempt was to be placed first."""
        self._place_until_s = 0.0
        self._place_tries = 0
        self._asked_s = 0.0
        """When the conductors were asked last."""
        self._waits = 0
        """How often this attempt was told to wait for room."""
        self._unheard_since_s: float | None = None
        """When the conductors were asked that have not answered since."""
        self._unheard_s = 0.0
        """How long this attempt waited for conductors that did not answer."""
        self._ask_again_s: float | None = None
        self._gap_since_s: float | None = None
        self._look_at_s: float | None = None
        """When the workers are asked after the request; set while an attempt is with them."""
        self._looked_at: WorkerId | None = None
        self._question = 0
        self._look = 0
        self._spread = crc32(job.request.encode()) / 2**32
        """Its place among all that would ask at once, in [0, 1)."""

    @property
    def received(self) -> int:
        """Answer tokens delivered so far."""
        return self._order.received

    def handle(self, event: Event, *, now: float) -> Sequence[Effect]:
        """Applies ``event`` at ``now`` (monotonic seconds); the only door into the state."""
        if self.state == "done":
            return []
        match event:
            case TokenChunk():
                return self._chunk(event, now)
            case Started():
                self._deadline_s = now + self.limits.deadline_s
                return self._place(now)
            case Answered(tag=Tag(step="look") as tag) | Unanswered(tag=Tag(step="look") as tag):
                return self._looked(event, now) if tag.attempt == self.attempt and tag.number == self._look else []
            case Answered(tag=Tag() as tag) | Unanswered(tag=Tag() as tag) if tag.number != self._question:
                return []
            case Answered(message=message):
                return self._answered(message, now)
            case Unanswered(why=why, gone=gone):
                return self._unanswered(why, gone, now)
            case TooLarge():
                return self._end("failed", Problem(
                    status=413, code="payload_too_large",
                    message=f"the prompt's {self.job.num_tokens} tokens make a message of {event.size_bytes} bytes, "
                            f"but the bus carries {event.limit_bytes} bytes"))
            case JobFailed():
                return self._job_failed(event, now)
            case WorkerLost(worker=worker, why=why):
                return self._worker_lost(worker, why, now)
            case BusReturned():
                if self.state in ("prefilling", "streaming"):
                    # What is on its way again comes first; and all other requests would ask as well.
                    self._look_at_s = now + self.limits.gap_s * (1 + self._spread)
                return []
            case Woke():
                return self._woke(now)
            case Abandoned(code=code, why=why):
                return self._end("cancelled", Problem(status=499, code=code, message=why))
            case Stopped():
                return [self._cancel("stop"), *self._finish("stop")]
            case Aborted(problem=problem):
                return self._end("failed", problem)
        raise Bug(f"request {self.job.request}: unknown event {event!r}")

    def next_wake(self) -> float | None:
        """Absolute monotonic seconds of the next ``Woke`` wanted."""
        if self.state in ("new", "done"):
            return None
        times = [self._deadline_s]
        if self._ask_again_s is not None:
            times.append(self._ask_again_s)
        if self.state == "streaming" and self.last_token_s is not None:
            times.append(self.last_token_s + self.limits.stall_s)
        if self._gap_since_s is not None:
            times.append(self._gap_since_s + self.limits.gap_s)
        if self._look_at_s is not None:
            times.append(self._look_at_s)
        return min(times)

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when the state contradicts itself."""
        needs_placement = self.state in ("reserving", "prefilling", "streaming")
        if (needs_placement and self.placement is None) or self.attempt >= max(1, self.limits.max_attempts) \
                or self._order.attempt != self.attempt:
            raise Bug(f"request {self.job.request} in {self.state}, attempt {self.attempt}: " + " | ".join(self.story))

    @property
    def _handed_over(self) -> bool:
        """The decode worker has spoken, be it out of turn: the prefill worker's part is over, and was done well."""
        return self.state == "streaming" or (self.state == "prefilling" and self._order.gap)

    # -- placing ----------------------------------------------------------------------------------------------------

    def _place(self, now: float) -> list[Effect]:
        self.state = "placing"
        self.placement, self.stages = None, None
        self._attempt_s = now
        self._place_until_s = now + self.limits.place_timeout_s
        self._place_tries = self._waits = 0
        self._unheard_since_s, self._unheard_s = None, 0.0
        return self._ask_conductor(now)

    def _ask_conductor(self, now: float) -> list[Effect]:
        self._ask_again_s, self._asked_s = None, now
        self._place_tries += 1
        job, waited_s = self.job, now - self._attempt_s
        message = PlaceRequest(
            request=job.request, model=job.model, spec=job.spec, tenant=job.tenant, num_tokens=job.num_tokens,
            keys=job.keys, max_tokens=job.sampling.max_tokens, attempt=self.attempt, exclude=list(self._excluded),
            ttft_slo_s=None if job.ttft_slo_s is None else job.ttft_slo_s - waited_s, tbt_slo_s=job.tbt_slo_s,
            head_start_s=job.head_start_s, waited_s=waited_s)
        until_s = min(self._place_until_s, self._deadline_s, self._late_s())
        timeout_s = max(0.05, min(self.limits.place_try_s, until_s - now))
        return [AskConductor(message, self._tag("place"), timeout_s)]

    def _answered(self, message: object, now: float) -> list[Effect]:
        if self._unheard_since_s is not None:
            self._unheard_s += now - self._unheard_since_s
            self._unheard_since_s = None
        match self.state, message:
            case "placing", Placement() as placement:
                self.decisions.append(Decision(attempt=self.attempt, at_s=now, answer=placement))
                return self._reserve(placement, now)
            case "placing", Rejection() as rejection:
                self.decisions.append(Decision(attempt=self.attempt, at_s=now, answer=rejection))
                return self._rejected(rejection, now)
            case "reserving", Reserved() as reserved:
                return self._prefill(reserved, now)
            case _ if self._handed_over:
                return []  # tokens were faster than the answer; they prove more than it says
            case "prefilling", Accepted():
                self._note("accepted")
                return []
            case "reserving" | "prefilling", Refused() as refused:
                return self._again(self._asked_worker(), refused.code, refused.message, now,
                                   retry_after_s=refused.retry_after_s)
            case "reserving" | "prefilling", _:
                worker = self._asked_worker()
                return self._again(worker, "bad_answer", f"{worker} answered with {type(message).__name__}", now)
        raise Bug(f"request {self.job.request} in {self.state} got {type(message).__name__}")

    def _unanswered(self, why: str, gone: bool, now: float) -> list[Effect]:
        if self.state == "placing":
            if self._unheard_since_s is None:
                self._unheard_since_s = self._asked_s
            again_s = now + self._retry_delay_s(self._place_tries - 1)
            if again_s < min(self._place_until_s, self._deadline_s, self._late_s()):
                self._note(f"no conductor: {why}")
                self._ask_again_s = again_s
                return []
            return self._no_conductor(now - self._unheard_since_s, f"the last time: {why}")
        if self._handed_over:
            return []
        worker = self._asked_worker()
        told: list[Effect] = [NobodyThere(worker)] if gone else []
        return told + self._again(worker, "worker_lost" if gone else "worker_silent", f"{worker}: {why}", now)

    def _rejected(self, rejection: Rejection, now: float) -> list[Effect]:
        # Room that was promised and not found so often is longer in coming; and nobody comes with all the others.
        wait_s = min(rejection.wait_s + self._retry_delay_s(self._waits), max(rejection.spare_s, rejection.wait_s))
        again_s = now + wait_s
        if rejection.wait_s > 0 and again_s < self._deadline_s:
            self._waits += 1
            self._note(f"waits {wait_s:.2f} s for room: {rejection.message}")
            self._ask_again_s, self._place_until_s = again_s, again_s + self.limits.place_timeout_s
            self._place_tries = 0
            del self.decisions[-1]  # what counts is how the wait ends
            return []
        if rejection.code == "no_worker" and self._contention is not None:
            # we excluded the workers ourselves because they were full: that is contention, not absence
            return self._end("rejected", self._contention)
        if 0 < self._unheard_s >= rejection.late_s > 0:
            return self._no_conductor(self._unheard_s, f"now {rejection.message}")  # else it would have been in time
        return self._end("rejected", Problem(
            status=REJECTED_STATUS.get(rejection.code, 503), code=rejection.code, message=rejection.message,
            retry_after_s=rejection.retry_after_s))

    def _no_conductor(self, unheard_s: float, then: str) -> list[Effect]:
        return self._end("rejected", Problem(
            status=503, code="no_conductor", retry_after_s=1.0,
            message=f"no conductor answered for {unheard_s:.2f} s; {then}"))

    def _late_s(self) -> float:
        """When the bound on the first token will have passed. Another attempt has as long as the first one had."""
        return math.inf if self.job.ttft_slo_s is None else self._attempt_s + self.job.ttft_slo_s

    # -- reserving and prefilling -----------------------------------------------------------------------------------

    def _reserve(self, placement: Placement, now: float) -> list[Effect]:
        self.state, self.placement = "reserving", placement
        self._note(f"placed on {placement.prefill} and {placement.decode}")
        job = self.job
        message = DecodeJob(
            request=job.request, attempt=self.attempt, spec=job.spec, gateway=job.gateway, tenant=job.tenant,
            tokens=job.tokens, keys=job.keys, root=job.root, sampling=job.sampling,
            deadline_s=self._left_s(now), prefill=placement.prefill, tbt_slo_s=job.tbt_slo_s)
        return [AskWorker(placement.decode, message, self._tag("reserve"), self._job_timeout_s(now))]

    def _prefill(self, reserved: Reserved, now: float) -> list[Effect]:
        placement = self._placed()
        self.state = "prefilling"
        self._look_at_s = now + self.limits.quiet_s
        self._note("reserved")
        job = self.job
        message = PrefillJob(
            request=job.request, attempt=self.attempt, spec=job.spec, gateway=job.gateway, tenant=job.tenant,
            tokens=job.tokens, keys=job.keys, root=job.root, sampling=job.sampling, sources=placement.sources,
            endpoints=[], decode=placement.decode, landing=reserved.landing, deadline_s=self._left_s(now),
            own_blocks=placement.own_blocks, head_start_s=job.head_start_s,
            lead_s=None if placement.lead_s is None else placement.lead_s - (now - self.decisions[-1].at_s))
        return [AskWorker(placement.prefill, message, self._tag("dispatch"), self._job_timeout_s(now))]

    # -- tokens -----------------------------------------------------------------------------------------------------

    def _chunk(self, chunk: TokenChunk, now: float) -> list[Effect]:
        if self.state not in ("prefilling", "streaming"):
            return []  # of an attempt that is over
        fresh = self._order.push(chunk)
        if chunk.attempt == self.attempt and chunk.stages is not None:
            self.stages = chunk.stages
        if fresh is None:
            if self._order.hopeless:
                return self._tokens_lost(now)
            if self._order.gap and self._gap_since_s is None:
                self._gap_since_s = now
            return []
        if fresh.finish == "cancelled":  # nobody here cancelled it: we would be done
            return self._broken(chunk.worker, "worker_cancelled", f"{chunk.worker} gave the answer up", now)
        self._gap_since_s = now if self._order.gap else None
        self._look_at_s = now + self.limits.quiet_s
        if self.state == "prefilling":
            self.state = "streaming"
            self._note("first token")
        self.last_token_s = now
        if self.first_token_s is None:
            self.first_token_s = now
        delivered: list[Effect] = [Deliver(fresh.tokens, fresh.finish)]
        return delivered + self._finish(fresh.finish) if fresh.finish else delivered

    # -- looks ------------------------------------------------------------------------------------------------------

    def _ask_after(self, worker: WorkerId, now: float) -> list[Effect]:
        self._look += 1
        self._looked_at, self._look_at_s = worker, now + self.limits.quiet_s
        inquiry = Inquiry(request=self.job.request, attempt=self.attempt)
        return [AskWorker(worker, inquiry, Tag("look", self.attempt, self._look), self._job_timeout_s(now))]

    def _looked(self, event: Answered | Unanswered, now: float) -> list[Effect]:
        """What a worker says of the present attempt. Its silence says nothing: it is asked again, or declared lost."""
        worker = self._looked_at
        if worker is None or self.state not in ("prefilling", "streaming"):
            return []
        if isinstance(event, Unanswered):
            return [NobodyThere(worker)] if event.gone else []
        if not isinstance(event.message, JobState):
            return []
        said, decode = event.message, self._placed().decode
        if worker != decode:  # the prefill worker has it still, or the decode worker must know what became of it
            return [] if said.stage == "waiting" else self._ask_after(decode, now)
        if self._gap_since_s is None and (said.stage != "running" or said.sent > self.received):
            self._gap_since_s = now
        return []

    # -- failures ---------------------------------------------------------------------------------------------------

    def _job_failed(self, failed: JobFailed, now: float) -> list[Effect]:
        if failed.attempt != self.attempt or self.state not in ("reserving", "prefilling", "streaming"):
            return []
        if self._handed_over and failed.worker != self._placed().decode:
            return []  # the answer to its handover was late or lost, no more
        return self._broken(failed.blame or failed.worker, failed.code or "worker_failed",
                            f"{failed.worker}: {failed.message}", now)

    def _worker_lost(self, worker: WorkerId, why: str, now: float) -> list[Effect]:
        if self.placement is None or self.state not in ("reserving", "prefilling", "streaming"):
            return []
        if worker == self.placement.decode or (worker == self.placement.prefill and not self._handed_over):
            return self._broken(worker, "worker_lost", f"{worker} was lost: {why}", now)
        return []

    def _tokens_lost(self, now: float) -> list[Effect]:
        return self._broken(None, "tokens_lost", "tokens were lost on the way", now)  # that was the bus, no worker

    def _broken(self, blame: WorkerId | None, code: str, message: str, now: float) -> list[Effect]:
        """The attempt failed under way: another one, unless the client has seen part of the answer."""
        if self.state == "streaming" and not self.job.replayable:
            return self._end("failed", Problem(status=502, code=code, message=f"the answer broke off: {message}",
                                               retry_after_s=1.0))
        return self._again(blame, code, message, now)

    def _again(self, blame: WorkerId | None, code: str, message: str, now: float, *,
               retry_after_s: float = 1.0) -> list[Effect]:
        """The attempt is over; another one without ``blame``, if one is left."""
        self._note(f"attempt {self.attempt} failed: {code}: {message}")
        self._give_up(code, message)
        if code in _CONTENDED:
            self._contention = Problem(status=429, code=code, message=message, retry_after_s=retry_after_s)
        if self.attempt + 1 >= self.limits.max_attempts:
            if code in _CONTENDED and self._contention is not None:
                return self._end("rejected", self._contention)
            return self._end("failed", Problem(
                status=503, code=code, retry_after_s=retry_after_s,
                message=f"gave up after {self.attempt + 1} attempts; the last one: {message}"))
        effects: list[Effect] = [self._cancel(code, self.attempt)]
        if self.state == "streaming":
            effects.append(Restart(message))
        if blame is not None and blame not in self._excluded:
            self._excluded.append(blame)
        self.attempt += 1
        self._order = TokenOrder(self.attempt)
        self._gap_since_s = self._look_at_s = None
        self.first_token_s = self.last_token_s = None
        return effects + self._place(now)

    def _woke(self, now: float) -> list[Effect]:
        if now >= self._deadline_s:
            return self._end("failed", Problem(
                status=504, code="deadline_exceeded",
                message=f"not finished within {self.limits.deadline_s:g} s (while {self.state})"))
        if self._ask_again_s is not None and now >= self._ask_again_s:
            return self._ask_conductor(now)
        if self._gap_since_s is not None and now >= self._gap_since_s + self.limits.gap_s:
            if now <= self._gap_since_s + self.limits.gap_s + _LATE_S:
                return self._tokens_lost(now)
            self._gap_since_s = now
        if self.state == "streaming" and self.last_token_s is not None \
                and now >= self.last_token_s + self.limits.stall_s:
            return self._broken(self._placed().decode, "stalled", f"no token for {self.limits.stall_s:g} s", now)
        if self._look_at_s is not None and now >= self._look_at_s:
            return self._ask_after(self._placed().decode if self._handed_over else self._placed().prefill, now)
        return []

    # -- ends -------------------------------------------------------------------------------------------------------

    def _finish(self, finish: str) -> list[Effect]:
        self.state = "done"
        self._note(f"finished: {finish}")
        return [Ended("ok", finish=finish)]

    def _end(self, outcome: Outcome, problem: Problem) -> list[Effect]:
        self.state = "done"
        self._note(f"{outcome}: {problem.code}: {problem.message}")
        self._give_up(problem.code, problem.message)
        return [self._cancel(problem.code), Ended(outcome, code=problem.code, problem=problem)]

    def _give_up(self, code: str, message: str) -> None:
        """The attempt ended, if one was under way; the first reason is the one that counts."""
        last = self.decisions[-1] if self.decisions else None
        if last is not None and last.attempt == self.attempt and isinstance(last.answer, Placement) and not last.code:
            self.decisions[-1] = msgspec.structs.replace(last, code=code, message=message)

    def _cancel(self, reason: str, attempt: int = -1) -> Tell:
        return Tell(Cancel(request=self.job.request, reason=reason, attempt=attempt))

    # -- small things -----------------------------------------------------------------------------------------------

    def _tag(self, step: Step) -> Tag:
        self._question += 1
        return Tag(step, self.attempt, self._question)

    def _placed(self) -> Placement:
        if self.placement is None:
            raise Bug(f"request {self.job.request} in {self.state} has no placement")
        return self.placement

    def _asked_worker(self) -> WorkerId:
        placement = self._placed()
        return placement.decode if self.state == "reserving" else placement.prefill

    def _left_s(self, now: float) -> float:
        return max(0.001, self._deadline_s - now)

    def _job_timeout_s(self, now: float) -> float:
        return min(self.limits.job_timeout_s, self._left_s(now))

    def _note(self, line: str) -> None:
        self.story.append(line)
