"""``moonbus store``: what people want of the cluster-wide pool of KV blocks. Any store-manager answers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from services.cli.find import ASK_S, settings
from services.cli.output import compact_table, console, name_column, notes
from services.launcher.lineage import KEY_DIGITS
from shared.bus.nats import NatsBus
from shared.bus.subjects import COPIES, DRAIN, QUOTA, Address
from shared.errors import NoResponders, RequestTimeout, SettingError, UserError
from shared.messages import CopiesQuery, CopiesReply, DrainAsk, DrainReply, Failure, QuotaAsk, QuotaReply
from shared.settings import CommonSettings
from shared.units import format_bytes, format_seconds, parse_bytes, parse_seconds

AGAIN_S = 10.0
"""How long a question is asked again while no store-manager answers: one may just be taking over from another."""
_LOOK_S = 0.25
_UNSEEN = ("have no room in the map of who holds what; raise MOONBUS_STORE_MANAGER_MAP_BLOCKS, _MAP_COPIES or "
           "_MAP_BYTES")
_GRACE_S = 30.0
"""How long after its timeout a drain that has not ended is still waited for."""
_OVER = ("done", "failed", "cancelled")


def drain(worker: str, nats_url: str | None, data_dir: str | None, *, timeout: str, cancel: bool,
          force: bool = False) -> int:
    """Drains ``worker``, showing how far it is, until it is over; the exit code."""
    try:
        timeout_s = parse_seconds(timeout)
    except ValueError as error:
        raise SettingError("--timeout", timeout, f"a duration ({error})") from error
    return asyncio.run(_drain(settings(nats_url, data_dir), worker, timeout_s, cancel, force))


async def _drain(common: CommonSettings, worker: str, timeout_s: float, cancel: bool, force: bool) -> int:
    async with NatsBus.connect(common.nats_url, name="moonbus cli", credentials=common.nats_credentials) as bus:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} blocks"),
                   TextColumn("{task.fields[nbytes]}"))
        ends_s = time.monotonic() + timeout_s + _GRACE_S
        with Progress(*columns, console=notes, transient=True) as progress:
            shown = progress.add_task(f"draining {worker}", total=None, nbytes="")
            reply: DrainReply = await _ask(bus, common, DRAIN.at(), DrainAsk(
                worker=worker, what="cancel" if cancel else "start", timeout_s=timeout_s, force=force))
            while reply.state not in _OVER and time.monotonic() < ends_s:
                what = f"{worker}: {'waiting for a leader' if reply.state == 'waiting' else reply.state}"
                progress.update(shown, description=what, completed=reply.copied + reply.left,
                                total=reply.blocks or None, nbytes=format_bytes(reply.nbytes))
                await asyncio.sleep(_LOOK_S)
                reply = await _ask(bus, common, DRAIN.at(), DrainAsk(worker=worker, what="look"))
    return _ended(reply, cancel)


def _ended(reply: DrainReply, cancel: bool) -> int:
    copied = f"{reply.copied:,} of {reply.blocks:,} blocks copied, {format_bytes(reply.nbytes)}"
    why = f"; {reply.why}" if reply.why else ""
    match reply.state:
        case "done":
            console.print(f"{reply.worker} is drained: {copied}{why}", highlight=False, soft_wrap=True)
            return 1 if reply.left else 0
        case "failed" | "cancelled":
            console.print(f"{reply.worker} is not drained, {reply.state}: {copied}{why}", highlight=False,
                          soft_wrap=True)
            return 0 if cancel and reply.state == "cancelled" else 1
    console.print(f"{reply.worker} is still {reply.state}: {copied}; look again with "
                  f"`moonbus store drain {reply.worker}`", highlight=False, soft_wrap=True)
    return 1


def quotas(nats_url: str | None, data_dir: str | None) -> None:
    """Prints every tenant's quota and use."""
    _show_quotas(asyncio.run(_once(settings(nats_url, data_dir), QUOTA.at(), QuotaAsk())))


def set_quota(tenant: str, size: str, nats_url: str | None, data_dir: str | None) -> None:
    """Gives ``tenant`` a quota."""
    try:
        nbytes = parse_bytes(size)
    except ValueError as error:
        raise SettingError("BYTES", size, f"a size ({error}); "
                           f"`moonbus store quota rm {tenant}` takes a quota away") from error
    _require(tenant)
    _show_quotas(asyncio.run(_once(settings(nats_url, data_dir), QUOTA.at(), QuotaAsk(tenant=tenant, nbytes=nbytes))))


def remove_quota(tenant: str, nats_url: str | None, data_dir: str | None) -> None:
    """Takes the quota of ``tenant`` away; one that has none is told, and nothing else happens."""
    _require(tenant)
    common = settings(nats_url, data_dir)
    reply: QuotaReply = asyncio.run(_once(common, QUOTA.at(), QuotaAsk()))
    if any(row.tenant == tenant for row in reply.quotas):
        reply = asyncio.run(_once(common, QUOTA.at(), QuotaAsk(tenant=tenant, remove=True)))
    else:
        notes.print(f"{tenant} has no quota: there is nothing to take away", markup=False, highlight=False,
                    soft_wrap=True)
    _show_quotas(reply)


def replicas(nats_url: str | None, data_dir: str | None, *, limit: int, hot: bool) -> None:
    """Prints hot prefixes and, unless only those are wanted, workers and the latest decisions."""
    reply: CopiesReply = asyncio.run(_once(settings(nats_url, data_dir), COPIES.at(), CopiesQuery(limit=limit)))
    table = compact_table(name_column("prefix", KEY_DIGITS), "blocks", "tokens", "tenant", "heat", "wanted",
                          "copies on", title=f"Hot prefixes, of {reply.blocks:,} blocks with {reply.copies:,} copies")
    for row in reply.hot:
        holders = "\n".join(f"{holder.worker} ({holder.host[:8]}, {'+'.join(holder.tiers)})" for holder in row.holders)
        table.add_row(row.key.hex()[:KEY_DIGITS], str(row.blocks), f"{row.tokens:,}", escape(row.tenant),
                      f"{row.heat:.1f}", str(row.wanted), holders)
    console.print(table)
    if hot:
        return
    workers = compact_table("worker", "role", "state", "blocks", "size", "made", "share", "left alone for",
                            title="Workers")
    for worker in reply.workers:
        workers.add_row(worker.worker, worker.role, worker.state, f"{worker.blocks:,}", format_bytes(worker.nbytes),
                        f"{worker.made:,}", f"{worker.weight:.0%}",
                        format_seconds(worker.suspended_s) if worker.suspended_s else "")
    console.print(workers)
    decided = compact_table("age", "what", "worker", "blocks", "why",
                            title=f"Latest decisions of {reply.answered_by}; {reply.leader or 'nobody'} leads")
    for decision in reply.decisions:
        decided.add_row(format_seconds(decision.age_s), decision.what, decision.worker, f"{decision.blocks:,}",
                        escape(decision.why))
    console.print(decided)
    if reply.unseen:
        console.print(f"{reply.unseen:,} cold blocks {_UNSEEN}")


def _require(tenant: str) -> None:
    if not tenant:
        raise UserError("a quota needs a tenant's name, got an empty one")


def _show_quotas(reply: QuotaReply) -> None:
    table = compact_table("tenant", "quota", "used", "share", title="Quotas")
    for row in reply.quotas:
        table.add_row(escape(row.tenant), format_bytes(row.quota), format_bytes(row.used),
                      f"{row.used / row.quota:.0%}" if row.quota else "")
    console.print(table if reply.quotas else "no tenant has a quota")
    if reply.quotas and reply.unseen:
        console.print(f"used is without {reply.unseen:,} blocks that {_UNSEEN}")


async def _once(common: CommonSettings, address: Address, question: Any) -> Any:
    async with NatsBus.connect(common.nats_url, name="moonbus cli", credentials=common.nats_credentials) as bus:
        return await _ask(bus, common, address, question)


async def _ask(bus: NatsBus, common: CommonSettings, address: Address, question: Any) -> Any:
    """The answer, asked for again while no store-manager answers."""
    ends_s = time.monotonic() + AGAIN_S
    while True:
        try:
            reply = await bus.request(address, question, timeout_s=ASK_S)
        except (NoResponders, RequestTimeout) as error:
            if time.monotonic() > ends_s:
                raise UserError(
                    f"no store-manager answers on {common.nats_url} ({error}); is the stack running?") from error
            await asyncio.sleep(_LOOK_S)
            continue
        if isinstance(reply, Failure):
            raise UserError(reply.message)
        return reply
