"""The sending side of an engine: which path leads to a peer, and what is known of the paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from shared.clock import Clock
from shared.ids import Incarnation, WorkerId
from shared.messages import Endpoint
from shared.transfer import copy, nvlink, rdma, shm, tcp
from shared.transfer.device import Way
from shared.transfer.lane import Lane, Sender
from shared.transfer.link import Link
from shared.transfer.plan import (
    BATCH_BYTES,
    DEVICE_BATCH_BYTES,
    LOCAL_TCP_BATCH_BYTES,
    MIN_SPREAD_BYTES,
    STAGE_BYTES,
    Batch,
    Choice,
    Routes,
    choose_paths,
    needs_checksums,
    plan_batches,
    spread_bytes,
)
from shared.transfer.settings import TransferSettings
from shared.transfer.statistics import Counts
from shared.transfer.types import PeerGone, PushResult, Slice, Trouble

if TYPE_CHECKING:
    from shared.transfer.push import Push

LANE_BYTES = 4 << 20
"""Bytes on their way on a lane before another one is opened beside it."""
PAUSE_S = 1.0
"""How long a path is avoided after it could not connect; doubles up to ``MAX_PAUSE_S``."""
MAX_PAUSE_S = 32.0

_LinkKey = tuple[WorkerId, Incarnation, str, str]
MakeLane = Callable[[Sender, Endpoint, str], Lane]


@dataclass(slots=True)
class _Pause:
    """A path that could not connect is tried last until ``until_s`` (monotonic)."""

    until_s: float
    length_s: float
    why: str


class Router:
    """Links to peers by path, and pauses of those that fail. Lives on the event loop.

    ``lanes``: {path: what makes a lane on it}. ``own`` is how the engine is reached itself.
    """

    def __init__(self, lanes: Mapping[str, MakeLane], sender: Sender, settings: TransferSettings, clock: Clock,
                 own: Endpoint, counts: Counts) -> None:
        self._lanes, self._sender, self._settings, self._clock = lanes, sender, settings, clock
        self._own = own
        #: {(peer, its incarnation, path, address): link}
        self._links: dict[_LinkKey, Link] = {}
        #: {peer: the incarnation that answered last}
        self._lives: dict[WorkerId, Incarnation] = {}
        self._retired: list[Lane] = []
        """Lanes of former incarnations whose threads may still run."""
        self._pauses: dict[tuple[WorkerId, Incarnation, str], _Pause] = {}
        #: {(peer, is it for bytes of a GPU): (how it is reached, is it in this process, routes when none was paused)}
        self._routes: dict[tuple[WorkerId, bool], tuple[Endpoint, bool, Routes]] = {}
        self._sent_slices = 0
        self._tidied_s = clock.monotonic()
        self.counts = counts
        self.pushes: set[Push] = set()
        """On their way."""
        self.closed = False

    @property
    def own(self) -> Endpoint:
        """How the engine is reached itself."""
        return self._own

    @own.setter
    def own(self, own: Endpoint) -> None:
        self._own = own
        self._routes.clear()

    def routes(self, peer: Endpoint, slices: Sequence[Slice]) -> Routes:
        """Paths to ``peer`` for ``slices``, best first; the first is counted as chosen."""
        if self.closed:
            return Routes((), dict.fromkeys(self._settings.paths, "this engine was closed"))
        same_process = copy.is_local(peer)
        own, segments = self._own, self._sender.segments
        on_device = bool(own.nvlink) and all(segments[item.segment].gpu is not None for item in slices)
        key = peer.worker, on_device
        known = self._routes.get(key)
        if (known is not None and not self._pauses and (known[0] is peer or known[0] == peer)
                and known[1] == same_process):
            routes = known[2]
        else:
            if own.nvlink and not on_device:
                own = msgspec.structs.replace(own, nvlink="")
            routes = choose_paths(self._settings.paths, own, peer, same_process=same_process,
                                  paused=self._paused(peer))
            if self._pauses:
                self._routes.clear()
            else:
                self._routes[key] = (peer, same_process, routes)
        self.counts.chose(routes)
        return routes

    def plan(self, peer: Endpoint, choice: Choice, slices: Mapping[int, Slice]) -> list[Batch]:
        """``slices`` cut and joined as suits the path."""
        settings, segments = self._settings, self._sender.segments
        batch_bytes, strided = BATCH_BYTES, False
        if choice.path == shm.PATH:
            if not settings.corrupt_every and all(segments[item.segment].mappable for item in slices.values()):
                batch_bytes = spread_bytes(sum(item.nbytes for item in slices.values()), settings.lanes)
                strided = True
            else:
                batch_bytes = STAGE_BYTES
        elif choice.path == rdma.PATH and (settings.corrupt_every or any(
                segments[item.segment].way is Way.STAGED for item in slices.values())):
            batch_bytes = STAGE_BYTES
        elif choice.path == nvlink.PATH:
            batch_bytes = DEVICE_BATCH_BYTES
        proven = needs_checksums(settings.proofs, choice.path, self.own.host, peer.host)
        if choice.path == tcp.PATH and peer.host == self.own.host and not proven:
            batch_bytes = min(LOCAL_TCP_BATCH_BYTES, max(BATCH_BYTES, settings.max_inflight))
        return plan_batches(slices, join=not proven, strided=strided, batch_bytes=batch_bytes)

    def link(self, peer: Endpoint, choice: Choice) -> Link:
        """The link to ``peer`` by that path."""
        key = (peer.worker, peer.incarnation, choice.path, choice.address)
        link = self._links.get(key)
        if link is None:
            settings, local = self._settings, peer.host == self.own.host
            # Within a host a second TCP connection only takes a processor from the first one's receiver; a lane of
            # RDMA uses all cards by itself.
            single = choice.path in (copy.PATH, nvlink.PATH, rdma.PATH) or (choice.path == tcp.PATH and local)
            link = self._links[key] = Link(
                partial(self._lanes[choice.path], self._sender, peer, choice.address),
                max_lanes=1 if single else settings.lanes,
                lane_bytes=MIN_SPREAD_BYTES if choice.path == shm.PATH else LANE_BYTES,
                max_inflight=settings.max_inflight, silence_s=settings.silence_s)
        return link

    def judge(self, peer: Endpoint, choice: Choice, link: Link, gone: Trouble | None) -> None:
        """Pauses a path that does not connect; forgives one that does. ``gone``: why a batch did not get through."""
        key = (peer.worker, peer.incarnation, choice.path)
        if link.connected and self._lives.get(peer.worker) != peer.incarnation:
            self._lives[peer.worker] = peer.incarnation
            self._retire(peer)
        if gone is None or link.connected:
            self._pauses.pop(key, None)
            return
        if self._lives.get(peer.worker, peer.incarnation) != peer.incarnation:
            if link.idle and (*key, choice.address) in self._links:
                self._end((*key, choice.address), "the peer has another incarnation")
            return
        former = self._pauses.get(key)
        length_s = min(MAX_PAUSE_S, former.length_s * 2) if former else PAUSE_S
        self._pauses[key] = _Pause(self._clock.monotonic() + length_s, length_s, gone.why)

    def corrupt(self, batch: Batch) -> frozenset[int]:
        """For tests: pieces of ``batch`` to corrupt, by the setting ``corrupt_every``."""
        every = self._settings.corrupt_every
        if not every:
            return frozenset()
        chosen = []
        for i, piece in enumerate(batch.pieces):
            if i == 0 or batch.pieces[i - 1].indexes != piece.indexes:  # a new slice begins
                self._sent_slices += 1
                if self._sent_slices % every == 0:
                    chosen.append(i)
        return frozenset(chosen)

    def ended(self, push: Push, result: PushResult) -> None:
        """A push has its result."""
        self.pushes.discard(push)
        self.counts.ended(result)

    @property
    def inflight_bytes(self) -> int:
        """Sent and not acknowledged."""
        return sum(link.inflight_bytes for link in self._links.values())

    def forget(self, serial: int) -> None:
        """The segment ``serial`` goes away; no push of it is on its way."""
        for link in self._links.values():
            link.forget(serial)

    def tidy(self) -> None:
        """Now and then, lets go of what is known of peers that went away. To be called a few times a second."""
        now = self._clock.monotonic()
        if now - self._tidied_s < MAX_PAUSE_S:
            return
        self._tidied_s = now
        self._pauses = {key: pause for key, pause in self._pauses.items() if now - pause.until_s < MAX_PAUSE_S}
        for key in [key for key, link in self._links.items() if link.idle and not link.connected]:
            self._end(key, "nobody is there any more")
        self._retired = [lane for lane in self._retired if lane.alive]
        peers = {key[0] for key in self._links}
        self._lives = {peer: life for peer, life in self._lives.items() if peer in peers}
        self._routes = {key: known for key, known in list(self._routes.items()) if key[0] in peers}

    def close(self) -> list[Lane]:
        """Ends everything on its way; returns the lanes to join."""
        self.closed = True
        for key in list(self._links):
            self._end(key, "this engine was closed")
        return self._retired

    def _paused(self, peer: Endpoint) -> dict[str, str]:
        if not self._pauses:
            return {}
        now = self._clock.monotonic()
        pauses = ((path, self._pauses.get((peer.worker, peer.incarnation, path))) for path in self._settings.paths)
        return {path: pause.why for path, pause in pauses if pause is not None and pause.until_s > now}

    def _retire(self, peer: Endpoint) -> None:
        """Ends what leads to other lives of ``peer``, but for pushes on their way: a former one may be draining."""
        self._routes = {key: known for key, known in list(self._routes.items()) if key[0] != peer.worker}
        self._retired = [lane for lane in self._retired if lane.alive]
        for key, link in list(self._links.items()):
            if key[0] == peer.worker and key[1] != peer.incarnation and link.idle:
                self._end(key, "the peer has a new incarnation")
        for pause in [key for key in self._pauses if key[0] == peer.worker and key[1] != peer.incarnation]:
            del self._pauses[pause]

    def _end(self, key: _LinkKey, why: str) -> None:
        self._retired += self._links.pop(key).fail(Trouble(PeerGone, why))
