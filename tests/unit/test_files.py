"""Files that people name: whole or as they were, and what is no file stays what it is."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.files import write_file


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for content in (b"one", b"2"):
        write_file(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_a_link(is_there: bool, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if is_there:
        target.write_bytes(b"before")
    link.symlink_to(target)
    write_file(link, b"after")
    assert link.is_symlink() and target.read_bytes() == b"after"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_file(pipe, b"through")
    reader.join(timeout=10)
    assert read == [b"through"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_full_device_is_said(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    assert stat.S_ISCHR(full.stat().st_mode)
    with pytest.raises(UserError, match=r"full cannot be written \(No space left on device\); give another path"):
        write_file(full, b"much")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for path in (tmp_path, tmp_path / "nowhere" / "x", circle):
        with pytest.raises(UserError, match=r"cannot be written \(.+\); give another path"):
            write_file(path, b"x")
    assert list(tmp_path.iterdir()) == [circle]
