"""The compiled part of the transfer engine: copies, and waits that do not sleep."""

from __future__ import annotations

import array
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.transfer import TransferSettings, frames, native
from shared.transfer.wire import Connection

pytestmark = pytest.mark.skipif(bool(native.WHY_NOT), reason=f"there is no compiled part: {native.WHY_NOT}")

LONG_US = 600e6
"""Whoever looks so long and ends sooner was not asleep, nor waited for its time to end."""


@pytest.fixture
def part() -> Iterator[native.Native]:
    made = native.Native(100.0)
    made.start("test")
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def stream(sock: socket.socket, spin_us: float = 0.0) -> Any:
    return native._native.Stream(sock.fileno(), spin_us)


def test_it_is_there_unless_it_is_switched_off() -> None:
    assert native.find_native(TransferSettings()) is not None
    assert native.find_native(TransferSettings(native=False)) is None


# -- copies ---------------------------------------------------------------------------------------------------

SOURCE = np.random.default_rng(5).integers(0, 256, 5 << 20, dtype=np.uint8)


def parts_of(length: int, count: int, stride: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """bool[n]: which bytes belong to a part."""
    inside = np.zeros((count - 1) * stride + length, dtype=bool)
    for i in range(count):
        inside[i * stride:i * stride + length] = True
    return inside


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 4200), st.integers(0, 70), st.integers(1, 200_000), st.integers(1, 20), st.integers(0, 9000))
def test_parts_are_copied_and_nothing_else_is_touched(offset: int, shift: int, length: int, count: int,
                                                      gap: int) -> None:
    inside = parts_of(length, count, length + gap)
    nbytes = len(inside)
    memory = np.zeros(offset + nbytes + 64, dtype=np.uint8)
    copied = native.Native(0.0)
    copied.copy(memory[offset:offset + nbytes], SOURCE[shift:shift + nbytes], length, count, length + gap)
    assert not memory[:offset].any() and not memory[offset + nbytes:].any()
    assert np.array_equal(memory[offset:offset + nbytes], np.where(inside, SOURCE[shift:shift + nbytes], 0))


def test_many_threads_share_the_one_that_helps(part: native.Native) -> None:
    nbytes = 3 << 20
    wrong: list[int] = []

    def copy_often(shift: int) -> None:
        memory = np.empty(nbytes, dtype=np.uint8)
        for _ in range(20):
            memory[:] = 0
            part.copy(memory, SOURCE[shift:shift + nbytes], nbytes, 1, 0)
            if not np.array_equal(memory, SOURCE[shift:shift + nbytes]):
                wrong.append(shift)

    threads = [threading.Thread(target=copy_often, args=(shift,)) for shift in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_copies_go_on_without_the_thread(part: native.Native) -> None:
    part.close()
    part.close()
    memory = np.zeros(len(SOURCE), dtype=np.uint8)
    part.copy(memory, SOURCE, len(SOURCE), 1, 0)
    assert np.array_equal(memory, SOURCE)


@pytest.mark.parametrize(("length", "count", "stride"), [
    (101, 1, 0), (10, 11, 10), (10, 2, 91), (10, 2, 9), (10, 2, 0), (-1, 1, 0), (10, -1, 10), (10, 2**62, 10),
    (10, 2, 2**62), (2**62, 2, 2**62)])
def test_parts_that_do_not_fit_are_refused(part: native.Native, length: int, count: int, stride: int) -> None:
    memory = np.zeros(100, dtype=np.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        part.copy(memory, SOURCE, length, count, stride)
    assert not memory.any()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 400_000)), max_size=12), st.randoms())
def test_what_lies_at_places_is_copied_and_nothing_else_is_touched(gaps: list[tuple[int, int]], chance: Any) -> None:
    places: list[tuple[int, int, int]] = []
    at = 0
    for gap, length in gaps:
        at += gap
        places.append((at, chance.randrange(len(SOURCE) - length), length))
        at += length
    memory, wanted = np.zeros(at + 64, dtype=np.uint8), np.zeros(at + 64, dtype=np.uint8)
    for to, source, length in places:
        wanted[to:to + length] = SOURCE[source:source + length]
    chance.shuffle(places)
    copied = native.Native(0.0)
    copied.begin(memory, SOURCE, places)
    copied.finish()
    copied.finish()
    assert np.array_equal(memory, wanted)


FORKS = """
import os, select, threading
from shared.transfer.native import Native

nbytes = 2 << 20
part, over = Native(0.0), threading.Event()
part.start("test")

def keep_the_lock_busy():
    source, target = bytes(nbytes), bytearray(nbytes)
    while not over.is_set():
        part.copy(target, source, nbytes, 1, 0)

busy = threading.Thread(target=keep_the_lock_busy)
busy.start()
source = os.urandom(nbytes)
for _ in range(6):
    child = os.fork()
    if not child:
        target = bytearray(nbytes)
        part.copy(target, source, nbytes, 1, 0)
        part.close()
        os._exit(target != source)
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    assert ended.poll(60_000), "the child hangs"
    assert os.waitpid(child, 0)[1] == 0
over.set()
busy.join()
part.close()
"""


def test_a_fork_copies_without_the_thread_it_does_not_have() -> None:
    """Whatever that thread held of a lock when it was forked."""
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], capture_output=True, text=True, timeout=120,
                          check=False)
    assert said.returncode == 0, said.stderr


def test_a_copy_that_was_begun_leaves_others_to_themselves(part: native.Native) -> None:
    nbytes = 2 << 20
    first, second = np.zeros(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
    for _ in range(20):
        first[:] = second[:] = 0
        part.begin(first, SOURCE, [(0, 7, nbytes)])
        part.copy(second, SOURCE, nbytes, 1, 0)
        assert np.array_equal(second, SOURCE[:nbytes])
        with pytest.raises(RuntimeError, match="not finished"):
            part.begin(second, SOURCE, [(0, 0, 1)])
        part.finish()
        assert np.array_equal(first, SOURCE[7:nbytes + 7])
    part.close()
    first[:] = 0
    part.begin(first, SOURCE, [(0, 7, nbytes)])
    part.finish()
    assert np.array_equal(first, SOURCE[7:nbytes + 7])


@pytest.mark.parametrize("place", [(0, 0, 101), (91, 0, 10), (-1, 0, 10), (0, -1, 10), (0, 0, -1), (0, 0, 0),
                                   (0, len(SOURCE) - 9, 10), (2**62, 0, 10), (0, 2**62, 10), (0, 0, 2**62)])
def test_places_that_are_not_in_both_are_refused(part: native.Native, place: tuple[int, int, int]) -> None:
    memory = np.zeros(100, dtype=np.uint8)
    with pytest.raises(ValueError, match="does not lie in both"):
        part.begin(memory, SOURCE, [(0, 0, 5), place])
    part.finish()
    assert not memory.any()


# -- streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spin_us", [0.0, LONG_US])
def test_what_is_there_is_received_and_all_of_it_when_asked(pair: Any, spin_us: float) -> None:
    left, right = pair
    hears, room = stream(right, spin_us), bytearray(10)
    left.send(b"abc")
    assert hears.receive(room, 0) == 3 and room[:3] == b"abc"
    writer = threading.Thread(target=lambda: [left.send(b"defgh"), left.send(b"ijklm")])
    writer.start()
    assert hears.receive(room, socket.MSG_WAITALL) == 10 and room == b"defghijklm"
    writer.join()
    with pytest.raises(BlockingIOError):
        hears.receive(room, socket.MSG_DONTWAIT)
    left.send(b"end")
    left.close()
    assert hears.receive(room, socket.MSG_WAITALL) == 3
    assert hears.receive(room, 0) == 0


@pytest.mark.parametrize("spin_us", [0.0, LONG_US])
def test_a_shutdown_wakes_whoever_waits(pair: Any, spin_us: float) -> None:
    _, right = pair
    heard: list[int] = []
    waiter = threading.Thread(target=lambda: heard.append(stream(right, spin_us).receive(bytearray(1), 0)))
    waiter.daemon = True
    waiter.start()
    right.shutdown(socket.SHUT_RDWR)
    waiter.join(60)
    assert heard == [0], "it would have looked for ten minutes"


def test_the_kernels_patience_ends_a_wait(pair: Any) -> None:
    left, right = pair
    for sock in pair:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 10_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 10_000))
    with pytest.raises(BlockingIOError):
        stream(right, 50.0).receive(bytearray(1), 0)
    with pytest.raises(BlockingIOError):
        stream(left).exchange(b"head", bytes(8 << 20), 0, 8 << 20, bytearray(9), b"", time.monotonic() + 60)


def test_descriptors_come_along(pair: Any, tmp_path: Any) -> None:
    left, right = pair
    with open(tmp_path / "file", "w") as file:
        left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 3))])
    came: list[int] = []
    assert stream(right).receive(bytearray(9), socket.MSG_WAITALL, came) == 1
    assert len(came) == 3 and all(os.path.samestat(os.fstat(fd), os.stat(tmp_path / "file")) for fd in came)
    for fd in came:
        os.close(fd)


@pytest.mark.parametrize("nbytes", [0, 100, 3 << 20])
def test_an_exchange_sends_all_and_hears_the_answer(pair: Any, nbytes: int) -> None:
    left, right = pair
    heard = bytearray()

    def answer() -> None:
        while len(heard) < 4 + nbytes:
            heard.extend(right.recv(1 << 20))
        right.send(b"yes")

    answering = threading.Thread(target=answer)
    answering.start()
    room = bytearray(9)
    assert stream(left, 100.0).exchange(b"head", SOURCE, 1, nbytes, room, b"nay", time.monotonic() + 60) == 3
    answering.join(10)
    assert room[:3] == b"yes" and heard == b"head" + SOURCE[1:1 + nbytes].tobytes()


def test_an_exchange_knows_the_wanted_answer(pair: Any) -> None:
    left, right = pair
    room = bytearray(9)
    for answer, heard in ((b"yes", None), (b"yet", 3), (b"ye", 2), (b"yes!", 4)):
        right.send(answer)
        assert stream(left).exchange(b"head", b"", 0, 0, room, b"yes", time.monotonic() + 60) == heard
    assert right.recv(99) == b"head" * 4


@pytest.mark.parametrize(("start", "nbytes"), [(-1, 1), (0, -1), (0, 11), (10, 1), (11, 0), (2**62, 2**62)])
def test_an_exchange_sends_nothing_that_is_not_there(pair: Any, start: int, nbytes: int) -> None:
    left, right = pair
    with pytest.raises(ValueError, match="does not have"):
        stream(left).exchange(b"head", bytes(10), start, nbytes, bytearray(9), b"", time.monotonic() + 60)
    left.close()
    assert right.recv(99) == b""


def test_an_exchange_with_a_slow_reader_ends_at_its_deadline() -> None:
    """A kernel that got something out by the end of its patience finds no fault with that."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as left:
        right, _ = server.accept()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 100_000))
        with right, pytest.raises(BlockingIOError):
            stream(left).exchange(b"head", bytes(64 << 20), 0, 64 << 20, bytearray(9), b"", time.monotonic() + 0.05)


def test_an_exchange_hears_an_answer_by_its_deadline_or_not_at_all(pair: Any) -> None:
    left, _ = pair
    started_s = time.monotonic()
    with pytest.raises(BlockingIOError):
        stream(left, 50.0).exchange(b"head", b"", 0, 0, bytearray(9), b"", started_s + 0.05)
    assert time.monotonic() - started_s >= 0.05


def test_a_deadline_in_the_far_future_is_one(pair: Any) -> None:
    left, right = pair
    answering = threading.Thread(target=lambda: right.send(b"yes" if right.recv(99) == b"head" else b"no"))
    answering.start()
    room = bytearray(9)
    assert stream(left).exchange(b"head", b"", 0, 0, room, b"", 1e12) == 3 and room[:3] == b"yes"
    answering.join(10)


def test_an_exchange_with_nobody_fails(pair: Any) -> None:
    left, right = pair
    right.close()
    with pytest.raises(OSError):
        stream(left).exchange(b"head", SOURCE, 0, len(SOURCE), bytearray(9), b"", time.monotonic() + 60)


# -- frames like the one before ---------------------------------------------------------------------------------

EDGES = [0, 1, frames.MAX_TIMEOUT_MS, frames.MAX_TIMEOUT_MS + 1, frames.MAX_SPAN_BYTES, frames.MAX_SPAN_BYTES + 1]
NUMBERS = st.sampled_from(EDGES) | st.integers(0, 2**32 - 1)
WIDE = st.sampled_from([0, 2**53 - 1, 2**53, 2**64 - 1]) | st.integers(0, 2**64 - 1)
FORM = frames.Form("op", "1", b"t" * 32, "kv", None)
FIRST = FORM.write(7, 600, 4096, 65536)


def echo_of_first() -> frames.Echo:
    echo = frames.Echo.of(FIRST, read(FIRST))
    assert echo is not None
    return echo


def read(frame: bytes) -> frames.Body:
    kind, length = frames.parse_header(frame)
    assert frames.HEADER_BYTES + length == len(frame)
    return frames.decode(kind, frame[frames.HEADER_BYTES:])


@given(WIDE, NUMBERS, WIDE, NUMBERS)
def test_an_echo_reads_what_decode_reads_and_passes_nothing_else(number: int, timeout_ms: int, offset: int,
                                                                 length: int) -> None:
    frame, echo = FORM.write(number, timeout_ms, offset, length), echo_of_first()
    found = native._native.differ(b"ab" + frame + b"c", 2, 3 + len(frame), echo.frame, echo.places)
    assert found == (number, timeout_ms, offset, length)
    try:
        expected: frames.Body | None = read(frame)
    except frames.FrameError:
        expected = None
    assert echo.decode(*found) == expected


@given(st.integers(0, len(FIRST) - 1), st.integers(1, 255))
def test_a_frame_that_differs_elsewhere_is_no_echo(at: int, flip: int) -> None:
    frame, echo = bytearray(FIRST), echo_of_first()
    frame[at] ^= flip
    found = native._native.differ(frame, 0, len(frame), echo.frame, echo.places)
    assert (found is None) != any(place <= at < place + width for place, width in echo.places)


@pytest.mark.parametrize(("start", "stop"), [(0, len(FIRST) - 1), (1, len(FIRST)), (-1, len(FIRST)), (9, 3),
                                             (0, len(FIRST) + 1)])
def test_less_than_a_frame_is_no_echo(start: int, stop: int) -> None:
    echo = echo_of_first()
    assert native._native.differ(FIRST, start, stop, echo.frame, echo.places) is None


@pytest.mark.parametrize("places", [((len(FIRST) - 3, 4),), ((5, 9),), ((9, 4), (12, 4)), ((-1, 2),), ((1, -1),),
                                    ((2**62, 8),)])
def test_places_lie_in_the_frame(places: Any) -> None:
    with pytest.raises(ValueError, match="not in the frame"):
        native._native.differ(FIRST, 0, len(FIRST), FIRST, places)


def test_claims_of_other_shapes_have_no_echo() -> None:
    for write in (frames.Write(7, "op", "1", b"t", 600, [frames.Span("kv", 0, 9)], None, []),
                  frames.Write(7, "op", "1", b"t", 600, [], None, []), frames.Ack(7)):
        assert frames.Echo.of(frames.encode(write), write) is None


def test_a_connection_reads_the_same_with_and_without_echoes(part: native.Native, pair: Any) -> None:
    left, right = pair
    reads = Connection(right)
    reads.hasten(part)
    other = frames.Form("op-2", "1", b"u" * 32, "kv", None)
    sent = [FIRST, FORM.write(8, 9, 0, 1), other.write(9, 9, 0, 1), FORM.write(10, 9, 5, 6),
            frames.encode(frames.Ack(3)), FORM.write(11, 600, 4096, 65536), FORM.write(12, 1, 2, 3)]
    left.sendall(b"".join(sent))
    assert [reads.receive() for _ in sent] == [read(frame) for frame in sent]
    left.sendall(sent[-1][:50])
    threading.Timer(0.01, left.sendall, (sent[-1][50:] + FORM.write(2**60, 1, 2, 3),)).start()
    assert reads.receive() == read(sent[-1])
    with pytest.raises(frames.FrameError):
        reads.receive()
