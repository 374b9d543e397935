"""Puts a decode worker together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.decode.settings import Settings
from services.decode.shell import DecodeShell
from shared.settings import load
from shared.worker.runtime import run_worker


def main(overrides: Mapping[str, Any]) -> int:
    """Runs a decode worker until it is told to stop; the exit code."""
    settings = load(Settings, "decode", overrides=overrides)
    return run_worker(
        settings, "decode", lambda worker: DecodeShell(worker, settings), max_running=settings.max_running)
