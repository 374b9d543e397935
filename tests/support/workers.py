"""Real prefill and decode workers in the test's own process, and somebody who asks them as a gateway would."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from services.decode.settings import Settings as DecodeSettings
from services.prefill.settings import Settings as PrefillSettings
from services.worker.app import both, shells
from shared.bus.bus import Bus, Delivery
from shared.bus.nats import NatsBus
from shared.bus.subjects import CANCEL, JOB, KV_EVICTED, KV_STORED, TOKENS
from shared.ids import GatewayId, RequestId, WorkerId, fresh
from shared.kv import block_keys, pack_keys, pack_tokens, root_key, unpack_keys, unpack_tokens
from shared.messages import (
    Accepted,
    Cancel,
    DecodeJob,
    Evicted,
    JobFailed,
    PrefillJob,
    Refused,
    Reserved,
    Sampling,
    Source,
    Stages,
    Stored,
    TokenChunk,
)
from shared.worker.jobs import Shell, serving
from shared.worker.runtime import Worker, open_worker


@dataclass
class Answer:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    stages: Stages | None = None
    failure: JobFailed | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def hit_tokens(self) -> int:
        assert self.stages is not None
        return self.stages.hit_tokens


class Asker:
    """Stands where a gateway stands: reserves, dispatches, collects."""

    def __init__(self, bus: Bus, spec_of: Worker) -> None:
        self._bus, self._spec = bus, spec_of.spec
        self.id = GatewayId(fresh("gateway", 3))
        self.answers: dict[RequestId, Answer] = {}
        #: {worker: {number of the event: what it announced}}; events of both kinds may overtake each other
        self._events: dict[str, dict[int, Stored | Evicted]] = {}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Asker]:
        subscriptions = [
            await self._bus.subscribe(TOKENS.at(gateway=self.id), self._on_tokens),
            await self._bus.subscribe(KV_STORED.any(), self._on_event),
            await self._bus.subscribe(KV_EVICTED.any(), self._on_event),
        ]
        yield self
        for subscription in subscriptions:
            await subscription.close()

    def keys(self, tokens: Sequence[int], salt: str = "") -> list[Any]:
        return block_keys(root_key(self._spec, salt), tokens, self._spec.block_tokens)

    async def reserve(self, decode: WorkerId, tokens: Sequence[int], sampling: Sampling, *, request: str = "",
                      salt: str = "", deadline_s: float = 20.0, attempt: int = 0, tbt_slo_s: float | None = None,
                      ) -> tuple[DecodeJob, Reserved | Refused]:
        job = DecodeJob(
            request=RequestId(request or fresh("request", 3)), attempt=attempt, spec=self._spec.digest, gateway=self.id,
            tenant="tests", tokens=pack_tokens(tokens), keys=pack_keys(self.keys(tokens, salt)),
            root=root_key(self._spec, salt), sampling=sampling, deadline_s=deadline_s, prefill=WorkerId("p"),
            tbt_slo_s=tbt_slo_s)
        self.answers[job.request] = Answer()
        return job, await self._bus.request(JOB.at(worker=decode), job, timeout_s=5)

    async def dispatch(self, prefill: WorkerId, decode: WorkerId, job: DecodeJob, reserved: Reserved,
                       sources: Sequence[Source] = (), **changes: Any) -> Accepted | Refused:
        message = PrefillJob(
            request=job.request, attempt=job.attempt, spec=job.spec, gateway=self.id, tenant=job.tenant,
            tokens=job.tokens, keys=job.keys, root=job.root, sampling=job.sampling, sources=list(sources), endpoints=[],
            decode=decode,
            landing=reserved.landing, deadline_s=job.deadline_s)
        reply: Accepted | Refused = await self._bus.request(
            JOB.at(worker=prefill), msgspec.structs.replace(message, **changes), timeout_s=5)
        return reply

    async def ask(self, prefill: Worker, decode: Worker, tokens: Sequence[int], *, max_tokens: int = 8, salt: str = "",
                  sources: Sequence[tuple[Worker, int, int]] = (), timeout_s: float = 20.0, **sampling: Any) -> Answer:
        """The whole road of one request; the answer once it is over (complete or failed)."""
        job, reserved = await self.reserve(decode.id, tokens, Sampling(max_tokens=max_tokens, **sampling), salt=salt)
        assert isinstance(reserved, Reserved), reserved
        plan = [Source(owner=owner.id, incarnation=owner.incarnation, first_block=first, num_blocks=count)
                for owner, first, count in sources]
        accepted = await self.dispatch(prefill.id, decode.id, job, reserved, plan)
        assert isinstance(accepted, Accepted), accepted
        answer = self.answers[job.request]
        await asyncio.wait_for(answer.over.wait(), timeout_s)
        return answer

    async def cancel(self, request: RequestId) -> None:
        await self._bus.publish(CANCEL.at(), Cancel(request=request, reason="test"))

    async def _on_tokens(self, delivery: Delivery) -> None:
        for item in delivery.message.items:
            answer = self.answers.setdefault(item.request, Answer())
            match item:
                case TokenChunk():
                    assert item.first == len(answer.tokens), "tokens came out of order"
                    answer.tokens += unpack_tokens(item.tokens).tolist()
                    answer.stages = item.stages or answer.stages
                    answer.finish = item.finish
                    if item.finish:
                        answer.over.set()
                case JobFailed():
                    answer.failure = item
                    answer.over.set()

    def announced(self, worker: WorkerId) -> set[bytes]:
        """Keys that it has announced as stored and not, later, as evicted."""
        keys: set[bytes] = set()
        for _, event in sorted(self._events.get(worker, {}).items()):
            match event:
                case Stored():
                    keys.update(block.key for block in event.blocks)
                case Evicted():
                    keys.difference_update(unpack_keys(event.keys))
        return keys

    async def _on_event(self, delivery: Delivery) -> None:
        event = delivery.message
        self._events.setdefault(event.worker, {})[event.seq] = event


@dataclass
class Workers:
    """A little cluster without gateway and conductor."""

    prefills: list[Worker]
    decodes: list[Worker]
    #: {worker: the shell of its home role}
    shells: dict[str, Shell]
    #: {elastic worker: its other shell}
    other_shells: dict[str, Shell]
    asker: Asker

    @property
    def p1(self) -> Worker:
        return self.prefills[0]

    @property
    def p2(self) -> Worker:
        return self.prefills[1]

    @property
    def d1(self) -> Worker:
        return self.decodes[0]

    @property
    def everybody(self) -> list[Worker]:
        return [*self.prefills, *self.decodes]


def prompt(length: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(5, 250) for _ in range(length)]


def clean(workers: Workers) -> bool:
    """Nobody holds anything of a request any more."""
    return all(worker.agent.pool.statistics().private == 0 and worker.agent.pool.statistics().pinned == 0
               for worker in workers.everybody)


@asynccontextmanager
async def open_workers(nats_url: str, cache: Path, *, prefills: int = 2, decodes: int = 1,
                       settings: dict[str, dict[str, Any]] | None = None, **common: Any) -> AsyncIterator[Workers]:
    """Workers ``prefill-1 ..`` and ``decode-1 ..`` of ``tiny-random``, on real NATS; ``settings`` by worker id."""
    base = {"nats_url": nats_url, "cache_dir": str(cache), "model": "tiny-random", "threads": 1, "block_tokens": 16,
            "chunk_tokens": 32, "pool_bytes": 4 << 20, **common}
    async with AsyncExitStack() as stack:
        home: dict[str, Shell] = {}
        others: dict[str, Shell] = {}
        opened: dict[str, list[Worker]] = {"prefill": [], "decode": []}
        for role, count in (("prefill", prefills), ("decode", decodes)):
            for n in range(1, count + 1):
                worker_id = f"{role}-{n}"
                values = {**base, "worker_id": worker_id, **(settings or {}).get(worker_id, {})}
                own = PrefillSettings(**values) if role == "prefill" else DecodeSettings(**values)
                worker = await stack.enter_async_context(open_worker(own, "prefill" if role == "prefill" else "decode"))
                made = shells(worker, *both(own))
                await stack.enter_async_context(serving(worker.bus, worker.id, made))
                home[worker_id] = made[0]
                others.update((worker_id, shell) for shell in made[1:])
                opened[role].append(worker)
        bus = await stack.enter_async_context(NatsBus.connect(nats_url, name="asker"))
        asker = await stack.enter_async_context(Asker(bus, opened["decode"][0]).open())
        yield Workers(opened["prefill"], opened["decode"], home, others, asker)
