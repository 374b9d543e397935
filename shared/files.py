"""Writing a file that a person named."""

from __future__ import annotations

import os
from pathlib import Path

from shared.errors import UserError


def write_file(path: Path, content: bytes) -> None:
    """``path`` has ``content``; a regular file, or one that is not there yet, appears whole or stays as it was.

    A link stays a link. What is no regular file (a device, a pipe) is written to and stays what it is, and so is a
    file in a folder where nothing may be added. Raises :class:`UserError` when it cannot be written.
    """
    try:
        target = path.resolve()
        if not target.exists() or (target.is_file() and os.access(target, os.W_OK)
                                   and os.access(target.parent, os.W_OK)):
            _replace(target, content)
        else:
            target.write_bytes(content)
    except (OSError, RuntimeError) as error:  # before Python 3.13 links in a circle are a RuntimeError
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{path} cannot be written ({why}); give another path") from error


def _replace(target: Path, content: bytes) -> None:
    beside = target.with_name(f".{target.name}.part")
    try:
        beside.write_bytes(content)
        beside.replace(target)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
