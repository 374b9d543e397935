"""The parser, fed with what no sender would send.

``FUZZ_INPUTS`` (an environment variable) says how many inputs, 50,000 if it does not; a thorough run takes 1,000,000.
The inputs are the same for the same number: a failure names the one it failed at.
"""

from __future__ import annotations

import os
import random
import tracemalloc

import msgspec
import pytest

from shared.transfer import frames
from shared.transfer.frames import BODIES, HEADER_BYTES, MAX_BODY_BYTES, FrameError, Kind
from tests.support.frame_fuzz import Mutator

INPUTS = int(os.environ.get("FUZZ_INPUTS", "50000"))
MOST_MEMORY_BYTES = 1 << 20
"""What parsing one frame may take at any moment; the frame itself has a quarter of it at most."""


def read(data: bytes) -> frames.Body | None:
    """As a connection reads: nothing of the body before the header is sound."""
    if len(data) < HEADER_BYTES:
        return None
    kind, length = frames.parse_header(data[:HEADER_BYTES])
    assert length <= MAX_BODY_BYTES
    return frames.decode(kind, data[HEADER_BYTES:HEADER_BYTES + length])


@pytest.mark.timeout(60 + INPUTS // 1000)
def test_whatever_comes_is_a_sound_frame_or_a_frame_error() -> None:
    mutator = Mutator(random.Random(0))
    refused = accepted = 0
    for i in range(INPUTS):
        data = mutator.frame()
        try:
            body = read(data)
        except FrameError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"input {i}: {error!r} from {data[:200]!r} ({len(data)} bytes)") from error
        else:
            if body is not None:
                accepted += 1
                again = read(frames.encode(body))
                assert again is not None and frames.encode(again) == frames.encode(body), f"input {i}: {body}"
    assert refused > INPUTS // 4 and accepted > INPUTS // 50, "the inputs are neither all nonsense nor all sound"


@pytest.mark.timeout(60 + INPUTS // 1000)
def test_no_input_makes_the_parser_take_much_memory() -> None:
    mutator = Mutator(random.Random(2))
    tracemalloc.start()
    try:
        for i in range(INPUTS // 10):
            data = mutator.frame()
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                read(data)
            except FrameError:
                pass
            _, most = tracemalloc.get_traced_memory()
            assert most - before < MOST_MEMORY_BYTES, f"input {i}: {data[:200]!r} ({len(data)} bytes)"
    finally:
        tracemalloc.stop()


def test_the_inputs_reach_every_kind() -> None:
    mutator = Mutator(random.Random(1))
    seen = {Kind(mutator.sound_frame()[5]) for _ in range(1000)}
    assert seen == set(BODIES)
    assert all(read(mutator.sound_frame()) for _ in range(1000))


def test_lengths_that_promise_gigabytes_are_not_believed() -> None:
    huge = {b"\xdd\xff\xff\xff\xff": "array", b"\xdf\xff\xff\xff\xff": "map", b"\xc6\xff\xff\xff\xff": "bytes",
            b"\xdb\xff\xff\xff\xff": "text", b"\xc9\xff\xff\xff\xff\x01": "extension"}
    fields = [1, "op", "i", b"t", 500]
    tracemalloc.start()
    try:
        for kind in Kind:
            for head in huge:
                for sound in range(len(fields) + 1):
                    body = b"\x9f" + b"".join(map(msgspec.msgpack.encode, fields[:sound])) + head
                    try:
                        frames.decode(kind, body)
                    except FrameError:
                        continue
                    raise AssertionError(f"{kind.name} of {body!r} was accepted")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
