"""What every wire message has in common.

Rules of evolution: the tag (the class name) and field names never change their meaning; new fields go last and
have a default; defaults are left out on the wire; unknown fields are ignored by older readers.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, kw_only=True):
    """Base of all wire messages: frozen, tagged with its class name, encoded as a MessagePack map."""


class Part(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of values that only travel inside a message."""
