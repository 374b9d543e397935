"""Questions to workers that move no bytes: one of a kind at a time for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.store_manager.core.notes import Notes
from services.store_manager.core.picture import Addresses, Picture
from services.store_manager.core.policy import PlannerPolicy
from shared.ids import Incarnation, WorkerId
from shared.machine import Effect, Request
from shared.messages import Failure, Retired, Trimmed


@dataclass(frozen=True)
class Side:
    """One question; the tag of its answer."""

    kind: str
    worker: WorkerId
    incarnation: Incarnation
    blocks: int = 0


class Asker:
    """Asks, and keeps book of who is asked and who failed to answer."""

    def __init__(self, addresses: Addresses, policy: PlannerPolicy, picture: Picture, notes: Notes) -> None:
        self._addresses, self._policy, self._picture, self._notes = addresses, policy, picture, notes

    def can_ask(self, kind: str, worker: WorkerId) -> bool:
        """Whether no such question is open there."""
        return kind not in self._picture.fleet.peers[worker].busy

    def ask(self, kind: str, worker: WorkerId, message: Any, blocks: int, out: list[Effect]) -> None:
        """Asks about so many blocks."""
        peer = self._picture.fleet.peers[worker]
        peer.busy.add(kind)
        out.append(Request(self._addresses.pool(worker), message, Side(kind, worker, peer.hello.incarnation, blocks),
                           self._policy.ask_s))

    def answered(self, side: Side, reply: Any, *, now: float) -> str | None:
        """A question was answered, or was not (``reply`` says why); why it failed, empty when it did not.

        ``None`` when it was of a life that is over.
        """
        peer = self._picture.fleet.peers.get(side.worker)
        if peer is None or peer.hello.incarnation != side.incarnation:
            return None
        peer.busy.discard(side.kind)
        why = reply if isinstance(reply, str) else reply.message if isinstance(reply, Failure) else ""
        if why:
            self._notes.outcomes[side.kind, "failed"] += side.blocks
            self._notes.decided("failed", side.worker, side.blocks, 0, f"{side.kind}: {why}", now)
            if side.kind != "retire":  # a drain ends with its own word
                self._picture.fleet.failed(side.worker, now=now)
        else:
            self._notes.outcomes[side.kind, "done"] += (
                max(0, reply.blocks) if isinstance(reply, Trimmed | Retired) else side.blocks)
        return why
