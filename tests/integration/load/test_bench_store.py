"""The benchmark of the store's client, short: that it measures, compares what it got, and ends."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from load.bench import mooncake, store
from load.bench.rounds import is_wanted, make_rows
from load.bench.show import Report
from load.cli import app


async def test_every_row_of_ours_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, nbytes in (("REGION_BYTES", 2 << 20), ("BATCH_BYTES", 1 << 20), ("POOL_BYTES", 16 << 20)):
        monkeypatch.setattr(store, name, nbytes)
    sizes = {"256KiB": 256 << 10}
    options = store.StoreOptions(rounds=1, seconds=0.02, sizes=sizes, only=("memcpy", "shm-put", "shm-get-batch"))
    outcome = await store.bench(options, Console(quiet=True))
    assert outcome.lost == {}
    assert {name.rpartition("/")[0] for name in outcome.values} == {
        name for source in store.sources(options) for name in source.probes if is_wanted(name, options.only)}
    assert all(value > 0 for taken in outcome.values.values() for value in taken)
    rows = make_rows(outcome.values, store.targets(sizes))
    assert {row.against for row in rows if row.name == "shm-get-batch/256KiB/rate"} == {
        "memcpy/256KiB/rate"}


async def test_a_peer_that_is_not_there_is_said_to_be_missing() -> None:
    options = store.StoreOptions(rounds=1, seconds=0.02, only=("mooncake*",),
                                 mooncake=mooncake.Python(Path(sys.executable), Path()))
    outcome = await store.bench(options, Console(quiet=True))
    assert outcome.values == {} and "has no mooncake-transfer-engine" in outcome.lost["mooncake"]


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    done = CliRunner().invoke(app, ["bench-store", "--rounds", "1", "--seconds", "0.05", "--only", "memcpy", "--size",
                                    "256KiB", "--json", str(path)])
    assert done.exit_code == 0, done.output
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert {row.name for row in report.rows} == {"memcpy/256KiB/p50", "memcpy/256KiB/rate"}


def test_words_that_make_no_sense_are_refused_before_anything_starts() -> None:
    for words in (["--size", "3MiB"], ["--only", "shm-steal"], ["--size", "64MiB"]):
        assert CliRunner().invoke(app, ["bench-store", *words]).exit_code != 0
