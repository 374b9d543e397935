"""How a push is cut, joined and routed. Pure: values in, values out.

* Neighbours on *both* sides are joined into one piece, in whatever order they were given, when a checksum of each
  slice's own is not wanted.
* Parts of a slice that stand in regular distances stay together where the path can say so, and are slices elsewhere.
* A slice longer than ``piece_bytes`` is cut; a piece is verified by itself, so a slice fails by its own pieces only.
* Pieces are packed into batches, the unit of a claim, an acknowledgement and of pipelining.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from shared.messages import Endpoint
from shared.transfer.addresses import DeviceAddress
from shared.transfer.frames import MAX_CLAIM_PARTS, MAX_PARTS, MAX_SPANS, Span
from shared.transfer.types import Slice

PIECE_BYTES = 8 << 20
BATCH_BYTES = 8 << 20
LOCAL_TCP_BATCH_BYTES = 32 << 20
"""Of bytes that are neither proven nor spread over connections: nothing is gained by answers in between (measured)."""
DEVICE_BATCH_BYTES = 64 << 20
"""Between GPUs 8 MB take no longer than asking for them."""
STAGE_BYTES = 1 << 20
"""Most bytes of a batch that has to be staged."""
MIN_SPREAD_BYTES = 2 << 20
"""A batch below this is not worth another thread's waking (measured)."""


class Piece(msgspec.Struct, frozen=True):
    """``remote`` is filled from ``offset`` on of the local ``segment``, for the slices with ``indexes``."""

    indexes: tuple[int, ...]
    segment: str
    offset: int
    remote: Span


class Batch(msgspec.Struct, frozen=True):
    """Pieces that are claimed, sent and acknowledged together."""

    pieces: tuple[Piece, ...]
    nbytes: int


def plan_batches(slices: Mapping[int, Slice], *, join: bool, strided: bool = False, piece_bytes: int = PIECE_BYTES,
                 batch_bytes: int = BATCH_BYTES, max_pieces: int = MAX_SPANS) -> list[Batch]:
    """Cuts and joins ``{index: slice}`` into batches; slices of no bytes appear in none."""
    batches: list[Batch] = []
    pieces: list[Piece] = []
    filled = parts = 0
    for piece in _pieces(slices, join, strided, min(piece_bytes, batch_bytes)):
        length, count = piece.remote.nbytes, piece.remote.count
        if pieces and (filled + length > batch_bytes or parts + count > MAX_CLAIM_PARTS or len(pieces) == max_pieces):
            batches.append(Batch(tuple(pieces), filled))
            pieces, filled, parts = [], 0, 0
        pieces.append(piece)
        filled, parts = filled + length, parts + count
    if pieces:
        batches.append(Batch(tuple(pieces), filled))
    return batches


def spread_bytes(nbytes: int, lanes: int) -> int:
    """Size of the batches of a push of ``nbytes`` so that each of ``lanes`` gets as many, if that is worth it."""
    rounds = -(-nbytes // (lanes * BATCH_BYTES))
    return max(MIN_SPREAD_BYTES, -(-nbytes // (lanes * rounds))) if rounds else MIN_SPREAD_BYTES


@dataclass(frozen=True, slots=True)
class Choice:
    """One path a push may take, and why it stands where it stands."""

    path: str
    address: str
    reason: str
    """Of a few words that no peer can add to: it labels a metric."""
    paused: str = ""
    """What failed on it a moment ago, so that it is tried last."""


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


def _reach_nvlink(own: Endpoint, peer: Endpoint, same_process: bool) -> Reach:
    if own.host != peer.host:
        return Reach("", "another host")
    if same_process:
        return Reach("", "same process")
    if not own.nvlink:
        return Reach("", "no CUDA memory here")
    if not peer.nvlink:
        return Reach("", "peer offers none")
    try:
        mine, theirs = DeviceAddress.parse(own.nvlink), DeviceAddress.parse(peer.nvlink)
    except ValueError:
        return Reach("", "peer's address makes no sense")
    if mine.device not in theirs.reaches:
        return Reach("", "no direct access between the GPUs")
    return Reach(theirs.socket, "same GPU" if mine.device == theirs.device else "GPUs with direct access")


def _reach_shm(own: Endpoint, peer: Endpoint, same_process: bool) -> Reach:
    if own.host != peer.host:
        return Reach("", "another host")
    return Reach(peer.shm, "same host" if peer.shm else "peer offers none")


def _reach_rdma(own: Endpoint, peer: Endpoint, same_process: bool) -> Reach:
    if not own.rdma:
        return Reach("", "no RDMA device here")
    return Reach(peer.rdma, "RDMA devices at both ends" if peer.rdma else "peer offers none")


def _reach_tcp(own: Endpoint, peer: Endpoint, same_process: bool) -> Reach:
    return Reach(peer.tcp, "network" if peer.tcp else "peer offers none")


RULES: dict[str, Callable[[Endpoint, Endpoint, bool], Reach]] = {
    "copy": _reach_copy, "nvlink": _reach_nvlink, "shm": _reach_shm, "rdma": _reach_rdma,
    "tcp": _reach_tcp,
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
            doubtful.append(Choice(path, reach.address, reach.reason, paused[path]))
        else:
            healthy.append(Choice(path, reach.address, reach.reason))
    return Routes(tuple(healthy + doubtful), excluded)


def needs_checksums(policy: str, path: str, own_host: str, peer_host: str) -> bool:
    """Must a sender prove its bytes? ``auto``: where they cross between hosts and nothing below checks them all.

    Within a host they never leave its memory, and RDMA's packets carry a CRC-32 from end to end; TCP's 16-bit
    sum lets too much through.
    """
    if policy == "auto":
        return path == "tcp" and own_host != peer_host
    return policy == "on"


class _Rows(NamedTuple):
    """Parts of slices, in the order that makes neighbours stand next to each other."""

    segment: str
    own: str
    parts: int
    stride: int
    offset: int
    own_offset: int
    length: int
    indexes: tuple[int, ...]


def _pieces(slices: Mapping[int, Slice], join: bool, strided: bool, piece_bytes: int) -> Iterator[Piece]:
    rows = [_Rows(item.remote.segment, item.segment, item.count, item.stride if item.count > 1 else 0,
                  item.remote.offset, item.offset, item.remote.length, (index,))
            for index, item in slices.items() if item.remote.length]
    if join and len(rows) > 1:
        rows = _joined(sorted(rows), piece_bytes)
    rows = [_whole(row) for row in rows]
    if any(row.parts > 1 and (not strided or row.length > piece_bytes) for row in rows):
        rows = [part for row in rows for part in _parts(row)]
        if join and len(rows) > 1:
            rows = _joined(sorted(rows), piece_bytes)
    if join:  # joined by where they lie, sent as they were given: what a deadline cuts off is the end, not the middle
        rows.sort(key=lambda row: min(row.indexes))
    for row in rows:
        yield from _cut(row, piece_bytes)


def _joined(rows: Sequence[_Rows], piece_bytes: int) -> list[_Rows]:
    """Neighbours as one, as long as that is no longer than a piece."""
    joined = [rows[0]]
    for row in rows[1:]:
        last = joined[-1]
        length = last.length + row.length
        if (row.offset == last.offset + last.length and row.own_offset == last.own_offset + last.length
                and row[:4] == last[:4] and length <= (min(row.stride, piece_bytes) or piece_bytes)):
            joined[-1] = last._replace(length=length, indexes=last.indexes + row.indexes)
        else:
            joined.append(row)
    return joined


def _whole(row: _Rows) -> _Rows:
    """Parts without gaps are one."""
    if row.parts == 1 or row.length < row.stride:
        return row
    return row._replace(parts=1, stride=0, length=row.length * row.parts)


def _parts(row: _Rows) -> Iterator[_Rows]:
    """Each part by itself."""
    for step in range(0, row.parts * row.stride, row.stride) if row.parts > 1 else (0,):
        yield row._replace(parts=1, stride=0, offset=row.offset + step, own_offset=row.own_offset + step)


def _cut(row: _Rows, piece_bytes: int) -> Iterator[Piece]:
    """Pieces of a row: whole parts, or a part's own if it is longer than a piece."""
    segment, own, count, stride, offset, own_offset, length, indexes = row
    if count == 1:
        for start in range(0, length, piece_bytes):
            span = Span(segment, offset + start, min(piece_bytes, length - start))
            yield Piece(indexes, own, own_offset + start, span)
        return
    together = min(MAX_PARTS, piece_bytes // length)
    for first in range(0, count, together):
        step = first * stride
        yield Piece(indexes, own, own_offset + step,
                    Span(segment, offset + step, length, min(together, count - first), stride))
