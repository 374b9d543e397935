"""The self-measurement gives numbers a planner can use."""

from __future__ import annotations

import msgspec

from shared.engine.profile import measure
from tests.unit.engine.small_models import Pair


def test_every_cost_is_positive_and_sane(llama: Pair) -> None:
    profile = measure(llama.engine)
    costs = msgspec.structs.asdict(profile)
    assert all(value > 0 for value in costs.values())
    # 100 tokens of a toy on any machine: more than a microsecond, less than ten seconds
    prefill_s = profile.prefill_fixed_s + 100 * profile.prefill_per_token_s + 100**2 * profile.prefill_per_token2_s
    assert 1e-6 < prefill_s < 10
    assert 1e-6 < profile.decode_fixed_s + profile.decode_per_request_s < 10
