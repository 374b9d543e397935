"""What people want of the store: drains and quotas, on one record that every store-manager reads and writes.

The record is the truth: whoever leads acts on it and writes back how far it is, and every manager can take an order
or show them, whoever leads. Writes are compare-and-set; the term of the leader that wrote last fences an old one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from shared.ids import Incarnation, WorkerId

DrainState = Literal["waiting", "copying", "retiring", "done", "failed", "cancelled"]
OVER = ("done", "failed", "cancelled")
"""States that a drain never leaves."""

MOST_DRAINS = 64
"""Drains on the record; those that are over go first, oldest first."""
MOST_QUOTAS = 4_096
"""Tenants with a quota."""


class Drain(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One order to empty a worker, and how far it is."""

    worker: WorkerId
    incarnation: Incarnation
    """The life that was to be drained; another one is another worker."""
    ordered_at_s: float
    """Unix seconds; names the order."""
    timeout_s: float
    state: DrainState = "waiting"
    cancel: bool = False
    """Somebody wants it stopped."""
    force: bool = False
    """What no other worker can have is dropped; the worker serves it on otherwise."""
    blocks: int = 0
    """Blocks that had no other copy."""
    copied: int = 0
    """Of those, how many have one now."""
    left: int = 0
    """Of those, how many will stay behind."""
    nbytes: int = 0
    """Bytes copied."""
    why: str = ""
    """What a person should know of the end."""


class Orders(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The record."""

    drains: list[Drain] = []
    """At most one a worker that is not over."""
    quotas: dict[str, int] = {}
    """{tenant: bytes in the whole cluster}"""
    term: int = 0
    """Of the leader that wrote progress last."""

    def drain_of(self, worker: str) -> Drain | None:
        """The worker's latest drain."""
        return next((drain for drain in reversed(self.drains) if drain.worker == worker), None)


def with_drain(orders: Orders, drain: Drain) -> Orders:
    """``drain`` added, or in place of the same order; the oldest ones that are over make room.

    Raises ``ValueError`` when there is none.
    """
    drains = [drain if _same(known, drain) else known for known in orders.drains]
    if drain not in drains:
        drains.append(drain)
    while len(drains) > MOST_DRAINS:
        over = next((known for known in drains if known.state in OVER), None)
        if over is None:
            raise ValueError(f"{MOST_DRAINS} drains are under way, no more are taken; wait for one to end")
        drains.remove(over)
    return msgspec.structs.replace(orders, drains=drains)


def with_progress(orders: Orders, progress: Iterable[Drain], term: int) -> Orders | None:
    """The leader's news of drains applied to what the record says by now; ``None`` when a later term wrote already.

    Only drains that are on the record and not over follow; a wish to cancel that came meanwhile stays.
    """
    if orders.term > term:
        return None
    for news in progress:
        known = next((drain for drain in orders.drains if _same(drain, news)), None)
        if known is not None and known.state not in OVER:
            orders = with_drain(orders, msgspec.structs.replace(news, cancel=known.cancel or news.cancel))
    return msgspec.structs.replace(orders, term=term)


def with_quota(orders: Orders, tenant: str, nbytes: int | None) -> Orders:
    """The tenant's quota set, or taken away; raises ``ValueError`` when there are too many."""
    quotas = {name: quota for name, quota in orders.quotas.items() if name != tenant}
    if nbytes is not None:
        quotas[tenant] = nbytes
    if len(quotas) > MOST_QUOTAS:
        raise ValueError(f"{MOST_QUOTAS} tenants have a quota, no more are taken; take one away first")
    return msgspec.structs.replace(orders, quotas=dict(sorted(quotas.items())))


def _same(one: Drain, other: Drain) -> bool:
    return (one.worker, one.incarnation, one.ordered_at_s) == (other.worker, other.incarnation, other.ordered_at_s)


def split_quota(quota: int, usage: dict[WorkerId, int], capacity: dict[WorkerId, int]) -> dict[WorkerId, int]:
    """A tenant's budget in bytes for each worker, summing up to ``quota``; keys as in ``capacity``.

    A tenant below its quota may keep what it has everywhere, and what is left is shared by capacity: no worker evicts
    because the blocks lie unevenly. A tenant above it shrinks everywhere by the same share.
    """
    if not capacity:
        return {}
    used = {worker: usage.get(worker, 0) for worker in capacity}
    total, room = sum(used.values()), sum(capacity.values())
    if total > quota:
        budgets = {worker: quota * nbytes // total for worker, nbytes in used.items()}
    else:
        spare = quota - total
        budgets = {worker: used[worker] + (spare * capacity[worker] // room if room else 0) for worker in capacity}
    budgets[max(sorted(budgets), key=lambda worker: capacity[worker])] += quota - sum(budgets.values())
    return budgets
