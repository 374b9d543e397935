"""Who leads when the bus that everybody agrees over stands still, or forgets."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.launcher.embedded import nats_server
from services.store_manager.core.events import Led, Unled
from services.store_manager.leadership import Leadership
from shared.bus.nats import NatsBus
from shared.clock import SystemClock
from tests.support.eventually import eventually

LEASE_S = 0.5


class Candidate:
    """One who would lead, and what it was told last."""

    def __init__(self, bus: NatsBus, name: str) -> None:
        self.term = 0
        """Of the lease it holds; 0 for none."""
        self.terms: list[int] = []
        self._leadership = Leadership(bus, SystemClock(), name, LEASE_S, (self._told,))

    def _told(self, event: Led | Unled) -> None:
        self.term = event.term if isinstance(event, Led) else 0
        if self.term and self.term not in self.terms:
            self.terms.append(self.term)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Candidate]:
        running = asyncio.create_task(self._leadership.run())
        try:
            yield self
        finally:
            running.cancel()
            await asyncio.wait({running})


async def test_nobody_leads_while_the_bus_stands_still_and_one_does_afterwards(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.nats.PING_S", 0.2)
    async with (
        nats_server(tmp_path / "nats") as server,
        NatsBus.connect(server.url, name="a") as bus_of_a,
        NatsBus.connect(server.url, name="b") as bus_of_b,
        Candidate(bus_of_a, "a").open() as a,
        Candidate(bus_of_b, "b").open() as b,
    ):
        await eventually(lambda: (a.term > 0) != (b.term > 0))
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: a.term == b.term == 0, "whoever led stops by its own clock")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await eventually(lambda: (a.term > 0) != (b.term > 0), "one leads", timeout_s=20.0)
        assert not set(a.terms) & set(b.terms), "no term has two leaders"
