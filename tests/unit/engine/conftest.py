"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.engine.small_models import VOCAB, Pair, build_pair


@pytest.fixture(scope="session")
def llama() -> Pair:
    """One Llama for tests that do not care which model runs."""
    return build_pair("Llama")


@pytest.fixture
def tokens() -> Callable[[int, int], np.ndarray]:
    """``tokens(n, seed)``: n random ids."""
    def make(count: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(3, VOCAB, count).astype(np.uint32)
    return make
