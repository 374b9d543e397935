"""Settings of a store-manager."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from services.store_manager.core.machine import Policy
from services.store_manager.core.policy import PlannerPolicy
from shared.catalog.settings import CatalogSettings
from shared.settings import BYTES, SECONDS


class Settings(CatalogSettings, frozen=True, kw_only=True):
    """What a store-manager takes."""

    store_manager_id: Annotated[str, Meta(description="Name of this store-manager; empty for a random one.")] = ""
    batch_rows: Annotated[int, Meta(description="Rows after which a batch of the feed is written.", ge=1)] = 16_384
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

    maintain_s: Annotated[float, Meta(
        description="Pause between two rounds of the catalog's upkeep: partitions, retention, samples.",
        gt=0, extra=SECONDS)] = 60.0
    lease_s: Annotated[float, Meta(
        description="Silence of the leading store-manager after which another one leads.", ge=0.5, extra=SECONDS)] = 2.5
    map_blocks: Annotated[int, Meta(description="Blocks of the replica map; of further ones those that were there first, and cold, are not planned for.", ge=1)] = 2_000_000
    map_copies: Annotated[int, Meta(description="Pairs of worker and block of the replica map.", ge=1)] = 8_000_000
    map_bytes: Annotated[int, Meta(description="Memory the replica map may take.", gt=0, extra=BYTES)] = 2 << 30
    half_life_s: Annotated[float, Meta(description="Time after which a use of a block counts half.", gt=0, extra=SECONDS)] = 300.0
    hot_uses: Annotated[float, Meta(description="Uses from which a block gets a second copy; each doubling gives one more.", gt=0)] = 4.0
    max_wanted: Annotated[int, Meta(description="Most copies of one block that are made; 1 makes none.", ge=1)] = 4
    plan_s: Annotated[float, Meta(description="Pause between two looks at what is hot.", gt=0, extra=SECONDS)] = 1.0
    copy_bytes_per_s: Annotated[float, Meta(description="Rate at which one worker gets copies, at most, in bytes per second.", gt=0)] = 256e6
    ramp_s: Annotated[float, Meta(description="Time in which a fresh worker comes to take its whole share of copies.", gt=0, extra=SECONDS)] = 60.0
    protect_ttl_s: Annotated[float, Meta(description="Time for which last copies of hot blocks are kept by one word.", gt=0, extra=SECONDS)] = 60.0
    trim_s: Annotated[float, Meta(description="Pause between two looks for copies that are too many.", gt=0, extra=SECONDS)] = 10.0
    quota_s: Annotated[float, Meta(description="Pause between two words to workers on tenants' budgets.", gt=0, extra=SECONDS)] = 5.0

    def planner(self) -> PlannerPolicy:
        """The numbers the planner goes by."""
        return PlannerPolicy(
            suspect_after_s=self.suspect_after_s, dead_after_s=self.dead_after_s, max_blocks=self.map_blocks,
            max_copies=self.map_copies, max_map_bytes=self.map_bytes, half_life_s=self.half_life_s,
            hot_uses=self.hot_uses, max_wanted=self.max_wanted, plan_s=self.plan_s,
            copy_bytes_per_s=self.copy_bytes_per_s, ramp_s=self.ramp_s, protect_ttl_s=self.protect_ttl_s,
            trim_s=self.trim_s, settle_s=min(10.0, 4 * self.lease_s), quota_s=self.quota_s)

    def policy(self) -> Policy:
        """The numbers the core decides by."""
        return Policy(
            batch_rows=self.batch_rows, held_rows=self.held_rows, retry_limit_s=self.retry_limit_s,
            reconcile_s=self.reconcile_s, join_delay_s=self.join_delay_s, gap_delay_s=self.gap_delay_s,
            suspect_after_s=self.suspect_after_s, dead_after_s=self.dead_after_s,
            maintain_s=self.maintain_s)
