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
from shared.transfer.frames import MAX_TIMEOUT_MS, Ack, Body, Form, FrameError, good_ack
from shared.transfer.lane import DIAL_ERRORS, LATE, Sender, StreamLane, Transfer, outcome_of
from shared.transfer.plan import Batch, Choice
from shared.transfer.router import MakeLane
from shared.transfer.types import Outcome, PeerGone, Slice, Trouble
from shared.transfer.wire import Connection

WINDOW = 4
"""Claims of one push on one connection that are not answered yet."""
_GONE = Trouble(PeerGone, "the connection broke")
DONE: Outcome = (None,)
_BROKEN: Outcome = (_GONE,)
_TOO_LATE: Outcome = (LATE,)
"""Of a batch of one piece."""


class _Line:
    """One connection. ``lane`` knows how its path puts a transfer into a frame; it is never started."""

    def __init__(self, lane: StreamLane, sender: Sender, epoch: int) -> None:
        self.lane, self.epoch = lane, epoch
        self.connection: Connection = lane.dial()
        self.connection.hasten(sender.native)
        self.waiting: deque[Transfer] = deque()
        self.engaged = False
        """Is an exchange going on, or did one break?"""
        self._segments = sender.segments
        self._sent = 0
        self._form: Form | None = None
        self._formed: tuple[Grant, str, int] | None = None
        """What ``_form`` is for: grant, the peer's segment, serial of ours."""

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
        outcome = outcome_of(_answer(body, transfer.id), count=transfer.count, deadline_s=transfer.deadline_s,
                             proven=self.lane.checksums)
        self.waiting.popleft()
        self.lane.ended(transfer)
        transfer.finish(outcome)

    def exchange(self, item: Slice, grant: Grant, deadline_s: float) -> Outcome | None:
        """What became of a plain slice that is one piece; ``None``, with nothing done, if it takes more than that.

        Nothing else is on its way. Raises what :meth:`send` and :meth:`hear` raise.
        """
        segment, remote = self._segments[item.segment], item.remote
        formed = self._formed
        if formed is None or formed[0] is not grant or formed[1] != remote.segment or formed[2] != segment.serial:
            self._form = self.lane.form(grant, remote.segment, segment)
            self._formed = grant, remote.segment, segment.serial
        form = self._form
        if form is None:
            self._formed = None  # the next push may attach the segment
            return None
        self.engaged = True
        left_s = self.connection.set_patience(deadline_s)
        number, self._sent = self._sent, self._sent + 1
        timeout_ms = max(1, min(MAX_TIMEOUT_MS, int(left_s * 1e3)))
        if form.fetched:
            frame, sent = form.copy(number, timeout_ms, remote.offset, remote.length, item.offset, deadline_s), 0
        else:
            frame, sent = form.write(number, timeout_ms, remote.offset, remote.length), remote.length
        body = self.connection.exchange(frame, segment.buffer, item.offset, sent, good_ack(number))
        outcome = DONE if body is None else outcome_of(_answer(body, number), count=1, deadline_s=deadline_s,
                                                       proven=False)
        self.engaged = False
        return outcome

    def close(self) -> None:
        self.connection.close()
        self.lane.release()


def _answer(body: Body, transfer_id: int) -> Ack:
    """``body``, which must be the answer to that transfer; raises :class:`FrameError`."""
    if not isinstance(body, Ack) or body.id != transfer_id:
        raise FrameError(f"{body} is no answer to transfer {transfer_id}")
    return body


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

    def send_one(self, peer: Endpoint, choice: Choice, item: Slice, grant: Grant, deadline_s: float) -> Outcome | None:
        """Like :meth:`send`, for a plain slice that is one piece; ``None``, with nothing sent, if it takes more."""
        key = (peer.worker, peer.incarnation, choice.address)
        with self._lock:
            idle = self._idle.get(key)
            if not idle:
                return None
            line = idle.pop()
        try:
            return line.exchange(item, grant, deadline_s)
        except BlockingIOError:  # its patience ended
            return _TOO_LATE
        except DIAL_ERRORS:
            return _BROKEN
        finally:
            with self._lock:
                usable = not line.engaged and line.epoch == self._epoch
                if usable:
                    self._idle.setdefault(key, []).append(line)
            if not usable:
                line.close()

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
                if left_s <= 0:
                    return
                lane = self._lanes[choice.path](replace(self._sender, connect_timeout_s=left_s), peer, choice.address)
                assert isinstance(lane, StreamLane)
                lines.append(_Line(lane, self._sender, self._epoch))
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
