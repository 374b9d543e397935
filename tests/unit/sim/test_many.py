"""Grids of runs: the same in one process and in several, kept as they end, knees that share runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.sim import many, pool
from load.sim.experiment import RunOptions
from load.sim.many import Ran, Run, Search, Shelf, compare, find_all, find_knees
from load.sim.outcome import Distribution, Summary
from load.workload.traces import Source
from tests.unit.sim.builders import profile_file, quick


def ignore(requests: int) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 200 * i, "input_length": 95, "output_length": 4,
                                        "hash_ids": [*range(9), 100 + i]}) + "\n" for i in range(20)))
    return Source(str(path), 10)


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    return RunOptions(profile=profile_file(tmp_path / "profiles", quick()), prefill=1, decode=1, ttft_slo="1s")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    (tmp_path / "runs").mkdir()
    return Shelf(str(tmp_path / "runs"))


def timeless(ran: Ran) -> Ran:
    return msgspec.structs.replace(ran, summary=msgspec.structs.replace(ran.summary, sim_wall_s=0.0))


def test_several_processes_bring_the_same_as_one_and_leave_it_on_the_shelf(
        source: Source, options: RunOptions, shelf: Shelf, tmp_path: Path) -> None:
    runs = [Run(source, replace(options, policy=policy)) for policy in ("random", "least_load", "moonbus")]
    (tmp_path / "alone").mkdir()
    alone = dict(compare(runs, Shelf(str(tmp_path / "alone")), jobs=1, tick=ignore))
    ticked: list[int] = []
    together = dict(compare(runs, shelf, jobs=2, tick=ticked.append))
    assert {i: timeless(ran) for i, ran in together.items()} == {i: timeless(ran) for i, ran in alone.items()}
    assert sorted(alone) == [0, 1, 2] and sum(ticked) == 60
    assert shelf.get(runs[1]) == together[1]


def test_what_is_on_the_shelf_is_not_made_again(source: Source, options: RunOptions, shelf: Shelf,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(source, options)
    first = shelf.execute(run, ignore)
    monkeypatch.setattr(many, "execute", lambda *_: pytest.fail("made again"))
    assert shelf.execute(run, ignore) == first
    (path,) = Path(shelf.folder).iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert shelf.get(run) is None  # half a file is none


def test_all_options_and_the_code_name_a_run(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Run(source, RunOptions()).digest
    assert usual == Run(source, RunOptions(seed=0, faults=())).digest
    assert usual != Run(source, RunOptions(seed=1)).digest
    given = vars(RunOptions())
    monkeypatch.setattr(RunOptions, "__init__", lambda self: vars(self).update(given, seed=1))  # another default
    assert Run(source, RunOptions()).digest != usual
    monkeypatch.undo()
    monkeypatch.setattr(many, "code_digest", lambda: "another")
    assert Run(source, RunOptions()).digest != usual


def test_a_change_of_a_source_changes_the_digest_of_the_code(tmp_path: Path) -> None:
    for name in ("load/sim/a.py", "services/conductor/core/b.py", "shared/order.py", "shared/store/policies/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    digest = many.code_digest.__wrapped__
    before = digest(tmp_path)
    (tmp_path / "load/sim/__pycache__").mkdir()
    (tmp_path / "load/sim/__pycache__/a.pyc").write_text("compiled")
    (tmp_path / "load/other.py").write_text("1")
    (tmp_path / "services/conductor/core/_native.cpython-311-x86_64-linux-gnu.so").write_bytes(b"compiled")
    assert digest(tmp_path) == before
    (tmp_path / "shared/order.py").write_text("2")
    assert digest(tmp_path) != before


def test_left_early_no_process_stays(source: Source, options: RunOptions, shelf: Shelf) -> None:
    runs = [Run(source, replace(options, seed=seed)) for seed in range(6)]

    def interrupted(results: Iterator[tuple[int, Ran]]) -> None:
        for _ in results:
            raise KeyboardInterrupt

    results = compare(runs, shelf, jobs=2, tick=ignore)
    with pytest.raises(KeyboardInterrupt):
        interrupted(results)
    results.close()  # type: ignore[attr-defined]
    kept = [run for run in runs if shelf.get(run) is not None]
    assert kept, "what had ended is there"
    assert len(dict(compare(runs, shelf, jobs=1, tick=ignore))) == 6


def test_knees_of_several_bounds_are_those_of_each_alone(source: Source, options: RunOptions, shelf: Shelf) -> None:
    bounds = ("300ms", "100ms+2x")
    search = Search(source, replace(options, tbt_slo_s=1.0), bounds, low=0.1, high=50.0)
    ((_, both),) = find_all([search], shelf, jobs=1, tick=ignore)
    made = len(list(Path(shelf.folder).iterdir()))
    for bound, knee in zip(bounds, both, strict=True):
        (alone,) = find_knees(msgspec.structs.replace(search, bounds=(bound,)), lambda run: many.execute(run, ignore))
        assert (knee.bound, knee.rate_scale) == (bound, pytest.approx(alone.rate_scale))
        assert knee.ran.shares[bound] >= 0.95
    assert made <= sum(len(knee.tried) for knee in both)


@given(knee=st.integers(-69, 104), guess=st.floats(0.3, 7.0))
def test_a_search_finds_the_last_good_rate_within_a_dozen_runs(knee: int, guess: float) -> None:
    search = Search(Source("t.jsonl"), RunOptions(rate_scale=guess), ("30s",))
    rates: list[float] = []

    def execute_one(run: Run) -> Ran:
        rates.append(run.options.rate_scale)
        return _ran(run, 1.0 if run.options.rate_scale <= 1.02 ** knee * 1.001 else 0.5)

    (found,) = find_knees(search, execute_one)
    assert found.rate_scale == pytest.approx(1.02 ** knee) and len(rates) == len(set(rates)) <= 12
    assert [rate for rate, _ in found.tried] == rates


def test_knees_outside_the_search_are_said() -> None:
    search = Search(Source("t.jsonl"), RunOptions(), ("30s",))
    (none,), (beyond,) = (find_knees(search, lambda run, share=share: _ran(run, share)) for share in (0.0, 1.0))
    assert none.rate_scale is None and none.ran.run.options.rate_scale == pytest.approx(0.25, rel=0.02)
    assert not none.is_open and beyond.is_open and beyond.rate_scale == pytest.approx(8.0, rel=0.02)


def test_nobody_wants_the_rest_of_an_interrupted_task() -> None:
    context = pool.multiprocessing.get_context("spawn")
    pool._begin(context.Value("q", 0), stop := context.Event())
    pool._tick(3)
    assert pool._done.value == 3
    stop.set()
    with pytest.raises(pool.Interrupted):
        pool._tick(1)


def _ran(run: Run, share: float) -> Ran:
    zero = Distribution.of(np.array([]))
    return Ran(run=run, shares={"30s": share}, is_given_up=share < 0.9, ttft_s=[], tbt_s=[], summary=Summary(
        requests=1, accepted=1, rejected={}, failed=0, completed=1, ttft_s=zero, tbt_s=zero, slo_share=share,
        ttft_share=share, tbt_share=share, prompt_tokens=0, hit_tokens=0, transferred_bytes=0, pulled_bytes=0,
        prefill_busy_s=0.0, prefill_mean_s=0.0, prefill_compute_s=0.0, wasted_prefill_s=0.0, ttft_error=0.0,
        long_ttft_p99_s=0.0, duration_s=0.0, sim_wall_s=0.0))
