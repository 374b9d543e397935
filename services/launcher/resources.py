"""What this machine lends the stack: cores and memory, container limits included."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Resources:
    """``cores`` a process may use at once (at least 1); ``memory_bytes`` it may still take."""

    cores: int
    memory_bytes: int


def measure() -> Resources:
    """Affinity and the cgroup's quota bound the cores; free memory and the cgroup's limit the memory."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(CGROUP)
    if quota is not None:
        cores = min(cores, max(1, math.floor(quota)))
    memory = available_bytes(MEMINFO)
    limit = memory_limit(CGROUP)
    return Resources(cores=max(1, cores), memory_bytes=memory if limit is None else min(memory, limit))


def cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of time the cgroup may use (v2, then v1); ``None`` without a limit."""
    match _words(cgroup / "cpu.max"):
        case [quota, period] if quota != "max":
            return int(quota) / int(period)
    quota_us, period_us = _words(cgroup / "cpu/cpu.cfs_quota_us"), _words(cgroup / "cpu/cpu.cfs_period_us")
    if quota_us and period_us and int(quota_us[0]) > 0:
        return int(quota_us[0]) / int(period_us[0])
    return None


def memory_limit(cgroup: Path) -> int | None:
    """Bytes the cgroup may still take: its limit less its use; ``None`` without a limit."""
    limit, used = _words(cgroup / "memory.max"), _words(cgroup / "memory.current")
    if limit and used and limit[0] != "max":
        return max(0, int(limit[0]) - int(used[0]))
    return None


def available_bytes(meminfo: Path) -> int:
    """``MemAvailable`` of the whole machine."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{meminfo} has no MemAvailable")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
