"""Finding the stack a command shall ask, and asking it."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.bus.nats import NatsBus
from shared.bus.subjects import Address
from shared.errors import NoResponders, RequestTimeout, UserError
from shared.messages import Failure
from shared.settings import CommonSettings, load
from shared.stack_state import StackSettings, find_stack

ASK_S = 5.0
"""Longest wait for an answer."""


def settings(nats_url: str | None, data_dir: str | None) -> StackSettings:
    """Common settings; a ``nats_url`` that nobody set is that of the stack in the data directory."""
    given = {"nats_url": nats_url, "data_dir": data_dir}
    common = load(StackSettings, "cli", overrides={name: value for name, value in given.items() if value})
    if common.nats_url != StackSettings().nats_url:
        return common
    running = find_stack(common.data_path())
    if running is None or not running.nats_url:
        if data_dir:
            raise UserError(f"no stack runs in {common.data_path()}; start one with "
                            f"`moonbus up --data-dir {data_dir}`, or give --nats-url")
        return common
    return load(StackSettings, "cli", overrides={"nats_url": running.nats_url, "data_dir": common.data_dir})


def gateway_url(url: str | None, data_dir: str | None) -> str:
    """The gateway's base URL without a trailing slash: the flag's, or that of the stack in the data directory."""
    if url:
        return url.rstrip("/").removesuffix("/v1")
    common = load(StackSettings, "cli", overrides={"data_dir": data_dir} if data_dir else {})
    running = find_stack(common.data_path())
    if running is None or not running.gateway_url:
        raise UserError(
            f"no stack runs in {common.data_path()}; start one with `moonbus up`, or give --url or --data-dir")
    return running.gateway_url


def ask(common: CommonSettings, address: Address, question: Any, *, who: str) -> Any:
    """Asks ``address`` once; ``who`` is named when nobody answers. A ``Failure`` becomes a :class:`UserError`."""
    return asyncio.run(_ask(common, address, question, who))


async def _ask(common: CommonSettings, address: Address, question: Any, who: str) -> Any:
    async with NatsBus.connect(common.nats_url, name="moonbus cli", credentials=common.nats_credentials) as bus:
        try:
            reply = await bus.request(address, question, timeout_s=ASK_S)
        except (NoResponders, RequestTimeout) as error:
            raise UserError(f"no {who} answers on {common.nats_url} ({error}); is the stack running?") from error
    if isinstance(reply, Failure):
        raise UserError(reply.message)
    return reply
