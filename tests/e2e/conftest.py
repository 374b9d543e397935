"""Stacks for the end-to-end tests: one a module, since starting one takes seconds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.support.stack import RunningStack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(server_dir: Path) -> AsyncIterator[RunningStack]:
    """A stack of two prefill and two decode workers that serve ``tiny-random``."""
    directory = server_dir / "stack"
    directory.mkdir(exist_ok=True)
    async with running_stack(directory, settings={"MOONBUS_BLOCK_TOKENS": "16"}) as running:
        yield running
