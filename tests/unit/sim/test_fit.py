"""A profile fitted to records made with known costs."""

from __future__ import annotations

import random

import msgspec
import pytest

from load.record import RunRecord
from load.sim.fit import Fitted, fit_profile
from shared.errors import UserError
from shared.messages import Stages
from tests.unit.sim.builders import PROFILE


def record(index: int, rng: random.Random) -> RunRecord:
    """A request alone on its decode worker: prefill 0.1 + 2e-3 per token, 0.05 s a token and 1e-5 per context token."""
    tokens, answer = rng.randint(100, 4000), rng.randint(5, 40)
    hit = rng.randrange(0, tokens, 50)
    stages = Stages(prefill_s=0.1 + 2e-3 * (tokens - hit) + 1e-7 * (tokens ** 2 - hit ** 2), hit_tokens=hit,
                    fetched_bytes=hit * 1000, fetch_s=0.01 + hit * 1000 / 1e8 if hit else 0.0)
    start_s = index * 100.0
    gap_s = 0.05 + 1e-5 * (tokens + (answer - 1) / 2)
    return RunRecord(
        index=index, scheduled_s=start_s, sent_s=start_s, first_token_s=start_s + 1,
        finished_s=start_s + 1 + (answer - 1) * gap_s, outcome="ok", input_tokens=tokens, output_tokens=answer,
        prompt_tokens=tokens, completion_tokens=answer, gaps_s=[gap_s] * (answer - 1),
        headers={"stages": msgspec.json.encode(stages).decode(), "decode-worker": f"decode-{index % 2}"})


def test_known_costs_are_found() -> None:
    rng = random.Random(4)
    profile, fits = fit_profile([record(i, rng) for i in range(60)], PROFILE, name="mine", source="a test")
    assert (profile.name, profile.layers) == ("mine", PROFILE.layers)
    assert profile.prefill_s(2000, 500) == pytest.approx(0.1 + 3.0 + 1e-7 * (2000 ** 2 - 500 ** 2), rel=1e-3)
    assert profile.decode_fixed_s + profile.decode_per_request_s == pytest.approx(0.05, rel=1e-3)
    assert profile.decode_per_context_token_s == pytest.approx(1e-5, rel=1e-2)
    assert profile.nic_bytes_per_s() == pytest.approx(1e8, rel=1e-2)
    assert {fit.model for fit in fits} == {"prefill", "decode", "transfer"}
    assert all(fit.median_error < 0.01 for fit in fits)


def test_what_is_doubtful_is_warned_of() -> None:
    rng = random.Random(4)
    records = [msgspec.structs.replace(record(i, rng), headers={"stages": msgspec.json.encode(Stages(
        prefill_s=rng.choice((0.01, 1.0)))).decode()}) for i in range(60)]
    profile, fits = fit_profile(records, PROFILE, name="mine", source="a test")
    (prefill,) = (fit for fit in fits if fit.model == "prefill")
    assert any("of the 60 observations are off by more than" in text for text in prefill.warnings())
    assert profile.prefill_per_token_s + profile.prefill_per_token2_s > 0
    good = fit_profile([record(i, rng) for i in range(60)], PROFILE, name="mine", source="a test")[1]
    assert not next(fit for fit in good if fit.model == "prefill").warnings()
    flat = Fitted("decode", 60, 0.01, (("the cost of a step", 0.02), ("the cost of a request", 0.0)))
    assert flat.warnings() == [
        "decode: the cost of a request came out as 0; the run may have been too short or too uniform to tell"]


def test_records_that_tell_nothing_are_refused_with_the_numbers() -> None:
    rng = random.Random(4)
    with pytest.raises(UserError, match="of 3 records 3 tell the stages"):
        fit_profile([record(i, rng) for i in range(3)], PROFILE, name="mine", source="a test")
