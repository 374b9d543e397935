"""Same process: one copy, under the same claims and checks as any other path."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from shared.messages import Endpoint
from shared.transfer.frames import Claim
from shared.transfer.lane import Pending, Sender, Transfer, Trouble
from shared.transfer.ledger import Ledger, Refused
from shared.transfer.plan import plan_runs
from shared.transfer.tcp import timeout_ms
from shared.transfer.types import ChecksumMismatch, GrantRefused, PeerGone

_log = logging.getLogger(__name__)

PATH = "copy"

_ledgers: dict[str, Ledger] = {}
"""{address: books of an engine in this process}"""


def local_address(endpoint: Endpoint) -> str:
    """How an engine of this process is found."""
    return f"{endpoint.worker}/{endpoint.incarnation}"


def register_local(endpoint: Endpoint, ledger: Ledger) -> None:
    """Other engines of this process may copy into its segments from now on."""
    _ledgers[local_address(endpoint)] = ledger


def unregister_local(endpoint: Endpoint) -> None:
    """The opposite."""
    _ledgers.pop(local_address(endpoint), None)


def is_local(endpoint: Endpoint) -> bool:
    """Is it an engine of this process?"""
    return local_address(endpoint) in _ledgers


class CopyLane:
    """A thread that copies: the event loop must not wait for memory."""

    def __init__(self, sender: Sender, peer: Endpoint, address: str) -> None:
        self._sender = sender
        self._address = address
        self._pending = Pending(sender.clock)
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{sender.name}-copy", daemon=True)

    @property
    def failed(self) -> Trouble | None:
        return self._pending.trouble

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, opened: Callable[[Trouble | None], None]) -> None:
        self._thread.start()
        opened(None)

    def submit(self, transfer: Transfer) -> None:
        if self._pending.add(transfer):
            self._queue.put(transfer)

    def silence_s(self) -> float:
        return self._pending.silence_s()

    def fail(self, trouble: Trouble) -> None:
        if self._pending.close(trouble):
            self._queue.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            if not self._pending.holds(transfer):
                continue
            try:
                outcome = self._copy(transfer)
            except Exception as error:
                _log.exception("action=copy_failed address=%s", self._address)
                outcome = [Trouble(PeerGone, f"the copy failed: {error!r}")] * len(transfer.batch.pieces)
            self._pending.heard()
            if self._pending.pop(transfer):
                transfer.finish(outcome)

    def _copy(self, transfer: Transfer) -> list[Trouble | None]:
        pieces, grant = transfer.batch.pieces, transfer.grant
        ledger = _ledgers.get(self._address)
        if ledger is None:
            self.fail(Trouble(PeerGone, "its engine was closed"))
            return [Trouble(PeerGone, "its engine was closed")] * len(pieces)
        claim = Claim(0, grant.operation, grant.incarnation, grant.token, timeout_ms(transfer.timeout_s),
                      [piece.remote for piece in pieces])
        try:
            writer = ledger.begin(claim, path=PATH, condemn=_ends_soon)
        except Refused as refused:
            return [Trouble(GrantRefused, str(refused))] * len(pieces)
        try:
            for run in plan_runs(pieces):
                source = self._sender.segments[run.segment].array[run.offset:run.offset + run.length]
                ledger.array(run.remote_segment)[run.remote_offset:run.remote_offset + run.length] = source
            for i in transfer.corrupt:
                ledger.array(pieces[i].remote.segment)[pieces[i].remote.offset] ^= 0xFF
            checksums = [value for piece in pieces for value in self._sender.checksum(piece)]
        except BaseException:
            ledger.fail(writer)
            raise
        outcome: list[Trouble | None] = [None] * len(pieces)
        for i in ledger.verify(writer, checksums):
            outcome[i] = Trouble(ChecksumMismatch, "the receiver read other bytes than were sent")
        return outcome


def _ends_soon(why: str) -> None:
    """A copy within a process cannot be stopped; it ends by itself."""
