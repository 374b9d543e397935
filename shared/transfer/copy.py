"""Same process: one copy, under the same claims and checks as any other path."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from shared.ids import OperationId
from shared.messages import Endpoint
from shared.transfer.addresses import host_clock_s
from shared.transfer.frames import Claim
from shared.transfer.lane import INLINE_BYTES, LATE, Pending, Sender, Transfer, call_on
from shared.transfer.ledger import Refused, checksum
from shared.transfer.plan import needs_checksums
from shared.transfer.receiver import Receiver
from shared.transfer.types import ChecksumMismatch, GrantRefused, Notification, Outcome, PeerGone, Trouble

_log = logging.getLogger(__name__)

PATH = "copy"

_receivers: dict[str, Receiver] = {}
"""{address: receiver of an engine in this process}"""


def local_address(endpoint: Endpoint) -> str:
    """How an engine of this process is found."""
    return f"{endpoint.worker}/{endpoint.incarnation}"


def register_local(endpoint: Endpoint, receiver: Receiver) -> None:
    """Other engines of this process may copy into its segments from now on."""
    _receivers[local_address(endpoint)] = receiver


def unregister_local(endpoint: Endpoint) -> None:
    """The opposite."""
    _receivers.pop(local_address(endpoint), None)


def is_local(endpoint: Endpoint) -> bool:
    """Is it an engine of this process?"""
    return local_address(endpoint) in _receivers


class CopyLane:
    """Copies what takes no time at once, the rest in a thread: the event loop must not wait for memory."""

    def __init__(self, sender: Sender, peer: Endpoint, address: str) -> None:
        self._sender = sender
        self._address = address
        self._pending = Pending(sender.clock)
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"{sender.name}-copy", daemon=True)

    @property
    def failed(self) -> Trouble | None:
        return self._pending.trouble

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, opened: Callable[[Trouble | None], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        opened(None)

    def submit(self, transfer: Transfer) -> None:
        if not self._pending.add(transfer):
            return
        transfer.begun = True
        if transfer.batch.nbytes <= INLINE_BYTES and not self._sender.is_staged(transfer.batch):
            self._end(transfer, self._copied(transfer))
        else:
            self._queue.put(transfer)

    def give_up(self, transfer: Transfer) -> None:
        """Its bytes may still be copied, and are not believed then: see the look at ``ended``."""
        self._pending.end(transfer, [LATE] * transfer.count)

    def silence_s(self) -> float:
        return self._pending.silence_s()

    def fail(self, trouble: Trouble) -> None:
        if self._pending.close(trouble):
            self._queue.put(None)

    def forget(self, serial: int) -> None:
        """Nobody else sees the segment."""

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _end(self, transfer: Transfer, outcome: Outcome) -> None:
        self._pending.heard()
        self._pending.end(transfer, outcome)

    def _work(self) -> None:
        while (transfer := self._queue.get()) is not None:
            if not transfer.ended:
                call_on(self._loop, self._end, transfer, self._copied(transfer))

    def _copied(self, transfer: Transfer) -> Outcome:
        count = transfer.count
        try:
            return self._copy(transfer, count)
        except Refused as refused:
            late = host_clock_s() >= transfer.deadline_s
            return [LATE if late else Trouble(GrantRefused, str(refused))] * count
        except Exception as error:
            _log.exception("action=copy_failed address=%s", self._address)
            return [Trouble(PeerGone, f"the copy failed: {error!r}")] * count

    def _copy(self, transfer: Transfer, count: int) -> list[Trouble | None]:
        pieces, grant, sender = transfer.batch.pieces, transfer.grant, self._sender
        receiver = _receivers.get(self._address)
        if receiver is None:
            trouble = Trouble(PeerGone, "its engine was closed")
            call_on(self._loop, self.fail, trouble)
            return [trouble] * count
        if transfer.note is not None and not receiver.can_notify():
            raise Refused("nobody takes the notifications that are here already")
        ledger = receiver.ledger
        claim = Claim(0, grant.operation, grant.incarnation, grant.token, sender.timeout_ms(transfer),
                      [piece.remote for piece in pieces], transfer.note, [])
        writer = ledger.begin(claim, path=PATH, sender=sender.worker, condemn=_ends_soon)
        try:
            for i, piece in enumerate(pieces):
                source, span = sender.segments[piece.segment], piece.remote
                target = ledger.segment_of(span)
                if source.gpu is not None and i not in transfer.corrupt:
                    target.fetch(span.offset, source.gpu.part(piece.offset, span.length))()
                    continue
                data = source.read(piece.offset, span.length)
                if i in transfer.corrupt:
                    data = data.copy()
                    data[0] ^= 0xFF
                target.write(span.offset, data)
            if transfer.ended or host_clock_s() > transfer.deadline_s:
                raise Refused("copied after its push had ended")
            host = sender.host
            proofs = [checksum(sender.source(piece)) for piece in pieces] if (
                needs_checksums(sender.checksums, PATH, host, host)) else []
        except BaseException:
            ledger.fail(writer)
            raise
        bad = ledger.verify(writer, proofs)
        if transfer.note is not None and not bad:
            receiver.notify(Notification(OperationId(grant.operation), sender.worker, transfer.note))
        mismatch = Trouble(ChecksumMismatch, "the receiver read other bytes than were sent")
        return [mismatch if i in bad else None for i in range(count)]


def _ends_soon(why: str) -> None:
    """A copy within a process cannot be stopped; it ends by itself."""
