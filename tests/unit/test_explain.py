"""What ``moonbus explain`` shows."""

from __future__ import annotations

import msgspec
import pytest

from services.cli.explain import explanation
from services.cli.output import console
from shared.ids import BlockKey, ConductorId, Incarnation, RequestId, WorkerId
from shared.messages import Candidate, Decision, DecodeCandidate, Placement, Rejection, RequestRow, Source

P1, P2, D1, D2 = (WorkerId(name) for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"))


def way(prefill: WorkerId, *, queue_s: float = 0.0, transfer_s: float = 0.0, prefill_s: float = 1.0, own: int = 0,
        fetched: int = 0, note: str = "", delays_s: float = 0.0) -> Candidate:
    return Candidate(prefill=prefill, queue_s=queue_s, transfer_s=transfer_s, prefill_s=prefill_s, own_blocks=own,
                     fetched_blocks=fetched, note=note, delays_s=delays_s)


PULL = way(P1, queue_s=0.25, transfer_s=0.012, prefill_s=0.1, own=3, fetched=5, delays_s=0.4)
ALONE = way(P2, prefill_s=2.5, note="recomputes 8 blocks in 0.8 s: pulling them would take 1.1 s")
PLACED = Placement(
    request=RequestId("req-1"), attempt=0, conductor=ConductorId("conductor-7"), prefill=P1,
    prefill_incarnation=Incarnation("i"), decode=D1, decode_incarnation=Incarnation("i"), own_blocks=3,
    sources=[Source(owner=P2, incarnation=Incarnation("i"), first_block=3, num_blocks=5)], hit_tokens=512,
    predicted_queue_s=0.25, predicted_transfer_s=0.012, predicted_prefill_s=0.1, predicted_tbt_s=0.02, reuse_gain_s=0.3,
    candidates=[PULL, ALONE],
    decode_candidates=[DecodeCandidate(decode=D1, tbt_s=0.02, own_blocks=2),
                       DecodeCandidate(decode=D2, tbt_s=0.03, own_blocks=0)])
ROW = RequestRow(
    request="req-1", gateway="g", model="toy", tenant="acme", received_at_s=1e9, outcome="ok", code="", finish="stop",
    prompt_tokens=1000, completion_tokens=4, predicted_hit_tokens=512, hit_tokens=448, predicted_ttft_s=0.362,
    ttft_s=0.5, tbt_s=0.025, duration_s=0.6, attempts=1, conductor="conductor-7", prefill=P1, decode=D1, trace="",
    last_key=BlockKey(b""), decisions=[Decision(attempt=0, at_s=0.1, answer=PLACED)])


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "80")

    def show(**changes: object) -> str:
        console.print(explanation(msgspec.structs.replace(ROW, **changes)))
        out = capsys.readouterr().out
        assert all(len(line) <= 80 for line in out.splitlines()), out
        return out

    return show


def row_of(text: str, start: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(start)).split()


def test_a_placement_with_all_its_terms_beside_what_became_of_it(shown) -> None:
    text = shown()
    assert "Attempt 1 of 1, 100.0 ms after arrival, by conductor-7: prefill on prefill-1" in " ".join(text.split())
    assert row_of(text, "→") == ["→", "prefill-1", "3", "5", "250ms", "12ms", "100ms", "362ms", "400ms"]
    assert row_of(text, "prefill-2 ") == ["prefill-2", "0", "0", "0", "0", "2.5s", "2.5s", "0"]
    assert "prefill-2: recomputes 8 blocks in 0.8 s" in text
    assert "fetched: blocks 3-7 from prefill-2" in text
    assert "more copies of its prefix would have saved 300.0 ms" in text
    assert "decode, predicted TBT: decode-1 20.0 ms (has 2 blocks), decode-2 30.0 ms" in " ".join(text.split())
    assert row_of(text, "TTFT from here")[3:] == ["362.0", "ms", "400.0", "ms", "+10%"]
    assert row_of(text, "TBT ")[1:] == ["20.0", "ms", "25.0", "ms", "+25%"]
    assert row_of(text, "hit tokens")[2:] == ["512", "448", "-64"]


def test_a_choice_that_was_not_among_the_best_ones_kept_is_shown_all_the_same(shown) -> None:
    placed = msgspec.structs.replace(PLACED, candidates=[ALONE])
    text = shown(decisions=[Decision(attempt=0, at_s=0.0, answer=placed)])
    assert row_of(text, "→") == ["→", "prefill-1", "3", "5", "250ms", "12ms", "100ms", "362ms", "0"]
    assert "prefill-2" in text


def test_every_attempt_and_why_it_ended(shown) -> None:
    second = msgspec.structs.replace(PLACED, attempt=1, prefill=P2, own_blocks=0, sources=[], candidates=[ALONE])
    text = shown(attempts=2, ttft_s=None, tbt_s=None, outcome="failed", code="worker_lost", decisions=[
        Decision(attempt=0, at_s=0.1, answer=PLACED, code="worker_lost", message="prefill-1 was lost: silent"),
        Decision(attempt=1, at_s=2.0, answer=second)])
    words = " ".join(text.split())
    assert "Attempt 1 of 2, 100.0 ms after arrival" in words and "Attempt 2 of 2, 2.00 s after arrival" in words
    assert "ended early with worker_lost: prefill-1 was lost: silent" in words
    assert text.count("TTFT from here") == 1, "only the last attempt has an outcome to compare"
    assert row_of(text, "TTFT from here")[-1] == "?"


def test_a_rejection_says_its_code_when_to_come_back_and_what_was_weighed(shown) -> None:
    no = Rejection(request=RequestId("req-1"), code="ttft", retry_after_s=1.5, candidates=[ALONE],
                   message="the first token is predicted after 2.50 s, asked are 1.00 s")
    words = " ".join(shown(outcome="rejected", code="ttft", finish="", ttft_s=None, decisions=[
        Decision(attempt=0, at_s=0.01, answer=no)]).split())
    assert "rejected with code ttft, try again after 1.50 s" in words
    assert "the first token is predicted after 2.50 s, asked are 1.00 s" in words
    assert "prefill-2 0 0 0 0 2.5s 2.5s 0" in words and "→" not in words


def test_a_rejection_for_slow_tokens_shows_the_decode_workers(shown) -> None:
    no = Rejection(request=RequestId("req-1"), code="tbt", retry_after_s=1.5, message="slow", policy="mooncake_a1",
                   decode_candidates=PLACED.decode_candidates)
    words = " ".join(shown(outcome="rejected", code="tbt", decisions=[
        Decision(attempt=0, at_s=0.01, answer=no)]).split())
    assert "after arrival: rejected (policy mooncake_a1) with code tbt" in words
    assert "decode, predicted TBT: decode-1 20.0 ms (has 2 blocks), decode-2 30.0 ms" in words


def test_the_policy_of_others_is_named(shown) -> None:
    placed = msgspec.structs.replace(PLACED, policy="dynamo_kv")
    words = " ".join(shown(decisions=[Decision(attempt=0, at_s=0.1, answer=placed)]).split())
    assert "by conductor-7 (policy dynamo_kv): prefill on prefill-1" in words
    assert "policy" not in shown()


def test_nothing_recorded_is_said(shown) -> None:
    assert "no conductor answered" in shown(decisions=[], outcome="rejected", code="no_conductor")
    assert "no decision is recorded" in shown(decisions=[])


def test_names_are_not_markup(shown) -> None:
    text = shown(tenant="[bold]x[/]", decisions=[Decision(attempt=0, at_s=0, answer=PLACED, code="c", message="[/] a")])
    assert "[bold]x[/]" in text and "c: [/] a" in " ".join(text.split())
