"""What a push's choice of a path is counted as."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from shared.transfer.plan import Choice, Routes
from shared.transfer.statistics import Counts

SHM, TCP = Choice("shm", "/s", "same host"), Choice("tcp", "h:1", "network")


def paused(choice: Choice) -> Choice:
    return Choice(choice.path, choice.address, choice.reason, paused="connection to /tmp/x.sock broke")


@pytest.mark.parametrize(("routes", "path", "reason"), [
    (Routes((SHM, TCP), {"copy": "another process"}), "shm", "same host"),
    (Routes((TCP, paused(SHM)), {}), "tcp", "network; paused: shm"),
    (Routes((paused(SHM), paused(TCP)), {}), "shm", "same host; paused: shm, tcp"),
    (Routes((), {"tcp": "peer offers none"}), "none", "no way"),
])
def test_a_choice_is_counted_with_words_that_no_peer_can_add_to(routes: Routes, path: str, reason: str) -> None:
    def counted() -> float:
        labels = {"path": path, "reason": reason}
        return REGISTRY.get_sample_value("moonbus_transfer_path_choices_total", labels) or 0.0

    before = counted()
    counts = Counts({})
    counts.chose(routes)
    counts.flush()
    assert counted() == before + 1
