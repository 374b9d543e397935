"""A pytest plugin: tests run on the loop of production."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable

import pytest
import uvloop


def pytest_asyncio_loop_factories(
        config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], AbstractEventLoop]]:
    """See ``tests/conftest.py``."""
    return {"uvloop": uvloop.new_event_loop}
