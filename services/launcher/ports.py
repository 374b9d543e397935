"""Ports for servers whose port must be known before they listen, and must stay theirs over a restart."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_240
_TRIES = 64


def free_port(host: str) -> int:
    """A port that nobody listens on now and that the kernel gives to no outgoing connection either.

    A port below the ephemeral range, because one inside it could be gone before its server opens it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in [*random.sample(range(_LOWEST, _first_ephemeral()), _TRIES), 0]:
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                if port == 0:
                    raise
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("unreachable")


def _first_ephemeral() -> int:
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768  # no Linux, or no /proc: its usual value
    return max(first, _LOWEST + _TRIES)
