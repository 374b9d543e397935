"""The command line's words: help, wrong input, what happens to errors."""

import re
from pathlib import Path

import pytest

from services import cli
from services.cli.serving import parse_sets
from services.gateway.settings import Settings as GatewaySettings
from shared.errors import NoResponders, SettingError, UserError
from tests.support.command import moonbus

COMMANDS = (
    "up", "demo", "serve", "serve gateway", "serve conductor", "serve prefill", "serve decode",
    "serve store", "serve store-manager", "migrate", "chat", "load", "load run", "load cache-sim",
    "load bench-store", "kv", "kv lineage", "kv ls", "kv stats",
    "kv descendants", "kv hot", "kv evictions", "kv reuse", "kv requests", "kv request", "kv storage", "workers",
    "explain", "advise",
    "store", "store drain", "store replicas", "store quota", "store quota ls", "store quota set", "store quota rm",
    "doctor", "models", "models pull", "models ls", "docs",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert moonbus(*command.split(), "--help") == 0
    said = capsys.readouterr().out
    assert "Usage: moonbus" in said
    assert "Example" in said


def test_the_help_of_a_service_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    moonbus("serve", "prefill", "--help")
    said = capsys.readouterr().out
    assert "chunk_tokens" in said and "MOONBUS_PREFILL_CHUNK_TOKENS" in said


def test_defaults_in_the_help_of_up_are_those_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    moonbus("up", "--help")
    said = re.sub(r"\s+", " ", capsys.readouterr().out.replace("│", " "))
    assert "smollm2-135m]" in said and "[default: 8000]" in said


@pytest.mark.parametrize(("wrong", "line"), [
    ("worker", "No such command 'worker'. Did you mean 'workers'?; see: moonbus --help"),
    ("kv ls --limits 3", "No such option: --limits"),
    ("kv lineage", "Missing argument"),
    ("load bench-catalog --minutes x", "Invalid value for '--minutes'"),
    ("sim run", "Missing option '--trace'"),
])
def test_a_command_line_that_is_wrong_is_one_line(wrong: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert moonbus(*wrong.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"moonbus: {line}") and said.count("\n") == 1
    assert "; see: moonbus" in said


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert moonbus("kv") == 2
    said = capsys.readouterr()
    assert "lineage" in said.out + said.err


def test_a_user_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert moonbus("serve", "gateway", "--set", "prot=9") == 1
    assert capsys.readouterr().err == "moonbus: gateway has no setting prot; did you mean port?\n"


def test_a_wrong_value_names_setting_value_and_expectation(capsys: pytest.CaptureFixture[str]) -> None:
    assert moonbus("up", "--pool-bytes", "much") == 1
    said = capsys.readouterr().err
    assert said.startswith("moonbus: setting pool_bytes is 'much'; expected") and said.count("\n") == 1


def test_a_bus_without_answer_is_one_line(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nobody(**_: object) -> None:
        raise NoResponders("mb.v1.conductor.workers")

    monkeypatch.setattr(cli, "app", nobody)
    assert moonbus() == 1
    assert capsys.readouterr().err == (
        "moonbus: nobody answers on mb.v1.conductor.workers; is the stack running?\n")


def test_a_bug_says_so_and_keeps_its_trace(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(**_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(cli, "app", broken)
    assert moonbus() == 1
    said = capsys.readouterr().err
    assert said.startswith("moonbus: this is a bug: ZeroDivisionError: oops") and said.count("\n") == 1
    found = re.search(r"stack trace: (\S+)\)", said)
    assert found is not None
    path = Path(found.group(1))
    assert "in broken" in path.read_text()
    path.unlink()


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str, cache: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("services.cli.models.pull", interrupted)
    assert moonbus("models", "pull", "x") == 130


def test_sets_are_names_and_values() -> None:
    assert parse_sets(["port=9", "nats-url=nats://a=b"], GatewaySettings, "gateway") == {
        "port": "9", "nats_url": "nats://a=b"}
    with pytest.raises(SettingError, match="name=value"):
        parse_sets(["port"], GatewaySettings, "gateway")
    with pytest.raises(UserError, match="see: moonbus serve gateway --help"):
        parse_sets(["zzzzzz=1"], GatewaySettings, "gateway")
