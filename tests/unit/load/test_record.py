"""The run's folder: what is written is read again, and damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from load.record import ROWS_FILE, RUN_FILE, ResultError, RunInfo, RunRecord, RunWriter, read_run

INFO = RunInfo(source="live", trace="t", url="http://127.0.0.1:1", model="m", api="completions", started_at_s=0.0,
               rate_scale=1.0, length_scale=1.0, max_input=None, output_scale=1.0, max_output=None, max_in_flight=4,
               seed=0, slo_ttft_s=1.0, slo_tbt_s=0.1, planned=2)


def row(index: int) -> RunRecord:
    return RunRecord(index=index, scheduled_s=0.0, sent_s=0.1, finished_s=1.0, outcome="ok", input_tokens=3,
                     output_tokens=2, gaps_s=[0.1], first_token_s=0.5, headers={"request": "r1"})


def test_rows_come_back_in_the_trace_s_order(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a" / "b") as writer:
        writer.info(INFO)
        writer.row(row(1))
        writer.row(row(0))
    assert read_run(tmp_path / "a" / "b") == (INFO, [row(0), row(1)])


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.info(INFO)
        writer.row(row(0))
        assert read_run(tmp_path)[1] == [row(0)]


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.info(INFO)
        writer.row(row(0))
    with (tmp_path / ROWS_FILE).open("ab") as file:
        file.write(b'{"index": 1, "sched')
    assert read_run(tmp_path)[1] == [row(0)]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.info(INFO)
        writer.row(row(0))
    with (tmp_path / ROWS_FILE).open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(ResultError, match=r"requests\.jsonl, line 2: .*index"):
        read_run(tmp_path)


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.info(INFO)
        writer.row(row(0))
    with pytest.raises(ResultError, match="already holds a run"), RunWriter(tmp_path):
        pass
    with RunWriter(tmp_path, overwrite=True):
        pass
    assert read_run(tmp_path)[1] == []


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="holds no run"):
        read_run(tmp_path)
    (tmp_path / RUN_FILE).write_text("{}")
    (tmp_path / ROWS_FILE).write_text("")
    with pytest.raises(ResultError, match="not written by"):
        read_run(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="choose another --out"), RunWriter(tmp_path / "file"):
        pass
