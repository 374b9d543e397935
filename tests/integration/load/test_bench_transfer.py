"""The benchmark and the soak of the transfer engine, short: that they measure and end, not how fast anything is."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from load.bench import transfer
from load.bench.show import Report
from load.bench.soak import SoakOptions, soak
from load.cli import app
from shared.errors import UserError

QUIET = Console(quiet=True)


@pytest.mark.parametrize("path", ["shm", "tcp"])
async def test_ten_seconds_of_soak_leave_nothing_behind(path: str) -> None:
    stretches: list[float] = []
    options = SoakOptions(duration_s=6.0, path=path, phase_s=1.5, warm_up_s=0.5, report_s=3.0)
    result = await soak(options, lambda stretch: stretches.append(stretch.until_s))
    assert (result.failed, result.error) == (0, "")
    assert result.leaks == [] and len(result.footprints) == 8
    assert stretches == [3.0, 6.0]
    assert sum(stretch.pushes for stretch in result.stretches) == result.everything.total > 0


async def test_every_row_of_ours_has_its_figures() -> None:
    options = transfer.BenchOptions(rounds=1, seconds=0.05, sizes={"64KiB": 64 << 10, "2MiB": 2 << 20},
                                    against=frozenset())
    outcome = await transfer.bench(options, QUIET)
    assert outcome.lost == {}
    figures = {name.rpartition("/")[2] for name in outcome.values}
    assert figures == {"p50", "p99", "rate", "cpu", "pushes", "streamed", "whole"}
    assert {name.rpartition("/")[0] for name in outcome.values} == {
        name for source in transfer.sources(options) for name in source.probes}
    assert all(value > 0 for taken in outcome.values.values() for value in taken)


@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 is not installed")
async def test_iperf3_gives_a_rate_and_a_cost() -> None:
    options = transfer.BenchOptions(rounds=1, seconds=1.0, only=("iperf3",))
    outcome = await transfer.bench(options, QUIET)
    assert set(outcome.values) == {"iperf3/1MiB/rate", "iperf3/1MiB/cpu"} and outcome.lost == {}


async def test_what_is_missing_loses_its_rows_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    options = transfer.BenchOptions(rounds=1, seconds=0.05, sizes={"64KiB": 64 << 10},
                                    only=("memcpy", "iperf3", "mooncake-*"), against=frozenset({"iperf3", "mooncake"}),
                                    mooncake_python=Path(sys.executable))
    outcome = await transfer.bench(options, QUIET)
    assert set(outcome.values) == {"memcpy/64KiB/p50", "memcpy/64KiB/rate"}
    assert "iperf3 is not installed" in outcome.lost["iperf3"]
    assert set(outcome.lost) == {"iperf3", "mooncake-tcp", "mooncake-put", "mooncake-get"}
    assert "install it there" in outcome.lost["mooncake-tcp"]


def test_the_command_prints_tables_and_writes_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = CliRunner().invoke(app, ["bench-transfer", "--rounds", "2", "--seconds", "0.05", "--size", "2MiB",
                                    "--only", "memcpy", "--only", "shm", "--only", "shm-blocking",
                                    "--against", "nothing", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "memcpy/2MiB" in done.output and "≤ 0.2" in done.output
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert report.rounds == 2 and report.lost == {} and all(len(row.rounds) == 2 for row in report.rows)
    compared = {(row.name, row.against) for row in report.rows}
    assert ("shm/2MiB/rate", "memcpy/2MiB/rate") in compared and ("memcpy/2MiB/rate", None) in compared


@pytest.mark.parametrize(("arguments", "said"), [
    (["bench-transfer", "--only", "shm", "--only", "nosuch*"], "--only nosuch* matches nothing that would be measured; "
     "there are memcpy/64KiB, "),
    (["bench-transfer", "--only", "iperf3", "--against", "nothing"], "--only iperf3 matches nothing"),
    (["bench-transfer", "--against", "nothing", "--against", "iperf3"], "--against nothing and --against iperf3"),
    (["bench-transfer", "--json", "/nonexistent/rows.json"], "cannot write /nonexistent/rows.json: No such file"),
    (["bench-transfer", "--json", "/"], "cannot write /: Is a directory"),
    (["bench-transfer", "--size", "huge"], "--size"),
    (["soak-transfer", "--size", "0"], "--size is 0"),
    (["soak-transfer", "--report", "often"], "--report"),
])
def test_wrong_words_are_one_line(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, UserError) and said in str(done.exception)
    assert done.output == "", "nothing was started"


SHORT = ("bench-transfer", "--seconds", "0.05", "--size", "2MiB", "--only", "memcpy", "--against", "nothing")


def test_a_full_disk_costs_the_file_and_no_figures() -> None:
    done = CliRunner().invoke(app, [*SHORT, "--rounds", "1", "--json", "/dev/full"])
    assert isinstance(done.exception, UserError) and "cannot write /dev/full: No space left" in str(done.exception)
    assert "memcpy/2MiB" in done.output and "Medians of 1 values" in done.output


@pytest.mark.parametrize("only", ["shm", "shm-blocking"])
async def test_ctrl_c_shows_the_complete_rounds(tmp_path: Path, only: str) -> None:
    file = tmp_path / "rows.json"
    process = await start(*SHORT, "--only", only, "--rounds", "100000", "--json", str(file))
    code, out, err = await interrupt(process, at=b"round 2 of")
    assert code == 130
    assert err.splitlines()[-1].startswith("interrupted in round ") and "Traceback" not in err
    assert "memcpy/2MiB" in out and f"{only}/2MiB" in out
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert report.rounds >= 1 and all(len(row.rounds) == report.rounds for row in report.rows)


async def test_ctrl_c_before_a_round_is_complete_shows_none(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    process = await start(*SHORT, "--only", "tcp", "--rounds", "2", "--seconds", "100", "--json", str(file))
    code, out, err = await interrupt(process, at=b"starting tcp")
    assert (code, out) == (130, "") and err.splitlines()[-1].startswith("interrupted ")
    assert not file.exists()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    program = "import sys; from services.cli import main; sys.exit(main())"
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program, "load", *arguments,
                                                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)


async def interrupt(process: asyncio.subprocess.Process, *, at: bytes) -> tuple[int | None, str, str]:
    """SIGINT once it says ``at``; its exit code and the rest of what it says."""
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while at not in (line := await process.stderr.readline()):
                assert line, "it ended"
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("command", ["bench-transfer", "soak-transfer"])
def test_commands_have_help_with_an_example(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0 and "Example" in done.output
