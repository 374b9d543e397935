"""How a command finds a stack that runs on this machine: what its launcher wrote down in the data directory.

The launcher writes the file (:mod:`services.launcher.state`); it is believed only while the launcher lives, which the
lock beside it tells.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from filelock import FileLock, Timeout
from msgspec import Meta

from shared.settings import CommonSettings


class StackSettings(CommonSettings, frozen=True):
    """What the launcher takes, and every command that looks for the stack it runs."""

    data_dir: Annotated[
        str, Meta(description="Directory of the embedded stack: its servers' data, logs, spans. "
                              "MOONBUS_DATA_DIR also tells the other commands.")
    ] = ".moonbus"

    def data_path(self) -> Path:
        """Directory of what the stack keeps on disk, made absolute."""
        return Path(self.data_dir).expanduser().absolute()


class UnitState(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the stack."""

    name: str
    service: str
    state: str
    pid: int
    admin: str = ""
    """``host:port`` of its admin HTTP server."""
    log: str = ""


class StackState(msgspec.Struct, frozen=True, kw_only=True):
    """What ``stack.json`` says."""

    pid: int
    """The launcher's."""
    started_at_s: float
    """Unix seconds."""
    ready: bool
    gateway_url: str
    nats_url: str
    postgres_url: str
    model: str
    trace_file: str
    units: list[UnitState]

    def unit(self, name: str) -> UnitState | None:
        """The unit of that name."""
        return next((unit for unit in self.units if unit.name == name), None)


def state_path(data_dir: Path) -> Path:
    """Where a stack in ``data_dir`` says what it is."""
    return data_dir / "stack.json"


def lock_path(data_dir: Path) -> Path:
    """The lock that the launcher holds which owns ``data_dir``."""
    return data_dir / "stack.lock"


def find_stack(data_dir: Path) -> StackState | None:
    """The stack that runs in ``data_dir``; ``None`` when none does, even if a file of a dead one is left."""
    try:
        raw = state_path(data_dir).read_bytes()
    except OSError:
        return None
    if not is_locked(data_dir):
        return None
    try:
        return msgspec.json.decode(raw, type=StackState)
    except msgspec.DecodeError:
        return None


def is_locked(data_dir: Path) -> bool:
    """Whether a launcher lives that owns ``data_dir``: the kernel drops the lock with its process."""
    path = lock_path(data_dir)
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True
