"""Which moonbus this is."""

from __future__ import annotations

from importlib import metadata


def product_version() -> str:
    """Version of the installed distribution; ``0+source`` when it runs from a source tree."""
    try:
        return metadata.version("moonbus")
    except metadata.PackageNotFoundError:
        return "0+source"
