"""The continuous batch of a decode worker.

Theory of operation. A request is

* *running*: its KV is in the pool; each step computes its newest token and samples the next;
* *waiting*: there is no seat or no room. Its tokens are kept, its KV may be gone.

A step needs a slot for each new position. When the pool has none left, the youngest running request is preempted:
its blocks are released (full ones stay cached as long as nobody needs the room) and it waits. When there is room
again, what is still cached is pinned and the rest is computed anew from its tokens, a chunk at a time, in the same
steps that serve the others. The token chosen at a position depends on the logits, the seed and the position alone, so
a preempted request goes on as if nothing had happened. A request that fills the whole pool ends with ``length``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.ids import BlockKey, OperationId, RequestId, WorkerId
from shared.kv import block_keys
from shared.messages import Finish, Sampling, StoredBlock
from shared.store.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class Sums:
    """Over a number of steps, those left out that computed tokens anew: these take longer than what is summed here
    explains."""

    steps: int = 0
    seconds: float = 0.0
    """The engine's own time."""
    requests: int = 0
    context_tokens: int = 0
    """Tokens attended to."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.steps + other.steps, self.seconds + other.seconds, self.requests + other.requests,
                    self.context_tokens + other.context_tokens)

    def __sub__(self, other: Sums) -> Sums:
        return Sums(self.steps - other.steps, self.seconds - other.seconds, self.requests - other.requests,
                    self.context_tokens - other.context_tokens)


@dataclass(eq=False)
class Running:
    """One request: ``tokens[:computed_len]`` have their KV in the pool."""

    operation: OperationId
    request: RequestId
    tenant: str
    root: BlockKey
    tokens: list[int]
    """Prompt and answer so far."""
    prompt_len: int
    sampling: Sampling
    keys: list[BlockKey]
    """Keys of the full blocks of ``tokens[:computed_len]`` sealed so far, and of those that were once."""
    slots: list[int] = field(default_factory=list)
    computed_len: int = 0
    sealed: int = 0
    """Leading blocks that are sealed under their key."""
    steps: int = 0
    own: Sums = Sums()
    """Of the steps that it was in, up to when it left the batch last."""
    seated: Sums = Sums()
    """The batch's sums when it was seated last."""

    @property
    def generated_len(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True)
class StepRow:
    """Tokens ``[start, start + length)`` of a request; its next token is sampled when ``samples``."""

    running: Running
    start: int
    length: int
    samples: bool


@dataclass(frozen=True)
class Step:
    """What the next forward pass computes, and what had to go for it."""

    rows: list[StepRow]
    evicted: list[BlockKey]
    ended: list[Outcome]
    """Requests that end now because there is no room for another token of theirs."""
    preempted: int
    """Requests that lost their memory to older ones."""


@dataclass(frozen=True)
class Outcome:
    """What one request got from a step: a token, its end, or both."""

    running: Running
    token: int | None
    finish: Finish


class DecodeBatch:
    """All requests that have been handed over and are not over."""

    def __init__(self, pool: BlockPool, *, block_tokens: int, block_bytes: int, max_running: int, chunk_tokens: int,
                 max_context: int) -> None:
        self._pool, self._block_tokens, self._block_bytes = pool, block_tokens, block_bytes
        self._max_running, self._chunk_tokens, self._max_context = max_running, chunk_tokens, max_context
        #: running requests, oldest first
        self._running: list[Running] = []
        #: waiting requests, in order of arrival
        self._waiting: list[Running] = []
        #: of all steps so far
        self._sums = Sums()

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> Sequence[Running]:
        """Those that take part in the next step, oldest first."""
        return self._running

    @property
    def has_preempted(self) -> bool:
        """Whether somebody lost its memory and waits for new."""
        return any(not running.slots for running in self._waiting)

    @property
    def context_tokens(self) -> int:
        """Tokens of context of the running requests."""
        return sum(len(running.tokens) for running in self._running)

    def start(self, running: Running, first_token: int) -> Outcome:
        """A handed-over request (prompt computed, slots set) gets its first token; joins unless that ends it."""
        outcome = self._take(running, first_token)
        if not outcome.finish:
            self._waiting.append(running)
        return outcome

    def remove(self, operation: OperationId) -> Running | None:
        """Takes a request out, wherever it is; its pool operation is the caller's to release."""
        for queue in (self._running, self._waiting):
            for running in queue:
                if running.operation == operation:
                    if queue is self._running:
                        self._leave(running)
                    else:
                        queue.remove(running)
                    return running
        return None

    def plan(self, *, now: float) -> Step:
        """The next step; seats the waiting, makes room, preempts the youngest when there is none."""
        evicted: list[BlockKey] = []
        ended: list[Outcome] = []
        preempted = 0
        self._seat(evicted, now=now)
        for running in list(self._running):
            while running in self._running and not self._grow(running, evicted, now=now):
                if len(running.slots) >= self._pool.statistics().total:  # nobody else's memory would help
                    self._leave(running)
                    ended.append(Outcome(running, None, "length"))
                else:
                    self._preempt(self._running[-1])
                    preempted += 1
        rows = []
        for running in self._running:
            length = min(len(running.tokens) - running.computed_len, self._chunk_tokens)
            samples = running.computed_len + length == len(running.tokens)
            rows.append(StepRow(running, running.computed_len, length, samples))
        return Step(rows, evicted, ended, preempted)

    def computed(self, step: Step, seconds: float) -> None:
        """The engine took ``seconds`` for ``step``; to be told before its rows are applied."""
        if all(row.length == 1 for row in step.rows):
            self._sums += Sums(1, seconds, len(step.rows), sum(row.start + row.length for row in step.rows))

    def apply(self, row: StepRow, token: int | None, *, now: float) -> tuple[Outcome, list[StoredBlock]]:
        """A row of the step is computed: what the request got, and the blocks that became reusable."""
        running = row.running
        running.computed_len = row.start + row.length
        running.steps += 1
        stored = self.seal(running, now=now)
        if token is None:
            return Outcome(running, None, ""), stored
        outcome = self._take(running, token)
        if outcome.finish:
            self._leave(running)
        return outcome, stored

    def seal(self, running: Running, *, now: float, source: WorkerId | None = None) -> list[StoredBlock]:
        """Seals the full blocks that are computed (or came from ``source``) and not sealed; those new to the pool."""
        stored = []
        while (running.sealed + 1) * self._block_tokens <= running.computed_len:
            index = running.sealed
            parent = running.keys[index - 1] if index else running.root
            if index == len(running.keys):
                tokens = running.tokens[index * self._block_tokens:(index + 1) * self._block_tokens]
                running.keys += block_keys(parent, tokens, self._block_tokens)
            block = StoredBlock(key=running.keys[index], parent=parent, depth=index, nbytes=self._block_bytes,
                                tokens=self._block_tokens, origin="received" if source else "computed",
                                source=source or WorkerId(""),
                                request=running.request, tenant=running.tenant)
            if self._pool.seal(running.operation, running.slots[index], block, now=now):
                stored.append(block)
            running.sealed += 1
        return stored

    def _take(self, running: Running, token: int) -> Outcome:
        """The request's next token is ``token``: part of the answer, or its end."""
        sampling = running.sampling
        if token in sampling.stop_token_ids and running.generated_len >= sampling.min_tokens:
            return Outcome(running, None, "stop")
        running.tokens.append(token)
        full = running.generated_len >= sampling.max_tokens or len(running.tokens) >= self._max_context
        return Outcome(running, token, "length" if full else "")

    def _seat(self, evicted: list[BlockKey], *, now: float) -> None:
        """Seats those that wait, in order; but whoever has its memory does not wait behind who has none."""
        is_full = False
        for running in list(self._waiting):
            if len(self._running) >= self._max_running:
                return
            if not running.slots:
                is_full = is_full or not self._resume(running, evicted, now=now)
                if is_full:
                    continue
            self._waiting.remove(running)
            self._running.append(running)
            running.seated = self._sums

    def _resume(self, running: Running, evicted: list[BlockKey], *, now: float) -> bool:
        """Gives a preempted request its blocks again: cached ones pinned, the others to be computed."""
        reusable = min(len(running.keys), (len(running.tokens) - 1) // self._block_tokens)
        slots = self._pool.pin(running.operation, running.keys[:reusable], now=now)
        need = self._blocks_of(running) - len(slots)
        # Room for one more block of everybody else, or it would be preempted again at once.
        roomy = need + len(self._running) <= self._pool.available
        allocation = self._pool.allocate(running.operation, need, now=now) if roomy else None
        if allocation is None:
            self._pool.release(running.operation)
            return False
        evicted += allocation.evicted
        running.slots = slots + allocation.slots
        running.sealed = len(slots)
        running.computed_len = len(slots) * self._block_tokens
        return True

    def _grow(self, running: Running, evicted: list[BlockKey], *, now: float) -> bool:
        need = self._blocks_of(running) - len(running.slots)
        if need <= 0:
            return True
        allocation = self._pool.allocate(running.operation, need, now=now)
        if allocation is None:
            return False
        evicted += allocation.evicted
        running.slots += allocation.slots
        return True

    def _leave(self, running: Running) -> None:
        self._running.remove(running)
        running.own += self._sums - running.seated

    def _preempt(self, running: Running) -> None:
        self._leave(running)
        self._pool.release(running.operation)
        running.slots, running.computed_len, running.sealed = [], 0, 0
        self._waiting.insert(0, running)

    def _blocks_of(self, running: Running) -> int:
        return -(-len(running.tokens) // self._block_tokens)
