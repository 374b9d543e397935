"""Where the catalog is, and how long it remembers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.catalog.retention import HOUR_S, Retention
from shared.settings import BYTES, SECONDS, CommonSettings


class CatalogSettings(CommonSettings, frozen=True, kw_only=True):
    """What everything that opens the catalog takes."""

    postgres_url: Annotated[str, Meta(description="Postgres database, as postgresql://user:password@host:port/database.")] = (
        "postgresql://moonbus:moonbus@127.0.0.1:5432/moonbus")
    keep_requests_days: Annotated[float, Meta(
        description="Days that the history of requests reaches back.", gt=0)] = 30.0
    keep_copies_days: Annotated[float, Meta(
        description="Days that the history of ended copies (who evicted what, and why) reaches back.", gt=0)] = 14.0
    keep_blocks_days: Annotated[float, Meta(
        description="Days that a block is remembered after its last making or use, once nobody holds it.",
        gt=0)] = 30.0
    keep_samples_days: Annotated[float, Meta(
        description="Days that the samples of what workers hold reach back.", gt=0)] = 30.0
    history_bytes: Annotated[int, Meta(
        description="Size at which a history loses its oldest part before its days are over, indexes included.",
        ge=2**20, extra=BYTES)] = 16 * 2**30
    max_blocks: Annotated[int, Meta(
        description="Blocks remembered; above it the oldest that nobody holds are forgotten before their days are over.",
        ge=1)] = 50_000_000
    sample_s: Annotated[float, Meta(
        description="Pause between two samples of what workers hold.", gt=0, extra=SECONDS)] = 300.0

    def retention(self) -> Retention:
        """How long what is remembered."""
        day_s = 24 * HOUR_S
        return Retention(
            requests_s=self.keep_requests_days * day_s, copies_s=self.keep_copies_days * day_s,
            blocks_s=self.keep_blocks_days * day_s, samples_s=self.keep_samples_days * day_s,
            history_bytes=self.history_bytes, blocks=self.max_blocks, sample_s=self.sample_s)
