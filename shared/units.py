"""Quantities with a unit, and how people write them ("16GiB", "250ms")."""

from __future__ import annotations

import re

_BYTES = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def _parse(text: str, units: dict[str, float] | dict[str, int], kind: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in units:
        raise ValueError(f"{text!r} is not {kind}; write it like {example}")
    return float(match.group(1)) * units[unit]


def parse_bytes(text: str) -> int:
    """``"16GiB"`` → 17179869184. Plain numbers are bytes."""
    return int(_parse(text, _BYTES, "a size", "512MiB or 16GiB"))


def parse_seconds(text: str) -> float:
    """``"250ms"`` → 0.25. Plain numbers are seconds."""
    return _parse(text, _SECONDS, "a duration", "250ms or 30s")


def format_bytes(size_bytes: float) -> str:
    """``17179869184`` → ``"16.0 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def format_seconds(duration_s: float) -> str:
    """``0.0123`` → ``"12.3 ms"``, ``3.2`` → ``"3.20 s"``."""
    return f"{duration_s * 1e3:.1f} ms" if abs(duration_s) < 1 else f"{duration_s:.2f} s"
