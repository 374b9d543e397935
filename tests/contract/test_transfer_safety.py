"""What must hold when things go wrong at the worst moment: no source is given back while somebody reads it, nothing
hangs, nothing is left of peers that went away."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shared.errors import Bug, SettingError
from shared.ids import HostId, Incarnation, OperationId, WorkerId
from shared.messages import Endpoint, Range
from shared.transfer import (
    PathFailed,
    PeerGone,
    PushResult,
    Slice,
    SyncTransferEngine,
    TransferCancelled,
    TransferEngine,
    TransferSettings,
    TransferTimeout,
    frames,
)
from shared.transfer.addresses import host_clock_s, join_address
from shared.transfer.channel import Closed
from shared.transfer.push import STREAM_PUSHES
from shared.transfer.router import MAX_PAUSE_S
from shared.transfer.segment import Segment
from shared.transfer.shm import ShmLane, ShmSession
from shared.transfer.wire import Connection
from tests.contract.test_transfer import NBYTES, OP, PATHS, Pair, copy_claim, dial, of, opened, raw_sender
from tests.support.eventually import eventually

BIG = 16 << 20


class Held:
    """Holds whoever writes into a segment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        write = Segment.write

        def slow(segment: Segment, offset: int, data: Any) -> None:
            self.entered.set()
            assert self.go.wait(60)
            write(segment, offset, data)

        monkeypatch.setattr(Segment, "write", slow)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 60)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def quiet(pair: Pair) -> bool:
    return not pair.receiver._ledger.overdue(float("inf"))


def stranger(address: str, host: str = "far") -> Endpoint:
    return Endpoint(worker=WorkerId("c"), incarnation=Incarnation("c1"), host=HostId(host), tcp=address)


# -- streams ----------------------------------------------------------------------------------------------------


async def turns() -> None:
    """Whatever the loop has to do by now it has done when this returns."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", ["copy", "shm"])
async def test_a_stream_stops_only_once_nothing_is_on_its_way_however_often_it_is_cancelled(path: str,
                                                                                           held: Held) -> None:
    async with opened(path, nbytes=BIG, checksums="off") as pair:
        stream = pair.sender.stream(pair.receiver.endpoint, pair.grant((0, BIG)))
        stream.push([Slice("kv", 0, of(0, 4 << 20))])
        await held.reached()
        stop = asyncio.create_task(stream.stop())
        for _ in range(3):
            await turns()
            stop.cancel()
        await turns()
        assert not stop.done(), "the receiver reads the source still"
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await stop
        assert quiet(pair)


async def test_what_becomes_ready_while_a_stream_stops_is_not_sent(held: Held) -> None:
    async with opened("shm", checksums="off") as pair:
        stream = pair.sender.stream(pair.receiver.endpoint, pair.grant((0, 3000)))
        stream.push([Slice("kv", 0, of(0, 1000))])
        await held.reached()
        stop = asyncio.create_task(stream.stop())
        await asyncio.sleep(0)
        stream.push([Slice("kv", 2000, of(2000, 1000))])
        held.go.set()
        await stop
        assert stream.pushes == 1 and not pair.covered(2000, 1)
        result = await stream.close()
        assert result.slices[0].error is None and isinstance(result.slices[1].error, TransferCancelled)


@pytest.mark.parametrize("before", [0, 1, STREAM_PUSHES, STREAM_PUSHES + 3])
async def test_a_slice_of_memory_that_is_not_ours_hurts_its_pusher_and_not_the_stream(before: int) -> None:
    async with opened("shm") as pair:
        stream = pair.sender.stream(pair.receiver.endpoint, pair.grant((0, 1000)))
        for i in range(before):
            stream.push([Slice("kv", i, of(i, 1))])
        with pytest.raises(Bug):
            stream.push([Slice("kv", 0, of(0, NBYTES + 1))])
        result = await asyncio.wait_for(stream.close(), 5)
        assert result.ok and result.nbytes == before
        await asyncio.wait_for(stream.stop(), 5)


async def test_memory_that_is_unregistered_under_a_stream_breaks_it(held: Held) -> None:
    async with opened("shm", checksums="off") as pair:
        pair.sender.register("other", 100)
        stream = pair.sender.stream(pair.receiver.endpoint, pair.grant((0, 1000)))
        for i in range(STREAM_PUSHES):
            stream.push([Slice("kv", i, of(i, 1))])
            await asyncio.sleep(0)  # each is a push of its own
        stream.push([Slice("other", 99, of(99, 1))])  # waits until one of those has ended
        await pair.sender.unregister("other")
        held.go.set()
        result = await asyncio.wait_for(stream.close(), 5)
        assert result.arrived == STREAM_PUSHES and isinstance(result.slices[-1].error, TransferCancelled)


# -- the source is in use until a push has ended -------------------------------------------------------------------


async def test_what_is_copied_after_its_push_has_failed_does_not_count(held: Held) -> None:
    async with opened("copy", nbytes=4 << 20, checksums="off") as pair:
        push = pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, 4 << 20))], pair.grant((0, 4 << 20)))
        await held.reached()
        lanes = pair.sender.router.close()
        assert isinstance((await push).error, PeerGone)
        pair.source[:] = bytes(4 << 20)
        held.go.set()
        await eventually(lambda: quiet(pair))
        assert not pair.covered(0, 1)
        for lane in lanes:
            await asyncio.to_thread(lane.join)


@pytest.mark.parametrize("path", ["copy", "shm"])
async def test_what_is_copied_after_its_push_ran_out_of_time_does_not_count(path: str, held: Held) -> None:
    async with opened(path, nbytes=4 << 20, checksums="off") as pair:
        push = pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, 4 << 20))], pair.grant((0, 4 << 20)),
                                timeout_s=0.2)
        await held.reached()
        assert isinstance((await push).error, TransferTimeout)
        pair.source[:] = bytes(4 << 20)
        held.go.set()
        await eventually(lambda: quiet(pair))
        assert pair.receiver.received_bytes(OP) == 0


def test_what_is_copied_after_a_blocking_push_ran_out_of_time_does_not_count(held: Held) -> None:
    allowed = TransferSettings(paths=("shm",))
    with (
        SyncTransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=allowed) as sender,
        SyncTransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"), settings=allowed) as receiver,
    ):
        source = sender.register("kv", NBYTES).array
        receiver.register("kv", NBYTES)
        grant = receiver.grant(OP, [of(0, NBYTES)], ttl_s=60)
        result = sender.push(receiver.endpoint, [Slice("kv", 0, of(0, NBYTES))], grant, timeout_s=0.2)
        assert isinstance(result.error, TransferTimeout) and held.entered.is_set()
        source[:] = 9
        held.go.set()
        receiver.shut(OP)
        while receiver._engine._ledger.overdue(float("inf")):
            time.sleep(1e-3)
        assert receiver.received_bytes(OP) == 0


async def test_a_push_waits_for_what_is_on_its_way_when_no_more_threads_can_be_had(
        held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[ShmLane] = []

    def exhausted(lane: ShmLane, opened: Callable[..., None]) -> None:
        attempts.append(lane)
        raise RuntimeError("can't start new thread")

    async with opened("shm", nbytes=BIG, checksums="off") as pair:
        held.go.set()
        grant = pair.grant((0, BIG))
        assert (await pair.push(grant, (0, 0, 10))).ok
        held.go.clear()
        monkeypatch.setattr(ShmLane, "start", exhausted)
        push = pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, BIG))], grant)
        await held.reached()
        await eventually(lambda: attempts)  # another connection was wanted
        await turns()
        assert not push.done
        held.go.set()
        result = await push
        assert result.ok and pair.source == pair.target, "one connection does as well"


async def test_a_claim_that_cannot_be_put_into_a_frame_fails_alone() -> None:
    async with opened("shm", checksums="off") as pair:
        grant, endpoint = pair.grant((0, NBYTES)), pair.receiver.endpoint
        assert (await pair.push(grant, (0, 0, 1))).ok
        long = [Slice("kv", i * 16, Range(segment="é" * 256, offset=i * 16, length=8)) for i in range(512)]
        result = await asyncio.wait_for(pair.sender.push(endpoint, long, grant), 5)
        assert not result.ok and pair.sender.router.inflight_bytes == 0
        assert (await pair.push(grant, (0, 0, 1))).ok and pair.receiver.statistics().connections == 1


async def test_a_claim_whose_sender_has_hung_up_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes may have come by another way since, and its source may be something else by now."""
    async with opened("shm", checksums="off") as pair:
        grant = pair.grant((0, 100))
        with raw_sender(pair, "shm") as raw:
            attach, taken, hung_up = ShmSession._attach, threading.Event(), threading.Event()
            threads: list[threading.Thread] = []

            def late(session: ShmSession, serials: list[int]) -> None:
                attach(session, serials)
                threads.append(session.thread)
                taken.set()
                assert hung_up.wait(10)

            monkeypatch.setattr(ShmSession, "_attach", late)
            raw.connection.send(copy_claim(grant, attached=[5], deadline_s=host_clock_s() + 60, offset=500),
                                descriptors=[pair.sender._segments["kv"].fd])
            assert await asyncio.to_thread(taken.wait, 10)
        monkeypatch.setattr(ShmSession, "_attach", attach)
        assert (await pair.push(grant, (0, 0, 100))).ok
        hung_up.set()
        await asyncio.to_thread(threads[0].join, 10)
        assert pair.covered(0, 100) and pair.target[:100] == pair.source[:100]


# -- memory that goes away ----------------------------------------------------------------------------------------


async def test_nothing_is_granted_of_memory_that_is_being_unregistered_nor_pushed_from_it(held: Held) -> None:
    async with opened("copy", nbytes=4 << 20, checksums="off") as pair:
        grant = pair.grant((0, 4 << 20))
        push = pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, 4 << 20))], grant)
        await held.reached()
        leaving = [asyncio.create_task(engine.unregister("kv")) for engine in (pair.sender, pair.receiver)]
        await asyncio.sleep(0)
        with pytest.raises(Bug, match="being unregistered"):
            pair.receiver.grant(OperationId("next"), [of(0, 10)], ttl_s=60)
        with pytest.raises(Bug, match="being unregistered"):
            pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, 10))], grant)
        for engine in (pair.sender, pair.receiver):
            with pytest.raises(Bug):
                await engine.unregister("kv")
        held.go.set()
        await asyncio.wait_for(asyncio.gather(push, *leaving), 10)


def test_threads_that_unregister_wait_for_their_own_pushes() -> None:
    with SyncTransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"),
                                 settings=TransferSettings(paths=("shm",))) as engine:
        engine.register("x", 100)
        engine.register("y", 100)
        going_on = [Slice("x", 0, of(0, 10))]
        engine._reading.append(going_on)
        waiting = threading.Thread(target=engine.unregister, args=("x",), daemon=True)
        waiting.start()
        while not engine._awaiting:
            time.sleep(1e-3)
        engine.unregister("y")
        assert waiting.is_alive()
        engine._forget(going_on)
        waiting.join(5)
        assert not waiting.is_alive()


def test_a_blocking_engine_closes_only_once_its_pushes_have_ended(held: Held) -> None:
    allowed, results = TransferSettings(paths=("shm",)), list[PushResult]()
    with SyncTransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"), settings=allowed) as receiver:
        receiver.register("kv", NBYTES)
        grant = receiver.grant(OP, [of(0, NBYTES)], ttl_s=60)
        with SyncTransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=allowed) as sender:
            sender.register("kv", NBYTES)
            thread = threading.Thread(target=lambda: results.append(
                sender.push(receiver.endpoint, [Slice("kv", 0, of(0, NBYTES))], grant)))
            thread.start()
            assert held.entered.wait(10)
            threading.Timer(0.1, held.go.set).start()
        thread.join(5)
        assert results and results[0].ok
        with pytest.raises(Bug, match="closed"):
            sender.push(receiver.endpoint, [], grant)


def test_a_blocking_push_to_a_peer_that_does_not_greet_ends_by_its_deadline() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        SyncTransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"),
                                settings=TransferSettings(paths=("tcp",), connect_timeout_s=30.0)) as sender,
    ):
        sender.register("kv", 100)
        grant = sender.grant(OP, [of(0, 10)], ttl_s=60)
        mute = stranger(join_address(*listener.getsockname()[:2]))
        result = sender.push(mute, [Slice("kv", 0, of(0, 10))], grant, timeout_s=0.3)
        assert isinstance(result.error, TransferTimeout)


# -- slices of many parts -----------------------------------------------------------------------------------------


async def test_parts_of_a_slice_are_proven_to_a_receiver_that_demands_it() -> None:
    demanding = TransferSettings(paths=("shm",), checksums="on")
    async with (
        TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"),
                            settings=TransferSettings(paths=("shm",))) as sender,
        TransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b1"), settings=demanding) as receiver,
    ):
        sender.register("kv", NBYTES).array[:] = 7
        target = receiver.register("kv", NBYTES).array
        grant = receiver.grant(OP, [of(0, NBYTES)], ttl_s=60)
        result = await sender.push(receiver.endpoint, [Slice("kv", 100, of(0, 1000), 9, 4096)], grant)
        assert result.ok and int(target.sum()) == 7 * 9000
        assert receiver.statistics().dropped_connections == {}


async def test_a_slice_may_have_very_many_very_small_parts() -> None:
    async with opened("shm", checksums="off", nbytes=4 << 20) as pair:
        many = Slice("kv", 0, of(0, 2), 200_000, 8)
        assert (await pair.sender.push(pair.receiver.endpoint, [many], pair.grant((0, 4 << 20)))).ok
        assert pair.receiver.statistics().dropped_connections == {}


@pytest.mark.parametrize("path", PATHS)
async def test_a_slice_to_where_nobody_has_memory_is_a_bug(path: str) -> None:
    async with opened(path) as pair:
        with pytest.raises(Bug):
            pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(-5, 10))], pair.grant((0, 10)))


# -- peers and engines that are gone ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_a_closed_engine_pushes_nothing_and_opens_nothing(path: str) -> None:
    async with opened(path) as pair:
        only = TransferSettings(paths=(path,))
        async with TransferEngine.open(worker=WorkerId("c"), incarnation=Incarnation("c1"), settings=only) as closed:
            pass
        result = await closed.push(pair.receiver.endpoint, (), pair.grant((0, 10)), notify=b"x")
        assert isinstance(result.error, PathFailed) and "closed" in str(result.error)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("transfer-c")]


@pytest.mark.parametrize("address", ["127.0.0.1:" + "9" * 30, "127.0.0.1:70000", "127.0.0.1:-1", "nowhere"])
async def test_an_address_that_is_none_is_a_peer_that_is_gone(address: str) -> None:
    async with opened("tcp") as pair:
        slices, grant = [Slice("kv", 0, of(0, 10))], pair.grant((0, 10))
        result = await pair.sender.push(stranger(address), slices, grant, timeout_s=5)
        assert isinstance(result.error, PeerGone)


@pytest.mark.parametrize("path", ["copy", "shm", "tcp"])
async def test_two_lives_of_a_peer_at_once_do_not_hurt_each_others_pushes(path: str) -> None:
    only = TransferSettings(paths=(path,))
    async with (
        opened(path, checksums="off") as pair,
        TransferEngine.open(worker=WorkerId("b"), incarnation=Incarnation("b2"), settings=only) as next_life,
    ):
        next_life.register("kv", NBYTES)
        lives = [(life.endpoint, life.grant(OP, [of(0, NBYTES)], ttl_s=60)) for life in (pair.receiver, next_life)]
        for _ in range(20):
            results = await asyncio.gather(*(
                pair.sender.push(endpoint, [Slice("kv", 0, of(0, NBYTES))], grant)
                for endpoint, grant in lives for _ in range(4)))
            assert [result.error for result in results if not result.ok] == []


async def test_nothing_is_kept_of_peers_that_went_away() -> None:
    async with opened("tcp") as pair:
        router = pair.sender.router
        only = TransferSettings(paths=("tcp",))
        async with TransferEngine.open(worker=WorkerId("d"), incarnation=Incarnation("d1"), settings=only) as short:
            short.register("kv", 10)
            assert (await pair.sender.push(short.endpoint, [Slice("kv", 0, of(0, 10))],
                                           short.grant(OP, [of(0, 10)], ttl_s=60))).ok
        assert (await pair.push(pair.grant((0, 10)), (0, 0, 10))).ok
        gone = await pair.sender.push(stranger("127.0.0.1:1"), [Slice("kv", 0, of(0, 10))], pair.grant((0, 10)))
        assert isinstance(gone.error, PeerGone) and router._pauses
        await eventually(lambda: sum(link.connected for link in router._links.values()) == 1)
        router._pauses = {key: _long_over(pause) for key, pause in router._pauses.items()}
        router._tidied_s -= MAX_PAUSE_S
        router.tidy()
        assert not router._pauses and {key[0] for key in router._links} == {"b"} == set(router._lives)
        assert (await pair.push(pair.grant((0, 10)), (0, 0, 10))).ok


def _long_over(pause: Any) -> Any:
    pause.until_s -= 2 * MAX_PAUSE_S
    return pause


def test_a_blocking_engine_keeps_no_connections_to_peers_that_went_away() -> None:
    allowed = TransferSettings(paths=("shm",))
    with SyncTransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=allowed) as sender:
        sender.register("kv", 100)
        for i in range(4):
            with SyncTransferEngine.open(worker=WorkerId(f"b{i}"), incarnation=Incarnation("1"),
                                         settings=allowed) as peer:
                peer.register("kv", 100)
                grant = peer.grant(OP, [of(0, 100)], ttl_s=60)
                assert sender.push(peer.endpoint, [Slice("kv", 0, of(0, 100))], grant).ok
        assert {key[0] for key in sender._lines._idle} == {"b3"}


async def test_a_dying_watch_would_be_heard_of_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []

    def broken() -> None:
        looks.append(None)
        raise ZeroDivisionError

    async with opened("tcp") as pair:
        monkeypatch.setattr(pair.receiver.router, "tidy", broken)
        await eventually(lambda: len(looks) > 1)
        with raw_sender(pair, "tcp") as raw:
            raw.begin(pair.grant((0, 1000)), 1000, timeout_ms=50)
            await asyncio.wait_for(pair.receiver.release(OP), 5)


async def test_bytes_that_another_writers_failure_may_have_spoilt_go_again() -> None:
    nbytes = 64 << 20
    async with opened("tcp", nbytes=nbytes, checksums="off") as pair:
        grant = pair.grant((0, nbytes))
        with raw_sender(pair, "tcp") as raw:
            raw.begin(grant, 1000)
            await eventually(lambda: len(pair.receiver._ledger.overdue(float("inf"))) == 1)
            push = pair.sender.push(pair.receiver.endpoint, [Slice("kv", 0, of(0, nbytes))], grant)
            await eventually(lambda: len(pair.receiver._ledger.overdue(float("inf"))) == 2 or push.done)
        assert (await push).ok
        await eventually(lambda: quiet(pair))
        assert (await pair.push(grant, (0, 0, 1000))).ok and pair.covered(0, nbytes)


# -- what callers may ask ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_a_push_without_end_has_one_all_the_same(path: str) -> None:
    async with opened(path) as pair:
        grant = pair.grant((0, NBYTES))
        assert (await pair.push(grant, (0, 0, NBYTES), timeout_s=float("inf"))).ok
        assert (await pair.push(grant, (0, 0, 10), timeout_s=float("inf"))).ok
        with pytest.raises(Bug, match="not a number"):
            pair.sender.push(pair.receiver.endpoint, [], grant, timeout_s=float("nan"))
        late = await pair.push(grant, (0, 0, 10), timeout_s=0)
        assert isinstance(late.error, TransferTimeout)
        await asyncio.wait_for(pair.sender.unregister("kv"), 5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("note", ["text", b"x" * 65_537], ids=["no bytes", "too long"])
async def test_a_notification_that_cannot_travel_is_refused_before_anything_is_sent(path: str, note: Any) -> None:
    async with opened(path) as pair:
        with pytest.raises(Bug, match="notification"):
            pair.sender.push(pair.receiver.endpoint, [], pair.grant((0, 10)), notify=note)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_grant_has_a_time(ttl_s: float) -> None:
    async with opened("copy") as pair:
        with pytest.raises(Bug):
            pair.receiver.grant(OP, [of(0, 10)], ttl_s=ttl_s)


@pytest.mark.parametrize(("wrong", "name"), [
    ({"checksums": "yes"}, "transfer_checksums"), ({"lanes": 0}, "transfer_lanes"),
    ({"paths": "shm"}, "transfer_paths"),
    ({"min_bytes_per_s": 0.0}, "transfer_min_bytes_per_s"), ({"min_timeout_s": -10.0}, "transfer_min_timeout_s"),
])
async def test_settings_that_no_environment_could_give_are_refused(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingError, match=name):
        async with TransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"),
                                       settings=TransferSettings(**wrong)):
            pass


async def test_memory_of_python_objects_is_no_memory_for_peers() -> None:
    async with opened("copy") as pair:
        with pytest.raises(Bug, match="Python objects"):
            pair.sender.register("objects", memory=np.array([None, None]))


# -- closing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_closing_an_engine_ends_what_it_pushes(path: str) -> None:
    nbytes = 64 << 20
    async with opened(path, nbytes=nbytes) as outer:
        allowed = TransferSettings(paths=(path,), max_inflight=1 << 20)
        async with TransferEngine.open(worker=WorkerId("c"), incarnation=Incarnation("c1"),
                                       settings=allowed) as closing:
            closing.register("kv", nbytes)
            push = closing.push(outer.receiver.endpoint, [Slice("kv", 0, of(0, nbytes))] * 10, outer.grant((0, nbytes)),
                                timeout_s=60)
            await eventually(lambda: outer.receiver.received_bytes(OP))
        result = await asyncio.wait_for(push, 30)
        assert result.ok or isinstance(result.error, PeerGone | TransferCancelled)


# -- strangers --------------------------------------------------------------------------------------------------


async def test_a_greeting_that_waited_to_be_read_is_read() -> None:
    async with opened("shm") as pair:
        connection = Connection(dial(pair.receiver.endpoint, "shm"))
        connection.send(frames.Hello("raw", "b", "b1", pair.receiver.endpoint.host, host_clock_s() - 8.0))
        assert isinstance(await asyncio.to_thread(connection.receive), frames.Welcome)
        connection.close()


@pytest.mark.parametrize("ahead_s", [5.0, -3600.0, float("nan")])
async def test_a_clock_that_is_not_this_hosts_shares_no_memory(ahead_s: float) -> None:
    async with opened("shm") as pair:
        connection = Connection(dial(pair.receiver.endpoint, "shm"))
        connection.send(frames.Hello("raw", "b", "b1", pair.receiver.endpoint.host, host_clock_s() + ahead_s))
        with pytest.raises((Closed, ConnectionError)):
            await asyncio.to_thread(connection.receive)
        connection.close()


async def test_connections_that_say_nothing_keep_nobody_out() -> None:
    async with opened("tcp") as pair:
        pair.receiver._receiver._max_connections = 5
        mute = [dial(pair.receiver.endpoint, "tcp") for _ in range(5)]
        await eventually(lambda: pair.receiver.statistics().connections == 5)
        assert (await pair.push(pair.grant((0, 10)), (0, 0, 10))).ok
        for sock in mute:
            sock.close()
