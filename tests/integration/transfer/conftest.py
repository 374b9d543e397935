"""Peers of the transfer engine in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import transfer_peer


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    with transfer_peer.nursery():
        yield
