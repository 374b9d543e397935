"""Puts a conductor together."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from services.conductor.core.machine import Conductor
from services.conductor.core.policies.registry import OURS, make_policy
from services.conductor.settings import Settings
from services.conductor.shell import ConductorShell, Subjects
from shared.bus.nats import NatsBus
from shared.clock import SystemClock
from shared.ids import ConductorId, fresh
from shared.lifecycle import Lifecycle, run
from shared.settings import load


def main(overrides: Mapping[str, Any]) -> int:
    """Runs a conductor until it is told to stop; the exit code."""
    settings = load(Settings, "conductor", overrides=overrides)
    conductor = ConductorId(settings.conductor_id or fresh("conductor", 4))

    async def body(lifecycle: Lifecycle) -> None:
        seed = settings.seed if settings.seed >= 0 else secrets.randbits(32)
        policy = settings.policy()
        placer = make_policy(settings.placement, settings.admission, conductor, policy, seed=seed)
        machine = Conductor(conductor, Subjects(), policy, seed=seed, placer=placer,
                            published="" if settings.placement == OURS else settings.placement)
        async with NatsBus.connect(settings.nats_url, name=conductor, credentials=settings.nats_credentials,
                                   wait_s=settings.nats_wait_s) as bus:
            async with ConductorShell(machine, bus, SystemClock()).open():
                lifecycle.ready()
                await lifecycle.stopping.wait()

    return run("conductor", conductor, settings, body)
