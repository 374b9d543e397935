"""The door's frames: what is bounded, what is refused, what a token is made of."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.store import door_frames as frames

KEY = bytes(range(32))
PUT = frames.Put([frames.Block(KEY, bytes(32), 1, 64)], [frames.Source(3, 4096)], [3], [], 0, 1000, 12.5)
BODIES = [
    frames.Enter(1, "c", "i", "s", "t", 1.5, b"token", 0, "h", 2.5), frames.Get(KEY * 2, 100, 1), frames.Look(KEY),
    frames.Drop(KEY), frames.Pin("p", KEY, 1000), frames.Unpin("p"), PUT, frames.Done(3),
]
ANSWERS = [frames.Entered("w", "i", True, 4096), frames.Found([-1, 7], 3.5, [2**64 - 1]), frames.Marks([0, 1, 2]),
           frames.Denied("full", "no room")]


@pytest.mark.parametrize("body", BODIES)
def test_a_request_comes_through(body: frames.Request) -> None:
    data = frames.encode(body)
    length = frames.parse_header(data)
    assert length == len(data) - frames.HEADER_BYTES
    assert frames.decode_request(data[frames.HEADER_BYTES:]) == body


@pytest.mark.parametrize("body", ANSWERS)
def test_a_reply_comes_through(body: frames.Reply) -> None:
    assert frames.decode_reply(frames.encode(body)[frames.HEADER_BYTES:]) == body


@pytest.mark.parametrize("body", [
    frames.Get(KEY + b"x", 1), frames.Get(KEY * (frames.MAX_KEYS + 1), 1), frames.Get(KEY, -1),
    frames.Get(KEY, frames.MAX_TIMEOUT_MS + 1), frames.Pin("p" * 300, KEY, 1),
    frames.Put([frames.Block(KEY[:31], KEY)], [], [], [], 0, 1, 0.0),
    frames.Put([frames.Block(KEY, KEY)] * 2, [frames.Source(1, 0)], [], [], 0, 1, 0.0),
    frames.Put([frames.Block(KEY, KEY)], [], [], [1, 2], 0, 1, 0.0),
    frames.Put([frames.Block(KEY, KEY)], [frames.Source(1, -1)], [], [], 0, 1, 0.0),
    frames.Put([frames.Block(KEY, KEY)] * (frames.MAX_KEYS + 1), [], [], [], 0, 1, 0.0),
    frames.Marks([1]),
])
def test_what_is_out_of_bounds_is_no_request(body: frames.Request | frames.Reply) -> None:
    with pytest.raises(frames.FrameError):
        frames.decode_request(frames.encode(body)[frames.HEADER_BYTES:])


@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_happens(noise: bytes) -> None:
    for decode in (frames.decode_request, frames.decode_reply):
        try:
            decode(noise)
        except frames.FrameError:
            pass
    if len(noise) >= frames.HEADER_BYTES:
        try:
            assert frames.parse_header(noise) <= frames.MAX_BODY_BYTES
        except frames.FrameError:
            pass


@given(st.sampled_from(BODIES), st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_a_damaged_request_is_refused_or_another_one(body: frames.Request, at: int, noise: bytes) -> None:
    data = frames.encode(body)[frames.HEADER_BYTES:]
    damaged = data[:at % len(data)] + noise + data[at % len(data) + len(noise):]
    try:
        assert isinstance(frames.decode_request(damaged), msgspec.Struct)
    except frames.FrameError:
        pass


def test_a_token_is_of_everything_that_it_says() -> None:
    said = {"client": "c", "incarnation": "i", "spec": "s", "tenant": "t", "expires_at_s": 1.0}
    token = frames.sign(b"secret", **said)
    assert token == frames.sign(b"secret", **said)
    for name in said:
        other = {**said, name: 2.0 if name == "expires_at_s" else "other"}
        assert frames.sign(b"secret", **other) != token
    assert frames.sign(b"other", **said) != token
