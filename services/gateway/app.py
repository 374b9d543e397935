"""Puts the gateway together and lets it live."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from services.gateway.http import Api
from services.gateway.settings import Settings
from services.gateway.shell import Gateway
from shared import lifecycle, settings
from shared.bus.bus import Bus
from shared.bus.nats import NatsBus
from shared.clock import SystemClock
from shared.ids import GatewayId, fresh

_log = logging.getLogger(__name__)

KEEPALIVE_S = 65
"""Idle connections stay open this long: longer than the usual minute of load balancers in front."""
DRAIN_SHARE = 0.7
"""Part of ``drain_s`` in which streams may finish; the rest is for telling the others."""


def main(overrides: Mapping[str, Any]) -> int:
    """Runs a gateway until it is told to stop; returns the process's exit code."""
    chosen = settings.load(Settings, "gateway", overrides=overrides)
    chosen.check()
    gateway_id = GatewayId(chosen.gateway_id or fresh("gateway", 4))
    return lifecycle.run("gateway", gateway_id, chosen, lambda life: _live(chosen, gateway_id, life))


async def _live(chosen: Settings, gateway_id: GatewayId, life: lifecycle.Lifecycle) -> None:
    name = f"gateway/{gateway_id}"
    async with NatsBus.connect(chosen.nats_url, name=name, credentials=chosen.nats_credentials,
                               wait_s=chosen.nats_wait_s) as bus:
        async with serve(chosen, bus, gateway_id=gateway_id) as (gateway, url):
            life.ready(url=url)
            await life.stopping.wait()
            gateway.draining = True
            if not await gateway.wait_idle(chosen.drain_s * DRAIN_SHARE):
                gateway.abort("the gateway is shutting down")


@asynccontextmanager
async def serve(chosen: Settings, bus: Bus, *, gateway_id: GatewayId) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway on ``bus`` that answers HTTP at the yielded URL; closes both on the way out."""
    listening = lifecycle.bind(chosen.host, chosen.port, what="port", setting="MOONBUS_GATEWAY_PORT")
    try:
        gateway = Gateway(chosen, bus, SystemClock(), gateway_id=gateway_id)
        try:
            await gateway.start()
            server = _Server(Api(gateway))
            serving = asyncio.create_task(server.serve([listening]), name="http")
            try:
                host, port = listening.getsockname()[:2]
                yield gateway, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            finally:
                gateway.draining = True
                gateway.abort("the gateway is shutting down")
                server.should_exit = True
                await asyncio.wait({serving})
                serving.result()
        finally:
            await gateway.close()
    finally:
        listening.close()


class _Server(lifecycle.HttpServer):
    """Uvicorn without logs of its own: the service has them."""

    def __init__(self, api: Api) -> None:
        super().__init__(uvicorn.Config(
            api, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            timeout_keep_alive=KEEPALIVE_S, timeout_graceful_shutdown=1))
