"""Identifiers. A ``RequestId`` never fits where a ``WorkerId`` goes."""

from __future__ import annotations

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
ConductorId = NewType("ConductorId", str)
Incarnation = NewType("Incarnation", str)
"""Fresh random text at each start of a worker: fences everything its former life promised."""
HostId = NewType("HostId", str)
"""Boot id of a host: equal ids mean shared memory is possible."""
BlockKey = NewType("BlockKey", bytes)
"""32 bytes; see :mod:`shared.kv.hashing`."""
SpecDigest = NewType("SpecDigest", str)
"""Hex digest of a cache spec: equal digests mean KV may be shared."""
OperationId = NewType("OperationId", str)
"""Names one piece of work that holds pins and grants; they end when it does."""


def fresh(prefix: str = "", nbytes: int = 8) -> str:
    """Random lowercase hex text, ``2 * nbytes`` long, behind ``prefix`` and a dash when one is given."""
    token = secrets.token_hex(nbytes)
    return f"{prefix}-{token}" if prefix else token
