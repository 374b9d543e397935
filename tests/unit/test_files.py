"""Files that people name: whole or as they were, and what is no file stays what it is."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.files import check_file, check_folder, write_file


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


_WRITES = "import sys; from pathlib import Path; from shared.files import check_file, write_file; " \
          "print('before'); check_file('--json', Path(sys.argv[1])); write_file(Path(sys.argv[1]), b'numbers\\n'); " \
          "print('after')"


@pytest.mark.parametrize("place", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_is_a_pipe_that_is_written_to(place: str) -> None:
    done = subprocess.run([sys.executable, "-c", _WRITES, place], stdout=subprocess.PIPE, check=True, timeout=60)
    assert done.stdout.split() == [b"before", b"numbers", b"after"]


def test_standard_output_that_is_a_file_keeps_what_is_in_it(tmp_path: Path) -> None:
    for place in ("/dev/stdout", str(tmp_path / "out")):
        with (tmp_path / "out").open("wb") as file:
            subprocess.run([sys.executable, "-c", _WRITES, place], stdout=file, check=True, timeout=60)
        assert (tmp_path / "out").read_bytes().split() == [b"before", b"numbers", b"after"]


def test_a_pipe_of_another_descriptor_is_written_to() -> None:
    """As ``>(cat)`` of a shell."""
    out, into = os.pipe()
    check_file("--json", Path(f"/dev/fd/{into}"))
    write_file(Path(f"/dev/fd/{into}"), b"through")
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        assert pipe.read() == b"through"


def test_a_file_that_could_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.write_bytes(b"kept")
    os.mkfifo(tmp_path / "pipe")
    for name in ("before", "new", "pipe"):
        check_file("--json", tmp_path / name)
    assert before.read_bytes() == b"kept" and {path.name for path in tmp_path.iterdir()} == {"before", "pipe"}


def test_a_file_that_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for path, said in ((tmp_path, "that is a folder"), (tmp_path / "no" / "x", f"there is no folder {tmp_path / 'no'}"),
                       (tmp_path / "file" / "x", "file is no folder"), (circle, "("), (Path("/proc/x"), "(")):
        with pytest.raises(UserError, match=re.escape(f"--json {path} cannot be written")) as error:
            check_file("--json", path)
        assert said in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "circle"}


def test_a_folder_that_could_be_made_is_not_there_afterwards(tmp_path: Path) -> None:
    check_folder("--out", tmp_path)
    check_folder("--out", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "a", Path("/proc/x/y")):
        with pytest.raises(UserError, match=f"--out: nothing can be written to {path} "):
            check_folder("--out", path)
