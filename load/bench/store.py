"""`moonbus load bench-store`: the store's client beside memory's speed and the original's store."""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from load.bench import limits, mooncake, store_owner
from load.bench.bus import nats_server
from load.bench.child import Child
from load.bench.processes import cpu_seconds
from load.bench.rounds import Outcome, Probe, Target
from load.bench.transfer import Source, measure_sources
from shared.errors import UserError
from shared.ids import WorkerId
from shared.kv import CacheSpec
from shared.store import Buffer, Client, Part, SyncClient
from shared.transfer import TransferSettings

PATHS = ("shm", "tcp")
SIZES = {"256KiB": 256 << 10, "2MiB": 2 << 20, "16MiB": 16 << 20}
REGION_BYTES = 64 << 20
"""Values are put out of, got into and copied between regions of this size, one after the other: twice as much as a
processor's cache, so that a value is not where the last call left it."""
POOL_BYTES = 256 << 20
"""What the owner lends."""
BATCH_BYTES = 32 << 20
"""Values of one batch together."""
DEADLINE_S = 60.0
_SEED = 1


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What `moonbus load bench-store` was asked to do."""

    rounds: int
    seconds: float
    """Of each probe in each round."""
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)
    """{label: bytes of a value}"""
    only: tuple[str, ...] = ()
    mooncake: mooncake.Python | None = None
    """Measured beside us, if given."""


def targets(sizes: Mapping[str, int] = SIZES) -> list[Target]:
    """What the store has to reach, and then the same comparisons where nothing is asked of it."""
    wanted: list[Target] = []
    for what in ("put", "get"):
        for size in sizes:
            wanted += [Target(f"shm-{what}/{size}/rate", f"mooncake-{what}/{size}/rate", at_least=1.0),
                       Target(f"shm-{what}-batch/{size}/rate", f"memcpy/{size}/rate", at_least=0.8)]
    if "2MiB" in sizes:
        wanted.append(Target("shm-get/2MiB/p50", "mooncake-get/2MiB/p50", at_most=1.0))
    taken = {(target.row, target.against) for target in wanted}
    more = [Target(f"{path}-{what}{batch}/{size}/{figure}", against)
            for path in PATHS for what in ("put", "get") for batch in ("", "-batch") for size in sizes
            for figure in ("rate", "p50", "cpu")
            for against in (f"mooncake-{what}{batch}/{size}/{figure}", *([f"memcpy/{size}/{figure}"] if figure == "rate"
                                                                        and path == "shm" else []))]
    return wanted + [target for target in more if (target.row, target.against) not in taken]


async def bench(options: StoreOptions, console: Console) -> Outcome:
    """Runs the probes that ``options`` want; what cannot be measured is in ``lost``, with the reason."""
    sizes = list(options.sizes)
    async with nats_server() as url:
        # All of one size stand together, so that what is compared is measured within seconds.
        return await measure_sources(
            sources(options, url), only=options.only, rounds=options.rounds, deadline_s=DEADLINE_S + options.seconds,
            console=console, order=lambda probe: sizes.index(probe.name.rpartition("/")[2]))


def sources(options: StoreOptions, url: str = "") -> list[Source]:
    """All there is to measure, in the order of a round."""
    sizes, seconds = options.sizes, options.seconds
    found = [Source("memcpy", [f"memcpy/{label}" for label in sizes], partial(memcpy_probes, sizes, seconds))]
    for label, nbytes in sizes.items():
        for path in PATHS:
            names = [f"{path}-{what}{batch}/{label}" for what in ("put", "get") for batch in ("", "-batch")]
            found.append(Source(f"{path}/{label}", names, partial(store_probes, path, label, nbytes, seconds, url)))
        names = [f"shm-{what}-async/{label}" for what in ("put", "get")]
        found.append(Source(f"shm-async/{label}", names, partial(async_probes, label, nbytes, seconds, url)))
    if options.mooncake is not None:
        names = [f"mooncake-{what}{batch}/{label}" for what in ("put", "get") for batch in ("", "-batch")
                 for label in sizes]
        found.append(Source("mooncake", names, partial(
            mooncake.store_probes, options.mooncake, sizes, seconds, region_bytes=REGION_BYTES, pool_bytes=POOL_BYTES,
            batch_of=batch_of)))
    return found


def batch_of(nbytes: int) -> int:
    """Values of one batch."""
    return max(2, BATCH_BYTES // nbytes)


# -- memory ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def memcpy_probes(sizes: Mapping[str, int], seconds: float) -> AsyncIterator[list[Probe]]:
    """One thread copies value after value between two regions: what put or get in shared memory come to at best."""
    source, target = (np.frombuffer(mmap.mmap(-1, REGION_BYTES), dtype=np.uint8) for _ in range(2))
    source[:], target[:] = 7, 1  # pages exist from now on

    def copy(nbytes: int) -> Mapping[str, float]:
        count = REGION_BYTES // nbytes
        return _timed(nbytes, 1, seconds, lambda i: np.copyto(target[i % count * nbytes:(i % count + 1) * nbytes],
                                                              source[i % count * nbytes:(i % count + 1) * nbytes]))

    yield [Probe(f"memcpy/{label}", partial(asyncio.to_thread, copy, nbytes)) for label, nbytes in sizes.items()]


def _timed(nbytes: int, batch: int, seconds: float, call: Callable[[int], object]) -> Mapping[str, float]:
    """``p50`` of a call and ``rate`` of its bytes, after a warm-up of one time around the region."""
    for i in range(max(3, REGION_BYTES // (nbytes * batch))):
        call(i)
    taken: list[float] = []
    until_s = time.perf_counter() + seconds
    while len(taken) < limits.LEAST_REPEATS or time.perf_counter() < until_s:
        started_s = time.perf_counter()
        call(len(taken))
        taken.append(time.perf_counter() - started_s)
    return limits.figures(nbytes * batch, taken)


# -- a client here, an owner in another process -----------------------------------------------------------------------


class Bench:
    """One client, a region full of noise and one to get into; keys that are new, and keys that are there."""

    def __init__(self, nbytes: int, source: Buffer, landing: Buffer) -> None:
        self.nbytes, self.count = nbytes, REGION_BYTES // nbytes
        self.source, self.landing = source, landing
        source.array[:] = np.random.default_rng(_SEED).integers(0, 256, REGION_BYTES, dtype=np.uint8)
        landing.array[:] = 0
        self._keys = self._era = 0

    def part(self, buffer: Buffer, i: int) -> Part:
        """The ``i``th value's place, around the region."""
        return buffer[i % self.count * self.nbytes:(i % self.count + 1) * self.nbytes]

    def new_key(self) -> str:
        """Nobody has put it yet."""
        self._keys += 1
        return f"new-{self._keys}"

    def kept_keys(self) -> list[str]:
        """New ones for the values of the whole source, in order, which :meth:`kept_key` then answers with."""
        self._era += 1
        return [self.kept_key(i) for i in range(self.count)]

    def kept_key(self, i: int) -> str:
        """Of the value that lies at the ``i``th place of the source."""
        return f"kept-{self._era}-{i % self.count}"

    def check(self, what: str, done: object, expected: object = True) -> None:
        """Raises :class:`UserError` for figures of something that did not happen."""
        if done != expected:
            raise UserError(f"{what} answered {done}, not {expected}")

    def check_landing(self) -> None:
        """What was got is what was put, byte for byte."""
        self.check("the comparison of what was got with what was put",
                   bool(np.array_equal(self.landing.array, self.source.array)))


@asynccontextmanager
async def start_owner(path: str, nbytes: int, url: str,
                      name: str) -> AsyncIterator[tuple[TransferSettings, CacheSpec, int]]:
    """A worker that lends memory over ``path`` alone: the settings for its clients, its spec, its process."""
    settings, spec = TransferSettings(paths=(path,)), CacheSpec.opaque(name, nbytes)
    order = store_owner.Order(nats_url=url, worker=WorkerId(name), spec=spec, num_blocks=POOL_BYTES // nbytes,
                              settings=settings)
    command = [sys.executable, "-m", store_owner.__name__, msgspec.json.encode(order).decode()]
    async with Child.start(f"owner by {path}", command) as child:
        yield settings, spec, child.pid


@asynccontextmanager
async def store_probes(path: str, label: str, nbytes: int, seconds: float, url: str) -> AsyncIterator[list[Probe]]:
    """One put, or get, after another by the blocking client, and batches of them. Every put is of a new key, every get
    of another key than the one before."""
    batch = batch_of(nbytes)
    async with start_owner(path, nbytes, url, f"bench-{path}-{label}") as (settings, spec, pid):
        with await asyncio.to_thread(_Opened, url, spec, settings) as client:
            bench = Bench(nbytes, client.buffer(REGION_BYTES), client.buffer(REGION_BYTES))

            def put(i: int) -> None:
                bench.check("put_from", client.put_from(bench.new_key(), bench.part(bench.source, i)))

            def put_batch(i: int) -> None:
                keys = [bench.new_key() for _ in range(batch)]
                parts = [bench.part(bench.source, i * batch + j) for j in range(batch)]
                bench.check("batch_put", all(client.batch_put(keys, parts)))

            def get(i: int) -> None:
                bench.check("get_into", client.get_into(bench.kept_key(i), bench.part(bench.landing, i)))

            def get_batch(i: int) -> None:
                places = range(i * batch, (i + 1) * batch)
                bench.check("batch_get_into", all(client.batch_get_into(
                    [bench.kept_key(i) for i in places], [bench.part(bench.landing, i) for i in places])))

            def measure(call: Callable[[int], None], size: int) -> Mapping[str, float]:
                if call in (get, get_batch):
                    for i, key in enumerate(bench.kept_keys()):
                        client.put_from(key, bench.part(bench.source, i))
                    bench.landing.array[:] = 0
                pids = (os.getpid(), pid)
                before_s, began_s = cpu_seconds(pids), time.perf_counter()
                figures = _timed(nbytes, size, seconds, call)
                used_s, took_s = cpu_seconds(pids) - before_s, time.perf_counter() - began_s
                if call in (get, get_batch):
                    bench.check_landing()
                return {**figures, "cpu": used_s / (figures["rate"] * took_s)}

            calls = {"put": (put, 1), "put-batch": (put_batch, batch), "get": (get, 1), "get-batch": (get_batch, batch)}
            yield [Probe(f"{path}-{what}/{label}", partial(asyncio.to_thread, measure, call, size))
                   for what, (call, size) in calls.items()]


class _Opened:
    """A blocking client that a thread opened, since opening blocks."""

    def __init__(self, url: str, spec: CacheSpec, settings: TransferSettings) -> None:
        self._context = SyncClient.open(url, spec, settings=settings)
        self._client = self._context.__enter__()

    def __enter__(self) -> SyncClient:
        return self._client

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)


@asynccontextmanager
async def async_probes(label: str, nbytes: int, seconds: float, url: str) -> AsyncIterator[list[Probe]]:
    """The same, one after another, by the client for programs with an event loop."""
    async with (start_owner("shm", nbytes, url, f"bench-async-{label}") as (settings, spec, _),
                Client.open(url, spec, settings=settings) as client):
        bench = Bench(nbytes, client.buffer(REGION_BYTES), client.buffer(REGION_BYTES))

        async def measure(what: str) -> Mapping[str, float]:
            if what == "get":
                for i, key in enumerate(bench.kept_keys()):
                    await client.put_from(key, bench.part(bench.source, i))
            taken: list[float] = []
            until_s = time.perf_counter() + seconds
            while len(taken) < max(limits.LEAST_REPEATS, bench.count) or time.perf_counter() < until_s:
                i, started_s = len(taken), time.perf_counter()
                if what == "put":
                    done = await client.put_from(bench.new_key(), bench.part(bench.source, i))
                else:
                    done = await client.get_into(bench.kept_key(i), bench.part(bench.landing, i))
                taken.append(time.perf_counter() - started_s)
                bench.check(what, done)
            if what == "get":
                bench.check_landing()
            return limits.figures(nbytes, taken)

        yield [Probe(f"shm-{what}-async/{label}", partial(measure, what)) for what in ("put", "get")]


def python_for(given: Path | None, cache: Path) -> mooncake.Python:
    """The interpreter that imports Mooncake."""
    return mooncake.Python(given, cache)
