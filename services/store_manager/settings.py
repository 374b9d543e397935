"""Settings of a store-manager."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from services.store_manager.core.machine import Policy
from shared.catalog.settings import CatalogSettings
from shared.settings import SECONDS


class Settings(CatalogSettings, frozen=True, kw_only=True):
    """What a store-manager takes."""

    store_manager_id: Annotated[str, Meta(description="Name of this store-manager; empty for a random one.")] = ""
    batch_rows: Annotated[int, Meta(description="Rows after which a batch of the feed is written.", ge=1)] = 4_096
    held_rows: Annotated[int, Meta(
        description="Rows held in memory while Postgres is slow or away; the stream keeps the rest.", ge=1)] = 65_536
    redeliver_s: Annotated[float, Meta(
        description="Time after which the feed gives what a lost store-manager held to another one.",
        gt=0, extra=SECONDS)] = 30.0
    retry_limit_s: Annotated[float, Meta(
        description="Longest pause between two tries while Postgres is away.", gt=0, extra=SECONDS)] = 5.0
    reconcile_s: Annotated[float, Meta(
        description="Pause between two comparisons of the catalog with what a worker holds.",
        gt=0, extra=SECONDS)] = 120.0
    join_delay_s: Annotated[float, Meta(
        description="Time from a worker's joining to the first comparison.", ge=0, extra=SECONDS)] = 2.0
    gap_delay_s: Annotated[float, Meta(
        description="Time that missing news of a worker may take before it is asked.", ge=0, extra=SECONDS)] = 3.0
    sync_timeout_s: Annotated[float, Meta(
        description="Longest wait for one page of a worker's inventory.", gt=0, extra=SECONDS)] = 5.0
    query_timeout_s: Annotated[float, Meta(
        description="Longest time one catalog query may take.", gt=0, extra=SECONDS)] = 10.0

    def policy(self) -> Policy:
        """The numbers the core decides by."""
        return Policy(
            batch_rows=self.batch_rows, held_rows=self.held_rows, retry_limit_s=self.retry_limit_s,
            reconcile_s=self.reconcile_s, join_delay_s=self.join_delay_s, gap_delay_s=self.gap_delay_s,
            suspect_after_s=self.suspect_after_s, dead_after_s=self.dead_after_s)
