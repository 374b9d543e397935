"""Prefill and decode workers with an SSD: what left their memory, and what an earlier life kept, is read back."""

from __future__ import annotations

from pathlib import Path

from shared.kv import Tier
from shared.store.settings import SsdSettings
from tests.support.eventually import Eventually
from tests.support.workers import open_workers, prompt

BLOCK_BYTES = 8192


async def test_a_prefix_outlives_the_memory_and_the_process(
        nats_url: str, cache: Path, tmp_path: Path, eventually: Eventually) -> None:
    """Pools so small that other prompts push the first one out; then all workers end and come again."""
    ssd = SsdSettings(dir=str(tmp_path), ahead=1.0, timeout_s=20.0)
    first, others = prompt(100, seed=1), [prompt(100, seed=2 + n) for n in range(4)]
    async with open_workers(nats_url, cache, prefills=1, ssd=ssd, pool_bytes=20 * BLOCK_BYTES) as workers:
        p1, d1, asker = workers.p1, workers.d1, workers.asker
        cold = await asker.ask(p1, d1, first)
        keys = asker.keys(first)
        for worker in (p1, d1):
            assert worker.agent.ssd is not None
            await eventually(lambda w=worker: w.agent.ssd.match(keys) == 6, "copied ahead of need")  # type: ignore[union-attr]
        for tokens in others:
            await asker.ask(p1, d1, tokens)
        assert p1.agent.pool.match(keys) < 6, "it was pushed out"
        warm = await asker.ask(p1, d1, first)
        assert warm.hit_tokens == 96 and warm.tokens == cold.tokens
        for worker in workers.everybody:
            worker.agent.pool.check_invariants()
    async with open_workers(nats_url, cache, prefills=1, ssd=ssd, pool_bytes=20 * BLOCK_BYTES) as workers:
        asker, p1 = workers.asker, workers.p1
        assert p1.agent.ssd is not None and p1.agent.ssd.match(keys) == 6
        assert {block.tier for block in p1.agent.blocks()} == {Tier.SSD}
        again = await asker.ask(p1, workers.d1, first)
        assert again.hit_tokens == 96 and again.tokens == cold.tokens
        assert workers.d1.agent.pool.match(keys) == 6
