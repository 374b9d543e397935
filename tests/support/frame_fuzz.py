"""Frames of the transfer protocol, sound and spoilt, from a seed. Every kind there is, by its declared types."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import msgspec
from msgspec import inspect

from shared.transfer import frames

_HEADER = struct.Struct("!4sBBHI")
_MANY = 40
"""Most elements of a generated list: enough to be one, few enough to be quick."""
_STOCK = 500
"""Sound frames that the spoilt ones are made from."""
_NASTY = (
    b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff",
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xcb\x7f\xf8" + b"\0" * 6, b"\xc0", b"\xc1", b"\x91" * 64,
    b"\xd4\xff\0", b"\xa2\xff\xff", b"\xca\x7f\x80\0\0", b"MBTX", b"\0" * 16, b"\xff" * 16,
)
"""Heads that promise more than comes, numbers at their limits, wrong types, nesting, bytes that are no text."""


class Mutator:
    """All randomness is of ``chance``."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._types = {kind: inspect.type_info(body) for kind, body in frames.BODIES.items()}
        self._sound = [self._new_sound_frame() for _ in range(_STOCK)]

    def frame(self) -> bytes:
        """Sound now and then, spoilt in one or several ways mostly, noise sometimes."""
        chance = self._chance
        dice = chance.random()
        if dice < 0.05:
            return chance.randbytes(chance.randrange(200))
        if dice < 0.06:
            return self._large()
        return self.spoilt(self.sound_frame())

    def spoilt(self, frame: bytes) -> bytes:
        """``frame``, changed in some way, or in none; its length mostly fits what is left of it."""
        chance = self._chance
        data = bytearray(frame)
        for _ in range(chance.choice((0, 1, 1, 1, 2, 4, 16))):
            self._spoil(data)
        if chance.random() < 0.5:  # else most changed lengths would end at the header
            data[frames.HEADER_BYTES - 4:frames.HEADER_BYTES] = struct.pack(
                "!I", max(0, len(data) - frames.HEADER_BYTES))
        return bytes(data)

    def sound_frame(self) -> bytes:
        """One that decodes."""
        return self._chance.choice(self._sound)

    def _new_sound_frame(self) -> bytes:
        while True:
            kind = self._chance.choice(list(self._types))
            body = msgspec.msgpack.encode(self._value(self._types[kind]))
            try:
                frames.decode(kind, body)  # rules between fields, such as one checksum a span
            except frames.FrameError:
                continue
            return _HEADER.pack(frames.MAGIC, frames.VERSION, kind, 0, len(body)) + body

    def _spoil(self, data: bytearray) -> None:
        chance = self._chance
        at = chance.randrange(len(data) + 1)
        to = min(len(data), at + chance.randrange(1, 30))
        match chance.randrange(7):
            case 0:
                if at < len(data):
                    data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at:]
            case 2:
                del data[at:to]
            case 3:
                data[at:at] = data[at:to]
            case 4:
                data[at:to] = chance.choice(_NASTY)
            case 5:
                data[at:at] = chance.randbytes(chance.randrange(8))
            case 6:
                other = self.sound_frame()
                cut = chance.randrange(len(other))
                data[at:] = other[cut:]

    def _large(self) -> bytes:
        """A body as long as may be, of one small thing again and again."""
        kind = self._chance.choice(list(self._types))
        unit = self._chance.choice((*_NASTY, b"\x93\xa2kv\0\1", b"\xa1x", b"\0"))
        body = (b"\x9f" + unit * (frames.MAX_BODY_BYTES // len(unit) + 1))[:frames.MAX_BODY_BYTES]
        return _HEADER.pack(frames.MAGIC, frames.VERSION, kind, 0, len(body)) + body

    def _value(self, of: Any) -> Any:
        """A value of a declared type, near its limits every other time."""
        chance = self._chance
        match of:
            case inspect.StructType():
                return [self._value(field.type) for field in of.fields]
            case inspect.IntType():
                low = -(2**63) if of.ge is None else of.ge
                high = of.lt - 1 if of.lt is not None else 2**64 - 1 if of.le is None else of.le
                return chance.choice((low, high, chance.randint(low, high), chance.randint(low, min(high, low + 99))))
            case inspect.StrType():
                return "kx\u00fc\U0001f311"[chance.randrange(4)] * chance.choice((0, 2, 9, of.max_length or 50))
            case inspect.BytesType():
                return chance.randbytes(chance.choice((0, 32, of.max_length or 50)))
            case inspect.ListType():
                least, most = of.min_length or 0, min(_MANY, of.max_length or _MANY)
                length = chance.choice((least, least, chance.randint(least, most)))
                return [self._value(of.item_type) for _ in range(length)]
            case inspect.BoolType():
                return chance.random() < 0.5
            case inspect.UnionType():
                return self._value(chance.choice(of.types))
            case inspect.NoneType():
                return None
            case inspect.FloatType():
                return chance.choice((0.0, -1.5, 1e300, math.inf, math.nan))
            case _:
                raise TypeError(f"a frame has a field of {of}, which this cannot make up yet")
