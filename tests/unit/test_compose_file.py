"""docker-compose.yml: valid by the compose specification, and consistent with the code it starts."""

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from services.cli.serving import settings_type
from shared.settings import describe, load

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
SERVING = ("gateway", "conductor", "prefill", "decode", "store-manager")
OPTIONAL = ("store",)
"""Services of ours that a profile of their name adds."""
every_serving = pytest.mark.parametrize("name", SERVING + OPTIONAL)


def interpolate(text: str) -> str:
    """What compose makes of ``${NAME:-default}`` when NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def passed(name: str) -> dict[str, str]:
    """The environment of a service when nothing is set outside: what is listed without a value stays unset."""
    return {key: interpolate(value) for key, value in SERVICES[name]["environment"].items() if value is not None}


def test_valid_by_the_specification() -> None:
    vendored = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(vendored.read_text())
    jsonschema.validators.validator_for(schema)(schema).validate(COMPOSE)


def test_the_five_services_are_there_with_two_workers_of_each_kind() -> None:
    assert set(SERVING) < set(SERVICES)
    assert SERVICES["prefill"]["deploy"]["replicas"] == SERVICES["decode"]["deploy"]["replicas"] == 2


@every_serving
def test_each_setting_it_passes_exists_and_is_well_formed(name: str) -> None:
    kind = settings_type(name)
    own = f"MOONBUS_{name.upper().replace('-', '_')}_"
    known = {field.name for field in describe(kind, name)}
    for key in SERVICES[name]["environment"]:
        assert key.removeprefix(own if key.startswith(own) else "MOONBUS_").lower() in known, key
    settings = load(kind, name, env=passed(name))
    assert settings.nats_url == "nats://nats:4222"


@every_serving
def test_each_service_has_a_health_check_and_waits_for_the_bus(name: str) -> None:
    service = SERVICES[name]
    assert "/ready" in service["healthcheck"]["test"][-1]
    assert service["depends_on"]["nats"]["condition"] == "service_healthy"


def test_a_store_comes_when_wanted_and_keeps_its_blocks_in_a_volume_of_its_own() -> None:
    for name in OPTIONAL:
        assert SERVICES[name]["profiles"] == [name]
    environment, mounts = SERVICES["store"]["environment"], dict(
        mount.split(":") for mount in SERVICES["store"]["volumes"])
    assert mounts["ssd"] == environment["MOONBUS_SSD_DIR"] and environment["MOONBUS_WORKER_ID"]
    assert all("ssd" not in str(service.get("volumes")) for name, service in SERVICES.items() if name != "store")
    made = re.search(r"mkdir (.*) \\$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert made is not None and set(mounts.values()) <= set(made[1].split()), "or they would belong to root"


def test_what_is_waited_for_exists_and_can_become_what_is_waited_for() -> None:
    for name, service in SERVICES.items():
        waits = service.get("depends_on", {})
        for other, how in (waits.items() if isinstance(waits, dict) else ((each, {}) for each in waits)):
            assert other in SERVICES, f"{name} waits for {other}"
            if how.get("condition") == "service_healthy":
                assert not SERVICES[other]["healthcheck"].get("disable"), f"{name} waits for the health of {other}"
            if how.get("condition") == "service_completed_successfully":
                assert SERVICES[other]["restart"] == "no", f"{name} waits for the end of {other}"


def test_ports_are_published_on_loopback_only() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_our_containers_have_no_rights_to_lose() -> None:
    for name, service in OURS.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "user" not in service, f"{name} runs as the image's unprivileged user"
    assert re.search(r"^USER moonbus$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)


def test_the_images_are_targets_of_the_dockerfile() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert {service["build"]["target"] for service in OURS.values()} <= targets


def test_mounted_files_and_volumes_exist() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in COMPOSE["volumes"], mount


def test_nats_takes_messages_as_large_as_the_embedded_one() -> None:
    from services.launcher.embedded import NATS_MAX_PAYLOAD

    assert f"max_payload: {NATS_MAX_PAYLOAD}\n" in COMPOSE["configs"]["nats"]["content"]


def test_prometheus_scrapes_everybody_who_has_metrics() -> None:
    (job,) = yaml.safe_load((ROOT / "shared/telemetry/observability/prometheus.yaml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    ports = {name: int(service["environment"]["MOONBUS_ADMIN_PORT"]) for name, service in OURS.items()
             if "MOONBUS_ADMIN_PORT" in service["environment"]}
    assert set(found["names"]) == set(ports) == {*SERVING, *OPTIONAL}
    assert set(ports.values()) == {found["port"]}


def test_what_an_operator_chooses_comes_from_outside() -> None:
    """Who places, who is turned away and what is promised; an empty value would not be an unset one."""
    for name, chosen in (("conductor", {"placement", "admission", "ttft_slo_s", "tbt_slo_s", "max_queue_s"}),
                         ("gateway", {"api_keys", "priorities"})):
        prefix = f"MOONBUS_{name.upper()}_"
        listed = {key.removeprefix(prefix).lower() for key, value in SERVICES[name]["environment"].items()
                  if key.startswith(prefix) and value is None}
        assert chosen <= listed <= {field.name for field in describe(settings_type(name), name)}
