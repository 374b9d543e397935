"""Taking part in the choice of a leader: the lease's hands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from services.store_manager.core.events import Led, Unled
from services.store_manager.core.lease import Claim, Lease, LeaseRecord
from shared.bus.bus import Bus
from shared.clock import Clock
from shared.errors import BusError
from shared.telemetry import metrics

RECORD = "store-lease"
ROUNDS = 5
"""Looks at the record in the time of one lease."""

_log = logging.getLogger(__name__)


class Leadership:
    """Keeps the lease or waits for it; tells ``listeners`` with each renewal, and when it is lost."""

    def __init__(self, bus: Bus, clock: Clock, name: str, lease_s: float,
                 listeners: tuple[Callable[[Led | Unled], object], ...]) -> None:
        self._bus, self._clock, self._listeners = bus, clock, listeners
        self._lease = Lease(name, lease_s)
        self._pause_s = lease_s / ROUNDS
        self._led = False

    @property
    def leader(self) -> str:
        """Who leads, as far as we know; empty for nobody."""
        return self._lease.holder

    async def run(self) -> None:
        """Takes part until cancelled."""
        while True:
            await self._round()
            await asyncio.sleep(self._pause_s)

    async def give_back(self) -> None:
        """Lets the next one lead at once; for an orderly stop, after :meth:`run` has ended."""
        claim = self._lease.give_back(self._clock.monotonic())
        self._tell()
        if claim is not None:
            try:
                await self._write(claim)
            except BusError as error:  # it runs out by itself
                _log.debug("lease_not_given_back", extra={"fields": {"why": error}})

    async def _round(self) -> None:
        try:
            record = await self._bus.record_read(RECORD, timeout_s=self._pause_s)
            claim = self._lease.seen(_decoded(record.value) if record else None, record.revision if record else 0,
                                     now=self._clock.monotonic())
            if claim is not None:
                began_s = self._clock.monotonic()
                revision = await self._write(claim)
                if revision is None:
                    self._lease.lost()
                else:
                    self._lease.claimed(claim, revision, now=began_s)
        except BusError as error:  # what we hold goes on until it runs out
            _log.debug("lease_round_failed", extra={"fields": {"why": error}})
        self._tell()

    async def _write(self, claim: Claim) -> int | None:
        return await self._bus.record_write(RECORD, msgspec.msgpack.encode(claim.record), revision=claim.revision,
                                            timeout_s=self._pause_s)

    def _tell(self) -> None:
        now = self._clock.monotonic()
        leads = self._lease.leads(now)
        metrics.STORE_LEASE_SECONDS.set(self._lease.until_s - now if leads else 0.0)
        if leads != self._led:
            self._led = leads
            _log.info("leads" if leads else "follows", extra={"fields": {
                "term": self._lease.term, "leader": self._lease.holder or "nobody"}})
        for listener in self._listeners:
            listener(Led(self._lease.term, self._lease.until_s) if leads else Unled())


def _decoded(value: bytes) -> LeaseRecord:
    """What stands there; what cannot be read belongs to a stranger whose lease runs out like any other."""
    try:
        return msgspec.msgpack.decode(value, type=LeaseRecord)
    except msgspec.DecodeError:
        return LeaseRecord("a stranger", 0)
