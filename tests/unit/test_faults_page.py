"""docs/faults.md names tests: each of them is there, and no complaint is left out."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()


def is_there(path: Path, test: str) -> bool:
    if not path.is_file():
        return False
    return re.search(rf"^ *(async )?def {re.escape(test)}\(", path.read_text(), re.MULTILINE) is not None


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"^\* `(\S+)::(\S+)`$", PAGE, re.MULTILINE)
    assert len(named) == PAGE.count("::") > 100, "one a line"
    missing = [f"{path}::{test}" for path, test in named if not is_there(ROOT / "tests" / path, test)]
    assert not missing


def test_every_complaint_has_its_tests_once() -> None:
    entries = re.split(r"^\*\*(\d+)\. ", PAGE, flags=re.MULTILINE)[1:]
    numbers, texts = entries[::2], entries[1::2]
    assert sorted(map(int, numbers)) == list(range(1, 37))
    assert all("::" in text for text in texts)
