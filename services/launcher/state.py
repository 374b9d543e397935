"""Writing down that a stack runs, and owning its data directory. What can be read there: :mod:`shared.stack_state`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from shared.errors import UserError
from shared.stack_state import StackState, find_stack, lock_path, state_path


def write(data_dir: Path, state: StackState) -> None:
    """Replaces the file at once; only its owner may read it, since a database URL can carry a password."""
    path = state_path(data_dir)
    partial = path.with_suffix(".part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state)))
    partial.replace(path)


@contextlib.contextmanager
def owning(data_dir: Path) -> Iterator[None]:
    """Holds ``data_dir``, without a dead stack's file; :class:`UserError` when another process has it."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_path(data_dir))
        lock.acquire(timeout=0)
    except Timeout:
        other = find_stack(data_dir)
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
