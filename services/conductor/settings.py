"""Settings of a conductor."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from services.conductor.core.policies.registry import ADMISSIONS, OURS, PUBLISHED, make_policy
from services.conductor.core.policy import Policy
from shared.ids import ConductorId
from shared.settings import BYTES, SECONDS, CommonSettings


class Settings(CommonSettings, frozen=True, kw_only=True):
    """What a conductor takes."""

    conductor_id: Annotated[str, Meta(description="Name of this conductor; empty for a random one.")] = ""
    placement: Annotated[str, Meta(description=(
        f"Who decides where requests run: {OURS}, or one of those that others published "
        f"({', '.join(PUBLISHED)}), for comparison."))] = OURS
    admission: Annotated[str, Meta(description=(
        f"Who is turned away by a placement that is not {OURS}: one of {', '.join(ADMISSIONS)}."))] = "slo"
    max_queue_s: Annotated[float, Meta(
        description="Predicted wait for a worker beyond which requests are rejected with code capacity.",
        gt=0, extra=SECONDS)] = 30.0
    ttft_slo_s: Annotated[float, Meta(
        description="Time to first token asked of requests that bring none of their own; 0 for no limit.",
        ge=0, extra=SECONDS)] = 0.0
    tbt_slo_s: Annotated[float, Meta(
        description="Time between tokens asked of requests that bring none of their own; 0 for no limit.",
        ge=0, extra=SECONDS)] = 0.0
    max_blocks: Annotated[int, Meta(
        description="Block copies the index holds; further ones are not indexed, and counted.", gt=0)] = 20_000_000
    max_index_bytes: Annotated[int, Meta(
        description="Memory the index takes, about 100 bytes a block; blocks beyond it are not indexed, and counted.",
        gt=0, extra=BYTES)] = 4 << 30
    promise_s: Annotated[float, Meta(
        description="Time after a prefill within which its blocks must be announced by the worker.",
        ge=0, extra=SECONDS)] = 3.0
    fetch_gain: Annotated[float, Meta(
        description="Blocks are pulled when recomputing them would take this many times the transfer.", ge=1)] = 1.2
    hold_s: Annotated[float, Meta(
        description="Time an early KV event waits for a late one before its owner is asked.",
        gt=0, extra=SECONDS)] = 0.1
    sync_timeout_s: Annotated[float, Meta(
        description="Longest wait for an owner to answer what was missed.", gt=0, extra=SECONDS)] = 5.0
    rollcall_window_s: Annotated[float, Meta(
        description="Time after the start in which workers say hello.", ge=0, extra=SECONDS)] = 0.5
    converge_within_s: Annotated[float, Meta(
        description="Time after the start when requests are placed even if some worker has not told its blocks.",
        ge=0, extra=SECONDS)] = 3.0
    seed: Annotated[int, Meta(description="Seed of the choice among equals; -1 for a random one.", ge=-1)] = -1

    def check(self) -> None:
        """Raises :class:`UserError` for a policy or an admission that nobody has."""
        make_policy(self.placement, self.admission, ConductorId("checked"), self.policy(), seed=0)

    def policy(self) -> Policy:
        """The numbers the core decides by."""
        return Policy(
            suspect_after_s=self.suspect_after_s, dead_after_s=self.dead_after_s, max_queue_s=self.max_queue_s,
            ttft_slo_s=self.ttft_slo_s or None, tbt_slo_s=self.tbt_slo_s or None, max_blocks=self.max_blocks,
            max_index_bytes=self.max_index_bytes,
            promise_s=self.promise_s, fetch_gain=self.fetch_gain, hold_s=self.hold_s,
            sync_timeout_s=self.sync_timeout_s, rollcall_window_s=self.rollcall_window_s,
            converge_within_s=self.converge_within_s)
