"""How a push is cut, joined and routed. Pure: values in, values out.

* A slice longer than ``piece_bytes`` is cut; a piece has its own checksum, so a slice fails by its own pieces only.
* Pieces are packed into batches, the unit of a claim, an acknowledgement and of pipelining.
* Pieces that are neighbours on *both* sides are moved as one run: one copy, one part of a gathered send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shared.messages import Endpoint
from shared.transfer.frames import MAX_SEGMENTS, MAX_SPANS, Span
from shared.transfer.types import Slice

PIECE_BYTES = 4 << 20
BATCH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """``remote.length`` bytes at ``offset`` of the local ``segment``; part of the push's slice ``index``."""

    index: int
    segment: str
    offset: int
    remote: Span


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that are claimed, sent and acknowledged together."""

    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` bytes, contiguous on both sides: ``[offset, ...)`` here to ``[remote_offset, ...)`` there."""

    segment: str
    offset: int
    remote_segment: str
    remote_offset: int
    length: int


def plan_batches(slices: Mapping[int, Slice], *, piece_bytes: int = PIECE_BYTES, batch_bytes: int = BATCH_BYTES,
                 max_pieces: int = MAX_SPANS) -> list[Batch]:
    """Cuts ``{index: slice}`` into batches, in order; slices of no bytes appear in none."""
    batches: list[Batch] = []
    pieces: list[Piece] = []
    segments: set[str] = set()
    filled = 0
    for piece in _pieces(slices, piece_bytes):
        remote = piece.remote
        if pieces and (filled + remote.length > batch_bytes or len(pieces) == max_pieces
                       or (remote.segment not in segments and len(segments) == MAX_SEGMENTS)):
            batches.append(Batch(tuple(pieces), filled))
            pieces, segments, filled = [], set(), 0
        pieces.append(piece)
        segments.add(remote.segment)
        filled += remote.length
    if pieces:
        batches.append(Batch(tuple(pieces), filled))
    return batches


def plan_runs(pieces: Sequence[Piece]) -> list[Run]:
    """Joins neighbours of ``pieces``, which keep their order."""
    runs: list[Run] = []
    for piece in pieces:
        remote = piece.remote
        last = runs[-1] if runs else None
        if (last is not None and last.segment == piece.segment and last.remote_segment == remote.segment
                and last.offset + last.length == piece.offset
                and last.remote_offset + last.length == remote.offset):
            runs[-1] = Run(last.segment, last.offset, last.remote_segment, last.remote_offset,
                           last.length + remote.length)
        else:
            runs.append(Run(piece.segment, piece.offset, remote.segment, remote.offset, remote.length))
    return runs


def join_spans(spans: Sequence[Span]) -> list[tuple[str, int, int]]:
    """Neighbouring ``spans`` joined: ``(segment, offset, length)``, in order. What a scattered receive reads into."""
    joined: list[tuple[str, int, int]] = []
    for span in spans:
        if joined:
            segment, offset, length = joined[-1]
            if segment == span.segment and offset + length == span.offset:
                joined[-1] = (segment, offset, length + span.length)
                continue
        joined.append((span.segment, span.offset, span.length))
    return joined


@dataclass(frozen=True, slots=True)
class Choice:
    """One path a push may take, and why it stands where it stands."""

    path: str
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class Routes:
    """What was chosen, best first, and why each other allowed path was not."""

    choices: tuple[Choice, ...]
    excluded: Mapping[str, str]
    """{path: reason}"""


@dataclass(frozen=True, slots=True)
class Reach:
    """Can a path connect two ends? ``address`` is empty when it cannot."""

    address: str
    reason: str


def _reach_copy(own: Endpoint, peer: Endpoint, same_process: bool) -> Reach:
    if same_process:
        return Reach(f"{peer.worker}/{peer.incarnation}", "same process")
    return Reach("", "another process")


def _reach_shm(own: Endpoint, peer: Endpoint, same_process: bool) -> Reach:
    if own.host != peer.host:
        return Reach("", "another host")
    return Reach(peer.shm, "same host" if peer.shm else "peer offers none")


def _reach_tcp(own: Endpoint, peer: Endpoint, same_process: bool) -> Reach:
    return Reach(peer.tcp, "network" if peer.tcp else "peer offers none")


RULES: dict[str, Callable[[Endpoint, Endpoint, bool], Reach]] = {
    "copy": _reach_copy, "shm": _reach_shm, "tcp": _reach_tcp,
}
"""{path: when it connects two ends}"""


def choose_paths(allowed: Sequence[str], own: Endpoint, peer: Endpoint, *, same_process: bool,
                 paused: Mapping[str, str]) -> Routes:
    """Paths from ``own`` to ``peer`` in order of ``allowed``; those in ``paused`` ({path: why}) come last."""
    healthy: list[Choice] = []
    doubtful: list[Choice] = []
    excluded: dict[str, str] = {}
    for path in allowed:
        reach = RULES[path](own, peer, same_process)
        if not reach.address:
            excluded[path] = reach.reason
        elif path in paused:
            doubtful.append(Choice(path, reach.address, f"{reach.reason}; paused: {paused[path]}"))
        else:
            healthy.append(Choice(path, reach.address, reach.reason))
    return Routes(tuple(healthy + doubtful), excluded)


def _pieces(slices: Mapping[int, Slice], piece_bytes: int) -> Iterator[Piece]:
    for index, item in slices.items():
        remote = item.remote
        for start in range(0, remote.length, piece_bytes):
            length = min(piece_bytes, remote.length - start)
            yield Piece(index, item.segment, item.offset + start, Span(remote.segment, remote.offset + start, length))
