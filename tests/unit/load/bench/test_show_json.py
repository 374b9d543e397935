"""The file of ``--json``: refused before anything is measured, and never left half made."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from load.bench.rounds import Outcome, make_rows
from load.bench.show import Report, make_report, open_json
from shared.errors import UserError

OUTCOME = Outcome(values={"a/p50": [1.0]}, rounds=1)
REPORT = make_report(OUTCOME, make_rows(OUTCOME.values, []), started_at_s=1.0, seconds=0.1)


def test_what_was_in_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"x" * 100_000)
    with open_json(path) as file:
        file.write(REPORT)
    assert msgspec.json.decode(path.read_bytes(), type=Report) == REPORT


def test_what_was_in_it_stays_when_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("of yesterday")
    with open_json(path):
        pass
    assert path.read_text() == "of yesterday"


def test_a_new_file_that_nothing_was_written_to_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    with open_json(path):
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize("path", ["absent/rows.json", "."])
def test_a_place_that_cannot_be_opened(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match="--json: cannot write"), open_json(tmp_path / path):
        raise AssertionError


def test_a_full_disk() -> None:
    with pytest.raises(UserError, match="--json: cannot write /dev/full: No space left"), \
            open_json(Path("/dev/full")) as file:
        file.write(REPORT)
