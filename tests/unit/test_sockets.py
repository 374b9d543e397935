"""Sockets of processes that were killed: gone when the next one starts; nothing else is."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from shared import sockets


def bound(path: Path, *, listening: bool = True) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    if listening:
        sock.listen()
    return sock


def age(path: Path) -> None:
    os.utime(path, (1.0, 1.0))


def test_what_a_dead_process_left_goes_and_what_lives_stays(tmp_path: Path) -> None:
    dead, young, other = tmp_path / "dead.sock", tmp_path / "young.sock", tmp_path / "dead.txt"
    for path in (dead, young, other):
        bound(path).close()
    with bound(tmp_path / "live.sock") as live, bound(tmp_path / "early.sock", listening=False):
        (tmp_path / "no.sock").write_text("a file of somebody's")
        for name in ("dead.sock", "live.sock", "early.sock", "dead.txt"):
            age(tmp_path / name)
        sockets.sweep(tmp_path)
        assert not dead.exists()
        assert {path.stem for path in tmp_path.iterdir()} == {"young", "live", "early", "dead", "no"}
        live.setblocking(False)
        with pytest.raises(BlockingIOError):
            live.accept()  # whoever listens was not disturbed
    sockets.sweep(tmp_path / "nowhere")


def test_a_new_directory_takes_the_place_of_those_of_dead_processes(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, used = (Path(sockets.private_directory()) for _ in range(2))
    bound(left / "a.sock").close()
    with bound(used / "a.sock"):
        for directory in (left, used):
            age(directory / "a.sock")
            age(directory)
        young = Path(tempfile.mkdtemp(prefix=sockets.PREFIX))
        new = Path(sockets.private_directory())
        assert set(tmp_path.iterdir()) == {used, young, new}


def test_a_shared_directory_is_kept_as_long_as_its_owner_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    # names of sockets are short: pytest's own directory, or one below it, may be too long already
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        _outlives_its_users()


def test_a_directory_whose_name_is_too_long_for_sockets_leaves_nothing_behind(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(OSError, match="too long"):
        sockets.SharedDirectory()
    assert not list(long.iterdir())


def _outlives_its_users() -> None:
    with sockets.SharedDirectory() as shared:
        path = Path(shared.path)
        bound(path / "left.sock").close()
        for item in (*path.iterdir(), path):
            age(item)
        sockets.remove_left()
        assert [item.name for item in path.iterdir()] == ["owner.sock"]
        bound(path / "later.sock").close()
    assert not path.exists()
