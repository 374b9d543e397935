"""Eviction policies: which block of a pool goes first, and which is worth a place in a colder tier.

``base`` is what a pool tells a policy and asks of it; ``leaves`` is the ordered set that policies are made of; every
other module is one policy. :func:`make` builds one by name.
"""

from __future__ import annotations

from shared.store.policies.base import Policy
from shared.store.policies.hit_density import HitDensity
from shared.store.policies.length_aware import LengthAware
from shared.store.policies.lfu import Lfu
from shared.store.policies.lru import Lru
from shared.store.policies.s3fifo import S3Fifo

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (HitDensity, Lru, Lfu, LengthAware, S3Fifo)}
"""{name: policy}"""

DEFAULT = HitDensity.name
"""The policy of a worker that is told no other."""


def make(name: str = DEFAULT) -> Policy:
    """A fresh policy, for one pool. ``ValueError`` names the known ones."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"cache policy {name!r} is unknown; expected one of {', '.join(POLICIES)}") from None


__all__ = ["DEFAULT", "POLICIES", "Policy", "make"]
