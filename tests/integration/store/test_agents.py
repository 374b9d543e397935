"""Store agents on real NATS: what their SSD keeps, what its faults cost, and what the store-manager asks of them."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.bus.bus import Delivery
from shared.bus.subjects import KV_DIGEST, LOAD, POOL, PUSH, QUOTAS
from shared.errors import SettingError
from shared.ids import OperationId, WorkerId
from shared.kv import Tier, pack_keys
from shared.messages import (
    DigestQuery,
    DigestReply,
    Hello,
    Load,
    Protect,
    Protected,
    Quotas,
    Replicate,
    Replicated,
    Retire,
    Retired,
    StoredBlock,
    TenantQuota,
    Trim,
    Trimmed,
)
from shared.settings import CommonSettings
from shared.store.settings import SsdSettings
from shared.store.ssd.slots import stride_of
from shared.worker.presence import Presence
from tests.support.agents import Holder, open_holder
from tests.support.blocks import SPEC, make_chain
from tests.support.eventually import Eventually
from tests.support.faulty_files import FaultyFiles


def ssd(path: Path, **changes: Any) -> SsdSettings:
    return SsdSettings(**{"dir": str(path), "ahead": 1.0, "bytes": 1 << 20, **changes})


def on_ssd(holder: Holder, blocks: list[StoredBlock]) -> int:
    assert holder.agent.ssd is not None
    return holder.agent.ssd.match([block.key for block in blocks])


def blocks_file(path: Path, holder: Holder) -> Path:
    return path / holder.id / SPEC.digest / "blocks"


async def ask(holder: Holder, message: Any) -> Any:
    return await holder.bus.request(POOL.at(worker=holder.id), message, timeout_s=5.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# --- the tier --------------------------------------------------------------------------------------------------


async def test_what_was_evicted_is_read_back_and_others_get_it(
        nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    first, second = make_chain("a", 6), make_chain("b", 8)
    async with open_holder(nats_url, "w1", blocks=8, ssd=ssd(tmp_path)) as one, open_holder(nats_url, "w2") as two:
        one.put(first)
        await eventually(lambda: on_ssd(one, first) == 6)
        one.put(second)
        assert one.agent.pool.match([block.key for block in first]) == 0
        await eventually(lambda: one.announced == one.held)
        await eventually(lambda: on_ssd(one, second) == 8)
        assert await one.recall(first) == 6
        assert one.agent.pool.match([block.key for block in first]) == 6
        fetched = await two.fetch(one.id, second[:6])
        assert (fetched.blocks, fetched.why) == (6, "")
        await eventually(lambda: one.announced == one.held)
        assert set(one.reasons) == {"capacity"}


async def test_a_push_from_the_disk_needs_no_more_memory_than_there_is(
        nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    """A chain that never fits into the owner's memory as a whole: as much as fits is sent."""
    chain = make_chain("a", 12)
    async with open_holder(nats_url, "w1", blocks=16, ssd=ssd(tmp_path)) as one:
        one.put(chain)
        await eventually(lambda: on_ssd(one, chain) == 12)
    async with open_holder(nats_url, "w1", blocks=8, ssd=ssd(tmp_path)) as one, open_holder(nats_url, "w2") as two:
        fetched = await two.fetch(one.id, chain)
        assert 4 <= fetched.blocks <= 8 and fetched.why


async def test_another_life_tells_what_it_found(nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    first, second = make_chain("a", 6, tenant="acme"), make_chain("b", 3)
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
        one.put(first)
        one.put(second)
        await eventually(lambda: on_ssd(one, first) + on_ssd(one, second) == 9)
        seen = one.held
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one, open_holder(nats_url, "w2") as two:
        assert one.held == {(key, tier) for key, tier in seen if tier is Tier.SSD}
        await eventually(lambda: one.announced == one.held and one.agent.seq > 0)
        assert (await two.fetch(one.id, first)).blocks == 6
        assert await one.recall(second) == 3
        assert {block.tenant for block in one.agent.blocks()} == {"acme", ""}


async def test_a_full_tier_evicts_its_coldest_leaves(nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    async with open_holder(nats_url, "w1", blocks=8, ssd=ssd(tmp_path, blocks=10)) as one:
        assert one.agent.ssd is not None
        chains = [make_chain(str(number), 4) for number in range(6)]
        for chain in chains:
            one.put(chain)
            await eventually(lambda c=chain: on_ssd(one, c) == 4)
            assert one.agent.ssd.pool.statistics().cached <= 10
        await eventually(lambda: one.announced == one.held)
        assert on_ssd(one, chains[0]) == 0 and on_ssd(one, chains[4]) == 4


async def test_an_idle_disk_takes_what_the_pool_has_room_for(
        nats_url: str, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.store.agent._IDLE_S", 0.1)
    chain, other = make_chain("a", 6), make_chain("b", 5)
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path, ahead=0.0, blocks=8)) as one:
        one.put(chain)
        await eventually(lambda: on_ssd(one, chain) == 6)
        one.put(other)
        await eventually(lambda: on_ssd(one, other) == 2, "as many as there is room for")
        assert on_ssd(one, chain) == 6


async def test_an_orderly_end_saves_what_is_in_memory(nats_url: str, tmp_path: Path) -> None:
    first, second = make_chain("a", 6), make_chain("b", 5)
    settings = ssd(tmp_path, ahead=0.0, blocks=8, idle_bytes_per_s=0)
    for chain in (first, second):
        async with open_holder(nats_url, "w1", ssd=settings) as one:
            one.put(chain)
            assert on_ssd(one, chain) == 0
            assert await one.agent.save() == len(chain) and await one.agent.save() == 0
    async with open_holder(nats_url, "w1", ssd=settings) as one:
        assert on_ssd(one, second) == 5 and on_ssd(one, first) == 3, "in the place of the coldest"
    async with open_holder(nats_url, "w2", ssd=ssd(tmp_path, ahead=0.0, blocks=3, idle_bytes_per_s=0)) as one:
        one.put(first)
        assert await one.agent.save() == 3, "no more than the disk holds, or they would push each other out"
        one.agent.retire()
        assert await one.agent.save() == 0


async def test_a_directory_is_one_workers(nats_url: str, tmp_path: Path) -> None:
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)):
        with pytest.raises(SettingError, match="no other process uses"):
            async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)):
                pass
        async with open_holder(nats_url, "w2", ssd=ssd(tmp_path)):
            pass


# --- faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "truncate"])
async def test_a_lost_block_is_the_end_of_the_prefix_and_is_told_at_once(
        nats_url: str, tmp_path: Path, eventually: Eventually, damage: str) -> None:
    chain, other = make_chain("a", 6), make_chain("b", 2)
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
        one.put(chain)
        one.put(other)
        await eventually(lambda: on_ssd(one, chain) + on_ssd(one, other) == 8)
        slot = one.agent.ssd.pool.slot(chain[3].key)  # type: ignore[union-attr]
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
        with blocks_file(tmp_path, one).open("r+b") as file:
            if damage == "flip":
                file.seek(slot * stride_of(SPEC) + 100)
                file.write(b"!")
            else:
                file.truncate(slot * stride_of(SPEC) + 100)
        assert await one.recall(chain) == 3
        assert on_ssd(one, chain) == 3, "the block and what continues it are gone"
        await eventually(lambda: one.announced == one.held)
        assert "corrupt" in one.reasons
        assert await one.recall(chain) == 3
        if damage == "flip":
            assert await one.recall(other) == 2
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
        assert on_ssd(one, chain) == 3


async def test_an_owner_that_sends_nothing_costs_one_wait_and_not_one_a_request(nats_url: str) -> None:
    """Its news say that it has the blocks; nothing that it sends arrives."""
    async with open_holder(nats_url, "w1") as one:
        stuck = asyncio.Event()

        async def never(delivery: Delivery) -> None:
            await stuck.wait()

        sick = await one.bus.serve(PUSH.at(worker="sick"), never)
        waited = await one.fetch(WorkerId("sick"), make_chain("a", 4), timeout_s=1.5)
        assert (waited.blocks, waited.why) == (0, "deadline")
        # it is known: those compute at once; one may try again, where a busy machine took longer than the pause
        crowd = await asyncio.gather(*(
            one.fetch(WorkerId("sick"), make_chain(name, 4), timeout_s=1.5) for name in "bcd"))
        assert {(fetched.blocks, fetched.nbytes) for fetched in crowd} == {(0, 0)}
        assert [fetched.why for fetched in crowd].count("paused") >= 2
        async with open_holder(nats_url, "w2") as well:
            well.put(make_chain("e", 4))
            assert (await one.fetch(well.id, make_chain("e", 4))).blocks == 4
        assert one.agent.pool.statistics().private == 0
        stuck.set()
        await sick.close()


async def test_a_disk_that_cannot_be_read_is_left_alone(
        nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    files, chains = FaultyFiles(), [make_chain(str(number), 3) for number in range(5)]
    async with open_holder(nats_url, "w1", files=files, ssd=ssd(tmp_path, pause_s=0.2)) as one:
        for chain in chains:
            one.put(chain)
        await eventually(lambda: sum(on_ssd(one, chain) for chain in chains) == 15)
        assert one.agent.trim([block.key for chain in chains for block in chain], "test") == 15
        for chain in chains:
            one.put(chain)
        await eventually(lambda: sum(on_ssd(one, chain) for chain in chains) == 15)
        one.agent.announce_evicted(one.agent.pool.drop([block.key for chain in chains for block in chain]), "test")
        files.read_errno = errno.EIO
        assert [await one.recall(chain) for chain in chains] == [0] * 5
        assert one.agent.ssd is not None and one.agent.ssd.pause_left_s() > 0
        await eventually(lambda: one.announced == one.held)
        assert len(one.held) == 6, "three blocks could not be read, then nobody tried any more"
        files.read_errno = 0
        await eventually(lambda: one.agent.ssd.pause_left_s() == 0)  # type: ignore[union-attr]
        assert [await one.recall(chain) for chain in chains[3:]] == [3, 3]


@pytest.mark.parametrize("fault", [{"write_errno": errno.ENOSPC}, {"write_errno": errno.EIO},
                                   {"allocate_errno": errno.ENOSPC}])
async def test_a_disk_that_takes_nothing_costs_only_its_blocks(
        nats_url: str, tmp_path: Path, eventually: Eventually, fault: dict[str, int]) -> None:
    files, chain = FaultyFiles(**fault), make_chain("a", 4)
    async with open_holder(nats_url, "w1", files=files, blocks=8, ssd=ssd(tmp_path)) as one:
        one.put(chain)
        await eventually(lambda: files.failures and one.agent.pool.statistics().pinned == 0)
        one.put(make_chain("b", 8))
        assert on_ssd(one, chain) == 0 and one.agent.pool.statistics().cached == 8
        await eventually(lambda: one.announced == one.held)
        assert await one.recall(make_chain("b", 8)) == 8


async def test_a_disk_that_fails_from_the_start_leaves_a_worker_without_one(
        nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    chain = make_chain("a", 4)
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
        one.put(chain)
        await eventually(lambda: on_ssd(one, chain) == 4)
    async with open_holder(nats_url, "w1", files=FaultyFiles(read_errno=errno.EIO), ssd=ssd(tmp_path)) as one:
        assert one.agent.ssd is None
        one.put(chain)
        await eventually(lambda: one.announced == one.held and len(one.held) == 4)
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
        assert await one.recall(chain) == 4


async def test_an_end_is_not_held_up_by_a_disk(nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    files = FaultyFiles()
    async with asyncio.timeout(60), open_holder(nats_url, "w1", files=files, ssd=ssd(tmp_path)) as one:
        files.gate.clear()
        one.put(make_chain("a", 4))
        await eventually(lambda: files.entered.acquire(blocking=False), "the copy stands still")
    files.gate.set()


async def test_a_disk_that_is_really_full(nats_url: str, small_disk: Path, eventually: Eventually) -> None:
    """What fits is used to the last slot but a few, then blocks replace each other."""
    chains = [make_chain(str(number), 8) for number in range(12)]
    async with open_holder(nats_url, "w1", blocks=16, ssd=ssd(small_disk)) as one:
        assert one.agent.ssd is not None
        for chain in chains:
            one.put(chain)
            await eventually(lambda c=chain: on_ssd(one, c) == 8)
        assert 32 <= one.agent.ssd.ready_slots < 64
        await eventually(lambda: one.announced == one.held)
    async with open_holder(nats_url, "w1", blocks=16, ssd=ssd(small_disk)) as one:
        assert await one.recall(chains[11]) == 8 and await one.recall(chains[0]) == 0


@pytest.mark.parametrize("ahead", [1.0, 0.0])
async def test_a_full_disk_is_left_in_peace_once_it_holds_what_it_can(
        nats_url: str, tmp_path: Path, eventually: Eventually, ahead: float) -> None:
    """Blocks of the same worth would else push each other out for ever."""
    files = FaultyFiles(disk_bytes=10 * 4096)
    chains = [make_chain(str(number), 1) for number in range(20)]
    async with open_holder(nats_url, "w1", blocks=24, files=files, ssd=ssd(tmp_path, ahead=ahead)) as one:
        tier = one.agent.ssd
        assert tier is not None
        for chain in chains:
            one.put(chain)
        if not ahead:
            await one.agent.save()
        await eventually(lambda: 5 <= tier.ready_slots == len(list(tier.blocks())))
        await eventually(lambda: not one.agent._cooled.is_set(), "nothing left to copy")
        written = len(files.log)
        for _ in range(3):
            one.agent.settle()
            await eventually(lambda: not one.agent._cooled.is_set())
        assert tier.capacity == tier.ready_slots and await tier.make_room() == 0 and len(files.log) == written
        files.disk_bytes = 0


async def test_the_end_comes_whatever_the_copying_does(nats_url: str, tmp_path: Path) -> None:
    """In whichever turn of the loop it is told to end."""
    for turns in range(8):
        async with asyncio.timeout(60), open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
            await one.agent.save()
            one.agent._cooled.clear()
            await asyncio.sleep(0.06)  # it has looked, and waits for something to copy
            one.agent.settle()
            for _ in range(turns):
                await asyncio.sleep(0)


async def test_a_real_limit_on_the_files_size(nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    """What fits is used, blocks replace each other beyond it, and nothing fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    chains = [make_chain(str(number), 8) for number in range(4)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        async with open_holder(nats_url, "w1", ssd=ssd(tmp_path, bytes=16 * (4096 + 256))) as one:
            for chain in chains:
                one.put(chain)
            await eventually(lambda: one.announced == one.held and one.agent.seq > 0)
            assert await one.recall(chains[3]) == 8
        async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:  # wants more than the limit lets it have
            for chain in chains:
                one.put(chain)
            await eventually(lambda: one.announced == one.held and one.agent.seq > 0)
            assert await one.recall(chains[3]) == 8
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_disk_that_stalls_holds_nobody_up(nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    """It does not answer: the loop turns, requests do without, memory stays the thread's until it ends."""
    files, chain, more = FaultyFiles(), make_chain("a", 6), make_chain("b", 6)
    async with open_holder(nats_url, "w1", files=files, blocks=12, ssd=ssd(tmp_path, timeout_s=0.2)) as one, \
            open_holder(nats_url, "w2") as two:
        one.put(chain)
        await eventually(lambda: on_ssd(one, chain) == 6)
        one.agent.announce_evicted(one.agent.pool.drop([block.key for block in chain]), "test")
        files.gate.clear()
        async with asyncio.timeout(60):  # neither the loop nor the request, which would have time, waits for the disk
            assert (await two.fetch(one.id, chain, timeout_s=600.0)).blocks == 0
        assert await one.recall(chain) == 0 and one.agent.ssd.pause_left_s() > 0  # type: ignore[union-attr]
        assert one.agent.pool.statistics().private > 0, "a thread may still write there"
        one.put(more)
        await eventually(lambda: one.announced == one.held)
        files.gate.set()
        await eventually(lambda: one.agent.pool.statistics().private == 0)
        assert one.right([block.key for block in more])


async def test_a_disk_without_an_answer_stops_no_heartbeat(
        nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    files = FaultyFiles()
    beats = 0
    async with open_holder(nats_url, "w1", files=files, ssd=ssd(tmp_path, timeout_s=0.2)) as one:
        hello = Hello(worker=one.id, incarnation=one.incarnation, role="store", spec=SPEC, endpoint=one.endpoint,
                      capacity_blocks=32, max_running=1, started_at_s=time.time())

        async def on_load(delivery: Delivery) -> None:
            nonlocal beats
            beats += 1

        listening = await one.bus.subscribe(LOAD.at(worker=one.id), on_load)
        presence = Presence(one.bus, CommonSettings(nats_url=nats_url, heartbeat_s=0.1), hello, lambda: Load(
            worker=one.id, incarnation=one.incarnation, role="store", kv_seq=one.agent.seq))
        async with presence.open():
            await eventually(lambda: beats > 3)
            files.gate.clear()
            one.put(make_chain("a", 6))
            await eventually(lambda: files.entered.acquire(blocking=False), "the copy stands still")
            seen, count = beats, 0
            async with asyncio.timeout(60):
                while beats < seen + 20:
                    one.put(make_chain(str(count := count + 1), 4))
                    await asyncio.sleep(0.05)
            statistics = one.agent.pool.statistics()
            assert statistics.pinned <= 2, "a stalled copy holds a sixteenth of the pool"
            assert one.agent.ssd is not None and one.agent.ssd.pause_left_s() > 0
            files.gate.set()
        await listening.close()
        await eventually(lambda: one.agent.pool.statistics().pinned == 0)
        await eventually(lambda: one.announced == one.held)


async def test_its_digest_is_that_of_both_tiers(nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
        one.put(make_chain("a", 5))
        await eventually(lambda: on_ssd(one, make_chain("a", 5)) == 5 and one.announced == one.held)
        reply = await one.bus.request(KV_DIGEST.at(worker=one.id), DigestQuery(incarnation=one.incarnation),
                                      timeout_s=5.0)
        assert isinstance(reply, DigestReply) and reply.spec == SPEC.digest
        assert {tier.tier for tier in reply.tiers} == {Tier.DRAM, Tier.SSD}


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_at_once_no_byte_is_wrong_and_the_news_are_true(
        nats_url: str, tmp_path: Path, eventually: Eventually, seed: int) -> None:
    """Requests, readers, trims, budgets, rot and faults in any order, over three lives of one directory."""
    chance, files = random.Random(seed), FaultyFiles()
    for life in range(3):
        budgets = life > 0
        async with open_holder(nats_url, "w1", blocks=24, files=files,
                               ssd=ssd(tmp_path, blocks=40, pause_s=0.02)) as one, \
                open_holder(nats_url, "w2", blocks=96) as two:
            async def act(one: Holder = one, two: Holder = two, budgets: bool = budgets) -> None:
                for _ in range(30):
                    chain = make_chain(f"{chance.randrange(12)}", chance.randrange(1, 9),
                                       tenant=chance.choice(["", "acme"]))
                    match chance.randrange(8):
                        case 0 | 1:
                            held = one.agent.pool.match([block.key for block in chain])
                            if one.agent.pool.available >= len(chain) - held:
                                one.put_rest(chain)
                        case 2 | 3:
                            if one.agent.pool.available >= len(chain):
                                await one.recall(chain)
                        case 4:
                            await two.fetch(one.id, chain)
                            two.agent.trim([block.key for block in chain], "test")
                        case 5:
                            one.agent.trim([block.key for block in chain], "trim")
                        case 6:
                            files.read_errno, files.write_errno = chance.choice(
                                [(0, 0), (0, 0), (errno.EIO, 0), (0, errno.EIO), (0, errno.ENOSPC)])
                        case 7:
                            with blocks_file(tmp_path, one).open("r+b") as file:
                                file.seek(chance.randrange(40) * stride_of(SPEC) + 7)
                                file.write(bytes([chance.randrange(256)]))
                    one.agent.set_budgets({"acme": chance.randrange(20) * SPEC.block_bytes} if budgets else {})

            await asyncio.gather(*(act() for _ in range(3)))
            files.read_errno = files.write_errno = 0
            await eventually(lambda: one.agent.pool.statistics().pinned == 0)
            await eventually(lambda: one.announced == one.held, "the news add up to what is held")


# --- orders of the store-manager ---------------------------------------------------------------------------------


async def test_blocks_are_copied_from_another_worker(nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    long, short = make_chain("a", 8), make_chain("b", 3)
    async with open_holder(nats_url, "w1") as one, open_holder(nats_url, "w2", ssd=ssd(tmp_path)) as two:
        one.put(long)
        one.put(short)
        two.put(long[:3])
        await eventually(lambda: on_ssd(two, long) == 3)
        two.agent.announce_evicted(two.agent.pool.drop([block.key for block in long]), "test")  # only on disk now
        reply = await ask(two, Replicate(operation=OperationId("copy"), source=one.id, deadline_s=5.0,
                                         blocks=[*long, *short[1:], *make_chain("nobody", 2)]))
        assert isinstance(reply, Replicated)
        assert (reply.blocks, reply.copied, reply.nbytes) == (8, 5, 5 * SPEC.block_bytes) and reply.why
        assert two.right([block.key for block in long])
        held = {block.key: block for block in two.agent.pool.blocks()}
        assert held[long[7].key].source == one.id and held[long[7].key].origin == "received"
        assert short[1].key not in held, "its parent is not held"
        again = await ask(two, Replicate(operation=OperationId("again"), source=one.id, blocks=long, deadline_s=5.0))
        assert (again.blocks, again.copied, again.why) == (8, 0, "")
        gone = await ask(two, Replicate(operation=OperationId("c"), source=two.id, blocks=short, deadline_s=0.5))
        assert gone.blocks == 0 and gone.why
        assert two.agent.pool.statistics().pinned == two.agent.pool.statistics().private == 0


async def test_trim_and_protect(nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    a, b = make_chain("a", 4), make_chain("b", 4)
    async with open_holder(nats_url, "w1", blocks=8, ssd=ssd(tmp_path, ahead=0.5)) as one:
        one.put(a)
        one.put(b)
        await eventually(lambda: on_ssd(one, a) == 4)
        protect = Protect(keys=pack_keys([block.key for block in a]), ttl_s=60.0)
        assert await ask(one, protect) == Protected(blocks=4)
        one.put(make_chain("c", 4))
        assert one.agent.pool.match([block.key for block in a]) == 4, "the others went first"
        operation = OperationId("reader")
        one.agent.pin(operation, [a[0].key])
        trim = Trim(keys=pack_keys([a[3].key, a[0].key, a[1].key, make_chain("x", 1)[0].key]))
        assert await ask(one, trim) == Trimmed(blocks=1)
        one.agent.release(operation)
        assert await ask(one, Trim(keys=pack_keys([block.key for block in a]))) == Trimmed(blocks=3)
        assert not any(one.agent.holds(block.key) for block in a)
        await eventually(lambda: one.announced == one.held)
        assert "trim" in one.reasons


async def test_a_tenant_over_its_budget_loses_its_own_blocks(
        nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    greedy, modest = make_chain("a", 6, tenant="greedy"), make_chain("b", 4, tenant="modest")
    async with open_holder(nats_url, "w1", blocks=16, ssd=ssd(tmp_path)) as one:
        one.put(modest)
        one.put(greedy)
        await eventually(lambda: on_ssd(one, greedy) + on_ssd(one, modest) == 10)
        budget = TenantQuota(tenant="greedy", nbytes=4 * SPEC.block_bytes)
        await one.bus.publish(QUOTAS.at(worker=one.id), Quotas(worker=one.id, budgets=[budget]))
        await eventually(lambda: len([block for block in one.agent.blocks() if block.tenant == "greedy"]) == 4)
        assert one.agent.pool.match([block.key for block in greedy]) == 4, "what was there twice went from the disk"
        one.put(make_chain("c", 4, tenant="greedy"))
        assert one.agent.pool.match([block.key for block in modest]) == 4
        assert len([block for block in one.agent.blocks() if block.tenant == "greedy"]) == 4
        await eventually(lambda: one.announced == one.held)
        assert "quota" in one.reasons
        await one.bus.publish(QUOTAS.at(worker=one.id), Quotas(worker=one.id, budgets=[]))
        await eventually(lambda: not one.agent._budgets)
        one.put(make_chain("d", 6, tenant="greedy"))
        assert one.agent.pool.tenant_blocks("greedy") == 10


async def test_what_went_from_the_disk_for_a_quota_stays_away(
        nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    greedy, modest = make_chain("a", 6, tenant="greedy"), make_chain("b", 4, tenant="modest")
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
        one.put(modest)
        one.put(greedy)
        await eventually(lambda: on_ssd(one, greedy) + on_ssd(one, modest) == 10)
        one.agent.set_budgets({"greedy": 2 * SPEC.block_bytes})
        assert on_ssd(one, greedy) == 0 and one.agent.pool.tenant_blocks("greedy") == 2
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
        assert one.held == {(block.key, Tier.SSD) for block in modest}, "also before anybody told it of quotas"


async def test_retired_with_the_last_copies_it_serves_on(
        nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    a = make_chain("a", 4)
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one, open_holder(nats_url, "w2") as two:
        one.put(a)
        assert await ask(one, Retire(drop=False)) == Retired(blocks=0)
        one.agent.settle()
        reply = await ask(one, Replicate(operation=OperationId("copy"), source=two.id, blocks=make_chain("b", 2),
                                         deadline_s=5.0))
        assert (reply.blocks, reply.why) == (0, "draining")
        assert (await two.fetch(one.id, a)).blocks == 4
        await eventually(lambda: on_ssd(one, a) == 4, "they survive its end")
        assert await ask(one, Retire()) == Retired(blocks=4) and one.held == set()


async def test_retired_it_drops_what_nobody_uses_and_the_rest_when_it_ends(
        nats_url: str, tmp_path: Path, eventually: Eventually) -> None:
    a, b = make_chain("a", 4), make_chain("b", 3)
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one, open_holder(nats_url, "w2") as two:
        two.put(b)
        one.put(a)
        one.put(b)
        await eventually(lambda: on_ssd(one, a) + on_ssd(one, b) == 7)
        reader = OperationId("reader")
        one.agent.pin(reader, [block.key for block in a])
        assert await ask(one, Retire()) == Retired(blocks=3)
        assert one.agent.is_retired and {key for key, _ in one.held} == {block.key for block in a}
        reply = await ask(one, Replicate(operation=OperationId("copy"), source=two.id, blocks=b, deadline_s=5.0))
        assert (reply.blocks, reply.why) == (0, "draining")
        one.agent.release(reader)
        assert one.held == set()
        await eventually(lambda: one.announced == set())
        assert set(one.reasons) == {"drain"}
    async with open_holder(nats_url, "w1", ssd=ssd(tmp_path)) as one:
        assert one.held == set(), "the disk forgot them too"
