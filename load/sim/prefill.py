"""A prefill node: fetches prefixes, computes prompts one at a time in chunks, pushes their KV while it computes.

A job's way: it *arrives* and pins what the node has of its prefix; what others hold is pushed to it, or read from the
SSD, while others are computed. Then it is *ready* and waits its turn. When it *starts* it takes what has become
cached meanwhile, and room for the rest. Its KV leaves for the decode node layer by layer: the flow starts so late that
on an idle link it would end with the computing, and is complete ``push_tail_s`` after the later of the two.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from load.sim.network import Network, Port
from load.sim.profile import NodeProfile
from load.sim.request import Job
from shared.ids import OperationId
from shared.messages import Load, Progress, Source, Stages
from shared.order import Order

if TYPE_CHECKING:
    from load.sim.cache import NodeCache
    from load.sim.loop import Loop
    from load.sim.node import Life, SharedGpus

_LEAST_FETCH_S = 5.0
_LEAST_FETCH_BYTES_PER_S = 1e9
"""A fetch is given up after so long, and so much more for its bytes: as the prefill worker does."""


class Prefilled(Protocol):
    """Who takes it from here."""

    def tell(self, progress: Progress) -> None:
        """A stage is over."""
        ...

    def computed(self, job: Job) -> None:
        """The prefill of ``job`` is computed."""
        ...

    def handed_over(self, job: Job, attempt: int) -> None:
        """All KV of ``job`` is at its decode node."""
        ...

    def decode_port(self, job: Job) -> Port | None:
        """Where its KV goes; ``None`` when the node is gone."""
        ...

    def owner(self, source: Source) -> PrefillNode | None:
        """The node named in a source, in that life."""
        ...


class PrefillNode:
    """One life of one prefill node."""

    def __init__(self, life: Life, loop: Loop, network: Network, profile: NodeProfile, cache: NodeCache,
                 order: Order, after: Prefilled, gpus: SharedGpus | None = None) -> None:
        self.life, self.cache, self.port = life, cache, life.port
        self._loop, self._network, self._profile, self._order, self._after = (
            loop, network, profile, order, after)
        self._gpus = gpus
        self._block_bytes = life.hello.spec.block_bytes
        #: {job: attempt} taken and not given back
        self.jobs: dict[Job, int] = {}
        self._waiting: list[tuple[float, int, Job, int]] = []
        self._count = 0
        self._running: Job | None = None
        self._since_s = 0.0
        """When the running job began, or went on."""
        self._since_tokens = 0.0
        self._overhead_s = 0.0
        """Seconds before its first token is computed, of this stretch."""
        self._version = 0
        self._switch_s = -1.0
        self._pace = self._share = 1.0
        self._ssd_free_s = 0.0
        self.busy_s = 0.0
        """GPU time of all prefills so far."""
        self.is_dead = False

    # Work

    @property
    def is_busy(self) -> bool:
        """Whether it computes something."""
        return self._running is not None

    def _busy_changed(self) -> None:
        if self._gpus is not None:
            self._gpus.changed()

    def take(self, job: Job) -> None:
        """A prefill job arrives."""
        now = self._loop.now
        job.arrived_s = now
        self.jobs[job] = job.attempt
        own = self.cache.pin(job.operation, job.keys[:job.reusable_blocks], now=now)
        self._fetch(job, own)

    def load(self) -> Load:
        """The heartbeat."""
        running = self._running
        tokens = sum(job.num_tokens - job.done_tokens for job in self.jobs if job is not running)
        if running is not None:
            tokens += int(running.num_tokens - self._reached())
        return self.life.load(queued=len(self.jobs) - (running is not None), queued_tokens=tokens,
                              running=int(running is not None), free_blocks=self.cache.available_blocks,
                              cached_blocks=self.cache.cached_blocks, kv_seq=self.cache.log.seq)

    def die(self) -> list[Job]:
        """The node is gone with all it had; the jobs that need another."""
        self.is_dead = True
        self._version += 1
        lost = list(self.jobs)
        for job in lost:
            self._end_flow(job)
        self.jobs.clear()
        return lost

    def set_pace(self, pace: float, share: float = 1.0) -> None:
        """From now on computing takes ``pace`` times as long as the profile says, and with the decode steps in between
        ``share`` times that."""
        job = self._running
        if job is not None:
            self._pause(job)
        self._pace, self._share = pace, share
        if job is not None:
            self._go_on(job)

    def drop(self, job: Job) -> None:
        """Nobody wants the job any more."""
        if self.jobs.pop(job, None) is None:
            return
        self._end_flow(job)
        self.cache.release(job.operation)
        if job is self._running:
            self._pause(job)
            self._running = None
            self._next()

    # Fetching

    def _fetch(self, job: Job, own: int) -> None:
        """Brings the blocks that follow the node's own, from its SSD and from the owners the placement names."""
        now = self._loop.now
        keys = job.keys[:job.reusable_blocks]
        placement = job.placement
        assert placement is not None
        local = min(self.cache.on_ssd(keys, own), placement.own_blocks)
        parts: list[tuple[int, int, Source | None]] = []
        if local > own and self._is_worth_reading(job, own, local):
            parts.append((own, local, None))
        end = local if parts else own
        for source in sorted(placement.sources, key=lambda source: source.first_block):
            until = min(source.first_block + source.num_blocks, len(keys))
            if source.first_block <= end < until:
                parts.append((end, until, source))
                end = until
        slots = self.cache.reserve(job.operation, end - own, now=now) if parts else None
        if slots is None:
            self._ready(job, job.attempt)
            return
        fetch = _Fetch(job, own, end, slots, len(parts))
        patience_s = _LEAST_FETCH_S + (end - own) * self._block_bytes / _LEAST_FETCH_BYTES_PER_S
        self._loop.after(patience_s, self._fetched, fetch)
        for start, until, owner in parts:
            if owner is None:
                self._loop.at(self._read_ssd(until - start), self._arrived, fetch, start, until)
            else:
                self._loop.after(self.life.delay_s, self._ask, fetch, start, until, owner)

    def _is_worth_reading(self, job: Job, start: int, end: int) -> bool:
        tokens = job.block_tokens
        read_s = (end - start) * self._block_bytes / self._profile.ssd_bytes_per_s
        return read_s < self._profile.compute_s(start * tokens, end * tokens)

    def _read_ssd(self, blocks: int) -> float:
        """When ``blocks`` more blocks are read, one read after the other."""
        self._ssd_free_s = max(self._ssd_free_s, self._loop.now) + (
            blocks * self._block_bytes / self._profile.ssd_bytes_per_s)
        return self._ssd_free_s

    def _ask(self, fetch: _Fetch, start: int, until: int, source: Source) -> None:
        owner = self._after.owner(source)
        if owner is None or self.is_dead:
            self._arrived(fetch, start, start)
            return
        owner.push_blocks(self, fetch, start, until)

    def push_blocks(self, reader: PrefillNode, fetch: _Fetch, start: int, until: int) -> None:
        """Sends blocks ``[start, until)`` of the prompt, or as many of them as are here."""
        job = fetch.job
        held, on_ssd = self.cache.held(job.keys[:until])
        end = min(held, until)
        if end <= start:
            reader._arrived(fetch, start, start)
            return
        operation = OperationId(f"{job.operation}<{self.life.hello.worker}@{start}")
        self.cache.pin(operation, job.keys[:end], now=self._loop.now)

        def sent() -> None:
            self.cache.release(operation)
            reader._arrived(fetch, start, end)

        begin_s = self._read_ssd(min(on_ssd, end - start)) if on_ssd else self._loop.now
        self._loop.at(begin_s, self._send, reader, (end - start) * self._block_bytes, sent)

    def _send(self, reader: PrefillNode, nbytes: int, sent: Callable[[], None]) -> None:
        self._network.send(self.port, reader.port, nbytes, sent)

    def _arrived(self, fetch: _Fetch, start: int, end: int) -> None:
        fetch.parts[start] = end
        fetch.missing -= 1
        if not fetch.missing:
            self._fetched(fetch)

    def _fetched(self, fetch: _Fetch) -> None:
        """All parts are here, or patience is at its end: what came without a hole counts."""
        job = fetch.job
        if fetch.is_over or self.is_dead or self.jobs.get(job) != fetch.attempt:
            return
        fetch.is_over = True
        end = fetch.own
        while end in fetch.parts and fetch.parts[end] > end:
            end = fetch.parts[end]
        now = self._loop.now
        self.cache.fill(job.operation, fetch.slots[:end - fetch.own], job.keys, fetch.own, now=now,
                        source=self.life.hello.worker)
        job.fetch_s = now - job.arrived_s
        job.fetched_bytes = (end - fetch.own) * self._block_bytes
        self._ready(job, fetch.attempt)

    # Computing

    def _ready(self, job: Job, attempt: int) -> None:
        job.ready_s = self._loop.now
        hit = self.cache.pin(job.operation, job.keys[:job.reusable_blocks], now=job.ready_s) * job.block_tokens
        job.done_tokens = hit
        job.since_s = job.ready_s
        if job.placement is not None and job.placement.lead_s is not None:
            left_s = self._profile.compute_s(hit, job.num_tokens)
            job.since_s = job.arrived_s + job.placement.lead_s - self._order.lead_s(left_s)
        self._enqueue(job)
        if self._running is None:
            self._next()
        elif self._order.is_preemptive:
            self._consider()

    def _enqueue(self, job: Job) -> None:
        remaining_s = self._profile.compute_s(job.done_tokens, job.num_tokens)
        job.rank = self._order.rank(job.since_s, remaining_s)
        self._count += 1
        heapq.heappush(self._waiting, (job.rank, self._count, job, job.attempt))

    def _head(self) -> Job | None:
        waiting = self._waiting
        while waiting:
            rank, _, job, attempt = waiting[0]
            if self.jobs.get(job) == attempt and rank == job.rank and job is not self._running and job.prefilled_s < 0:
                return job
            heapq.heappop(waiting)
        return None

    def _consider(self) -> None:
        """Whether the running job has to make way at its next chunk boundary."""
        running, head, now = self._running, self._head(), self._loop.now
        if running is None or head is None or self._switch_s >= now:
            return
        boundary_s, tokens = self._boundary()
        remaining_s = self._profile.compute_s(tokens, running.num_tokens)
        if remaining_s > 0 and head.rank < self._order.rank(running.since_s, remaining_s):
            self._switch_s = boundary_s
            self._loop.at(boundary_s, self._switch, running, self._version)

    def _boundary(self) -> tuple[float, float]:
        """When the running job next reaches a multiple of the chunk, and the tokens done then."""
        running = self._running
        assert running is not None
        chunk, start = self._profile.prefill_chunk_tokens, self._since_tokens
        done = self._reached() - start
        tokens = min(start + chunk * (int(done / chunk) + 1), float(running.num_tokens))
        work_s = self._pace * self._share * (self._overhead_s + self._profile.compute_s(start, tokens))
        return self._since_s + work_s, tokens

    def _reached(self) -> float:
        """Tokens of the running job whose KV is there by now."""
        running = self._running
        assert running is not None
        spent_s = (self._loop.now - self._since_s) / (self._pace * self._share) - self._overhead_s
        if spent_s <= 0:
            return self._since_tokens
        return min(self._profile.tokens_by(self._since_tokens, spent_s), float(running.num_tokens))

    def _switch(self, running: Job, version: int) -> None:
        if version != self._version or self._running is not running:
            return
        self._pause(running)
        self._running = None
        self._enqueue(running)
        self._next()

    def _pause(self, job: Job) -> None:
        """What was computed is accounted for; the job no longer advances."""
        spent_s = self._loop.now - self._since_s
        job.done_tokens = round(self._reached())
        job.computed_s += spent_s
        job.own_s += spent_s / self._share
        self.busy_s += spent_s / self._share
        self._version += 1
        self._switch_s = -1.0
        if job.push_version >= 0:
            job.push_version += 1

    def _next(self) -> None:
        job = self._head()
        self._busy_changed()
        if job is None or self.is_dead:
            return
        heapq.heappop(self._waiting)
        self._running = job
        if job.started_s < 0:
            self._start(job)
        self._go_on(job)
        if self._order.is_preemptive:
            self._consider()

    def _start(self, job: Job) -> None:
        """It is the job's turn for the first time: what is cached by now is reused, room for the rest is taken."""
        now = self._loop.now
        job.started_s = now
        own = self.cache.pin(job.operation, job.keys[:job.reusable_blocks], now=now)
        job.hit_tokens = job.done_tokens = own * job.block_tokens
        job.slots = self.cache.reserve(job.operation, len(job.keys) - own, now=now)
        self._after.tell(self.life.progress(job, "prefill_started"))

    def _go_on(self, job: Job) -> None:
        now, profile = self._loop.now, self._profile
        is_first = job.computed_s == 0.0
        self._since_s, self._since_tokens = now, float(job.done_tokens)
        self._overhead_s = 0.0
        if is_first:  # what is reused has been on its way to the GPUs since the prompt was ready
            job.loading_s = max(profile.reuse_s(job.hit_tokens) - (now - job.ready_s), 0.0)
            self._overhead_s = profile.prefill_fixed_s + job.loading_s
        self._version += 1
        self._switch_s = -1.0
        work_s = self._pace * self._share * (self._overhead_s + profile.compute_s(job.done_tokens, job.num_tokens))
        end_s = now + work_s
        self._loop.at(end_s, self._computed, job, self._version)
        if job.push_version >= 0:
            job.push_version += 1
            nbytes = self._push_bytes(job)
            self._loop.at(max(now, end_s - nbytes / self.port.capacity), self._push, job, job.push_version, nbytes)

    def _push_bytes(self, job: Job) -> int:
        return job.num_tokens * self._profile.kv_bytes - job.decode_hit_blocks * self._block_bytes

    def _computed(self, job: Job, version: int) -> None:
        if version != self._version:
            return
        now = self._loop.now
        spent_s = now - self._since_s
        job.computed_s += spent_s
        job.own_s += spent_s / self._share
        self.busy_s += spent_s / self._share
        job.done_tokens = job.num_tokens
        job.prefilled_s = now
        self._version += 1
        self._switch_s = -1.0
        self._running = None
        if job.slots:
            self.cache.fill(job.operation, job.slots, job.keys, len(job.keys) - len(job.slots), now=now)
        self._after.tell(self.life.progress(job, "prefilled", Stages(
            prefill_queue_s=max(0.0, job.started_s - job.arrived_s - job.fetch_s), fetch_s=job.fetch_s,
            fetched_blocks=job.fetched_bytes // self._block_bytes, fetched_bytes=job.fetched_bytes,
            hit_tokens=job.hit_tokens, prefill_s=job.own_s)))
        self._after.computed(job)
        self._next()
        if job.is_pushed:
            self._hand_over(job)

    # Pushing

    def _push(self, job: Job, version: int, nbytes: int) -> None:
        if version != job.push_version or self.jobs.get(job) != job.attempt or self.is_dead:
            return
        job.push_version = -1
        attempt = job.attempt
        port = self._after.decode_port(job)
        if port is None:
            return  # the decode node is gone, and so is the job soon
        job.flow = self._network.send(self.port, port, nbytes, lambda: self._pushed(job, attempt))

    def _pushed(self, job: Job, attempt: int) -> None:
        if self.jobs.get(job) != attempt or self.is_dead:
            return
        job.flow = None  # it refers to the job, and nobody shall have to look for circles
        job.is_pushed = True
        if job.prefilled_s >= 0:
            self._hand_over(job)

    def _hand_over(self, job: Job) -> None:
        self._loop.after(self._profile.push_tail_s, self._handed_over, job, job.attempt)

    def _handed_over(self, job: Job, attempt: int) -> None:
        if self.is_dead or self.jobs.get(job) != attempt:
            return
        del self.jobs[job]
        self.cache.release(job.operation)
        self._after.handed_over(job, attempt)

    def _end_flow(self, job: Job) -> None:
        if job.flow is not None:
            self._network.end(job.flow)
        job.flow = None


class _Fetch:
    """Parts of a prefix on their way to a node, for one attempt of a job."""

    __slots__ = ("attempt", "end", "is_over", "job", "missing", "own", "parts", "slots")

    def __init__(self, job: Job, own: int, end: int, slots: list[int], missing: int) -> None:
        self.job, self.attempt = job, job.attempt
        self.own, self.end, self.slots, self.missing = own, end, slots, missing
        #: {first block: end of what came from there}
        self.parts: dict[int, int] = {}
        self.is_over = False
