"""Settings of a decode worker."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.worker.settings import WorkerSettings


class Settings(WorkerSettings, frozen=True, kw_only=True):
    """What a decode worker takes beyond any worker's settings."""

    max_running: Annotated[int, Meta(description="Most requests of one decode step.", ge=1)] = 16
    max_reserved: Annotated[int, Meta(description="Requests it holds at most, reserved and running; more are refused.", ge=1)] = 64
