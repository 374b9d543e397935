"""Tables of the command line lose nothing, however narrow it is."""

from __future__ import annotations

import io
import random
import sys
from typing import Any

import msgspec
import pytest
from rich.console import Console

from services.cli import kv_show
from services.cli.advise import advise
from services.cli.explain import explain
from services.cli.output import _Console, compact_table, name_column, number_column
from services.cli.workers import report, workers
from services.launcher import demo
from shared import messages
from tests.support.command import moonbus
from tests.support.golden import sample

WIDTHS = (20, 40, 80, 132)
every_width = pytest.mark.parametrize("width", WIDTHS)


def printed(width: int | None, renderable: Any) -> str:
    """What a terminal so wide shows; ``None``: what goes through a pipe."""
    file = io.StringIO()
    if width is None:
        _Console(file=file).print(renderable)
    else:
        Console(file=file, width=width, force_terminal=True, color_system=None).print(renderable)
    return file.getvalue()


@pytest.mark.parametrize("seed", range(40))
def test_every_letter_of_every_cell_is_shown(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell has a letter of its own."""
    monkeypatch.delenv("COLUMNS", raising=False)
    chance = random.Random(seed)
    letters = (chr(code) for code in range(0x3B1, 0x2000) if chr(code).isalpha() and chr(code).islower())
    lengths: dict[str, int] = {}

    def cell() -> str:
        letter = next(letters)
        lengths[letter] = chance.choice((1, 3, 8, 15, 40))
        return letter * lengths[letter]

    kinds = (str, number_column, lambda header: name_column(header, 9))
    table = compact_table(*(chance.choice(kinds)(cell()) for _ in range(chance.randint(1, 10))))
    for _ in range(chance.randint(1, 4)):
        table.add_row(*(cell() for _ in table.columns))
    times = len(table.rows)
    for width in (*WIDTHS, None, 20):
        shown = printed(width, table)
        assert width is None or all(len(line) <= width for line in shown.splitlines())
        heads = {str(column.header)[0] for column in table.columns}
        for letter, length in lengths.items():
            count = shown.count(letter)
            assert count == length or (letter in heads and count == length * times), (width, letter)
        if width is None:
            assert len(shown.strip("\n").splitlines()) == times + 4, "a line for a row, and the head's"


def test_words_stay_whole_as_long_as_they_can() -> None:
    table = compact_table(name_column("worker", 9), "model", number_column("blocks"))
    table.add_row("prefill-1", "a-model/with-a-very-long-name", "1,000")
    lines = [line.split() for line in printed(40, table).splitlines() if line.strip()]
    assert lines[2][0] == "prefill-1" and lines[2][-1] == "1,000"
    assert lines[2][1] + lines[3][0] == "a-model/with-a-very-long-name"


def test_names_are_folded_before_a_table_falls_apart() -> None:
    table = compact_table(name_column("request", 12), number_column("tokens"))
    table.add_row("req-be430d53bb00f1c2", "1,000")
    lines = [line.split() for line in printed(22, table).splitlines() if line.strip()]
    assert lines[2][-1] == "1,000" and len(lines[2][0]) >= 12 and lines[2][0] + lines[3][0] == "req-be430d53bb00f1c2"


def test_workers_of_an_elastic_stack_fit_into_eighty_columns() -> None:
    told = reply("WorkersReply")
    (one,) = told.workers
    hello = msgspec.structs.replace(
        one.hello, worker="prefill-1", role="prefill", elastic=True, capacity_blocks=187_483, device="cuda:0",
        spec=msgspec.structs.replace(one.hello.spec, model="smollm2-135m"))
    load = msgspec.structs.replace(one.load, free_blocks=187_483, draining=False)
    worker = msgspec.structs.replace(one, hello=hello, load=load, state="alive", now="prefill", waiting_s=0.0)
    shown = printed(80, report(msgspec.structs.replace(told, workers=[worker])))
    assert "187483/187483" in shown and len([line for line in shown.splitlines() if "prefill-1" in line]) == 1
    assert "─" in shown, "a table, not row by row"


def reply(name: str) -> Any:
    """A message with a long text in every field that has one."""
    kind = getattr(messages, name)
    return msgspec.convert(sample(msgspec.inspect.type_info(kind), name), kind)


ASKED = {
    "workers": (workers, "WorkersReply", {}), "advise": (advise, "WorkersReply", {"json": False}),
    "ls": (kv_show.blocks, "BlocksReply", {"json": False, "limit": 9, "worker": "", "tenant": "", "order": "hot",
                                           "everything": True}),
    "lineage": (lambda *where, **options: kv_show.lineage("01", *where, **options), "LineageReply", {
        "json": False, "limit": 9, "html": None}),
    "descendants": (lambda *where, **options: kv_show.descendants("01", *where, **options), "DescendantsReply", {
        "json": False, "limit": 9, "html": None}),
    "stats": (kv_show.stats, "StatsReply", {"json": False}),
    "hot": (kv_show.hot, "HotReply", {"json": False, "limit": 9, "blocks": 9, "tenant": "", "model": "", "html": None}),
    "evictions": (kv_show.evictions, "EvictionsReply", {
        "json": False, "since": "1h", "limit": 9, "worker": "", "tenant": "", "why": "", "key": ""}),
    "reuse": (kv_show.reuse, "ReuseReply", {"json": False, "by": "tenant", "since": "1h"}),
    "requests": (kv_show.requests, "RequestsReply", {
        "json": False, "since": "1h", "limit": 9, "tenant": "", "model": "", "outcome": "", "worker": ""}),
    "storage": (kv_show.storage, "StorageReply", {"json": False, "since": "1h", "steps": 9, "worker": ""}),
    "explain": (lambda *args, **options: explain("r", *args, **options), "RequestReply", {"json": False}),
}


@every_width
@pytest.mark.parametrize("name", ASKED)
def test_no_command_cuts_what_it_shows(name: str, width: int, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    command, kind, options = ASKED[name]
    for module in ("workers", "advise", "kv_show", "explain"):
        monkeypatch.setattr(sys.modules[f"services.cli.{module}"], "ask", lambda *_, **__: reply(kind), raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    command(None, None, **options)
    out = capsys.readouterr().out
    assert out.strip() and "…" not in out.replace("… ", "")
    assert all(len(line) <= width for line in out.splitlines())


@every_width
def test_nothing_is_cut_of_the_settings_in_a_service_s_help(width: int, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    moonbus("serve", "gateway", "--help")
    _, _, shown = capsys.readouterr().out.partition("Settings of gateway")
    assert "ttft_slo_s" in shown and "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())


@every_width
def test_nothing_is_cut_of_what_the_demo_compares(width: int) -> None:
    answer = demo.Answer(request="r", text="", ttft_s=0.123, prompt_tokens=1234, cached_tokens=1216, trace="",
                         prefill="prefill-of-a-long-name", decode="decode-of-a-long-name", stages=messages.Stages())
    shown = printed(width, demo._table(answer, answer, answer))
    assert shown.count("123.0 ms") == 3 and "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
