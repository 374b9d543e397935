"""What starts, after what, with which environment."""

from pathlib import Path

import pytest

from services.launcher.plan import Fact, environment, plan_stack, pool_share
from services.launcher.resources import Resources, available_bytes, cpu_quota, memory_limit
from services.launcher.settings import Settings
from shared.settings import load
from shared.worker.settings import WorkerSettings

MACHINE = Resources(cores=8, memory_bytes=16 * 2**30)


def stack(machine: Resources = MACHINE, **values: object):
    units = plan_stack(Settings(**values), machine, python="python")
    return {unit.name: unit for unit in units}


def test_names_and_order() -> None:
    assert list(stack()) == [
        "nats", "postgres", "migrate", "store-manager", "conductor", "prefill-1", "prefill-2",
        "decode-1", "decode-2", "gateway",
    ]


def test_nothing_comes_after_something_unknown_or_later() -> None:
    seen: set[str] = set()
    for name, unit in stack(prefill=3, decode=1).items():
        assert set(unit.after) <= seen, name
        seen.add(name)


def test_workers_do_not_wait_for_postgres() -> None:
    assert stack()["prefill-1"].after == ("nats",)


def test_workers_get_their_id_their_share_of_the_cores_and_of_the_memory() -> None:
    unit = stack()["decode-2"]
    assert unit.env["MOONBUS_DECODE_WORKER_ID"] == "decode-2"
    assert unit.env["MOONBUS_DECODE_NATS_URL"] == Fact("nats", "url")
    assert unit.defaults["MOONBUS_DECODE_THREADS"] == unit.defaults["OMP_NUM_THREADS"] == "2"
    assert unit.defaults["MOONBUS_DECODE_POOL_BYTES"] == str(2**30)


@pytest.mark.parametrize(("own", "expected"), [({}, True), ({"MOONBUS_PREFILL_ELASTIC": "no"}, False)])
def test_workers_are_elastic_unless_a_person_says_otherwise(own: dict[str, str], expected: bool) -> None:
    assert not load(WorkerSettings, "prefill", env=dict(stack()["prefill-1"].defaults)).elastic
    settings = load(WorkerSettings, "prefill", env={**stack(elastic=True)["prefill-1"].defaults, **own}, whole=False)
    assert settings.elastic is expected


@pytest.mark.parametrize("name", ["MOONBUS_TRANSFER_SOCKET_DIR", "MOONBUS_PREFILL_TRANSFER_SOCKET_DIR"])
def test_workers_meet_in_one_directory_unless_a_person_names_another(name: str) -> None:
    unit = next(unit for unit in plan_stack(Settings(), MACHINE, python="python", socket_dir="/ours")
                if unit.name == "prefill-1")
    own = {key: str(value) for key, value in unit.env.items()}
    chosen = {key: str(value) for key, value in unit.defaults.items()}
    for person, expected in (({}, "/ours"), ({name: "/theirs"}, "/theirs")):
        settings = load(WorkerSettings, "prefill", env={**chosen, **person, **own})  # as the supervisor joins them
        assert settings.transfer.socket_dir == expected


def test_a_worker_has_at_least_one_thread() -> None:
    assert stack(Resources(cores=2, memory_bytes=2**30))["prefill-1"].defaults["MOONBUS_PREFILL_THREADS"] == "1"


def test_given_numbers_win() -> None:
    env = stack(threads=3, pool_bytes=123)["prefill-1"].defaults
    assert (env["MOONBUS_PREFILL_THREADS"], env["MOONBUS_PREFILL_POOL_BYTES"]) == ("3", "123")


def test_only_the_store_manager_may_be_missing() -> None:
    assert [name for name, unit in stack().items() if not unit.essential] == ["store-manager"]


def test_workers_of_both_kinds_stop_together() -> None:
    assert [unit.stops_with for name, unit in stack().items() if "-1" in name] == ["workers", "workers"]


def test_pool_share_has_bounds() -> None:
    assert pool_share(2**20, 4) == 256 * 2**20
    assert pool_share(2**50, 4) == 2 * 2**30


def test_environment_is_in_the_services_own_name() -> None:
    assert environment("store-manager", {"admin_port": 0}) == {"MOONBUS_STORE_MANAGER_ADMIN_PORT": "0"}


def test_container_limits(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None and memory_limit(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert cpu_quota(tmp_path) == 1.5
    assert memory_limit(tmp_path) == 600
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cpu_quota(tmp_path) is None and memory_limit(tmp_path) is None


def test_available_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 10 kB\nMemAvailable:     5 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 5 * 1024


def test_stores_only_when_they_are_wanted() -> None:
    assert not any(unit.service == "store" for unit in stack().values())
    units = stack(store=2)
    unit = units["store-2"]
    assert unit.argv[-2:] == ("serve", "store") and unit.env["MOONBUS_STORE_WORKER_ID"] == "store-2"
    assert "MOONBUS_STORE_MODEL" not in unit.env and not unit.essential and unit.stops_with == "workers"
    assert unit.defaults["MOONBUS_STORE_POOL_BYTES"] == units["prefill-1"].defaults["MOONBUS_PREFILL_POOL_BYTES"]
