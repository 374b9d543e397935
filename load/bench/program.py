"""The other end of :class:`load.bench.child.Child`: lines of JSON on stdin and stdout."""

from __future__ import annotations

import asyncio
import sys

import msgspec


def say(value: object) -> None:
    """One line, at once."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


async def hear() -> bytes:
    """The next line; empty once whoever started us is gone."""
    return await asyncio.to_thread(sys.stdin.buffer.readline)
