"""What a worker is called, and who must have a name of its own."""

import re

import pytest

from services.prefill.settings import Settings
from shared.errors import SettingError
from shared.store.settings import SsdSettings
from shared.worker.jobs import Shell
from shared.worker.runtime import Worker, named, run_worker


def nothing(_: Worker) -> list[Shell]:
    raise AssertionError("nothing is started")


def test_a_worker_without_a_name_gets_a_fresh_one() -> None:
    first, second = (named(Settings(), "prefill").worker_id for _ in range(2))
    assert first != second and all(re.fullmatch(r"prefill-[a-z0-9]+", name) for name in (first, second))
    assert named(Settings(worker_id="mine"), "prefill").worker_id == "mine"


@pytest.mark.parametrize("settings", [Settings(ssd=SsdSettings(dir="/kv")), Settings(worker_id="a.b")])
def test_a_name_that_cannot_serve_stops_the_start(settings: Settings) -> None:
    with pytest.raises(SettingError, match="worker_id"):
        run_worker(settings, "prefill", nothing, max_running=1)
