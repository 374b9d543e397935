"""Settings of the services of a stack, found wrong before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.doctor import examine_settings
from services.launcher import stack
from services.launcher.checks import wrong_settings
from services.launcher.settings import Settings
from shared.errors import UserError


def wrong(**env: str) -> list[str]:
    return [str(error) for error in wrong_settings(
        Settings(store=1), {f"MOONBUS_{name}": value for name, value in env.items()})]


def test_nothing_set_is_nothing_wrong() -> None:
    assert wrong() == []


@pytest.mark.parametrize(("name", "value", "says"), [
    ("CONDUCTOR_PLACEMENT", "foo", "there is no policy foo; there are random"),
    ("CONDUCTOR_ADMISSION", "foo", "there is no admission foo; there are none"),
    ("CONDUCTOR_PLACMENT", "random", "PLACMENT; did you mean MOONBUS_CONDUCTOR_PLACEMENT?"),
    ("CONDUCTOR_MAX_QUEUE_S", "soon", "MOONBUS_CONDUCTOR_MAX_QUEUE_S is 'soon'"),
    ("GATEWAY_PRIORITIES", "high", "setting priorities is 'high'"),
    ("GATEWAY_GATEWAY_ID", "a.b", "setting gateway_id is 'a.b'"),
    ("STORE_MANAGER_KEEP", "1d", "store-manager has no setting MOONBUS_STORE_MANAGER_KEEP"),
    ("STORE_VALUES", "embeddings", "setting values is 'embeddings'"),
    ("CACHE_POLICY", "foo", "setting cache_policy is 'foo'"),
    ("DECODE_CHUNK_TOKENS", "100", "setting chunk_tokens is 100"),
    ("TRANSFER_LANE", "2", "did you mean MOONBUS_TRANSFER_LANES?"),
])
def test_what_is_wrong_is_said_in_one_line_each(name: str, value: str, says: str) -> None:
    assert any(says in line for line in wrong(**{name: value}))
    assert all("\n" not in line for line in wrong(**{name: value}))


def test_the_same_mistake_of_several_workers_is_one() -> None:
    assert len(wrong(CACHE_POLICY="foo")) == 1


def test_a_service_that_is_not_started_is_not_looked_at() -> None:
    assert wrong_settings(Settings(store=0), {"MOONBUS_STORE_VALUES": "embeddings"}) == []


def test_a_directory_is_not_made_by_looking(tmp_path: Path) -> None:
    assert wrong(SSD_DIR=str(tmp_path / "kv")) == []
    assert list(tmp_path.iterdir()) == []


def test_up_starts_nothing_and_doctor_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), cache_dir=str(tmp_path / "models"))
    assert [finding.verdict for finding in examine_settings(settings)] == ["ok"]
    monkeypatch.setenv("MOONBUS_CONDUCTOR_PLACEMENT", "foo")
    (found,) = examine_settings(settings)
    assert found.verdict == "fail"

    async def never(_: stack.Stack) -> int:
        raise AssertionError("it started")

    with pytest.raises(UserError, match="there is no policy foo") as raised:
        stack.run(settings, never, watcher=_Nobody())
    assert str(raised.value) == found.found
    assert not (tmp_path / "models").exists(), "no model was fetched either"


class _Nobody:
    def changed(self, units: object) -> None:
        raise AssertionError("a unit started")

    def news(self, line: str) -> None:
        raise AssertionError(line)
