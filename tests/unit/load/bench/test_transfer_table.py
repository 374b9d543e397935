"""What bench-transfer measures and compares, without measuring it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from load.bench import transfer
from load.bench.rounds import UNITS, Row
from load.bench.show import comparisons_table, figure, figures_tables
from shared.transfer import Slice

EVERYTHING = transfer.BenchOptions(rounds=1, seconds=0.1, against=frozenset({"iperf3", "mooncake"}))


def test_the_prompt_of_the_layer_row_has_the_bytes_of_its_spec() -> None:
    layers = [transfer.layer_slice(transfer.SPEC, layer, transfer.PROMPT_TOKENS) for layer in range(30)]
    assert transfer.SPEC.layers == 30 and {layer.count for layer in layers} == {32}
    pieces = sorted(piece for layer in layers for piece in layer_bytes(layer))
    assert sum(stop - start for start, stop in pieces) == 47_185_920
    assert all(stop == start for (_, stop), (start, _) in pairwise(pieces)), "no gap, no overlap"
    assert pieces[0][0] == 0


def layer_bytes(layer: Slice) -> list[tuple[int, int]]:
    assert layer.offset == layer.remote.offset
    starts = [layer.offset + i * layer.stride for i in range(layer.count)]
    return [(start, start + layer.remote.length) for start in starts]


def test_every_target_names_rows_that_are_measured() -> None:
    probes = {name for source in transfer.sources(EVERYTHING) for name in source.probes}
    for target in transfer.targets():
        for row in filter(None, (target.row, target.against)):
            name, _, kind = row.rpartition("/")
            assert name in probes and kind in UNITS, row


def test_targets_are_those_of_the_engine() -> None:
    asked = {(target.row, target.against): target.text() for target in transfer.targets() if target.text()}
    assert asked["tcp-blocking/2MiB/rate", "iperf3/1MiB/rate"] == "≥ 0.8 × iperf3/1MiB/rate"
    assert asked["shm-blocking/2MiB/p50", ""] == "≤ 0.2 ms"
    assert len(asked) == 15


def test_sizes_and_peers_are_chosen() -> None:
    few = transfer.BenchOptions(rounds=1, seconds=0.1, sizes={"1KiB": 1024}, against=frozenset())
    names = [name for source in transfer.sources(few) for name in source.probes]
    assert names == ["memcpy/1KiB", "python-tcp/1KiB", "tcp-blocking/1KiB", "tcp/1KiB", "tcp+xxh3/1KiB",
                     "shm-blocking/1KiB", "shm/1KiB", "shm+xxh3/1KiB", "layers/tcp", "small/tcp", "layers/shm",
                     "small/shm"]


@pytest.mark.parametrize(("value", "text"), [(0.0781, "0.078"), (0.9996, "1.000"), (3.14159, "3.14"), (31.4159, "31.4"),
                                             (314.159, "314"), (31415.9, "31,416")])
def test_figures_have_three_digits_that_count(value: float, text: str) -> None:
    assert figure(value) == text


def test_tables_have_a_line_a_probe_and_a_line_a_comparison() -> None:
    plain = Row(name="memcpy/2MiB/rate", value=12.0, unit="GB/s", rounds=[12.0])
    met = Row(name="shm/2MiB/rate", value=11.0, unit="GB/s", rounds=[11.0], against="memcpy/2MiB/rate",
              against_value=12.0, ratio=0.92, target="≥ 0.9 × memcpy/2MiB/rate", met=True)
    p50 = Row(name="shm/2MiB/p50", value=0.19, unit="ms", rounds=[0.19], target="≤ 0.2 ms", met=True)
    small = Row(name="small/shm/p99", value=3.0, unit="ms", rounds=[3.0])
    assert [table.row_count for table in figures_tables([plain, met, p50, small])] == [2, 1]
    table = comparisons_table([plain, met, p50])
    assert [list(column.cells) for column in table.columns][3:] == [
        ["12.0 memcpy/2MiB", ""], ["[green]≥ 0.9 met[/]", "[green]≤ 0.2 met[/]"]]
