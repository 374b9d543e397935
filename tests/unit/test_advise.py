"""What ``moonbus advise`` and ``moonbus doctor`` say of a conductor's picture."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.cli import doctor_conductor
from services.cli.advise import report
from services.cli.findings import Finding
from services.cli.output import console
from services.conductor.core import native
from services.conductor.core.roles import Rules
from shared.ids import SpecDigest
from shared.messages import IndexState, RoleAdvice, WorkersReply, WorkerState
from tests.unit.conductor.builders import hello

FITS = RoleAdvice(
    model="toy", spec=SpecDigest("s"), prefill=2, decode=3, best_prefill=2, best_decode=3, needed_prefill=1.25,
    needed_decode=2.5, is_wrong=False, is_short=False, prefill_rate=0.5, queued_s=1.5, decode_rate=0.75, step_s=0.01,
    step_limit_s=0.05, batch=12, context_tokens=34_567, memory=0.4, answers=4.257)
WRONG = msgspec.structs.replace(FITS, best_prefill=4, best_decode=1, needed_prefill=3.6, is_wrong=True)
SHORT = msgspec.structs.replace(FITS, needed_prefill=5.5, is_short=True)
INDEX = IndexState(block_copies=10, max_block_copies=1000, nbytes=4096, max_bytes=1 << 20)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("COLUMNS", "80")

    def show(*advice: RoleAdvice) -> str:
        console.print(report(advice))
        out = capsys.readouterr().out
        assert all(len(line) <= 80 for line in out.splitlines()), out
        return " ".join(out.split())

    return show


def test_a_ratio_that_fits_is_shown_with_its_terms(said: Any) -> None:
    text = said(FITS)
    assert text.startswith("toy: 2 prefill and 3 decode workers fit the load")
    assert "prefill 2 1.25 2 decode 3 2.50 3" in text
    assert "prompts that arrive 0.5 s of prefill a second" in text and "12 with 34,567 tokens of context" in text


def test_a_wrong_ratio_says_the_right_one_and_what_to_do(said: Any) -> None:
    text = said(WRONG)
    assert "the ratio is wrong: 4 prefill and 1 decode workers would serve this load better than 2 and 3" in text
    assert "--elastic" in text


def test_too_few_workers_and_nobody_asked(said: Any) -> None:
    text = said(SHORT)
    assert text.startswith(f"toy: there are, or were within the last {Rules().window_s:g} s, too few workers, whatever "
                           "they do: 2 prefill and 3 decode workers")
    assert "answers to all of these 4.26 decode workers" in text
    assert "nothing to advise on" in said()


def test_what_was_too_much_a_moment_ago_is_not_said_to_be_needed_now(said: Any) -> None:
    """The needs of now are less than there are; a sum of them would deny the verdict."""
    text = said(*(msgspec.structs.replace(one, is_short=True) for one in (FITS, WRONG)))
    assert text.count("or were within the last 90 s") == 2 and "the load needs" not in text


def test_a_conductor_of_an_earlier_version_says_nothing_of_answers_to_come(said: Any) -> None:
    assert "answers to all" not in said(msgspec.structs.replace(SHORT, answers=0.0))


def judged(**fields: Any) -> dict[str, Finding]:
    reply = WorkersReply(conductor="c", workers=fields.pop("workers", []), **fields)
    return {finding.what: finding for finding in doctor_conductor.judge(reply)}


def worker(name: str, **errors: float) -> WorkerState:
    return WorkerState(hello=hello(name), load=None, state="alive", silence_s=0.0, indexed_blocks=0, errors=errors)


def test_the_doctor_finds_nothing_wrong() -> None:
    found = judged(index=INDEX, advice=[FITS], workers=[worker("p1", prefill=0.04), worker("p2", decode=0.11)])
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert found["estimates"].found == "off by 11% at most lately"
    assert judged()["estimates"].verdict == "ok", "a conductor that has seen nothing yet"


def test_the_doctor_says_whether_decisions_are_at_full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "WHY_NOT", "")
    assert doctor_conductor.compiled().verdict == "ok"
    monkeypatch.setattr(native, "WHY_NOT", "it was not compiled")
    found = doctor_conductor.compiled()
    assert found.verdict == "absent" and found.found.startswith("it was not compiled") and "install" in found.advice


def test_the_doctor_says_who_is_away_from_home() -> None:
    assert "elastic" not in judged(workers=[worker("p1")])
    at_home, away = (
        msgspec.structs.replace(worker(name), hello=msgspec.structs.replace(hello(name), elastic=True), now=now)
        for name, now in (("p1", "prefill"), ("p2", "decode")))
    assert judged(workers=[at_home, worker("p3")])["elastic"].found == "1 of 2 workers, all at home"
    assert judged(workers=[at_home, away])["elastic"].found == "2 of 2 workers, away from home now: p2 (decode)"


@pytest.mark.parametrize(("index", "says"), [
    (msgspec.structs.replace(INDEX, dropped=1234), "no room for 1,234 block copies"),
    (msgspec.structs.replace(INDEX, block_copies=950), "nearly full: 950 of 1,000 block copies"),
    (msgspec.structs.replace(INDEX, nbytes=1 << 20), "1.0 MiB of 1.0 MiB"),
])
def test_the_doctor_says_that_the_index_is_full(index: IndexState, says: str) -> None:
    found = judged(index=index)["prefix index"]
    assert found.verdict == "warn" and says in found.found and "MOONBUS_CONDUCTOR_MAX_INDEX_BYTES" in found.advice


def test_the_doctor_names_workers_whose_estimates_are_far_off() -> None:
    workers = [worker("p1", prefill=0.04, transfer_same_host=3.0), *(worker(f"d{i}", decode=0.6) for i in range(9))]
    found = judged(workers=workers)["estimates"]
    assert found.verdict == "warn"
    assert "p1 (transfer same host, 300%), d8 (decode, 60%)" in found.found and "and 4 more" in found.found


@pytest.mark.parametrize("advice", [WRONG, SHORT])
def test_the_doctor_says_that_the_ratio_is_wrong(advice: RoleAdvice) -> None:
    found = judged(advice=[advice])["roles"]
    assert found.verdict == "warn" and "toy: " in found.found and "moonbus advise" in found.advice
