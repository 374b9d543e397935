"""One request's life as a script."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.gateway.core.machine import (
    Abandoned,
    Aborted,
    AskConductor,
    AskWorker,
    BusReturned,
    Deliver,
    Ended,
    Job,
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
from shared.ids import (
    BlockKey,
    ConductorId,
    GatewayId,
    HostId,
    Incarnation,
    OperationId,
    RequestId,
    SpecDigest,
    WorkerId,
)
from shared.kv import pack_tokens
from shared.machine import Answered, Unanswered, Woke
from shared.messages import (
    Accepted,
    Cancel,
    Decision,
    DecodeJob,
    Endpoint,
    Finish,
    Grant,
    Inquiry,
    JobFailed,
    JobState,
    Landing,
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
from tests.support.playbook import Playbook, after, like

REQUEST = RequestId("r1")
P1, P2, D1, D2 = (WorkerId(name) for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"))
INCARNATION = Incarnation("i")
LANDING = Landing(
    endpoint=Endpoint(worker=D1, incarnation=INCARNATION, host=HostId("h")), first_block=0, slots=[],
    grant=Grant(worker=D1, incarnation=INCARNATION, operation=OperationId("o"), ranges=[], expires_at_s=0, token=b""))


def machine(*, replayable: bool = False, request: RequestId = REQUEST, ttft_slo_s: float | None = None,
            **limits: Any) -> RequestMachine:
    job = Job(request=request, gateway=GatewayId("g"), model="m", spec=SpecDigest("s"), tenant="t", num_tokens=3,
              tokens=pack_tokens([1, 2, 3]), keys=b"", root=BlockKey(b"root"), sampling=Sampling(max_tokens=9),
              exclude=(WorkerId("prefill-9"),), replayable=replayable, ttft_slo_s=ttft_slo_s)
    return RequestMachine(job, Limits(**limits), retry_delay_s=lambda attempt: 0.1 * 2**attempt)


def placement(prefill: WorkerId = P1, decode: WorkerId = D1, attempt: int = 0) -> Placement:
    return Placement(
        request=REQUEST, attempt=attempt, conductor=ConductorId("c"), prefill=prefill, prefill_incarnation=INCARNATION,
        decode=decode, decode_incarnation=INCARNATION, own_blocks=0, sources=[], hit_tokens=0, predicted_queue_s=0,
        predicted_transfer_s=0, predicted_prefill_s=0, predicted_tbt_s=0)


def chunk(first: int, *tokens: int, finish: Finish = "", attempt: int = 0, worker: WorkerId = D1) -> TokenChunk:
    return TokenChunk(request=REQUEST, attempt=attempt, worker=worker, first=first, tokens=pack_tokens(tokens),
                      finish=finish, stages=Stages(hit_tokens=2) if first == 0 else None)


def failed(worker: WorkerId, code: str = "broken", *, attempt: int = 0, blame: str = "") -> JobFailed:
    return JobFailed(request=REQUEST, attempt=attempt, worker=worker, code=code, message="scripted",
                     blame=WorkerId(blame))


def refused(code: Any, attempt: int = 0) -> Refused:
    return Refused(request=REQUEST, attempt=attempt, code=code, message="scripted", retry_after_s=4.0)


def reserved(attempt: int = 0) -> Reserved:
    return Reserved(request=REQUEST, attempt=attempt, landing=LANDING)


def cancelled(attempt: int = -1, **fields: Any) -> Any:
    return like(Tell, message=like(Cancel, attempt=attempt, **fields))


def asks_place(**fields: Any) -> Any:
    return like(AskConductor, message=like(PlaceRequest, **fields))


def asks(worker: WorkerId, kind: type = DecodeJob, **fields: Any) -> Any:
    return like(AskWorker, worker=worker, message=like(kind, **fields))


class Script(Playbook):
    """A playbook that can answer the last question."""

    def reply(self, message: Any) -> Script:
        return self >> Answered(self._last_tag(), message)  # type: ignore[return-value]

    def silence(self, *, gone: bool = False) -> Script:
        return self >> Unanswered(self._last_tag(), "no reply", gone=gone)  # type: ignore[return-value]

    def _last_tag(self) -> Tag:
        tag: Tag = next(e.tag for e in reversed(self.story) if isinstance(e, AskConductor | AskWorker))
        return tag


def at_place(**options: Any) -> Script:
    script = Script(machine(**options))
    script >> Started() << asks_place(exclude=["prefill-9"], attempt=0)
    return script


def at_reserve(**options: Any) -> Script:
    script = at_place(**options)
    script.reply(placement()) << asks(D1, attempt=0, prefill=P1)
    return script


def at_prefill(**options: Any) -> Script:
    script = at_reserve(**options)
    script.reply(reserved()) << asks(P1, PrefillJob, landing=LANDING, decode=D1)
    return script


def at_stream(**options: Any) -> Script:
    script = at_prefill(**options)
    script.reply(Accepted(request=REQUEST, attempt=0))
    script >> chunk(0, 5) << Deliver([5], "")
    return script


def ends(outcome: str, code: str = "", status: int = 0) -> Any:
    if not status:
        return like(Ended, outcome=outcome, code=code)
    return like(Ended, outcome=outcome, code=code, problem=like(Problem, status=status, code=code))


def test_the_good_road() -> None:
    script = at_stream()
    script >> chunk(1, 6, 7) << Deliver([6, 7], "")
    script >> chunk(3, finish="stop") << Deliver([], "stop") << like(Ended, outcome="ok", finish="stop")
    script >> chunk(3, 8) >> WorkerLost(D1, "late") >> Woke() >> Abandoned("client_gone", "late")
    script.done()
    made = script.machine
    assert isinstance(made, RequestMachine)
    assert made.stages == Stages(hit_tokens=2) and made.received == 3 and made.next_wake() is None


def test_tokens_may_be_faster_than_the_answer_to_the_job() -> None:
    script = at_prefill()
    script >> chunk(0, 5) << Deliver([5], "")
    script.reply(Accepted(request=REQUEST, attempt=0)).done()
    script.silence(gone=True).done()
    script >> chunk(1, finish="length") << Deliver([], "length") << ends("ok")


@pytest.mark.parametrize(("code", "status"), [
    ("ttft", 429), ("tbt", 429), ("capacity", 429), ("quota", 429), ("no_worker", 503)])
def test_rejections(code: Any, status: int) -> None:
    script = at_place()
    script.reply(Rejection(request=REQUEST, code=code, message="m", retry_after_s=2)) \
        << cancelled() << ends("rejected", code, status)


def test_who_can_wait_for_room_and_be_in_time_waits() -> None:
    script = at_place(ttft_slo_s=10.0)
    full = Rejection(request=REQUEST, code="capacity", message="m", retry_after_s=2, wait_s=2)
    script.reply(full).done()
    script >> after(2.0) << asks_place(attempt=0, ttft_slo_s=8.0, waited_s=2.0)
    script.reply(full).done()
    script >> after(2.0) << asks_place(attempt=0, ttft_slo_s=6.0, waited_s=4.0)
    script.reply(Rejection(request=REQUEST, code="capacity", message="m", retry_after_s=9)) \
        << cancelled() << ends("rejected", "capacity", 429)
    made = script.machine
    assert isinstance(made, RequestMachine) and len(made.decisions) == 1


@pytest.mark.parametrize("slo_s", [5.0, None])
@pytest.mark.parametrize("attempts", [0, 1])
def test_no_attempt_waits_longer_than_the_bound(slo_s: float | None, attempts: int) -> None:
    """Its own, of which it sends what is left, or the conductor's, 5 s, less what it has waited."""
    made, now, asked = machine(ttft_slo_s=slo_s), 0.0, 0
    effects = made.handle(Started(), now=now)
    while made.state != "done":
        for question in [effect for effect in effects if isinstance(effect, AskConductor)]:
            asked += 1
            ask = question.message
            if made.attempt < attempts:
                made.handle(Answered(question.tag, placement(attempt=made.attempt)), now=now)
                effects = made.handle(Answered(Tag("reserve", made.attempt, 2), refused("capacity")), now=now)
                break
            spare_s = (5.0 - ask.waited_s if ask.ttft_slo_s is None else ask.ttft_slo_s) - 0.1
            waits = spare_s >= 0.2
            effects = made.handle(Answered(question.tag, Rejection(
                request=REQUEST, code="capacity", message="m", retry_after_s=0.2, wait_s=0.2 if waits else 0.0,
                spare_s=spare_s if waits else 0.0)), now=now)
        else:
            wake = made.next_wake()
            if wake is not None:
                now = wake
                effects = made.handle(Woke(), now=now)
    assert now == pytest.approx(4.9) and made.attempt == attempts
    assert asked - attempts == 7, "each wait is longer than the one before: 0.3, 0.4, 0.6, 1.0, 1.8 s and what is left"


def test_conductors_may_be_away_for_a_moment() -> None:
    script = at_place(place_timeout_s=1.0)
    script.silence(gone=True).done()
    script >> after(0.1) << asks_place(attempt=0)
    script.silence().done()
    script >> after(0.2) << asks_place(attempt=0)
    script.reply(placement()) << asks(D1)


def test_conductors_may_not_be_away_for_ever() -> None:
    script = at_place(place_timeout_s=1.0)
    asked = 1
    while True:
        script.silence(gone=True)
        effects = script.take()
        if effects:
            break
        script >> after(0.1 * 2 ** (asked - 1)) << asks_place()
        asked += 1
    assert [type(effect) for effect in effects] == [Tell, Ended]
    assert effects[1] == ends("rejected", "no_conductor", 503) and asked == 4


def test_nobody_waits_for_conductors_beyond_its_bound() -> None:
    script = at_place(ttft_slo_s=0.2)
    script.silence(gone=True).done()
    script >> after(0.1) << asks_place(waited_s=pytest.approx(0.1))
    script.silence(gone=True) << cancelled() << ends("rejected", "no_conductor", 503)


def test_a_conductor_that_hangs_is_not_waited_for_beyond_the_bound_either() -> None:
    """Nobody hears that nothing comes before ``timeout_s`` is over."""
    script = at_place(ttft_slo_s=0.2, place_try_s=2.0)
    hung = script.story[-1]
    assert isinstance(hung, AskConductor) and hung.timeout_s == pytest.approx(0.2)
    (script >> after(hung.timeout_s)).silence() << cancelled() << ends("rejected", "no_conductor", 503)
    assert "no conductor answered for 0.20 s" in script.story[-1].problem.message

    script = at_place(ttft_slo_s=3.0, place_try_s=2.0)
    (script >> after(2.0)).silence() >> after(0.1) << like(AskConductor, timeout_s=pytest.approx(0.9))


@pytest.mark.parametrize(("late_s", "code", "status"), [(0.25, "no_conductor", 503), (0.75, "ttft", 429)])
def test_who_is_late_because_no_conductor_answered_is_told_so(late_s: float, code: str, status: int) -> None:
    """The conductors are away for half a second; before it and after it room is waited for."""
    script = at_place(ttft_slo_s=10.0)
    full = Rejection(request=REQUEST, code="capacity", message="m", retry_after_s=2, wait_s=2)
    script.reply(full) >> after(2.0) << asks_place()
    (script >> after(0.4)).silence() >> after(0.1) << asks_place(waited_s=2.5)
    script.reply(full) >> after(2.0) << asks_place(waited_s=4.5)
    script.reply(Rejection(request=REQUEST, code="ttft", message="why", retry_after_s=2, late_s=late_s)) \
        << cancelled() << like(Ended, outcome="rejected", problem=like(Problem, code=code, status=status))
    if code == "no_conductor":
        told = script.story[-1].problem
        assert told.message == "no conductor answered for 0.50 s; now why" and told.headers()["retry-after"] == "1"


def test_of_a_bound_that_passed_while_we_stood_still_less_than_nothing_is_left() -> None:
    made = machine(ttft_slo_s=10.0)
    (first,) = made.handle(Started(), now=0.0)
    assert isinstance(first, AskConductor)
    made.handle(Answered(first.tag, Rejection(
        request=REQUEST, code="capacity", message="m", retry_after_s=2, wait_s=2)), now=0.0)
    assert list(made.handle(Woke(), now=15.0)) == [asks_place(attempt=0, ttft_slo_s=-5.0, waited_s=15.0)]


def test_another_attempt_may_be_late_of_its_own() -> None:
    script = at_place(ttft_slo_s=10.0)
    script.silence() >> after(0.1) << asks_place()
    script.reply(placement()) << asks(D1)
    script.reply(refused("draining")) << cancelled(0) << asks_place(attempt=1)
    script.reply(Rejection(request=REQUEST, code="ttft", message="why", retry_after_s=2, late_s=0.01)) \
        << cancelled() << ends("rejected", "ttft", 429)


def test_a_late_answer_to_a_repeated_question_is_not_heard() -> None:
    script = at_place()
    first = script._last_tag()
    script.silence()
    script >> after(0.1) << asks_place()
    (script >> Answered(first, placement())).done()


def test_a_refusal_goes_elsewhere() -> None:
    script = at_reserve()
    script.reply(refused("draining")) << cancelled(0, reason="draining") \
        << asks_place(attempt=1, exclude=["prefill-9", "decode-1"])
    script.reply(placement(decode=D2, attempt=1)) << asks(D2, attempt=1)
    script.reply(reserved(1)) << asks(P1, PrefillJob, attempt=1)
    script.reply(refused("spec", 1)) << cancelled(1) \
        << asks_place(attempt=2, exclude=["prefill-9", "decode-1", "prefill-1"])


def test_a_full_worker_that_was_the_only_one_is_contention() -> None:
    script = at_reserve()
    script.reply(refused("capacity")) << cancelled(0) << asks_place(attempt=1)
    script.reply(Rejection(request=REQUEST, code="no_worker", message="m", retry_after_s=1)) \
        << cancelled() << ends("rejected", "capacity", 429)


def test_attempts_end_with_the_last_reason() -> None:
    script = at_reserve(max_attempts=1)
    script.reply(refused("draining")) << cancelled() << ends("failed", "draining", 503)
    script = at_reserve(max_attempts=1)
    script.reply(refused("tbt")) << cancelled() << like(
        Ended, outcome="rejected", problem=like(Problem, status=429, retry_after_s=4.0))


def test_a_worker_that_is_not_there() -> None:
    script = at_reserve()
    script.silence(gone=True) << NobodyThere(D1) << cancelled(0) \
        << asks_place(attempt=1, exclude=["prefill-9", "decode-1"])


def test_a_worker_that_does_not_answer() -> None:
    script = at_prefill()
    script.silence() << cancelled(0, reason="worker_silent") \
        << asks_place(attempt=1, exclude=["prefill-9", "prefill-1"])


def test_a_worker_that_answers_nonsense() -> None:
    script = at_reserve()
    script.reply(Accepted(request=REQUEST, attempt=0)) << cancelled(0, reason="bad_answer") << asks_place(attempt=1)


@pytest.mark.parametrize("worker", [P1, D1])
def test_a_worker_that_dies_before_the_first_token(worker: WorkerId) -> None:
    script = at_prefill()
    (script >> WorkerLost(P2, "not ours")).done()
    script >> WorkerLost(worker, "killed") << cancelled(0, reason="worker_lost") \
        << asks_place(attempt=1, exclude=["prefill-9", worker])


def test_a_job_that_fails_before_the_first_token() -> None:
    script = at_prefill()
    script >> failed(P1) << cancelled(0, reason="broken") << asks_place(attempt=1, exclude=["prefill-9", "prefill-1"])
    (script >> failed(P1, attempt=0)).done()


def test_who_is_to_blame_is_excluded_rather_than_who_speaks() -> None:
    script = at_prefill()
    script >> failed(P1, "decode_gone", blame=D1) << cancelled(0, reason="decode_gone") \
        << asks_place(attempt=1, exclude=["prefill-9", "decode-1"])


@pytest.mark.parametrize(
    "event", [failed(D1, "internal"), chunk(0, finish="cancelled"), chunk(0, 5, finish="cancelled")])
def test_a_decode_worker_that_fails_before_anything_was_delivered(event: Any) -> None:
    script = at_prefill()
    script >> event << cancelled(0) << asks_place(attempt=1, exclude=["prefill-9", "decode-1"])


def test_a_lost_first_chunk_is_another_attempt_and_nobodys_fault() -> None:
    script = at_prefill(gap_s=2.0)
    (script >> chunk(1, 6) >> after(1.9)).done()
    script >> after(0.2) << cancelled(0, reason="tokens_lost") << asks_place(attempt=1, exclude=["prefill-9"])


def test_prefill_is_over_once_the_decode_worker_has_spoken_even_out_of_turn() -> None:
    script = at_prefill()
    (script >> chunk(1, 6) >> failed(P1, "decode_gone", blame=D1) >> WorkerLost(P1, "killed")).done()
    script.silence(gone=True).done()
    script >> chunk(0, 5) << Deliver([5, 6], "")
    (script >> failed(P1, "decode_gone", blame=D1)).done()
    script >> chunk(2, finish="stop") << Deliver([], "stop") << ends("ok")


def test_only_the_decode_worker_matters_once_tokens_flow() -> None:
    script = at_stream()
    (script >> WorkerLost(P1, "killed") >> failed(P1)).done()
    script >> WorkerLost(D1, "killed") << cancelled() << ends("failed", "worker_lost", 502)
    at_stream() >> failed(D1, "capacity") << cancelled() << ends("failed", "capacity", 502)


def test_an_answer_that_nobody_has_seen_begins_again() -> None:
    script = at_stream(replayable=True)
    script >> failed(D1) << cancelled(0) << like(Restart) \
        << asks_place(attempt=1, exclude=["prefill-9", "decode-1"])
    script.reply(placement(decode=D2, attempt=1)) << asks(D2)
    script.reply(reserved(1)) << asks(P1, PrefillJob)
    (script >> chunk(1, 6)).done()  # of the attempt that is over
    script >> chunk(0, 5, 6, finish="stop", attempt=1, worker=D2) << Deliver([5, 6], "stop") << ends("ok")


def test_a_lost_chunk_breaks_the_answer_off() -> None:
    script = at_stream(gap_s=2.0)
    (script >> chunk(2, 7) >> after(1.9)).done()
    script >> after(0.2) << cancelled() << ends("failed", "tokens_lost", 502)
    script = at_stream(gap_s=2.0)
    (script >> chunk(2, 7) >> after(1.9)).done()
    script >> chunk(1, 6) << Deliver([6, 7], "")
    (script >> after(1.0)).done()


def test_a_gateway_that_stood_still_looks_again_before_it_misses_tokens() -> None:
    script = at_stream(gap_s=2.0, quiet_s=60.0)
    made, now = script.machine, script.now
    assert made.handle(chunk(2, 7), now=now) == [] and made.next_wake() == now + 2.0
    assert made.handle(Woke(), now=now + 3.0) == [], "a second late: they may have come by now, unread"
    assert made.handle(chunk(1, 6), now=now + 3.1) == [Deliver([6, 7], "")]
    assert made.handle(chunk(4, 9), now=now + 4.0) == []
    assert made.handle(Woke(), now=now + 7.0) == [] and made.next_wake() == now + 9.0
    assert [type(effect) for effect in made.handle(Woke(), now=now + 9.0)] == [Tell, Ended], "but not for ever"


def test_requests_do_not_all_ask_at_once_when_the_bus_is_back() -> None:
    looks = []
    for name in range(100):
        script = at_prefill(gap_s=2.0, request=RequestId(f"request-{name}"))
        script.machine.handle(BusReturned(), now=script.now)
        looks.append(script.machine.next_wake() - script.now)
    assert 2.0 <= min(looks) < 2.2 and 3.8 < max(looks) < 4.0


def state(stage: Any, sent: int = 0) -> JobState:
    return JobState(request=REQUEST, attempt=0, stage=stage, sent=sent)


def test_a_long_prefill_is_looked_after_and_left_alone() -> None:
    script = at_prefill(quiet_s=5.0)
    for _ in range(5):
        script >> after(5.0) << asks(P1, Inquiry, attempt=0)
        script.reply(state("waiting")).done()
    script >> chunk(0, 5) << Deliver([5], "")


@pytest.mark.parametrize("said", [state("unknown"), state("waiting"), state("running", 1)])
def test_a_first_token_that_the_bus_lost_is_missed_soon_after_its_return(said: JobState) -> None:
    script = at_prefill(gap_s=2.0)
    (script >> BusReturned() >> after(1.9)).done()
    script >> after(2.1) << asks(P1, Inquiry)
    script.reply(state("unknown")) << asks(D1, Inquiry)
    (script.reply(said) >> after(1.9)).done()
    script >> after(0.2) << cancelled(0, reason="tokens_lost") << asks_place(attempt=1, exclude=["prefill-9"])


def test_tokens_that_come_after_all_are_not_lost() -> None:
    script = at_prefill(gap_s=2.0)
    script >> BusReturned()
    script >> after(4.0) << asks(P1, Inquiry)
    script.reply(state("unknown")) << asks(D1, Inquiry)
    script.reply(state("running", 1)).done()
    script >> chunk(0, 5) << Deliver([5], "")
    (script >> after(3.0)).done()


def test_last_tokens_that_the_bus_lost_break_the_answer_off() -> None:
    script = at_stream(quiet_s=5.0, gap_s=2.0)
    script >> after(5.0) << asks(D1, Inquiry)
    script.reply(state("running", 1)).done()
    script >> after(5.0) << asks(D1, Inquiry)
    script.reply(state("unknown")).done()
    script >> after(2.0) << cancelled() << ends("failed", "tokens_lost", 502)


def test_workers_that_do_not_answer_a_look_are_asked_again_and_known_to_be_gone() -> None:
    script = at_prefill(quiet_s=5.0)
    script >> after(5.0) << asks(P1, Inquiry)
    script.silence().done()
    script >> after(5.0) << asks(P1, Inquiry)
    script.silence(gone=True) << like(NobodyThere, worker=P1)


def test_a_stalled_answer_breaks_off() -> None:
    script = at_stream(stall_s=5.0)
    (script >> after(4.0)).done()
    script >> chunk(1, 6) << Deliver([6], "")
    (script >> after(4.0)).done()
    script >> after(1.5) << cancelled() << ends("failed", "stalled", 502)


def test_a_worker_that_gives_up() -> None:
    script = at_stream()
    script >> chunk(1, finish="cancelled") << cancelled() << ends("failed", "worker_cancelled", 502)


@pytest.mark.parametrize("at", [at_place, at_reserve, at_prefill, at_stream])
def test_ends_that_can_come_at_any_time(at: Any) -> None:
    at() >> Abandoned("client_gone", "why") << cancelled(reason="client_gone") << ends("cancelled", "client_gone")
    aborted = Aborted(Problem(status=503, code="shutting_down", message="m"))
    at() >> aborted << cancelled() << ends("failed", "shutting_down", 503)
    at(deadline_s=3.0) >> after(3.0) << cancelled() << ends("failed", "deadline_exceeded", 504)


def test_a_stop_string() -> None:
    at_stream() >> Stopped() << cancelled(reason="stop") << like(Ended, outcome="ok", finish="stop")


def test_a_job_that_does_not_fit() -> None:
    script = at_reserve()
    script >> TooLarge(script._last_tag(), 900, 800) << cancelled() << like(
        Ended, outcome="failed", problem=like(Problem, status=413, message=lambda m: "900" in m and "800" in m))


def test_it_always_ends_once() -> None:
    """Whatever happens in whatever order: one end, a bounded number of attempts, a wake-up until then."""
    for seed in range(300):
        chance = random.Random(seed)
        made = machine(replayable=seed % 2 == 0)
        now, ended, effects = 0.0, 0, list(made.handle(Started(), now=0.0))
        questions = [e for e in effects if isinstance(e, AskConductor | AskWorker)]
        for _ in range(80):
            now += chance.choice([0.0, 0.1, 3.0])
            made.check_invariants()
            assert ended or made.next_wake() is not None
            attempt = made.attempt
            tag = chance.choice(questions).tag
            event = chance.choice([
                Answered(tag, placement(chance.choice([P1, P2]), chance.choice([D1, D2]), attempt)),
                Answered(tag, reserved(attempt)), Answered(tag, Accepted(request=REQUEST, attempt=attempt)),
                Answered(tag, refused("capacity", attempt)), Unanswered(tag, "why", gone=chance.random() < 0.5),
                chunk(made.received, 5, attempt=attempt), BusReturned(),
                Answered(tag, state(chance.choice(["unknown", "waiting", "running"]), chance.randrange(5))),
                chunk(made.received + chance.randrange(3), 5, attempt=attempt),
                failed(chance.choice([P1, D1]), attempt=attempt), WorkerLost(chance.choice([P1, D1, P2]), "w"), Woke()])
            if isinstance(event, Answered) and (
                    (tag.step == "place" and not isinstance(event.message, Placement))
                    or (tag.step == "look") != isinstance(event.message, JobState)):
                continue  # the subject's types rule it out
            effects = list(made.handle(event, now=now))
            questions += [e for e in effects if isinstance(e, AskConductor | AskWorker)]
            ended += sum(isinstance(e, Ended) for e in effects)
        now += 1000.0
        effects = list(made.handle(Woke(), now=now))
        assert ended + sum(isinstance(e, Ended) for e in effects) == 1
        assert len({q.tag.attempt for q in questions}) <= 3


def test_every_answer_of_a_conductor_is_kept_with_the_end_of_its_attempt() -> None:
    script = at_prefill()
    script >> after(0.5) >> failed(P1, "broken")
    script << cancelled(0) << asks_place(attempt=1)
    script.reply(placement(P2, attempt=1)) << asks(D1, attempt=1)
    script.reply(refused("capacity", attempt=1)) << cancelled(1) << asks_place(attempt=2)
    no = Rejection(request=REQUEST, code="no_worker", message="nobody is left", retry_after_s=1.0)
    script.reply(no) << cancelled() << ends("rejected", "capacity")
    made = script.machine
    assert isinstance(made, RequestMachine)
    assert made.decisions == [
        Decision(attempt=0, at_s=1000.0, answer=placement(), code="broken", message="prefill-1: scripted"),
        Decision(attempt=1, at_s=1000.5, answer=placement(P2, attempt=1), code="capacity", message="scripted"),
        Decision(attempt=2, at_s=1000.5, answer=no)]


def test_an_attempt_that_goes_well_or_is_cut_short_by_the_client() -> None:
    script = at_stream()
    script >> chunk(1, finish="stop") << Deliver([], "stop") << like(Ended, outcome="ok")
    assert [one.code for one in script.machine.decisions] == [""]
    script = at_stream()
    script >> Abandoned("client_gone", "left") << cancelled() << ends("cancelled", "client_gone")
    assert [(one.code, one.message) for one in script.machine.decisions] == [("client_gone", "left")]
