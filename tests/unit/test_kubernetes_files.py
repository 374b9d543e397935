"""deploy/kubernetes: what a cluster would refuse, what docker-compose.yml says otherwise, what the code does not have.

There is no cluster here: fields are compared with those that these kinds have, not with an API server.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from services.cli.serving import settings_type
from services.gateway.http import _ALWAYS
from services.launcher.embedded import NATS_MAX_PAYLOAD
from shared.lifecycle import END_S, Lifecycle, _AdminServer
from shared.settings import CommonSettings, describe, load
from shared.units import parse_bytes
from tests.unit.test_compose_file import COMPOSE, SERVICES, interpolate, passed

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((BASE / "kustomization.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = [
    one for name in KUSTOMIZATION["resources"] for one in yaml.safe_load_all((BASE / name).read_text())]
KINDS = {"Namespace": "v1", "Service": "v1", "StatefulSet": "apps/v1", "Deployment": "apps/v1", "Job": "batch/v1",
         "PodDisruptionBudget": "policy/v1"}
FIELDS = {
    "Service": {"selector", "ports", "clusterIP"},
    "StatefulSet": {"serviceName", "replicas", "selector", "template", "podManagementPolicy", "volumeClaimTemplates"},
    "Deployment": {"replicas", "selector", "template"},
    "Job": {"backoffLimit", "ttlSecondsAfterFinished", "template"},
    "PodDisruptionBudget": {"minAvailable", "selector"},
}
POD_FIELDS = {"automountServiceAccountToken", "enableServiceLinks", "terminationGracePeriodSeconds", "securityContext",
              "initContainers", "containers", "volumes", "restartPolicy", "topologySpreadConstraints"}
CONTAINER_FIELDS = {"name", "image", "imagePullPolicy", "command", "args", "env", "envFrom", "ports", "lifecycle",
                    "startupProbe", "readinessProbe", "livenessProbe", "resources", "securityContext", "volumeMounts"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
PROBE_FIELDS = {"httpGet", "exec", "tcpSocket", "periodSeconds", "timeoutSeconds", "failureThreshold"}
WORKLOADS = {one["metadata"]["name"]: one for one in MANIFESTS if "template" in one.get("spec", ())}
BUDGETS = {one["metadata"]["name"]: one for one in MANIFESTS if one["kind"] == "PodDisruptionBudget"}
DOORS = {one["metadata"]["name"]: one for one in MANIFESTS if one["kind"] == "Service"}
SERVING = ("gateway", "conductor", "store-manager", "prefill", "decode", "store")
OURS = (*SERVING, "migrate")
KNOWN_HERE = {"POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD"}
"""Variables that are not ours."""
every_workload = pytest.mark.parametrize("name", WORKLOADS)
every_serving = pytest.mark.parametrize("name", SERVING)


def variables(file: str) -> dict[str, str]:
    """An env file as kustomize reads it."""
    lines = [line for line in (BASE / file).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def generated(kind: str) -> dict[str, dict[str, str]]:
    """{name: its data} of what kustomize makes of files."""
    made = {}
    for one in KUSTOMIZATION[kind]:
        data: dict[str, str] = {}
        for file in one.get("envs", ()):
            data |= variables(file)
        for pair in one.get("files", ()):
            key, _, file = pair.partition("=")
            data[key] = (BASE / file).read_text()
        made[one["name"]] = data
    return made


CONFIGS, SECRETS = generated("configMapGenerator"), generated("secretGenerator")


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = WORKLOADS[name]["spec"]["template"]["spec"]
    return found


def containers(name: str) -> list[dict[str, Any]]:
    return [*pod(name).get("initContainers", ()), *pod(name)["containers"]]


def main(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    found: dict[str, Any] = only
    return found


def environment(container: dict[str, Any], name: str) -> dict[str, str]:
    """What the process would see; the pod is the first of its name."""
    seen: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        seen |= CONFIGS[source["configMapRef"]["name"]]
    for one in container.get("env", ()):
        match one:
            case {"value": value}:
                seen[one["name"]] = re.sub(r"\$\((\w+)\)", lambda found: seen[found[1]], value)
            case {"valueFrom": {"secretKeyRef": ref}}:
                seen[one["name"]] = SECRETS[ref["name"]][ref["key"]]
            case {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}:
                seen[one["name"]] = f"{name}-0"
            case _:
                raise AssertionError(one)
    return seen


def settings_of(name: str) -> CommonSettings:
    return load(settings_type(name), name, env=environment(main(name), name))


def test_every_file_is_used_and_nothing_is_there_twice() -> None:
    used = {*KUSTOMIZATION["resources"], "kustomization.yaml", "settings.env", "secrets.env", "nats.conf"}
    assert used == {path.name for path in BASE.iterdir()}
    names = [(one["kind"], one["metadata"]["name"]) for one in MANIFESTS]
    assert len(set(names)) == len(names)
    assert ("Namespace", KUSTOMIZATION["namespace"]) in names


def test_kinds_and_fields_are_those_that_there_are() -> None:
    for one in MANIFESTS:
        assert one["apiVersion"] == KINDS[one["kind"]]
        assert set(one) - {"spec"} == {"apiVersion", "kind", "metadata"}
        assert set(one.get("spec", ())) <= FIELDS.get(one["kind"], set()), one["metadata"]["name"]
    for name in WORKLOADS:
        assert set(pod(name)) <= POD_FIELDS, name
        for container in containers(name):
            assert set(container) <= CONTAINER_FIELDS, name
            for probe in (container[kind] for kind in PROBES if kind in container):
                assert set(probe) <= PROBE_FIELDS and len(set(probe) & {"httpGet", "exec", "tcpSocket"}) == 1


@every_workload
def test_a_workload_finds_its_own_pods(name: str) -> None:
    spec = WORKLOADS[name]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/name": name}
    if WORKLOADS[name]["kind"] != "Job":
        assert spec["selector"]["matchLabels"] == labels
    if WORKLOADS[name]["kind"] == "StatefulSet":
        assert DOORS[spec["serviceName"]]["spec"]["selector"] == labels
    else:
        assert pod(name).get("restartPolicy", "Always") == ("OnFailure" if name == "migrate" else "Always")


def test_the_same_services_as_in_the_compose_file() -> None:
    """Whoever runs a cluster has collectors of metrics and traces; models come with each pod that needs them."""
    composed = {name for name, service in SERVICES.items() if service.get("profiles") != ["observability"]}
    assert set(WORKLOADS) | {container["name"] for name in WORKLOADS for container in containers(name)} == composed
    assert {name for name in OURS if "volumes" in SERVICES[name] and "models" in str(SERVICES[name]["volumes"])} \
        == {name for name in OURS if "initContainers" in pod(name)}


def test_one_place_says_how_many_there_are() -> None:
    """A number in the other files too would be one to change in vain."""
    counts = {one["name"]: one["count"] for one in KUSTOMIZATION["replicas"]}
    assert set(counts) == set(SERVING)
    assert all("replicas" not in WORKLOADS[name]["spec"] for name in counts)
    assert counts["prefill"] == SERVICES["prefill"]["deploy"]["replicas"]
    assert counts["decode"] == SERVICES["decode"]["deploy"]["replicas"]
    assert counts["store"] == 0 and SERVICES["store"]["profiles"] == ["store"], "it comes when wanted"


def test_neither_a_node_that_dies_nor_one_that_is_drained_takes_all_that_answer_requests() -> None:
    assert set(BUDGETS) == {"gateway", "conductor"}
    counts = {one["name"]: one["count"] for one in KUSTOMIZATION["replicas"]}
    for name, budget in BUDGETS.items():
        labels = WORKLOADS[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"] == labels
        assert budget["spec"]["minAvailable"] < counts[name], "or no node could ever be drained"
        (spread,) = pod(name)["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == labels and spread["topologyKey"] == "kubernetes.io/hostname"
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway", "one node is enough to try it"


def test_postgres_has_room_for_what_its_processes_share() -> None:
    words = " ".join(main("postgres")["args"])
    most = parse_bytes(re.search(r"maintenance_work_mem=(\d+)MB", words)[1] + "MiB")  # type: ignore[index]
    (shared,) = [one["emptyDir"] for one in pod("postgres")["volumes"] if one["name"] == "shm"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in main("postgres")["volumeMounts"] and shared["medium"] == "Memory"
    assert parse_bytes(shared["sizeLimit"] + "B") >= 2 * most
    assert parse_bytes(SERVICES["postgres"]["shm_size"].replace("mb", "MiB")) == parse_bytes(shared["sizeLimit"] + "B")


@every_workload
def test_images_and_commands_are_those_of_the_compose_file(name: str) -> None:
    for container in containers(name):
        service = SERVICES[container["name"]]
        assert container["image"] == service["image"]
        command = [*container.get("command", ()), *container.get("args", ())]
        theirs = service["command"]
        env = environment(container, name)
        assert [re.sub(r"\$\((\w+)\)", lambda found, env=env: env[found[1]], word) for word in command] \
            == [interpolate(word) for word in (theirs.split() if isinstance(theirs, str) else theirs)]


@every_serving
def test_settings_exist_and_are_those_of_the_compose_file(name: str) -> None:
    kind = settings_type(name)
    known = {field.name for field in describe(kind, name)}
    own = f"MOONBUS_{name.upper().replace('-', '_')}_"
    for key in environment(main(name), name).keys() - CONFIGS["moonbus"].keys() - KNOWN_HERE:
        assert key.removeprefix(own if key.startswith(own) else "MOONBUS_").lower() in known, key
    here = settings_of(name)
    there = load(kind, name, env=passed(name))
    if hasattr(here, "worker_id"):
        here, there = (msgspec.structs.replace(one, worker_id="") for one in (here, there))
    assert here == there


def test_every_common_setting_is_one_of_some_service() -> None:
    known = {service: {field.name for field in describe(settings_type(service), service)} for service in SERVING}
    for key in CONFIGS["moonbus"]:
        name = key.removeprefix("MOONBUS_").lower()
        assert any(name in names or name.removeprefix(f"{service.replace('-', '_')}_") in names
                   for service, names in known.items()), key


def test_the_schema_is_made_where_the_store_manager_looks_for_it() -> None:
    migrate, manager = (environment(main(name), name) for name in ("migrate", "store-manager"))
    assert migrate["MOONBUS_POSTGRES_URL"] == manager["MOONBUS_POSTGRES_URL"] \
        == interpolate(SERVICES["migrate"]["environment"]["MOONBUS_POSTGRES_URL"])


def test_nats_and_postgres_are_those_of_the_compose_file() -> None:
    ours, theirs = CONFIGS["nats"]["moonbus.conf"], COMPOSE["configs"]["nats"]["content"]
    assert ours == theirs.replace("127.0.0.1:8222", "0.0.0.0:8222") and f"max_payload: {NATS_MAX_PAYLOAD}\n" in ours
    assert environment(main("postgres"), "postgres") == {
        key: interpolate(value) for key, value in SERVICES["postgres"]["environment"].items()}
    assert main("postgres")["readinessProbe"]["exec"]["command"] == SERVICES["postgres"]["healthcheck"]["test"][1:]


@every_workload
def test_ports_and_paths_are_there(name: str) -> None:
    ports = {port["name"]: port["containerPort"] for port in main(name).get("ports", ())}
    for probe in (main(name)[kind] for kind in PROBES if kind in main(name)):
        match probe:
            case {"httpGet": {"port": "admin" as port, "path": path}}:
                assert _AdminServer(Lifecycle(name, name, ""))._answer(path)[0] != 404
            case {"httpGet": {"port": "api" as port, "path": path}}:
                assert path in _ALWAYS, "it answers while it drains, and needs no key"
            case {"httpGet": {"port": "monitor" as port, "path": path}}:
                assert path in SERVICES["nats"]["healthcheck"]["test"][-1]
            case {"tcpSocket": {"port": port}}:
                pass
            case {"exec": _}:
                continue
        assert port in ports
    if name in SERVING:
        assert ports["admin"] == settings_of(name).admin_port
        assert set(PROBES) <= set(main(name))
    if name == "gateway":
        assert ports["api"] == settings_of(name).port  # type: ignore[attr-defined]
    if name in DOORS:
        for port in DOORS[name]["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]]


def test_names_in_urls_are_services() -> None:
    seen = {key: value for name in WORKLOADS for key, value in environment(main(name), name).items()}
    for url in ("MOONBUS_NATS_URL", "MOONBUS_POSTGRES_URL"):
        host, port = re.search(r"(?:@|//)([a-z]+):(\d+)(?:/|$)", seen[url]).groups()  # type: ignore[union-attr]
        assert int(port) in [port["port"] for port in DOORS[host]["spec"]["ports"]]


@every_serving
def test_a_pod_waits_for_nats_and_is_not_killed_for_it(name: str) -> None:
    """``/health`` answers meanwhile; a worker is given until it is ready, with its model loaded after the wait."""
    assert settings_of(name).nats_wait_s >= 60.0
    probe = main(name)["startupProbe"]
    if probe["httpGet"]["path"] == "/ready":
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 2 * settings_of(name).nats_wait_s
    assert main(name)["livenessProbe"]["httpGet"]["path"] == "/health"


@every_serving
def test_there_is_time_to_drain(name: str) -> None:
    before = main(name).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert pod(name)["terminationGracePeriodSeconds"] >= int(before[1]) + settings_of(name).drain_s + END_S


@every_workload
def test_containers_have_no_rights_to_lose_and_no_surprises(name: str) -> None:
    context = pod(name)["securityContext"]
    uid = re.search(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert uid is not None and context["runAsNonRoot"] is True
    if name in OURS:
        assert context["runAsUser"] == context["fsGroup"] == int(uid[1])
    assert pod(name)["enableServiceLinks"] is False, "or MOONBUS_… could come from the names of Services"
    assert pod(name)["automountServiceAccountToken"] is False
    for container in containers(name):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert "memory" in container["resources"]["limits"] and "cpu" in container["resources"]["requests"]


@every_workload
def test_what_is_mounted_is_there(name: str) -> None:
    claims = [one["metadata"]["name"] for one in WORKLOADS[name]["spec"].get("volumeClaimTemplates", ())]
    volumes = [*claims, *(one["name"] for one in pod(name).get("volumes", ()))]
    mounts = [mount for container in containers(name) for mount in container.get("volumeMounts", ())]
    assert {mount["name"] for mount in mounts} == set(volumes) and len(set(volumes)) == len(volumes)
    for volume in pod(name).get("volumes", ()):
        assert volume.get("configMap", {"name": "nats"})["name"] in CONFIGS
    if name in OURS:
        made = re.search(r"mkdir (.*) \\$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        assert made is not None and {mount["mountPath"] for mount in mounts} <= set(made[1].split())


@pytest.mark.parametrize("name", ["prefill", "decode", "store"])
def test_pools_fit_into_what_the_pods_get(name: str) -> None:
    settings: Any = settings_of(name)
    assert parse_bytes(main(name)["resources"]["limits"]["memory"] + "B") > 1.5 * settings.pool_bytes
    assert parse_bytes(main(name)["resources"]["requests"]["memory"] + "B") > settings.pool_bytes
    assert re.fullmatch(r"[a-z]+-0", settings.worker_id), "it stays when the pod is made anew"
    if name == "store":
        (claim,) = WORKLOADS[name]["spec"]["volumeClaimTemplates"]
        assert parse_bytes(claim["spec"]["resources"]["requests"]["storage"] + "B") > settings.ssd.bytes
