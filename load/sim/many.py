"""Many runs: policies over traces side by side, and the highest rate that still meets the bounds.

Each finished run is kept as one file, so an interrupted grid goes on where it was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from load.sim import pool
from load.sim.experiment import RunOptions, simulate
from load.sim.outcome import Summary
from load.workload.traces import Source, Trace
from shared.errors import UserError
from shared.files import write_file
from shared.version import product_version

GOOD_SHARE = 0.95
"""At the knee so many of all requests are inside both bounds."""
PRECISION = 0.02
"""A knee is a power of 1 plus this, so searches of different bounds meet at the same rates."""
_CODE = ("load/sim", "load/workload/traces.py", "services/conductor/core", "shared/order.py", "shared/store/policies")
"""What decides the outcome of a run, from the root of the source tree or of the installed packages."""
LOW, HIGH = 0.25, 8.0
"""Times the trace's rate: between which a knee is looked for."""
_QUANTILES = 200
_FIRST_STEP = 8


class Run(msgspec.Struct, frozen=True):
    """What to run."""

    source: Source
    options: RunOptions
    bounds: tuple[str, ...] = ()
    """TTFT bounds beside ``options.ttft_slo`` under which the share of good requests is wanted."""
    give_up_share: float | None = None
    """The run ends when more than this share of all requests have missed under each of the bounds."""

    @property
    def digest(self) -> str:
        """Names the run, as the present code makes it: a run that other code made is another."""
        return hashlib.sha256(msgspec.json.encode(
            (self.source, vars(self.options), self.bounds, self.give_up_share, code_digest()),
            order="sorted")).hexdigest()[:16]


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What a run brought, small enough to keep."""

    run: Run
    summary: Summary
    shares: dict[str, float]
    """{TTFT bound: requests inside it and the TBT bound, of all}; only true of a run that was not given up."""
    is_given_up: bool
    ttft_s: list[float]
    """Quantiles at equal distances, the least and the largest included; empty when nobody had a first token."""
    tbt_s: list[float]

    @property
    def trace(self) -> str:
        """Name of the trace."""
        return self.run.source.name

    def is_good(self, bound: str, good_share: float) -> bool:
        """Whether enough requests were inside ``bound``."""
        return not self.is_given_up and self.shares[bound] >= good_share


class Knee(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate found."""

    bound: str
    rate_scale: float | None
    """``None`` when not even the lowest rate of the search was good enough."""
    ran: Ran
    """The run at that rate, or at the lowest."""
    is_open: bool = False
    """Whether the highest rate of the search was still good enough, so that the knee is there or beyond."""
    tried: list[tuple[float, bool]]
    """Each rate tried for this bound, and whether it was good enough."""


class Search(msgspec.Struct, frozen=True):
    """One knee a bound to be found, over the powers of ``1 + precision`` from ``low`` to ``high``."""

    source: Source
    options: RunOptions
    bounds: tuple[str, ...]
    good_share: float = GOOD_SHARE
    precision: float = PRECISION
    low: float = LOW
    high: float = HIGH


@lru_cache(maxsize=1)
def code_digest(root: Path = Path(__file__).parents[2]) -> str:
    """Of the version and of everything that decides what a run brings, node profiles included."""
    digest = hashlib.sha256(product_version().encode())
    for place in (root / name for name in _CODE):
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":  # what is made of sources
                digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def execute(run: Run, tick: pool.Tick, *, trace: Trace | None = None) -> Ran:
    """Simulates ``run``; raises ``UserError``."""
    source, reported = run.source, 0

    def progress(ended: int, expected: int) -> None:
        nonlocal reported
        ended, reported = ended - reported, ended
        tick(ended)

    result = simulate(trace or read_source(source), run.options, bounds=run.bounds, progress=progress,
                      give_up_share=run.give_up_share)
    table = result.outcomes.table()
    return Ran(run=run, summary=result.summary, shares=dict(zip(
        (run.options.ttft_slo, *run.bounds), result.outcomes.shares(), strict=True)),
        is_given_up=result.is_given_up, ttft_s=_quantiles(table[:, 3]), tbt_s=_quantiles(table[:, 4]))


class Shelf(msgspec.Struct, frozen=True):
    """A folder of finished runs."""

    folder: str

    def get(self, run: Run) -> Ran | None:
        """What ``run`` brought, when it is here; a file that cannot be read counts as none."""
        try:
            return msgspec.json.decode(self._file(run).read_bytes(), type=Ran)
        except (OSError, msgspec.DecodeError):
            return None

    def execute(self, run: Run, tick: pool.Tick) -> Ran:
        """Takes it from here, or simulates it and keeps it."""
        ran = self.get(run)
        if ran is None:
            ran = execute(run, tick)
            write_file(self._file(run), msgspec.json.encode(ran))
        return ran

    def _file(self, run: Run) -> Path:
        return Path(self.folder) / f"{run.digest}.json"


def compare(runs: Sequence[Run], shelf: Shelf, *, jobs: int, tick: pool.Tick) -> Iterator[tuple[int, Ran]]:
    """(position, what it brought) of each run as it ends."""
    return pool.run(_execute, [(shelf, run) for run in runs], jobs=jobs, tick=tick)


def find_all(searches: Sequence[Search], shelf: Shelf, *, jobs: int,
             tick: pool.Tick) -> Iterator[tuple[int, list[Knee]]]:
    """(position, a knee for each of its bounds) of each search as it ends."""
    return pool.run(_find, [(shelf, search) for search in searches], jobs=jobs, tick=tick)


def find_knees(search: Search, execute_one: Callable[[Run], Ran]) -> list[Knee]:
    """A knee for each bound. Where requests do not bring their bounds, one run serves all bounds."""
    shared = () if search.options.asks_slo else search.bounds
    made: dict[tuple[str, int], Ran] = {}
    return [_find_knee(search, bound, shared, made, execute_one) for bound in search.bounds]


def find_knee(trace: Trace, options: RunOptions, *, low: float = LOW, high: float = HIGH,
              precision: float = PRECISION, good_share: float = GOOD_SHARE) -> Knee:
    """The knee of a trace that is in memory, under the bounds of ``options``; their rate is the first guess.

    Raises :class:`UserError` when even the lowest rate is too fast.
    """
    search = Search(Source(trace.name, trace.block_tokens), options, (options.ttft_slo,), good_share, precision, low,
                    high)
    knee = find_knees(search, lambda run: execute(run, lambda requests: None, trace=trace))[0]
    if knee.rate_scale is None:
        raise UserError(f"{trace.name}: not even {low:g}x the trace's rate leaves {good_share:.0%} of the requests "
                        f"inside {knee.bound} and the TBT bound; give more nodes or wider bounds")
    return knee


def _find_knee(search: Search, bound: str, shared: tuple[str, ...], made: dict[tuple[str, int], Ran],
               execute_one: Callable[[Run], Ran]) -> Knee:
    first = shared[0] if shared else bound
    scale = math.log1p(search.precision)
    lowest, highest = math.ceil(math.log(search.low) / scale), math.floor(math.log(search.high) / scale)
    tried: list[tuple[float, bool]] = []

    def attempt(power: int) -> bool:
        rate = (1 + search.precision) ** power
        ran = made.get((first, power))
        if ran is None:
            ran = made[first, power] = execute_one(Run(
                search.source, replace(search.options, ttft_slo=first, rate_scale=rate), shared[1:],
                1 - search.good_share))
        is_good = ran.is_good(bound, search.good_share)
        tried.append((rate, is_good))
        return is_good

    known = {power: ran.is_good(bound, search.good_share) for (of, power), ran in made.items() if of == first}
    good = max((power for power, is_good in known.items() if is_good), default=lowest - 1)
    bad = min((power for power in known if power > good), default=highest + 1)
    step = _FIRST_STEP
    power = min(max(round(math.log(search.options.rate_scale) / scale), good + 1), bad - 1)
    while bad - good > 1:
        if attempt(power):
            good = power
            power = (good + bad) // 2 if bad <= highest else min(good + step, highest)
        else:
            bad = power
            power = (good + bad) // 2 if good >= lowest else max(bad - step, lowest)
        step *= 2
    if good < lowest:
        return Knee(bound=bound, rate_scale=None, ran=made[first, lowest], tried=tried)
    return Knee(bound=bound, rate_scale=(1 + search.precision) ** good, ran=made[first, good], is_open=good == highest,
                tried=tried)


def _execute(task: tuple[Shelf, Run], tick: pool.Tick) -> Ran:
    shelf, run = task
    return shelf.execute(run, tick)


def _find(task: tuple[Shelf, Search], tick: pool.Tick) -> list[Knee]:
    shelf, search = task
    return find_knees(search, lambda run: shelf.execute(run, tick))


@lru_cache(maxsize=1)
def read_source(source: Source) -> Trace:
    """Its requests; raises ``TraceError``. Runs of one trace follow each other, so one trace in memory is enough."""
    return source.read()


def _quantiles(values: npt.NDArray[np.float64]) -> list[float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return []
    return [float(value) for value in np.quantile(values, np.linspace(0, 1, _QUANTILES + 1))]
