"""Numbers the planner goes by; durations in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannerPolicy:
    """Each default is explained in docs/store-manager.md."""

    suspect_after_s: float = 2.0
    dead_after_s: float = 8.0

    # What it knows.
    max_blocks: int = 2_000_000
    """Blocks in the replica map."""
    max_copies: int = 8_000_000
    """Pairs of worker and block in it."""
    max_map_bytes: int = 2 * 2**30
    """Memory it may take, about."""
    half_life_s: float = 300.0
    """Time after which a use counts half."""
    max_heat_keys: int = 200_000
    """Blocks whose heat is known; the coldest half goes when there are more."""
    fill_step: int = 4_096
    """Blocks taken in, or taken apart, at a time: the loop turns in between."""

    # Replication.
    hot_uses: float = 4.0
    """Heat from which a block gets a second copy; each doubling gives one more."""
    max_wanted: int = 4
    """Most copies of one block that are made."""
    made_share: float = 0.5
    """Most of a worker's slots that copies made at our request may take."""
    plan_s: float = 1.0
    """Pause between two looks at what is hot."""
    max_path: int = 4_096
    """Longest chain that is followed to its root."""
    plan_blocks: int = 10_000
    """Blocks of all hot prefixes looked at each time; the others have their turn next."""
    few_hot: int = 5_000
    """With more hot blocks than this, hot prefixes are sorted out anew only when each had its turn."""
    batch_blocks: int = 64
    batch_bytes: int = 64 * 2**20
    """Most that one request to copy asks for."""
    copies_limit: int = 16
    """Copies under way."""
    send_limit: int = 2
    """From one worker."""
    receive_limit: int = 1
    """To one worker."""
    copy_bytes_per_s: float = 256e6
    """Rate at which one worker gets copies, at most."""
    copy_fixed_s: float = 5.0
    slowest_bytes_per_s: float = 20e6
    """A copy's deadline: the fixed part and this rate."""
    ramp_s: float = 60.0
    """Time in which a fresh worker comes to take its whole share."""
    suspend_first_s: float = 2.0
    suspend_limit_s: float = 120.0
    """How long a failing worker, or a copy that failed, is left alone: doubles from the first to the limit."""

    # Keeping and dropping.
    protect_ttl_s: float = 60.0
    """Last copies of hot blocks are kept for so long by one word, which is renewed after a third of it."""
    protect_share: float = 0.25
    """Most of a worker's slots that are protected."""
    trim_s: float = 10.0
    """Pause between two trims."""
    trim_blocks: int = 256
    """Most copies one trim drops at one worker."""
    settle_s: float = 10.0
    """From the beginning of a term to the first trim: what a former leader asked is over by then."""
    full: float = 0.9
    """A worker fuller than this also drops cold copies that it made itself, while others hold them."""
    scan_blocks: int = 2_048
    """Blocks of a full worker looked at for that each time."""

    # Quotas and drains.
    quota_s: float = 5.0
    """Pause between two words on budgets."""
    orders_s: float = 0.5
    """Pause between two looks at what people ordered."""
    drain_step_s: float = 0.05
    drain_copies: int = 4
    """Copies under way for one drain."""
    drain_look: int = 64
    """Prefixes looked at each step of a drain."""
    drain_tries: int = 3
    """Times a prefix is tried before it is left behind."""
    drain_rounds: int = 3
    """Times a drain looks for blocks that came meanwhile."""
    ask_s: float = 2.0
    """Longest wait for an answer that moves no bytes."""

    def worth(self, gain_s: float, nbytes: int) -> float:
        """The uses that a request counts for in addition, since copies of a prefix of ``nbytes`` would have spared it
        ``gain_s``: requests whose gains add up to the time that the copy takes make it hot.

        Half of what makes it hot, at most: one request alone does not tell that there will be another.
        """
        copy_s = nbytes / self.copy_bytes_per_s
        return self.hot_uses * min(0.5, gain_s / copy_s if copy_s > 0.0 else math.inf)

    def wanted(self, heat: float) -> int:
        """Copies that a block of this heat should have."""
        if heat < self.hot_uses:
            return 1
        return min(self.max_wanted, 2 + int(math.log2(heat / self.hot_uses)))

    def heat_for(self, copies: int) -> float:
        """The heat from which a block wants so many copies (2 or more)."""
        return self.hot_uses * 2.0 ** (copies - 2)

    def kept(self, heat: float) -> int:
        """Copies that are left to a block of this heat: what it wanted when it was twice as hot, so that a prefix whose
        heat goes up and down a little is not copied and dropped in turn."""
        return self.wanted(2 * heat)

    def is_warm(self, heat: float) -> bool:
        """Whether it was used at all lately: its copies are worth the room of others'."""
        return heat >= self.hot_uses / 16
