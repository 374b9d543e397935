"""How a worker's transfer engine is set up. A worker's settings embed this: to operators each has the prefix ``transfer_``."""

from __future__ import annotations

from math import isnan
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.errors import Bug
from shared.settings import BYTES, SECONDS

MAX_TIMEOUT_S = 600.0


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One frozen value per engine."""

    paths: Annotated[tuple[str, ...], Meta(description="Transports that may be used, best first: copy, nvlink, shm, rdma, tcp.")] = (
        "copy", "nvlink", "shm", "rdma", "tcp")
    host: Annotated[str, Meta(description="Address the TCP data plane listens on; its port is always a free one.")] = "127.0.0.1"
    advertise: Annotated[str, Meta(description="Address peers connect to; empty for the address bound, or this host's outward address when that is a wildcard.")] = ""
    host_id: Annotated[str, Meta(description="Identity of this host, equal where memory can be shared; empty for the kernel's boot id.")] = ""
    socket_dir: Annotated[str, Meta(description="Directory of the unix sockets that serve peers on this host; empty for a private one. Containers of one host share a volume here.")] = ""
    checksums: Annotated[Literal["auto", "on", "off"], Meta(description="xxh3 of every piece, verified by the receiver: auto for TCP between hosts only, on, off.")] = "auto"
    huge_pages: Annotated[bool, Meta(description="Put registered memory on huge pages when enough of them are free.")] = False
    rdma_devices: Annotated[tuple[str, ...], Meta(description="RDMA devices that may be used; empty for all with an active port.")] = ()
    rdma_gid_index: Annotated[int, Meta(description="Entry of each RDMA device's GID table to speak from; -1 chooses the one that holds the address in use.", ge=-1)] = -1
    lanes: Annotated[int, Meta(description="Most connections to one peer on one path.", ge=1, le=64)] = 2
    max_inflight: Annotated[int, Meta(description="Bytes sent to one peer and not acknowledged; more wait their turn.", ge=1, extra=BYTES)] = 64 << 20
    max_connections: Annotated[int, Meta(description="Connections accepted at the same time; more are refused.", ge=1)] = 512
    connect_timeout_s: Annotated[float, Meta(description="Longest time a connection and its handshake take.", gt=0, extra=SECONDS)] = 2.0
    silence_s: Annotated[float, Meta(description="A peer that owes answers and is silent for longer loses its connection once a push to it times out.", gt=0, extra=SECONDS)] = 1.0
    min_timeout_s: Annotated[float, Meta(description="Deadline of a push without bytes; the size's share comes on top.", gt=0, extra=SECONDS)] = 5.0
    min_bytes_per_s: Annotated[float, Meta(description="Slowest acceptable transfer, bytes per second; gives a push its deadline.", gt=0)] = 50e6
    native: Annotated[bool, Meta(description="Use the compiled part of the engine where it was built.")] = True
    spin_us: Annotated[float, Meta(description="Longest time either end of a connection looks for a message before it sleeps; needs the compiled part and two processors; 0 never looks.", ge=0, le=10_000)] = 250.0
    corrupt_every: Annotated[int, Meta(description="For tests: flip one byte in every nth slice sent after its checksum was computed; 0 never.", ge=0)] = 0

    @property
    def proofs(self) -> str:
        """The policy of checksums: bytes that are corrupted for a test must be found out."""
        return "on" if self.corrupt_every else self.checksums

    def timeout_s(self, nbytes: int, asked_s: float | None = None) -> float:
        """Seconds a push of ``nbytes`` may take: what its caller asked for, else in proportion to its size.

        Ten minutes at most: every push ends. Raises :class:`Bug` for what is no number.
        """
        if asked_s is not None and isnan(asked_s):
            raise Bug("timeout_s is not a number")
        return min(MAX_TIMEOUT_S, self.min_timeout_s + nbytes / self.min_bytes_per_s if asked_s is None else asked_s)
