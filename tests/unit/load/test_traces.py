"""The trace reader: what it accepts, and the line it blames when it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from load.workload.traces import TraceError, read


def row(timestamp: float, tokens: int, ids: list[int] | None, output: int = 5) -> dict[str, Any]:
    found: dict[str, Any] = {"timestamp": timestamp, "input_length": tokens, "output_length": output}
    return found if ids is None else {**found, "hash_ids": ids}


def write(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in rows))
    return path


def test_reads_mooncake_rows_in_seconds(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", row(0, 700, [0, 1]), "", row(3000, 513, [0, 2], output=9))
    trace = read(path)
    assert trace.name == "chat" and trace.block_tokens == 512 and trace.duration_s == 3.0
    assert [(a.index, a.at_s, a.input_tokens, a.output_tokens, a.hash_ids) for a in trace.arrivals] == [
        (0, 0.0, 700, 5, (0, 1)), (1, 3.0, 513, 9, (0, 2))]


def test_times_count_from_the_first_request(tmp_path: Path) -> None:
    epoch_ms = 1_764_460_800_000
    trace = read(write(tmp_path / "t.jsonl", row(epoch_ms, 10, [0]), row(epoch_ms + 1500, 10, [0])))
    assert [arrival.at_s for arrival in trace.arrivals] == [0.0, 1.5]


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(0, 10, [0]), "this is no JSON")
    assert len(read(path, limit=1).arrivals) == 1


def test_rows_without_ids_share_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(0, 1024, None), row(0, 1024, None))
    first, second = read(path).arrivals
    assert len(first.hash_ids) == 2 and not set(first.hash_ids) & set(second.hash_ids)


def test_another_block_size(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(0, 40, [0, 1, 2]))
    assert read(path, block_tokens=16).arrivals[0].hash_ids == (0, 1, 2)


@pytest.mark.parametrize(("bad", "why"), [
    ("not json", "malformed"),
    ("[1, 2]", "expected `object`"),
    (json.dumps({"timestamp": 1, "output_length": 1, "hash_ids": []}), "input_length"),
    (json.dumps(row(1, 0, [])), "input_length"),
    (json.dumps(row(-1, 10, [0])), "timestamp"),
    (json.dumps({**row(1, 10, [0]), "input_length": "ten"}), "expected `int`"),
    (json.dumps(row(1, 1025, [0, 1])), "2 hash_ids for input_length 1025, expected 3"),
    (json.dumps(row(1, 600, [7, 0])), "hash id 0 stands at another place"),
    (json.dumps(row(0.5, 10, [9])), "before 1 of an earlier line"),
    (json.dumps(row(1_764_460_800_000, 10, [9])), "timestamp 1764460800000 is 20422 days after the line before"),
    (json.dumps(row(float("nan"), 10, [9])), "timestamp is NaN; expected a number"),
])
def test_blames_file_and_line(tmp_path: Path, bad: str, why: str) -> None:
    path = write(tmp_path / "t.jsonl", row(1, 600, [0, 1]), bad)
    with pytest.raises(TraceError) as caught:
        read(path)
    message = str(caught.value)
    assert f"{path}, line 2: " in message and why in message and "\n" not in message


def test_missing_and_empty_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(TraceError, match="no requests"):
        read(write(tmp_path / "empty.jsonl"))
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        read(binary)


def test_azure_csv(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n"
                    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,1600,109\n")
    first, second = read(path).arrivals
    assert (first.at_s, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579) and len(second.hash_ids) == 4


@pytest.mark.parametrize(("text", "why"), [
    ("TIMESTAMP,ContextTokens\n", "line 1: column GeneratedTokens is missing"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", "line 2: TIMESTAMP is 'soon'"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1\n", "line 2: GeneratedTokens is empty"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1,x\n", "line 2: GeneratedTokens is 'x'"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46Z,1,1\n2024-11-16 18:15:46,1,1\n",
     "line 3: 2024-11-16 18:15:46 is 366 days after"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,0,1\n", "line 2: ContextTokens 0"),
])
def test_azure_csv_blames_file_and_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert why in str(caught.value)
