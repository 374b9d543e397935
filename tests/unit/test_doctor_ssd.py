"""``moonbus doctor`` on the directories for KV blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.doctor import examine_ssds


def findings(monkeypatch: pytest.MonkeyPatch, **env: str) -> list[tuple[str, str]]:
    for name, value in env.items():
        monkeypatch.setenv(f"MOONBUS_{name}", value)
    return [(finding.verdict, finding.found) for finding in examine_ssds()]


def test_nobody_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [verdict for verdict, _ in findings(monkeypatch)] == ["absent"]


def test_each_directory_is_looked_at_once_and_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = findings(monkeypatch, SSD_DIR=str(tmp_path / "kv"), STORE_SSD_DIR=str(tmp_path / "store"), SSD_BYTES="1MiB")
    assert [verdict for verdict, _ in found] == ["ok", "ok"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("settings", "verdict", "says"), [
    ({"SSD_BYTES": "1000000GiB"}, "warn", "has room for"),
    ({"SSD_DIR": "/proc/kv"}, "fail", "is on no disk"),
    ({"SSD_BYTES": "much"}, "fail", "MOONBUS_SSD_BYTES is 'much'"),
])
def test_what_is_wrong_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, str],
                                    verdict: str, says: str) -> None:
    found = findings(monkeypatch, **{"SSD_DIR": str(tmp_path), **settings})
    assert [verdict for verdict, _ in found] == [verdict]
    assert says in found[0][1]
