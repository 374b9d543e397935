"""Which pair of network cards carries what. Pure: values in, values out; time is an argument.

A *rail* is one of our cards, one of the peer's, and the connection between them. A batch goes by the rail that is
predicted to finish it first::

    (bytes on their way through our card + bytes of the batch) / measured bandwidth of our card * NUMA penalty

where the penalty is how much further the batch's memory is from that card than memory of the card's own node. The
bytes on their way are those of all rails of the card, to whichever peer. A measurement grows old: a card that was
not used for a while is believed again what its link claims, so that one that was slow once gets another chance.

A rail that fails is down: nothing takes it until its cool-down is over, which doubles from failure to failure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shared.transfer.frames import MAX_RAILS

SMOOTHING = 0.2
"""Weight of the newest sample of a card's bandwidth."""
SAMPLE_BYTES = 64 << 10
"""Batches below this say more about latency than about bandwidth."""
STALE_S = 10.0
"""Age at which a measurement of a card that is not in use is forgotten."""
COOL_DOWN_S = 1.0
MAX_COOL_DOWN_S = 60.0
ROCE_V2 = "RoCE v2"
_IPV4 = bytes(10) + b"\xff\xff"
_LINK_LOCAL = b"\xfe\x80"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a card's table of addresses."""

    index: int
    raw: bytes
    """16 bytes; an IPv4 address stands in the last four of them (``::ffff:a.b.c.d``)."""
    kind: str
    """``RoCE v2``, ``IB/RoCE v1``."""
    interface: str = ""


@dataclass(frozen=True, slots=True)
class Nic:
    """One network card (one active port of it)."""

    name: str
    node: int
    """Its NUMA node; -1 unknown."""
    bytes_per_s: float
    """What the link is said to carry."""
    ethernet: bool
    virtual: bool
    """A program, not a card: work is done by whoever asks for it, while it asks."""
    gids: tuple[Gid, ...]


def choose_gid(nic: Nic, addresses: Collection[bytes], *, override: int | None = None) -> tuple[Gid, str]:
    """The address to speak from, and why; ``addresses``: those in use by this process, as GIDs.

    Raises :class:`LookupError` when the card has none that will do.
    """
    if override is not None:
        gid = next((gid for gid in nic.gids if gid.index == override), None)
        if gid is None:
            raise LookupError(f"{nic.name} has no GID {override}")
        return gid, "set"
    if not nic.ethernet:  # InfiniBand routes by LID within a subnet; entry 0 is the port's own
        if not nic.gids:
            raise LookupError(f"{nic.name} has no GID")
        return nic.gids[0], "InfiniBand's own"
    ranks: list[tuple[str, Callable[[Gid], bool]]] = [
        ("holds the address in use", lambda gid: gid.raw in addresses),
        ("an IPv4 address", lambda gid: gid.raw.startswith(_IPV4)),
        ("a routable IPv6 address", lambda gid: not gid.raw.startswith(_LINK_LOCAL)),
        ("link-local, nothing better", lambda gid: True),
    ]
    for why, fits in ranks:
        for gid in nic.gids:
            if gid.kind == ROCE_V2 and fits(gid):
                return gid, why
    raise LookupError(f"{nic.name} has no RoCE v2 GID")


def pair_nics(own: int, theirs: int) -> list[tuple[int, int]]:
    """Rails between ``own`` and ``theirs`` cards, as indexes: the nth with the nth, the shorter side repeating.

    Cards of one place in two hosts usually hang on one switch.
    """
    if not own or not theirs:
        return []
    return [(i % own, i % theirs) for i in range(min(MAX_RAILS, max(own, theirs)))]


@dataclass(frozen=True, slots=True)
class Topology:
    """``distances``: ``{NUMA node: distance to node 0, 1, ...}``, as the kernel gives them (10: the own node)."""

    distances: Mapping[int, Sequence[int]]

    def penalty(self, nic_node: int, buffer_node: int) -> float:
        """How many times further than the card's own node; 1 where a node is unknown."""
        row = self.distances.get(nic_node, ())
        if not 0 <= nic_node < len(row) or not 0 <= buffer_node < len(row):
            return 1.0
        return max(1.0, row[buffer_node] / row[nic_node])

    def matrix(self, nics: Sequence[Nic]) -> dict[str, dict[int, float]]:
        """``{card: {NUMA node: penalty}}``"""
        return {nic.name: {node: self.penalty(nic.node, node) for node in sorted(self.distances)} for nic in nics}


class Load:
    """What is on its way through one of our cards, and how fast it has been going. Shared by all its rails."""

    def __init__(self, claimed_bytes_per_s: float) -> None:
        self._claimed = self._measured = claimed_bytes_per_s
        self._has_measured = False
        self._finished_s = 0.0
        self.inflight_bytes = 0

    def bytes_per_s(self, now_s: float) -> float:
        """As measured; as the link claims while there is no measurement, or an old one only."""
        stale = not self.inflight_bytes and now_s - self._finished_s > STALE_S
        return self._claimed if stale else self._measured

    def started(self, nbytes: int) -> None:
        """A batch is given to the card."""
        self.inflight_bytes += nbytes

    def dropped(self, nbytes: int) -> None:
        """It will not finish."""
        self.inflight_bytes -= nbytes

    def finished(self, nbytes: int, *, started_s: float, now_s: float) -> None:
        """It has arrived; it had the card to itself since the later of its start and the end of the one before."""
        self.inflight_bytes -= nbytes
        alone_s = now_s - max(started_s, self._finished_s)
        self._finished_s = now_s
        if nbytes < SAMPLE_BYTES or alone_s <= 0:
            return
        weight = SMOOTHING if self._has_measured else 1.0
        self._measured += weight * (nbytes / alone_s - self._measured)
        self._has_measured = True

    def predicted_s(self, nbytes: int, penalty: float, now_s: float) -> float:
        """Seconds until ``nbytes`` more would have passed."""
        return (self.inflight_bytes + nbytes) / self.bytes_per_s(now_s) * penalty


@dataclass(slots=True)
class Rail:
    """One of our cards to one of the peer's."""

    own: int
    theirs: int
    nic: Nic
    load: Load
    up: bool = False
    cool_down_s: float = 0.0
    why: str = ""
    """Of the last failure."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The rail taken, and why."""

    rail: int
    predicted_s: float
    reason: str


class Rails:
    """All rails to one peer."""

    def __init__(self, rails: Sequence[Rail], topology: Topology) -> None:
        self.rails = list(rails)
        self._topology = topology

    def choose(self, nbytes: int, *, buffer_node: int, now_s: float) -> Choice | None:
        """The rail that is up and predicted to finish first; ``None`` when none is up."""
        best: Choice | None = None
        for i, rail in enumerate(self.rails):
            if not rail.up:
                continue
            penalty = self._topology.penalty(rail.nic.node, buffer_node)
            predicted_s = rail.load.predicted_s(nbytes, penalty, now_s)
            if best is None or predicted_s < best.predicted_s:
                best = Choice(i, predicted_s, f"{rail.nic.name}: {rail.load.inflight_bytes} bytes before it, "
                                              f"{rail.load.bytes_per_s(now_s) / 1e9:.2f} GB/s, penalty {penalty:.1f}")
        return best

    def opened(self, rail: int) -> None:
        """It is connected."""
        self.rails[rail].up = True

    def worked(self, rail: int) -> None:
        """It carried a batch: its failures are forgiven."""
        self.rails[rail].cool_down_s = 0.0

    def failed(self, rail: int, why: str) -> float:
        """It takes nothing more; returns the seconds until another attempt."""
        item = self.rails[rail]
        item.up, item.why = False, why
        item.cool_down_s = min(MAX_COOL_DOWN_S, item.cool_down_s * 2) if item.cool_down_s else COOL_DOWN_S
        return item.cool_down_s

    @property
    def down(self) -> list[int]:
        """Rails that take nothing."""
        return [i for i, rail in enumerate(self.rails) if not rail.up]

    @property
    def why_down(self) -> str:
        """What became of those that are down."""
        return "; ".join(f"{rail.nic.name}: {rail.why}" for rail in self.rails if not rail.up and rail.why)
