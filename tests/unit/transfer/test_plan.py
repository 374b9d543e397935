"""Cutting, joining and routing."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ids import HostId, Incarnation, WorkerId
from shared.messages import Endpoint, Range
from shared.transfer.addresses import DeviceAddress
from shared.transfer.frames import MAX_CLAIM_PARTS, MAX_PARTS, Span
from shared.transfer.plan import (
    RULES,
    Choice,
    Piece,
    choose_paths,
    needs_checksums,
    plan_batches,
    spread_bytes,
)
from shared.transfer.types import Slice


def slice_of(offset: int, remote: int, length: int, segment: str = "kv") -> Slice:
    return Slice("own", offset, Range(segment=segment, offset=remote, length=length))


def parts_of(item: Slice) -> list[tuple[int, int, int]]:
    """(own offset, remote offset, length)"""
    return [(item.offset + i * item.stride, item.remote.offset + i * item.stride, item.remote.length)
            for i in range(item.count)]


def strided(offset: int, remote: int, length: int, count: int, gap: int) -> Slice:
    return Slice("own", offset, Range(segment="kv", offset=remote, length=length), count, length + gap)


plain = st.builds(slice_of, st.integers(0, 100), st.integers(0, 100), st.integers(0, 50))
slices = st.lists(plain | st.builds(strided, st.integers(0, 100), st.integers(0, 100), st.integers(1, 20),
                                    st.integers(2, 6), st.integers(0, 9)), max_size=20)


@given(slices, st.booleans(), st.booleans(), st.integers(1, 30), st.integers(1, 60), st.integers(1, 5))
def test_batches_hold_every_byte_once_and_within_bounds(
        given_slices: list[Slice], join: bool, keep: bool, piece_bytes: int, batch_bytes: int, max_pieces: int) -> None:
    batches = plan_batches(dict(enumerate(given_slices)), join=join, strided=keep, piece_bytes=piece_bytes,
                           batch_bytes=batch_bytes, max_pieces=max_pieces)
    planned: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        assert 0 < len(batch.pieces) <= max_pieces
        assert batch.nbytes == sum(piece.remote.nbytes for piece in batch.pieces) <= batch_bytes
        for piece in batch.pieces:
            assert piece.remote.nbytes <= piece_bytes and (keep or piece.remote.count == 1)
            for start, stop in piece.remote.parts():
                planned.update((piece.offset + byte - piece.remote.offset, byte) for byte in range(start, stop))
    assert planned == Counter((own + i, remote + i) for item in given_slices
                              for own, remote, length in parts_of(item) for i in range(length))


@given(slices, st.booleans(), st.booleans(), st.integers(1, 30))
def test_every_byte_is_in_a_piece_of_its_slice(given_slices: list[Slice], join: bool, keep: bool,
                                               piece_bytes: int) -> None:
    members: Counter[int] = Counter()
    for batch in plan_batches(dict(enumerate(given_slices)), join=join, strided=keep, piece_bytes=piece_bytes):
        for piece in batch.pieces:
            assert join or len(set(piece.indexes)) == 1
            members.update(piece.indexes)
            if len(piece.indexes) == 1:
                item = given_slices[piece.indexes[0]]
                own = {(start + i, there + i) for start, there, length in parts_of(item) for i in range(length)}
                assert {(piece.offset + byte - piece.remote.offset, byte)
                        for start, stop in piece.remote.parts() for byte in range(start, stop)} <= own
    assert set(members) == {i for i, item in enumerate(given_slices) if item.nbytes}


def test_neighbours_on_both_sides_become_one_piece_unless_each_is_to_be_proven() -> None:
    neighbours = {0: slice_of(10, 110, 10), 1: slice_of(20, 200, 5), 2: slice_of(0, 100, 10)}
    batch, = plan_batches(neighbours, join=True)
    assert batch.pieces == (Piece((2, 0), "own", 0, Span("kv", 100, 20)), Piece((1,), "own", 20, Span("kv", 200, 5)))
    batch, = plan_batches({0: slice_of(90, 900, 5), 1: slice_of(10, 100, 10), 2: slice_of(50, 500, 5)}, join=True)
    assert [piece.indexes for piece in batch.pieces] == [(0,), (1,), (2,)], "in the order they were given"
    batch, = plan_batches(neighbours, join=False)
    assert [piece.indexes for piece in batch.pieces] == [(0,), (1,), (2,)]


def test_layers_of_blocks_become_whole_blocks_where_parts_cannot_be_said() -> None:
    layers = {layer: strided(layer * 10, 1000 + layer * 10, 10, 3, 30) for layer in range(4)}
    batch, = plan_batches(layers, join=True)
    assert [piece.remote for piece in batch.pieces] == [Span("kv", 1000, 120)]
    batch, = plan_batches(layers, join=True, strided=True)
    assert batch.pieces == (Piece((0, 1, 2, 3), "own", 0, Span("kv", 1000, 120)),), "no gaps are left"
    del layers[1]
    batch, = plan_batches(layers, join=True, strided=True)
    assert [piece.remote for piece in batch.pieces] == [Span("kv", 1000, 10, 3, 40), Span("kv", 1020, 20, 3, 40)]
    batch, = plan_batches(layers, join=False, strided=True)
    assert [piece.indexes for piece in batch.pieces] == [(0,), (2,), (3,)]


def test_a_batch_has_no_more_parts_than_a_claim_may_have() -> None:
    tiny = {i: strided(i * 4 * MAX_PARTS, i * 4 * MAX_PARTS, 1, MAX_PARTS, 2) for i in range(5)}
    batches = plan_batches(tiny, join=False, strided=True)
    assert [sum(piece.remote.count for piece in batch.pieces) for batch in batches] == [
        MAX_CLAIM_PARTS, MAX_CLAIM_PARTS, MAX_PARTS]


def test_slices_of_two_segments_are_not_joined() -> None:
    batch, = plan_batches({0: slice_of(0, 0, 4, "a"), 1: slice_of(4, 4, 4, "b")}, join=True)
    assert [piece.remote.segment for piece in batch.pieces] == ["a", "b"]


def test_a_push_is_spread_over_lanes_only_where_each_gets_enough() -> None:
    assert spread_bytes(0, 2) == spread_bytes(3 << 20, 2) == 2 << 20
    assert spread_bytes(6 << 20, 2) == 3 << 20
    assert spread_bytes(1 << 30, 2) == 8 << 20
    assert spread_bytes(20 << 20, 2) == 5 << 20, "two each, not two and one"


@pytest.mark.parametrize(("policy", "path", "peer_host", "expected"), [
    ("auto", "tcp", "there", True), ("auto", "tcp", "here", False), ("auto", "shm", "here", False),
    ("auto", "rdma", "there", False), ("on", "shm", "here", True), ("off", "tcp", "there", False),
])
def test_checksums_are_for_where_bytes_can_change(policy: str, path: str, peer_host: str, expected: bool) -> None:
    assert needs_checksums(policy, path, "here", peer_host) is expected


def endpoint(worker: str, host: str, shm: str = "/s", tcp: str = "h:1") -> Endpoint:
    return Endpoint(worker=WorkerId(worker), incarnation=Incarnation("i"), host=HostId(host), shm=shm, tcp=tcp)


ALL = ("copy", "shm", "tcp")
OWN = endpoint("a", "here")


def test_the_best_path_comes_first_and_the_rest_says_why_not() -> None:
    routes = choose_paths(ALL, OWN, endpoint("b", "here"), same_process=False, paused={})
    assert routes.choices == (Choice("shm", "/s", "same host"), Choice("tcp", "h:1", "network"))
    assert routes.excluded == {"copy": "another process"}


def test_same_process_is_copied() -> None:
    assert choose_paths(ALL, OWN, endpoint("b", "here"), same_process=True, paused={}).choices[0].path == "copy"


def test_another_host_leaves_tcp() -> None:
    routes = choose_paths(ALL, OWN, endpoint("b", "there"), same_process=False, paused={})
    assert [choice.path for choice in routes.choices] == ["tcp"]
    assert routes.excluded["shm"] == "another host"


def test_a_paused_path_comes_last_but_is_not_lost() -> None:
    routes = choose_paths(ALL, OWN, endpoint("b", "here"), same_process=False, paused={"shm": "broken"})
    assert [choice.path for choice in routes.choices] == ["tcp", "shm"]
    assert routes.choices[1].paused == "broken"


def gpu(worker: str, device: str, *reaches: str, host: str = "here") -> Endpoint:
    address = str(DeviceAddress(f"/{worker}", device, reaches))
    return msgspec.structs.replace(endpoint(worker, host), nvlink=address)


@pytest.mark.parametrize(("own", "peer", "same_process", "expected"), [
    (gpu("a", "0", "0"), gpu("b", "0", "0"), False, ("/b", "same GPU")),
    (gpu("a", "0", "0"), gpu("b", "1", "0", "1"), False, ("/b", "GPUs with direct access")),
    # The receiver does the copying, so it is its GPU that must reach the other one.
    (gpu("a", "0", "0", "1"), gpu("b", "1", "1"), False, ("", "no direct access between the GPUs")),
    (gpu("a", "0", "0"), gpu("b", "0", "0", host="there"), False, ("", "another host")),
    (gpu("a", "0", "0"), gpu("b", "0", "0"), True, ("", "same process")),
    (endpoint("a", "here"), gpu("b", "0", "0"), False, ("", "no CUDA memory here")),
    (gpu("a", "0", "0"), endpoint("b", "here"), False, ("", "peer offers none")),
    (gpu("a", "0", "0"), msgspec.structs.replace(OWN, nvlink="x"), False, ("", "peer's address makes no sense")),
])
def test_gpus_of_a_host_need_direct_access(own: Endpoint, peer: Endpoint, same_process: bool,
                                           expected: tuple[str, str]) -> None:
    reach = RULES["nvlink"](own, peer, same_process)
    assert (reach.address, reach.reason) == expected


def test_only_allowed_and_offered_paths_are_chosen() -> None:
    peer = endpoint("b", "here", tcp="")
    assert choose_paths(("tcp",), OWN, peer, same_process=True, paused={}).choices == ()
    assert [choice.path for choice in choose_paths(ALL, OWN, peer, same_process=False, paused={}).choices] == ["shm"]
