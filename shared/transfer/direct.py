"""Pushes without an event loop: the calling thread sends the claims and waits for the answers itself.

Nothing is handed to another thread on the way, so this is what takes the least time. Connections are pooled and
belong to one push at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from shared.ids import Incarnation, WorkerId
from shared.messages import Endpoint, Grant
from shared.transfer.addresses import host_clock_s
from shared.transfer.frames import Ack, FrameError
from shared.transfer.lane import DIAL_ERRORS, LATE, Sender, StreamLane, Transfer, outcome_of
from shared.transfer.plan import Batch, Choice
from shared.transfer.router import MakeLane
from shared.transfer.types import Outcome, PeerGone, Trouble
from shared.transfer.wire import Connection

WINDOW = 4
"""Claims of one push on one connection that are not answered yet."""
_GONE = Trouble(PeerGone, "the connection broke")


class _Line:
    """One connection. ``lane`` knows how its path puts a transfer into a frame; its thread is never started."""

    def __init__(self, lane: StreamLane, epoch: int) -> None:
        self.lane, self.epoch = lane, epoch
        self.connection: Connection = lane.dial()
        self.waiting: deque[Transfer] = deque()
        self._sent = 0

    def send(self, transfer: Transfer) -> None:
        """Blocks until the kernel has it. Raises what the lane raises."""
        self.connection.set_patience(transfer.deadline_s)
        transfer.id, self._sent = self._sent, self._sent + 1
        self.waiting.append(transfer)
        self.lane.send(self.connection, transfer)

    def hear(self, deadline_s: float) -> None:
        """Ends the oldest transfer by its answer; answers come in the order of their questions."""
        self.connection.set_patience(deadline_s)
        body, transfer = self.connection.receive(), self.waiting[0]
        if not isinstance(body, Ack) or body.id != transfer.id:
            raise FrameError(f"{body} is no answer to transfer {transfer.id}")
        outcome = outcome_of(body, transfer, proven=self.lane.checksums)
        self.waiting.popleft()
        self.lane.ended(transfer)
        transfer.finish(outcome)

    def close(self) -> None:
        self.connection.close()
        self.lane.release()


_Key = tuple[WorkerId, Incarnation, str]
"""Peer, its incarnation, address."""


class Lines:
    """The pool. Thread-safe."""

    def __init__(self, lanes: Mapping[str, MakeLane], sender: Sender) -> None:
        self._lanes, self._sender = lanes, sender
        self._lock = threading.Lock()
        self._idle: dict[_Key, list[_Line]] = {}
        self._epoch = 0

    def send(self, peer: Endpoint, choice: Choice, batches: Sequence[Batch], grant: Grant, *, deadline_s: float,
             note: bytes | None, lanes: int) -> list[Outcome]:
        """What became of each batch by ``deadline_s`` (on the host's clock); ``note`` goes with the last one."""
        outcomes: list[Outcome] = [()] * len(batches)
        transfers = [Transfer(batch, grant, deadline_s, note if batch is batches[-1] else None,
                              partial(outcomes.__setitem__, i)) for i, batch in enumerate(batches)]
        key = (peer.worker, peer.incarnation, choice.address)
        lines = self._take(key, min(lanes, len(batches)))
        try:
            self._dial(lines, peer, choice, min(lanes, len(batches)), deadline_s)
            trouble = self._exchange(lines, transfers)
        finally:
            self._give_back(key, lines)
        return [outcome or [trouble] * max(1, len(batch.pieces))
                for outcome, batch in zip(outcomes, batches, strict=True)]

    def drop(self) -> None:
        """Closes every connection; one that is in use once its push has ended."""
        with self._lock:
            self._epoch += 1
            idle, self._idle = self._idle, {}
        for lines in idle.values():
            for line in lines:
                line.close()

    def _exchange(self, lines: Sequence[_Line], transfers: Sequence[Transfer]) -> Trouble:
        """Sends and hears; the trouble of those that got no answer. A line that broke has some that wait."""
        if not lines:
            return _GONE
        try:
            for i, transfer in enumerate(transfers):
                line = lines[i % len(lines)]
                if len(line.waiting) >= WINDOW:
                    line.hear(transfer.deadline_s)
                line.send(transfer)
            for line in lines:
                while line.waiting:
                    line.hear(line.waiting[0].deadline_s)
        except DIAL_ERRORS as error:
            if isinstance(error, BlockingIOError):  # its patience ended
                return LATE
        return _GONE

    def _take(self, key: _Key, count: int) -> list[_Line]:
        """Up to ``count`` connections that stand idle."""
        with self._lock:
            idle = self._idle.get(key)
            if not idle:
                return []
            lines = idle[:count]
            del idle[:count]
            return lines

    def _dial(self, lines: list[_Line], peer: Endpoint, choice: Choice, count: int, deadline_s: float) -> None:
        """Brings ``lines`` to ``count``, as far as the peer can be reached by ``deadline_s``."""
        if len(lines) == count:
            return
        try:
            while len(lines) < count:
                left_s = min(self._sender.connect_timeout_s, deadline_s - host_clock_s())
                lane = self._lanes[choice.path](replace(self._sender, connect_timeout_s=left_s), peer, choice.address)
                assert isinstance(lane, StreamLane)
                lines.append(_Line(lane, self._epoch))
        except DIAL_ERRORS:
            return
        closing: list[_Line] = []
        with self._lock:
            for key, idle in list(self._idle.items()):
                # It answers, so what leads to its former lives leads nowhere; other peers may have gone for good.
                former = key[0] == peer.worker and key[1] != peer.incarnation
                gone = [line for line in idle if former or line.connection.hung_up()]
                closing += gone
                self._idle[key] = [line for line in idle if line not in gone]
                if not self._idle[key]:
                    del self._idle[key]
        for line in closing:
            line.close()

    def _give_back(self, key: _Key, lines: Sequence[_Line]) -> None:
        closing = []
        with self._lock:
            for line in lines:
                if line.waiting or line.epoch != self._epoch:
                    closing.append(line)
                else:
                    self._idle.setdefault(key, []).append(line)
        for line in closing:
            line.close()
