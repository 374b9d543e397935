"""Settings: where a value comes from, and what a wrong one gets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from shared.errors import SettingError, UnknownSetting
from shared.settings import BYTES, SECONDS, CommonSettings, describe, load


class Settings(CommonSettings, frozen=True, kw_only=True):
    """One of each kind."""

    name: Annotated[str, Meta(description="A word.")] = "word"
    count: Annotated[int, Meta(description="A number.", ge=1)] = 3
    on: Annotated[bool, Meta(description="A switch.")] = False
    size: Annotated[int, Meta(description="A size.", extra=BYTES)] = 1024
    wait_s: Annotated[float, Meta(description="A wait.", gt=0, extra=SECONDS)] = 1.0
    names: Annotated[list[str], Meta(description="Several words.")] = []


def test_defaults() -> None:
    settings = load(Settings, "store-manager", env={})
    assert (settings.name, settings.count, settings.on, settings.size, settings.wait_s) == ("word", 3, False, 1024, 1.0)
    assert settings.nats_url == "nats://127.0.0.1:4222"


def test_a_flag_beats_the_services_variable_beats_the_common_one_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "moonbus.toml"
    file.write_text('name = "top"\ncount = 4\n[store-manager]\nname = "table"\n[gateway]\nname = "other"\n')
    env = {"MOONBUS_CONFIG": str(file)}
    assert load(Settings, "store-manager", env=env).name == "table"
    assert load(Settings, "store-manager", env=env).count == 4
    assert load(Settings, "decode", env=env).name == "top"
    env["MOONBUS_NAME"] = "common"
    assert load(Settings, "store-manager", env=env).name == "common"
    env["MOONBUS_STORE_MANAGER_NAME"] = "own"
    assert load(Settings, "store-manager", env=env).name == "own"
    assert load(Settings, "store-manager", env=env, overrides={"name": "flag"}).name == "flag"
    assert load(Settings, "store-manager", env=env, overrides={"name": None}).name == "own"


def test_values_are_read_as_people_write_them() -> None:
    settings = load(Settings, "x", env={
        "MOONBUS_COUNT": "12", "MOONBUS_ON": "yes", "MOONBUS_SIZE": "2GiB", "MOONBUS_WAIT_S": "250ms",
        "MOONBUS_NAMES": "a, b,,c",
    })
    assert (settings.count, settings.on, settings.size, settings.wait_s) == (12, True, 2 * 2**30, 0.25)
    assert settings.names == ["a", "b", "c"]


@pytest.mark.parametrize(("text", "on"), [("true", True), ("1", True), ("on", True), ("false", False), ("no", False)])
def test_switches(text: str, on: bool) -> None:
    assert load(Settings, "x", env={"MOONBUS_ON": text}).on is on


@pytest.mark.parametrize(("variable", "value"), [
    ("MOONBUS_COUNT", "many"), ("MOONBUS_COUNT", "0"), ("MOONBUS_SIZE", "huge"), ("MOONBUS_WAIT_S", "soon"),
    ("MOONBUS_WAIT_S", "0"), ("MOONBUS_ON", "perhaps"), ("MOONBUS_X_COUNT", "-1"),
])
def test_a_wrong_value_is_one_line_with_name_value_and_what_was_expected(variable: str, value: str) -> None:
    with pytest.raises(SettingError) as wrong:
        load(Settings, "x", env={variable: value})
    line = str(wrong.value)
    assert line.startswith(f"setting {variable} is ") and "; expected " in line and "\n" not in line


def test_a_missing_or_broken_file_is_one_line(tmp_path: Path) -> None:
    for text in (None, "name = ", ):
        file = tmp_path / "moonbus.toml"
        if text is not None:
            file.write_text(text)
        with pytest.raises(SettingError, match=r"setting MOONBUS_CONFIG is .*; expected a readable TOML file"):
            load(Settings, "x", env={"MOONBUS_CONFIG": str(file)})


def test_a_wrong_value_in_the_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "moonbus.toml"
    file.write_text("count = 0\n")
    with pytest.raises(SettingError, match=f"setting count in {file} is 0"):
        load(Settings, "x", env={"MOONBUS_CONFIG": str(file)})


def test_the_reference_has_every_field_in_order() -> None:
    fields = {field.name: field for field in describe(Settings, "store-manager")}
    assert list(fields)[-6:] == ["name", "count", "on", "size", "wait_s", "names"]
    assert fields["size"].env == "MOONBUS_STORE_MANAGER_SIZE"
    assert fields["size"].kind == "int (bytes)"
    assert fields["count"].default == 3
    assert all(field.description for field in fields.values())


def test_a_misspelled_name_stops_the_start_and_says_what_was_meant(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting, match=r"no setting MOONBUS_GATEWAY_CUONT; did you mean MOONBUS_GATEWAY_COUNT\?"):
        load(Settings, "gateway", env={"MOONBUS_GATEWAY_CUONT": "4"})
    file = tmp_path / "moonbus.toml"
    file.write_text("[gateway]\nwait = 3\n[prefill]\nwhatever = 1\n")
    with pytest.raises(UnknownSetting, match=r"gateway has no setting wait; did you mean wait_s\?"):
        load(Settings, "gateway", env={"MOONBUS_CONFIG": str(file)})
    with pytest.raises(UnknownSetting, match=r"`moonbus serve gateway --help` lists"):
        load(Settings, "gateway", env={"MOONBUS_GATEWAY_XYZZY": "4"})


def test_a_part_of_a_services_settings_leaves_the_others_alone() -> None:
    assert load(CommonSettings, "gateway", env={"MOONBUS_GATEWAY_COUNT": "4"}, whole=False).log_level == "info"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a part of a service."""

    lanes: Annotated[int, Meta(description="A number.", ge=1)] = 2
    proof: Annotated[Literal["auto", "on", "off"], Meta(description="A choice.")] = "auto"
    wait_s: Annotated[float, Meta(description="A wait.", gt=0, extra=SECONDS)] = 1.0


class Whole(CommonSettings, frozen=True, kw_only=True):
    """A service with a part."""

    before: Annotated[str, Meta(description="A word.")] = ""
    mover: Part = Part()
    after: Annotated[str, Meta(description="A word.")] = ""


def test_the_settings_of_a_part_are_named_after_it(tmp_path: Path) -> None:
    assert load(Whole, "x", env={}).mover == Part()
    file = tmp_path / "moonbus.toml"
    file.write_text("mover_lanes = 3\n[x]\nmover_wait_s = '2s'\n")
    env = {"MOONBUS_CONFIG": str(file), "MOONBUS_MOVER_LANES": "4", "MOONBUS_X_MOVER_PROOF": "on"}
    assert load(Whole, "x", env=env).mover == Part(lanes=4, proof="on", wait_s=2.0)
    assert load(Whole, "x", env=env, overrides={"mover_lanes": "5"}).mover.lanes == 5
    names = [field.name for field in describe(Whole, "x")]
    assert names[-5:] == ["before", "mover_lanes", "mover_proof", "mover_wait_s", "after"]
    fields = {field.name: field for field in describe(Whole, "x")}
    assert fields["mover_proof"].env == "MOONBUS_X_MOVER_PROOF" and fields["mover_proof"].kind == "auto, on, off"
    assert fields["mover_wait_s"].kind == "float (seconds)" and fields["mover_wait_s"].default == 1.0


@pytest.mark.parametrize(("variable", "value"), [
    ("MOONBUS_MOVER_LANES", "0"), ("MOONBUS_X_MOVER_PROOF", "maybe"), ("MOONBUS_MOVER_WAIT_S", "0s"),
])
def test_a_wrong_value_of_a_part_names_the_whole_setting(variable: str, value: str) -> None:
    with pytest.raises(SettingError, match=f"^setting {variable} is "):
        load(Whole, "x", env={variable: value})


def test_a_misspelled_setting_of_a_part() -> None:
    with pytest.raises(UnknownSetting, match=r"did you mean MOONBUS_X_MOVER_LANES\?"):
        load(Whole, "x", env={"MOONBUS_X_MOVER_LANE": "4"})


@pytest.mark.parametrize("prefix", ["MOONBUS_", "MOONBUS_X_"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_misspelled_name_of_a_part_is_refused_for_all_too(prefix: str, whole: bool) -> None:
    with pytest.raises(UnknownSetting, match=f"no setting {prefix}MOVER_LANE; did you mean {prefix}MOVER_LANES\\?"):
        load(Whole, "x", env={f"{prefix}MOVER_LANE": "4"}, whole=whole)


def test_a_misspelled_name_of_a_part_is_refused_in_the_file_too(tmp_path: Path) -> None:
    file = tmp_path / "moonbus.toml"
    file.write_text("mover_lane = 3\n")
    with pytest.raises(UnknownSetting, match=r"x has no setting mover_lane; did you mean mover_lanes\?"):
        load(Whole, "x", env={"MOONBUS_CONFIG": str(file)})


def test_a_service_without_the_part_does_not_mind_its_settings() -> None:
    assert load(Settings, "x", env={"MOONBUS_MOVER_LANE": "4", "MOONBUS_NAEM": "nobody's"}).count == 3


def test_a_service_does_not_take_the_variables_of_one_with_a_longer_name_for_its_own() -> None:
    env = {"MOONBUS_STORE_MANAGER_BATCH_ROWS": "5", "MOONBUS_STORE_LOG_LEVEL": "debug"}
    assert load(CommonSettings, "store", env=env).log_level == "debug"
    with pytest.raises(UnknownSetting, match="MOONBUS_STORE_LOG_LEVLE"):
        load(CommonSettings, "store", env={"MOONBUS_STORE_LOG_LEVLE": "debug"})
