"""Where memory is and who may write it. No raw address ever travels."""

from __future__ import annotations

from shared.ids import HostId, Incarnation, OperationId, WorkerId
from shared.messages.base import Part


class Endpoint(Part, frozen=True):
    """How to reach a worker's memory: one address a transport, empty where it has none."""

    worker: WorkerId
    incarnation: Incarnation
    host: HostId
    shm: str = ""
    """Path of the unix socket that takes claims, and descriptors of their memory, from peers on the same host."""
    tcp: str = ""
    """``host:port`` of the TCP data plane."""
    rdma: str = ""
    """``host:port`` where RDMA queue pairs are agreed on."""
    nvlink: str = ""
    """Unix socket that serves peers of the same host whose memory is on a GPU, that GPU, and those it reaches."""
    paths: list[str] = []
    """Paths that its pushes may take, best first; empty for unknown."""


class Range(Part, frozen=True):
    """``[offset, offset + length)`` bytes of a registered segment."""

    segment: str
    offset: int
    length: int


class Grant(Part, frozen=True):
    """Leave to write ``ranges`` for ``operation`` until ``expires_at_s`` (Unix seconds of the granter's clock).

    ``token`` is an HMAC over all of it under a secret that never leaves the granter; it dies with its incarnation.
    """

    worker: WorkerId
    incarnation: Incarnation
    operation: OperationId
    ranges: list[Range]
    expires_at_s: float
    token: bytes
    peer: WorkerId = WorkerId("")
    """Who may use it; empty for whoever holds it."""
    generation: int = 0
    """Which grant of its granter this is, counted from 1."""
