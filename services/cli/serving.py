"""``moonbus serve`` and ``moonbus migrate``: settings from ``--set``, and their reference in the help."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from shared.errors import SettingError, UserError
from shared.messages import Role
from shared.settings import CommonSettings, describe

COMPUTES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}
"""{service: its role}: all and only those that need the engine."""


class ServeCommand(TyperCommand):
    """A command whose help ends with the service's settings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.markup import escape

        from services.cli.output import compact_table, console, name_column

        super().format_help(ctx, formatter)
        service = str(self.name)
        fields = list(describe(settings_type(service), service))
        table = compact_table(name_column("setting", max(len(field.name) for field in fields)),
                              "meaning, variable and default", title=f"Settings of {service}")
        for field in fields:
            several = isinstance(field.default, (list, tuple))
            default = ",".join(map(str, field.default)) if several else str(field.default)
            table.add_row(f"[bold]{field.name}[/]\n[dim]{field.kind}[/]",
                          f"{escape(field.description)}\n[dim]{field.env}={escape(default)}[/]")
        console.print(table)


def settings_type(service: str) -> type[CommonSettings]:
    """The settings class of ``service``."""
    module = importlib.import_module(f"services.{service.replace('-', '_')}.settings")
    found: type[CommonSettings] = module.Settings
    return found


def serve(service: str, sets: Sequence[str]) -> int:
    """Runs the service in this process until it ends; its exit code."""
    overrides = parse_sets(sets, settings_type(service), service)
    role = COMPUTES.get(service)
    if role is not None and importlib.util.find_spec("torch") is None:
        raise UserError(f"{service} needs torch, which is not installed; run: pip install 'moonbus[engine]'")
    if role is not None:
        from services.worker.app import main

        return main(role, overrides)
    module = importlib.import_module(f"services.{service.replace('-', '_')}.app")
    return int(module.main(overrides))


def migrate(sets: Sequence[str], *, pre: bool) -> None:
    """Moves the schema to the newest revision, or to the newest that comes before the code, with the store-manager's
    settings."""
    from services.cli.output import console
    from shared.catalog.migrate import needed, upgrade
    from shared.catalog.settings import CatalogSettings
    from shared.settings import load

    overrides = parse_sets(sets, CatalogSettings, "store-manager")
    settings = load(CatalogSettings, "store-manager", overrides=overrides, whole=False)
    revision = upgrade(settings.postgres_url, needed() if pre else "head")
    console.print(f"the catalog's schema is at revision {revision}", highlight=False)


def parse_sets(sets: Sequence[str], kind: type[CommonSettings], service: str) -> dict[str, str]:
    """``["name=value", ...]`` as a mapping; a name that is no setting is refused with the nearest one."""
    known = [field.name for field in describe(kind, service)]
    values: dict[str, str] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise SettingError("--set", text, "name=value")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; see: moonbus serve {service} --help"
            raise UserError(f"{service} has no setting {name}{hint}")
        values[name] = value
    return values
