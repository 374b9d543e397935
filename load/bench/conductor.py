"""`moonbus load bench-conductor`: how fast a conductor decides, learns who holds what, and learns it all again.

Everything goes through the machine's door, on one core, in this process; no bus takes part, so that what is measured is
what a conductor adds. Times are CPU times of the thread: a machine that others use must not make a decision look slow.
The plain index that a first version would have, {key: {worker: tier}}, is measured beside ours in the same round.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from load.sim.profile import NodeProfile, read_profile
from services.conductor.core.machine import Conductor, Started
from services.conductor.core.policy import Policy
from services.conductor.core.prefix_index import prints_of
from shared.ids import BlockKey, ConductorId, GatewayId, HostId, Incarnation, RequestId, WorkerId
from shared.kv import KEY_BYTES, Tier, pack_keys, unpack_keys
from shared.machine import Answered, Asked, Reply, Request, Woke
from shared.messages import (
    Endpoint,
    Evicted,
    Hello,
    Load,
    Placement,
    PlaceRequest,
    Progress,
    RequestDone,
    SnapshotPage,
    Stages,
    Stored,
    StoredBlock,
    SyncEvents,
)
from shared.store.events import PAGE_BLOCKS

PROMPT_TOKENS = 131_072
BLOCK_TOKENS = 512
CHAIN_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
BATCH_BLOCKS = 256
"""Blocks of an event."""
_IN_FLIGHT = 400
_RATE = 40.0
"""Requests a second, of the clock that the machine sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorOptions:
    """What `moonbus load bench-conductor` was asked to do."""

    rounds: int = 3
    workers: int = 128
    """A quarter of them decode."""
    blocks: int = 1_000_000
    """In the index while it decides."""
    resync_blocks: int = 2_300_000
    """Of the one worker that tells all it holds."""
    decisions: int = 2000
    big_blocks: int = 0
    """Memory is measured with so many blocks too; 0 for no."""
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure has to be."""

    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, value: float) -> bool:
        """By ``value``."""
        return ((self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most))

    def __str__(self) -> str:
        return f"≥ {self.at_least:,g}" if self.at_least is not None else f"≤ {self.at_most:,g}"


GOALS = {
    "decision/p50": Goal(at_most=300), "decision/p99": Goal(at_most=1000), "ingest/events": Goal(at_least=1e6),
    "resync/total": Goal(at_most=10), "resync/decision p99": Goal(at_most=1000), "memory/block": Goal(at_most=300),
    "memory/block, big": Goal(at_most=300),
}
"""{figure: its goal}"""
UNITS = {
    "decision/p50": "µs", "decision/p99": "µs", "decision/p50, wall": "µs", "decision/p99, wall": "µs",
    "decision/rest": "µs", "match/p50": "µs", "ingest/events": "blocks/s", "ingest/events of 16": "blocks/s",
    "ingest/evicted": "blocks/s", "ingest/decoded": "blocks/s", "resync/total": "s", "resync/decoded": "s",
    "resync/pause": "ms", "resync/pause, p99": "ms", "resync/decision p99": "µs", "memory/block": "B",
    "memory/block, big": "B",
}
"""{figure: its unit}. ``rest``: all other events of a request; ``match``: the index's part of a decision;
``ingest/decoded``: with the messages' decoding; ``resync/decoded``: that decoding's part; ``pause``: the longest time
one event took (it is when Python's dictionary doubles)."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    name: str
    value: float
    """Median over the rounds."""
    unit: str
    rounds: list[float]
    plain: float | None = None
    """The plain index's."""
    ratio: float | None = None
    """How many times better than that; median over the rounds."""
    goal: str = ""
    is_met: bool | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` writes."""

    options: ConductorOptions
    prompt_tokens: int = PROMPT_TOKENS
    block_tokens: int = BLOCK_TOKENS
    figures: list[Figure]


def bench(options: ConductorOptions, progress: Callable[[str], None]) -> Report:
    """Measures everything ``rounds`` times; says what it does."""
    values: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for name, measure in _measures(options).items():
            progress(f"round {number + 1} of {options.rounds}: {name}")
            gc.collect()
            for figure, value in measure().items():
                into = plain if figure.startswith("plain ") else values
                into.setdefault(figure.removeprefix("plain "), []).append(value)
    return Report(options=options, figures=[
        _figure(name, values[name], plain.get(name)) for name in UNITS if name in values])


def write_json(report: Report, path: Path) -> None:
    """Raises ``OSError``."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def _measures(options: ConductorOptions) -> dict[str, Callable[[], Mapping[str, float]]]:
    found: dict[str, Callable[[], Mapping[str, float]]] = {
        "decisions": lambda: decisions(options),
        "ingest": lambda: ingest(options),
        "resync": lambda: resync(options),
        "memory": lambda: memory("memory/block", options.blocks, options),
    }
    if options.big_blocks:
        found["memory, big"] = lambda: memory("memory/block, big", options.big_blocks, options)
    return found


def _figure(name: str, taken: list[float], plain: list[float] | None) -> Figure:
    goal, value = GOALS.get(name), median(taken)
    ratio = None
    if plain is not None:
        ratios = [mine / other for mine, other in zip(taken, plain, strict=True)]
        ratio = median(ratios) if UNITS[name] == "blocks/s" else 1 / median(ratios)
    return Figure(name=name, value=value, unit=UNITS[name], rounds=taken,
                  plain=median(plain) if plain is not None else None, ratio=ratio,
                  goal=str(goal) if goal is not None else "", is_met=goal.is_met(value) if goal is not None else None)


# The town


class _Names:
    """Addresses nobody listens on."""

    rollcall = placed = None

    def sync(self, worker: WorkerId) -> WorkerId:
        """The worker itself."""
        return worker

    def refuse(self, worker: WorkerId) -> WorkerId:
        """Never used."""
        return worker


@dataclass
class Town:
    """A conductor and the workers it hears of."""

    options: ConductorOptions
    rng: random.Random = field(init=False)
    machine: Conductor = field(init=False)
    now: float = 1000.0
    seqs: dict[WorkerId, int] = field(default_factory=dict)
    """{worker: number of its last event}"""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.options.seed)
        self.profile: NodeProfile = read_profile("a800-llama3-70b")
        self.spec = self.profile.spec(BLOCK_TOKENS)
        self.digest = self.spec.digest
        self.machine = Conductor(ConductorId("bench"), _Names(), Policy(
            suspect_after_s=1e9, dead_after_s=2e9, max_queue_s=1e9, max_blocks=100_000_000, max_index_bytes=1 << 40,
            max_promised=10_000_000), seed=1)
        self.machine.handle(Started(), now=self.now)
        count = self.options.workers
        self.prefill = [WorkerId(f"prefill-{i}") for i in range(count - count // 4)]
        self.decode = [WorkerId(f"decode-{i}") for i in range(count // 4)]
        self.workers = (*self.prefill, *self.decode)
        for worker in self.workers:
            self._join(worker)

    def _join(self, worker: WorkerId) -> None:
        is_prefill = worker.startswith("prefill")
        incarnation = Incarnation(worker)
        (ask,) = self.machine.handle(Hello(
            worker=worker, incarnation=incarnation, role="prefill" if is_prefill else "decode", spec=self.spec,
            endpoint=Endpoint(worker=worker, incarnation=incarnation, host=HostId(worker)), capacity_blocks=100_000,
            max_running=64, started_at_s=0.0, profile=self.profile.announced()), now=self.now)
        assert isinstance(ask, Request)
        self.machine.handle(Answered(ask.tag, SyncEvents(worker=worker, incarnation=incarnation, events=[])),
                            now=self.now)
        self.seqs[worker] = 0

    def stored(self, worker: WorkerId, keys: Sequence[BlockKey], tier: Tier = Tier.DRAM) -> Stored:
        """The worker's next event."""
        self.seqs[worker] += 1
        return Stored(worker=worker, incarnation=Incarnation(worker), seq=self.seqs[worker], spec=self.digest,
                      at_s=0.0, blocks=blocks_of(keys, tier))

    def evicted(self, worker: WorkerId, keys: Sequence[BlockKey]) -> Evicted:
        """The worker's next event."""
        self.seqs[worker] += 1
        return Evicted(worker=worker, incarnation=Incarnation(worker), seq=self.seqs[worker], at_s=0.0,
                       keys=pack_keys(keys))

    def beat(self, worker: WorkerId) -> None:
        """Its heartbeat, which says what the conductor thinks."""
        known = self.machine._cluster.workers[worker]
        jobs = known.prefilling.values()
        self.machine.handle(Load(
            worker=worker, incarnation=Incarnation(worker), role=known.hello.role, kv_seq=self.seqs[worker],
            queued=len(known.prefilling), queued_tokens=sum(job.computed_tokens for job in jobs),
            running=len(known.decoding), context_tokens=sum(job.num_tokens for job in known.decoding.values()),
            free_blocks=90_000), now=self.now)

    def fill(self, blocks: int) -> list[bytes]:
        """Indexes so many; the packed keys of the prompts they belong to. One in ten has three owners."""
        chains = []
        for i, chain in enumerate(chains_of(self.rng, blocks)):
            owners = self.rng.sample(self.prefill, 3) if i % 10 == 0 else [self.rng.choice(self.prefill)]
            for owner in owners:
                self.machine.handle(self.stored(owner, unpack_keys(chain)), now=self.now)
            chains.append(chain)
        return chains


def chains_of(rng: random.Random, blocks: int) -> Iterator[bytes]:
    """Packed keys of prompts, ``blocks`` in all; the last one may be shorter."""
    for start in range(0, blocks, CHAIN_BLOCKS):
        yield rng.randbytes(KEY_BYTES * min(CHAIN_BLOCKS, blocks - start))


def blocks_of(keys: Sequence[BlockKey], tier: Tier) -> list[StoredBlock]:
    """As an owner announces them."""
    return [StoredBlock(key=key, parent=key, depth=i, nbytes=1, tier=tier, tokens=BLOCK_TOKENS)
            for i, key in enumerate(keys)]


# Measures


def decisions(options: ConductorOptions) -> dict[str, float]:
    """Prompts of 131,072 tokens: some known in whole, most in part, some new; hundreds are in flight."""
    town = Town(options)
    chains = town.fill(options.blocks)
    asks = _Asks(town, chains)
    for _ in range(_IN_FLIGHT + 200):
        asks.step()
    asks.cpu_s, asks.wall_s, asks.rest_s = [], [], []
    for _ in range(options.decisions):
        asks.step()
    plain = PlainIndex(options, chains, town)
    return {"decision/p50": _share(asks.cpu_s, 0.5) * 1e6, "decision/p99": _share(asks.cpu_s, 0.99) * 1e6,
            "decision/p50, wall": _share(asks.wall_s, 0.5) * 1e6, "decision/p99, wall": _share(asks.wall_s, 0.99) * 1e6,
            "decision/rest": _share(asks.rest_s, 0.5) * 1e6,
            "match/p50": _share([_match_s(town, asks.prompt()) for _ in range(300)], 0.5) * 1e6,
            "plain match/p50": _share([plain.match_s(asks.prompt()) for _ in range(300)], 0.5) * 1e6}


def _match_s(town: Town, prompt: bytes) -> float:
    """CPU seconds that the longest prefixes of all workers, in every tier, take."""
    index, senders = town.machine._index, town.workers
    cpu_s = time.thread_time()
    index.match(prints_of(prompt), senders)
    return time.thread_time() - cpu_s


class _Asks:
    """Requests come, the oldest ones go."""

    def __init__(self, town: Town, chains: Sequence[bytes]) -> None:
        self._town, self._chains = town, chains
        self._number = 0
        self._running: deque[Placement] = deque()
        self._beats = 0
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []
        self.rest_s: list[float] = []

    def prompt(self) -> bytes:
        """Packed keys: of one in ten nothing is known, of two in ten all, of the others a part."""
        rng = self._town.rng
        kind, size = rng.random(), KEY_BYTES * CHAIN_BLOCKS
        chain = rng.choice(self._chains)
        if kind < 0.1:
            return rng.randbytes(size)
        known = len(chain) if kind < 0.3 else KEY_BYTES * rng.randrange(16, CHAIN_BLOCKS)
        return chain[:known] + rng.randbytes(size - len(chain[:known]))

    def step(self) -> None:
        """One comes, one goes."""
        town, machine = self._town, self._town.machine
        self._number += 1
        town.now += 1 / _RATE
        ask = Asked(self._number, PlaceRequest(
            request=RequestId(f"r{self._number}"), model=town.spec.model, spec=town.digest, tenant="",
            num_tokens=PROMPT_TOKENS, keys=self.prompt(), max_tokens=300))
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        effects = machine.handle(ask, now=town.now)
        self.cpu_s.append(time.thread_time() - cpu_s)
        self.wall_s.append(time.perf_counter() - wall_s)
        reply = effects[0]
        assert isinstance(reply, Reply) and isinstance(reply.message, Placement), reply
        self._running.append(reply.message)
        cpu_s = time.thread_time()
        if len(self._running) > _IN_FLIGHT:
            self._end(self._running.popleft())
        if (wake_s := machine.next_wake()) is not None and wake_s <= town.now:
            machine.handle(Woke(), now=town.now)
        self.rest_s.append(time.thread_time() - cpu_s)
        self._beats += 1
        town.beat(town.workers[self._beats % len(town.workers)])

    def _end(self, placement: Placement) -> None:
        town, rng = self._town, self._town.rng
        prefill_s = placement.predicted_prefill_s * rng.uniform(0.9, 1.2)
        hit_tokens = placement.hit_tokens

        def tell(worker: WorkerId, stage: Any, **fields: Any) -> None:
            town.machine.handle(Progress(
                request=placement.request, attempt=0, worker=worker, stage=stage, num_tokens=PROMPT_TOKENS,
                hit_tokens=hit_tokens, **fields), now=town.now)

        tell(placement.prefill, "prefill_started")
        tell(placement.prefill, "prefilled", stages=Stages(prefill_s=prefill_s, hit_tokens=hit_tokens))
        tell(placement.decode, "first_token")
        tell(placement.decode, "finished", batch=10, context_tokens=10 * PROMPT_TOKENS,
             step_s=placement.predicted_tbt_s * rng.uniform(0.9, 1.2))
        town.machine.handle(RequestDone(
            request=placement.request, gateway=GatewayId("g"), model=town.spec.model, spec=town.digest, tenant="",
            received_at_s=0.0, outcome="ok", completion_tokens=300), now=town.now)


def ingest(options: ConductorOptions) -> dict[str, float]:
    """Events of 256 blocks, of 16, and evictions of 256; then decoded from the wire too."""
    town = Town(options)
    chains = [unpack_keys(chain) for chain in chains_of(town.rng, options.blocks)]
    chains = [chain for chain in chains if len(chain) == CHAIN_BLOCKS]
    stored = [town.stored(town.rng.choice(town.prefill), chain) for chain in chains]
    store_s = _feed_s(town, stored)
    owners = [event.worker for event in stored]
    halves = list(zip(owners, chains, strict=True))[::2]
    evict_s = _feed_s(town, [town.evicted(owner, chain) for owner, chain in halves])
    small = [town.stored(town.rng.choice(town.prefill), chain[i:i + 16])
             for chain in chains[:len(chains) // 4] for i in range(0, CHAIN_BLOCKS, 16)]
    small_s = _feed_s(town, small)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Stored)
    wire = [encoder.encode(town.stored(town.rng.choice(town.prefill), chain)) for chain in chains[:len(chains) // 4]]
    cpu_s = time.thread_time()
    for packed in wire:
        town.machine.handle(decoder.decode(packed), now=town.now)
    decoded_s = time.thread_time() - cpu_s
    plain = PlainIndex(options, (), town)
    cpu_s = time.thread_time()
    for event in stored:
        plain.store(event)
    plain_s = time.thread_time() - cpu_s
    blocks = len(chains) * CHAIN_BLOCKS
    return {"ingest/events": blocks / store_s, "plain ingest/events": blocks / plain_s,
            "ingest/events of 16": len(small) * 16 / small_s,
            "ingest/evicted": len(halves) * CHAIN_BLOCKS / evict_s,
            "ingest/decoded": len(wire) * CHAIN_BLOCKS / decoded_s}


def _feed_s(town: Town, events: Sequence[Any]) -> float:
    cpu_s = time.thread_time()
    for event in events:
        town.machine.handle(event, now=town.now)
    return time.thread_time() - cpu_s


def resync(options: ConductorOptions) -> dict[str, float]:
    """One worker holds as much as all others together and tells it anew, twice: the second time replaces the first.

    A request is placed after every page; what the machine cleans up afterwards is part of it.
    """
    town = Town(options)
    asks = _Asks(town, town.fill(options.blocks))
    for _ in range(200):
        asks.step()
    owner = town.prefill[0]
    chains = [unpack_keys(chain) for chain in chains_of(town.rng, options.resync_blocks)]
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(SnapshotPage)
    keys = [key for chain in chains for key in chain]
    pages = -(-len(keys) // PAGE_BLOCKS)
    total_s = decoding_s = 0.0
    pauses_s: list[float] = []
    for turn in range(2):
        town.seqs[owner] += 10  # lost
        town.beat(owner)
        town.now += 1.0
        asked = [effect for effect in town.machine.handle(Woke(), now=town.now) if isinstance(effect, Request)]
        total_s = decoding_s = 0.0
        asks.cpu_s = []
        for page in range(pages):
            wire = encoder.encode(SnapshotPage(
                worker=owner, incarnation=Incarnation(owner), seq=town.seqs[owner], spec=town.digest,
                snapshot=f"s{turn}", page=page, pages=pages,
                blocks=blocks_of(keys[page * PAGE_BLOCKS:(page + 1) * PAGE_BLOCKS], Tier.DRAM)))
            cpu_s = time.thread_time()
            reply = decoder.decode(wire)
            decoding_s += time.thread_time() - cpu_s
            cpu_s = time.thread_time()
            asked = list(town.machine.handle(Answered(asked[-1].tag, reply), now=town.now))  # type: ignore[arg-type]
            took_s = time.thread_time() - cpu_s
            total_s += took_s
            pauses_s.append(took_s)
            asks.step()
        while not town.machine._index.is_tidy:
            town.now += 0.002
            cpu_s = time.thread_time()
            town.machine.handle(Woke(), now=town.now)
            took_s = time.thread_time() - cpu_s
            total_s += took_s
            pauses_s.append(took_s)
    assert town.machine._index.blocks_of(owner) == len(keys)
    return {"resync/total": total_s + decoding_s, "resync/decoded": decoding_s, "resync/pause": max(pauses_s) * 1e3,
            "resync/pause, p99": _share(pauses_s, 0.99) * 1e3,
            "resync/decision p99": _share(asks.cpu_s, 0.99) * 1e6}


def memory(name: str, blocks: int, options: ConductorOptions) -> dict[str, float]:
    """Resident memory that the blocks add, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        ours = pool.apply(_grown_bytes, (options, blocks, False))
    with context.Pool(1, maxtasksperchild=1) as pool:
        plain = pool.apply(_grown_bytes, (options, blocks, True))
    return {name: ours / blocks, f"plain {name}": plain / blocks}


def _grown_bytes(options: ConductorOptions, blocks: int, is_plain: bool) -> int:
    town = Town(options)
    plain = PlainIndex(options, (), town)
    gc.collect()
    before = _resident_bytes()
    for chain in chains_of(town.rng, blocks):
        event = town.stored(town.rng.choice(town.prefill), unpack_keys(chain))
        if is_plain:
            plain.store(event)
        else:
            town.machine.handle(event, now=town.now)
    return _resident_bytes() - before


def _resident_bytes() -> int:
    with open("/proc/self/smaps_rollup", "rb") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Rss:"))


class PlainIndex:
    """{key: {worker: tier}}, and {worker: keys} to be able to remove one: what one writes first."""

    def __init__(self, options: ConductorOptions, chains: Sequence[bytes], town: Town) -> None:
        self._holders: dict[BlockKey, dict[WorkerId, Tier]] = {}
        self._keys: dict[WorkerId, set[BlockKey]] = {worker: set() for worker in town.prefill}
        rng = random.Random(options.seed)
        for chain in chains:
            self.store(Stored(worker=rng.choice(town.prefill), incarnation=Incarnation(""), seq=1, spec=town.digest,
                              at_s=0.0, blocks=blocks_of(unpack_keys(chain), Tier.DRAM)))

    def store(self, event: Stored) -> None:
        """One event."""
        keys = self._keys[event.worker]
        for block in event.blocks:
            self._holders.setdefault(block.key, {})[event.worker] = block.tier
            keys.add(block.key)

    def match_s(self, prompt: bytes) -> float:
        """CPU seconds that the longest prefixes of all workers take."""
        cpu_s = time.thread_time()
        going: dict[WorkerId, int] = {}
        for i, key in enumerate(unpack_keys(prompt)):
            holders = self._holders.get(key)
            if not holders:
                break
            for worker in holders:
                if going.get(worker, 0) == i:
                    going[worker] = i + 1
        return time.thread_time() - cpu_s


def _share(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
