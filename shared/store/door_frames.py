"""What clients and a store's door say to each other, as bytes; no sockets here.

::

    header  magic "MBSD" | body length u32                                 8 bytes, big-endian
    body    one MessagePack array, its first element says which of the kinds below it is
    payload the values themselves, back to back: behind a PUT without sources, behind FOUND over TCP

    client → door                                          door → client
    ENTER   who I am, and my token                         ENTERED  who is here; over a unix socket, its memory
    GET     keys I want                                    FOUND    where each is (or that it is not here)
    LOOK    are these here?                                MARKS    an answer a key
    DROP    forget these
    PIN     keep these for me; again: keep them longer
    UNPIN   no longer
    PUT     blocks, where they lie in my memory            MARKS    stored, there already, or without its parent
    DONE    I have copied what was found                   DENIED   why nothing of it was done

Requests on a connection are answered in order. A client on the same host copies what was FOUND out of the owner's
memory itself: it is lent to it until ``until_s`` on the host's clock, or until the client's ``done`` says that it has
ended its copying. What the owner takes by PUT it copies itself out of the client's memory, into slots that nobody sees
before they are complete. So each side writes only its own memory, and looks at the clock after it has copied.

Every length is checked against a bound before anything is allocated for it, and nothing on the wire is an address.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

MAGIC = b"MBSD"
VERSION = 1
MAX_BODY_BYTES = 256 << 10
MAX_KEYS = 512
"""Keys, or blocks, of one request."""
MAX_NAME = 256
MAX_TIMEOUT_MS = 600_000
MAX_INLINE_BYTES = 8 << 20
"""Most that any door takes on a connection for questions."""
MISSING = -1
"""Slot of a key that is not here."""

_HEADER = struct.Struct("!4sI")
HEADER_BYTES = _HEADER.size

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Millis = Annotated[int, Meta(ge=0, le=MAX_TIMEOUT_MS)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Keys = Annotated[bytes, Meta(max_length=32 * MAX_KEYS)]
Offset = Annotated[int, Meta(ge=0, lt=2**53)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Checksums = Annotated[list[int], Meta(max_length=MAX_KEYS)]


class FrameError(Exception):
    """Bytes that are not this protocol; the connection cannot go on."""


class Mark(IntEnum):
    """What became of one key."""

    NO = 0
    """Not here; or, of a PUT: it was here already."""
    YES = 1
    """Here, or done."""
    ORPHAN = 2
    """Of a PUT: its parent is not here, so it was not stored."""


class Body(msgspec.Struct, frozen=True, array_like=True):
    """Base of all bodies."""


class Enter(Body, frozen=True, tag=1):
    """The first frame. All but ``serves``, ``host`` and ``clock_s`` is what the token was made of."""

    version: Count
    client: Name
    incarnation: Name
    spec: Name
    tenant: Name
    expires_at_s: float
    token: Annotated[bytes, Meta(max_length=64)]
    serves: Annotated[int, Meta(ge=0, le=1)]
    """0: questions, which the owner's event loop answers. 1: bytes, for which there is a thread."""
    host: Name
    clock_s: float
    """The client's monotonic clock, which processes of one host share."""


class Get(Body, frozen=True, tag=2):
    """``done``: so many of the oldest loans are over."""

    keys: Keys
    timeout_ms: Millis
    done: Count = 0


class Look(Body, frozen=True, tag=3):
    """Does not count as a use."""

    keys: Keys
    done: Count = 0


class Drop(Body, frozen=True, tag=4):
    """Forget these, as far as nobody uses or continues them."""

    keys: Keys
    done: Count = 0


class Pin(Body, frozen=True, tag=5):
    """Keep these until UNPIN, the connection's end or ``ttl_ms`` from now; said again, it begins anew."""

    operation: Name
    keys: Keys
    ttl_ms: Millis
    done: Count = 0


class Unpin(Body, frozen=True, tag=6):
    """Ends PIN."""

    operation: Name
    done: Count = 0


class Block(msgspec.Struct, frozen=True, array_like=True):
    """What a value is."""

    key: Digest
    parent: Digest
    depth: Count = 0
    tokens: Count = 0


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Where a value begins in memory of the client, whose descriptor has this ``serial``."""

    serial: Offset
    offset: Offset


class Put(Body, frozen=True, tag=7):
    """Take these values: out of my memory when there are ``sources``, else out of the payload."""

    blocks: Annotated[list[Block], Meta(max_length=MAX_KEYS)]
    sources: Annotated[list[Source], Meta(max_length=MAX_KEYS)]
    attached: Annotated[list[Offset], Meta(max_length=16)]
    """Serials of the descriptors that ride along, in order."""
    checksums: Checksums
    """xxh3-64 a value, or empty for none."""
    wait_ms: Millis
    """How long to wait for room."""
    timeout_ms: Millis
    """How long the client waits in all."""
    deadline_s: float
    """On the host's clock, over a unix socket: after it the client may change its memory."""
    done: Count = 0


class Done(Body, frozen=True, tag=8):
    """So many of the oldest loans are over; there is nothing to answer."""

    done: Count


class Entered(Body, frozen=True, tag=20):
    """Welcome. ``proofs``: values carry checksums, both ways. Over a unix socket the memory rides along."""

    worker: Name
    incarnation: Name
    proofs: bool
    inline_bytes: Count
    """Values of a PUT with sources that a connection for questions takes, in all."""


class Found(Body, frozen=True, tag=21):
    """The slot of each key, or :data:`MISSING`."""

    slots: Annotated[list[int], Meta(max_length=MAX_KEYS)]
    until_s: float
    """On the host's clock: nothing of it may be believed that was copied later."""
    checksums: Checksums
    """xxh3-64 of each value that was found, in order; or empty for none."""


class Marks(Body, frozen=True, tag=22):
    """A :class:`Mark` a key."""

    marks: Annotated[list[int], Meta(max_length=MAX_KEYS)]


class Denied(Body, frozen=True, tag=23):
    """Nothing of it was done: ``version token clock full draining checksum late``."""

    code: Name
    why: Annotated[str, Meta(max_length=1024)]


Request = Enter | Get | Look | Drop | Pin | Unpin | Put | Done
Reply = Entered | Found | Marks | Denied

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(body: Request | Reply) -> bytes:
    """Header and body."""
    data = _encoder.encode(body)
    return _HEADER.pack(MAGIC, len(data)) + data


def parse_header(data: bytes | bytearray | memoryview) -> int:
    """Body length; raises :class:`FrameError` before anybody trusts it."""
    magic, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"magic is {magic!r}, not {MAGIC!r}")
    if length > MAX_BODY_BYTES:
        raise FrameError(f"body of {length} bytes exceeds {MAX_BODY_BYTES}")
    return int(length)


def decode_request(data: bytes | bytearray | memoryview) -> Request:
    """Raises :class:`FrameError` when it is none."""
    try:
        body: Request = _requests.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(f"undecodable request: {error}") from error
    if isinstance(body, Get | Look | Drop | Pin) and len(body.keys) % 32:
        raise FrameError(f"{len(body.keys)} bytes are no whole number of keys")
    if isinstance(body, Put):
        count = len(body.blocks)
        if len(body.sources) not in (0, count) or len(body.checksums) not in (0, count):
            raise FrameError(f"{len(body.sources)} sources and {len(body.checksums)} checksums for {count} values")
    return body


def decode_reply(data: bytes | bytearray | memoryview) -> Reply:
    """Raises :class:`FrameError` when it is none."""
    try:
        body: Reply = _replies.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(f"undecodable reply: {error}") from error
    return body


def sign(secret: bytes, *, client: str, incarnation: str, spec: str, tenant: str, expires_at_s: float) -> bytes:
    """The token that lets exactly this client in."""
    content = _encoder.encode([client, incarnation, spec, tenant, expires_at_s])
    return hmac.new(secret, content, hashlib.sha256).digest()
