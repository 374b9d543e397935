"""How a worker's transfer engine is set up; a service embeds this in its own settings."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.settings import BYTES, SECONDS


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One frozen value per engine."""

    paths: Annotated[tuple[str, ...], Meta(description="Transports that may be used, best first: copy, shm, tcp.")] = (
        "copy", "shm", "tcp")
    bind_host: Annotated[str, Meta(description="Address the TCP data plane listens on; its port is always a free one.")] = "127.0.0.1"
    advertise_host: Annotated[str, Meta(description="Address peers connect to; empty for bind_host, or this host's outward address when bind_host is a wildcard.")] = ""
    host_id: Annotated[str, Meta(description="Identity of this host, equal where memory can be shared; empty for the kernel's boot id.")] = ""
    socket_dir: Annotated[str, Meta(description="Directory of the unix socket that hands out segments; empty for a private temporary one.")] = ""
    checksums: Annotated[Literal["auto", "on", "off"], Meta(description="xxh3 of every piece, verified by the receiver: auto for TCP between hosts only, on, off.")] = "auto"
    huge_pages: Annotated[bool, Meta(description="Put registered memory on huge pages when enough of them are free.")] = False
    lanes: Annotated[int, Meta(description="Most connections to one peer on one path.", ge=1, le=64)] = 2
    max_inflight: Annotated[int, Meta(description="Bytes sent to one peer and not acknowledged; more wait their turn.", ge=1, extra=BYTES)] = 64 << 20
    max_connections: Annotated[int, Meta(description="Connections accepted at the same time; more are refused.", ge=1)] = 512
    connect_timeout_s: Annotated[float, Meta(description="Longest time a connection and its handshake take.", gt=0, extra=SECONDS)] = 2.0
    silence_s: Annotated[float, Meta(description="A peer that owes answers and is silent for longer loses its connection once a push to it times out.", gt=0, extra=SECONDS)] = 1.0
    min_timeout_s: Annotated[float, Meta(description="Deadline of a push without bytes; the size's share comes on top.", gt=0, extra=SECONDS)] = 5.0
    min_bytes_per_s: Annotated[float, Meta(description="Slowest acceptable transfer, bytes per second; gives a push its deadline.", gt=0)] = 50e6
    corrupt_every: Annotated[int, Meta(description="For tests: flip one byte in every nth slice sent after its checksum was computed; 0 never.", ge=0)] = 0

    @property
    def proofs(self) -> str:
        """The policy of checksums: bytes that are corrupted for a test must be found out."""
        return "on" if self.corrupt_every else self.checksums

    def timeout_s(self, nbytes: int) -> float:
        """Seconds a push of ``nbytes`` may take when its caller names no deadline."""
        return self.min_timeout_s + nbytes / self.min_bytes_per_s
