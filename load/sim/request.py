"""One request on its way through a simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence

from load.sim.network import Flow
from shared.ids import BlockKey, OperationId, RequestId
from shared.messages import Placement


class Job:
    """A request and everything that happened to it. Times are seconds of the simulation; -1 means not yet."""

    __slots__ = (
        "arrived_s", "at_s", "attempt", "block_tokens", "computed_s", "decode_hit_blocks", "done_tokens", "excluded",
        "fetch_s", "fetched_bytes", "finish_step", "finished_s", "first_s", "flow", "gap_s", "generated", "hit_tokens",
        "index", "is_pushed", "join_step", "join_sums", "joined_s", "keys", "loading_s", "num_tokens", "operation",
        "output_tokens", "own_s", "paused_s", "placement", "predicted_ttft_s", "prefilled_s", "push_version", "rank",
        "ready_s", "request", "since_s", "slots", "started_s", "to_place_s", "waits", "worst_gap_s",
    )

    def __init__(self, index: int, at_s: float, *, num_tokens: int, output_tokens: int, keys: Sequence[BlockKey],
                 block_tokens: int) -> None:
        self.index, self.at_s = index, at_s
        self.num_tokens, self.output_tokens = num_tokens, output_tokens
        self.keys = keys
        """Keys of the prompt's full blocks."""
        self.block_tokens = block_tokens
        self.request = RequestId(f"r{index}")
        self.attempt = 0
        self.to_place_s = at_s
        """When this attempt was to be placed first."""
        self.waits = 0
        """How often it was told to wait for room since."""
        self.excluded: list[str] = []
        self.first_s = self.finished_s = -1.0
        self.predicted_ttft_s = -1.0
        self.generated = 0
        """Tokens of the answer that reached the client in this attempt."""
        self.paused_s = -1.0
        """When the last worker died under its answer."""
        self.worst_gap_s = 0.0
        """Longest pause after a worker died under it."""
        self.renew()

    def renew(self) -> None:
        """Before it is placed (again): nothing has happened yet in this attempt."""
        self.operation = OperationId(f"{self.request}/{self.attempt}")
        self.placement: Placement | None = None
        self.arrived_s = self.ready_s = self.started_s = self.prefilled_s = self.joined_s = -1.0
        self.since_s = 0.0
        """From when on it counts in the queue of its prefill node."""
        self.rank = 0.0
        self.done_tokens = 0
        """Prompt tokens whose KV the prefill node has."""
        self.hit_tokens = 0
        self.computed_s = 0.0
        """Seconds its prefill has had a node so far."""
        self.own_s = 0.0
        """Of those, without what decode steps in between took."""
        self.loading_s = 0.0
        """Of those, spent waiting for what it reuses."""
        self.fetch_s = 0.0
        self.fetched_bytes = 0
        self.slots: list[int] | None = None
        """Where the prefill node keeps the blocks it computes; ``None`` when it has no room for them."""
        self.is_pushed = False
        self.push_version = 0
        """Counts plans of when to push; -1 once the push is under way."""
        self.flow: Flow | None = None
        self.decode_hit_blocks = 0
        self.join_step = self.finish_step = 0
        self.join_sums = (0.0, 0, 0)
        self.gap_s = 0.0

    @property
    def reusable_blocks(self) -> int:
        """Leading blocks that may be reused: the last token is always computed."""
        return min(len(self.keys), (self.num_tokens - 1) // self.block_tokens)
