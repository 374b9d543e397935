"""A disaggregated cluster: gateway, conductors and nodes, talking the production messages under virtual time.

The gateway here does what the real one does with a request: asks a conductor, gives the jobs to the two workers, places
again (at most three attempts) when one of them is lost. Each message takes ``message_delay_s``; those that conductors
hear of workers can get lost (a fault), and are then repaired as in production: by the gap in their numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from load.sim.cache import NodeCache
from load.sim.decode import DecodeNode, room_tokens
from load.sim.driver import VirtualDriver
from load.sim.loop import Loop
from load.sim.network import Network, Port
from load.sim.node import Life, SharedGpus
from load.sim.outcome import Outcomes
from load.sim.prefill import PrefillNode
from load.sim.profile import NodeProfile
from load.sim.request import Job
from services.conductor.core.machine import Conductor, Started
from services.conductor.core.policies.registry import OURS, make_policy
from services.conductor.core.policy import Policy
from shared import backoff
from shared.errors import UserError
from shared.ids import ConductorId, GatewayId, HostId, Incarnation, WorkerId
from shared.messages import (
    Endpoint,
    Hello,
    Placed,
    Placement,
    PlaceRequest,
    Progress,
    Rejection,
    RequestDone,
    Rollcall,
    Since,
    Source,
)
from shared.order import Order
from shared.store import policies

_MOST_ATTEMPTS = 3
_WAIT_LONGER_S = 1.0
"""What a wait for room is at most longer than predicted."""
_NOTICE_S = 3.0
"""Time until a gateway knows that a worker with one of its requests is gone."""
_PUSH_PATIENCE_S = 30.0
"""Longest time from computed to handed over before the attempt is given up."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What a cluster is like."""

    profile: NodeProfile
    prefill: int
    decode: int
    block_tokens: int
    policy: str = "moonbus"
    admission: str = "none"
    order: Order
    """Of the prefill queues; conductors know it."""
    nic_gbps: float | None = None
    """Each way, per node; the profile's when ``None``."""
    dram_tokens: int | None = None
    """Tokens of KV that a prefill node's DRAM caches; the profile's when ``None``."""
    ssd_tokens: int = 0
    """The same on its SSD."""
    cache_policy: str = policies.DEFAULT
    """What leaves a full cache first."""
    pipeline: int = 1
    """Prefill nodes that work as one, each chunk of a prompt passing through all of them."""
    elastic: bool = False
    """Whether every node can prefill and decode, and has the cache of a prefill node."""
    conductors: int = 1
    message_delay_s: float = 0.0005
    heartbeat_s: float = 2.0
    seed: int = 0
    asks_slo: bool = False
    """Whether requests bring their bounds, so that they can be turned away."""
    rechecks: bool = False
    """Whether a decode node looks at its own step once more when the KV is there, and may turn the request away."""


class Names:
    """Where effects of conductors go."""

    rollcall = "rollcall"
    placed = "placed"

    def sync(self, worker: WorkerId) -> tuple[str, WorkerId]:
        """The worker's log."""
        return "sync", worker

    def refuse(self, worker: WorkerId) -> tuple[str, WorkerId]:
        """A worker that does not fit."""
        return "refuse", worker


class Cluster:
    """See the module."""

    def __init__(self, loop: Loop, options: ClusterOptions, outcomes: Outcomes, *,
                 log: Callable[[float, Any, Any], None] | None = None) -> None:
        check_possible(options)
        self.options, self.loop, self.outcomes = options, loop, outcomes
        self._delay_s = options.message_delay_s
        self._profile = options.profile
        self._spec = options.profile.spec(options.block_tokens)
        self._digest = self._spec.digest
        self._network = Network(loop, latency_s=options.profile.transfer_fixed_s)
        self._rng, self._chance = random.Random(options.seed), random.Random(options.seed)
        self.loss = 0.0
        """Share of what conductors should hear from workers that gets lost."""
        self.ports: dict[str, Port] = {}
        self.prefill: dict[str, PrefillNode] = {}
        self.decode: dict[str, DecodeNode] = {}
        #: {name: what its two sides share}, of elastic nodes, which are in both of the above
        self._gpus: dict[str, SharedGpus] = {}
        self._lives: dict[str, int] = {}
        self._hellos: dict[str, Hello] = {}
        self._dead_busy_s = 0.0
        self.drivers = [self._conductor(i, log if i == 0 else None) for i in range(options.conductors)]
        for i in range(options.prefill // options.pipeline):
            self.start(f"prefill-{i + 1}")
        for i in range(options.decode):
            self.start(f"decode-{i + 1}")
        for driver in self.drivers:
            driver.feed(Started())
        self._asked = 0

    # Running

    def offer(self, jobs: Iterable[Job]) -> None:
        """Requests arrive at their times, which must not go back."""
        self._arrive_next(iter(jobs))

    @property
    def transferred_bytes(self) -> float:
        """Over all links."""
        return sum(port.sent_bytes for port in self.ports.values())

    @property
    def busy_s(self) -> float:
        """GPU time of all prefills."""
        return self._dead_busy_s + sum(node.busy_s for node in self.prefill.values())

    def _arrive_next(self, jobs: Iterator[Job]) -> None:
        job = next(jobs, None)
        if job is not None:
            self.loop.at(job.at_s, self._arrive, job, jobs)

    def _arrive(self, job: Job, jobs: Iterator[Job]) -> None:
        self.place(job)
        self._arrive_next(jobs)

    # Nodes

    def start(self, name: str) -> None:
        """A node comes up, with empty memory."""
        options = self.options
        is_prefill = name.startswith("prefill")
        scale = options.pipeline if is_prefill else 1
        profile = self._profile.grouped(scale)
        nic_gbps = options.nic_gbps and options.nic_gbps * scale
        life = self._lives[name] = self._lives.get(name, 0) + 1
        worker, incarnation = WorkerId(name), Incarnation(f"{name}/{life}")
        dram_tokens = profile.dram_tokens if options.dram_tokens is None else options.dram_tokens * scale
        blocks = dram_tokens // options.block_tokens
        capacity = blocks if is_prefill and not options.elastic else (
            room_tokens(profile, is_shared=options.elastic) // options.block_tokens)
        hello = self._hellos[name] = Hello(
            worker=worker, incarnation=incarnation, role="prefill" if is_prefill else "decode", spec=self._spec,
            endpoint=Endpoint(worker=worker, incarnation=incarnation, host=HostId(name)), capacity_blocks=capacity,
            max_running=1 if is_prefill and not options.elastic else profile.max_running, started_at_s=self.loop.now,
            profile=profile.announced(nic_gbps), elastic=options.elastic)
        port = self.ports[name] = Port(profile.nic_bytes_per_s(nic_gbps))
        self._tell(hello)
        gpus = SharedGpus(self.loop, profile) if options.elastic else None
        log = None
        if is_prefill or options.elastic:
            cache = NodeCache(worker, incarnation, self._digest, dram_blocks=blocks,
                              ssd_blocks=options.ssd_tokens * scale // options.block_tokens,
                              block_bytes=self._spec.block_bytes, block_tokens=options.block_tokens,
                              announce=self._tell, policy=options.cache_policy)
            place = Life(hello, port, delay_s=self._delay_s, role="prefill")
            self.prefill[name] = PrefillNode(place, self.loop, self._network, profile, cache, options.order, self, gpus)
            log = cache.log
        if not is_prefill or options.elastic:
            place = Life(hello, port, delay_s=self._delay_s, role="decode")
            self.decode[name] = DecodeNode(place, self.loop, profile, self._finished, log=log, gpus=gpus)
        if gpus is not None:
            self._gpus[name] = gpus
            gpus.join(self.prefill[name], self.decode[name])
        self.loop.after(options.heartbeat_s * self._rng.random(), self._beat, name, life)

    def crash(self, name: str) -> None:
        """A node is gone: it says nothing any more; gateways notice after a while."""
        lost = []
        if (prefill := self.prefill.pop(name, None)) is not None:
            lost += prefill.die()
            self._dead_busy_s += prefill.busy_s
        if (decode := self.decode.pop(name, None)) is not None:
            lost += decode.die()
        for job in lost:
            self.loop.after(_NOTICE_S, self._lost, job, job.attempt, name)

    def set_loss(self, share: float) -> None:
        """So much of what conductors should hear from workers gets lost from now on."""
        self.loss = share

    def scale_link(self, name: str, scale: float) -> None:
        """The node's card has this share of its rate; 0 cuts it off."""
        self._network.scale(self.ports[name], scale)

    def set_pace(self, name: str, pace: float) -> None:
        """The node computes ``pace`` times as slowly as its profile says."""
        if name in self._gpus:
            self._gpus[name].set_pace(pace)
        elif (node := self.prefill.get(name) or self.decode.get(name)) is not None:
            node.set_pace(pace)

    def _beat(self, name: str, life: int) -> None:
        nodes = [node for node in (self.prefill.get(name), self.decode.get(name)) if node is not None]
        if not nodes or self._lives[name] != life:
            return
        for node in nodes:
            self._tell(node.load())
        self.loop.after(self.options.heartbeat_s, self._beat, name, life)

    # Conductors

    def _conductor(self, number: int, log: Callable[[float, Any, Any], None] | None) -> VirtualDriver:
        options = self.options
        conductor = _conductor_id(number)
        beat_s = options.heartbeat_s
        policy = Policy(suspect_after_s=2.5 * beat_s, dead_after_s=6 * beat_s,
                        max_queue_s=1e9 if not options.asks_slo else 60.0, candidates=8, order=options.order)
        seed = options.seed * 1000 + number
        machine = Conductor(conductor, Names(), policy, seed=seed, placer=make_policy(
            options.policy, options.admission, conductor, policy, seed=seed))
        return VirtualDriver(machine, self.loop, delay_s=self._delay_s, publish=self._published, answer=self._answer,
                             log=log)

    def _published(self, address: Any, message: Any) -> None:
        match message:
            case Rollcall():
                for name, hello in self._hellos.items():
                    if name in self.prefill or name in self.decode:
                        self._tell(hello)
            case Placed():
                for number, driver in enumerate(self.drivers):
                    if _conductor_id(number) != message.placement.conductor:
                        self.loop.after(self._delay_s, driver.feed, message)

    def _answer(self, address: tuple[str, WorkerId], message: Since) -> Any:
        node = self.prefill.get(address[1])
        if node is not None:
            return node.cache.log.since(message, now=self.loop.now)
        decode = self.decode.get(address[1])
        return decode.log.since(message, now=self.loop.now) if decode is not None else None

    def _tell(self, message: Any) -> None:
        """All conductors hear it, unless it gets lost."""
        for driver in self.drivers:
            if not self.loss or self._rng.random() >= self.loss:
                self.loop.after(self._delay_s, driver.feed, message)

    # The gateway

    def place(self, job: Job) -> None:
        """Asks a conductor where ``job`` shall run."""
        objective, waited_s = self.outcomes.objective, self.loop.now - job.to_place_s
        bound_s = objective.ttft_bound_s(job.num_tokens, self._profile) if self.options.asks_slo else None
        ask = PlaceRequest(
            request=job.request, model=self._spec.model, spec=self._digest, tenant="", num_tokens=job.num_tokens,
            keys=b"".join(job.keys), max_tokens=max(job.output_tokens, 1), attempt=job.attempt,
            exclude=[WorkerId(name) for name in job.excluded],
            ttft_slo_s=None if bound_s is None else bound_s - waited_s,
            tbt_slo_s=objective.tbt_s if self.options.asks_slo else None, waited_s=waited_s)
        driver = self.drivers[self._asked % len(self.drivers)]
        self._asked += 1
        self.loop.after(self._delay_s, driver.ask, ask, lambda answer: self._placed(job, answer))

    def _placed(self, job: Job, answer: Placement | Rejection) -> None:
        if isinstance(answer, Rejection) and answer.wait_s > 0:
            longer_s = backoff.delay_s(job.waits, limit_s=_WAIT_LONGER_S, chance=self._chance)
            job.waits += 1
            self.loop.after(min(answer.wait_s + longer_s, answer.spare_s), self.place, job)
            return
        if isinstance(answer, Rejection):
            self._over(job, "rejected", answer.code)
            self.outcomes.reject(job, answer.code, self.loop.now)
            return
        job.placement = answer
        if not job.attempt:
            job.predicted_ttft_s = answer.predicted_ttft_s
        # the decode worker answers with its grant before the prefill job leaves
        self.loop.after(self._delay_s, self._expect, job, job.attempt)
        self.loop.after(3 * self._delay_s, self._hand_out, job, job.attempt)

    def _expect(self, job: Job, attempt: int) -> None:
        assert job.placement is not None
        decode = self.decode.get(job.placement.decode)
        if decode is None:
            self.loop.after(self._delay_s, self._lost, job, attempt, job.placement.decode)
        elif job.attempt == attempt:
            decode.expect(job)

    def _hand_out(self, job: Job, attempt: int) -> None:
        if job.attempt != attempt or job.placement is None:
            return
        prefill = self.prefill.get(job.placement.prefill)
        if prefill is None:
            self.loop.after(self._delay_s, self._lost, job, attempt, job.placement.prefill)
        else:
            prefill.take(job)

    def _lost(self, job: Job, attempt: int, blamed: str) -> None:
        """A worker of this attempt is gone: the tokens so far go with the prompt to another."""
        if job.attempt != attempt or job.finished_s >= 0:
            return
        self.outcomes.wasted_s += job.computed_s
        self._forget(job)
        if job.attempt + 1 >= _MOST_ATTEMPTS:
            self._over(job, "failed", "lost")
            self.outcomes.fail(job, "lost", self.loop.now)
            return
        if job.first_s >= 0:  # the prompt of the next attempt ends with what the client has already
            job.num_tokens += job.generated
            job.output_tokens -= job.generated
            job.paused_s = self.loop.now - _NOTICE_S
        job.attempt += 1
        job.excluded.append(blamed)
        job.to_place_s, job.waits = self.loop.now, 0
        job.renew()
        self.place(job)

    def _forget(self, job: Job) -> None:
        if job.placement is None:
            return
        if (prefill := self.prefill.get(job.placement.prefill)) is not None:
            prefill.drop(job)
        if (decode := self.decode.get(job.placement.decode)) is not None:
            decode.forget(job)

    # What prefill nodes ask for

    def tell(self, progress: Progress) -> None:
        """Conductors hear of a stage."""
        self._tell(progress)

    def owner(self, source: Source) -> PrefillNode | None:
        """Who can push."""
        node = self.prefill.get(source.owner)
        return node if node is not None and node.life.hello.incarnation == source.incarnation else None

    def decode_port(self, job: Job) -> Port | None:
        """Where its KV goes."""
        assert job.placement is not None
        node = self.decode.get(job.placement.decode)
        return node.port if node is not None else None

    def computed(self, job: Job) -> None:
        """A prefill is computed; its KV may still be on its way."""
        self.outcomes.prefilled(job)
        self.loop.after(_PUSH_PATIENCE_S, self._push_is_late, job, job.attempt)

    def _push_is_late(self, job: Job, attempt: int) -> None:
        if job.attempt == attempt and job.first_s < 0 and job.placement is not None and job.finished_s < 0:
            node = self.prefill.get(job.placement.prefill)
            if node is not None and job in node.jobs:
                self._lost(job, attempt, job.placement.decode)

    def handed_over(self, job: Job, attempt: int) -> None:
        """All KV is at the decode node: the first token reaches the client, the rest is decoded."""
        placement = job.placement
        if job.attempt != attempt or placement is None:
            return
        node = self.decode.get(placement.decode)
        if node is None:
            return  # the gateway will notice
        now = self.loop.now
        if (self.options.rechecks and job.first_s < 0 and job.output_tokens > 1
                and node.predicted_step_s(job) > self.outcomes.objective.tbt_s):
            node.forget(job)
            self.outcomes.wasted_s += job.computed_s
            self._tell(node.life.progress(job, "failed"))
            self._over(job, "rejected", "decode")
            self.outcomes.reject(job, "decode", now)
            return
        if job.first_s < 0:
            job.first_s = now
        elif job.paused_s >= 0:
            job.worst_gap_s = max(job.worst_gap_s, now - job.paused_s)
        job.generated = 1
        self._tell(node.life.progress(job, "first_token"))
        if job.output_tokens > 1:
            node.join(job)
        else:
            node.forget(job)
            job.finished_s = now
            self._finished(job)

    def _finished(self, job: Job) -> None:
        assert job.placement is not None
        node = self.decode.get(job.placement.decode)
        if node is not None:
            self._tell(node.finished(job))
        self._over(job, "ok", "")
        self.outcomes.complete(job)

    def _over(self, job: Job, outcome: Any, code: str) -> None:
        """The gateway says how it ended."""
        placement = job.placement
        self._tell_done(RequestDone(
            request=job.request, gateway=GatewayId("gateway"), model=self._spec.model, spec=self._digest, tenant="",
            received_at_s=job.at_s, outcome=outcome, code=code, prompt_tokens=job.num_tokens,
            completion_tokens=job.generated, hit_tokens=job.hit_tokens,
            prefill=placement.prefill if placement else WorkerId(""),
            decode=placement.decode if placement else WorkerId(""), attempts=job.attempt + 1))

    def _tell_done(self, done: RequestDone) -> None:
        for driver in self.drivers:
            self.loop.after(self._delay_s, driver.feed, done)


def _conductor_id(number: int) -> ConductorId:
    return ConductorId(f"conductor-{number + 1}")


def check_possible(options: ClusterOptions) -> None:
    """Raises :class:`UserError`, with the numbers, for a cluster that cannot be."""
    profile = options.profile
    for name, count in (("prefill", options.prefill), ("decode", options.decode), ("conductors", options.conductors)):
        if count < 1:
            raise UserError(f"--{name} is {count}; a cluster needs at least 1")
    if options.pipeline < 1 or options.prefill % options.pipeline:
        raise UserError(f"--pipeline is {options.pipeline}; {options.prefill} prefill nodes cannot be divided into "
                        "groups of that size")
    if options.elastic and options.pipeline > 1:
        raise UserError(f"--elastic with --pipeline {options.pipeline}: nodes that prefill together cannot decode")
    if options.elastic and options.policy != OURS:
        raise UserError(f"--elastic with --policy {options.policy}: only {OURS} gives workers another role than their "
                        "own")
    if profile.vram_tokens < 1:
        usable = profile.vram_bytes * (1 - profile.vram_reserved_share)
        raise UserError(f"profile {profile.name}: the weights take {profile.weights_bytes / 1e9:g} GB and a node has "
                        f"{usable / 1e9:g} GB of accelerator memory for them and KV ({profile.vram_bytes / 1e9:g} GB, "
                        f"{profile.vram_reserved_share:.0%} reserved); nothing is left for KV")
    if options.nic_gbps is not None and not 0 < options.nic_gbps < math.inf:
        raise UserError(f"--nic-gbps is {options.nic_gbps:g}; expected a number above 0")
