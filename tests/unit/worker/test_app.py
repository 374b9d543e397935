"""Which settings a worker of either role reads."""

from __future__ import annotations

import pytest

from services.decode.settings import Settings as DecodeSettings
from services.prefill.settings import Settings as PrefillSettings
from services.worker.app import both
from shared.errors import SettingError


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("MOONBUS_DECODE_MAX_RUNNING", "3")
    monkeypatch.setenv("MOONBUS_PREFILL_MAX_QUEUED", "7")
    return monkeypatch


def test_an_elastic_worker_has_the_other_roles_settings_beside_its_own(environment: pytest.MonkeyPatch) -> None:
    own = PrefillSettings(elastic=True, threads=2, max_queued=5)
    prefill, decode = both(own)
    assert prefill is own and decode == DecodeSettings(elastic=True, threads=2, max_running=3)
    prefill, decode = both(DecodeSettings(elastic=True))
    assert prefill is not None and prefill.max_queued == 7


def test_a_plain_worker_does_not_look_at_them(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MOONBUS_DECODE_MAX_RUNNING", "many")
    environment.setenv("MOONBUS_PREFILL_MAX_QUEUED", "few")
    assert both(PrefillSettings())[1] is None and both(DecodeSettings())[0] is None
    with pytest.raises(SettingError, match="many"):
        both(PrefillSettings(elastic=True))
