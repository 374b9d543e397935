"""`moonbus load bench-transfer`: the transfer engine beside the machine's limits and other software."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import numpy as np
from rich.console import Console

from load.bench import limits, mooncake, plain, receiver
from load.bench.child import Child
from load.bench.mesh import Mesh
from load.bench.processes import cpu_seconds
from load.bench.rounds import Outcome, Probe, Target, is_wanted, measure_rounds
from shared.errors import UserError
from shared.ids import Incarnation, WorkerId, fresh
from shared.kv import CacheSpec
from shared.messages import Endpoint, Grant, Range
from shared.transfer import PushResult, Slice, SyncTransferEngine, TransferEngine, TransferSettings

PATHS = ("tcp", "shm")
Checksums = Literal["auto", "on"]
SIZES = {"64KiB": 64 << 10, "2MiB": 2 << 20, "64MiB": 64 << 20}

OTHERS = ("iperf3", "mooncake")
"""What the names of probes begin with that measure other software."""

PROMPT_TOKENS = 2048
SPEC = CacheSpec(model="smollm2-135m", weights_digest="", tokenizer_digest="", dtype="bfloat16", layers=30, kv_heads=3,
                 head_dim=64, block_tokens=64, max_context=8192)
"""32 blocks of 1,474,560 bytes hold the prompt: 47,185,920 bytes in bfloat16; float32 takes twice as much."""

SMALL_BYTES, SMALL_PROCESSES, SMALL_IN_FLIGHT = 16 << 10, 8, 1000
DEADLINE_S = 120.0
"""Time of one probe in one round beyond what it was told to measure."""
SMALL_PUSH_BYTES = 1 << 20
STREAM_S = 30.0
"""Deadline of a stream; nobody waits for it unless something is broken."""
WARM_UP = 3
"""Pushes before those that count: connections, mappings, pages."""


def blocking(path: str) -> str:
    """Name of the probes of the blocking engine."""
    return f"{path}-blocking"


def targets(sizes: Mapping[str, int] = SIZES) -> list[Target]:
    """What the transfer engine has to reach, and then the same comparisons where nothing is asked of it.

    Others block until a transfer is done, so what is asked beside them is asked of the blocking engine.
    """
    tcp, shm = (blocking(path) for path in PATHS)
    wanted = [
        *(Target(f"{tcp}/{size}/rate", "iperf3/1MiB/rate", at_least=0.8) for size in ("2MiB", "64MiB")),
        *(Target(f"{tcp}/{size}/rate", f"mooncake-tcp/{size}/rate", at_least=1.5) for size in ("2MiB", "64MiB")),
        Target(f"{tcp}/64KiB/p50", "mooncake-tcp/64KiB/p50", at_most=1.0),
        *(Target(f"{tcp}/{size}/cpu", f"mooncake-tcp/{size}/cpu", at_most=1.0) for size in ("2MiB", "64MiB")),
        Target(f"{shm}/64MiB/rate", "memcpy/64MiB/rate", at_least=0.9),
        Target(f"{shm}/2MiB/p50", at_most=0.2),
        *(Target(f"{shm}/2MiB/rate", f"mooncake-{what}/2MiB/rate", at_least=1.2) for what in ("put", "get")),
    ]
    for path in PATHS:
        wanted.append(Target(f"layers/{path}/streamed", f"layers/{path}/whole", at_most=1.15))
        wanted.append(Target(f"small/{path}/p99", f"small/{path}/p50", at_most=20.0))
    taken = {(target.row, target.against) for target in wanted}
    more = [target for size, nbytes in sizes.items()
            for target in _comparisons(size, is_small=nbytes < SMALL_PUSH_BYTES)]
    return wanted + [target for target in more if (target.row, target.against) not in taken]


def _comparisons(size: str, *, is_small: bool) -> list[Target]:
    """Of pushes of one size: a small one by its latency, a large one by its rate and what it costs."""
    theirs = {"tcp": [f"mooncake-tcp/{size}"], "shm": [f"mooncake-{what}/{size}" for what in ("put", "get")]}
    plain = Target(f"{blocking('tcp')}/{size}/{'p50' if is_small else 'rate'}",
                   f"python-tcp/{size}/{'p50' if is_small else 'rate'}")
    if is_small:
        return [plain, *(Target(f"{path}/{size}/p50", f"{other}/p50") for path in PATHS for other in theirs[path])]
    limits_of = {("tcp", "rate"): ["iperf3/1MiB"], ("tcp", "cpu"): ["iperf3/1MiB"], ("shm", "rate"): [f"memcpy/{size}"]}
    return [
        plain, *(Target(f"{path}/{size}/{figure}", f"{other}/{figure}") for path in PATHS for figure in ("rate", "cpu")
          for other in limits_of.get((path, figure), []) + theirs[path]),
        *(Target(f"{path}+xxh3/{size}/rate", f"{path}/{size}/rate") for path in PATHS),
    ]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `moonbus load bench-transfer` was asked to do."""

    rounds: int
    seconds: float
    """Of each probe in each round."""
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)
    """{label: bytes of a push}"""
    only: Sequence[str] = ()
    """Probes to run, as shell patterns; all when empty."""
    against: frozenset[str] = frozenset({"iperf3"})
    mooncake_python: Path | None = None
    cache: Path = Path()
    """Where an environment for mooncake is made unless one is given."""


@dataclass(frozen=True, slots=True)
class Source:
    """Probes that are opened together because they share processes."""

    name: str
    probes: Sequence[str]
    """Their names, known before anything is opened."""
    open: Callable[[], AbstractAsyncContextManager[list[Probe]]]
    """Raises :class:`UserError` when it cannot be had."""


async def bench(options: BenchOptions, console: Console) -> Outcome:
    """Runs the probes that ``options`` want; what cannot be measured is in ``lost``, with the reason."""
    return await measure_sources(sources(options), only=options.only, rounds=options.rounds,
                                 deadline_s=DEADLINE_S + options.seconds, console=console)


async def measure_sources(sources: Sequence[Source], *, only: Sequence[str], rounds: int, deadline_s: float,
                          console: Console, order: Callable[[Probe], int] | None = None) -> Outcome:
    """Opens the sources that ``only`` wants and asks their probes in turns, in ``order`` if given.

    What cannot be measured is in ``lost``, with the reason.
    """
    lost: dict[str, str] = {}
    probes: list[Probe] = []

    def progress(number: int) -> None:
        console.print(f"round {number + 1} of {rounds}", style="dim", highlight=False)

    async with AsyncExitStack() as stack:
        for source in sources:
            if not any(is_wanted(name, only) for name in source.probes):
                continue
            console.print(f"starting {source.name}", style="dim", highlight=False)
            try:
                opened = await stack.enter_async_context(source.open())
            except UserError as error:
                lost[source.name] = str(error)
            else:
                probes += [probe for probe in opened if is_wanted(probe.name, only)]
        if order is not None:
            probes.sort(key=order)
        outcome = await measure_rounds(probes, rounds=rounds, deadline_s=deadline_s, progress=progress)
    outcome.lost = {**lost, **outcome.lost}
    return outcome


def sources(options: BenchOptions) -> list[Source]:
    """All there is to measure, in the order of a round."""
    sizes, seconds = options.sizes, options.seconds

    def of(name: str, open: Callable[..., AbstractAsyncContextManager[list[Probe]]], *arguments: object) -> Source:
        return Source(name, [f"{name}/{label}" for label in sizes], partial(open, *arguments, sizes, seconds))

    found = [of("memcpy", limits.memcpy), of("python-tcp", plain.tcp_probes)]
    if "iperf3" in options.against:
        found.append(Source("iperf3", ["iperf3/1MiB"], partial(limits.iperf3, seconds)))
    for path in PATHS:
        found.append(of(blocking(path), blocking_probes, path))
        for name, checksums in ((path, "auto"), (f"{path}+xxh3", "on")):
            found.append(of(name, push_probes, name, path, checksums))
    if "mooncake" in options.against:
        python = mooncake.Python(options.mooncake_python, options.cache)
        found += [of("mooncake-tcp", mooncake.tcp_probes, python),
                  *(of(f"mooncake-{what}", mooncake.shm_probes, what, python) for what in ("put", "get"))]
    for path in PATHS:
        found.append(Source(f"layers/{path}", [f"layers/{path}"], partial(layer_probes, path, seconds)))
        found.append(Source(f"small/{path}", [f"small/{path}"], partial(small_probes, path, seconds)))
    return found


# -- a sender here, a receiver in another process ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """Our engine, and where it may write: all of a segment as large as our own, at the same offsets."""

    engine: TransferEngine
    endpoint: Endpoint
    grant: Grant
    pids: tuple[int, int]

    async def push(self, nbytes: int) -> PushResult:
        """The first ``nbytes`` as one slice."""
        return check(await self.engine.push(self.endpoint, [slice_of(0, nbytes)], self.grant))


@asynccontextmanager
async def start_receiver(path: str, checksums: Checksums,
                         nbytes: int) -> AsyncIterator[tuple[TransferSettings, Child, receiver.Greeting]]:
    """The other end, over ``path`` alone, and the settings that both ends have. Raises :class:`ChildLost`."""
    settings = TransferSettings(paths=(path,), checksums=checksums)
    order = receiver.Order(settings, nbytes)
    command = [sys.executable, "-m", receiver.__name__, msgspec.json.encode(order).decode()]
    async with Child.start(f"receiver by {path}", command) as child:
        yield settings, child, msgspec.convert(child.greeting, receiver.Greeting)


@asynccontextmanager
async def open_pair(path: str, checksums: Checksums, nbytes: int) -> AsyncIterator[Pair]:
    """Both ends over ``path`` alone. Raises :class:`ChildLost`."""
    async with (start_receiver(path, checksums, nbytes) as (settings, child, greeting),
                TransferEngine.open(worker=WorkerId("sender"), incarnation=Incarnation(fresh()),
                                    settings=settings) as engine):
        np.frombuffer(engine.register(receiver.SEGMENT, nbytes).buffer, dtype=np.uint8)[:] = 7
        yield Pair(engine, greeting.endpoint, greeting.grant, (os.getpid(), child.pid))


def slice_of(offset: int, nbytes: int) -> Slice:
    """These bytes to the same place of the other segment."""
    return Slice(receiver.SEGMENT, offset, Range(segment=receiver.SEGMENT, offset=offset, length=nbytes))


def check(result: PushResult) -> PushResult:
    """A push that failed has no figures: raises :class:`UserError` with its reason."""
    if result.error is not None:
        raise UserError(str(result.error))
    return result


@asynccontextmanager
async def blocking_probes(path: str, sizes: Mapping[str, int], seconds: float) -> AsyncIterator[list[Probe]]:
    """One push after another by the blocking engine, from a thread."""
    nbytes = max(sizes.values())
    async with start_receiver(path, "auto", nbytes) as (settings, child, greeting):
        with SyncTransferEngine.open(worker=WorkerId("sender"), incarnation=Incarnation(fresh()),
                                     settings=settings) as engine:
            np.frombuffer(engine.register(receiver.SEGMENT, nbytes).buffer, dtype=np.uint8)[:] = 7
            pids = (os.getpid(), child.pid)

            def push(nbytes: int) -> None:
                check(engine.push(greeting.endpoint, [slice_of(0, nbytes)], greeting.grant))

            def measure(nbytes: int) -> Mapping[str, float]:
                for _ in range(WARM_UP):
                    push(nbytes)
                taken: list[float] = []
                before_s, until_s = cpu_seconds(pids), time.perf_counter() + seconds
                while len(taken) < limits.LEAST_REPEATS or time.perf_counter() < until_s:
                    started_s = time.perf_counter()
                    push(nbytes)
                    taken.append(time.perf_counter() - started_s)
                used_s = cpu_seconds(pids) - before_s
                return {**limits.figures(nbytes, taken), "cpu": used_s / (nbytes * len(taken) / 1e9)}

            yield [Probe(f"{blocking(path)}/{label}", partial(asyncio.to_thread, measure, nbytes))
                   for label, nbytes in sizes.items()]


@asynccontextmanager
async def push_probes(name: str, path: str, checksums: Checksums, sizes: Mapping[str, int],
                      seconds: float) -> AsyncIterator[list[Probe]]:
    """One push after another."""
    async def measure(nbytes: int) -> Mapping[str, float]:
        for _ in range(WARM_UP):
            await pair.push(nbytes)
        taken: list[float] = []
        before_s, until_s = cpu_seconds(pair.pids), time.perf_counter() + seconds
        while len(taken) < limits.LEAST_REPEATS or time.perf_counter() < until_s:
            started_s = time.perf_counter()
            await pair.push(nbytes)
            taken.append(time.perf_counter() - started_s)
        used_s = cpu_seconds(pair.pids) - before_s
        return {**limits.figures(nbytes, taken), "cpu": used_s / (nbytes * len(taken) / 1e9)}

    async with open_pair(path, checksums, max(sizes.values())) as pair:
        yield [Probe(f"{name}/{label}", partial(measure, nbytes)) for label, nbytes in sizes.items()]


def layer_slice(spec: CacheSpec, layer: int, tokens: int) -> Slice:
    """A layer's part of every block of a prompt whose slots follow each other, as a prefill worker sends it."""
    first = slice_of(layer * spec.layer_bytes, spec.layer_bytes)
    return Slice(first.segment, first.offset, first.remote, spec.blocks_of(tokens), spec.block_bytes)


@asynccontextmanager
async def layer_probes(path: str, seconds: float) -> AsyncIterator[list[Probe]]:
    """A prompt's KV pushed layer after layer, with one completion, and the same bytes as one push."""
    layers = [layer_slice(SPEC, layer, PROMPT_TOKENS) for layer in range(SPEC.layers)]
    nbytes = SPEC.blocks_of(PROMPT_TOKENS) * SPEC.block_bytes

    async def streamed() -> None:
        stream = pair.engine.stream(pair.endpoint, pair.grant, timeout_s=STREAM_S)
        for layer in layers:
            stream.push([layer])
        check(await stream.close())

    async def measure() -> Mapping[str, float]:
        taken: dict[str, list[float]] = {"streamed": [], "whole": []}
        ways: dict[str, Callable[[], Awaitable[object]]] = {"streamed": streamed, "whole": partial(pair.push, nbytes)}
        for way in ways.values():
            await way()
        until_s = time.perf_counter() + seconds
        while len(taken["whole"]) < limits.LEAST_REPEATS or time.perf_counter() < until_s:
            for name, way in ways.items():
                started_s = time.perf_counter()
                await way()
                taken[name].append(time.perf_counter() - started_s)
        return {name: median(values) * 1e3 for name, values in taken.items()}

    async with open_pair(path, "auto", nbytes) as pair:
        yield [Probe(f"layers/{path}", measure)]


@asynccontextmanager
async def small_probes(path: str, seconds: float) -> AsyncIterator[list[Probe]]:
    """1,000 pushes of 16 KiB in flight between 8 processes."""
    async def measure() -> Mapping[str, float]:
        ran = await mesh.run(seconds)
        if ran.failed:
            raise UserError(f"{ran.failed} pushes failed, the first one so: {ran.error}")
        return {"p50": ran.seconds.percentile_s(50) * 1e3, "p99": ran.seconds.percentile_s(99) * 1e3,
                "pushes": ran.seconds.total / seconds}

    settings = TransferSettings(paths=(path,))
    async with Mesh.start(settings, processes=SMALL_PROCESSES, in_flight=SMALL_IN_FLIGHT, nbytes=SMALL_BYTES) as mesh:
        await mesh.run(0.0)  # everybody knows everybody from now on
        yield [Probe(f"small/{path}", measure)]
