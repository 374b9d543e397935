"""Writing a file that a person named."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from shared.errors import UserError

_STANDARD = (1, 2)
"""File descriptors of standard output and standard error."""


def write_file(path: Path, content: bytes) -> None:
    """``path`` has ``content``; a regular file, or one that is not there yet, appears whole or stays as it was.

    A link stays a link. What is no regular file (a device, a pipe) is written to and stays what it is, and so is a
    file in a folder where nothing may be added. What standard output or error go to gets ``content`` after what they
    have written. Raises :class:`UserError` when it cannot be written.
    """
    try:
        standard = _standard(path)
        if standard is not None:
            _write_through(standard, content)
        elif path.exists() and not path.is_file():
            path.write_bytes(content)  # not what it resolves to: a pipe of a process is a link to a name nobody has
        else:
            target = path.resolve()
            if _is_replaced(target):
                _replace(target, content)
            else:
                target.write_bytes(content)
    except (OSError, RuntimeError) as error:  # before Python 3.13 links in a circle are a RuntimeError
        raise UserError(f"{path} cannot be written ({_why(error)}); give another path") from error


def check_file(option: str, path: Path) -> None:
    """Whether ``path``, given with ``option``, can be written as far as can be known before; it is left as it is.

    Raises :class:`UserError` when it cannot.
    """
    what = f"{option} {path} cannot be written"
    folder = path.parent
    try:
        if path.is_dir():
            raise UserError(f"{what}: that is a folder; give the path of a file")
        if not folder.is_dir():
            why = f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}"
            raise UserError(f"{what}: {why}; give a file in a folder that exists")
        if _standard(path) is not None:
            return
        target = path if path.exists() and not path.is_file() else path.resolve()
        if target.exists() and not (target.is_file() and _is_replaced(target)):
            if not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            _try(target)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{what} ({_why(error)}); give another path") from error


def check_folder(option: str, folder: Path) -> None:
    """Whether ``folder``, given with ``option``, can be made, and a file in it; what is tried is taken away again.

    Raises :class:`UserError` when it cannot.
    """
    made: list[Path] = []
    try:
        for one in (*reversed(folder.absolute().parents), folder.absolute()):
            if not one.exists():
                one.mkdir(exist_ok=True)
                made.append(one)
        _try(folder / "report")
    except OSError as error:
        raise UserError(f"{option}: nothing can be written to {folder} ({_why(error)}); give another folder") from error
    finally:
        for one in reversed(made):
            try:
                one.rmdir()
            except OSError:  # somebody else has put something into it
                break


def make_folder(folder: Path) -> None:
    """It is there, with those above it; raises :class:`UserError` when it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({_why(error)}); give another path") from error


def _standard(path: Path) -> int | None:
    """The descriptor of standard output or error, when ``path`` is what it goes to."""
    for descriptor in _STANDARD:
        try:
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        except OSError:  # not there yet, or closed
            continue
    return None


def _write_through(descriptor: int, content: bytes) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)


def _is_replaced(target: Path) -> bool:
    """Whether a file is made beside it and takes its place: not where only the file itself may be written."""
    return not target.exists() or (os.access(target, os.W_OK) and os.access(target.parent, os.W_OK))


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _try(target: Path) -> None:
    beside = _beside(target)
    beside.touch()
    beside.unlink()


def _replace(target: Path, content: bytes) -> None:
    beside = _beside(target)
    try:
        beside.write_bytes(content)
        beside.replace(target)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
