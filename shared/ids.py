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


MAX_TENANT_BYTES = 128
"""Of a tenant's name, in UTF-8."""


def tenant_fault(name: str) -> str:
    """Why ``name`` cannot be a tenant's; empty when it can. No name at all, which is nobody's, is for callers to judge.

    Names travel in subjects, records on disk and tables, and are shown on terminals.
    """
    if not name.isprintable():  # nor are lone surrogates, which no UTF-8 has
        return f"{name[:64]!r} is no tenant's name: it has characters that cannot be printed"
    if (nbytes := len(name.encode())) > MAX_TENANT_BYTES:
        return f"{name[:32] + '...'!r} is no tenant's name: it has {nbytes} bytes, at most {MAX_TENANT_BYTES} may be"
    return ""


def fresh(prefix: str = "", nbytes: int = 8) -> str:
    """Random lowercase hex text, ``2 * nbytes`` long, behind ``prefix`` and a dash when one is given."""
    token = secrets.token_hex(nbytes)
    return f"{prefix}-{token}" if prefix else token
