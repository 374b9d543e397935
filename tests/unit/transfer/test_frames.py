"""The wire format: what is read back, and what is refused before it costs anything."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.transfer import frames
from shared.transfer.frames import HEADER_BYTES, FrameError, Kind, Source, Span

SPANS = [Span("kv", 0, 10), Span("kv", 4096, 20)]
PARTS = [Span("kv", 0, 10, 3, 64), Span("kv", 4096, 20)]
BODIES = [
    frames.Hello("a", "b", "i"),
    frames.Welcome("b", "i"),
    frames.Write(1, "op", "i", b"t" * 32, 500, SPANS, b"note", [2**64 - 1, 0]),
    frames.Copy(2, "op", "i", b"t" * 32, 500, PARTS, None, [], [Source(1, 0), Source(2, 8)], [2], 1.5),
    frames.Detach(2),
    frames.Share(2, b"handle"),
    frames.Ack(2, "no", [0, 1]),
    frames.Cards([frames.Card(bytes(16), 7, 5)]),
    frames.Connect(1, 0, 2**24 - 1, 5, frames.Card(bytes(range(16)), 0, 1)),
    frames.Connected(1, 17, 0, "no"),
    frames.Begin(3, "op", "i", b"t" * 32, 500, SPANS, None, [], 1, 2),
    frames.Keys(1, "kv", 0x7F00_0000_0000, 4096, 2**32 - 1),
    frames.Go(3),
    frames.Abort(3),
    frames.Down(1, 17),
]


NUMBERS = st.integers(0, 2**53 - 1)
NAMES = st.text(max_size=300).filter(lambda name: len(name) <= frames.MAX_NAME)


def read(data: bytes) -> frames.Body:
    kind, length = frames.parse_header(data[:HEADER_BYTES])
    assert len(data) == HEADER_BYTES + length
    return frames.decode(kind, data[HEADER_BYTES:])


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_round_trip(body: frames.Body) -> None:
    assert read(frames.encode(body)) == body


def test_every_kind_has_a_body() -> None:
    assert set(frames.BODIES) == set(Kind)
    assert {type(body) for body in BODIES} == set(frames.BODIES.values())


@pytest.mark.parametrize(("header", "why"), [
    (struct.pack("!4sBBHI", b"HTTP", 1, 1, 0, 0), "magic"),
    (struct.pack("!4sBBHI", b"MBTX", 9, 1, 0, 0), "version"),
    (struct.pack("!4sBBHI", b"MBTX", 2, 77, 0, 0), "kind 77"),
    (struct.pack("!4sBBHI", b"MBTX", 2, 1, 0, 2**32 - 1), "body of 4294967295 bytes exceeds"),
])
def test_bad_headers_are_refused_by_what_is_wrong_with_them(header: bytes, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        frames.parse_header(header)


def write_with(spans: object, checksums: object = ()) -> bytes:
    return msgspec.msgpack.encode([1, "op", "i", b"t", 500, spans, None, list(checksums)])  # type: ignore[call-overload]


@pytest.mark.parametrize("data", [
    write_with([["kv", 0, 1]] * (frames.MAX_SPANS + 1)),
    write_with([["kv", -1, 1]]),
    write_with([["kv", 0, 0]]),
    write_with([["kv", 0, frames.MAX_SPAN_BYTES + 1]]),
    write_with([["kv", 0, frames.MAX_SPAN_BYTES], ["kv", 0, 1]]),
    write_with([["k" * 257, 0, 1]]),
    write_with([["kv", 0, 1]], checksums=[1, 2]),
    write_with([["kv", 0, 2**63]]),
    write_with("kv"),
    b"",
    b"\x91" * 100_000,
], ids=["too many spans", "negative", "empty span", "huge span", "huge payload", "long name",
        "checksums do not fit", "beyond memory", "not a list", "nothing", "nested"])
def test_bodies_out_of_bounds_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        frames.decode(Kind.WRITE, data)


@pytest.mark.parametrize(("kind", "span", "checksums"), [
    (Kind.WRITE, ["kv", 0, 10, 2, 64], []), (Kind.COPY, ["kv", 0, 10, 2, 9], []),
    (Kind.COPY, ["kv", 0, 10, 2, 64], [1, 2]), (Kind.COPY, ["kv", 0, 1 << 20, 65, 1 << 20], []),
    (Kind.COPY, ["kv", 0, 10, 0, 64], []), (Kind.COPY, ["kv", 0, 10, frames.MAX_PARTS + 1, 64], []),
], ids=["in a write", "overlapping", "a checksum each", "huge together", "none", "too many"])
def test_parts_of_a_span_have_bounds(kind: Kind, span: list[object], checksums: list[int]) -> None:
    tail = [] if kind is Kind.WRITE else [[[1, 0]], [], 0.0]
    with pytest.raises(FrameError):
        frames.decode(kind, msgspec.msgpack.encode([1, "op", "i", b"t", 500, [span], None, checksums, *tail]))


@pytest.mark.parametrize("more", [0, 1])
def test_the_parts_of_all_spans_have_a_bound(more: int) -> None:
    full = frames.MAX_CLAIM_PARTS // frames.MAX_PARTS
    spans = [["kv", 0, 1, frames.MAX_PARTS, 2]] * full + [["kv", 0, 1]] * more
    body = [1, "op", "i", b"t", 500, spans, None, [], [[1, 0]] * len(spans), [], 0.0]
    if more:
        with pytest.raises(FrameError, match="parts of spans exceed"):
            frames.decode(Kind.COPY, msgspec.msgpack.encode(body))
    else:
        assert isinstance(frames.decode(Kind.COPY, msgspec.msgpack.encode(body)), frames.Copy)


def test_a_copy_names_a_source_for_each_span() -> None:
    data = msgspec.msgpack.encode([1, "op", "i", b"t", 500, [["kv", 0, 1]], None, [], [], [], 0.0])
    with pytest.raises(FrameError, match="0 sources for 1 spans"):
        frames.decode(Kind.COPY, data)


@given(st.binary(max_size=200), st.sampled_from(list(Kind)))
def test_garbage_bodies_raise_nothing_but_frame_errors(data: bytes, kind: Kind) -> None:
    try:
        frames.decode(kind, data)
    except FrameError:
        pass


@given(st.sampled_from(BODIES), st.data())
def test_a_flipped_byte_is_read_or_refused_but_never_crashes(body: frames.Body, data: st.DataObject) -> None:
    frame = bytearray(frames.encode(body))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        kind, _ = frames.parse_header(bytes(frame[:HEADER_BYTES]))
        frames.decode(kind, bytes(frame[HEADER_BYTES:]))
    except FrameError:
        pass


@pytest.mark.parametrize(("kind", "body"), [
    (Kind.CARDS, [[[b"short", 0, 5]]]),
    (Kind.CARDS, [[[bytes(16), 0, 6]]]),
    (Kind.CARDS, [[[bytes(16), 0, 5]] * (frames.MAX_RAILS + 1)]),
    (Kind.CONNECT, [frames.MAX_RAILS, 0, 1, 1, [bytes(16), 0, 5]]),
    (Kind.CONNECT, [0, 0, 2**24, 1, [bytes(16), 0, 5]]),
    (Kind.KEYS, [0, "kv", -1, 1, 1]),
    (Kind.KEYS, [0, "kv", 2**63, 1, 1]),
    (Kind.KEYS, [0, "kv", 0, 1, 2**32]),
    (Kind.BEGIN, [1, "op", "i", b"t", 500, [["kv", 0, 1]], None, [], frames.MAX_RAILS, -1]),
], ids=["short GID", "no such MTU", "too many cards", "no such rail", "no queue pair's number", "negative address",
        "no address", "no key", "claim of no rail"])
def test_what_queue_pairs_cannot_be_made_of_is_refused(kind: Kind, body: list[object]) -> None:
    with pytest.raises(FrameError):
        frames.decode(kind, msgspec.msgpack.encode(body))


@given(NUMBERS)
def test_a_good_answer_is_what_encode_makes_of_it(transfer_id: int) -> None:
    assert frames.good_ack(transfer_id) == frames.encode(frames.Ack(transfer_id))


@given(NAMES, NAMES, st.binary(max_size=64), NAMES, NUMBERS, st.integers(1, frames.MAX_TIMEOUT_MS), NUMBERS,
       st.integers(1, frames.MAX_SPAN_BYTES), NUMBERS, NUMBERS, st.floats(allow_nan=False))
def test_a_form_says_what_encode_would(operation: str, incarnation: str, token: bytes, segment: str, number: int,
                                       timeout_ms: int, offset: int, length: int, serial: int, source: int,
                                       deadline_s: float) -> None:
    span = Span(segment, offset, length)
    form = frames.Form(operation, incarnation, token, segment, None)
    assert not form.fetched
    assert read(form.write(number, timeout_ms, offset, length)) == frames.Write(
        number, operation, incarnation, token, timeout_ms, [span], None, [])
    form = frames.Form(operation, incarnation, token, segment, serial)
    assert form.fetched
    assert read(form.copy(number, timeout_ms, offset, length, source, deadline_s)) == frames.Copy(
        number, operation, incarnation, token, timeout_ms, [span], None, [], [Source(serial, source)], [], deadline_s)
