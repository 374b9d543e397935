"""What a store's settings may be, before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.store.settings import Settings
from shared.errors import SettingError
from shared.store.settings import SsdSettings
from shared.worker.runtime import check


@pytest.mark.parametrize("text", ["demo", "demo:0", ":5KiB", "demo:", "demo:many", "demo:-1"])
def test_values_are_a_name_and_a_size(text: str) -> None:
    with pytest.raises(SettingError, match="expected name:size, like embeddings:256KiB"):
        Settings(values=(text,)).opaque_specs()
    (spec,) = Settings(values=("demo:2MiB",)).opaque_specs()
    assert spec.model == "demo" and spec.block_bytes == 2 << 20


def test_a_policy_has_a_known_name() -> None:
    check(Settings())
    with pytest.raises(SettingError, match="cache_policy is 'nope'"):
        check(Settings(cache_policy="nope"))


def test_a_directory_is_named_as_it_was_given(tmp_path: Path) -> None:
    check(Settings(ssd=SsdSettings(dir=str(tmp_path / "new" / "one"))))
    assert list((tmp_path / "new" / "one").iterdir()) == []
    place = tmp_path / "a file"
    place.touch()
    with pytest.raises(SettingError) as caught:
        check(Settings(ssd=SsdSettings(dir=str(place))))
    assert caught.value.value == str(place) and "writable directory" in str(caught.value)
