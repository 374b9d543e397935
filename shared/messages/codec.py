"""Messages to bytes and back, typed by what the subject promises."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """MessagePack of ``message``."""
    return _encoder.encode(message)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decode(data: bytes, kind: Any) -> Any:
    """The message in ``data``, which must be of ``kind`` (a message type or a union of them).

    Raises ``msgspec.DecodeError`` (``ValidationError`` included) when it is not.
    """
    return _decoder(kind).decode(data)
