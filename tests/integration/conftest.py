"""What several integration tests need that only they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.engine.pull import pull


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    pull("tiny-random", directory, lambda stage, done, total: None)
    return directory
