"""Subjects: rendered, matched and taken apart without joining strings."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus import streams
from shared.bus.subjects import ALL, JOB, KV_STORED, PLACE, PREFIX, find
from shared.messages import Message

tokens = st.text("abcXYZ012-_", min_size=1, max_size=20)


def test_an_address_and_a_pattern() -> None:
    assert KV_STORED.at(worker="w1").text == "mb.v1.kv.w1.stored"
    assert KV_STORED.any().text == "mb.v1.kv.*.stored"
    assert PLACE.at().text == PLACE.any().text == "mb.v1.conductor.place"


@given(tokens)
def test_what_is_rendered_can_be_taken_apart(worker: str) -> None:
    address = JOB.at(worker=worker)
    assert JOB.params(address.text) == {"worker": worker}
    assert find(address.text) is JOB


@pytest.mark.parametrize("value", ["", "a.b", "*", ">", "a b", "a\r\nPUB x", "ä"])
def test_a_value_cannot_change_the_shape_of_a_subject(value: str) -> None:
    with pytest.raises(ValueError, match="cannot stand in a subject"):
        JOB.at(worker=value)


def test_holes_must_be_filled_and_only_those() -> None:
    for params in ({}, {"gateway": "g"}, {"worker": "w", "gateway": "g"}):
        with pytest.raises(ValueError, match="takes"):
            JOB.at(**params)


@pytest.mark.parametrize("text", [
    "mb.v1.worker.w.job.more", "mb.v2.worker.w.job", "mb.v1.worker..job", "", "mbxv1.placed",
])
def test_what_is_not_of_the_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not of the form"):
        JOB.params(text)
    assert find(text) is None


def test_no_address_is_of_two_subjects() -> None:
    for subject in ALL:
        address = subject.at(**dict.fromkeys(subject.param_names, "x")).text
        assert [other for other in ALL if _fits(other, address)] == [subject]


def _fits(subject: typing.Any, text: str) -> bool:
    try:
        subject.params(text)
    except ValueError:
        return False
    return True


def test_every_subject_is_complete() -> None:
    for subject in ALL:
        assert subject.speaks and subject.hears and subject.about, subject.template
        for kind in (subject.payload, subject.reply):
            for message in typing.get_args(kind) or ([kind] if kind else []):
                assert issubclass(message, Message), f"{message} on {subject.template}"
    templates = [subject.template for subject in ALL]
    assert len(templates) == len(set(templates))


def test_streams_keep_what_subjects_say() -> None:
    declared = {stream.name for stream in streams.STREAMS}
    assert {subject.stream for subject in ALL if subject.stream} == declared
    assert all(consumer.stream in declared for consumer in streams.CONSUMERS)
    for stream in streams.STREAMS:
        assert all(pattern.startswith(PREFIX) for pattern in stream.subjects)


def test_messages_are_told_apart_by_their_tag() -> None:
    kinds = [kind for subject in ALL for union in (subject.payload, subject.reply) if union
             for kind in (typing.get_args(union) or [union])]
    tags = {kind: msgspec.inspect.type_info(kind).tag for kind in kinds}  # type: ignore[attr-defined]
    assert len(set(tags.values())) == len(tags)
