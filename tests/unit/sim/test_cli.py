"""``moonbus sim`` from the outside."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from load.sim import paper
from load.sim.cli import _show, app, label
from load.sim.experiment import RunOptions
from load.sim.page import Table
from shared.errors import UserError
from tests.unit.sim.builders import profile_file, quick


def rows(path: Path, count: int = 12) -> Path:
    path.write_text("".join(json.dumps({"timestamp": 200 * i, "input_length": 95, "output_length": 4,
                                        "hash_ids": [*range(9), 100 + i]}) + "\n" for i in range(count)))
    return path


def test_run_leaves_page_figures_and_numbers(tmp_path: Path) -> None:
    profile = profile_file(tmp_path, quick())
    result = CliRunner().invoke(app, [
        "run", "--trace", str(rows(tmp_path / "t.jsonl")), "--block-tokens", "10", "--prefill", "2", "--decode", "1",
        "--profile", profile, "--nic-gbps", "1", "--dram-tokens", "500", "--policy", "mooncake_a1",
        "--admission", "slo", "--rate-scale", "2", "--ttft-slo", "10s", "--tbt-slo", "1s", "--limit", "10",
        "--seed", "3",
        "--json", str(tmp_path / "numbers.json"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers.keys() >= {
        "requests", "accepted", "rejected", "completed", "ttft_s", "tbt_s", "slo_share", "prompt_tokens", "hit_tokens",
        "transferred_bytes", "prefill_busy_s", "wasted_prefill_s", "sim_wall_s"}
    assert numbers["ttft_s"].keys() >= {"mean", "p50", "p90", "p99"} and numbers["tbt_s"].keys() >= {"mean", "p99"}
    assert (numbers["trace"], numbers["limit"], numbers["block_tokens"]) == ("t", 10, 10)
    assert numbers["requests"] == numbers["completed"] == 10 and numbers["slo_share"] == 1.0
    assert numbers == json.loads((tmp_path / "out" / "result.json").read_text())
    for name in ("latency", "load", "lengths"):
        assert (tmp_path / "out" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64" in (tmp_path / "out" / "report.html").read_text()


def test_the_page_names_every_option_that_is_not_the_usual_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [
        "run", "--trace", str(rows(tmp_path / "t.jsonl")), "--block-tokens", "10", "--prefill", "1", "--decode", "1",
        "--profile", profile_file(tmp_path, quick()), "--limit", "3", "--conductors", "2", "--message-delay", "5ms",
        "--fault", "slow:prefill-1@1-4x2.5", "--dram-tokens", "5000", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, (result.output, result.exception)
    page = (tmp_path / "out" / "report.html").read_text()
    for name, value in (("policy", "moonbus"), ("order in prefill queues", "bounded"), ("roles", "by need (elastic)"),
                        ("limit", "the first 3 requests"), ("conductors", "2"), ("message delay", "5.0 ms"),
                        ("faults", "slow:prefill-1@1-4x2.5"), ("dram tokens", "5,000"), ("block tokens", "10")):
        assert f"<td>{name}</td><td>{value}</td>" in page, name
    assert "<td>cache policy</td>" not in page


@pytest.mark.parametrize(("arguments", "said"), [
    (["compare", "--resume"], "--resume: say with --out FOLDER"),
    (["knee", "--resume", "--out", "OUT"], "--resume: OUT/runs is no folder"),
    (["compare", "--json", "THERE"], "--json THERE cannot be written: that is a folder"),
    (["run", "--json", "OUT/deep/n.json"], "--json OUT/deep/n.json cannot be written: there is no folder OUT/deep"),
    (["knee", "--json", "/proc/n.json"], "--json /proc/n.json cannot be written ("),
    (["run", "--out", "/proc/moonbus"], "--out: nothing can be written to /proc/moonbus ("),
    (["compare", "--out", "THERE/t.jsonl"], "--out: nothing can be written to THERE/t.jsonl (Not a directory)"),
    (["run", "--json", "THERE/t.jsonl/n.json"], "cannot be written: THERE/t.jsonl is no folder")])
def test_where_to_write_is_looked_at_first(arguments: list[str], said: str, tmp_path: Path) -> None:
    def placed(text: str) -> str:
        return text.replace("OUT", str(tmp_path / "out")).replace("THERE", str(tmp_path))

    result = CliRunner().invoke(app, [
        *map(placed, arguments), "--trace", str(rows(tmp_path / "t.jsonl")), "--block-tokens", "10"])
    assert isinstance(result.exception, UserError) and placed(said) in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize("json_to", ["full", "out/figures"])
def test_what_was_computed_is_shown_also_where_it_cannot_be_written(json_to: str, tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    result = CliRunner().invoke(app, [
        "run", "--trace", str(rows(tmp_path / "t.jsonl")), "--block-tokens", "10", "--prefill", "1", "--decode", "1",
        "--profile", profile_file(tmp_path, quick()), "--json", str(tmp_path / json_to), "--out",
        str(tmp_path / "out")])
    assert isinstance(result.exception, UserError) and f"{json_to} cannot be written (" in str(result.exception)
    assert "inside both" in result.stdout and "report:" not in result.stdout
    assert (tmp_path / "out" / "report.html").exists() and (tmp_path / "out" / "figures" / "latency.png").exists()


def test_a_malformed_line_is_named_with_exit_code_2_and_nothing_is_written(tmp_path: Path) -> None:
    path = rows(tmp_path / "t.jsonl", 2)
    path.write_text(path.read_text() + '{"timestamp": 900, "input_length": "long", "output_length": 4}\n')
    result = CliRunner().invoke(app, ["run", "--trace", str(path), "--block-tokens", "10", "--json",
                                      str(tmp_path / "numbers.json"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert f"{path}, line 3" in result.stderr and "$.input_length" in result.stderr
    assert not (tmp_path / "numbers.json").exists() and not (tmp_path / "out").exists()


def test_an_impossible_cluster_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "--trace", str(rows(tmp_path / "t.jsonl")), "--block-tokens", "10",
                                      "--prefill", "0", "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, UserError) and "--prefill is 0" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("command", "code", "said"), [
    (["compare", "--trace", "BAD"], 2, "line 3"), (["knee", "--trace", "BAD"], 2, "line 3"),
    (["compare", "--rate-scale", "1", "--rate-scale", "nan"], 1, "--rate-scale is nan"),
    (["compare", "--policy", "random", "--policy", "fastest"], 1, "no policy fastest"),
    (["knee", "--ttft-slo", "30s", "--ttft-slo", "soon"], 1, "'soon' is not a duration"),
    (["knee", "--decode", "0"], 1, "--decode is 0")])
def test_a_grid_that_cannot_be_is_refused_before_anything_runs(command: list[str], code: int, said: str,
                                                               tmp_path: Path) -> None:
    good, bad = rows(tmp_path / "t.jsonl", 2), rows(tmp_path / "bad.jsonl", 2)
    bad.write_text(bad.read_text() + '{"timestamp": 900, "input_length": 5}\n')
    arguments = [argument.replace("BAD", str(bad)) for argument in command]
    result = CliRunner().invoke(app, [*arguments, "--trace", str(good), "--block-tokens", "10",
                                      "--out", str(tmp_path / "out")])
    assert result.exit_code == code and said in f"{result.stderr} {result.exception}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [
    ["compare", "--policy", "moonbus", "--policy", "random", "--rate-scale", "1", "--rate-scale", "2", "--seed", "0",
     "--seed", "1"],
    ["knee", "--policy", "random", "--ttft-slo", "1s", "--ttft-slo", "100ms+2x"]])
def test_compare_and_knee_leave_their_page(command: list[str], tmp_path: Path) -> None:
    arguments = [
        *command, "--trace", str(rows(tmp_path / "toolagent_like.jsonl")), "--block-tokens", "10", "--prefill", "1",
        "--decode", "1", "--profile", profile_file(tmp_path, quick()), "--jobs", "1", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "synthetic stand-in" in (tmp_path / "out" / "report.html").read_text()
    numbers = (tmp_path / "out" / "result.json").read_bytes()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").iterdir()}
    assert json.loads(numbers) and kept and list((tmp_path / "out" / "figures").glob("*.png"))
    result = CliRunner().invoke(app, [*arguments, "--resume"])
    assert result.exit_code == 0 and (tmp_path / "out" / "result.json").read_bytes() == numbers
    assert kept == {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").iterdir()}, "made once"


def test_a_knee_below_the_search_is_shown_beside_those_that_are_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [
        "knee", "--policy", "random", "--ttft-slo", "1ms", "--ttft-slo", "60s", "--tbt-slo", "60s", "--trace",
        str(rows(tmp_path / "t.jsonl")), "--block-tokens", "10", "--prefill", "1", "--decode", "1", "--profile",
        profile_file(tmp_path, quick()), "--jobs", "1", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, (result.output, result.exception)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<td>below 0.25</td>" in page and "<td>≥ 8.00</td>" in page
    first, second = json.loads((tmp_path / "out" / "result.json").read_text())["knees"]
    assert first["rate_scale"] is None and second["is_open"] and second["rate_scale"] > 7.8


def test_what_nobody_had_is_no_number(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [
        "run", "--trace", str(rows(tmp_path / "t.jsonl")), "--block-tokens", "10", "--prefill", "1", "--decode", "1",
        "--profile", profile_file(tmp_path, quick()), "--admission", "slo", "--ttft-slo", "1ms", "--out",
        str(tmp_path / "out")])
    assert result.exit_code == 0, (result.output, result.exception)
    numbers = json.loads((tmp_path / "out" / "result.json").read_text())
    assert numbers["completed"] == 0 and numbers["ttft_s"]["mean"] is None and numbers["tbt_s"]["p99"] is None
    assert numbers["long_ttft_p99_s"] is None and "<td>–</td>" in (tmp_path / "out" / "report.html").read_text()


def test_paper_sets_published_and_simulated_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "_FIG9_S", 6.0)
    for name in paper.TRACES:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({
            "timestamp": 500 * i, "input_length": 2000, "output_length": 4, "hash_ids": [0, 1, 2, 3 + i]}) + "\n"
            for i in range(6)))
    parts = [argument for part in paper.PARTS if part != "grid" for argument in ("--part", part)]
    result = CliRunner().invoke(app, ["paper", "--traces", str(tmp_path), *parts, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, (result.output, result.exception)
    numbers = json.loads((tmp_path / "out" / "result.json").read_text())
    assert numbers.keys() == {"options", *paper.PARTS} - {"grid"}
    assert numbers["options"] == {"profile": "a800-llama3-70b", "seed": 0, "limit": None}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "19.65" in page and "3589" in page and "requests of each trace" not in page
    assert {path.stem for path in (tmp_path / "out" / "figures").iterdir()} >= {
        "fig5", "fig8", "fig10", *(f"slo-{name}" for name in paper.TRACES)}
    result = CliRunner().invoke(app, ["paper", "--traces", str(tmp_path), "--part", "fig5", "--limit", "3", "--seed",
                                      "7", "--out", str(tmp_path / "few")])
    assert result.exit_code == 0, (result.output, result.exception)
    page = (tmp_path / "few" / "report.html").read_text()
    assert "<td>limit</td><td>the first 3 requests of each trace; published is what whole ones brought</td>" in page
    said = "(simulated: only the first 3 requests, seed 7)"
    assert f"<figcaption>Figure 5: mean TTFT by scheduling {said}</figcaption>" in page
    assert f"<h2>FAST&#39;25 figure 5: mean TTFT, s {said}</h2>" in page and said in " ".join(result.stdout.split())
    assert json.loads((tmp_path / "few" / "result.json").read_text())["options"] == {
        "profile": "a800-llama3-70b", "seed": 7, "limit": 3}
    result = CliRunner().invoke(app, ["paper", "--traces", str(tmp_path), "--part", "fig99"])
    assert isinstance(result.exception, UserError) and "there are fig5" in str(result.exception)


def test_the_grid_is_of_no_trace_so_a_limit_is_nothing_to_it() -> None:
    options = RunOptions(profile="h100.json")
    assert paper.unusual("grid", options, 9) == ["profile h100.json"]
    assert paper.unusual("fig9", options, 9) == ["simulated: only the first 9 requests", "profile h100.json"]
    assert paper.unusual("slo", RunOptions(), None) == []


def test_the_grid_of_long_contexts_has_half_of_each_prompt_shared() -> None:
    trace = paper.grid_trace(16_000)
    assert len(trace.arrivals[0].hash_ids) == 32 and {len(set(one.hash_ids)) for one in trace.arrivals} == {32}
    first, shared = trace.arrivals[0].hash_ids[0], trace.arrivals[0].hash_ids[15]
    same = [one for one in trace.arrivals if one.hash_ids[0] == first]
    assert len(same) > 1 and all(one.hash_ids[15] == shared for one in same)
    assert len({one.hash_ids[16] for one in trace.arrivals}) == len(trace.arrivals)


@pytest.mark.parametrize(("width", "said"), [(60, "┃ first ┃"), (33, "│ first "), (20, "one: first 12")])
def test_a_table_is_shown_in_the_room_there_is(width: int, said: str) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    _show(console, Table("Three", ("name", "first", "second", "third head"), [
        ("one", "12", "1234567890", "1"), ("two", "3", "4", "5")]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert said in text and "1234567890" in text and "…" not in text


def test_the_stand_in_is_called_one() -> None:
    assert "stand-in" in label("toolagent_like") and label("conversation_trace") == "conversation_trace"


@pytest.mark.parametrize("command", ["run", "compare", "knee", "paper", "fit"])
def test_nothing_is_cut_of_the_help_in_80_columns(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0 and "--out" in result.output + "--out" * (command == "fit")
    assert "…" not in result.output and max(map(len, result.output.splitlines())) <= 80
