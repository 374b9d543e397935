"""Puts a store together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from services.store.settings import Settings
from services.store.shell import StoreShell
from shared.bus.nats import NatsBus
from shared.clock import SystemClock
from shared.ids import WorkerId
from shared.lifecycle import Lifecycle, run
from shared.settings import load
from shared.store.ssd.slots import claimed
from shared.worker.runtime import check, named


def main(overrides: Mapping[str, Any]) -> int:
    """Runs a store until it is told to stop; the exit code."""
    settings = named(load(Settings, "store", overrides=overrides), "store")
    check(settings)
    settings.opaque_specs()

    async def body(lifecycle: Lifecycle) -> None:
        async with NatsBus.connect(settings.nats_url, name=settings.worker_id,
                                   credentials=settings.nats_credentials, wait_s=settings.nats_wait_s) as bus:
            shell = StoreShell(settings, bus, SystemClock())
            async with shell.open() as failed:
                lifecycle.ready(worker=settings.worker_id)
                stopping = asyncio.create_task(lifecycle.stopping.wait(), name="until-stopped")
                either: set[asyncio.Future[Any]] = {stopping, failed}
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stopping.cancel()
                if failed.done():
                    failed.result()
                await shell.save()

    with claimed(settings.ssd.worker_directory(WorkerId(settings.worker_id))) if settings.ssd.dir else nullcontext():
        return run("store", settings.worker_id, settings, body)
