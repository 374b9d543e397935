"""What travels on a data-plane connection, as bytes; no sockets here.

::

    header  magic "MBTX" | version u8 | kind u8 | reserved u16 | body length u32     12 bytes, big-endian
    body    one MessagePack array, its shape given by the kind
    payload WRITE only: the bytes of its spans, back to back

    sender → receiver                            receiver → sender
    HELLO   whom I believe to reach              WELCOME who is really here
    WRITE   spans, checksums, payload   (tcp)    ACK     what became of a WRITE or DONE, or why it is refused
    BEGIN   spans I want to write       (shm)    GO      write now; descriptors of unmapped segments ride along
    DONE    their checksums             (shm)
    ABORT   I have stopped writing      (shm)

Every length is checked against a bound before anything is allocated for it, and nothing on the wire is an
address: a span names a registered segment and is checked against what was granted.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAGIC = b"MBTX"
VERSION = 1
MAX_BODY_BYTES = 256 << 10
MAX_SPANS = 512
"""Spans of one WRITE or BEGIN; also keeps a gathered send below the kernel's limit of 1024 parts."""
MAX_SPAN_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 64 << 20
MAX_SEGMENTS = 16
"""Segments mapped by one GO; the kernel passes at most 253 descriptors at a time."""
MAX_TIMEOUT_MS = 600_000
MAX_NAME = 256
"""Characters of a worker, incarnation, segment or operation name."""

_HEADER = struct.Struct("!4sBBHI")
HEADER_BYTES = _HEADER.size

Name = Annotated[str, Meta(max_length=MAX_NAME)]
TransferId = Annotated[int, Meta(ge=0, lt=2**53)]


class FrameError(Exception):
    """Bytes that are not this protocol; the connection cannot go on."""


class Kind(IntEnum):
    """The header's kind."""

    HELLO = 1
    WELCOME = 2
    WRITE = 3
    BEGIN = 4
    GO = 5
    DONE = 6
    ABORT = 7
    ACK = 8


class Span(msgspec.Struct, frozen=True, array_like=True):
    """``[offset, offset + length)`` bytes of one of the receiver's segments."""

    segment: Name
    offset: Annotated[int, Meta(ge=0, lt=2**53)]
    length: Annotated[int, Meta(ge=1, le=MAX_SPAN_BYTES)]


Spans = Annotated[list[Span], Meta(min_length=1, max_length=MAX_SPANS)]
Checksums = Annotated[list[int], Meta(max_length=MAX_SPANS)]


class Body(msgspec.Struct, frozen=True, array_like=True):
    """Base of all bodies: a MessagePack array in order of declaration."""


class Hello(Body, frozen=True):
    """The first frame; ``worker`` and ``incarnation`` name the wanted receiver."""

    sender: Name
    worker: Name
    incarnation: Name


class Welcome(Body, frozen=True):
    """Who answers. Another process on a reused port shows itself here."""

    worker: Name
    incarnation: Name


class Claim(Body, frozen=True):
    """Leave to write ``spans``, resting on the grant of ``operation`` that has this ``token``."""

    id: TransferId
    operation: Name
    incarnation: Name
    token: Annotated[bytes, Meta(max_length=64)]
    timeout_ms: Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)]
    """The sender gives up after this; so does the receiver."""
    spans: Spans


class Write(Claim, frozen=True):
    """Claim whose payload follows at once; ``checksums``: xxh3-64 a span, or empty for none."""

    checksums: Checksums


class Begin(Claim, frozen=True):
    """Claim to write by mapping; ``unmapped`` are segments whose descriptors the sender lacks."""

    unmapped: Annotated[list[Name], Meta(max_length=MAX_SEGMENTS)]


class Go(Body, frozen=True):
    """The claim stands; ``segments`` are the names of the descriptors that ride along, in order."""

    id: TransferId
    segments: Annotated[list[Name], Meta(max_length=MAX_SEGMENTS)]


class Done(Body, frozen=True):
    """All spans of ``id`` are written."""

    id: TransferId
    checksums: Checksums


class Abort(Body, frozen=True):
    """Nothing more will be written under ``id``."""

    id: TransferId


class Ack(Body, frozen=True):
    """Spans of ``id`` are verified, but those with an index in ``bad``; nothing is when ``refused`` says why."""

    id: TransferId
    refused: Annotated[str, Meta(max_length=1024)] = ""
    bad: Annotated[list[int], Meta(max_length=MAX_SPANS)] = []


BODIES: dict[Kind, type[Body]] = {
    Kind.HELLO: Hello, Kind.WELCOME: Welcome, Kind.WRITE: Write, Kind.BEGIN: Begin, Kind.GO: Go, Kind.DONE: Done,
    Kind.ABORT: Abort, Kind.ACK: Ack,
}
_KINDS = {body: kind for kind, body in BODIES.items()}
_encoder = msgspec.msgpack.Encoder()


@cache
def _decoder(kind: Kind) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(BODIES[kind])


def encode(body: Body) -> bytes:
    """Header and body."""
    data = _encoder.encode(body)
    if len(data) > MAX_BODY_BYTES:
        raise FrameError(f"body of {len(data)} bytes exceeds {MAX_BODY_BYTES}")
    return _HEADER.pack(MAGIC, VERSION, _KINDS[type(body)], 0, len(data)) + data


def parse_header(data: bytes) -> tuple[Kind, int]:
    """Kind and body length of a header; raises :class:`FrameError` before anybody trusts the length."""
    magic, version, kind, _, length = _HEADER.unpack(data)
    if magic != MAGIC:
        raise FrameError(f"magic is {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"version is {version}, not {VERSION}")
    if kind not in Kind._value2member_map_:
        raise FrameError(f"kind {kind} is unknown")
    if length > MAX_BODY_BYTES:
        raise FrameError(f"body of {length} bytes exceeds {MAX_BODY_BYTES}")
    return Kind(kind), length


def decode(kind: Kind, data: bytes) -> Body:
    """The body; raises :class:`FrameError` when it is not one of ``kind``."""
    try:
        body: Body = _decoder(kind).decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(f"undecodable {kind.name}: {error}") from error
    if isinstance(body, Write):
        payload = sum(span.length for span in body.spans)
        if payload > MAX_PAYLOAD_BYTES:
            raise FrameError(f"payload of {payload} bytes exceeds {MAX_PAYLOAD_BYTES}")
        if body.checksums and len(body.checksums) != len(body.spans):
            raise FrameError(f"{len(body.checksums)} checksums for {len(body.spans)} spans")
    return body
