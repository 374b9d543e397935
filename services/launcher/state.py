"""The file by which other commands find a running stack; the lock by which a data directory has one owner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from shared.errors import UserError


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


def write(data_dir: Path, state: StackState) -> None:
    """Replaces the file at once; only its owner may read it, since a database URL can carry a password."""
    path = state_path(data_dir)
    partial = path.with_suffix(".part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state)))
    partial.replace(path)


def read(data_dir: Path) -> StackState | None:
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
    path = _lock_path(data_dir)
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True


@contextlib.contextmanager
def owning(data_dir: Path) -> Iterator[None]:
    """Holds ``data_dir``, without a dead stack's file; :class:`UserError` when another process has it."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(_lock_path(data_dir))
        lock.acquire(timeout=0)
    except Timeout:
        other = read(data_dir)
        who = f" (pid {other.pid}, {other.gateway_url})" if other else ""
        raise UserError(
            f"another stack runs in {data_dir}{who}; stop it or choose another --data-dir") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(
            f"data directory {data_dir} cannot be used: {why}; choose another --data-dir") from error
    try:
        state_path(data_dir).unlink(missing_ok=True)
        yield
    finally:
        state_path(data_dir).unlink(missing_ok=True)
        lock.release()


def _lock_path(data_dir: Path) -> Path:
    return data_dir / "stack.lock"


