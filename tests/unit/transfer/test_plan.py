"""Cutting, joining and routing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.ids import HostId, Incarnation, WorkerId
from shared.messages import Endpoint, Range
from shared.transfer.frames import MAX_SEGMENTS, Span
from shared.transfer.plan import Choice, Run, choose_paths, join_spans, plan_batches, plan_runs
from shared.transfer.types import Slice


def slice_of(offset: int, remote: int, length: int, segment: str = "kv") -> Slice:
    return Slice("own", offset, Range(segment=segment, offset=remote, length=length))


slices = st.lists(st.builds(slice_of, st.integers(0, 100), st.integers(0, 100), st.integers(0, 50)), max_size=20)


@given(slices, st.integers(1, 30), st.integers(1, 60), st.integers(1, 5))
def test_batches_hold_every_byte_once_in_order_and_within_bounds(
        given_slices: list[Slice], piece_bytes: int, batch_bytes: int, max_pieces: int) -> None:
    batches = plan_batches(dict(enumerate(given_slices)), piece_bytes=piece_bytes, batch_bytes=batch_bytes,
                           max_pieces=max_pieces)
    planned = [(piece.index, piece.offset + i, piece.remote.offset + i)
               for batch in batches for piece in batch.pieces for i in range(piece.remote.length)]
    expected = [(index, item.offset + i, item.remote.offset + i)
                for index, item in enumerate(given_slices) for i in range(item.remote.length)]
    assert planned == expected
    for batch in batches:
        assert 0 < len(batch.pieces) <= max_pieces
        assert batch.nbytes == sum(piece.remote.length for piece in batch.pieces)
        assert batch.nbytes <= batch_bytes or len(batch.pieces) == 1
        assert all(piece.remote.length <= piece_bytes for piece in batch.pieces)


@given(slices)
def test_runs_move_the_same_bytes_as_their_pieces(given_slices: list[Slice]) -> None:
    for batch in plan_batches(dict(enumerate(given_slices)), piece_bytes=7):
        by_piece = [(piece.offset + i, piece.remote.offset + i)
                    for piece in batch.pieces for i in range(piece.remote.length)]
        by_run = [(run.offset + i, run.remote_offset + i)
                  for run in plan_runs(batch.pieces) for i in range(run.length)]
        assert by_run == by_piece


def test_neighbours_on_both_sides_become_one_run() -> None:
    batch, = plan_batches({0: slice_of(0, 100, 10), 1: slice_of(10, 110, 10), 2: slice_of(20, 200, 5)})
    assert plan_runs(batch.pieces) == [Run("own", 0, "kv", 100, 20), Run("own", 20, "kv", 200, 5)]
    assert join_spans([piece.remote for piece in batch.pieces]) == [("kv", 100, 20), ("kv", 200, 5)]


def test_a_batch_names_no_more_segments_than_one_answer_can_hand_out() -> None:
    many = {i: slice_of(i, 0, 1, segment=f"s{i}") for i in range(MAX_SEGMENTS + 1)}
    assert [len(batch.pieces) for batch in plan_batches(many)] == [MAX_SEGMENTS, 1]


def test_spans_of_two_segments_are_not_joined() -> None:
    assert join_spans([Span("a", 0, 4), Span("b", 4, 4)]) == [("a", 0, 4), ("b", 4, 4)]


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
    assert "broken" in routes.choices[1].reason


def test_only_allowed_and_offered_paths_are_chosen() -> None:
    peer = endpoint("b", "here", tcp="")
    assert choose_paths(("tcp",), OWN, peer, same_process=True, paused={}).choices == ()
    assert [choice.path for choice in choose_paths(ALL, OWN, peer, same_process=False, paused={}).choices] == ["shm"]
