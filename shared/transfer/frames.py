"""What travels on a data-plane connection, as bytes; no sockets here.

::

    header  magic "MBTX" | version u8 | kind u8 | reserved u16 | body length u32     12 bytes, big-endian
    body    one MessagePack array, its shape given by the kind
    payload WRITE only: the bytes of its spans, back to back

    sender → receiver                                    receiver → sender
    HELLO   whom I believe to reach, where I am          WELCOME who is really here
    WRITE   claim, checksums, payload            (tcp)   ACK     what became of a claim, or why it is refused
    COPY    claim, where its bytes lie with me   (shm, nvlink)
    SHARE   how to open my memory                (nvlink)
    DETACH  memory that you may let go           (shm, nvlink)

CARDS to DOWN belong to RDMA, whose bytes travel elsewhere: see ``rdma``.

Every length is checked against a bound before anything is allocated for it, and nothing on the wire is an
address: a span names a registered segment and is checked against what was granted, a source names a descriptor
that was handed over and is checked against its size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAGIC = b"MBTX"
VERSION = 2
MAX_BODY_BYTES = 256 << 10
MAX_SPANS = 512
"""Spans of one claim; also keeps a gathered send below the kernel's limit of 1024 parts."""
MAX_SPAN_BYTES = 64 << 20
MAX_PARTS = 1 << 16
"""Parts of one span."""
MAX_CLAIM_PARTS = 1 << 17
"""Parts of all spans of one claim: the receiver looks at each while nobody else may look into its books."""
MAX_PAYLOAD_BYTES = 64 << 20
MAX_ATTACHED = 16
"""Descriptors that ride on one COPY; the kernel passes at most 253 at a time."""
MAX_RAILS = 16
"""Pairs of network cards between two ends."""
MAX_TIMEOUT_MS = 600_000
MAX_NAME = 256
"""Characters of a worker, incarnation, segment or operation name."""
MAX_HANDLE_BYTES = 128 << 10
"""Bytes of what opens memory of another process."""
MAX_NOTE_BYTES = 64 << 10
"""Bytes of a notification."""

_HEADER = struct.Struct("!4sBBHI")
HEADER_BYTES = _HEADER.size

MAX_NUMBER = 2**53
"""Ids and offsets are below."""

Name = Annotated[str, Meta(max_length=MAX_NAME)]
TransferId = Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]
Offset = Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]


class FrameError(Exception):
    """Bytes that are not this protocol; the connection cannot go on."""


class Kind(IntEnum):
    """The header's kind."""

    HELLO = 1
    WELCOME = 2
    WRITE = 3
    COPY = 4
    ACK = 5
    DETACH = 6
    SHARE = 15
    CARDS = 16
    CONNECT = 17
    CONNECTED = 18
    BEGIN = 19
    KEYS = 20
    GO = 21
    ABORT = 22
    DOWN = 23


class Span(msgspec.Struct, frozen=True, array_like=True):
    """``[offset, offset + length)`` bytes of one of the receiver's segments; ``count`` times, ``stride`` apart."""

    segment: Name
    offset: Offset
    length: Annotated[int, Meta(ge=1, le=MAX_SPAN_BYTES)]
    count: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1
    stride: Offset = 0

    @property
    def nbytes(self) -> int:
        """Of all parts together."""
        return self.length * self.count

    @property
    def stop(self) -> int:
        """Where the last part ends."""
        return self.offset + self.length + (self.count - 1) * self.stride

    def parts(self) -> Iterator[tuple[int, int]]:
        """Start and stop of each part."""
        for start in range(self.offset, self.offset + self.count * self.stride, self.stride) if self.count > 1 else (
                self.offset,):
            yield start, start + self.length


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of a span begin in memory of the sender, whose descriptor has this ``serial``.

    Parts of a span are as far apart there as here.
    """

    serial: Offset
    offset: Offset


Spans = Annotated[list[Span], Meta(max_length=MAX_SPANS)]
Checksums = Annotated[list[int], Meta(max_length=MAX_SPANS)]


class Body(msgspec.Struct, frozen=True, array_like=True):
    """Base of all bodies: a MessagePack array in order of declaration."""


class Hello(Body, frozen=True):
    """The first frame; ``worker`` and ``incarnation`` name the wanted receiver."""

    sender: Name
    worker: Name
    incarnation: Name
    host: Name = ""
    """The sender's host id."""
    clock_s: float = 0.0
    """The sender's monotonic clock, which two processes of one host share."""


class Welcome(Body, frozen=True):
    """Who answers. Another process on a reused port shows itself here."""

    worker: Name
    incarnation: Name
    checksums: bool = False
    """Claims without checksums are refused."""


class Claim(Body, frozen=True):
    """Leave to write ``spans``, resting on the grant of ``operation`` that has this ``token``."""

    id: TransferId
    operation: Name
    incarnation: Name
    token: Annotated[bytes, Meta(max_length=64)]
    timeout_ms: Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)]
    """The sender gives up after this; so does the receiver."""
    spans: Spans
    note: Annotated[bytes, Meta(max_length=MAX_NOTE_BYTES)] | None
    """Told to the receiver's owner once the spans are committed; ``None`` for nothing to tell."""
    checksums: Checksums
    """xxh3-64 a span, of its parts back to back; or empty for none."""


class Write(Claim, frozen=True):
    """Claim whose payload follows at once."""


class Copy(Claim, frozen=True):
    """Claim whose bytes the receiver fetches from the sender's memory, ``sources`` a span."""

    sources: Annotated[list[Source], Meta(max_length=MAX_SPANS)]
    attached: Annotated[list[Offset], Meta(max_length=MAX_ATTACHED)]
    """Serials of the descriptors that ride along, in order."""
    deadline_s: float
    """On the host's monotonic clock: after it the sender may use the memory for something else."""


class Detach(Body, frozen=True):
    """No claim will name the sender's memory ``serial`` any more."""

    serial: Offset


class Share(Body, frozen=True):
    """Opens memory of the sender to this receiver, under the ``serial`` that sources then name."""

    serial: Offset
    handle: Annotated[bytes, Meta(max_length=MAX_HANDLE_BYTES)]
    """A :class:`shared.transfer.cuda.DeviceHandle`."""


class Ack(Body, frozen=True):
    """Spans of ``id`` are committed, but those with an index in ``bad``; nothing is when ``refused`` says why."""

    id: TransferId
    refused: Annotated[str, Meta(max_length=1024)] = ""
    bad: Annotated[list[int], Meta(max_length=MAX_SPANS)] = []


RailIndex = Annotated[int, Meta(ge=0, lt=MAX_RAILS)]
PairNumber = Annotated[int, Meta(ge=0, lt=2**24)]
"""Of a queue pair; the first packet's number has as many bits."""


class Card(msgspec.Struct, frozen=True, array_like=True):
    """How a network card is reached."""

    gid: Annotated[bytes, Meta(min_length=16, max_length=16)]
    lid: Annotated[int, Meta(ge=0, lt=2**16)]
    mtu: Annotated[int, Meta(ge=1, le=5)]
    """256 bytes times two to the power of this, halved."""


class Cards(Body, frozen=True):
    """The receiver's cards; follows WELCOME."""

    cards: Annotated[list[Card], Meta(max_length=MAX_RAILS)]


class Connect(Body, frozen=True):
    """The sender's end of ``rail``, which shall lead to the receiver's ``card``."""

    rail: RailIndex
    card: RailIndex
    number: PairNumber
    psn: PairNumber
    sender: Card


class Connected(Body, frozen=True):
    """The receiver's end of ``rail``, or why there is none."""

    rail: RailIndex
    number: PairNumber
    psn: PairNumber
    refused: Annotated[str, Meta(max_length=1024)] = ""


class Begin(Claim, frozen=True):
    """Claim whose bytes come by ``rail``; ``again``: id of its former attempt, which a failed rail ended, or -1."""

    rail: Annotated[int, Meta(ge=-1, lt=MAX_RAILS)]
    again: Annotated[int, Meta(ge=-1, lt=2**53)]


LANDING = ""
"""In the place of a segment's name: memory of the receiver through which it fills what no card reaches."""


class Keys(Body, frozen=True):
    """Opens ``segment`` to writes by ``rail``. The numbers are for the sender's card; no processor follows them."""

    rail: RailIndex
    segment: Name
    address: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    nbytes: Annotated[int, Meta(ge=0)]
    key: Annotated[int, Meta(ge=0, lt=2**32)]


class Go(Body, frozen=True):
    """The claim stands: write."""

    id: TransferId
    landing: Annotated[list[Offset], Meta(max_length=MAX_SPANS)] = []
    """Where in the landing memory, which KEYS opened under the name :data:`LANDING`, each span goes instead."""


class Abort(Body, frozen=True):
    """Nothing was written under ``id``, nor will be."""

    id: TransferId


class Down(Body, frozen=True):
    """``rail`` failed at the speaker's end; ``number`` is the receiver's queue pair that it had."""

    rail: RailIndex
    number: PairNumber


BODIES: dict[Kind, type[Body]] = {
    Kind.HELLO: Hello, Kind.WELCOME: Welcome, Kind.WRITE: Write, Kind.COPY: Copy, Kind.ACK: Ack,
    Kind.DETACH: Detach, Kind.SHARE: Share,
    Kind.CARDS: Cards, Kind.CONNECT: Connect, Kind.CONNECTED: Connected, Kind.BEGIN: Begin, Kind.KEYS: Keys,
    Kind.GO: Go, Kind.ABORT: Abort, Kind.DOWN: Down,
}
_KINDS = {body: kind for kind, body in BODIES.items()}
_KNOWN = {int(kind): kind for kind in Kind}
_encoder = msgspec.msgpack.Encoder()


_decoders: dict[Kind, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()}


def encode(body: Body) -> bytes:
    """Header and body."""
    data = _encoder.encode(body)
    if len(data) > MAX_BODY_BYTES:
        raise FrameError(f"body of {len(data)} bytes exceeds {MAX_BODY_BYTES}")
    return _HEADER.pack(MAGIC, VERSION, _KINDS[type(body)], 0, len(data)) + data


def parse_header(data: bytes | bytearray | memoryview, start: int = 0) -> tuple[Kind, int]:
    """Kind and body length of the header at ``start``; raises :class:`FrameError` before anybody trusts the length."""
    magic, version, kind, _, length = _HEADER.unpack_from(data, start)
    if magic != MAGIC:
        raise FrameError(f"magic is {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"version is {version}, not {VERSION}")
    known = _KNOWN.get(kind)
    if known is None:
        raise FrameError(f"kind {kind} is unknown")
    if length > MAX_BODY_BYTES:
        raise FrameError(f"body of {length} bytes exceeds {MAX_BODY_BYTES}")
    return known, length


def decode(kind: Kind, data: bytes | bytearray | memoryview) -> Body:
    """The body; raises :class:`FrameError` when it is not one of ``kind``."""
    try:
        body: Body = _decoders[kind].decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(f"undecodable {kind.name}: {error}") from error
    if isinstance(body, Claim):
        _check_claim(body)
    return body


def _check_claim(claim: Claim) -> None:
    spans = claim.spans
    if len(spans) != 1 or spans[0].count != 1:  # the bound on a span's length holds for such a claim by itself
        payload = sum(span.nbytes for span in spans)
        if any(span.count > 1 and (span.stride < span.length or not isinstance(claim, Copy)) for span in spans):
            raise FrameError("parts of a span overlap, or are none that can be copied")
        if payload > MAX_PAYLOAD_BYTES:
            raise FrameError(f"payload of {payload} bytes exceeds {MAX_PAYLOAD_BYTES}")
        if (parts := sum(span.count for span in spans)) > MAX_CLAIM_PARTS:
            raise FrameError(f"{parts} parts of spans exceed {MAX_CLAIM_PARTS}")
    if claim.checksums and len(claim.checksums) != len(spans):
        raise FrameError(f"{len(claim.checksums)} checksums for {len(spans)} spans")
    if isinstance(claim, Copy) and len(claim.sources) != len(spans):
        raise FrameError(f"{len(claim.sources)} sources for {len(spans)} spans")


# -- the commonest frames, made of what does not change and a few numbers ----------------------------------------------

_FIXARRAY, _UINT32, _UINT64 = 0x90, b"\xce", b"\xcf"
"""Of MessagePack: what stands before so many items, and before a number of so many bits."""
_NOTHING_ATTACHED = b"\x90\xcb"
"""An empty array, and what stands before a float64."""
_GOOD_BEGIN = {n: _HEADER.pack(MAGIC, VERSION, Kind.ACK, 0, n + 3) + bytes([_FIXARRAY + 3]) for n in (1, 2, 3, 5, 9)}
"""{bytes of the id: what stands before it}"""
_GOOD_END = _encoder.encode("") + _encoder.encode([])


def good_ack(transfer_id: int) -> bytes:
    """``encode(Ack(transfer_id))``, in a third of the time."""
    number = _encoder.encode(transfer_id)
    return _GOOD_BEGIN[len(number)] + number + _GOOD_END


class Form:
    """``encode`` for claims of one part, without note and checksums, under one grant: all is there but a few numbers,
    which travel in their greatest width.

    ``serial``: of the memory that a COPY fetches from; ``None`` makes it a WRITE.
    """

    def __init__(self, operation: str, incarnation: str, token: bytes, segment: str, serial: int | None) -> None:
        self.fetched = serial is not None
        """Is it for :meth:`copy`, not for :meth:`write`?"""
        names = b"".join(map(_encoder.encode, (operation, incarnation, token)))
        fields = 8 if serial is None else 11
        self._begin = bytes([_FIXARRAY + fields]) + _UINT64
        self._names = names + _UINT32
        self._span = bytes([_FIXARRAY + 1, _FIXARRAY + 5]) + _encoder.encode(segment) + _UINT64
        self._rest = _encoder.encode(1) + _encoder.encode(0) + _encoder.encode(None) + _encoder.encode([])
        layout = f"!12s{len(self._begin)}sQ{len(self._names)}sI{len(self._span)}sQ1sI{len(self._rest)}s"
        if serial is not None:
            source = bytes([_FIXARRAY + 1, _FIXARRAY + 2]) + _encoder.encode(serial) + _UINT64
            self._rest += source
            layout = layout[:layout.rindex("I") + 1] + f"{len(self._rest)}sQ2sd"
        self._layout = struct.Struct(layout)
        first = HEADER_BYTES + len(self._begin)
        second = first + 8 + len(self._names)
        third = second + 4 + len(self._span)
        self.places = (first, 8), (second, 4), (third, 8), (third + 9, 4)
        """(Offset, bytes) of each number that :meth:`write` takes."""
        self._header = _HEADER.pack(MAGIC, VERSION, Kind.WRITE if serial is None else Kind.COPY, 0,
                                    self._layout.size - HEADER_BYTES)

    def write(self, transfer_id: int, timeout_ms: int, offset: int, length: int) -> bytes:
        """A :class:`Write`."""
        return self._layout.pack(self._header, self._begin, transfer_id, self._names, timeout_ms, self._span, offset,
                                 _UINT32, length, self._rest)

    def copy(self, transfer_id: int, timeout_ms: int, offset: int, length: int, source: int,
             deadline_s: float) -> bytes:
        """A :class:`Copy` that hands nothing over; ``source``: offset of the bytes in the sender's memory."""
        return self._layout.pack(self._header, self._begin, transfer_id, self._names, timeout_ms, self._span, offset,
                                 _UINT32, length, self._rest, source, _NOTHING_ATTACHED, deadline_s)


class Echo:
    """Decodes a WRITE of a :class:`Form` that has the names of the ``frame`` before it, whose body is ``write``."""

    def __init__(self, frame: bytes, write: Write, form: Form) -> None:
        self.frame, self.places = frame, form.places
        self._operation, self._incarnation, self._token = write.operation, write.incarnation, write.token
        self._segment = write.spans[0].segment

    @classmethod
    def of(cls, frame: bytes, body: Body) -> Echo | None:
        """For what comes after ``frame``, whose body this is; ``None`` when it was not made by :meth:`Form.write`."""
        if not isinstance(body, Write) or len(body.spans) != 1:
            return None
        span = body.spans[0]
        form = Form(body.operation, body.incarnation, body.token, span.segment, None)
        alike = form.write(body.id, body.timeout_ms, span.offset, span.length) == frame
        return cls(frame, body, form) if alike else None

    def decode(self, transfer_id: int, timeout_ms: int, offset: int, length: int) -> Write | None:
        """The body of a frame that has these numbers; ``None`` when they are none that :func:`decode` lets pass."""
        if (transfer_id >= MAX_NUMBER or not 1 <= timeout_ms <= MAX_TIMEOUT_MS or offset >= MAX_NUMBER
                or not 1 <= length <= MAX_SPAN_BYTES):
            return None
        return Write(transfer_id, self._operation, self._incarnation, self._token, timeout_ms,
                     [Span(self._segment, offset, length)], None, [])


def is_formed(data: bytes | bytearray | memoryview, start: int, kind: Kind) -> bool:
    """May the frame at ``start``, of that kind, be one of :meth:`Form.write`? Ids are as wide in few others."""
    return kind is Kind.WRITE and data[start + HEADER_BYTES + 1] == _UINT64[0]
