"""The blocking engine over every path, with the compiled part and without. Two engines in this process; the path is
forced by settings.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.errors import Bug
from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Range
from shared.transfer import (
    GrantRefused,
    Notification,
    PathFailed,
    PeerGone,
    Slice,
    SyncTransferEngine,
    TransferSettings,
    TransferTimeout,
)
from shared.transfer.native import WHY_NOT

NBYTES = 1 << 20
OP = OperationId("op")
PATHS = ["copy", "shm", "tcp"]
DEFAULTS: dict[str, Any] = {"min_timeout_s": 60.0, "connect_timeout_s": 60.0}


@pytest.fixture(autouse=True, params=[pytest.param(True, id="compiled"), pytest.param(False, id="plain")])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines opened without an opinion have this one."""
    if request.param and WHY_NOT:
        pytest.skip(f"there is no compiled part: {WHY_NOT}")
    monkeypatch.setitem(DEFAULTS, "native", request.param)


@contextmanager
def opened(*paths: str, nbytes: int = NBYTES,
           **settings: Any) -> Iterator[tuple[SyncTransferEngine, SyncTransferEngine]]:
    """Sender and receiver with a segment ``kv`` each; the sender's is filled with noise."""
    allowed = TransferSettings(paths=paths, **{**DEFAULTS, **settings})
    with (
        SyncTransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=allowed) as sender,
        SyncTransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"), settings=allowed) as receiver,
    ):
        sender.register("kv", nbytes).array[:] = np.random.default_rng(7).integers(1, 256, nbytes, dtype=np.uint8)
        receiver.register("kv", nbytes)
        yield sender, receiver


def of(offset: int, length: int) -> Range:
    return Range(segment="kv", offset=offset, length=length)


def push(sender: SyncTransferEngine, receiver: SyncTransferEngine, length: int, **more: Any) -> Any:
    grant = more.pop("grant", None) or receiver.grant(OP, [of(0, length)], ttl_s=60)
    return sender.push(receiver.endpoint, [Slice("kv", 0, of(0, length))], grant, **more)


def array(engine: SyncTransferEngine) -> Any:
    return engine._engine._segments["kv"].array


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("nbytes", [1000, 3 << 20, 70 << 20])
def test_bytes_arrive_and_the_receiver_is_notified(path: str, nbytes: int) -> None:
    with opened(path, nbytes=nbytes) as (sender, receiver):
        result = push(sender, receiver, nbytes, notify=b"done")
        assert result.ok and result.path == path and result.nbytes == nbytes
        assert receiver.next_notification(5) == Notification(OP, WorkerId("a"), b"done")
        assert receiver.covered(OP, of(0, nbytes)) and receiver.received_bytes(OP) == nbytes
        assert np.array_equal(array(sender), array(receiver))
        assert sender.statistics().sent_bytes == {path: nbytes}
        receiver.release(OP)
        assert not receiver.covered(OP, of(0, 1))


@pytest.mark.parametrize("path", PATHS)
def test_checksums_are_sent_when_wanted(path: str) -> None:
    with opened(path, checksums="on") as (sender, receiver):
        assert push(sender, receiver, NBYTES).ok


@pytest.mark.parametrize("path", PATHS)
def test_a_corrupted_byte_is_found_out(path: str) -> None:
    with opened(path, corrupt_every=1) as (sender, receiver):
        assert push(sender, receiver, NBYTES).error.code == "checksum"


@pytest.mark.parametrize("path", PATHS)
def test_a_forged_grant_is_refused_and_the_next_push_works(path: str) -> None:
    with opened(path) as (sender, receiver):
        grant = receiver.grant(OP, [of(0, 100)], ttl_s=60)
        result = push(sender, receiver, 100, grant=msgspec.structs.replace(grant, token=b"\0" * 32))
        assert isinstance(result.error, GrantRefused)
        assert push(sender, receiver, 100, grant=grant).ok


@pytest.mark.parametrize("path", PATHS)
def test_threads_push_at_the_same_time(path: str) -> None:
    with opened(path) as (sender, receiver):
        grant, results = receiver.grant(OP, [of(0, NBYTES)], ttl_s=60), []

        def work(first: int) -> None:
            for i in range(first, 256, 8):
                results.append(sender.push(receiver.endpoint, [Slice("kv", i * 4096, of(i * 4096, 4096))], grant))

        threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 256 and all(result.ok for result in results)
        assert np.array_equal(array(sender), array(receiver))


def test_a_path_that_cannot_connect_is_left_for_the_next() -> None:
    with opened("shm", "tcp") as (sender, receiver):
        grant = receiver.grant(OP, [of(0, 100)], ttl_s=60)
        broken = msgspec.structs.replace(receiver.endpoint, shm=receiver.endpoint.shm + ".gone")
        result = sender.push(broken, [Slice("kv", 0, of(0, 100))], grant)
        assert result.ok and result.path == "tcp"


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_closed_peer_is_gone_and_its_next_life_is_reached(path: str) -> None:
    with opened(path) as (sender, _):
        allowed = TransferSettings(paths=(path,))
        for life in range(2):
            with SyncTransferEngine.open(worker=WorkerId("c"), incarnation=Incarnation(f"c{life}"),
                                         settings=allowed) as other:
                other.register("kv", NBYTES)
                grant = other.grant(OP, [of(0, NBYTES)], ttl_s=60)
                assert push(sender, other, NBYTES, grant=grant).ok
                endpoint = other.endpoint
            result = sender.push(endpoint, [Slice("kv", 0, of(0, 100))], grant)
            assert isinstance(result.error, PeerGone) and result.error.peer == "c"


def test_a_closed_engine_says_so() -> None:
    with opened("tcp") as (sender, _):
        pass
    for call in (lambda: sender.next_notification(5), lambda: sender.release(OP)):
        with pytest.raises(Bug, match="was closed"):
            call()


def test_no_common_path_says_why() -> None:
    with opened("copy") as (sender, receiver):
        far = msgspec.structs.replace(receiver.endpoint, worker=WorkerId("far"))
        result = sender.push(far, [Slice("kv", 0, of(0, 100))], receiver.grant(OP, [of(0, 100)], ttl_s=60))
        assert isinstance(result.error, PathFailed)


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_deadline_ends_a_push_and_what_arrives_later_does_not_count(path: str) -> None:
    with opened(path, nbytes=64 << 20) as (sender, receiver):
        result = push(sender, receiver, 64 << 20, timeout_s=1e-3)
        assert isinstance(result.error, TransferTimeout)
        assert push(sender, receiver, 1000).ok


@pytest.mark.parametrize("path", PATHS)
def test_unregistered_memory_is_let_go(path: str) -> None:
    with opened(path) as (sender, receiver):
        assert push(sender, receiver, 1000).ok
        receiver.release(OP)
        sender.unregister("kv")
        sender.register("kv", memory=bytearray(b"x" * NBYTES))
        assert push(sender, receiver, NBYTES).ok
        assert bytes(array(receiver)) == b"x" * NBYTES
        with pytest.raises(Bug):
            sender.unregister("nothing")


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_left_behind(path: str) -> None:
    def once() -> None:
        with opened(path) as (sender, receiver):
            assert push(sender, receiver, NBYTES).ok

    once()
    gc.collect()  # what earlier tests left to be collected is not ours to count
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-")] == []
