"""A node with round numbers, and clusters of it: 1 ms a prompt token, 64 bytes of KV a token, 10 tokens a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from load.sim.cluster import Cluster, ClusterOptions
from load.sim.loop import Loop
from load.sim.outcome import Objective, Outcomes
from load.sim.profile import NodeProfile
from load.sim.request import Job
from load.workload.traces import Arrival, Trace
from shared.ids import BlockKey
from shared.order import FCFS, Order

BLOCK_TOKENS = 10
PROFILE = NodeProfile(
    name="round", source="made up", layers=1, kv_heads=1, head_dim=8, dtype="float32", prefill_fixed_s=0.0,
    prefill_per_token_s=1e-3, prefill_per_token2_s=0.0, reuse_fixed_s=0.0, reuse_per_token_s=0.0, decode_fixed_s=0.02,
    decode_per_request_s=0.01, decode_per_context_token_s=0.0, nic_gbps=8e-6, nic_efficiency=1.0, transfer_fixed_s=0.0,
    push_tail_s=0.0, ssd_bytes_per_s=1e6, vram_bytes=64e3, weights_bytes=0.0, vram_reserved_share=0.0,
    dram_tokens=1000, prefill_chunk_tokens=100, max_running=4)
"""Its card carries 1000 bytes a second, so a block (640 bytes) takes 0.64 s; decode has room for 1000 tokens."""


def quick(**changes: Any) -> NodeProfile:
    """The round node with a card so fast that transfers take no time, and other changes."""
    return msgspec.structs.replace(PROFILE, **{"nic_gbps": 8.0, **changes})


def job(index: int, at_s: float, tokens: int, output: int = 1, *, prompt: str = "") -> Job:
    """A request; prompts of one name share all their blocks, the others none."""
    name = prompt or f"own-{index}"
    keys = [BlockKey(f"{name}/{depth}".encode().ljust(32)[:32]) for depth in range(tokens // BLOCK_TOKENS)]
    return Job(index, at_s, num_tokens=tokens, output_tokens=output, keys=keys, block_tokens=BLOCK_TOKENS)


def run(jobs: list[Job], *, profile: NodeProfile = PROFILE, prefill: int = 1, decode: int = 1,
        order: Order = FCFS, objective: Objective | None = None, **options: Any) -> Cluster:
    """The cluster after all of ``jobs`` are over."""
    loop = Loop()
    outcomes = Outcomes(objective or Objective(ttft_s=1e9, tbt_s=1e9), profile, expected=len(jobs))
    cluster = Cluster(loop, ClusterOptions(**{
        "profile": profile, "prefill": prefill, "decode": decode, "block_tokens": BLOCK_TOKENS,
        "policy": "cache_aware", "order": order, "message_delay_s": 0.0, **options}), outcomes)
    cluster.offer(jobs)
    loop.run(is_over=lambda: outcomes.ended >= len(jobs), until_s=1e6)
    assert outcomes.ended == len(jobs)
    for node in cluster.prefill.values():
        node.cache.check_invariants()
    return cluster


def trace(*arrivals: tuple[float, int, int, tuple[int, ...]], block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Of (seconds, prompt tokens, answer tokens, block ids)."""
    return Trace("made", tuple(Arrival(i, *arrival) for i, arrival in enumerate(arrivals)), block_tokens)


def profile_file(folder: Path, profile: NodeProfile = PROFILE) -> str:
    """A file with ``profile``, for those that read one."""
    folder.mkdir(exist_ok=True)
    path = folder / "profile.json"
    path.write_bytes(msgspec.json.encode(profile))
    return str(path)
