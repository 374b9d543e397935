"""All combinations of traces, capacities and policies, on all cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache

import msgspec

from load.cachesim.belady import Belady, bound
from load.cachesim.replay import Prompt, infinite, prompts_of, replay
from load.workload.traces import Source
from shared.store import policies
from shared.store.blocks import BlockPool
from shared.store.policies.lru import Lru

BELADY, INFINITE, LRU = Belady.name, "infinite", Lru.name
"""What policies are compared with; always part of a grid."""


class Cell(msgspec.Struct, frozen=True):
    """One run: ``policy`` over a cache of ``blocks`` blocks; 0 blocks stand for as many as it takes."""

    source: Source
    blocks: int
    policy: str


class Result(msgspec.Struct, frozen=True):
    """What came of a cell."""

    cell: Cell
    prompt_tokens: int
    hit_tokens: int
    evicted_blocks: int

    @property
    def share(self) -> float:
        """Of prompt tokens."""
        return self.hit_tokens / self.prompt_tokens


class Grid:
    """Results by where they belong."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = list(results)
        self._shares = {result.cell: result.share for result in results}

    def share(self, source: Source, blocks: int, policy: str) -> float:
        """Hit tokens of one cell, of all prompt tokens."""
        return self._shares[Cell(source, 0 if policy == INFINITE else blocks, policy)]


def cells_of(sources: Sequence[Source], capacities: Sequence[int], names: Sequence[str]) -> list[Cell]:
    """Each once, with the comparisons that every table needs."""
    wanted = list(dict.fromkeys([*names, LRU, BELADY]))
    return [cell for source in sources for cell in (
        *(Cell(source, blocks, name) for blocks in capacities for name in wanted), Cell(source, 0, INFINITE))]


def run_cell(cell: Cell) -> Result:
    """Replays one cell; raises :class:`~load.workload.traces.TraceError`."""
    prompts = _prompts(cell.source)
    if cell.policy == INFINITE:
        hits = infinite(prompts)
    elif cell.policy == BELADY:
        hits = bound(prompts, cell.blocks)
    else:
        hits = replay(prompts, BlockPool(cell.blocks, policies.make(cell.policy)))
    return Result(cell, hits.prompt_tokens, hits.hit_tokens, hits.evicted_blocks)


def run(cells: Sequence[Cell], *, jobs: int, on_result: Callable[[Result], None]) -> Grid:
    """Runs all cells in up to ``jobs`` processes; ``on_result`` hears of each as it ends."""
    results = {}
    for result in _results(cells, jobs):
        results[result.cell] = result
        on_result(result)
    return Grid([results[cell] for cell in cells])


def _results(cells: Sequence[Cell], jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from map(run_cell, cells)
        return
    with ProcessPoolExecutor(min(jobs, len(cells)), mp_context=multiprocessing.get_context("spawn")) as executor:
        try:
            for future in as_completed([executor.submit(run_cell, cell) for cell in cells]):
                yield future.result()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


@lru_cache(maxsize=1)
def _prompts(source: Source) -> list[Prompt]:
    """Cells of one trace follow each other, so one trace in memory is enough."""
    return prompts_of(source.read())
