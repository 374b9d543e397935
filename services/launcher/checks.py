"""The settings of every service that a stack would start, looked at before anything is started.

A process would find the same and say the same, but after NATS, Postgres and others are up, and in its log.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from typing import cast

import msgspec

from services.conductor.settings import Settings as ConductorSettings
from services.gateway.settings import Settings as GatewaySettings
from services.launcher.plan import Fact, Unit, plan_stack
from services.launcher.resources import measure
from services.launcher.settings import Settings
from services.store.settings import Settings as StoreSettings
from shared.errors import SettingError, UserError
from shared.messages import Role
from shared.settings import CommonSettings, load
from shared.store.settings import SsdSettings
from shared.telemetry.logs import LEVELS
from shared.worker.runtime import check, named
from shared.worker.settings import StoreSettings as KeeperSettings


def wrong_settings(settings: Settings, environ: Mapping[str, str] | None = None) -> list[UserError]:
    """What the services of this stack would refuse, each line once, in the order of the plan.

    ``environ``: the launcher's own environment; that of this process unless given.
    """
    units = plan_stack(settings, measure(), python="")
    return list({str(error): error for error in _refusals(units, os.environ if environ is None else environ)}.values())


def _refusals(units: Iterable[Unit], environ: Mapping[str, str]) -> Iterable[UserError]:
    for unit in units:
        if unit.kind != "service":
            continue
        given = {**unit.defaults, **environ, **unit.env}  # as its process would have it, but for what nobody knows yet
        try:
            _check(unit.service, {name: value for name, value in given.items() if not isinstance(value, Fact)})
        except UserError as error:
            yield error


def _check(service: str, env: Mapping[str, str]) -> None:
    kind: type[CommonSettings] = importlib.import_module(f"services.{service.replace('-', '_')}.settings").Settings
    settings = load(kind, service, env=env)
    if settings.log_level not in LEVELS:
        raise SettingError("log_level", settings.log_level, " or ".join(LEVELS))
    if isinstance(settings, (ConductorSettings, GatewaySettings)):
        settings.check()
    if isinstance(settings, KeeperSettings):
        named(settings, cast("Role", service))
        check(msgspec.structs.replace(settings, ssd=SsdSettings()))  # without a directory, which it would make
    if isinstance(settings, StoreSettings):
        settings.opaque_specs()
