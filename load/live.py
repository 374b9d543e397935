"""Open-loop replay: every request leaves when the schedule says, however the ones before it fare.

A closed loop (next request when the last one ends) slows down with the server and so hides its overload. Here
the only brake is a valve on requests in flight that protects the *client*: what it holds back is not sent
later but counted as ``dropped``. How late requests leave is measured too (schedule lag); a large lag means
this machine, not the server, set the pace.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from load.client import Answer, Api, GatewayClient, Prompt
from load.record import Outcome, RunRecord
from load.workload.prompts import Plan

_REJECTING_STATUS = (429, 503)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to send."""

    api: Api
    model: str
    rate_scale: float = 1.0
    """2 sends twice as fast as the trace did."""
    max_in_flight: int = 1024
    grace_s: float = 10.0
    """After a stop, how long requests in flight may go on before they are cancelled."""
    exact_output: bool = True
    """Ask for the trace's answer lengths whatever the model wants to say."""
    seed: int = 0


@dataclass
class Progress:
    """What the replay has done so far, for whoever shows it."""

    sent: int = 0
    in_flight: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    #: TTFT in seconds of the requests that ended last
    recent_ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=512))

    @property
    def done(self) -> int:
        """Requests that have their record."""
        return self.outcomes.total()


@dataclass
class Stop:
    """The two ways to end a replay early, both safe to set from a signal handler of the loop."""

    sending: asyncio.Event = field(default_factory=asyncio.Event)
    """Send no more; what is in flight has ``grace_s``."""
    everything: asyncio.Event = field(default_factory=asyncio.Event)
    """Cancel what is in flight now."""

    def press(self) -> None:
        """First call: stop sending. Second: stop everything."""
        if self.sending.is_set():
            self.everything.set()
        self.sending.set()


async def replay(client: GatewayClient, plans: Iterable[Plan], *, contents: Callable[[Plan], Prompt],
                 options: ReplayOptions, clock: Callable[[], float], write: Callable[[RunRecord], None],
                 progress: Progress, stop: Stop) -> float:
    """Sends ``plans`` by their schedule and writes one record each as it ends; returns the duration in
    seconds.

    Plans that were not yet due when the replay was stopped get no record. Errors of ``write`` end the replay.
    """
    start = clock()
    running: set[asyncio.Task[None]] = set()

    async def run_one(plan: Plan, prompt: Prompt, scheduled_s: float) -> None:
        answer = Answer(sent_at=clock())
        stopped = False
        try:
            await client.stream(options.api, model=options.model, prompt=prompt, max_tokens=plan.output_tokens,
                                exact=options.exact_output, seed=options.seed, into=answer)
        except asyncio.CancelledError:
            stopped = True
            answer.finished_at = clock()
            raise
        finally:
            record = _record(plan, answer, start=start, scheduled_s=scheduled_s, stopped=stopped)
            progress.in_flight -= 1
            progress.outcomes[record.outcome] += 1
            if record.outcome == "ok" and record.first_token_s is not None:
                progress.recent_ttft_s.append(record.first_token_s - record.sent_s)
            write(record)

    try:
        async with asyncio.TaskGroup() as group:
            for plan in plans:
                scheduled_s = plan.arrival.at_s / options.rate_scale
                prompt = contents(plan)  # made before its time has come: the work is not on the schedule
                if await _set_by(stop.sending, start + scheduled_s, clock):
                    break
                if progress.in_flight >= options.max_in_flight:
                    progress.outcomes["dropped"] += 1
                    write(_dropped(plan, scheduled_s=scheduled_s, now_s=clock() - start))
                    continue
                progress.sent += 1
                progress.in_flight += 1
                task = group.create_task(run_one(plan, prompt, scheduled_s), name=f"request-{plan.arrival.index}")
                running.add(task)
                task.add_done_callback(running.discard)
            await _finish(running, stop, options.grace_s)
    except ExceptionGroup as errors:
        # Only `write` can have failed; the caller gave it and knows its plain errors.
        raise errors.exceptions[0] from None
    return clock() - start


async def _finish(running: set[asyncio.Task[None]], stop: Stop, grace_s: float) -> None:
    """Waits for what is in flight: without limit, or ``grace_s`` once told to stop, or not at all when told twice."""
    stopping = asyncio.create_task(stop.sending.wait(), name="stop-sending")
    aborting = asyncio.create_task(stop.everything.wait(), name="stop-everything")
    try:
        while running and not stop.sending.is_set():
            await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running:
            deadline = asyncio.get_running_loop().time() + grace_s
            while running and not stop.everything.is_set():
                left_s = deadline - asyncio.get_running_loop().time()
                if left_s <= 0:
                    break
                await asyncio.wait({*running, aborting}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
    finally:
        stopping.cancel()
        aborting.cancel()
        await asyncio.gather(stopping, aborting, return_exceptions=True)


async def _set_by(event: asyncio.Event, due_s: float, clock: Callable[[], float]) -> bool:
    """Whether ``event`` is set before ``due_s`` of ``clock``; lets other tasks run even when that is past.

    A loop's timer may fire a fraction of a millisecond early: then it waits again, nothing leaves before its time.
    """
    await asyncio.sleep(0)
    while not event.is_set() and (wait_s := due_s - clock()) > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await event.wait()
    return event.is_set()


def _record(plan: Plan, answer: Answer, *, start: float, scheduled_s: float, stopped: bool) -> RunRecord:
    chunk_at = answer.chunk_at
    predicted_hits = _number(answer.headers.get("predicted-hit-tokens"))
    predicted_ttft_ms = _number(answer.headers.get("predicted-ttft-ms"))
    outcome: Outcome
    if stopped:
        outcome = "interrupted"
    elif answer.ok:
        outcome = "ok"
    else:
        outcome = "rejected" if answer.status in _REJECTING_STATUS else "failed"
    return RunRecord(
        index=plan.arrival.index,
        scheduled_s=round(scheduled_s, 6),
        sent_s=round(answer.sent_at - start, 6),
        finished_s=round(answer.finished_at - start, 6),
        outcome=outcome,
        input_tokens=plan.input_tokens,
        output_tokens=plan.output_tokens,
        shared_tokens=plan.shared_tokens,
        first_token_s=None if answer.first_at is None else round(answer.first_at - start, 6),
        gaps_s=[round(later - earlier, 6) for earlier, later in pairwise(chunk_at)],
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
        predicted_hit_tokens=None if predicted_hits is None else int(predicted_hits),
        predicted_ttft_s=None if predicted_ttft_ms is None else predicted_ttft_ms / 1e3,
        finish=answer.finish,
        status=answer.status,
        code=answer.code or ("" if outcome == "ok" else "no_finish" if answer.ended else ""),
        message=answer.message,
        retry_after_s=answer.retry_after_s,
        headers=answer.headers,
    )


def _dropped(plan: Plan, *, scheduled_s: float, now_s: float) -> RunRecord:
    return RunRecord(index=plan.arrival.index, scheduled_s=round(scheduled_s, 6), sent_s=round(now_s, 6),
                     finished_s=round(now_s, 6), outcome="dropped", input_tokens=plan.input_tokens,
                     output_tokens=plan.output_tokens, shared_tokens=plan.shared_tokens, code="max_in_flight")


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None  # another gateway's header of the same name
