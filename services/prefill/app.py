"""Puts a prefill worker together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from services.prefill.settings import Settings
from services.prefill.shell import PrefillShell
from shared.ids import fresh
from shared.lifecycle import Lifecycle, run
from shared.settings import load
from shared.worker.runtime import open_worker, until_stopped


def main(overrides: Mapping[str, Any]) -> int:
    """Runs a prefill worker until it is told to stop; the exit code."""
    settings = load(Settings, "prefill", overrides=overrides)
    settings = msgspec.structs.replace(settings, worker_id=settings.worker_id or fresh("prefill", 4))

    async def body(lifecycle: Lifecycle) -> None:
        async with open_worker(settings, "prefill") as worker:
            shell = PrefillShell(worker, settings)
            async with shell.open(), worker.presence(shell.load, max_running=settings.max_queued).open() as presence:
                lifecycle.ready(worker=worker.id, model=worker.model.name)
                await until_stopped(lifecycle, presence)
                await asyncio.gather(shell.drain(), presence.changed())

    return run("prefill", settings.worker_id, settings, body)
