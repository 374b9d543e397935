"""Postgres down, NATS restarted, store-manager killed: afterwards the catalog equals the inventories exactly.

The short form; ``make test-soak`` runs it with two minutes without Postgres.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.outages import survive


async def test_afterwards_the_catalog_equals_the_inventories_exactly(server_dir: Path) -> None:
    said = await survive(server_dir / "outages", outage_s=1.5, limit_s=30.0)
    assert "exactly equal" in said
