"""The transfer engine: registered memory, grants, and pushes by the best path there is."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shared.clock import Clock, SystemClock
from shared.errors import Bug, SettingError
from shared.ids import HostId, Incarnation, OperationId, WorkerId, fresh
from shared.messages import Endpoint, Grant, Range
from shared.transfer import copy, shm, tcp
from shared.transfer.addresses import advertised_host, host_id, join_address
from shared.transfer.frames import MAX_NAME
from shared.transfer.lane import Lane, Sender, Trouble
from shared.transfer.ledger import Ledger
from shared.transfer.link import Link, call_on
from shared.transfer.plan import Batch, Choice, choose_paths, plan_batches
from shared.transfer.receiver import Receiver
from shared.transfer.segment import Segment
from shared.transfer.settings import TransferSettings
from shared.transfer.statistics import Counts, Statistics
from shared.transfer.types import PathFailed, PeerGone, PushResult, Slice, SliceStatus

LANES: Mapping[str, Callable[[Sender, Endpoint, str], Lane]] = {
    copy.PATH: copy.CopyLane, shm.PATH: shm.ShmLane, tcp.PATH: tcp.TcpLane,
}
"""{path: what makes a lane on it}; whether a path connects two ends is said by :data:`shared.transfer.plan.RULES`."""

WATCH_S = 0.1
"""Pause between two looks for what is overdue."""
PAUSE_S = 1.0
"""How long a path is avoided after it could not connect; doubles up to ``MAX_PAUSE_S``."""
MAX_PAUSE_S = 32.0


@dataclass(slots=True)
class _Pause:
    """A path that could not connect is tried last until ``until_s`` (monotonic)."""

    until_s: float
    length_s: float
    why: str


class TransferEngine:
    """One per worker process; made by :meth:`open`, used from the event loop that opened it.

    Its segments may be read and written by anybody who was given their ``buffer``; a range that is granted to an
    operation belongs to that operation's writers until :meth:`release` has returned.
    """

    def __init__(self, worker: WorkerId, incarnation: Incarnation, host: HostId, settings: TransferSettings,
                 clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._segments: dict[str, Segment] = {}
        self._ledger = Ledger(worker, incarnation, self._segments, clock=clock, checksums=settings.checksums)
        name = f"transfer-{worker}"
        self._receiver = Receiver(self._ledger, clock=clock, max_connections=settings.max_connections, name=name)
        self._sender = Sender(worker, self._segments, clock, settings.checksums, settings.connect_timeout_s, name)
        self._endpoint = Endpoint(worker=worker, incarnation=incarnation, host=host)
        #: {(peer, its incarnation, path, address): link}; a peer's former incarnations have none
        self._links: dict[tuple[WorkerId, Incarnation, str, str], Link] = {}
        self._retired: list[Lane] = []
        """Lanes of former incarnations whose threads may still run."""
        self._pauses: dict[tuple[WorkerId, Incarnation, str], _Pause] = {}
        self._sent_slices = 0
        self._private_dir = ""
        self._socket_path = ""
        self._counts = Counts()
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *, worker: WorkerId, incarnation: Incarnation, host: HostId | None = None,
        settings: TransferSettings | None = None, clock: Clock | None = None,
    ) -> AsyncIterator[TransferEngine]:
        """Listens on every path that ``settings`` allow; leaving frees threads, sockets and segments.

        ``host`` falls back to ``settings.host_id`` and then to :func:`host_id`. Raises :class:`SettingError`.
        """
        settings = settings or TransferSettings()
        for path in settings.paths:
            if path not in LANES:
                raise SettingError("paths", path, f"some of {', '.join(LANES)}")
        engine = cls(worker, incarnation, HostId(settings.host_id) if settings.host_id else host or host_id(),
                     settings, clock or SystemClock())
        watch: asyncio.Task[None] | None = None
        try:
            engine._listen()
            watch = asyncio.create_task(engine._watch(), name=f"transfer-{worker}-watch")
            yield engine
        finally:
            if watch is not None:
                watch.cancel()
                await asyncio.wait([watch])
            await engine._close()

    @property
    def endpoint(self) -> Endpoint:
        """How peers reach this engine."""
        return self._endpoint

    def register(self, name: str, nbytes: int) -> Segment:
        """New zeroed memory to push from, and into under a grant; lives as long as the engine."""
        if name in self._segments or not 0 < len(name) <= MAX_NAME:
            raise Bug(f"segment name {name!r} is taken or unusable")
        segment = self._segments[name] = Segment(name, nbytes)
        return segment

    def grant(self, operation: OperationId, ranges: Sequence[Range], *, ttl_s: float) -> Grant:
        """Leave for a peer to write ``ranges`` for ``operation``; see :meth:`Ledger.grant`."""
        return self._ledger.grant(operation, ranges, ttl_s=ttl_s)

    def covered(self, operation: OperationId, range: Range) -> bool:
        """Has every byte of ``range`` been written and verified under ``operation``, with no writer in it now?"""
        return self._ledger.covered(operation, range)

    def received_bytes(self, operation: OperationId) -> int:
        """Distinct bytes that arrived verified under ``operation``; 0 once it is released."""
        return self._ledger.received_bytes(operation)

    async def release(self, operation: OperationId) -> None:
        """Revokes the operation's grants and returns once no writer can touch their ranges any more.

        Writers end by themselves or at their deadline, when their connection is cut. A writer in shared memory
        that stalls even then is waited for until its process is gone. Idempotent.
        """
        loop = asyncio.get_running_loop()
        quiet: asyncio.Future[None] = loop.create_future()
        self._ledger.revoke(operation, partial(call_on, loop, _resolve, quiet))
        await quiet

    async def push(self, peer: Endpoint, slices: Sequence[Slice], grant: Grant, *,
                   timeout_s: float | None = None) -> PushResult:
        """Writes ``slices`` into ``peer``'s memory under its ``grant``.

        Every trouble with the transfer is a status of the slices it concerns. Do not change the source bytes
        before this returns. ``timeout_s`` falls back to a deadline in proportion to the size.
        Raises :class:`Bug` for a slice that is not of our memory.
        """
        started_s = self._clock.monotonic()
        nbytes = self._check(slices)
        if timeout_s is None:
            timeout_s = self._settings.timeout_s(nbytes)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        paths: list[str] = []
        troubles = await self._push(peer, slices, grant, deadline_s, paths)
        statuses = []
        for i, item in enumerate(slices):
            trouble = troubles.get(i)
            statuses.append(SliceStatus(item, None if trouble is None else trouble.kind(
                peer.worker, trouble.why, nbytes=item.remote.length, segment=item.remote.segment)))
        return PushResult(statuses, nbytes=sum(s.slice.remote.length for s in statuses if s.error is None),
                          seconds=self._clock.monotonic() - started_s, path="+".join(paths))

    def statistics(self) -> Statistics:
        """Counters since the engine was opened."""
        ledger, receiver = self._ledger, self._receiver
        return Statistics(
            pushes=dict(self._counts.pushes), sent_bytes=dict(self._counts.sent_bytes),
            received_bytes=dict(ledger.received_bytes_by_path), failures=dict(self._counts.failures),
            failovers=dict(self._counts.failovers), refused_claims=ledger.refused_claims,
            corrupt_spans=ledger.corrupt_spans, dropped_connections=dict(receiver.dropped),
            connections=receiver.connections)

    # -- sending ------------------------------------------------------------------------------------------------

    def _check(self, slices: Sequence[Slice]) -> int:
        nbytes = 0
        for item in slices:
            segment, length = self._segments.get(item.segment), item.remote.length
            if segment is None or item.offset < 0 or length < 0 or item.offset + length > segment.nbytes:
                raise Bug(f"slice of bytes that are not ours: {item}")
            nbytes += length
        return nbytes

    async def _push(self, peer: Endpoint, slices: Sequence[Slice], grant: Grant, deadline_s: float,
                    paths: list[str]) -> dict[int, Trouble]:
        """Tries path after path with the slices whose connection broke; ``{index of a slice: its trouble}``."""
        todo = {i: item for i, item in enumerate(slices) if item.remote.length}
        if not todo:
            return {}
        routes = choose_paths(self._settings.paths, self._endpoint, peer, same_process=copy.is_local(peer),
                              paused=self._paused(peer))
        if not routes.choices:
            why = "; ".join(f"{path}: {reason}" for path, reason in routes.excluded.items()) or "no path is allowed"
            self._counts.failed("none", [PathFailed.code] * len(todo))
            return dict.fromkeys(todo, Trouble(PathFailed, why))
        troubles: dict[int, Trouble] = {}
        for i, choice in enumerate(routes.choices):
            if i:
                self._counts.failed_over(routes.choices[i - 1].path, choice.path)
            for _ in range(2):
                link = self._link(peer, choice)
                pooled = link.connected
                new = await self._push_over(link, peer, choice, todo, grant, deadline_s, paths)
                troubles = {**{i: why for i, why in troubles.items() if i not in todo}, **new}
                todo = {i: item for i, item in todo.items() if i in new and new[i].kind is PeerGone}
                if not todo or not pooled:
                    break  # a pooled connection may just have gone stale; a fresh one that fails is a verdict
            if not todo or self._closed:
                break
        self._counts.failed(choice.path, [trouble.kind.code for trouble in troubles.values()])
        return troubles

    async def _push_over(self, link: Link, peer: Endpoint, choice: Choice, todo: Mapping[int, Slice], grant: Grant,
                         deadline_s: float, paths: list[str]) -> dict[int, Trouble]:
        batches, started_s = plan_batches(todo), self._clock.monotonic()
        outcomes = await link.send(batches, grant, deadline_s=deadline_s, corrupt=self._corrupt)
        troubles: dict[int, Trouble] = {}
        acknowledged = 0
        for batch, outcome in zip(batches, outcomes, strict=True):
            for piece, trouble in zip(batch.pieces, outcome, strict=True):
                if trouble is None:
                    acknowledged += piece.remote.length
                else:
                    troubles.setdefault(piece.index, trouble)
        self._counts.pushed(choice.path, acknowledged, seconds=self._clock.monotonic() - started_s)
        if acknowledged and choice.path not in paths:
            paths.append(choice.path)
        self._judge(peer, choice, link, troubles)
        return troubles

    def _judge(self, peer: Endpoint, choice: Choice, link: Link, troubles: Mapping[int, Trouble]) -> None:
        """Pauses a path that does not connect; forgives one that does."""
        key = (peer.worker, peer.incarnation, choice.path)
        gone = next((trouble for trouble in troubles.values() if trouble.kind is PeerGone), None)
        if gone is None or link.connected:
            self._pauses.pop(key, None)
            return
        former = self._pauses.get(key)
        length_s = min(MAX_PAUSE_S, former.length_s * 2) if former else PAUSE_S
        self._pauses[key] = _Pause(self._clock.monotonic() + length_s, length_s, gone.why)

    def _paused(self, peer: Endpoint) -> dict[str, str]:
        now = self._clock.monotonic()
        pauses = ((path, self._pauses.get((peer.worker, peer.incarnation, path))) for path in self._settings.paths)
        return {path: pause.why for path, pause in pauses if pause is not None and pause.until_s > now}

    def _link(self, peer: Endpoint, choice: Choice) -> Link:
        key = (peer.worker, peer.incarnation, choice.path, choice.address)
        link = self._links.get(key)
        if link is None:
            self._retire(peer)
            make_lane = partial(LANES[choice.path], self._sender, peer, choice.address)
            link = self._links[key] = Link(
                make_lane, max_lanes=1 if choice.path == copy.PATH else self._settings.lanes,
                max_inflight=self._settings.max_inflight, silence_s=self._settings.silence_s)
        return link

    def _retire(self, peer: Endpoint) -> None:
        """Ends what leads to former lives of ``peer``."""
        former = [key for key in self._links if key[0] == peer.worker and key[1] != peer.incarnation]
        self._retired = [lane for lane in self._retired if lane.alive]
        for key in former:
            self._retired += self._links.pop(key).fail(Trouble(PeerGone, "the peer has a new incarnation"))
        for pause in [key for key in self._pauses if key[0] == peer.worker and key[1] != peer.incarnation]:
            del self._pauses[pause]

    def _corrupt(self, batch: Batch) -> frozenset[int]:
        every = self._settings.corrupt_every
        if not every:
            return frozenset()
        chosen = []
        for i, piece in enumerate(batch.pieces):
            if i == 0 or batch.pieces[i - 1].index != piece.index:  # a new slice begins
                self._sent_slices += 1
                if self._sent_slices % every == 0:
                    chosen.append(i)
        return frozenset(chosen)

    # -- life ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        settings, own = self._settings, self._endpoint
        addresses: dict[str, Any] = {}
        if tcp.PATH in settings.paths:
            try:
                sock, port = tcp.listen_tcp(settings.bind_host)
            except OSError as error:
                raise SettingError("bind_host", settings.bind_host, f"an address of this host ({error})") from error
            self._receiver.listen(sock, tcp.open_session)
            addresses["tcp"] = join_address(advertised_host(settings.bind_host, settings.advertise_host), port)
        if shm.PATH in settings.paths:
            addresses["shm"] = self._socket_path = self._new_socket_path()
            try:
                self._receiver.listen(shm.listen_shm(self._socket_path), shm.open_session)
            except OSError as error:
                raise SettingError("socket_dir", settings.socket_dir, f"a writable directory ({error})") from error
        self._endpoint = msgspec.structs.replace(own, **addresses)
        if copy.PATH in settings.paths:
            copy.register_local(self._endpoint, self._ledger)

    def _new_socket_path(self) -> str:
        directory = self._settings.socket_dir
        if not directory:
            directory = self._private_dir = tempfile.mkdtemp(prefix="moonbus-")
        path = os.path.abspath(os.path.join(directory, f"{fresh('t', 6)}.sock"))
        if len(os.fsencode(path)) > shm.MAX_SOCKET_PATH_BYTES:
            raise SettingError("socket_dir", directory, f"a path so short that {path} has at most "
                                                        f"{shm.MAX_SOCKET_PATH_BYTES} bytes; /tmp is one")
        return path

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._receiver.watch()

    async def _close(self) -> None:
        """Stops sending, then receiving, then drops the memory; waits for every thread."""
        self._closed = True
        copy.unregister_local(self._endpoint)
        lanes = self._retired
        for link in self._links.values():
            lanes += link.fail(Trouble(PeerGone, "this engine was closed"))
        await asyncio.to_thread(self._free, lanes)

    def _free(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.join()
        self._receiver.close()
        self._ledger.close()
        for segment in self._segments.values():
            segment.close()
        if self._socket_path:
            Path(self._socket_path).unlink(missing_ok=True)
        if self._private_dir:
            os.rmdir(self._private_dir)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
