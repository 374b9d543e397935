"""Priority classes: what a class of requests may expect unless a request says so itself."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from shared.errors import SettingError
from shared.units import parse_seconds

_MOST_S = 3_600.0
"""Longest head start: more would let a class wait for ever."""
_CLASS = re.compile(r"(?P<name>[a-z0-9_-]+)=(?P<sign>-?)(?P<head_start>[^/]+)(/(?P<ttft>[^/]*))?(/(?P<tbt>[^/]*))?")


class Priority(msgspec.Struct, frozen=True, kw_only=True):
    """One class. ``None`` is no limit."""

    head_start_s: float
    """In queues its prompts count as having come so much earlier; below 0: later."""
    ttft_slo_s: float | None
    tbt_slo_s: float | None


def priorities(texts: Iterable[str], *, usual: Priority) -> dict[str, Priority]:
    """{name: class} of a setting like ``("high=20s/2s/100ms", "low=-20s")``; what a class leaves open is as ``usual``.

    Raises :class:`SettingError`.
    """
    found: dict[str, Priority] = {}
    for text in texts:
        match = _CLASS.fullmatch(text.strip().lower())
        if match is None or match["name"] in found:
            raise SettingError("priorities", text, "NAME=HEAD_START[/TTFT[/TBT]] like high=20s/2s/100ms, a name once")
        try:
            head_start_s = parse_seconds(match["head_start"])
            ttft_slo_s, tbt_slo_s = (parse_seconds(part) if part else None for part in (match["ttft"], match["tbt"]))
        except ValueError as error:
            raise SettingError("priorities", text, f"durations in it ({error})") from error
        if 0.0 in (ttft_slo_s, tbt_slo_s):
            raise SettingError("priorities", text, "limits above 0; leave one out for the usual one")
        if head_start_s > _MOST_S:
            raise SettingError("priorities", text, f"a head start of at most {_MOST_S:g}s")
        found[match["name"]] = Priority(
            head_start_s=-head_start_s if match["sign"] else head_start_s, ttft_slo_s=ttft_slo_s or usual.ttft_slo_s,
            tbt_slo_s=tbt_slo_s or usual.tbt_slo_s)
    return found
