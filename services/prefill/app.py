"""Puts a prefill worker together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.prefill.settings import Settings
from services.prefill.shell import PrefillShell
from shared.settings import load
from shared.worker.runtime import run_worker


def main(overrides: Mapping[str, Any]) -> int:
    """Runs a prefill worker until it is told to stop; the exit code."""
    settings = load(Settings, "prefill", overrides=overrides)
    return run_worker(
        settings, "prefill", lambda worker: PrefillShell(worker, settings), max_running=settings.max_queued)
