"""Sends a request's KV to its decode worker while it is being computed.

What becomes ready while a push is under way leaves with the next one: the pace of the network sets the batch size,
and no slice waits for the whole prompt.
"""

from __future__ import annotations

import asyncio
import time

from shared.messages import Endpoint, Grant
from shared.transfer import Slice, TransferEngine
from shared.transfer.types import ChecksumMismatch, TransferError

_ATTEMPTS = 3
"""Sends of a slice whose checksum failed: the source is intact, so sending it again is right."""


class Pusher:
    """One per job. ``add`` from the event loop; ``finish`` waits until everything is acknowledged."""

    def __init__(self, transfer: TransferEngine, peer: Endpoint, grant: Grant) -> None:
        self._transfer, self._peer, self._grant = transfer, peer, grant
        self._ready: list[Slice] = []
        self._wake = asyncio.Event()
        self._finishing = False
        self.nbytes = 0
        """Bytes acknowledged so far."""
        self.pushes = 0
        self.paths: set[str] = set()
        self.started_s = 0.0
        """Unix seconds of the first push; 0 before it."""

    @property
    def path(self) -> str:
        """The transports that carried it, joined by ``+``."""
        return "+".join(sorted(self.paths))

    def add(self, slices: list[Slice]) -> None:
        """These slices hold their final bytes now."""
        self._ready.extend(slices)
        self._wake.set()

    def finish(self) -> None:
        """Nothing more will be added."""
        self._finishing = True
        self._wake.set()

    async def run(self) -> None:
        """Sends until finished; raises :class:`TransferError` when something could not be delivered."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._ready:
                batch, self._ready = self._ready, []
                await self._send(batch)
            if self._finishing:
                return

    async def _send(self, batch: list[Slice]) -> None:
        self.started_s = self.started_s or time.time()
        error: TransferError | None = None
        for _ in range(_ATTEMPTS):
            result = await self._transfer.push(self._peer, batch, self._grant)
            self.nbytes += result.nbytes
            self.pushes += 1
            if result.path:
                self.paths.add(result.path)
            failed = [status for status in result.slices if status.error is not None]
            if not failed:
                return
            error = next((s.error for s in failed if not isinstance(s.error, ChecksumMismatch)), failed[0].error)
            if not isinstance(error, ChecksumMismatch):
                break
            batch = [status.slice for status in failed]
        assert error is not None
        raise error
