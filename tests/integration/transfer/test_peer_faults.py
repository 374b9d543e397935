"""Pushes to another process that is killed, stopped, restarted, cut off or closed in the middle of them."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psutil
import pytest

from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Endpoint, Grant, Range
from shared.telemetry import metrics
from shared.transfer import (
    ChecksumMismatch,
    GrantRefused,
    PeerGone,
    PushResult,
    Slice,
    SyncTransferEngine,
    TransferEngine,
    TransferSettings,
    TransferTimeout,
)
from shared.transfer.addresses import split_address
from shared.transfer.plan import BATCH_BYTES
from tests.support.eventually import eventually
from tests.support.transfer_peer import (
    PATIENCE_S,
    Peer,
    Pusher,
    cut_connections,
    digests,
    noise,
    noisy_engine,
    peer,
    under_way,
)

NBYTES = 16 << 20
BLOCK = 1 << 20
OP, NEXT = OperationId("op"), OperationId("next")
ALL = Range(segment="kv", offset=0, length=NBYTES)
INFLIGHT = 8 << 20
"""More than this can only have arrived when some of it was acknowledged."""
SEED = 1
PATHS = ["shm", "tcp"]
KINDS = ["loop", "blocking"]
"""Engines: of event loops, of threads."""


def blocks(nbytes: int = NBYTES, *, size: int = BLOCK) -> list[Slice]:
    return [Slice("kv", offset, Range(segment="kv", offset=offset, length=size)) for offset in range(0, nbytes, size)]


ENDLESS = blocks(size=8 << 20) * 1000
"""The same 16 MiB again and again: no machine is done with it before the test has interfered."""


PATIENT = {"silence_s": 0.2, "connect_timeout_s": PATIENCE_S, "min_timeout_s": PATIENCE_S}


def only(*paths: str, **more: Any) -> TransferSettings:
    return TransferSettings(paths=paths, **more)


class Threaded:
    """The blocking engine, each push in a thread of its own."""

    def __init__(self, engine: SyncTransferEngine) -> None:
        self._engine = engine
        self.register = engine.register

    def push(self, peer: Endpoint, slices: Sequence[Slice], grant: Grant, *,
             timeout_s: float | None = None) -> Awaitable[PushResult]:
        return asyncio.to_thread(self._engine.push, peer, slices, grant, timeout_s=timeout_s)


@asynccontextmanager
async def own_engine(*paths: str, **more: Any) -> AsyncIterator[TransferEngine]:
    """An engine of this process, with noise in ``kv``."""
    settings = only(*paths, **{**PATIENT, "max_inflight": INFLIGHT, **more})
    async with noisy_engine(settings, NBYTES, SEED) as engine:
        yield engine


@asynccontextmanager
async def either_engine(kind: str, path: str, **more: Any) -> AsyncIterator[Pusher]:
    """The engine of event loops, or (``kind`` is ``blocking``) the one of threads."""
    if kind == "loop":
        async with own_engine(path, **more) as engine:
            yield engine
        return
    settings = only(path, **{**PATIENT, **more})
    with SyncTransferEngine.open(worker=WorkerId("a"), incarnation=Incarnation("a1"), settings=settings) as blocking:
        blocking.register("kv", NBYTES).buffer[:] = noise(NBYTES, SEED)
        yield Threaded(blocking)


@asynccontextmanager
async def receiving(*paths: str, worker: str = "b", incarnation: str = "1") -> AsyncIterator[tuple[Peer, Grant]]:
    """A peer with an empty ``kv`` that is granted as a whole."""
    async with peer(worker, only(*paths), incarnation=incarnation) as b:
        await b.register("kv", NBYTES)
        yield b, await b.grant(OP, ALL)


# -- all is well ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_bytes_cross_processes(path: str) -> None:
    async with receiving(path) as (b, grant), own_engine(path) as engine:
        result = await engine.push(b.endpoint, blocks()[:-1], grant, timeout_s=30)
        assert result.ok and result.path == path and result.nbytes == NBYTES - BLOCK
        expected = [(True, digest) for digest in digests(noise(NBYTES, SEED), BLOCK)]
        expected[-1] = (False, digests(bytes(BLOCK), BLOCK)[0])
        assert await b.audit(OP, "kv", BLOCK) == expected


async def test_two_hosts_on_one_machine_use_tcp() -> None:
    async with receiving("shm", "tcp") as (b, grant), own_engine("shm", "tcp", host_id="elsewhere") as engine:
        result = await engine.push(b.endpoint, blocks()[:2], grant)
        assert result.ok and result.path == "tcp"


# -- killed, stopped, restarted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
async def test_a_peer_killed_in_the_middle_is_gone_long_before_the_deadline(path: str, kind: str) -> None:
    """At once: nothing but the end of its connection tells of it, and every deadline is minutes away."""
    async with receiving(path) as (b, grant), either_engine(kind, path) as engine:
        async with under_way(engine, b, grant, ENDLESS, beyond=INFLIGHT) as push:
            b.kill()
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert isinstance(result.error, PeerGone) and result.error.peer == "b"
            assert result.nbytes < len(ENDLESS) * (8 << 20)


@pytest.mark.parametrize(("kind", "path", "silence_s", "mappable"), [
    ("loop", "shm", 0.1, True), ("loop", "shm", 60.0, True), ("loop", "shm", 60.0, False), ("loop", "tcp", 0.1, True),
    ("loop", "tcp", 60.0, True), ("blocking", "shm", 60.0, True),
    ("blocking", "tcp", 60.0, True)])
async def test_what_a_stopped_peer_did_not_take_in_time_is_never_covered(
        kind: str, path: str, silence_s: float, mappable: bool) -> None:
    """The source is changed as soon as the push has ended: a late byte would be one of another block.

    A short ``silence_s`` makes the sender drop the connection, a long one keep it. Memory that is not ``mappable``
    is staged.
    """
    async with receiving(path) as (b, grant), either_engine(kind, path, silence_s=silence_s) as engine:
        other = engine.register("other", NBYTES) if mappable else engine.register("other", memory=bytearray(NBYTES))
        source = other.buffer
        source[:] = noise(NBYTES, SEED)
        from_other = [Slice("other", item.offset, item.remote) for item in ENDLESS]
        assert (await engine.push(b.endpoint, from_other[:1], grant, timeout_s=PATIENCE_S)).ok, "connected beforehand"
        async with under_way(engine, b, grant, from_other, timeout_s=1.5, beyond=INFLIGHT) as push:
            await b.stop()
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert isinstance(result.error, TransferTimeout) and result.seconds >= 1.5
        source[:] = noise(NBYTES, SEED + 1)
        b.go_on()
        after = Range(segment="after", offset=0, length=NBYTES)
        await b.register("after", NBYTES)
        later = await engine.push(b.endpoint, [Slice("kv", 0, after)], await b.grant(NEXT, after), timeout_s=30)
        assert later.ok, "it came back: it is reached again"
        for (covered, found), sent in zip(await b.audit(OP, "kv", BLOCK), digests(noise(NBYTES, SEED), BLOCK),
                                          strict=True):
            assert not covered or found == sent


@pytest.mark.parametrize("path", PATHS)
async def test_a_push_to_a_stopped_peer_ends_by_a_deadline_in_proportion_to_its_size(path: str) -> None:
    async with receiving(path) as (b, grant), own_engine(
            path, min_timeout_s=0.2, min_bytes_per_s=64 << 20) as engine:
        assert (await engine.push(b.endpoint, blocks()[:1], grant, timeout_s=10)).ok
        await b.release(OP)
        grant = await b.grant(NEXT, ALL)
        await b.stop()
        for size, expected_s in [(4 << 20, 0.2625), (NBYTES, 0.45)]:
            assert engine.settings.timeout_s(size) == pytest.approx(expected_s)
            async with asyncio.timeout(PATIENCE_S):
                result = await engine.push(b.endpoint, blocks(size), grant)
            assert isinstance(result.error, TransferTimeout) and result.seconds >= expected_s


async def test_what_was_sent_to_a_stopped_peer_in_shared_memory_is_too_late_when_it_goes_on() -> None:
    async with receiving("shm") as (b, grant), own_engine("shm", silence_s=60.0) as engine:
        assert (await engine.push(b.endpoint, blocks()[:1], grant)).ok
        await b.stop()
        result = await engine.push(b.endpoint, blocks()[1:5], grant, timeout_s=0.3)
        assert [type(status.error) for status in result.slices] == [TransferTimeout] * 4
        b.go_on()
        assert (await engine.push(b.endpoint, blocks()[5:6], grant)).ok
        covered = [covered for covered, _ in await b.audit(OP, "kv", BLOCK)]
        assert covered == [True] + [False] * 4 + [True] + [False] * (len(covered) - 6)


@pytest.mark.parametrize("path", PATHS)
async def test_release_waits_no_longer_than_the_deadline_of_a_sender_that_is_stopped_in_the_middle(path: str) -> None:
    """The receiver is here, the sender over there; afterwards nothing of it arrives any more."""
    async with peer("a", only(path)) as a, own_engine(path) as engine:
        await a.register("kv", NBYTES, SEED + 1)
        landing = engine.register("landing", NBYTES).buffer
        grant = engine.grant(OP, [Range(segment="landing", offset=0, length=NBYTES)], ttl_s=60)
        slices = [Slice("kv", item.offset, msgspec.structs.replace(item.remote, segment="landing")) for item in ENDLESS]
        await a.start_push(engine.endpoint, slices, grant, timeout_s=3.0)
        await eventually(lambda: engine.received_bytes(OP))
        await a.stop()
        await asyncio.wait_for(engine.release(OP), PATIENCE_S)
        landing[:] = noise(NBYTES, SEED)
        a.go_on()
        assert (await a.end_push()).error in ("deadline", "grant", "peer")
        assert bytes(landing) == noise(NBYTES, SEED)


@pytest.mark.parametrize("path", PATHS)
async def test_a_peer_restarted_ten_times_under_load_is_found_again_and_its_former_lives_are_not(path: str) -> None:
    async with own_engine(path) as engine:
        targets: list[tuple[Endpoint, Grant]] = []
        over, progress = asyncio.Event(), asyncio.Event()
        arrived: Counter[str] = Counter()
        errors: Counter[str] = Counter()

        async def load() -> None:
            """Pushes to the life that is known best, whether it is still one or not."""
            while not over.is_set():
                if not targets:
                    await asyncio.sleep(0)
                    continue
                endpoint, grant = targets[-1]
                result = await engine.push(endpoint, blocks()[:8], grant, timeout_s=20)
                if result.ok:
                    arrived[endpoint.incarnation] += 1
                    progress.set()
                elif result.error is not None:
                    errors[result.error.code] += 1
                    await asyncio.sleep(0.01)  # the back-off of whoever asks again

        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(load())
            for life in range(10):
                async with receiving(path, incarnation=str(life)) as (b, grant):
                    targets.append((b.endpoint, grant))
                    if life:
                        await _refuses_its_former_life(engine, b, *targets[-2])
                    enough = arrived[b.endpoint.incarnation] + 5
                    while arrived[b.endpoint.incarnation] < enough:
                        await asyncio.wait_for(progress.wait(), PATIENCE_S)
                        progress.clear()
                    b.kill()
                    await b.buried()
            over.set()
        assert set(errors) == {"peer"}, "a death is told as one, and nothing else"


async def _refuses_its_former_life(engine: TransferEngine, b: Peer, former: Endpoint, former_grant: Grant) -> None:
    life, stale = b.endpoint.incarnation, msgspec.structs.replace(b.endpoint, incarnation=former.incarnation)
    refused = await engine.push(stale, blocks()[:1], former_grant, timeout_s=10)
    assert isinstance(refused.error, PeerGone)
    assert f"b (incarnation {life}) answers there, not b (incarnation {former.incarnation})" in str(refused.error)
    refused = await engine.push(b.endpoint, blocks()[:1], former_grant, timeout_s=10)
    assert isinstance(refused.error, GrantRefused) and "incarnation" in str(refused.error)
    gone = await engine.push(former, blocks()[:1], former_grant, timeout_s=10)
    assert isinstance(gone.error, PeerGone)


@pytest.mark.parametrize("path", PATHS)
async def test_a_push_to_a_former_life_does_not_disturb_those_to_the_current_one(path: str) -> None:
    async with receiving(path) as (b, grant), own_engine(path) as engine:
        former = msgspec.structs.replace(b.endpoint, incarnation=Incarnation("0"))
        async with under_way(engine, b, grant, ENDLESS[:200], beyond=INFLIGHT) as push:
            assert isinstance((await engine.push(former, blocks()[:1], grant, timeout_s=10)).error, PeerGone)
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert result.ok, result.error


# -- paths and addresses that break --------------------------------------------------------------------------------


async def test_when_shared_memory_breaks_in_the_middle_the_rest_goes_by_tcp() -> None:
    async with receiving("shm", "tcp") as (b, grant), own_engine("shm", "tcp", silence_s=60.0) as engine:
        async with under_way(engine, b, grant, ENDLESS[:200], beyond=INFLIGHT) as push:
            await b.stop()  # the push stands still while its path is taken away
            os.unlink(b.endpoint.shm)
            assert cut_connections(b.endpoint.shm) > 0
            b.go_on()
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert result.ok and result.path == "shm+tcp" and result.nbytes == 200 * (8 << 20)
            assert engine.statistics().failovers == {("shm", "tcp"): 1}
            assert await b.audit(OP, "kv", BLOCK) == [
                (True, digest) for digest in digests(noise(NBYTES, SEED), BLOCK)]


async def test_a_connection_that_breaks_is_made_again_within_the_push() -> None:
    async with receiving("tcp") as (b, grant), own_engine("tcp", silence_s=60.0) as engine:
        assert (await engine.push(b.endpoint, blocks()[:1], grant)).ok
        async with under_way(engine, b, grant, ENDLESS[:200], beyond=INFLIGHT) as push:
            await b.stop()
            assert cut_connections(b.endpoint.tcp) > 0
            b.go_on()
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert result.ok and result.path == "tcp"


@pytest.mark.parametrize("path", PATHS)
async def test_another_worker_on_a_reused_address_is_noticed_and_both_are_named(path: str) -> None:
    async with receiving(path, worker="c") as (c, _), own_engine(path) as engine:
        async with receiving(path) as (b, grant):
            assert (await engine.push(b.endpoint, blocks()[:1], grant)).ok
        reused = msgspec.structs.replace(b.endpoint, shm=c.endpoint.shm, tcp=c.endpoint.tcp)
        result = await engine.push(reused, blocks()[:1], grant)
        assert isinstance(result.error, PeerGone)
        assert "c (incarnation 1) answers there, not b (incarnation 1)" in str(result.error)
        assert await c.received(OP) == 0


async def test_another_program_on_a_reused_port_is_noticed() -> None:
    async with own_engine("tcp") as engine:
        async with receiving("tcp") as (b, grant):
            pass
        with socket.create_server(split_address(b.endpoint.tcp)) as listener:
            answering = threading.Thread(target=_answer_as_a_web_server, args=(listener,))
            answering.start()
            result = await engine.push(b.endpoint, blocks()[:1], grant, timeout_s=10)
            listener.shutdown(socket.SHUT_RDWR)
            answering.join()
        assert isinstance(result.error, PeerGone) and "magic" in str(result.error)


def _answer_as_a_web_server(listener: socket.socket) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # shut down
            return
        with sock:
            sock.recv(4096)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


# -- memory that goes away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_closed_in_the_middle_is_a_peer_gone_and_its_process_lives(path: str) -> None:
    async with receiving(path) as (b, grant), own_engine(path) as engine:
        async with under_way(engine, b, grant, ENDLESS, beyond=INFLIGHT) as push:
            await asyncio.wait_for(b.close_engine(), PATIENCE_S)
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert isinstance(result.error, PeerGone)
            assert await b.alive()


@pytest.mark.parametrize("path", PATHS)
async def test_memory_withdrawn_in_the_middle_is_not_written_any_more(path: str) -> None:
    async with receiving(path) as (b, grant), own_engine(path) as engine:
        async with under_way(engine, b, grant, ENDLESS[:200], beyond=INFLIGHT) as push:
            await asyncio.wait_for(b.release(OP), PATIENCE_S)
            await b.fill("kv", SEED + 1)
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert isinstance(result.error, GrantRefused)
        assert await b.audit(OP, "kv", BLOCK) == [
            (False, digest) for digest in digests(noise(NBYTES, SEED + 1), BLOCK)]
        assert (await engine.push(b.endpoint, blocks()[:1], await b.grant(NEXT, ALL))).ok


@pytest.mark.parametrize("path", PATHS)
async def test_memory_unregistered_in_the_middle_ends_the_push_and_its_grants_are_void(path: str) -> None:
    async with receiving(path) as (b, grant), own_engine(path) as engine:
        async with under_way(engine, b, grant, ENDLESS[:200], beyond=INFLIGHT) as push:
            await asyncio.wait_for(b.unregister("kv"), PATIENCE_S)
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert isinstance(result.error, (GrantRefused, PeerGone))
        await b.register("kv", NBYTES)
        result = await engine.push(b.endpoint, blocks()[:1], grant, timeout_s=10)
        assert isinstance(result.error, GrantRefused), "the memory is another one, for all it has the same name"
        fresh = await b.grant(NEXT, ALL)
        assert (await engine.push(b.endpoint, blocks()[:1], fresh, timeout_s=10)).ok
        zeros = digests(bytes(BLOCK), BLOCK)
        assert [digest for _, digest in (await b.audit(NEXT, "kv", BLOCK))[1:]] == zeros * (NBYTES // BLOCK - 1)


@pytest.mark.parametrize("path", PATHS)
async def test_unregistering_what_is_pushed_from_waits_for_its_readers_and_for_nobody_elses(path: str) -> None:
    async with receiving(path) as (b, grant), own_engine(path) as engine:
        await b.register("more", NBYTES)
        into_more = Range(segment="more", offset=0, length=NBYTES)
        more = await b.grant(NEXT, into_more)
        source = engine.register("more", NBYTES).buffer
        source[:] = noise(NBYTES, SEED)
        async with under_way(engine, b, grant, ENDLESS[:100], beyond=INFLIGHT) as push:
            other = engine.push(b.endpoint, [Slice("more", 0, into_more)] * 100, more, timeout_s=60)
            await eventually(lambda: b.received(NEXT), timeout_s=20)
            await asyncio.wait_for(engine.unregister("more"), PATIENCE_S)
            assert other.done
            source[:] = noise(NBYTES, SEED + 1)
            result = await asyncio.wait_for(push, PATIENCE_S)
            assert result.ok, "a push from other memory goes on"
        sent = digests(noise(NBYTES, SEED), BLOCK)
        for (covered, found), digest in zip(await b.audit(NEXT, "more", BLOCK), sent, strict=True):
            assert not covered or found == digest


async def test_bytes_of_a_push_that_failed_in_shared_memory_are_not_fetched_later() -> None:
    """The receiver is told where the bytes lie; by the time it looks, the sender has taken them back."""
    async with receiving("shm") as (b, grant), own_engine("shm", silence_s=60.0) as engine:
        source = engine.register("other", NBYTES).buffer
        source[:] = noise(NBYTES, SEED)
        from_other = [Slice("other", item.offset, item.remote) for item in blocks()]
        assert (await engine.push(b.endpoint, from_other[:1], grant)).ok
        await b.stop()
        push = engine.push(b.endpoint, from_other[1:9], grant, timeout_s=60)
        await eventually(lambda: metrics.TRANSFER_IN_FLIGHT_BYTES._value.get() > 0)
        os.unlink(b.endpoint.shm)
        assert cut_connections(b.endpoint.shm) > 0
        assert isinstance((await push).error, PeerGone)
        source[:] = noise(NBYTES, SEED + 1)
        b.go_on()
        await eventually(lambda: _has_no_connection(b))
        covered = [covered for covered, _ in await b.audit(OP, "kv", BLOCK)]
        assert covered == [True] + [False] * (NBYTES // BLOCK - 1)


async def _has_no_connection(b: Peer) -> bool:
    return (await b.counters()).connections == 0


# -- bytes that change on their way --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_corrupted_bytes_are_noticed_and_not_covered(path: str) -> None:
    async with receiving(path) as (b, grant), own_engine(path, checksums="on", corrupt_every=3) as engine:
        result = await engine.push(b.endpoint, blocks()[:7], grant, timeout_s=20)
        wrong = [isinstance(status.error, ChecksumMismatch) for status in result.slices]
        assert wrong == [False, False, True, False, False, True, False]
        assert [covered for covered, _ in (await b.audit(OP, "kv", BLOCK))[:7]] == [not bad for bad in wrong]
        assert (await b.counters()).corrupt_spans == 2
        again = [(await engine.push(b.endpoint, blocks()[2:3], grant, timeout_s=20)).ok for _ in range(2)]
        assert any(again), "they go again, and no two in a row are corrupted"


# -- grants ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_a_grant_that_does_not_stand_moves_nothing(path: str) -> None:
    half = Range(segment="kv", offset=0, length=NBYTES // 2)
    async with peer("b", only(path)) as b, own_engine(path) as engine:
        await b.register("kv", NBYTES)
        await b.register("secret", BLOCK)
        released = await b.grant(OP, half)
        await b.release(OP)
        grant = await b.grant(OP, half)
        expired = await b.grant(NEXT, Range(segment="kv", offset=NBYTES // 2, length=BLOCK), ttl_s=1e-3)
        wider = msgspec.structs.replace(grant, ranges=[ALL], expires_at_s=grant.expires_at_s + 1e6)
        secret = Slice("kv", 0, Range(segment="secret", offset=0, length=BLOCK))
        inside = blocks()[:2]
        for_another = await b.grant(OperationId("theirs"), Range(segment="secret", offset=0, length=BLOCK), to="c")
        cases = {
            "forged": (msgspec.structs.replace(grant, token=bytes(32)), inside),
            "of another operation": (msgspec.structs.replace(grant, operation=NEXT), inside),
            "of another life": (msgspec.structs.replace(grant, incarnation=Incarnation("0")), inside),
            "for another peer": (for_another, [secret]),
            "for another peer, relabelled": (msgspec.structs.replace(for_another, peer=WorkerId("a")), [secret]),
            "replayed after its release": (released, inside),
            "expired": (msgspec.structs.replace(expired, expires_at_s=grant.expires_at_s),
                        blocks()[NBYTES // 2 // BLOCK:][:1]),
            "out of range": (wider, blocks()[NBYTES // 2 // BLOCK:]),
            "half out of range": (wider, [Slice("kv", 0, ALL)]),
            "beyond the segment": (wider, [Slice("kv", 0, Range(segment="kv", offset=NBYTES, length=BLOCK))]),
            "for another segment": (wider, [secret]),
            "for no segment": (wider, [Slice("kv", 0, Range(segment="none", offset=0, length=BLOCK))]),
        }
        for what, (spoilt, slices) in cases.items():
            result = await engine.push(b.endpoint, slices, spoilt, timeout_s=10)
            assert isinstance(result.error, GrantRefused), (what, result.error)
            assert result.error.peer == "b" and result.error.nbytes == slices[0].remote.length
            assert result.nbytes == 0 or what == "half out of range", what
        untouched = [(False, digest) for digest in digests(bytes(BLOCK), BLOCK)]
        assert (await b.audit(NEXT, "kv", BLOCK))[NBYTES // 2 // BLOCK:] == untouched * (NBYTES // 2 // BLOCK)
        assert await b.audit(OP, "secret", BLOCK) == untouched
        assert (await b.counters()).refused_claims >= len(cases)
        assert (await engine.push(b.endpoint, inside, grant)).ok, "refusals do not spoil the connection"


# -- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_a_slow_receiver_costs_the_sender_no_memory(path: str) -> None:
    async with receiving(path) as (b, grant), own_engine(path, max_inflight=4 << 20, silence_s=60.0) as engine:
        assert (await engine.push(b.endpoint, blocks()[:1], grant)).ok
        await b.stop()
        before = _own_memory_bytes()

        async def push() -> Any:
            return await engine.push(b.endpoint, blocks(), grant, timeout_s=0.8)

        pushes = [asyncio.create_task(push()) for _ in range(100)]
        most_in_flight = most_memory = 0
        while pending := [task for task in pushes if not task.done()]:
            await asyncio.wait(pending, timeout=0.02)
            most_in_flight = max(most_in_flight, int(metrics.TRANSFER_IN_FLIGHT_BYTES._value.get()))
            most_memory = max(most_memory, _own_memory_bytes())
        assert {type(task.result().error) for task in pushes} == {TransferTimeout}
        assert 0 < most_in_flight <= max(4 << 20, BATCH_BYTES)
        assert most_memory - before < 48 << 20, "1.6 GB wanted to go"
        b.go_on()
        after = await engine.push(b.endpoint, blocks(), grant)
        assert after.ok, after.error


def _own_memory_bytes() -> int:
    usage = psutil.Process().memory_info()
    return int(usage.rss - usage.shared)
