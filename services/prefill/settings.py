"""Settings of a prefill worker."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.settings import SECONDS
from shared.worker.settings import WorkerSettings


class Settings(WorkerSettings, frozen=True, kw_only=True):
    """What a prefill worker takes beyond any worker's settings."""

    max_queued: Annotated[int, Meta(description="Jobs it holds at most, queued and running; more are refused.", ge=1)] = 256
    fetch_timeout_s: Annotated[float, Meta(description="Longest wait for owners to push prefix blocks, beside what the bytes take at transfer_min_bytes_per_s; then the rest is computed.", gt=0, extra=SECONDS)] = 5.0
