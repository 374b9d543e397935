"""For tests that need RDMA devices: they run in the machine that ``tests/rdma/vm`` boots, as root.

They are cut off from the other tests' fixtures (``--confcutdir``): an emulated processor takes half a minute to import
what those need.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.transfer_peer import nursery

collect_ignore_glob = [] if "RDMA_MACHINE" in os.environ else ["test_*"]


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    with nursery():
        yield


@pytest.fixture
def second_card() -> Iterator[None]:
    """A second card, ``rxe1`` on the interface ``roce1``, while the test runs."""
    run("ip link add roce1 type dummy")
    run("ip link set roce1 mtu 9000 up")
    run("ip address add 10.78.0.1/24 dev roce1")
    run("rdma link add rxe1 type rxe netdev roce1")
    yield
    run("rdma link delete rxe1")
    run("ip link delete roce1")


def run(command: str) -> None:
    """Runs a command of a few words."""
    subprocess.run(command.split(), check=True)
