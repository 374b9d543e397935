"""Copies under way: which worker gets a part of a chain, from whom, and what a failure costs.

A copy goes to the worker that scores best among those that may have it: for heat, where the prefix has the fewest
copies on a host; for a drain, where the chain is already; then by role, by load (a fresh worker counts as fuller than
it is), by name. It comes from the owner that has most of it, on the same host if there is one, that sends least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from services.store_manager.core.fleet import Peer
from services.store_manager.core.notes import Notes
from services.store_manager.core.picture import MADE_FOR, Addresses, Picture
from services.store_manager.core.policy import PlannerPolicy
from services.store_manager.core.replicas import leading
from shared.errors import Bug
from shared.ids import BlockKey, OperationId, WorkerId
from shared.machine import Effect, Request
from shared.messages import Replicate, Replicated, StoredBlock

_LANDING_S = 3.0
"""A copy that was answered counts as there for so long, until the news of it comes."""
_MOST_PAUSES = 10_000
"""Failed copies remembered."""
_FORGET_EVERY_S = 1.0
"""Pause between two looks for pauses that are long over."""
_NOT_THEIR_FAULT = ("capacity", "draining", "missing", "parent")
"""Why a copy may come short without anybody failing."""


@dataclass(frozen=True)
class Copy:
    """One request to copy; the tag of its answer."""

    operation: OperationId
    source: WorkerId
    target: WorkerId
    keys: tuple[BlockKey, ...]
    nbytes: int
    prefix: BlockKey
    """The end of the chain it is part of."""
    drain: WorkerId | None = None
    """The worker for whose drain it is."""


@dataclass(frozen=True)
class Landed:
    """What became of a copy: its first ``blocks`` are held by the target now."""

    copy: Copy
    blocks: int
    nbytes: int


class Copier:
    """See the module. Bounded: ``copies_limit`` in all, and few at each worker."""

    def __init__(self, name: str, addresses: Addresses, policy: PlannerPolicy, picture: Picture, notes: Notes) -> None:
        self._name, self._addresses, self._policy, self._picture, self._notes = name, addresses, policy, picture, notes
        self.under_way: dict[OperationId, Copy] = {}
        #: {operation: (copy that was answered, until when it counts as there)}; in order of time
        self._landing: dict[OperationId, tuple[Copy, float]] = {}
        #: {(target, end of the chain): (failures in a row, when it may be tried again)}
        self._pauses: dict[tuple[WorkerId, BlockKey], tuple[int, float]] = {}
        self._operations = 0
        self._forget_at_s = float("-inf")

    @property
    def is_full(self) -> bool:
        """No more copies can begin."""
        return len(self.under_way) >= self._policy.copies_limit

    def draining(self, worker: WorkerId) -> int:
        """Copies under way for the worker's drain."""
        return sum(copy.drain == worker for copy in self.under_way.values())

    def copy(self, path: Sequence[BlockKey], masks: Sequence[int], holding: int, out: list[Effect], now: float,
             why: str, *, drain: WorkerId | None = None, into: str = "free") -> Copy | None:
        """Asks for the first batch of ``path`` that the best worker lacks; ``None`` when there is none now.

        ``masks`` are the holders of each block that count, promised copies among them; ``holding`` those of all.
        ``into`` is ``free`` when others' blocks may go for it, ``empty`` when not.
        """
        if self.is_full:
            return None
        picture, fleet = self._picture, self._picture.fleet
        if not any(self._can_send(worker, now) for worker in picture.holders(path)):
            return None
        on_host = Counter(fleet.peers[worker].host for worker in picture.map.named(holding)
                          if worker in fleet.peers)
        candidates: list[tuple[tuple[Any, ...], Peer, int]] = []
        for peer in fleet.targets(picture.spec_of(path), now=now):
            bit = picture.map.bit(peer.id)
            if bit & holding or picture.is_leaving(peer.id) or self._is_paused(peer.id, path[-1], now):
                continue
            have = leading(masks, bit)
            room = fleet.free_blocks(peer.id) if into == "free" else fleet.empty_blocks(peer.id)
            lacks = len(path) - have
            made = len(picture.map.ours_of(peer.id)) + lacks
            if drain is None and (room < lacks or made > self._policy.made_share * peer.hello.capacity_blocks):
                continue
            if room < min(lacks, self._policy.batch_blocks):
                continue
            load = fleet.load(peer.id, now=now)
            # A drain keeps chains together; a copy for heat goes where there is none.
            score = ((-min(have, 1), peer.role_rank, load, peer.id) if drain is not None else
                     (on_host[peer.host], peer.role_rank, load, -have, peer.id))
            candidates.append((score, peer, have))
        for _, target, have in sorted(candidates, key=lambda candidate: candidate[0]):
            keys = path[have:have + self._policy.batch_blocks]
            chosen = self._source(keys, target, now)
            if chosen is not None:
                source, run = chosen
                break
        else:
            return None
        blocks: list[StoredBlock] = []
        nbytes = 0
        for key in keys[:run]:
            place = picture.map.get(key)
            assert place is not None, "the source holds it"
            if blocks and nbytes + place.nbytes > self._policy.batch_bytes:
                break
            nbytes += place.nbytes
            blocks.append(msgspec.structs.replace(place.block(key), origin="received", source=source,
                                                  request=MADE_FOR))
        self._operations += 1
        operation = OperationId(f"{self._name}-{self._operations}")
        copy = Copy(operation, source, target.id, tuple(block.key for block in blocks), nbytes, path[-1], drain)
        deadline_s = self._policy.copy_fixed_s + nbytes / self._policy.slowest_bytes_per_s
        self.under_way[operation] = copy
        fleet.sent(source, target.id, nbytes, now=now)
        out.append(Request(self._addresses.pool(target.id), Replicate(
            operation=operation, source=source, blocks=blocks, deadline_s=deadline_s), copy,
            deadline_s + self._policy.ask_s))
        near = "the same host" if fleet.peers[source].host == target.host else "another host"
        self._notes.decided("drain" if drain else "replicate", target.id, len(blocks), nbytes,
                      f"{why}; from {source} on {near}, {on_host[target.host]} copies on {target.host} so far", now)
        return copy

    def _source(self, keys: Sequence[BlockKey], target: Peer, now: float) -> tuple[WorkerId, int] | None:
        """Who shall send, and how many leading ``keys`` it has: most of them, then nearest, then least busy."""
        fleet = self._picture.fleet
        masks = [self._picture.map.mask(key) for key in keys]
        best: tuple[tuple[Any, ...], WorkerId, int] | None = None
        for worker in self._picture.map.named(masks[0]):
            peer = fleet.peers.get(worker)
            if (peer is None or worker == target.id or not self._can_send(worker, now)
                    or fleet.are_apart(worker, target.id, now=now)):
                continue
            run = leading(masks, self._picture.map.bit(worker))
            score = (-run, peer.host != target.host, peer.sending, fleet.queued(worker), worker)
            if best is None or score < best[0]:
                best = (score, worker, run)
        return None if best is None else (best[1], best[2])

    def _can_send(self, worker: WorkerId, now: float) -> bool:
        peer = self._picture.fleet.peers.get(worker)
        return (peer is not None and peer.sending < self._policy.send_limit
                and self._picture.fleet.is_usable(worker, now=now))

    def _is_paused(self, target: WorkerId, prefix: BlockKey, now: float) -> bool:
        pause = self._pauses.get((target, prefix))
        return pause is not None and now < pause[1]

    def promised(self) -> dict[BlockKey, int]:
        """{block: bits of workers to which it is under way}."""
        promised: dict[BlockKey, int] = {}
        for copy in [*self.under_way.values(), *(copy for copy, _ in self._landing.values())]:
            bit = self._picture.map.bit(copy.target)
            for key in copy.keys:
                promised[key] = promised.get(key, 0) | bit
        return promised

    def answered(self, copy: Copy, reply: Any, *, now: float) -> Landed | None:
        """A copy was answered, or was not (``reply`` says why); ``None`` for one that was over already."""
        if self.under_way.pop(copy.operation, None) is None:
            return None
        fleet = self._picture.fleet
        fleet.over(copy.source, copy.target)
        if isinstance(reply, Replicated):
            held, nbytes, why = max(0, min(reply.blocks, len(copy.keys))), max(0, reply.nbytes), reply.why
        else:
            held, nbytes, why = 0, 0, reply if isinstance(reply, str) else reply.message
        self._notes.nbytes_copied += nbytes
        self._notes.outcomes["copy", "done"] += held
        self._notes.outcomes["copy", "failed"] += len(copy.keys) - held
        if held:
            self._landing[copy.operation] = (replace(copy, keys=copy.keys[:held]), now + _LANDING_S)
        place = (copy.target, copy.prefix)
        if held == len(copy.keys):
            fleet.pair_succeeded(copy.source, copy.target)
            self._pauses.pop(place, None)
            return Landed(copy, held, nbytes)
        failures = self._pauses.get(place, (0, 0.0))[0]
        pause_s = min(self._policy.suspend_limit_s, self._policy.suspend_first_s * 2.0 ** min(failures, 30))
        if len(self._pauses) >= _MOST_PAUSES:
            self._pauses.clear()
        self._pauses[place] = (failures + 1, now + pause_s)
        apart = ""
        if not isinstance(reply, Replicated):
            apart = f"; {copy.target} is left alone for {fleet.failed(copy.target, now=now):.0f} s"
        elif why not in _NOT_THEIR_FAULT:
            apart_s = fleet.pair_failed(copy.source, copy.target, now=now)
            apart = f"; {copy.source} and {copy.target} are kept apart for {apart_s:.0f} s"
        self._notes.decided("failed", copy.target, len(copy.keys) - held, copy.nbytes,
                            f"{why or 'no reason given'}; this prefix again there in {pause_s:.0f} s{apart}", now)
        return Landed(copy, held, nbytes)

    def forget(self, now: float) -> None:
        """Drops what is over. For every event: it costs nothing most times."""
        while self._landing and (oldest := next(iter(self._landing.items())))[1][1] <= now:
            del self._landing[oldest[0]]
        if self._pauses and now >= self._forget_at_s:
            self._forget_at_s = now + _FORGET_EVERY_S
            limit_s = now - self._policy.suspend_limit_s
            self._pauses = {place: pause for place, pause in self._pauses.items() if pause[1] > limit_s}

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when a bound is broken, or a worker is busier than there are copies."""
        if len(self.under_way) > self._policy.copies_limit:
            raise Bug(f"planner: {len(self.under_way)} copies are under way")
        for worker, peer in self._picture.fleet.peers.items():
            for kind, role in (("receiving", "target"), ("sending", "source")):
                if getattr(peer, kind) > sum(getattr(copy, role) == worker for copy in self.under_way.values()):
                    raise Bug(f"planner: {worker} is {kind} more than there is")


def all_of(masks: Sequence[int]) -> int:
    """The bits that all have; at least one mask."""
    holding = masks[0]
    for mask in masks[1:]:
        holding &= mask
    return holding
