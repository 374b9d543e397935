"""The store: which KV blocks a worker holds, everybody's way to learn of them and get them, and a client for programs
that are no workers.

``blocks`` decides (pure): slots, keys, pins, leaf-first eviction. ``events`` numbers what happened and answers
"what did I miss?" (pure). ``agent`` acts: it announces on the bus and pushes blocks to those who ask. ``door`` serves
clients at a worker; ``client`` is what they use::

    from shared.store import Client
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.store.client import Client, Pin, SyncClient
    from shared.store.client_errors import StoreError
    from shared.store.client_memory import Buffer, Part

__all__ = ["Buffer", "Client", "Part", "Pin", "StoreError", "SyncClient"]

_HOMES = {"Client": "client", "SyncClient": "client", "Pin": "client", "StoreError": "client_errors",
          "Buffer": "client_memory", "Part": "client_memory"}


def __getattr__(name: str) -> Any:
    """Loaded when asked for: a worker's pool needs no client."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
