"""Messages to bytes and back, and the bytes that others depend on."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import messages as m
from shared.ids import RequestId
from shared.messages import codec
from tests.support import golden

MESSAGES = json.loads((Path(__file__).parents[1] / "golden" / "messages.json").read_text())
TYPES = golden.message_types()


def test_every_message_has_golden_bytes() -> None:
    missing = sorted(set(TYPES) - set(MESSAGES))
    assert not missing, f"run `python -m tests.support.golden` and commit tests/golden for {missing}"


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_golden_bytes_are_still_read_and_written(name: str) -> None:
    assert name in TYPES, f"{name} may be on somebody's wire: keep the type, stop sending it instead"
    sample = msgspec.json.decode(json.dumps(MESSAGES[name]["message"]), type=TYPES[name])
    data = bytes.fromhex(MESSAGES[name]["hex"])
    assert codec.decode(data, TYPES[name]) == sample
    # the same map; how wide its header is depends on how many fields there could be
    assert msgspec.msgpack.decode(codec.encode(sample)) == msgspec.msgpack.decode(data)


def test_defaults_do_not_travel() -> None:
    assert len(codec.encode(m.Rollcall(asker="a"))) < 30
    assert msgspec.msgpack.decode(codec.encode(m.Cancel(request=RequestId("r"), reason="x"))) == {
        "type": "Cancel", "request": "r", "reason": "x"}


def test_fields_of_the_future_are_ignored() -> None:
    data = msgspec.msgpack.encode({"type": "Rollcall", "asker": "a", "mood": "curious"})
    assert codec.decode(data, m.Rollcall) == m.Rollcall(asker="a")


def test_a_union_is_told_apart_by_its_tag() -> None:
    union = m.Accepted | m.Refused
    accepted = m.Accepted(request=RequestId("r"), attempt=0)
    refused = m.Refused(request=RequestId("r"), attempt=0, code="spec", message="no")
    assert codec.decode(codec.encode(accepted), union) == accepted
    assert codec.decode(codec.encode(refused), union) == refused


@pytest.mark.parametrize("data", [
    b"", b"\xc1", b"\x80", msgspec.msgpack.encode(["Cancel"]), msgspec.msgpack.encode({"type": "Cancel"}),
    msgspec.msgpack.encode({"type": "Nothing", "request": "r", "reason": ""}),
    msgspec.msgpack.encode({"type": "Cancel", "request": 7, "reason": ""}),
    codec.encode(m.Rollcall(asker="a")),
])
def test_other_bytes_are_a_decode_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        codec.decode(data, m.Cancel)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        codec.decode(data, m.PrefillJob | m.DecodeJob | m.Handover)
    except msgspec.DecodeError:
        pass


@pytest.mark.parametrize("name", sorted(TYPES))
def test_torn_messages_are_a_decode_error(name: str) -> None:
    data = bytes.fromhex(MESSAGES[name]["hex"])
    for length in range(len(data)):
        with pytest.raises(msgspec.DecodeError):
            codec.decode(data[:length], TYPES[name])
