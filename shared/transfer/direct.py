"""Pushes without an event loop: the calling thread sends the claims and waits for the answers itself.

Nothing is handed to another thread on the way, so this is what takes the least time. Connections are pooled and
belong to one push at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from shared.messages import Endpoint, Grant
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
        outcome = outcome_of(body, transfer)
        self.waiting.popleft()
        self.lane.ended(transfer)
        transfer.finish(outcome)

    def close(self) -> None:
        self.connection.close()
        self.lane.release()


class Lines:
    """The pool. Thread-safe."""

    def __init__(self, lanes: Mapping[str, MakeLane], sender: Sender) -> None:
        self._lanes, self._sender = lanes, sender
        self._lock = threading.Lock()
        self._idle: dict[tuple[Endpoint, str, str], list[_Line]] = {}
        self._epoch = 0

    def send(self, peer: Endpoint, choice: Choice, batches: Sequence[Batch], grant: Grant, *, deadline_s: float,
             note: bytes | None, lanes: int) -> list[Outcome]:
        """What became of each batch by ``deadline_s`` (on the host's clock); ``note`` goes with the last one."""
        outcomes: list[Outcome | None] = [None] * len(batches)

        def transfer(index: int) -> Transfer:
            def finish(outcome: Outcome) -> None:
                outcomes[index] = outcome
            return Transfer(batches[index], grant, deadline_s, note if index == len(batches) - 1 else None, finish)

        with self._taken(peer, choice, min(lanes, len(batches))) as lines:
            trouble = self._exchange(lines, [transfer(i) for i in range(len(batches))])
        return [outcome if outcome is not None else [trouble] * max(1, len(batch.pieces))
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

    @contextmanager
    def _taken(self, peer: Endpoint, choice: Choice, count: int) -> Iterator[list[_Line]]:
        """Up to ``count`` connections, or none when the peer cannot be reached."""
        key = (peer, choice.path, choice.address)
        with self._lock:
            idle = self._idle.get(key, [])
            lines, idle[:] = idle[:count], idle[count:]
            epoch = self._epoch
        try:
            while len(lines) < count:
                lane = self._lanes[choice.path](self._sender, peer, choice.address)
                assert isinstance(lane, StreamLane)
                lines.append(_Line(lane, epoch))
        except DIAL_ERRORS:
            pass
        try:
            yield lines
        finally:
            self._give_back(key, lines)

    def _give_back(self, key: tuple[Endpoint, str, str], lines: Sequence[_Line]) -> None:
        peer = key[0]
        with self._lock:
            closing = [line for line in lines if line.waiting or line.epoch != self._epoch]
            self._idle.setdefault(key, []).extend(line for line in lines if line not in closing)
            if len(lines) > len(closing):  # it answers, so what leads to its former lives leads nowhere
                for former in [other for other in self._idle if other[0].worker == peer.worker and other[0] != peer]:
                    closing += self._idle.pop(former)
        for line in closing:
            line.close()
