"""Dashboards draw only metrics that exist, under labels they have."""

import json
import re
from pathlib import Path

import pytest
import yaml

import shared.telemetry
from shared.telemetry import metrics

FOLDER = Path(shared.telemetry.__file__).parent
DASHBOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
SCRAPED_LABELS = {"le", "service", "instance", "job"}
"""What Prometheus itself adds, beside histogram bounds."""


def declared() -> dict[str, set[str]]:
    """{exposed name of a sample: its labels}"""
    names: dict[str, set[str]] = {}
    for family in vars(metrics).values():
        labels = set(getattr(family, "_labelnames", ()))
        kind, name = getattr(family, "_type", ""), getattr(family, "_name", "")
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}.get(kind, ())
        names.update({name + suffix: labels for suffix in suffixes})
    return names


def expressions(path: Path) -> list[str]:
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_there_is_a_dashboard_with_panels() -> None:
    assert DASHBOARDS
    assert all(expressions(path) for path in DASHBOARDS)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_draws_declared_metrics(path: Path) -> None:
    known = declared()
    for expression in expressions(path):
        names = re.findall(r"\bmoonbus_\w+", expression)
        assert names, expression
        labels = set[str]().union(*(known[name] for name in names))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            asked = {label.strip() for label in group.split(",")}
            assert asked <= labels | SCRAPED_LABELS, expression


@pytest.mark.parametrize("path", sorted((FOLDER / "observability").glob("*.yaml")), ids=lambda path: path.stem)
def test_provisioning_is_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_dashboards_refer_to_the_provisioned_data_source() -> None:
    sources = yaml.safe_load((FOLDER / "observability" / "grafana-datasources.yaml").read_text())["datasources"]
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        asked = {panel["datasource"]["uid"] for panel in panels if "datasource" in panel}
        assert asked <= {source["uid"] for source in sources}
