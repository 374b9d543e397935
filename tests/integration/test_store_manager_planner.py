"""The planner with real store agents on a real NATS: copies, drains, quotas; and leaders that die, stop or stall."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from services.cli import store as cli_store
from services.store_manager.leadership import Leadership
from services.store_manager.planning import PlannerShell
from services.store_manager.settings import Settings
from shared.bus.nats import NatsBus
from shared.bus.subjects import COPIES, DRAIN, PLACED, QUOTA
from shared.catalog.migrate import upgrade_database
from shared.catalog.repository import Catalog
from shared.catalog.session import connect
from shared.clock import SystemClock
from shared.errors import BusError, UserError
from shared.ids import ConductorId, Incarnation, RequestId, WorkerId, fresh
from shared.kv import pack_keys
from shared.messages import (
    CopiesQuery,
    CopiesReply,
    DrainAsk,
    Failure,
    Hello,
    Load,
    Placed,
    Placement,
    QuotaAsk,
    QuotaReply,
    StoredBlock,
)
from shared.settings import CommonSettings
from shared.worker.presence import Presence
from tests.support.agents import Holder, open_holder
from tests.support.blocks import SPEC, make_chain
from tests.support.eventually import eventually
from tests.support.store_managers import Service, Worker, chain, holds, stats, store_manager

FAST: dict[str, Any] = {"plan_s": 0.1, "hot_uses": 2.0, "half_life_s": 60.0, "quota_s": 0.3, "lease_s": 1.0}


@asynccontextmanager
async def open_worker(nats_url: str, name: str, *, blocks: int = 64) -> AsyncIterator[Holder]:
    """A store agent that is present: says hello, and beats on a connection of its own."""
    async with open_holder(nats_url, name, blocks=blocks) as holder:
        hello = Hello(worker=holder.id, incarnation=holder.incarnation, role="prefill", spec=SPEC,
                      endpoint=holder.endpoint, capacity_blocks=blocks, max_running=1, started_at_s=time.time())

        def load() -> Load:
            statistics = holder.agent.pool.statistics()
            return Load(worker=holder.id, incarnation=holder.incarnation, role="prefill", kv_seq=holder.agent.seq,
                        free_blocks=holder.agent.pool.available, cached_blocks=statistics.cached,
                        draining=holder.agent.is_retired)

        async with Presence(holder.bus, CommonSettings(nats_url=nats_url, heartbeat_s=0.1), hello, load).open():
            yield holder


@asynccontextmanager
async def planner(nats_url: str, name: str = "m1", **settings: Any) -> AsyncIterator[PlannerShell]:
    """A planner that leads unless somebody else does."""
    values = Settings(nats_url=nats_url, **{**FAST, **settings})
    clock = SystemClock()
    async with NatsBus.connect(nats_url, name=name) as bus:
        shell = PlannerShell(values, bus, clock, name)
        shell.leadership = Leadership(bus, clock, name, values.lease_s, (shell.driver.feed,))
        async with shell.open():
            leading = asyncio.create_task(shell.leadership.run())
            try:
                yield shell
            finally:
                leading.cancel()
                await asyncio.wait({leading})
                await shell.leadership.give_back()


async def use(bus: NatsBus, blocks: list[StoredBlock], times: int) -> None:
    for _ in range(times):
        placement = Placement(
            request=RequestId(fresh()), attempt=0, conductor=ConductorId("c"), prefill=WorkerId("p"),
            prefill_incarnation=Incarnation("1"), decode=WorkerId("d"), decode_incarnation=Incarnation("1"),
            own_blocks=0, sources=[], hit_tokens=0, predicted_queue_s=0, predicted_transfer_s=0,
            predicted_prefill_s=0, predicted_tbt_s=0)
        await bus.publish(PLACED.at(), Placed(placement=placement, num_tokens=1, max_tokens=1,
                                              keys=pack_keys([block.key for block in blocks])))


def holds_all(holder: Holder, blocks: list[StoredBlock]) -> bool:
    return all(holder.agent.holds(block.key) for block in blocks)


async def test_a_hot_prefix_is_copied_and_the_bytes_are_right(
    nats_url: str, nats_bus: NatsBus, capsys: pytest.CaptureFixture[str],
) -> None:
    hot, cold = make_chain("hot", 6, tenant="acme"), make_chain("cold", 6, tenant="acme")
    async with open_worker(nats_url, "w1") as one, open_worker(nats_url, "w2") as two, planner(nats_url):
        one.put(hot)
        one.put(cold)
        await use(nats_bus, hot, 3)
        await eventually(lambda: holds_all(two, hot), timeout_s=15.0)
        assert two.right([block.key for block in hot]) and not two.agent.holds(cold[0].key)

        async def shown() -> Any:
            reply = await nats_bus.request(COPIES.at(), CopiesQuery(limit=5), timeout_s=5.0)
            return reply if isinstance(reply, CopiesReply) and reply.hot and len(reply.hot[0].holders) == 2 else None

        reply = await eventually(shown)
        assert (reply.hot[0].blocks, reply.leader, reply.blocks, reply.copies) == (6, "m1", 12, 18)
        assert {row.worker: row.made for row in reply.workers} == {"w1": 0, "w2": 6}
        assert reply.decisions[0].what == "replicate"
        await asyncio.to_thread(cli_store.replicas, nats_url, None, limit=5, hot=False)
        shown_text = capsys.readouterr().out
        assert hot[-1].key.hex()[:8] in shown_text and "Latest decisions of m1; m1 leads" in shown_text


async def test_a_drain_empties_a_worker_and_says_so(
    nats_url: str, nats_bus: NatsBus, capsys: pytest.CaptureFixture[str],
) -> None:
    async with open_worker(nats_url, "w1") as one, open_worker(nats_url, "w2") as two, planner(nats_url):
        blocks = [make_chain(name, 10) for name in "abc"]
        for some in blocks:
            one.put(some)
        two.put(blocks[2])
        code = await asyncio.to_thread(cli_store.drain, "w1", nats_url, None, timeout="30s", cancel=False)
        assert code == 0
        assert "w1 is drained: 20 of 20 blocks copied, 10.0 KiB" in capsys.readouterr().out
        assert all(holds_all(two, some) for some in blocks) and two.right([b.key for some in blocks for b in some])
        assert not list(one.agent.blocks()) and one.agent.is_retired
        with pytest.raises(UserError, match=r"there is no worker w9; those alive: w1, w2"):
            await asyncio.to_thread(cli_store.drain, "w9", nats_url, None, timeout="3s", cancel=False)
        reply = await nats_bus.request(DRAIN.at(), DrainAsk(worker="w2", what="look"), timeout_s=5.0)
        assert isinstance(reply, Failure) and "moonbus store drain w2" in reply.message


async def test_a_quota_evicts_only_its_tenant_and_survives_everybody(
    nats_url: str, nats_bus: NatsBus, capsys: pytest.CaptureFixture[str],
) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(open_worker(nats_url, "w1"))
        two = await stack.enter_async_context(open_worker(nats_url, "w2"))
        async with planner(nats_url):
            one.put(make_chain("a", 20, tenant="acme"))
            one.put(make_chain("z", 20, tenant="zeta"))
            two.put(make_chain("b", 10, tenant="acme"))
            reply = await nats_bus.request(
                QUOTA.at(), QuotaAsk(tenant="acme", nbytes=12 * SPEC.block_bytes), timeout_s=5.0)
            assert isinstance(reply, QuotaReply) and reply.quotas[0].quota == 12 * SPEC.block_bytes

            def used(tenant: str) -> int:
                return sum(block.tenant == tenant for holder in (one, two) for block in holder.agent.blocks())

            await eventually(lambda: used("acme") <= 12, timeout_s=15.0)
            assert used("zeta") == 20 and used("acme") > 4
        async with planner(nats_url, "m2"):
            one.put(make_chain("c", 16, tenant="acme"))
            await eventually(lambda: used("acme") <= 12, "another manager reads the same quota", timeout_s=15.0)
            gone = await nats_bus.request(QUOTA.at(), QuotaAsk(tenant="acme", remove=True), timeout_s=5.0)
            assert gone == QuotaReply(quotas=[])
            await asyncio.to_thread(cli_store.quotas, nats_url, None)
            await asyncio.to_thread(cli_store.remove_quota, "acme", nats_url, None)
            assert "acme has no quota: there is nothing to take away\n" in capsys.readouterr().err


# Leaders.

@pytest.fixture
async def migrated_url(postgres_url: str) -> str:
    async with connect(postgres_url) as database:
        await upgrade_database(database)
    return postgres_url


async def test_another_leads_within_five_seconds(nats_url: str, nats_bus: NatsBus, migrated_url: str) -> None:
    """SIGSTOP is the harder death: the connection stays open, and who wakes up still believes to lead."""
    env = {"PLAN_S": "0.1", "HOT_USES": "2"}
    async with (
        open_worker(nats_url, "w1") as one, open_worker(nats_url, "w2") as two,
        store_manager(nats_url, migrated_url, STORE_MANAGER_STORE_MANAGER_ID="m1", **env) as first,
    ):
        await eventually(lambda: _leads(nats_bus, "m1"), timeout_s=10.0)
        async with store_manager(nats_url, migrated_url, STORE_MANAGER_STORE_MANAGER_ID="m2", **env) as second:

            async def ended(service: Service, end: signal.Signals, name: str) -> None:
                one.put(blocks := make_chain(name, 4))
                await use(nats_bus, blocks, 1)
                service.process.send_signal(end)
                began_s = time.monotonic()
                await use(nats_bus, blocks, 2)
                await eventually(lambda: holds_all(two, blocks), timeout_s=10.0)
                took_s = time.monotonic() - began_s
                assert took_s < 5.0, f"{took_s:.1f} s from the leader's end to its successor's work"

            await ended(first, signal.SIGSTOP, "stopped")
            first.process.send_signal(signal.SIGCONT)
            await eventually(lambda: _leads(nats_bus, "m2"))
            await ended(second, signal.SIGKILL, "killed")
            await eventually(lambda: _leads(nats_bus, "m1"))


async def _leads(bus: NatsBus, name: str) -> bool:
    """Whether it leads, by the word of whoever answers."""
    try:
        reply = await bus.request(COPIES.at(), CopiesQuery(limit=0), timeout_s=1.0)
    except BusError:
        return False
    return isinstance(reply, CopiesReply) and reply.leader == name


class BlockedWorker:
    """A worker in a thread of its own whose loop stands still for a while, as one that a library call holds up."""

    def __init__(self, nats_url: str) -> None:
        self._url = nats_url
        self.present, self.block, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._live()))

    async def _live(self) -> None:
        async with NatsBus.connect(self._url, name="b") as bus:
            b = Worker(bus, "b")
            settings = CommonSettings(nats_url=self._url, heartbeat_s=0.1)
            async with b.open(beats=False), Presence(bus, settings, b.hello, b.load).open():
                await b.store(chain("y", 3))
                self.present.set()
                await asyncio.to_thread(self.block.wait, 30.0)
                time.sleep(3.0)  # noqa: ASYNC251  # that is the point
                await asyncio.to_thread(self.ended.wait, 30.0)


async def test_nobody_dies_of_a_blocked_loop_nor_of_our_own_stall(
    nats_url: str, nats_bus: NatsBus, migrated_url: str,
) -> None:
    """Both last at least twice as long as a worker may be silent here (1.5 s)."""
    blocked = BlockedWorker(nats_url)
    blocked.thread.start()
    try:
        async with store_manager(nats_url, migrated_url) as service, Worker(nats_bus, "a").open() as a:
            await a.store(chain("x", 5))
            await eventually(blocked.present.is_set, timeout_s=20.0)
            await eventually(holds(nats_bus, live_replicas=8), timeout_s=20.0)

            async def all_live(seconds: float) -> None:
                ends_s = time.monotonic() + seconds
                while time.monotonic() < ends_s:
                    reply = await stats(nats_bus)
                    assert not isinstance(reply, Failure) and [row.state for row in reply.workers] == ["alive", "alive"]
                    assert reply.live_replicas == 8
                    await asyncio.sleep(0.1)

            blocked.block.set()
            await all_live(3.2)
            service.process.send_signal(signal.SIGSTOP)
            ends_s = time.monotonic() + 4.0
            await eventually(lambda: time.monotonic() > ends_s, timeout_s=20.0)
            service.process.send_signal(signal.SIGCONT)
            await all_live(1.0)  # long enough for a death to be written
            async with connect(migrated_url) as database:
                held = await Catalog(database).known(a.id, a.incarnation, list(range(4096)))
            assert {key for key, _ in held} == set(a.held)
    finally:
        blocked.block.set()
        blocked.ended.set()
        await asyncio.to_thread(blocked.thread.join, 30.0)
