"""How a worker's store is set up: the order of eviction, and the SSD tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.ids import SpecDigest, WorkerId
from shared.settings import BYTES, SECONDS


class SsdSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One frozen value per store agent. A worker's settings embed this: to operators each has the prefix ``ssd_``."""

    dir: Annotated[str, Meta(description="Directory for KV blocks on this host's SSD, kept over restarts; empty for none. Each worker has a directory of its worker_id in it, so worker_id must be set.")] = ""
    bytes: Annotated[int, Meta(description="Most disk space that one worker's blocks take.", gt=0, extra=BYTES)] = 10 << 30
    blocks: Annotated[int, Meta(description="Most blocks one worker keeps there; 0 for as many as the bytes hold.", ge=0)] = 0
    ahead: Annotated[float, Meta(description="Share of the pool that is kept free or copied to the SSD without delay, the blocks to be evicted next first; 1 copies every block at once. See ssd_idle_bytes_per_s for the others.", ge=0, le=1)] = 0.25
    idle_bytes_per_s: Annotated[int, Meta(description="Rate at which blocks that ssd_ahead does not want yet are copied all the same, once they have lain in memory for some seconds, while the SSD has room and nothing better to do; 0 for not at all.", ge=0, extra=BYTES)] = 64 << 20
    least_odds: Annotated[float, Meta(description="Blocks that the cache policy thinks less likely to be used again are not copied.", ge=0, le=1)] = 0.02
    timeout_s: Annotated[float, Meta(description="Longest time one read may take, beside what its bytes take at ssd_min_bytes_per_s, before the SSD is left alone for a while; a write has five times as long.", gt=0, extra=SECONDS)] = 1.0
    min_bytes_per_s: Annotated[float, Meta(description="Slowest acceptable SSD, bytes per second.", gt=0)] = 50e6
    pause_s: Annotated[float, Meta(description="How long a failing SSD is left alone; twice as long each time, up to a minute.", gt=0, extra=SECONDS)] = 5.0
    readers: Annotated[int, Meta(description="Threads that read blocks.", ge=1, le=64)] = 4
    queue: Annotated[int, Meta(description="Reads that may wait; further ones are misses.", ge=1)] = 1024

    def directory(self, worker: WorkerId, spec: SpecDigest) -> Path:
        """Where ``worker`` keeps the blocks of ``spec``."""
        return self.worker_directory(worker) / spec

    def worker_directory(self, worker: WorkerId) -> Path:
        """Where all that ``worker`` keeps lies."""
        return Path(self.dir).expanduser().absolute() / worker
