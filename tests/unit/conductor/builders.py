"""What the conductor's tests say: workers, blocks, requests."""

from __future__ import annotations

import itertools
from typing import Any, Literal

from services.conductor.core.machine import Conductor, Converged, Started
from services.conductor.core.policy import Policy
from shared.ids import BlockKey, ConductorId, GatewayId, HostId, Incarnation, RequestId, WorkerId
from shared.kv import CacheSpec, Tier, block_keys, pack_keys, root_key
from shared.machine import Answered, Asked, Publish, Request
from shared.messages import (
    Endpoint,
    Evicted,
    Hello,
    Load,
    Placed,
    PlaceRequest,
    Profile,
    Progress,
    RequestDone,
    Since,
    Stages,
    Stored,
    StoredBlock,
    SyncEvents,
)
from tests.support.playbook import Playbook

BLOCK_TOKENS = 64
SPEC = CacheSpec(model="toy", weights_digest="w", tokenizer_digest="t", dtype="float32", layers=2, kv_heads=1,
                 head_dim=8, block_tokens=BLOCK_TOKENS, max_context=8192)
OTHER_SPEC = CacheSpec(model="other", weights_digest="w2", tokenizer_digest="t", dtype="float32", layers=2, kv_heads=1,
                       head_dim=8, block_tokens=BLOCK_TOKENS, max_context=8192)
PROFILE = Profile(prefill_fixed_s=0.01, prefill_per_token_s=1e-3, prefill_per_token2_s=0.0, decode_fixed_s=0.02,
                  decode_per_request_s=0.01, decode_per_context_token_s=1e-6, transfer_bytes_per_s=1e8,
                  transfer_fixed_s=0.001)
"""1 ms a token: a block of 64 tokens is 64 ms of computing and 8 KiB, 0.08 ms of transfer."""

_tokens = itertools.count(1)


class Names:
    """Addresses as plain text."""

    rollcall = "rollcall"
    placed = "placed"

    def sync(self, worker: WorkerId) -> str:
        return f"sync {worker}"

    def refuse(self, worker: WorkerId) -> str:
        return f"refuse {worker}"


def conductor(name: str = "c1", *, seed: int = 1, **policy: Any) -> Conductor:
    return Conductor(ConductorId(name), Names(), Policy(**policy), seed=seed)


def hello(worker: str, role: Literal["prefill", "decode", "store"] = "prefill", *, life: int = 1, host: str = "h1",
          spec: CacheSpec = SPEC, profile: Profile = PROFILE, capacity_blocks: int = 1000,
          max_running: int = 8) -> Hello:
    incarnation = life_of(worker, life)
    return Hello(worker=WorkerId(worker), incarnation=incarnation, role=role, spec=spec, profile=profile,
                 endpoint=Endpoint(worker=WorkerId(worker), incarnation=incarnation, host=HostId(host)),
                 capacity_blocks=capacity_blocks, max_running=max_running, started_at_s=float(life))


def life_of(worker: str, life: int = 1) -> Incarnation:
    return Incarnation(f"{worker}-life-{life}")


def load(worker: str, *, kv_seq: int = 0, life: int = 1, role: Literal["prefill", "decode", "store"] = "prefill",
         free_blocks: int = 1000, **fields: Any) -> Load:
    return Load(worker=WorkerId(worker), incarnation=life_of(worker, life), role=role, kv_seq=kv_seq,
                free_blocks=free_blocks, **fields)


def chain(name: str, blocks: int, *, after: tuple[str, int] | None = None) -> list[BlockKey]:
    """Keys of a prompt: ``blocks`` blocks of its own, behind the first blocks of another one."""
    head = [(sum(map(ord, after[0])) * 131 + i) % 50_000 for i in range(after[1] * BLOCK_TOKENS)] if after else []
    tail = [(sum(map(ord, name)) * 131 + i) % 50_000 for i in range(blocks * BLOCK_TOKENS)]
    return block_keys(root_key(SPEC, "tenant"), head + tail, BLOCK_TOKENS)


def stored(worker: str, seq: int, keys: list[BlockKey], *, life: int = 1, spec: CacheSpec = SPEC,
           tier: Tier = Tier.DRAM) -> Stored:
    return Stored(worker=WorkerId(worker), incarnation=life_of(worker, life), seq=seq, spec=spec.digest, at_s=0.0,
                  blocks=[StoredBlock(key=key, parent=key, depth=i, nbytes=1, tier=tier) for i, key in enumerate(keys)])


def evicted(worker: str, seq: int, keys: list[BlockKey], *, life: int = 1, tier: Tier = Tier.DRAM) -> Evicted:
    return Evicted(worker=WorkerId(worker), incarnation=life_of(worker, life), seq=seq, at_s=0.0,
                   keys=pack_keys(keys), tier=tier)


def ask(request: str, keys: list[BlockKey], *, tokens: int | None = None, **fields: Any) -> Asked:
    """Place ``request``, whose prompt is ``keys`` and half a block (unless ``tokens`` says otherwise)."""
    num_tokens = len(keys) * BLOCK_TOKENS + BLOCK_TOKENS // 2 if tokens is None else tokens
    defaults: dict[str, Any] = {"max_tokens": 32, "spec": SPEC.digest, "keys": pack_keys(keys), "model": "toy"}
    return Asked(next(_tokens), PlaceRequest(request=RequestId(request), tenant="tenant", num_tokens=num_tokens,
                                             **{**defaults, **fields}))


def progress(request: str, worker: str, stage: Any, *, attempt: int = 0, prefill_s: float = 0.0, hit_tokens: int = 0,
             num_tokens: int = 0, **fields: Any) -> Progress:
    stages = Stages(prefill_s=prefill_s, hit_tokens=hit_tokens, **fields.pop("stages", {}))
    return Progress(request=RequestId(request), attempt=attempt, worker=WorkerId(worker), stage=stage,
                    hit_tokens=hit_tokens, num_tokens=num_tokens, stages=stages, **fields)


def empty_sync(request: Request) -> Answered:
    """The owner has nothing that was missed."""
    since: Since = request.message
    worker = request.tag.worker
    return Answered(request.tag, SyncEvents(worker=worker, incarnation=since.incarnation, events=[]))


def stage(*hellos: Hello, machine: Conductor | None = None, **policy: Any) -> Playbook:
    """A conductor that knows these workers, all of them empty; announcements to replicas are ignored."""
    play = Playbook(machine or conductor(**policy), ignore=(Converged,))
    play >> Started()
    play.take()
    for one in hellos:
        play >> one
        for effect in play.take():
            assert isinstance(effect, Request)
            play >> empty_sync(effect)
            play.take()
    return play


def answer(play: Playbook, question: Asked) -> Any:
    """Places a request; what came back."""
    play >> question
    reply, *announced = play.take()
    assert reply.token == question.token
    assert all(isinstance(effect, Publish) and isinstance(effect.message, Placed) for effect in announced)
    return reply.message


def done(request: str, completion_tokens: int) -> RequestDone:
    """The gateway says that the answer ended by itself."""
    return RequestDone(request=RequestId(request), gateway=GatewayId("g"), model="toy", spec=SPEC.digest,
                       tenant="tenant", received_at_s=0.0, outcome="ok", completion_tokens=completion_tokens)
