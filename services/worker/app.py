"""The composition root of workers that compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from services.decode.settings import Settings as DecodeSettings
from services.decode.shell import DecodeShell
from services.prefill.settings import Settings as PrefillSettings
from services.prefill.shell import PrefillShell
from shared.messages import Role
from shared.settings import load
from shared.worker.jobs import Shell
from shared.worker.runtime import Worker, run_worker
from shared.worker.settings import WorkerSettings

S = TypeVar("S", bound=WorkerSettings)


def main(home: Role, overrides: Mapping[str, Any]) -> int:
    """Runs a worker of role ``home`` until it is told to stop; the exit code."""
    settings: PrefillSettings | DecodeSettings
    if home == "prefill":
        settings = load(PrefillSettings, "prefill", overrides=overrides)
    else:
        settings = load(DecodeSettings, "decode", overrides=overrides)
    prefill, decode = both(settings)
    max_running = decode.max_running if decode is not None else prefill.max_queued if prefill is not None else 0
    return run_worker(settings, home, lambda worker: shells(worker, prefill, decode), max_running=max_running)


def both(settings: PrefillSettings | DecodeSettings) -> tuple[PrefillSettings | None, DecodeSettings | None]:
    """A worker's settings in either role, ``None`` for one that it does not take: what only the other one than its home
    has is taken from there, in that one's own name."""
    if isinstance(settings, PrefillSettings):
        return settings, _as(settings, DecodeSettings, "decode") if settings.elastic else None
    return _as(settings, PrefillSettings, "prefill") if settings.elastic else None, settings


def _as(settings: WorkerSettings, kind: type[S], service: str) -> S:
    common = {name: getattr(settings, name) for name in WorkerSettings.__struct_fields__}
    return msgspec.structs.replace(load(kind, service), **common)


def shells(worker: Worker, prefill: PrefillSettings | None, decode: DecodeSettings | None) -> list[Shell]:
    """What serves the worker's jobs, that of its home role first."""
    made: list[Shell] = []
    if prefill is not None:
        made.append(PrefillShell(worker, prefill))
    if decode is not None:
        made.append(DecodeShell(worker, decode))
    return sorted(made, key=lambda shell: shell.role != worker.role)
