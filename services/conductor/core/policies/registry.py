"""Policies and admission schemes by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from services.conductor.core.placement import Placer
from services.conductor.core.policies.admission import (
    Admission,
    Bounded,
    EarlyRejection,
    PredictedRejection,
    TakeAll,
)
from services.conductor.core.policies.base import PlacementPolicy, PublishedPolicy
from services.conductor.core.policies.baselines import LeastLoad, LongestPrefix, Random, RoundRobin
from services.conductor.core.policies.dynamo_kv import DynamoKv
from services.conductor.core.policies.llmd_scorer import LlmdScorer
from services.conductor.core.policies.mooncake_a1 import MooncakeA1
from services.conductor.core.policies.sglang_cache_aware import SglangCacheAware
from services.conductor.core.policy import Policy
from shared.errors import UserError
from shared.ids import ConductorId

OURS = "moonbus"

DECODE_S = 20.0
"""``early_prediction`` takes every answer to be this long: about the mean of the conversation trace at its rate."""

PUBLISHED: dict[str, Callable[..., PublishedPolicy]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
    "longest_prefix": LongestPrefix,
    "cache_aware": partial(MooncakeA1, threshold=math.inf),
    "mooncake_a1": MooncakeA1,
    "dynamo_kv": DynamoKv,
    "sglang_cache_aware": SglangCacheAware,
    "llmd_scorer": LlmdScorer,
}
"""{name: maker}."""

ADMISSIONS: dict[str, Callable[[], Admission]] = {
    "none": TakeAll,
    "slo": partial(Bounded, checks_tbt=True),
    "baseline": partial(Bounded, checks_tbt=False),
    "early": EarlyRejection,
    "early_prediction": partial(PredictedRejection, decode_s=DECODE_S),
}
"""{name: maker}."""

POLICIES = (*PUBLISHED, OURS)


def make_policy(name: str, admission: str, conductor: ConductorId, policy: Policy, *, seed: int) -> PlacementPolicy:
    """The policy called ``name``; raises :class:`UserError` for a name nobody has.

    Ours turns requests away by its own rules (the bounds it is given), whatever ``admission`` says.
    """
    if admission not in ADMISSIONS:
        raise UserError(f"there is no admission {admission}; there are {', '.join(ADMISSIONS)}")
    if name == OURS:
        return Placer(conductor, policy, seed=seed)
    if name not in PUBLISHED:
        raise UserError(f"there is no policy {name}; there are {', '.join(POLICIES)}")
    return PUBLISHED[name](conductor, policy, ADMISSIONS[admission](), seed=seed)
